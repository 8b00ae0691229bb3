//! The server's status in `/ready` and the metrics.

use std::time::Duration;

use plimsoll_engine::{Health, Phase};

/// Whether requests are accepted and make progress, or why not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Status {
    /// There is no engine yet.
    Starting,
    Ready,
    /// There is work but no step completes.
    Stalled,
    /// The engine's state is being rebuilt after an out-of-memory error or a sleep.
    Rebuilding,
    /// It sleeps or is falling asleep.
    Sleeping,
    Draining,
    /// Shut down as requested.
    Stopped,
    /// Failed.
    Dead,
}

impl Status {
    pub(crate) const ALL: [Self; 8] = [
        Self::Starting,
        Self::Ready,
        Self::Stalled,
        Self::Rebuilding,
        Self::Sleeping,
        Self::Draining,
        Self::Stopped,
        Self::Dead,
    ];

    /// The status, with a stall after `patience` without a completed step.
    pub(crate) fn of(health: &Health, patience: Duration) -> Self {
        match health.phase {
            Phase::Running if health.is_moving(patience) => Self::Ready,
            Phase::Running => Self::Stalled,
            Phase::Rebuilding => Self::Rebuilding,
            Phase::FallingAsleep | Phase::Asleep => Self::Sleeping,
            Phase::Draining => Self::Draining,
            Phase::Stopped => Self::Stopped,
            Phase::Dead => Self::Dead,
        }
    }

    /// In JSON and metrics.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Starting => "starting",
            Self::Ready => "ready",
            Self::Stalled => "stalled",
            Self::Rebuilding => "rebuilding",
            Self::Sleeping => "sleeping",
            Self::Draining => "draining",
            Self::Stopped => "stopped",
            Self::Dead => "dead",
        }
    }
}
