//! Every metric name of the project.

/// A metric: our name, vLLM's name if there is one, help text.
pub(super) struct Name(
    pub(super) &'static str,
    pub(super) Option<&'static str>,
    pub(super) &'static str,
);

macro_rules! catalog {
    ($($name:ident: $ours:literal $(, $vllm:literal)?: $help:literal;)*) => {
        $(pub(super) const $name: Name = Name($ours, first(&[$($vllm)?]), $help);)*
    };
}

const fn first(names: &[&'static str]) -> Option<&'static str> {
    match names {
        [] => None,
        [name, ..] => Some(name),
    }
}

catalog! {
    RUNNING: "plimsoll_requests_running", "vllm:num_requests_running": "Running requests.";
    WAITING: "plimsoll_requests_waiting", "vllm:num_requests_waiting": "Queued requests.";
    IN_FLIGHT: "plimsoll_requests_in_flight": "Requests that were accepted and have not ended.";
    KV_USAGE: "plimsoll_kv_cache_usage_ratio", "vllm:kv_cache_usage_perc": "Fraction of KV pages in use, 0 to 1.";
    KV_BLOCKS: "plimsoll_kv_blocks": "Pages of the KV cache by state; with one cache group, a page is a block.";
    KV_GROUP: "plimsoll_kv_group_info": "Cache groups of the model, as labels.";
    KV_GROUP_BLOCKS: "plimsoll_kv_group_blocks":
        "KV blocks of a cache group by state; the total is what fits if no other group needs pages.";
    KV_ROUNDING: "plimsoll_kv_rounding_bytes": "Bytes of KV blocks in use that are lost because pages have room for more layers.";
    KV_TAIL: "plimsoll_kv_tail_tokens": "Unused token slots in the last KV block of running requests.";
    CACHE_CONFIG: "plimsoll_kv_cache_info", "vllm:cache_config_info": "Configuration of the KV cache, as labels.";
    PREEMPTIONS: "plimsoll_preemptions_total", "vllm:num_preemptions_total":
        "Preemptions of running requests, which are recomputed, by cause: no free KV block, or the whole cache was lost.";
    PREFIX_QUERIES: "plimsoll_prefix_cache_queries_total", "vllm:prefix_cache_queries_total":
        "Prompt tokens looked up in the prefix cache, once for each request.";
    PREFIX_HITS: "plimsoll_prefix_cache_hits_total", "vllm:prefix_cache_hits_total":
        "Prompt tokens found in the prefix cache.";
    PROMPT_TOKENS: "plimsoll_prompt_tokens_total", "vllm:prompt_tokens_total": "Prompt tokens of requests that ran.";
    GENERATED_TOKENS: "plimsoll_generation_tokens_total", "vllm:generation_tokens_total": "Tokens generated.";
    COMPUTED_TOKENS: "plimsoll_computed_tokens_total": "Tokens computed, including recomputation after preemptions.";
    EVICTIONS: "plimsoll_prefix_cache_evictions_total": "Cached KV blocks evicted for other requests.";
    EVENTS_PUBLISHED: "plimsoll_kv_event_batches_published_total": "Batches of KV events that were published.";
    EVENTS_DROPPED: "plimsoll_kv_event_batches_dropped_total":
        "Batches of KV events that were dropped because publishing was too slow; a snapshot followed.";
    SUBMITTED: "plimsoll_requests_submitted_total": "Requests accepted by the engine.";
    REFUSED: "plimsoll_requests_refused_total": "Requests refused because the queue was full.";
    CANCELLED: "plimsoll_requests_cancelled_total": "Requests cancelled by their client.";
    FINISHED: "plimsoll_requests_finished_total", "vllm:request_success_total":
        "Requests that finished successfully, by reason.";
    FAILED: "plimsoll_requests_failed_total": "Requests that failed: their step failed or they timed out.";
    STEPS: "plimsoll_steps_total": "Successful engine steps.";
    FAILED_STEPS: "plimsoll_steps_failed_total": "Failed engine steps.";
    STEP_SECONDS: "plimsoll_step_seconds": "Duration of a step.";
    STEP_TOKENS: "plimsoll_step_tokens", "vllm:iteration_tokens_total": "Tokens computed in a step.";
    STEP_REQUESTS: "plimsoll_step_requests": "Requests computed in a step: the batch size.";
    GPU_BUSY: "plimsoll_gpu_busy_seconds_total": "Time the GPU spent in steps, by GPU timestamps.";
    GPU_IDLE: "plimsoll_gpu_idle_seconds_total":
        "Time the GPU was idle between steps although there was work, by GPU timestamps.";
    REBUILDS: "plimsoll_engine_rebuilds_total":
        "Rebuilds of the engine's state in the running server, by reason: out of device memory, or wake-up from sleep.";
    HEALTHY: "plimsoll_engine_healthy", "vllm:engine_healthy": "1 while the engine is alive.";
    STATUS: "plimsoll_server_status": "1 for the status that /ready reports, 0 for the others.";
    STALLED: "plimsoll_engine_stalled_seconds":
        "How long there has been work without a completed step, or a rebuild without progress.";
    STALL_TIMEOUT: "plimsoll_engine_stall_timeout_seconds": "How long without a completed step until /ready fails.";
    TTFT: "plimsoll_time_to_first_token_seconds", "vllm:time_to_first_token_seconds":
        "From submission to the first token.";
    ITL: "plimsoll_inter_token_latency_seconds", "vllm:inter_token_latency_seconds": "Between two tokens of a request.";
    TPOT: "plimsoll_time_per_output_token_seconds", "vllm:request_time_per_output_token_seconds":
        "Mean time between tokens, one observation per request.";
    E2E: "plimsoll_request_seconds", "vllm:e2e_request_latency_seconds": "From submission to the last token.";
    QUEUE: "plimsoll_request_queue_seconds", "vllm:request_queue_time_seconds": "From submission until the first step.";
    PREFILL: "plimsoll_request_prefill_seconds", "vllm:request_prefill_time_seconds":
        "From the beginning of the first step to the first token.";
    DECODE: "plimsoll_request_decode_seconds", "vllm:request_decode_time_seconds": "From the first token to the last.";
    INFERENCE: "plimsoll_request_inference_seconds", "vllm:request_inference_time_seconds":
        "From the beginning of the first step to the last token.";
    REQUEST_PROMPT: "plimsoll_request_prompt_tokens", "vllm:request_prompt_tokens": "Prompt tokens of a request.";
    REQUEST_GENERATED: "plimsoll_request_generation_tokens", "vllm:request_generation_tokens":
        "Generated tokens of a request.";
    REQUEST_N: "plimsoll_request_choices", "vllm:request_params_n": "Choices for each prompt that a request asked for.";
    START_TIME: "plimsoll_start_time_seconds": "When the server became ready, in seconds since 1970.";
    START_PROGRESS: "plimsoll_start_progress_ratio": "Completed fraction of the start, 0 to 1, by phase.";
    START_ELAPSED: "plimsoll_start_elapsed_seconds": "Duration of the start so far; only while starting.";
    REQUEST_MAX_TOKENS: "plimsoll_request_max_tokens", "vllm:request_params_max_tokens":
        "Maximum number of tokens that a request may generate.";
    MEMORY: "plimsoll_device_memory_bytes": "Device memory held by the server, by component.";
    MEMORY_TOTAL: "plimsoll_device_memory_total_bytes": "Capacity of the device.";
    MEMORY_FREE: "plimsoll_device_memory_free_bytes": "Free device memory.";
    MEMORY_PEERS: "plimsoll_device_memory_peers_bytes": "Device memory of other processes.";
    MEMORY_HIGH: "plimsoll_device_memory_high_bytes": "Peak device memory held since the server became ready.";
    MEMORY_USED_HIGH: "plimsoll_device_memory_used_high_bytes":
        "Peak device memory in use since the server became ready.";
    PROVED_PEAK: "plimsoll_device_memory_proved_peak_bytes":
        "Peak device memory held while the worst-case steps were validated, as counted by the server.";
    ABOVE_PROOF: "plimsoll_high_water_above_proof_total":
        "Steps that raised the memory held above the validated peak; expected to be 0.";
    FRAGMENTATION: "plimsoll_fragmentation_bytes": "Device memory that allocators hold but do not use.";
    HEADROOM: "plimsoll_headroom_bytes":
        "Device memory that the server could still allocate, including the reserved margins.";
    ALLOCATIONS: "plimsoll_device_allocs_after_ready_total":
        "Device allocations since the server became ready; expected to be 0.";
    START_STAGE: "plimsoll_start_stage_seconds":
        "Duration of each stage of the start, including the phases of the profile; tokenizer and weights load in parallel.";
    PROFILE_ATTEMPTS: "plimsoll_profile_attempts":
        "KV cache sizes tried for the state in use, by outcome; each that ran out of memory was followed by a smaller one.";
    HTTP_REQUESTS: "plimsoll_http_requests_total":
        "Finished HTTP requests by route, method and status code; 499 if the client disconnected before the response.";
    HTTP_SECONDS: "plimsoll_http_request_seconds": "From an HTTP request's head to the end of its response.";
    HTTP_RECEIVED: "plimsoll_http_request_bytes": "Size of an HTTP request's body, as read.";
    HTTP_SENT: "plimsoll_http_response_bytes": "Size of an HTTP response's body, as sent.";
    IGNORED_FIELDS: "plimsoll_ignored_fields_total":
        "Requests with a field that the API does not have and that was ignored, by field; `other` beyond the first 64 fields.";
    HTTP_IN_FLIGHT: "plimsoll_http_requests_in_flight": "HTTP requests in progress, including the one for this page.";
    PROCESS_CPU: "process_cpu_seconds_total": "CPU time of the process, in all its threads.";
    PROCESS_RESIDENT: "process_resident_memory_bytes": "Host memory that the process has in use.";
    PROCESS_VIRTUAL: "process_virtual_memory_bytes": "Addresses that the process has in use.";
    PROCESS_THREADS: "process_threads": "Threads of the process.";
    PROCESS_OPEN_FILES: "process_open_fds": "File descriptors, sockets among them, that the process holds.";
    PROCESS_MAX_FILES: "process_max_fds": "File descriptors that the process may hold.";
    PROCESS_START: "process_start_time_seconds": "When the process began, in seconds since 1970.";
}

pub(super) const LORA_REQUESTS: &str = "vllm:lora_requests_info";

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
