//! The server's status in `/ready` and the metrics.

use std::time::Duration;

use plimsoll_engine::{Health, Phase};
use strum::{EnumIter, IntoStaticStr};

/// Whether requests are accepted and make progress, or why not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, EnumIter, IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
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
        self.into()
    }
}
