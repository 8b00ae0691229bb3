//! Every metric name of the project.

/// A metric: our name, vLLM's name if there is one, help text.
pub(super) struct Name(
    pub(super) &'static str,
    pub(super) Option<&'static str>,
    pub(super) &'static str,
);

pub(super) const RUNNING: Name = Name(
    "plimsoll_requests_running",
    Some("vllm:num_requests_running"),
    "Running requests.",
);
pub(super) const WAITING: Name = Name(
    "plimsoll_requests_waiting",
    Some("vllm:num_requests_waiting"),
    "Queued requests.",
);
pub(super) const IN_FLIGHT: Name = Name(
    "plimsoll_requests_in_flight",
    None,
    "Requests that were accepted and have not ended.",
);
pub(super) const KV_USAGE: Name = Name(
    "plimsoll_kv_cache_usage_ratio",
    Some("vllm:kv_cache_usage_perc"),
    "Fraction of KV blocks in use, 0 to 1.",
);
pub(super) const KV_BLOCKS: Name = Name("plimsoll_kv_blocks", None, "KV blocks by state.");
pub(super) const KV_TAIL: Name = Name(
    "plimsoll_kv_tail_tokens",
    None,
    "Unused token slots in the last KV block of running requests.",
);
pub(super) const CACHE_CONFIG: Name = Name(
    "plimsoll_kv_cache_info",
    Some("vllm:cache_config_info"),
    "Configuration of the KV cache, as labels.",
);
pub(super) const PREEMPTIONS: Name = Name(
    "plimsoll_preemptions_total",
    Some("vllm:num_preemptions_total"),
    "Preemptions of running requests, which are recomputed, by cause: no free KV block, or the whole cache was lost.",
);
pub(super) const PREFIX_QUERIES: Name = Name(
    "plimsoll_prefix_cache_queries_total",
    Some("vllm:prefix_cache_queries_total"),
    "Prompt tokens looked up in the prefix cache, once for each request.",
);
pub(super) const PREFIX_HITS: Name = Name(
    "plimsoll_prefix_cache_hits_total",
    Some("vllm:prefix_cache_hits_total"),
    "Prompt tokens found in the prefix cache.",
);
pub(super) const PROMPT_TOKENS: Name = Name(
    "plimsoll_prompt_tokens_total",
    Some("vllm:prompt_tokens_total"),
    "Prompt tokens of requests that ran.",
);
pub(super) const GENERATED_TOKENS: Name = Name(
    "plimsoll_generation_tokens_total",
    Some("vllm:generation_tokens_total"),
    "Tokens generated.",
);
pub(super) const COMPUTED_TOKENS: Name = Name(
    "plimsoll_computed_tokens_total",
    None,
    "Tokens computed, including recomputation after preemptions.",
);
pub(super) const EVICTIONS: Name = Name(
    "plimsoll_prefix_cache_evictions_total",
    None,
    "Cached KV blocks evicted for other requests.",
);
pub(super) const EVENTS_PUBLISHED: Name = Name(
    "plimsoll_kv_event_batches_published_total",
    None,
    "Batches of KV events that were published.",
);
pub(super) const EVENTS_DROPPED: Name = Name(
    "plimsoll_kv_event_batches_dropped_total",
    None,
    "Batches of KV events that were dropped because publishing was too slow; a snapshot followed.",
);
pub(super) const LORA_REQUESTS: &str = "vllm:lora_requests_info";
pub(super) const SUBMITTED: Name = Name(
    "plimsoll_requests_submitted_total",
    None,
    "Requests accepted by the engine.",
);
pub(super) const REFUSED: Name = Name(
    "plimsoll_requests_refused_total",
    None,
    "Requests refused because the queue was full.",
);
pub(super) const CANCELLED: Name = Name(
    "plimsoll_requests_cancelled_total",
    None,
    "Requests cancelled by their client.",
);
pub(super) const FINISHED: Name = Name(
    "plimsoll_requests_finished_total",
    Some("vllm:request_success_total"),
    "Requests that finished successfully, by reason.",
);
pub(super) const FAILED: Name = Name(
    "plimsoll_requests_failed_total",
    None,
    "Requests that failed: their step failed or they timed out.",
);
pub(super) const STEPS: Name = Name("plimsoll_steps_total", None, "Successful engine steps.");
pub(super) const FAILED_STEPS: Name = Name("plimsoll_steps_failed_total", None, "Failed engine steps.");
pub(super) const STEP_SECONDS: Name = Name("plimsoll_step_seconds", None, "Duration of a step.");
pub(super) const STEP_TOKENS: Name = Name(
    "plimsoll_step_tokens",
    Some("vllm:iteration_tokens_total"),
    "Tokens computed in a step.",
);
pub(super) const STEP_REQUESTS: Name = Name(
    "plimsoll_step_requests",
    None,
    "Requests computed in a step: the batch size.",
);
pub(super) const GPU_BUSY: Name = Name(
    "plimsoll_gpu_busy_seconds_total",
    None,
    "Time the GPU spent in steps, by GPU timestamps.",
);
pub(super) const GPU_IDLE: Name = Name(
    "plimsoll_gpu_idle_seconds_total",
    None,
    "Time the GPU was idle between steps although there was work, by GPU timestamps.",
);
pub(super) const REBUILDS: Name = Name(
    "plimsoll_engine_rebuilds_total",
    None,
    "Rebuilds of the engine's state in the running server, by reason: out of device memory, or wake-up from sleep.",
);
pub(super) const HEALTHY: Name = Name(
    "plimsoll_engine_healthy",
    Some("vllm:engine_healthy"),
    "1 while the engine is alive.",
);
pub(super) const STATUS: Name = Name(
    "plimsoll_server_status",
    None,
    "1 for the status that /ready reports, 0 for the others.",
);
pub(super) const STALLED: Name = Name(
    "plimsoll_engine_stalled_seconds",
    None,
    "How long there has been work without a completed step, or a rebuild without progress.",
);
pub(super) const STALL_TIMEOUT: Name = Name(
    "plimsoll_engine_stall_timeout_seconds",
    None,
    "How long without a completed step until /ready fails.",
);
pub(super) const TTFT: Name = Name(
    "plimsoll_time_to_first_token_seconds",
    Some("vllm:time_to_first_token_seconds"),
    "From submission to the first token.",
);
pub(super) const ITL: Name = Name(
    "plimsoll_inter_token_latency_seconds",
    Some("vllm:inter_token_latency_seconds"),
    "Between two tokens of a request.",
);
pub(super) const TPOT: Name = Name(
    "plimsoll_time_per_output_token_seconds",
    Some("vllm:request_time_per_output_token_seconds"),
    "Mean time between tokens, one observation per request.",
);
pub(super) const E2E: Name = Name(
    "plimsoll_request_seconds",
    Some("vllm:e2e_request_latency_seconds"),
    "From submission to the last token.",
);
pub(super) const QUEUE: Name = Name(
    "plimsoll_request_queue_seconds",
    Some("vllm:request_queue_time_seconds"),
    "From submission until the first step.",
);
pub(super) const PREFILL: Name = Name(
    "plimsoll_request_prefill_seconds",
    Some("vllm:request_prefill_time_seconds"),
    "From the beginning of the first step to the first token.",
);
pub(super) const DECODE: Name = Name(
    "plimsoll_request_decode_seconds",
    Some("vllm:request_decode_time_seconds"),
    "From the first token to the last.",
);
pub(super) const INFERENCE: Name = Name(
    "plimsoll_request_inference_seconds",
    Some("vllm:request_inference_time_seconds"),
    "From the beginning of the first step to the last token.",
);
pub(super) const REQUEST_PROMPT: Name = Name(
    "plimsoll_request_prompt_tokens",
    Some("vllm:request_prompt_tokens"),
    "Prompt tokens of a request.",
);
pub(super) const REQUEST_GENERATED: Name = Name(
    "plimsoll_request_generation_tokens",
    Some("vllm:request_generation_tokens"),
    "Generated tokens of a request.",
);
pub(super) const REQUEST_N: Name = Name(
    "plimsoll_request_choices",
    Some("vllm:request_params_n"),
    "Choices for each prompt that a request asked for.",
);
pub(super) const START_TIME: Name = Name(
    "plimsoll_start_time_seconds",
    None,
    "When the server became ready, in seconds since 1970.",
);
pub(super) const START_PROGRESS: Name = Name(
    "plimsoll_start_progress_ratio",
    None,
    "Completed fraction of the start, 0 to 1, by phase.",
);
pub(super) const START_ELAPSED: Name = Name(
    "plimsoll_start_elapsed_seconds",
    None,
    "Duration of the start so far; only while starting.",
);
pub(super) const REQUEST_MAX_TOKENS: Name = Name(
    "plimsoll_request_max_tokens",
    Some("vllm:request_params_max_tokens"),
    "Maximum number of tokens that a request may generate.",
);
pub(super) const MEMORY: Name = Name(
    "plimsoll_device_memory_bytes",
    None,
    "Device memory held by the server, by component.",
);
pub(super) const MEMORY_TOTAL: Name = Name(
    "plimsoll_device_memory_total_bytes",
    None,
    "Capacity of the device.",
);
pub(super) const MEMORY_FREE: Name = Name("plimsoll_device_memory_free_bytes", None, "Free device memory.");
pub(super) const MEMORY_PEERS: Name = Name(
    "plimsoll_device_memory_peers_bytes",
    None,
    "Device memory of other processes.",
);
pub(super) const MEMORY_HIGH: Name = Name(
    "plimsoll_device_memory_high_bytes",
    None,
    "Peak device memory held since the server became ready.",
);
pub(super) const MEMORY_USED_HIGH: Name = Name(
    "plimsoll_device_memory_used_high_bytes",
    None,
    "Peak device memory in use since the server became ready.",
);
pub(super) const PROVED_PEAK: Name = Name(
    "plimsoll_device_memory_proved_peak_bytes",
    None,
    "Peak device memory held while the worst-case steps were validated, as counted by the server.",
);
pub(super) const ABOVE_PROOF: Name = Name(
    "plimsoll_high_water_above_proof_total",
    None,
    "Steps that raised the memory held above the validated peak; expected to be 0.",
);
pub(super) const FRAGMENTATION: Name = Name(
    "plimsoll_fragmentation_bytes",
    None,
    "Device memory that allocators hold but do not use.",
);
pub(super) const HEADROOM: Name = Name(
    "plimsoll_headroom_bytes",
    None,
    "Device memory that the server could still allocate, including the reserved margins.",
);
pub(super) const ALLOCATIONS: Name = Name(
    "plimsoll_device_allocs_after_ready_total",
    None,
    "Device allocations since the server became ready; expected to be 0.",
);

pub(super) const START_STAGE: Name = Name(
    "plimsoll_start_stage_seconds",
    None,
    "Duration of each stage of the start, including the phases of the profile; tokenizer and weights load in parallel.",
);
pub(super) const PROFILE_ATTEMPTS: Name = Name(
    "plimsoll_profile_attempts",
    None,
    "KV cache sizes tried for the state in use, by outcome; each that ran out of memory was followed by a smaller one.",
);
pub(super) const HTTP_REQUESTS: Name = Name(
    "plimsoll_http_requests_total",
    None,
    "Finished HTTP requests by route, method and status code; 499 if the client disconnected before the response.",
);
pub(super) const HTTP_SECONDS: Name = Name(
    "plimsoll_http_request_seconds",
    None,
    "From an HTTP request's head to the end of its response.",
);
pub(super) const HTTP_RECEIVED: Name = Name(
    "plimsoll_http_request_bytes",
    None,
    "Size of an HTTP request's body, as read.",
);
pub(super) const HTTP_SENT: Name = Name(
    "plimsoll_http_response_bytes",
    None,
    "Size of an HTTP response's body, as sent.",
);
pub(super) const HTTP_IN_FLIGHT: Name = Name(
    "plimsoll_http_requests_in_flight",
    None,
    "HTTP requests in progress, including the one for this page.",
);

/// Bounds of latencies between tokens.
const SHORT: &[f64] = &[
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0,
];
/// Bounds of request durations.
const LONG: &[f64] = &[
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
];
/// vLLM's bounds (`vllm/v1/metrics/loggers.py`), so that its dashboards work.
const VLLM_TTFT: &[f64] = &[
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
    80.0, 160.0, 640.0, 2560.0,
];
const VLLM_ITL: &[f64] = &[
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
];
const VLLM_REQUEST: &[f64] = &[
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0,
    960.0, 1920.0, 7680.0,
];
/// vLLM's too; those above the longest sequence are omitted.
const TOKENS: &[f64] = &[
    1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6,
    2e6, 5e6, 1e7,
];
const CHOICES: &[f64] = &[1.0, 2.0, 5.0, 10.0, 20.0];
/// Bounds of body sizes: from a short chat to images and many prompts.
const BODY: &[f64] = &[
    256.0,
    1024.0,
    4096.0,
    16384.0,
    65536.0,
    262_144.0,
    1_048_576.0,
    4_194_304.0,
    16_777_216.0,
];

/// A histogram, its bounds under our name and under vLLM's.
type Buckets = (&'static Name, &'static [f64], &'static [f64]);

/// The bounds of all histograms of a server whose longest sequence has `max_model_len` tokens.
pub(super) fn buckets(max_model_len: usize) -> [Buckets; 15] {
    let tokens = &TOKENS[..TOKENS.partition_point(|&bound| bound <= max_model_len as f64)];
    // A histogram needs at least one bound.
    let tokens = if tokens.is_empty() { &TOKENS[..1] } else { tokens };
    [
        (&TTFT, LONG, VLLM_TTFT),
        (&ITL, SHORT, VLLM_ITL),
        (&TPOT, SHORT, VLLM_ITL),
        (&E2E, LONG, VLLM_REQUEST),
        (&QUEUE, LONG, VLLM_REQUEST),
        (&PREFILL, LONG, VLLM_REQUEST),
        (&DECODE, LONG, VLLM_REQUEST),
        (&INFERENCE, LONG, VLLM_REQUEST),
        (&REQUEST_PROMPT, tokens, tokens),
        (&REQUEST_GENERATED, tokens, tokens),
        (&REQUEST_MAX_TOKENS, tokens, tokens),
        (&REQUEST_N, CHOICES, CHOICES),
        (&HTTP_SECONDS, LONG, LONG),
        (&HTTP_RECEIVED, BODY, BODY),
        (&HTTP_SENT, BODY, BODY),
    ]
}
