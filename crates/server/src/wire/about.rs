//! Responses about the server: models, health, memory.

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
    /// The name in responses.
    pub(crate) root: &'a str,
    /// Always `null`: there are no adapters.
    pub(crate) parent: Option<&'a str>,
    /// Maximum tokens of prompt and answer together.
    pub(crate) max_model_len: usize,
    /// What prompts may hold: `text`, and `image` where the model takes images.
    pub(crate) input_modalities: &'a [&'static str],
    /// How its linear layers are stored; `null` in floats.
    pub(crate) quantization: Option<&'a str>,
    /// Bits of device memory for each weight; `null` for a simulated model.
    pub(crate) bits_per_weight: Option<f64>,
    /// Weights; `null` for a simulated model.
    pub(crate) num_parameters: Option<u64>,
    /// Weights that are read for one token: without the experts to which it does not go.
    pub(crate) num_active_parameters: Option<u64>,
}

/// The engine's health.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct HealthReport<'a> {
    /// In `/health`: `ok` or `dead`. In `/ready`: `ready`, or why not.
    pub(crate) status: &'a str,
    /// Time since the last step ended; `null` before the first.
    pub(crate) last_step_age_seconds: Option<f64>,
    /// Time since the current step began.
    pub(crate) step_in_progress_seconds: Option<f64>,
    /// How long there has been work without a completed step, or a rebuild without progress.
    pub(crate) stalled_seconds: Option<f64>,
    /// Steps that failed since the last successful one.
    pub(crate) failures_in_a_row: u64,
    /// The error of the last failed step.
    pub(crate) last_error: Option<&'a str>,
    /// Why requests are not accepted after an out-of-memory error.
    pub(crate) reason: Option<&'a str>,
}

/// Progress of a start.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct StartReport {
    /// `starting`.
    pub(crate) status: &'static str,
    /// `resolve`, `download`, `device`, `weights`, `probe`, `rebuild`, `capture`, `validate` or `engine`.
    pub(crate) phase: &'static str,
    /// Progress within the phase, as text.
    pub(crate) detail: Option<String>,
    /// Completed part of the start; never decreases.
    #[schema(minimum = 0, maximum = 100)]
    pub(crate) percent: f64,
    pub(crate) elapsed_seconds: f64,
    /// Estimated remaining time; `null` while unknown.
    pub(crate) estimated_seconds: Option<f64>,
}

/// Why requests are not accepted.
#[derive(Debug, Serialize, ToSchema)]
#[serde(untagged)]
pub(crate) enum NotReady<'a> {
    Starting(StartReport),
    Engine(HealthReport<'a>),
}

/// Requests that a drain waits for.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct DrainReport {
    /// `draining`.
    pub(crate) status: &'static str,
    /// Requests that were accepted and have not ended.
    pub(crate) requests_in_flight: usize,
    /// Of these, how many are running.
    pub(crate) requests_running: usize,
    /// Of these, how many are queued.
    pub(crate) requests_waiting: usize,
    /// Seconds after which remaining requests are failed.
    pub(crate) timeout_seconds: f64,
}

/// The server's version.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Version {
    pub(crate) version: &'static str,
}

/// The device's memory; all sizes are bytes.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct MemoryReport {
    /// The report of the auto-profile, as `--profile-report` writes it.
    pub(crate) profile: Value,
    pub(crate) now: MemoryNow,
    /// The memory of each rank, where several serve the model together; `now` is that of the first.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) ranks: Vec<RankNow>,
    pub(crate) kv: KvNow,
    /// Absent where the model takes none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) images: Option<ImagesNow>,
    /// Device allocations since the server became ready; expected to be 0.
    pub(crate) device_allocs_after_ready: u64,
    /// Number of steps that exceeded the validated peak.
    pub(crate) high_water_above_proof: u64,
    pub(crate) rebuilds: Rebuilds,
    /// The last step that ran out of memory.
    pub(crate) last_oom: Option<LastOom>,
}

/// The device's meters, in bytes.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct MemoryNow {
    /// Capacity of the device.
    pub(crate) total: u64,
    /// Free memory.
    pub(crate) free: u64,
    /// Memory held by this server.
    pub(crate) reserved: u64,
    /// Of that, in use.
    pub(crate) used: u64,
    pub(crate) reserved_high: u64,
    pub(crate) used_high: u64,
    /// Peak of the worst-case steps when the KV cache size was validated.
    pub(crate) proved_peak: u64,
    /// Reserved and not in use.
    pub(crate) fragmentation: u64,
    /// Memory that the server could still allocate.
    pub(crate) headroom: u64,
    /// Memory of other processes.
    pub(crate) peers: u64,
    /// Memory held by this server, by component.
    #[schema(value_type = std::collections::BTreeMap<String, u64>)]
    pub(crate) components: Map<String, Value>,
}

/// The memory of one rank: that of its device, or of its part of one.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct RankNow {
    pub(crate) rank: usize,
    #[serde(flatten)]
    pub(crate) now: MemoryNow,
}

/// The KV cache.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct KvNow {
    pub(crate) pages: usize,
    /// Pages that requests hold.
    pub(crate) pages_used: usize,
    /// One entry per cache group: layers that keep the same part of a request.
    pub(crate) groups: Vec<KvGroupNow>,
    /// Absent where no layer has a state of fixed size.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) states: Option<StatesNow>,
}

/// States of fixed size: those that requests have beside their KV, and snapshots in the prefix cache.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct StatesNow {
    /// Layers that have one.
    pub(crate) layers: usize,
    pub(crate) slots: usize,
    /// Slots that requests hold.
    pub(crate) slots_used: usize,
    /// Slots with a snapshot that requests can begin with.
    pub(crate) slots_cached: usize,
    /// Bytes of one slot.
    pub(crate) slot_bytes: u64,
}

/// A cache group. All groups take their blocks from the same pages.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct KvGroupNow {
    /// `full` or `window`.
    pub(crate) kind: &'static str,
    /// Tokens that the layers see; `null` for all.
    pub(crate) window: Option<usize>,
    pub(crate) layers: usize,
    /// Further layers, which read what these keep and keep nothing themselves.
    pub(crate) sharing_layers: usize,
    pub(crate) pages_per_block: usize,
    /// Blocks that fit the cache if no other group needs pages.
    pub(crate) blocks: usize,
    /// Blocks that requests hold.
    pub(crate) blocks_used: usize,
    /// Blocks in the prefix cache, whether requests hold them or not.
    pub(crate) blocks_cached: usize,
    /// Of the blocks in use, bytes without a layer, as pages have room for more layers.
    pub(crate) rounding_bytes: u64,
}

/// The images for which the encoder has memory.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ImagesNow {
    /// Most images of one request.
    pub(crate) max_per_request: usize,
    pub(crate) largest: LargestImage,
}

/// The image of which the encoder needs the most memory.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct LargestImage {
    /// Columns of pixels, before it is resized.
    pub(crate) width: usize,
    /// Rows of pixels.
    pub(crate) height: usize,
    /// Patches that the encoder makes of it.
    pub(crate) patches: usize,
    /// Tokens of a prompt that are its embeddings, without marks around and between them.
    pub(crate) tokens: usize,
}

/// How often the engine's state was rebuilt.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Rebuilds {
    /// After an out-of-memory error.
    pub(crate) oom: u64,
    /// After a sleep.
    pub(crate) wake: u64,
}

/// The step that ran out of memory, and the memory at that time.
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
    /// Patches of the image that it encoded a part of, or of which it had rows; 0 without one.
    pub(crate) image_patches: usize,
    /// Sampling features in use: `greedy`, `random`, `top`, `penalties`, `bias`, `logprobs`.
    pub(crate) sampling: Vec<&'static str>,
}

/// Whether the server sleeps.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct SleepState {
    pub(crate) is_sleeping: bool,
}

/// The query of `POST /reset_prefix_cache`.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct ResetQuery {
    /// Only false: running requests keep their blocks.
    pub(crate) reset_running_requests: Option<bool>,
    /// Only false: there is no other cache.
    pub(crate) reset_external: Option<bool>,
}

/// Whether the prefix cache was emptied.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ResetReport {
    pub(crate) success: bool,
}

/// How busy the server is.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct LoadReport {
    /// Requests in progress.
    pub(crate) server_load: usize,
}

/// The query of `POST /sleep`.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct SleepQuery {
    /// Only 1: all memory but the weights is released.
    #[param(minimum = 1, maximum = 1)]
    pub(crate) level: Option<u32>,
    /// Seconds to wait for running requests.
    #[param(minimum = 0)]
    pub(crate) timeout: Option<f64>,
}
