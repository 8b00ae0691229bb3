use plimsoll_core::StepError;

use crate::{Diagnostic, Phase, RankLost, ScenarioKind};

/// Why there is no proved state. Everything the profile built is freed by then.
#[derive(Clone, Debug, thiserror::Error)]
pub enum ProfileError {
    /// The spec makes no sense.
    #[error("{0}")]
    InvalidSpec(&'static str),
    /// Memory that a dropped state held did not come back: a defect, never retried.
    #[error(
        "TEARDOWN LEAK after {phase}: {expected} bytes should have been freed, {returned} were; this is a bug in the \
         server: please report it with this line"
    )]
    TeardownLeak {
        /// The phase whose state was dropped.
        phase: Phase,
        /// Bytes that should have come back.
        expected: u64,
        /// Bytes by which `reserved` dropped; below 0 if it rose.
        returned: i128,
    },
    /// The driver or a kernel failed: no size helps.
    #[error(
        "the device failed in phase {phase}: {error}; this is not a lack of memory, see the driver's log"
    )]
    Device {
        /// Which one.
        phase: Phase,
        /// What the driver says.
        error: String,
    },
    /// The model computes nothing that is a number.
    #[error(
        "what the model computes in the worst step {scenario} of phase {phase} is NaN or infinite: its weights are damaged \
         (download them again), or overflow in the precision they are computed in"
    )]
    NotFinite {
        /// Probe or validate.
        phase: Phase,
        /// Which worst step.
        scenario: ScenarioKind,
    },
    /// A worst step failed for another reason than memory.
    #[error("the worst step {scenario} of phase {phase} failed: {error}")]
    Step {
        /// Probe or validate.
        phase: Phase,
        /// Which worst step.
        scenario: ScenarioKind,
        /// Why.
        error: StepError,
    },
    /// Another rank could not go on, so none does.
    #[error("rank {rank} could not continue in phase {phase}: see its log")]
    OtherRank {
        /// Which one.
        rank: usize,
        /// Where.
        phase: Phase,
    },
    /// The ranks cannot agree on anything any more.
    #[error(transparent)]
    RankLost(#[from] RankLost),
    /// There is no size that fits, or the pinned one does not.
    #[error("{0}")]
    DoesNotFit(Box<Diagnostic>),
}
