//! What `/ready` and the metrics say of the whole server in a word.

use std::time::Duration;

use plimsoll_engine::{Health, Phase};

/// Whether requests are accepted and move, or why not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Status {
    /// There is no engine yet.
    Starting,
    Ready,
    /// There is work, and no step ends.
    Stalled,
    /// There is no state, for want of memory or after a sleep.
    Rebuilding,
    /// It sleeps, or is about to.
    Sleeping,
    Draining,
    /// Ended as asked.
    Stopped,
    /// Ended by a defect.
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

    /// Of a server whose `/ready` fails where no step ends for `patience`.
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
