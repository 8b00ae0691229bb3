//! An executor that does what the test says.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use plimsoll_core::{DeviceTime, Executor, FillMasks, Meters, Run, Sampled, StepError, StepOutput, StepPlan};
use plimsoll_profiler::Proved;

use super::recovery;
use crate::{RebuildError, StateSource};

/// What the executor shall do; the test changes it while the engine runs.
#[derive(Debug, Default)]
pub(super) struct Script {
    pub(super) step_micros: AtomicU64,
    /// Steps wait in `launch`.
    pub(super) hold: AtomicBool,
    /// One does.
    pub(super) holding: AtomicBool,
    /// The next step ends with an error.
    pub(super) fail: AtomicBool,
    /// The next step panics in `launch`.
    pub(super) panic_in_launch: AtomicBool,
    /// The next step panics in `finish`.
    pub(super) panic_in_finish: AtomicBool,
    /// The next step finds no memory, in `finish`.
    pub(super) oom: AtomicBool,
    /// The next step of a single request does.
    pub(super) oom_of_one: AtomicBool,
    /// The same in `launch`.
    pub(super) oom_in_launch: AtomicBool,
    /// The next step needs more scratch than its state has.
    pub(super) overflow: AtomicBool,
    /// A state that is built again is not ready yet.
    pub(super) hold_rebuild: AtomicBool,
    /// Nor does it come any further.
    pub(super) hang_rebuild: AtomicBool,
    /// It hangs.
    pub(super) hanging: AtomicBool,
    /// How often it came further.
    pub(super) progress: AtomicUsize,
    /// The state cannot be built again, memory or not.
    pub(super) defect: AtomicBool,
    /// The engine panics between two steps.
    pub(super) panic_between: AtomicBool,
    /// From output [`FINITE`] on, the request with this seed is not finite; 0 for none.
    pub(super) not_finite: AtomicU64,
    /// The next step answers fewer runs than there are.
    pub(super) lie: AtomicBool,
    pub(super) steps: AtomicUsize,
    pub(super) most_in_flight: AtomicUsize,
    /// Set when the executor is dropped.
    pub(super) dropped: AtomicBool,
}

/// Outputs of [`Script::not_finite`] that are finite.
pub(super) const FINITE: usize = 3;

pub(super) struct Fake {
    pub(super) script: Arc<Script>,
    pub(super) launched: VecDeque<StepPlan>,
}

/// The token of a request depends on nothing but the request and the position.
pub(super) fn token(seed: u64, index: usize) -> u32 {
    (seed.wrapping_mul(31).wrapping_add(index as u64 * 7) % 97) as u32
}

/// The tokens of a step.
pub(super) fn answer(plan: &StepPlan) -> StepOutput {
    let sample = |run: &Run| {
        run.sample.as_ref().map(|spec| Sampled {
            token: token(spec.seed, spec.index),
            logprobs: None,
        })
    };
    StepOutput {
        samples: plan.runs.iter().map(sample).collect(),
        ..Default::default()
    }
}

impl Executor for Fake {
    fn launch(&mut self, plan: &StepPlan) -> Result<(), StepError> {
        while self.script.hold.load(Ordering::SeqCst) {
            self.script.holding.store(true, Ordering::SeqCst);
            std::thread::sleep(Duration::from_micros(100));
        }
        assert!(
            !self.script.panic_in_launch.swap(false, Ordering::SeqCst),
            "told to panic in launch"
        );
        if self.script.oom_in_launch.swap(false, Ordering::SeqCst) {
            return Err(recovery::told_oom());
        }
        self.launched.push_back(plan.clone());
        self.script
            .most_in_flight
            .fetch_max(self.launched.len(), Ordering::SeqCst);
        Ok(())
    }

    fn sample(&mut self, _: &mut FillMasks<'_>) -> Result<(), StepError> {
        // Only worst steps of the profile are constrained, and nobody looks at what they sample.
        Ok(())
    }

    fn finish(&mut self) -> Result<StepOutput, StepError> {
        let plan = self.launched.pop_front().expect("a step was launched");
        self.script.steps.fetch_add(1, Ordering::SeqCst);
        std::thread::sleep(Duration::from_micros(
            self.script.step_micros.load(Ordering::SeqCst),
        ));
        assert!(
            !self.script.panic_in_finish.swap(false, Ordering::SeqCst),
            "told to panic in finish"
        );
        if self.script.fail.swap(false, Ordering::SeqCst) {
            return Err(StepError::Failed("told to fail".into()));
        }
        if self.script.overflow.swap(false, Ordering::SeqCst) {
            return Err(recovery::told_overflow());
        }
        let alone = plan.runs.len() == 1 && self.script.oom_of_one.swap(false, Ordering::SeqCst);
        if alone || self.script.oom.swap(false, Ordering::SeqCst) {
            return Err(recovery::told_oom());
        }
        let mut output = answer(&plan);
        let seed = self.script.not_finite.load(Ordering::SeqCst);
        for (index, run) in plan.runs.iter().enumerate() {
            let mut spec = run.sample.iter();
            if spec.any(|spec| seed > 0 && spec.seed == seed && spec.index >= FINITE) {
                output.samples[index] = None;
                output.not_finite.push(index);
            }
        }
        if self.script.lie.swap(false, Ordering::SeqCst) {
            output.samples.pop();
        }
        Ok(output)
    }

    fn device_time(&self) -> Option<DeviceTime> {
        assert!(
            !self.script.panic_between.load(Ordering::SeqCst),
            "told to panic between steps"
        );
        None
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        self.script.dropped.store(true, Ordering::SeqCst);
    }
}

/// A device that nobody watches.
pub(super) struct Unmetered;

impl<S> StateSource<S> for Unmetered {
    fn high_water(&self) -> u64 {
        0
    }

    fn proved_peak(&self) -> u64 {
        0
    }

    fn meters(&self) -> Meters {
        Meters::default()
    }

    fn trim(&mut self) {}

    fn rebuild(&mut self, _: &mut dyn FnMut()) -> Result<Proved<S>, RebuildError> {
        unreachable!("memory never runs out")
    }
}
