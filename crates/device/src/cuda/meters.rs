//! What this process holds on the GPU, from meters of its own: the account of what it allocated or mapped, the driver's
//! meters of the stream-ordered pool, and charges for what the driver takes without being asked: the runtime (context,
//! modules, libraries) and graphs. Other processes appear in one number alone, what is free, so one that starts, grows or
//! ends meanwhile changes nothing that is attributed to this one.

use cudarc::driver::sys;
use plimsoll_core::{Component, Meters, Oom, RefusedBy};

use super::{DeviceError, Gpu, GpuError, check};

/// What the stream-ordered pool holds, in bytes.
#[derive(Clone, Copy, Debug, Default)]
struct Held {
    used: u64,
    reserved: u64,
    used_high: u64,
    reserved_high: u64,
}

/// One look at the driver's meters.
#[derive(Clone, Copy, Debug)]
struct Readings {
    /// Free bytes.
    free: u64,
    pool: Held,
}

impl Gpu {
    /// What a failed call means that needs `bytes` for `component`; 0 where that is not known.
    pub fn failed(&self, component: Component, bytes: u64, error: GpuError) -> DeviceError {
        if !error.is_out_of_memory() {
            return DeviceError::Gpu(error);
        }
        tracing::warn!(%error, %component, bytes, "the driver is out of memory");
        // The account covers this process only; the meters include other processes.
        DeviceError::Oom(Oom {
            requested: bytes,
            component,
            refused_by: RefusedBy::Device,
            meters: Box::new(self.meters()),
        })
    }

    /// Reads the meters. If the driver does not answer, returns this process's own account.
    pub fn meters(&self) -> Meters {
        let account = Meters {
            allocations: self.allocations(),
            ..self.budget().meters()
        };
        match self.readings() {
            Ok(readings) => combine(account, &readings),
            Err(error) => {
                tracing::error!(%error, "the GPU's memory counters cannot be read");
                account
            }
        }
    }

    /// Sets the high-water marks to what is in use now.
    ///
    /// # Errors
    /// [`GpuError`] of the driver.
    pub fn reset_high_water(&self) -> Result<(), GpuError> {
        use sys::CUmemPool_attribute as P;
        self.budget().reset_high_water();
        self.bind()?;
        for mark in [
            P::CU_MEMPOOL_ATTR_USED_MEM_HIGH,
            P::CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH,
        ] {
            let mut zero = 0_u64;
            // SAFETY: the pool is alive; these marks are 64-bit and may be set to 0 alone.
            check("cuMemPoolSetAttribute", unsafe {
                sys::cuMemPoolSetAttribute(self.pool(), mark, (&raw mut zero).cast())
            })?;
        }
        Ok(())
    }

    /// Waits for all work, and returns to the device what allocators hold without using it.
    ///
    /// # Errors
    /// [`GpuError`] of the driver, or of work that failed.
    pub fn trim(&self) -> Result<(), GpuError> {
        self.synchronize()?;
        // SAFETY: the pool is alive.
        check("cuMemPoolTrimTo", unsafe { sys::cuMemPoolTrimTo(self.pool(), 0) })
    }

    /// Charges the growth of the runtime since the last call: modules and libraries load when first used. Memory that is not
    /// charged counts as that of other processes, so it is not planned with in either case.
    ///
    /// # Errors
    /// [`GpuError`] of the driver.
    pub fn settle_runtime(&self) -> Result<(), GpuError> {
        self.runtime().settle(self.budget(), self.unclaimed()?);
        Ok(())
    }

    /// Captures graphs with `work`, and charges to them what they have taken. `work` may run nothing that makes the runtime
    /// grow. Where the driver has kept the memory of earlier graphs, new ones take little more.
    ///
    /// # Errors
    /// That of `work`, of the driver, or [`DeviceError::Oom`] if the account has no room for what they took.
    pub fn capture_graphs<R>(&self, work: impl FnOnce() -> Result<R, DeviceError>) -> Result<R, DeviceError> {
        self.settle_runtime()?;
        let graphs = work()?;
        self.synchronize()?;
        self.runtime().settle_graphs(self.budget(), self.unclaimed()?)?;
        Ok(graphs)
    }

    /// Destroys graphs with `work`. What the driver keeps of their memory, all of it on an H200, stays charged: it is for the
    /// next graphs, and no other process's.
    ///
    /// # Errors
    /// [`GpuError`] of the driver.
    pub fn destroy_graphs(&self, work: impl FnOnce()) -> Result<(), GpuError> {
        let free = || {
            self.synchronize()
                .and_then(|()| self.memory_info())
                .map(|info| info.free)
        };
        let before = free();
        work();
        let returned = free()?.saturating_sub(before?);
        self.runtime().graphs_returned(self.budget(), returned);
        Ok(())
    }

    /// Bytes in use that are not in the account: other processes, and what the driver took since the last look.
    fn unclaimed(&self) -> Result<u64, GpuError> {
        let info = self.memory_info()?;
        let held = combine(self.budget().meters(), &self.readings()?).reserved;
        Ok(info.total.saturating_sub(info.free).saturating_sub(held))
    }

    fn readings(&self) -> Result<Readings, GpuError> {
        use sys::CUmemPool_attribute as P;
        let free = self.memory_info()?.free;
        let pool = |attribute| {
            let mut value = 0_u64;
            // SAFETY: the pool is alive, and these attributes are 64-bit.
            check("cuMemPoolGetAttribute", unsafe {
                sys::cuMemPoolGetAttribute(self.pool(), attribute, (&raw mut value).cast())
            })
            .map(|()| value)
        };
        Ok(Readings {
            free,
            pool: Held {
                used: pool(P::CU_MEMPOOL_ATTR_USED_MEM_CURRENT)?,
                reserved: pool(P::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT)?,
                used_high: pool(P::CU_MEMPOOL_ATTR_USED_MEM_HIGH)?,
                reserved_high: pool(P::CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH)?,
            },
        })
    }
}

/// Adds to the account what only the driver knows: what the pool holds without using it. The pool's allocations themselves
/// are in the account.
///
/// The highest `reserved` is exact as long as the parts peak together, as they do where memory is taken while a state is
/// built and given back when it is dropped, with the marks reset in between.
fn combine(account: Meters, driver: &Readings) -> Meters {
    let Held {
        used,
        reserved,
        used_high,
        reserved_high,
    } = driver.pool;
    let slack = reserved.saturating_sub(used);
    let slack_high = reserved_high.saturating_sub(used_high).max(slack);
    let reserved = account.reserved + slack;
    Meters {
        // A limit below the device's capacity, or a driver that rounds, must not promise more than there is.
        free: driver.free.min(account.total.saturating_sub(reserved)),
        reserved,
        reserved_high: account.reserved_high + slack_high,
        ..account
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Budget;

    fn readings(free: u64, pool: Held) -> Readings {
        Readings { free, pool }
    }

    #[test]
    fn what_is_neither_free_nor_ours_belongs_to_other_processes() {
        let budget = Budget::new(1000);
        let _runtime = budget.record(Component::Runtime, 50);
        let _weights = budget.charge(Component::Weights, 300).unwrap();
        let pool = Held {
            used: 300,
            reserved: 320,
            used_high: 310,
            reserved_high: 340,
        };
        let meters = combine(budget.meters(), &readings(500, pool));
        assert_eq!((meters.used, meters.reserved, meters.free), (350, 370, 500));
        assert_eq!(meters.peers(), 130);
        assert_eq!((meters.used_high, meters.reserved_high), (350, 380));
        // Other processes that grow or end do not change our own numbers.
        for free in [0, 400, 630] {
            let other = combine(budget.meters(), &readings(free, pool));
            assert_eq!((other.used, other.reserved), (meters.used, meters.reserved));
            assert_eq!(other.peers(), 630 - free);
        }
        // The parts sum to what is reserved, but for the pool's slack.
        assert_eq!(meters.reserved - meters.by_component.total(), 20);
    }

    #[test]
    fn a_limit_below_the_device_leaves_no_more_than_the_limit() {
        let budget = Budget::new(400);
        let _weights = budget.charge(Component::Weights, 300).unwrap();
        let meters = combine(budget.meters(), &readings(5000, Held::default()));
        assert_eq!((meters.total, meters.free, meters.peers()), (400, 100, 0));
        // Where the device cannot give what the limit allows, the rest is not ours to plan with.
        let meters = combine(budget.meters(), &readings(20, Held::default()));
        assert_eq!((meters.free, meters.peers()), (20, 80));
    }
}
