//! The progress of a start.

use std::time::Duration;

/// What a start does, in this order; after an attempt that ran out of memory it rebuilds and validates again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum StartPhase {
    /// Finds the files of the model.
    Resolve,
    /// Downloads them.
    Download,
    /// Opens the device, once no other start measures it.
    Device,
    /// Loads the weights.
    Weights,
    /// Runs the worst steps with a small KV cache.
    Probe,
    /// Builds the engine's state at its final size.
    Rebuild,
    /// Records the steps of that state as CUDA graphs, batch size by batch size.
    Capture,
    /// Runs the worst steps at that size.
    Validate,
    /// Starts the engine over what was proved.
    Engine,
}

impl StartPhase {
    /// All of them in their order.
    pub const ALL: [Self; 9] = [
        Self::Resolve,
        Self::Download,
        Self::Device,
        Self::Weights,
        Self::Probe,
        Self::Rebuild,
        Self::Capture,
        Self::Validate,
        Self::Engine,
    ];

    /// Name in JSON, metrics and logs.
    pub fn name(self) -> &'static str {
        match self {
            Self::Resolve => "resolve",
            Self::Download => "download",
            Self::Device => "device",
            Self::Weights => "weights",
            Self::Probe => "probe",
            Self::Rebuild => "rebuild",
            Self::Capture => "capture",
            Self::Validate => "validate",
            Self::Engine => "engine",
        }
    }
}

/// How far a start is.
#[derive(Clone, Debug, PartialEq)]
pub struct StartStatus {
    /// What it does now.
    pub phase: StartPhase,
    /// How far that is, in words.
    pub detail: Option<String>,
    /// What part of the start is done, 0 to below 1; it never falls.
    pub done: f64,
    /// Since the start began.
    pub elapsed: Duration,
    /// How long it will still take, where that can be told.
    pub remaining: Option<Duration>,
}

impl StartStatus {
    /// When it is worth asking again.
    pub(crate) fn retry_after(&self) -> Duration {
        self.remaining.map_or(RETRY_UNKNOWN, |remaining| {
            remaining.clamp(Duration::from_secs(1), RETRY_LATEST)
        })
    }

    /// For people.
    pub(crate) fn percent(&self) -> f64 {
        // Rounded down: it is not done before it is done.
        (self.done * 1000.0).floor() / 10.0
    }
}

const RETRY_UNKNOWN: Duration = Duration::from_secs(5);
const RETRY_LATEST: Duration = Duration::from_secs(60);

/// A start, for those who want to know how far it is.
pub trait Start: Send + Sync + 'static {
    /// Now. Must not block.
    fn status(&self) -> StartStatus;
}
