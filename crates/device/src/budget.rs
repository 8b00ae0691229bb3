use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

use plimsoll_core::{Component, ComponentBytes, Meters, Oom, RefusedBy};

use crate::Supply;

/// An account of device memory. Clones share it.
///
/// The account holds this process's charges, what other processes took of the total at the last look, and, for tests, faults. It
/// only counts; [`Slab`](crate::Slab) is what counts and allocates.
#[derive(Clone, Debug)]
pub struct Budget(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    account: Mutex<Account>,
    /// Where the total is only promised: who gives it.
    supply: Option<Arc<dyn Supply>>,
}

#[derive(Debug)]
struct Account {
    total: u64,
    /// Never charge beyond this, although `total` is reported: a device that promises more than it has.
    cap: u64,
    peers: u64,
    by_component: ComponentBytes,
    reserved: u64,
    reserved_high: u64,
    allocations: u64,
    /// Value of `allocations` at which one charge fails.
    fault_at: Option<u64>,
    /// Steps until one finds no memory; 0 for none.
    steps_to_fault: u64,
}

impl Budget {
    /// An empty account of `total` bytes that are this process's own.
    pub fn new(total: u64) -> Self {
        Self::with(total, None)
    }

    /// An empty account of `total` bytes of a device that others use too. What `supply` can no longer give of them counts
    /// as theirs.
    pub fn shared(total: u64, supply: Arc<dyn Supply>) -> Self {
        Self::with(total, Some(supply))
    }

    /// Empty accounts of equal parts of such a device, which this process uses side by side: what it lacks is missing to each alike.
    pub fn divided(total: u64, parts: usize, supply: Arc<dyn Supply>) -> Vec<Self> {
        let divided = Arc::new(Divided {
            supply,
            parts: OnceLock::new(),
        });
        let share = total / parts as u64;
        let budgets = (0..parts).map(|part| {
            let divided = Arc::clone(&divided);
            Self::shared(share, Arc::new(Part { part, divided }))
        });
        let budgets: Vec<_> = budgets.collect();
        let inner = budgets.iter().map(|budget| Arc::downgrade(&budget.0));
        let _ = divided.parts.set(inner.collect());
        budgets
    }

    fn with(total: u64, supply: Option<Arc<dyn Supply>>) -> Self {
        let account = Mutex::new(Account {
            total,
            cap: u64::MAX,
            peers: 0,
            by_component: ComponentBytes::default(),
            reserved: 0,
            reserved_high: 0,
            allocations: 0,
            fault_at: None,
            steps_to_fault: 0,
        });
        Self(Arc::new(Inner { account, supply }))
    }

    /// Takes `bytes` until the charge is dropped. Every call counts as one allocation, failed ones too. Asks the supply
    /// first: nothing is charged while serving.
    ///
    /// # Errors
    /// [`Oom`] if fewer than `bytes` bytes are free, or a fault was injected here.
    pub fn charge(&self, component: Component, bytes: u64) -> Result<Charge, Oom> {
        self.look();
        let mut account = self.lock();
        account.allocations += 1;
        let faulty = account.fault_at == Some(account.allocations);
        let room = account
            .total
            .min(account.cap)
            .saturating_sub(account.peers)
            .saturating_sub(account.reserved);
        if faulty || bytes > room {
            return Err(account.oom(component, bytes));
        }
        account.take(component, bytes);
        drop(account);
        Ok(Charge {
            budget: self.clone(),
            component,
            bytes,
        })
    }

    /// As [`Self::charge`], for bytes that are gone already: it never fails, and is no allocation.
    pub fn record(&self, component: Component, bytes: u64) -> Charge {
        self.lock().take(component, bytes);
        Charge {
            budget: self.clone(),
            component,
            bytes,
        }
    }

    /// The error that a request for `bytes` bytes deserves now.
    pub fn oom(&self, component: Component, bytes: u64) -> Oom {
        self.lock().oom(component, bytes)
    }

    /// Reads the meters, other processes as of the last look. A charge is used as long as it is reserved, so the two are the
    /// same here.
    pub fn meters(&self) -> Meters {
        self.lock().meters()
    }

    /// Sets the high-water marks to what is in use now.
    pub fn reset_high_water(&self) {
        let mut account = self.lock();
        account.reserved_high = account.reserved;
    }

    /// Asks the supply how much is left, and counts what is missing from the total as other processes'. Reads files of the
    /// operating system: not for the step path.
    pub fn look(&self) {
        let Some(supply) = &self.0.supply else {
            return;
        };
        let reserved = self.lock().reserved;
        // If the supply does not know, the last answer stands.
        if let Some(left) = supply.left(reserved) {
            let mut account = self.lock();
            account.peers = account.total.saturating_sub(reserved).saturating_sub(left);
        }
    }

    /// Fault injection: the `n`-th charge from now (1 is the next) fails, once. 0 takes a planned fault back.
    pub fn fail_allocation(&self, n: u64) {
        let mut account = self.lock();
        account.fault_at = (n > 0).then(|| account.allocations + n);
    }

    /// A step begins. Nothing is taken: what steps need was taken with their state. Fails only where that was planned.
    ///
    /// # Errors
    /// [`Oom`] of a fault injected here.
    pub fn begin_step(&self) -> Result<(), Oom> {
        let mut account = self.lock();
        match account.steps_to_fault {
            0 => return Ok(()),
            steps => account.steps_to_fault = steps - 1,
        }
        match account.steps_to_fault {
            0 => Err(account.oom(Component::Arena, account.meters().free + 1)),
            _ => Ok(()),
        }
    }

    /// Fault injection: the `n`-th step from now (1 is the next) finds no memory, once. 0 takes a planned fault back.
    pub fn fail_step(&self, n: u64) {
        self.lock().steps_to_fault = n;
    }

    /// Fault injection: nothing can be charged beyond `bytes`, whatever the capacity; `None` lifts the cap.
    pub fn set_cap(&self, bytes: Option<u64>) {
        self.lock().cap = bytes.unwrap_or(u64::MAX);
    }

    fn lock(&self) -> MutexGuard<'_, Account> {
        // Every critical section leaves the account whole, so a panic elsewhere does not spoil it.
        self.0.account.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What gives memory to several accounts.
#[derive(Debug)]
struct Divided {
    supply: Arc<dyn Supply>,
    parts: OnceLock<Vec<Weak<Inner>>>,
}

/// The part that one account has of it.
#[derive(Debug)]
struct Part {
    part: usize,
    divided: Arc<Divided>,
}

impl Supply for Part {
    fn left(&self, _: u64) -> Option<u64> {
        let parts = self.divided.parts.get()?.iter();
        let parts = parts.map(|part| {
            let part = part.upgrade()?;
            let account = part.account.lock().unwrap_or_else(PoisonError::into_inner);
            Some((account.total, account.reserved))
        });
        let parts = parts.collect::<Option<Vec<_>>>()?;
        let reserved = parts.iter().map(|(_, reserved)| reserved).sum();
        let left = self.divided.supply.left(reserved)?;
        let promised: u64 = parts
            .iter()
            .map(|(total, reserved)| total.saturating_sub(*reserved))
            .sum();
        let missing = promised.saturating_sub(left).div_ceil(parts.len() as u64);
        let (total, reserved) = parts.get(self.part)?;
        Some(total.saturating_sub(*reserved).saturating_sub(missing))
    }
}

impl Account {
    fn take(&mut self, component: Component, bytes: u64) {
        self.reserved += bytes;
        self.reserved_high = self.reserved_high.max(self.reserved);
        *self.by_component.get_mut(component) += bytes;
    }

    fn meters(&self) -> Meters {
        Meters {
            total: self.total,
            free: self
                .total
                .saturating_sub(self.reserved)
                .saturating_sub(self.peers),
            used: self.reserved,
            reserved: self.reserved,
            used_high: self.reserved_high,
            reserved_high: self.reserved_high,
            by_component: self.by_component,
            allocations: self.allocations,
        }
    }

    fn oom(&self, component: Component, requested: u64) -> Oom {
        Oom {
            requested,
            component,
            refused_by: RefusedBy::Device,
            meters: Box::new(self.meters()),
        }
    }
}

/// Bytes taken from a [`Budget`], given back on drop.
#[derive(Debug)]
#[must_use = "a dropped charge is given back at once"]
pub struct Charge {
    budget: Budget,
    component: Component,
    bytes: u64,
}

impl Charge {
    /// Bytes taken.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// What they are for.
    pub fn component(&self) -> Component {
        self.component
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        let mut account = self.budget.lock();
        account.reserved -= self.bytes;
        *account.by_component.get_mut(self.component) -= self.bytes;
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use rand::rngs::StdRng;
    use rand::{Rng, SeedableRng};

    use super::*;

    #[test]
    fn meters_follow_charges() {
        let budget = Budget::new(100);
        let weights = budget.charge(Component::Weights, 40).unwrap();
        let kv = budget.charge(Component::Kv, 50).unwrap();
        drop(kv);
        let meters = budget.meters();
        assert_eq!(
            (meters.total, meters.free, meters.used, meters.reserved),
            (100, 60, 40, 40)
        );
        assert_eq!(
            (meters.used_high, meters.reserved_high, meters.allocations),
            (90, 90, 2)
        );
        assert_eq!(meters.by_component.get(Component::Weights), 40);
        assert_eq!(meters.by_component.get(Component::Kv), 0);
        budget.reset_high_water();
        assert_eq!(budget.meters().reserved_high, 40);
        assert_eq!((weights.bytes(), weights.component()), (40, Component::Weights));
    }

    #[test]
    fn a_full_budget_refuses_and_says_so() {
        let budget = Budget::new(100);
        let _held = budget.charge(Component::Weights, 60).unwrap();
        let oom = budget.charge(Component::Kv, 41).unwrap_err();
        assert_eq!(
            (oom.requested, oom.component, oom.meters.free),
            (41, Component::Kv, 40)
        );
        assert!(budget.charge(Component::Kv, u64::MAX).is_err());
        let exact = budget.charge(Component::Kv, 40).unwrap();
        assert_eq!(budget.meters().free, 0);
        assert!(budget.charge(Component::Kv, 0).is_ok());
        drop(exact);
    }

    #[test]
    fn what_is_gone_is_recorded_even_beyond_the_total() {
        let budget = Budget::new(100);
        let gone = budget.record(Component::Runtime, 120);
        let meters = budget.meters();
        assert_eq!((meters.reserved, meters.free, meters.allocations), (120, 0, 0));
        assert!(budget.charge(Component::Kv, 1).is_err());
        drop(gone);
        assert_eq!(
            (budget.meters().reserved, budget.meters().reserved_high),
            (0, 120)
        );
    }

    /// A machine with so many bytes left for this process; 0: it does not say.
    #[derive(Debug, Default)]
    struct Shared(AtomicU64);

    impl Supply for Shared {
        fn left(&self, reserved: u64) -> Option<u64> {
            let machine = self.0.load(Ordering::Relaxed);
            (machine > 0).then(|| machine.saturating_sub(reserved))
        }
    }

    #[test]
    fn parts_of_a_machine_lack_the_same() {
        let machine = Arc::new(Shared::default());
        machine.0.store(300, Ordering::Relaxed);
        let parts = Budget::divided(300, 3, machine.clone());
        let held = parts[1].charge(Component::Weights, 40).unwrap();
        let seen = || {
            let meters = parts.iter().map(|part| {
                part.look();
                let meters = part.meters();
                (meters.free, meters.reserved, meters.peers())
            });
            meters.collect::<Vec<_>>()
        };
        assert_eq!(seen(), [(100, 0, 0), (60, 40, 0), (100, 0, 0)]);
        machine.0.store(240, Ordering::Relaxed);
        assert_eq!(seen(), [(80, 0, 20), (40, 40, 20), (80, 0, 20)]);
        assert!(parts[1].charge(Component::Kv, 41).is_err());
        drop(held);
        assert_eq!(seen(), [(80, 0, 20); 3]);
    }

    #[test]
    fn other_processes_hold_what_the_machine_lacks_of_the_total() {
        let machine = Arc::new(Shared::default());
        let has = |bytes| machine.0.store(bytes, Ordering::Relaxed);
        let budget = Budget::shared(100, machine.clone());
        let held = budget.charge(Component::Weights, 60).unwrap();
        let seen = || {
            budget.look();
            let meters = budget.meters();
            (meters.free, meters.reserved, meters.peers())
        };
        has(70);
        assert_eq!(budget.meters().free, 40, "nothing is read without a look");
        assert_eq!(seen(), (10, 60, 30));
        has(80);
        drop(budget.charge(Component::Kv, 20).unwrap());
        assert_eq!(budget.charge(Component::Kv, 21).unwrap_err().meters.peers(), 20);
        // A machine that has more than the total promises gives no more than that; one that is silent changes nothing.
        has(1000);
        assert_eq!(seen(), (40, 60, 0));
        has(75);
        assert_eq!(seen(), (15, 60, 25));
        has(0);
        assert_eq!(seen(), (15, 60, 25));
        // It has less than what we hold already.
        has(10);
        assert_eq!(seen(), (0, 60, 40));
        assert!(budget.charge(Component::Kv, 1).is_err());
        drop(held);
        assert_eq!(seen(), (10, 0, 90));
    }

    #[test]
    fn the_planned_charge_fails_once() {
        let budget = Budget::new(100);
        budget.fail_allocation(2);
        let first = budget.charge(Component::Kv, 1).unwrap();
        assert_eq!(budget.charge(Component::Kv, 1).unwrap_err().meters.free, 99);
        let third = budget.charge(Component::Kv, 1).unwrap();
        assert_eq!(budget.meters().allocations, 3);
        budget.fail_allocation(1);
        budget.fail_allocation(0);
        drop((first, third, budget.charge(Component::Kv, 1).unwrap()));
    }

    #[test]
    fn the_planned_step_fails_once() {
        let budget = Budget::new(100);
        budget.begin_step().unwrap();
        budget.fail_step(2);
        budget.begin_step().unwrap();
        assert_eq!(budget.begin_step().unwrap_err().requested, 101);
        budget.begin_step().unwrap();
        budget.fail_step(1);
        budget.fail_step(0);
        budget.begin_step().unwrap();
        assert_eq!(budget.meters().allocations, 0);
    }

    #[test]
    fn a_capped_device_has_less_than_it_says() {
        let budget = Budget::new(100);
        budget.set_cap(Some(50));
        assert_eq!(budget.meters().free, 100);
        assert!(budget.charge(Component::Kv, 51).is_err());
        drop(budget.charge(Component::Kv, 50).unwrap());
        budget.set_cap(None);
        drop(budget.charge(Component::Kv, 100).unwrap());
    }

    /// Against a model that keeps a plain list of what is held.
    #[test]
    fn random_charges_add_up() {
        for seed in 0..200 {
            let mut rng = StdRng::seed_from_u64(seed);
            let total = rng.random_range(1..2000);
            let budget = Budget::new(total);
            let mut held: Vec<Charge> = Vec::new();
            let mut high = 0;
            for call in 0..100 {
                if rng.random_bool(0.4) && !held.is_empty() {
                    let _dropped = held.swap_remove(rng.random_range(0..held.len()));
                }
                let sum: u64 = held.iter().map(Charge::bytes).sum();
                let component = Component::ALL[rng.random_range(0..Component::ALL.len())];
                let bytes = rng.random_range(0..300);
                let charge = budget.charge(component, bytes);
                assert_eq!(charge.is_ok(), sum + bytes <= total, "seed {seed}");
                held.extend(charge.ok());
                let meters = budget.meters();
                high = high.max(meters.reserved);
                assert_eq!(
                    meters.reserved,
                    held.iter().map(Charge::bytes).sum::<u64>(),
                    "seed {seed}"
                );
                assert_eq!(
                    (meters.reserved_high, meters.allocations),
                    (high, call + 1),
                    "seed {seed}"
                );
                assert_eq!(meters.by_component.total(), meters.reserved, "seed {seed}");
                assert_eq!(meters.free + meters.reserved, total, "seed {seed}");
            }
            drop(held);
            assert_eq!(budget.meters().reserved, 0, "seed {seed}");
        }
    }

    #[test]
    fn threads_share_the_account() {
        let budget = Budget::new(1 << 20);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for bytes in 0..500 {
                        drop(budget.charge(Component::Staging, bytes).unwrap());
                    }
                });
            }
        });
        let meters = budget.meters();
        assert_eq!((meters.reserved, meters.allocations), (0, 2000));
    }
}
