//! What the server says about itself.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::{IntoParams, ToSchema};

/// The served model, once under each of its names.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ModelList<'a> {
    /// `list`.
    pub(crate) object: &'static str,
    pub(crate) data: Vec<ModelCard<'a>>,
}

/// One name of the served model.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ModelCard<'a> {
    /// The name that requests use.
    pub(crate) id: &'a str,
    /// `model`.
    pub(crate) object: &'static str,
    /// When the server started, in seconds since 1970.
    pub(crate) created: u64,
    pub(crate) owned_by: &'static str,
    /// The name that answers carry.
    pub(crate) root: &'a str,
    /// Always `null`: there are no adapters.
    pub(crate) parent: Option<&'a str>,
    /// Most tokens of prompt and answer together.
    pub(crate) max_model_len: usize,
}

/// How the engine is.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct HealthReport<'a> {
    /// Of `/health`: `ok` or `dead`. Of `/ready`: `ready`, or why not.
    pub(crate) status: &'a str,
    /// Since the last step ended; `null` before the first.
    pub(crate) last_step_age_seconds: Option<f64>,
    /// Since the step that is being computed began.
    pub(crate) step_in_progress_seconds: Option<f64>,
    /// For how long there has been work and no step has ended, or a state that is built again has not come further.
    pub(crate) stalled_seconds: Option<f64>,
    /// Steps that failed since the last that ended well.
    pub(crate) failures_in_a_row: u64,
    /// What the last failed step said.
    pub(crate) last_error: Option<&'a str>,
    /// Why requests are not accepted, while memory is lacking.
    pub(crate) reason: Option<&'a str>,
}

/// How far a start is.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct StartReport {
    /// `starting`.
    pub(crate) status: &'static str,
    /// `resolve`, `download`, `device`, `weights`, `probe`, `rebuild`, `capture`, `validate` or `engine`.
    pub(crate) phase: &'static str,
    /// How far the phase is, in words.
    pub(crate) detail: Option<String>,
    /// What part of the start is done; it never falls.
    #[schema(minimum = 0, maximum = 100)]
    pub(crate) percent: f64,
    pub(crate) elapsed_seconds: f64,
    /// How long it will still take; `null` while that is unknown.
    pub(crate) estimated_seconds: Option<f64>,
}

/// Why requests are not accepted.
#[derive(Debug, Serialize, ToSchema)]
#[serde(untagged)]
pub(crate) enum NotReady<'a> {
    Starting(StartReport),
    Engine(HealthReport<'a>),
}

/// What a drain waits for.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct DrainReport {
    /// `draining`.
    pub(crate) status: &'static str,
    /// Requests admitted and not yet ended.
    pub(crate) requests_in_flight: usize,
    /// Of these, how many run.
    pub(crate) requests_running: usize,
    /// Of these, how many wait for their turn.
    pub(crate) requests_waiting: usize,
    /// After so many seconds what is left is failed.
    pub(crate) timeout_seconds: f64,
}

/// The server's version.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Version {
    pub(crate) version: &'static str,
}

/// What the device's memory holds; all sizes are bytes.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct MemoryReport {
    /// The report of the auto-profile, as `--profile-report` writes it.
    pub(crate) profile: Value,
    pub(crate) now: MemoryNow,
    /// 0, or memory was taken that no proof covers.
    pub(crate) device_allocs_after_ready: u64,
    /// How often steps held more than was proved.
    pub(crate) high_water_above_proof: u64,
    pub(crate) rebuilds: Rebuilds,
    /// The last step that ran out of memory.
    pub(crate) last_oom: Option<LastOom>,
}

/// The device's meters, in bytes.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct MemoryNow {
    /// What the device has.
    pub(crate) total: u64,
    /// What anybody could still take.
    pub(crate) free: u64,
    /// What this server took.
    pub(crate) reserved: u64,
    /// What of that is in use.
    pub(crate) used: u64,
    pub(crate) reserved_high: u64,
    pub(crate) used_high: u64,
    /// The most that the worst steps held when the size was proved.
    pub(crate) proved_peak: u64,
    /// Reserved and not in use.
    pub(crate) fragmentation: u64,
    /// What is left before memory runs out.
    pub(crate) headroom: u64,
    /// What other processes hold.
    pub(crate) peers: u64,
    /// What this server took, by purpose.
    #[schema(value_type = std::collections::BTreeMap<String, u64>)]
    pub(crate) components: Map<String, Value>,
}

/// How often the engine's state was built again.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Rebuilds {
    /// Because memory had run out.
    pub(crate) oom: u64,
    /// Because the server was woken.
    pub(crate) wake: u64,
}

/// Which step ran out of memory, and who had it.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct LastOom {
    pub(crate) step: OomStep,
    pub(crate) requested: u64,
    pub(crate) component: &'static str,
    pub(crate) total: u64,
    pub(crate) free: u64,
    pub(crate) reserved: u64,
    pub(crate) used: u64,
    pub(crate) peers: u64,
    pub(crate) peers_at_ready: u64,
    pub(crate) peers_delta: i64,
}

/// The shape of a step.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct OomStep {
    pub(crate) rows: usize,
    pub(crate) tokens: usize,
    pub(crate) longest_context: usize,
    /// Kinds of sampling: `greedy`, `random`, `top`, `penalties`, `bias`, `logprobs`.
    pub(crate) sampling: Vec<&'static str>,
}

/// Whether the server sleeps.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct SleepState {
    pub(crate) is_sleeping: bool,
}

/// The query of `POST /sleep`.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct SleepQuery {
    /// Only 1: all memory but the weights is given back.
    #[param(minimum = 1, maximum = 1)]
    pub(crate) level: Option<u32>,
    /// Seconds that running requests are waited for.
    #[param(minimum = 0)]
    pub(crate) timeout: Option<f64>,
}
