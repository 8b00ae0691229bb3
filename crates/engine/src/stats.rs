use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use plimsoll_core::{CacheEventCounts, DeviceTime};
use plimsoll_scheduler::SchedulerStats;

use crate::{Histogram, OutOfMemory};

/// What the engine did so far; a copy, cheap to take.
#[derive(Clone, Debug)]
pub struct EngineStats {
    /// Queue, KV cache, preemptions, prefix cache, tokens, as of the last time that a request was admitted or a step ended.
    pub scheduler: SchedulerStats,
    /// Requests admitted and not yet ended.
    pub in_flight: usize,
    /// Steps that ended well.
    pub steps: u64,
    /// Steps that failed.
    pub failed_steps: u64,
    /// Requests admitted.
    pub submitted: u64,
    /// Requests refused because the queue, or their tenant's share of it, was full.
    pub refused: u64,
    /// Wall-clock seconds of each step.
    pub step_seconds: Histogram,
    /// Tokens computed in each step.
    pub step_tokens: Histogram,
    /// Requests in each step: the batch size.
    pub step_requests: Histogram,
    /// Times that the memory held rose above the peak that was proved, or above the last such rise, and steps that failed
    /// because they needed more scratch than was proved.
    pub high_water_above_proof: u64,
    /// States that were built again after a step ran out of device memory.
    pub rebuilds_oom: u64,
    /// States that were built again after a sleep.
    pub rebuilds_wake: u64,
    /// The latest step that ran out of device memory.
    pub last_oom: Option<Arc<OutOfMemory>>,
    /// How the device spent its time since the engine started, if it works on its own.
    pub device_time: Option<DeviceTime>,
    /// What became of what was said about the prefix cache, if anybody listens.
    pub cache_events: Option<CacheEventCounts>,
}

/// Where the engine stands in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Accepts requests.
    Running,
    /// Has no state for want of memory, or just woke: builds one and accepts nothing.
    Rebuilding,
    /// Finishes what it has to sleep then, and accepts nothing.
    FallingAsleep,
    /// Has given its memory back and accepts nothing.
    Asleep,
    /// Finishes what it has and accepts nothing.
    Draining,
    /// Ended as asked.
    Stopped,
    /// The thread ended by a defect; nothing is served any more.
    Dead,
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Running => "running",
            Self::Rebuilding => "building its state",
            Self::FallingAsleep => "falling asleep",
            Self::Asleep => "asleep",
            Self::Draining => "draining",
            Self::Stopped => "stopped",
            Self::Dead => "dead",
        })
    }
}

/// Whether the engine lives and moves.
#[derive(Clone, Debug)]
pub struct Health {
    /// Where the engine stands in its life.
    pub phase: Phase,
    /// Since the last step ended; `None` before the first.
    pub last_step_age: Option<Duration>,
    /// Since the step that is being executed began.
    pub step_in_progress: Option<Duration>,
    /// For how long there has been work and no step has ended, or a state that is built again has not come further; `None`
    /// where nothing is to move.
    pub stalled_for: Option<Duration>,
    /// Steps that failed since the last one that ended well.
    pub failures_in_a_row: u64,
    /// What the last failed step, or the engine's death, said.
    pub last_error: Option<String>,
    /// Why there is no state, while there is none for want of memory.
    pub outage: Option<String>,
    /// When a refused client may try again.
    pub retry_after: Duration,
}

impl Health {
    /// True where requests are accepted, and those that are in have seen progress within `patience`.
    pub fn is_moving(&self, patience: Duration) -> bool {
        self.phase == Phase::Running && self.stalled_for.is_none_or(|stalled| stalled < patience)
    }
}
