use std::sync::Arc;
use std::time::Duration;

use plimsoll_core::{CacheEventCounts, DeviceTime};
use plimsoll_scheduler::SchedulerStats;

use crate::{Histogram, OutOfMemory, SecondsByKind};

/// Counters of the engine; a copy, cheap to take.
#[derive(Clone, Debug)]
pub struct EngineStats {
    /// Queue, KV cache, preemptions, prefix cache, tokens, as of the last time that a request was admitted or a step ended.
    pub scheduler: SchedulerStats,
    /// Requests admitted and not yet ended.
    pub in_flight: usize,
    /// Steps that succeeded.
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
    /// Prompt tokens that each step computed and tokens that it generated, as vLLM counts them.
    pub iteration_tokens: Histogram,
    /// Prompt tokens in each step that computed some beside requests that were generating.
    pub step_prompt_tokens: Histogram,
    /// Steps in which requests were generating that took longer than `--target-itl`.
    pub steps_above_target_itl: u64,
    /// Seconds of the steps in which requests generated and no image was encoded; zero where no steps were measured at start.
    pub seconds_by_kind: SecondsByKind,
    /// Requests in each step: the batch size.
    pub step_requests: Histogram,
    /// Steps that raised the memory held above the proved peak (or above the last such rise), or failed because they needed
    /// more scratch than was proved.
    pub high_water_above_proof: u64,
    /// States that were built again after a step ran out of device memory.
    pub rebuilds_oom: u64,
    /// States that were built again after a sleep.
    pub rebuilds_wake: u64,
    /// The latest step that ran out of device memory.
    pub last_oom: Option<Arc<OutOfMemory>>,
    /// Busy and idle time of the device since the engine started, if it works asynchronously.
    pub device_time: Option<DeviceTime>,
    /// Delivered and dropped batches of prefix cache events, if a listener is set.
    pub cache_events: Option<CacheEventCounts>,
}

/// Phase of the engine's life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::Display)]
#[strum(serialize_all = "lowercase")]
pub enum Phase {
    /// Accepts requests.
    Running,
    /// Builds a state after an out of memory or a wake-up; accepts no requests.
    #[strum(to_string = "building its state")]
    Rebuilding,
    /// Finishes its requests before it sleeps; accepts no more.
    #[strum(to_string = "falling asleep")]
    FallingAsleep,
    /// Has freed its state; accepts no requests.
    Asleep,
    /// Finishes its requests; accepts no more.
    Draining,
    /// Ended after a drain.
    Stopped,
    /// The thread ended by a defect; only a restart helps.
    Dead,
}

/// Whether the engine is alive and makes progress.
#[derive(Clone, Debug)]
pub struct Health {
    /// Phase of the engine's life.
    pub phase: Phase,
    /// Since the last step ended; `None` before the first.
    pub last_step_age: Option<Duration>,
    /// Since the step that is being executed began.
    pub step_in_progress: Option<Duration>,
    /// How long there has been work without a finished step, or a rebuild without progress; `None` if there is nothing to do.
    pub stalled_for: Option<Duration>,
    /// Steps that failed since the last success.
    pub failures_in_a_row: u64,
    /// Error of the last failed step, or of the engine's death.
    pub last_error: Option<String>,
    /// Why there is no state, while memory is missing.
    pub outage: Option<String>,
    /// When a refused client may try again.
    pub retry_after: Duration,
}

impl Health {
    /// True if requests are accepted, and admitted ones made progress within `patience`.
    pub fn is_moving(&self, patience: Duration) -> bool {
        self.phase == Phase::Running && self.stalled_for.is_none_or(|stalled| stalled < patience)
    }
}
