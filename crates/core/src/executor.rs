use std::time::Duration;

use crate::{BuildError, ConstraintError, EncodeCost, Oom, RequestId, StepOutput, StepPlan};

/// Runs step plans: the device, as scheduler and engine see it.
///
/// A step has two halves so that the scheduler can plan the next step while the device works: `launch` hands the plan over
/// and may return before the work is done, `finish` waits for the oldest launched step and returns its output. Steps finish
/// in the order in which they were launched. An error from either half concerns that step alone, and what else is in flight can
/// still be finished.
///
/// A plan that awaits masks ([`StepPlan::awaits_masks`]) is started by `launch` as far as can be without them: its sampling
/// waits for `sample`, which must come before anything else is launched and before the step is finished. So the masks, which
/// may depend on what the step before samples, are computed while the device is busy.
pub trait Executor: Send {
    /// Starts `plan`.
    fn launch(&mut self, plan: &StepPlan) -> Result<(), StepError>;

    /// Samples the step launched last, which awaits masks: `fill` writes one for each constrained run, in the order of the
    /// plan, into memory of [`mask::words`](crate::mask::words) words with any content. An error or a panic ends that step: it is not in
    /// flight any more.
    fn sample(&mut self, fill: &mut FillMasks<'_>) -> Result<(), StepError>;

    /// Waits for the oldest launched step.
    fn finish(&mut self) -> Result<StepOutput, StepError>;

    /// The engine has no work: time until the next launch does not count as idle time of the device.
    fn rest(&mut self) {}

    /// Busy and idle time of a device that works asynchronously; `None` if it is not measured.
    fn device_time(&self) -> Option<DeviceTime> {
        None
    }

    /// How long images take to encode; `None` without an encoder, or if it is not measured.
    fn encode_cost(&self) -> Option<EncodeCost> {
        None
    }

    /// Tokens at whose multiples prompts are cut, so that states of fixed size are the same to the bit however a prompt is divided
    /// among steps. A power of two; 1 if it makes no difference.
    fn state_chunk(&self) -> usize {
        1
    }

    /// Runs a whole step, with masks that allow everything.
    fn execute(&mut self, plan: &StepPlan) -> Result<StepOutput, StepError> {
        self.launch(plan)?;
        if plan.awaits_masks() {
            self.sample(&mut allow_all)?;
        }
        self.finish()
    }
}

impl<E: Executor + ?Sized> Executor for Box<E> {
    fn launch(&mut self, plan: &StepPlan) -> Result<(), StepError> {
        (**self).launch(plan)
    }

    fn sample(&mut self, fill: &mut FillMasks<'_>) -> Result<(), StepError> {
        (**self).sample(fill)
    }

    fn finish(&mut self) -> Result<StepOutput, StepError> {
        (**self).finish()
    }

    fn rest(&mut self) {
        (**self).rest();
    }

    fn device_time(&self) -> Option<DeviceTime> {
        (**self).device_time()
    }

    fn encode_cost(&self) -> Option<EncodeCost> {
        (**self).encode_cost()
    }

    fn state_chunk(&self) -> usize {
        (**self).state_chunk()
    }
}

/// Writes the [masks](crate::mask) of a step, one slice for each constrained run.
pub type FillMasks<'a> = dyn FnMut(&mut [&mut [u32]]) + 'a;

/// Fills masks that allow every token, for worst steps and oracles.
pub fn allow_all(masks: &mut [&mut [u32]]) {
    masks.iter_mut().for_each(|mask| mask.fill(u32::MAX));
}

/// Seconds of a device, by its own clock, since the executor was made.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct DeviceTime {
    /// It computed steps.
    pub busy_seconds: f64,
    /// There was work, but no step was launched yet.
    pub idle_seconds: f64,
}

impl DeviceTime {
    /// The sum of both.
    pub fn plus(self, other: Self) -> Self {
        Self {
            busy_seconds: self.busy_seconds + other.busy_seconds,
            idle_seconds: self.idle_seconds + other.idle_seconds,
        }
    }

    /// The difference to an `earlier` reading.
    pub fn since(self, earlier: Self) -> Self {
        Self {
            busy_seconds: self.busy_seconds - earlier.busy_seconds,
            idle_seconds: self.idle_seconds - earlier.idle_seconds,
        }
    }
}

impl From<BuildError> for StepError {
    fn from(error: BuildError) -> Self {
        match error {
            BuildError::Oom(oom) => Self::Oom(oom),
            BuildError::Device(error) => Self::Device(error),
            BuildError::OtherRank(rank) => Self::OtherRank(rank),
            BuildError::RankLost(why) => Self::RankLost(why),
        }
    }
}

/// Why a step failed. Its requests get this error; the engine goes on. Some of them fail a single request.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StepError {
    /// Device memory ran out: the executor must be rebuilt.
    #[error(transparent)]
    Oom(#[from] Oom),
    /// The KV cache had to be built again after the request was admitted, and is too small for it now.
    #[error(
        "device memory ran out and the KV cache was rebuilt with {capacity} tokens, but this request may need {needed}; \
         request fewer tokens, or try again later"
    )]
    KvTooSmall {
        /// Prompt plus output tokens of the request.
        needed: usize,
        /// Tokens the KV cache holds now.
        capacity: usize,
    },
    /// There was no memory for a KV cache for longer than requests wait.
    #[error("the server has had too little device memory for a KV cache for {} s; try again later", patience.as_secs())]
    NoState {
        /// How long requests wait.
        patience: Duration,
    },
    /// A constraint of the request failed.
    #[error("the output no longer meets its constraints: {0}")]
    Constraint(#[from] ConstraintError),
    /// The driver or a kernel failed, in its own words.
    #[error("the device failed: {0}")]
    Device(String),
    /// Logits or the embedding of a request are NaN or infinite. It fails alone ([`StepOutput::not_finite`]).
    #[error(
        "the model's output for {0} is NaN or infinite: the weights are damaged, or overflow in the precision they are \
         computed in"
    )]
    NotFinite(RequestId),
    /// The server ended first.
    #[error("the server shut down before the request was done")]
    ShutDown,
    /// The executor reported a defect.
    #[error("the step failed: {0}")]
    Failed(String),
    /// The executor panicked.
    #[error("the step panicked: {0}")]
    Panicked(String),
    /// Another of the ranks that compute a step together could not go on with it. Its own error says why.
    #[error("rank {0} could not compute its part of the step")]
    OtherRank(usize),
    /// A rank is gone, or did not come in time: no step can be computed any more.
    #[error("the ranks of the server lost each other: {0}")]
    RankLost(String),
}
