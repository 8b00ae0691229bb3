use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use plimsoll_core::{
    BuildError, Component, Executor, FillMasks, KvConfig, Meters, Oom, Scratch, StateConfig, StepError,
    StepLimits, StepOutput, StepPlan,
};
use plimsoll_device::{Budget, Charge};
use plimsoll_profiler::{Piece, Target};
use plimsoll_sim::{Fault, SimConfig, SimExecutor, SimModel, StepTime};

use crate::simulated::{FaultSpec, StepFault};

/// The simulated model on a device whose bytes are only counted.
pub(crate) struct SimTarget {
    limits: StepLimits,
    budget: Budget,
    step_time: StepTime,
    faults: FaultSpec,
    /// Steps that served, of all states.
    served: Arc<AtomicU64>,
    /// What was asked of the device before it served.
    asked: Arc<AtomicU64>,
}

/// As a GPU's state has, for a few batch sizes. Here they are nothing but the time of a step.
const GRAPHS: usize = 4;

impl SimTarget {
    pub(crate) fn new(limits: StepLimits, budget: Budget, step_time: StepTime, faults: FaultSpec) -> Self {
        Self {
            limits,
            budget,
            step_time,
            faults,
            served: Arc::default(),
            asked: Arc::default(),
        }
    }
}

/// Made up, of the order of a small model's.
pub(crate) const KV_BYTES_PER_TOKEN: u64 = 16 << 10;
const SCRATCH_BYTES_PER_TOKEN: u64 = 32 << 10;

/// Bytes of a KV cache.
pub(crate) fn kv_bytes(kv: &KvConfig) -> u64 {
    let layers: usize = kv.groups.iter().map(|group| group.layers).sum();
    let layer_bytes = KV_BYTES_PER_TOKEN / layers as u64;
    let page_tokens = (kv.groups.layers_per_page() * kv.block_size.tokens()) as u64;
    (kv.num_pages as u64).saturating_mul(page_tokens * layer_bytes)
}

/// Long enough that requests meet each other, as they do on a real device.
pub(crate) const STEP_TIME: StepTime = StepTime {
    base: Duration::from_micros(150),
    per_token: Duration::from_micros(1),
};

/// What a step takes from its arena.
pub(crate) fn scratch_bytes(tokens: usize) -> u64 {
    tokens as u64 * SCRATCH_BYTES_PER_TOKEN
}

/// What a real engine state owns, as charges.
pub(crate) struct SimState {
    executor: SimExecutor,
    budget: Budget,
    scratch: Scratch,
    /// Grows with the steps where the scratch is growable.
    arena: Charge,
    arena_high: u64,
    canary: Option<Charge>,
    _kv: Charge,
    /// What goes wrong, once it serves.
    faults: FaultSpec,
    serves: bool,
    served: Arc<AtomicU64>,
    asked: Arc<AtomicU64>,
}

/// Counts what is asked of the device during a start, and lets it fail where that is wanted.
fn ask(asked: &AtomicU64, faults: &FaultSpec) -> Result<(), BuildError> {
    let now = asked.fetch_add(1, Ordering::Relaxed) + 1;
    match faults.device {
        Some(device) if device.get() <= now => {
            let words = "simulated: CUDA_ERROR_ILLEGAL_ADDRESS";
            Err(BuildError::Device(words.to_owned()))
        }
        _ => Ok(()),
    }
}

impl SimState {
    /// Makes the step go wrong that is to.
    fn meet_fault(&mut self, plan: &StepPlan) -> Result<(), Oom> {
        if !self.serves {
            return Ok(());
        }
        let step = self.served.fetch_add(1, Ordering::Relaxed) + 1;
        match self.faults.at(step) {
            None => {}
            Some(StepFault::Oom) => {
                return Err(self.budget.oom(Component::Arena, self.budget.meters().free + 1));
            }
            Some(StepFault::Fail(nth)) => {
                // Each of its parts in turn.
                let part = match nth % 3 {
                    0 => Fault::Launch,
                    1 if plan.awaits_masks() => Fault::Sample,
                    _ => Fault::Finish,
                };
                self.executor.inject(plan.step, part);
            }
            Some(StepFault::Hang) => loop {
                thread::park();
            },
        }
        Ok(())
    }

    /// What the step needs at once, as a real arena would find out.
    fn take_scratch(&mut self, plan: &StepPlan) -> Result<(), Oom> {
        let bytes = scratch_bytes(plan.num_tokens());
        if bytes > self.arena.bytes() {
            match self.scratch {
                Scratch::Fixed(_) => return Err(self.budget.oom(Component::Arena, bytes)),
                Scratch::Growable => {
                    let more = bytes - self.arena.bytes();
                    // A growing arena holds its old chunks until the step is over.
                    drop(self.budget.charge(Component::Arena, more)?);
                    self.arena = self.budget.charge(Component::Arena, bytes)?;
                }
            }
        }
        self.arena_high = self.arena_high.max(bytes);
        Ok(())
    }
}

impl Executor for SimState {
    fn launch(&mut self, plan: &StepPlan) -> Result<(), StepError> {
        self.budget.begin_step()?;
        if !self.serves {
            ask(&self.asked, &self.faults)?;
        }
        self.meet_fault(plan)?;
        self.take_scratch(plan)?;
        self.executor.launch(plan)
    }

    fn sample(&mut self, fill: &mut FillMasks<'_>) -> Result<(), StepError> {
        self.executor.sample(fill)
    }

    fn finish(&mut self) -> Result<StepOutput, StepError> {
        self.executor.finish()
    }
}

impl Target for SimTarget {
    type State = SimState;

    fn build(&mut self, config: &StateConfig, piece: &mut dyn FnMut(Piece)) -> Result<SimState, BuildError> {
        let budget = self.budget.clone();
        let charge = |component, bytes| {
            ask(&self.asked, &self.faults)?;
            Ok::<_, BuildError>(budget.charge(component, bytes)?)
        };
        let kv = charge(Component::Kv, kv_bytes(&config.kv))?;
        let canary = (config.canary_bytes > 0)
            .then(|| charge(Component::Canary, config.canary_bytes))
            .transpose()?;
        let arena = match config.scratch {
            Scratch::Fixed(bytes) => charge(Component::Arena, bytes)?,
            Scratch::Growable => charge(Component::Arena, 0)?,
        };
        let mut executor = SimExecutor::new(SimConfig {
            kv: config.kv,
            limits: self.limits,
            model: SimModel::text(),
            step_time: self.step_time,
        });
        executor.allow_synthetic(true);
        for done in 0..GRAPHS {
            piece(Piece::Graph { done, of: GRAPHS });
            thread::sleep(self.step_time.base);
        }
        Ok(SimState {
            executor,
            scratch: config.scratch,
            arena,
            arena_high: 0,
            canary,
            _kv: kv,
            faults: self.faults,
            serves: false,
            served: Arc::clone(&self.served),
            asked: Arc::clone(&self.asked),
            budget,
        })
    }

    fn meters(&self) -> Meters {
        self.budget.meters()
    }

    fn reset_high_water(&mut self) {
        self.budget.reset_high_water();
    }

    fn trim(&mut self) {}

    fn take_scratch_high_water(&mut self, state: &mut SimState) -> u64 {
        std::mem::take(&mut state.arena_high)
    }

    /// The last thing before serving: from here on plans are checked in earnest.
    fn release_canary(&mut self, state: &mut SimState) {
        state.canary = None;
        state.serves = true;
        state.executor.allow_synthetic(false);
    }
}
