//! The progress of a start.

use std::time::Duration;

use strum::{IntoStaticStr, VariantArray};

/// Phases of a start, in order. After an attempt that runs out of memory, rebuild to validate are repeated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, IntoStaticStr, VariantArray)]
#[strum(serialize_all = "snake_case")]
pub enum StartPhase {
    /// Finding the model's files.
    Resolve,
    /// Downloading them.
    Download,
    /// Opening the device, after waiting for other starts that measure it.
    Device,
    /// Loading the weights.
    Weights,
    /// Running worst-case steps with a small KV cache.
    Probe,
    /// Building the engine's state at its final size.
    Rebuild,
    /// Capturing CUDA graphs for that state, one batch size after another.
    Capture,
    /// Running worst-case steps at that size.
    Validate,
    /// Starting the engine.
    Engine,
}

impl StartPhase {
    /// All phases in order.
    pub const ALL: &[Self] = Self::VARIANTS;

    /// Name in JSON, metrics and logs.
    pub fn name(self) -> &'static str {
        self.into()
    }
}

/// Progress of a start.
#[derive(Clone, Debug, PartialEq)]
pub struct StartStatus {
    /// The current phase.
    pub phase: StartPhase,
    /// Progress within the phase, as text.
    pub detail: Option<String>,
    /// Completed fraction of the start, in [0, 1); never decreases.
    pub done: f64,
    /// Time since the start began.
    pub elapsed: Duration,
    /// Estimated remaining time, if known.
    pub remaining: Option<Duration>,
}

impl StartStatus {
    /// When to retry.
    pub(crate) fn retry_after(&self) -> Duration {
        self.remaining.map_or(RETRY_UNKNOWN, |remaining| {
            remaining.clamp(Duration::from_secs(1), RETRY_LATEST)
        })
    }

    /// For display.
    pub(crate) fn percent(&self) -> f64 {
        // Rounded down: 100 % only when done.
        (self.done * 1000.0).floor() / 10.0
    }
}

const RETRY_UNKNOWN: Duration = Duration::from_secs(5);
const RETRY_LATEST: Duration = Duration::from_secs(60);

/// A start in progress.
pub trait Start: Send + Sync + 'static {
    /// Its current status. Must not block.
    fn status(&self) -> StartStatus;
}
