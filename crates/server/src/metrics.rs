//! `/metrics`. Every metric name of the project stands in this file: our own `plimsoll_*`, and for those that dashboards,
//! autoscalers and the Gateway API inference extension already know, vLLM's name as well.

pub mod names;
mod timer;

use std::fmt::Write;
use std::time::Duration;

use metrics::{Counter, Gauge, Key, Label, Metadata, Recorder, SharedString};
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle, PrometheusRecorder};
use plimsoll_core::KvConfig;
use plimsoll_engine::{EngineStats, Health, Histogram, Phase};

use crate::state::Memory;

pub(crate) use timer::Timer;

/// A metric under our name and, where there is one, vLLM's.
struct Name(&'static str, Option<&'static str>, &'static str);

const RUNNING: Name = Name(
    "plimsoll_requests_running",
    Some("vllm:num_requests_running"),
    "Requests that have KV and run.",
);
const WAITING: Name = Name(
    "plimsoll_requests_waiting",
    Some("vllm:num_requests_waiting"),
    "Requests that wait to run.",
);
const IN_FLIGHT: Name = Name(
    "plimsoll_requests_in_flight",
    None,
    "Requests admitted and not yet ended.",
);
const KV_USAGE: Name = Name(
    "plimsoll_kv_cache_usage_ratio",
    Some("vllm:kv_cache_usage_perc"),
    "Part of the KV blocks in use, 0 to 1.",
);
const KV_BLOCKS: Name = Name("plimsoll_kv_blocks", None, "KV blocks by state.");
const CACHE_CONFIG: Name = Name(
    "plimsoll_kv_cache_info",
    Some("vllm:cache_config_info"),
    "Shape of the KV cache, as labels.",
);
const PREEMPTIONS: Name = Name(
    "plimsoll_preemptions_total",
    Some("vllm:num_preemptions_total"),
    "Times a running request gave up its KV.",
);
const PREFIX_QUERIES: Name = Name(
    "plimsoll_prefix_cache_queries_total",
    Some("vllm:prefix_cache_queries_total"),
    "Prompt tokens looked up in the prefix cache.",
);
const PREFIX_HITS: Name = Name(
    "plimsoll_prefix_cache_hits_total",
    Some("vllm:prefix_cache_hits_total"),
    "Prompt tokens found in the prefix cache.",
);
const PROMPT_TOKENS: Name = Name(
    "plimsoll_prompt_tokens_total",
    Some("vllm:prompt_tokens_total"),
    "Prompt tokens of requests that ran.",
);
const GENERATED_TOKENS: Name = Name(
    "plimsoll_generation_tokens_total",
    Some("vllm:generation_tokens_total"),
    "Tokens generated.",
);
const COMPUTED_TOKENS: Name = Name(
    "plimsoll_computed_tokens_total",
    None,
    "Tokens computed, those after a preemption again.",
);
const EVICTIONS: Name = Name(
    "plimsoll_prefix_cache_evictions_total",
    None,
    "Cached KV blocks given up for other requests.",
);
const SUBMITTED: Name = Name(
    "plimsoll_requests_submitted_total",
    None,
    "Requests admitted by the engine.",
);
const REFUSED: Name = Name(
    "plimsoll_requests_refused_total",
    None,
    "Requests refused because the queue was full.",
);
const CANCELLED: Name = Name(
    "plimsoll_requests_cancelled_total",
    None,
    "Requests ended early: the client went away, or a stop string was found.",
);
const FINISHED: Name = Name(
    "plimsoll_requests_finished_total",
    Some("vllm:request_success_total"),
    "Requests that ended well, by reason.",
);
const FAILED: Name = Name(
    "plimsoll_requests_failed_total",
    None,
    "Requests whose step failed.",
);
const STEPS: Name = Name(
    "plimsoll_steps_total",
    None,
    "Steps of the engine that ended well.",
);
const FAILED_STEPS: Name = Name(
    "plimsoll_steps_failed_total",
    None,
    "Steps of the engine that failed.",
);
const STEP_SECONDS: Name = Name("plimsoll_step_seconds", None, "Duration of a step.");
const STEP_TOKENS: Name = Name(
    "plimsoll_step_tokens",
    Some("vllm:iteration_tokens_total"),
    "Tokens computed in a step.",
);
const GPU_BUSY: Name = Name(
    "plimsoll_gpu_busy_seconds_total",
    None,
    "Time the GPU computed steps, by its own clock.",
);
const GPU_IDLE: Name = Name(
    "plimsoll_gpu_idle_seconds_total",
    None,
    "Time the GPU waited for its next step although there was work, by its own clock.",
);
const REBUILDS: Name = Name(
    "plimsoll_engine_rebuilds_total",
    None,
    "States built and proved again in the running server, by reason: a step ran out of device memory, or a sleep ended.",
);
const HEALTHY: Name = Name(
    "plimsoll_engine_healthy",
    Some("vllm:engine_healthy"),
    "1 while the engine lives.",
);
const STALLED: Name = Name(
    "plimsoll_engine_stalled_seconds",
    None,
    "For how long there is work and no step ended.",
);
const TTFT: Name = Name(
    "plimsoll_time_to_first_token_seconds",
    Some("vllm:time_to_first_token_seconds"),
    "From submission to the first token.",
);
const ITL: Name = Name(
    "plimsoll_inter_token_latency_seconds",
    Some("vllm:inter_token_latency_seconds"),
    "Between two tokens of a request.",
);
const TPOT: Name = Name(
    "plimsoll_time_per_output_token_seconds",
    Some("vllm:request_time_per_output_token_seconds"),
    "Mean time between tokens, one observation per request.",
);
const E2E: Name = Name(
    "plimsoll_request_seconds",
    Some("vllm:e2e_request_latency_seconds"),
    "From submission to the last token.",
);
const QUEUE: Name = Name(
    "plimsoll_request_queue_seconds",
    Some("vllm:request_queue_time_seconds"),
    "From submission to admission.",
);
const PREFILL: Name = Name(
    "plimsoll_request_prefill_seconds",
    Some("vllm:request_prefill_time_seconds"),
    "From admission to the first token.",
);
const DECODE: Name = Name(
    "plimsoll_request_decode_seconds",
    Some("vllm:request_decode_time_seconds"),
    "From the first token to the last.",
);
const INFERENCE: Name = Name(
    "plimsoll_request_inference_seconds",
    Some("vllm:request_inference_time_seconds"),
    "From admission to the last token.",
);
const REQUEST_PROMPT: Name = Name(
    "plimsoll_request_prompt_tokens",
    Some("vllm:request_prompt_tokens"),
    "Prompt tokens of a request.",
);
const REQUEST_GENERATED: Name = Name(
    "plimsoll_request_generation_tokens",
    Some("vllm:request_generation_tokens"),
    "Generated tokens of a request.",
);
const REQUEST_MAX_TOKENS: Name = Name(
    "plimsoll_request_max_tokens",
    Some("vllm:request_params_max_tokens"),
    "Most tokens that a request may generate.",
);
const MEMORY: Name = Name(
    "plimsoll_device_memory_bytes",
    None,
    "Device memory held by the server, by component.",
);
const MEMORY_TOTAL: Name = Name(
    "plimsoll_device_memory_total_bytes",
    None,
    "Capacity of the device.",
);
const MEMORY_FREE: Name = Name(
    "plimsoll_device_memory_free_bytes",
    None,
    "Device memory that nobody uses.",
);
const MEMORY_PEERS: Name = Name(
    "plimsoll_device_memory_peers_bytes",
    None,
    "Device memory of other processes.",
);
const MEMORY_HIGH: Name = Name(
    "plimsoll_device_memory_high_bytes",
    None,
    "Highest device memory held since the server is ready.",
);
const MEMORY_USED_HIGH: Name = Name(
    "plimsoll_device_memory_used_high_bytes",
    None,
    "Highest device memory in use since the server is ready.",
);
const PROVED_PEAK: Name = Name(
    "plimsoll_device_memory_proved_peak_bytes",
    None,
    "Highest device memory held while the worst steps were proved, by the server's own account.",
);
const ABOVE_PROOF: Name = Name(
    "plimsoll_high_water_above_proof_total",
    None,
    "Times a step raised the memory held above the proved peak; 0 in a steady state.",
);
const FRAGMENTATION: Name = Name(
    "plimsoll_fragmentation_bytes",
    None,
    "Device memory that allocators hold without using it.",
);
const HEADROOM: Name = Name(
    "plimsoll_headroom_bytes",
    None,
    "Device memory that the server could still take, the margins kept free included.",
);
const ALLOCATIONS: Name = Name(
    "plimsoll_device_allocs_after_ready_total",
    None,
    "Device allocations since the server is ready; 0 in a steady state.",
);

const SHORT: &[f64] = &[
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0,
];
const LONG: &[f64] = &[
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
];
const TOKENS: &[f64] = &[
    1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6,
];
const BUCKETS: [(&Name, &[f64]); 11] = [
    (&TTFT, LONG),
    (&ITL, SHORT),
    (&TPOT, SHORT),
    (&E2E, LONG),
    (&QUEUE, LONG),
    (&PREFILL, LONG),
    (&DECODE, LONG),
    (&INFERENCE, LONG),
    (&REQUEST_PROMPT, TOKENS),
    (&REQUEST_GENERATED, TOKENS),
    (&REQUEST_MAX_TOKENS, TOKENS),
];

/// The server's metrics, and the one place that renders them.
pub(crate) struct Metrics {
    recorder: PrometheusRecorder,
    handle: PrometheusHandle,
    /// vLLM's labels, on every metric.
    labels: Vec<Label>,
    pub(crate) per_request: PerRequest,
}

impl std::fmt::Debug for Metrics {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Metrics").finish_non_exhaustive()
    }
}

/// What each request observes.
#[derive(Clone, Debug)]
pub(crate) struct PerRequest {
    prompt_tokens: Both<Counter>,
    stopped: Both<Counter>,
    length: Both<Counter>,
    failed: Both<Counter>,
    ttft: Both<metrics::Histogram>,
    itl: Both<metrics::Histogram>,
    tpot: Both<metrics::Histogram>,
    e2e: Both<metrics::Histogram>,
    queue: Both<metrics::Histogram>,
    prefill: Both<metrics::Histogram>,
    decode: Both<metrics::Histogram>,
    inference: Both<metrics::Histogram>,
    prompt: Both<metrics::Histogram>,
    generated: Both<metrics::Histogram>,
    max_tokens: Both<metrics::Histogram>,
}

/// The same metric under both names.
#[derive(Clone, Debug)]
struct Both<T>(T, Option<T>);

impl<T> Both<T> {
    fn each(&self, act: impl Fn(&T)) {
        act(&self.0);
        self.1.iter().for_each(act);
    }
}

impl Both<metrics::Histogram> {
    fn record(&self, duration: Duration) {
        self.each(|histogram| histogram.record(duration.as_secs_f64()));
    }
}

const METADATA: Metadata<'static> = Metadata::new(module_path!(), metrics::Level::INFO, None);

/// Names, labels and the recorder in one, to make metrics from.
struct Maker<'a> {
    recorder: &'a PrometheusRecorder,
    labels: &'a [Label],
}

impl Maker<'_> {
    fn make<T>(&self, name: &Name, extra: &[Label], make: impl Fn(&'static str, &Key) -> T) -> Both<T> {
        let labels: Vec<Label> = self.labels.iter().chain(extra).cloned().collect();
        let one = |name: &'static str| make(name, &Key::from_parts(name, labels.clone()));
        Both(one(name.0), name.1.map(one))
    }

    fn counter(&self, name: &Name, extra: &[Label]) -> Both<Counter> {
        self.make(name, extra, |text, key| {
            self.recorder
                .describe_counter(text.into(), None, SharedString::const_str(name.2));
            self.recorder.register_counter(key, &METADATA)
        })
    }

    fn gauge(&self, name: &Name, extra: &[Label]) -> Both<Gauge> {
        self.make(name, extra, |text, key| {
            self.recorder
                .describe_gauge(text.into(), None, SharedString::const_str(name.2));
            self.recorder.register_gauge(key, &METADATA)
        })
    }

    fn histogram(&self, name: &Name) -> Both<metrics::Histogram> {
        self.make(name, &[], |text, key| {
            self.recorder
                .describe_histogram(text.into(), None, SharedString::const_str(name.2));
            self.recorder.register_histogram(key, &METADATA)
        })
    }

    fn set(&self, name: &Name, extra: &[Label], value: f64) {
        self.gauge(name, extra).each(|gauge| gauge.set(value));
    }

    fn count(&self, name: &Name, value: u64) {
        self.counter(name, &[]).each(|counter| counter.absolute(value));
    }
}

impl Metrics {
    /// Metrics of a server of `model`.
    pub(crate) fn new(model: &str) -> Self {
        let mut builder = PrometheusBuilder::new();
        for (name, buckets) in BUCKETS {
            for name in [Some(name.0), name.1].into_iter().flatten() {
                builder = builder
                    .set_buckets_for_metric(Matcher::Full(name.into()), buckets)
                    .expect("the buckets are constants and not empty");
            }
        }
        let recorder = builder.build_recorder();
        let labels = vec![
            Label::new("model_name", model.to_owned()),
            Label::from_static_parts("engine", "0"),
        ];
        let maker = Maker {
            recorder: &recorder,
            labels: &labels,
        };
        let reason = |reason: &'static str| [Label::from_static_parts("finished_reason", reason)];
        let per_request = PerRequest {
            prompt_tokens: maker.counter(&PROMPT_TOKENS, &[]),
            stopped: maker.counter(&FINISHED, &reason("stop")),
            length: maker.counter(&FINISHED, &reason("length")),
            failed: maker.counter(&FAILED, &[]),
            ttft: maker.histogram(&TTFT),
            itl: maker.histogram(&ITL),
            tpot: maker.histogram(&TPOT),
            e2e: maker.histogram(&E2E),
            queue: maker.histogram(&QUEUE),
            prefill: maker.histogram(&PREFILL),
            decode: maker.histogram(&DECODE),
            inference: maker.histogram(&INFERENCE),
            prompt: maker.histogram(&REQUEST_PROMPT),
            generated: maker.histogram(&REQUEST_GENERATED),
            max_tokens: maker.histogram(&REQUEST_MAX_TOKENS),
        };
        Self {
            handle: recorder.handle(),
            recorder,
            labels,
            per_request,
        }
    }

    /// Folds raw observations into buckets, which [`Self::render`] does too; without either they pile up.
    pub(crate) fn run_upkeep(&self) {
        self.handle.run_upkeep();
    }

    /// The whole page.
    pub(crate) fn render(
        &self,
        stats: &EngineStats,
        health: &Health,
        kv: KvConfig,
        memory: &dyn Memory,
    ) -> String {
        let maker = Maker {
            recorder: &self.recorder,
            labels: &self.labels,
        };
        set_engine(&maker, stats, health);
        set_memory(&maker, memory);
        maker.count(&ABOVE_PROOF, stats.high_water_above_proof);
        let mut page = self.handle.render();
        self.write_cache_config(&mut page, kv);
        self.write_histogram(&mut page, &STEP_SECONDS, &stats.step_seconds);
        self.write_histogram(&mut page, &STEP_TOKENS, &stats.step_tokens);
        if let Some(time) = stats.device_time {
            self.write_seconds(&mut page, &GPU_BUSY, time.busy_seconds);
            self.write_seconds(&mut page, &GPU_IDLE, time.idle_seconds);
        }
        page
    }

    /// The recorder would remember the shape of every cache there ever was.
    fn write_cache_config(&self, page: &mut String, kv: KvConfig) {
        let Name(ours, other, help) = CACHE_CONFIG;
        let labels = self.label_text();
        let (size, blocks) = (kv.block_size, kv.num_blocks);
        for text in [Some(ours), other].into_iter().flatten() {
            let _ = writeln!(
                page,
                "# HELP {text} {help}\n# TYPE {text} gauge\n{text}{{{labels},block_size=\"{size}\",\
                 num_gpu_blocks=\"{blocks}\"}} 1\n"
            );
        }
    }

    /// The recorder's counters are whole numbers.
    fn write_seconds(&self, page: &mut String, name: &Name, seconds: f64) {
        let Name(text, _, help) = name;
        let labels = self.label_text();
        let _ = writeln!(
            page,
            "# HELP {text} {help}\n# TYPE {text} counter\n{text}{{{labels}}} {seconds}\n"
        );
    }

    fn label_text(&self) -> String {
        let labels = self.labels.iter().map(|l| format!("{}={:?}", l.key(), l.value()));
        labels.collect::<Vec<_>>().join(",")
    }

    /// The engine counts into buckets itself, which the recorder cannot take over.
    fn write_histogram(&self, page: &mut String, name: &Name, histogram: &Histogram) {
        let labels = self.label_text();
        for text in [Some(name.0), name.1].into_iter().flatten() {
            let _ = writeln!(page, "# HELP {text} {}\n# TYPE {text} histogram", name.2);
            for (bound, count) in histogram.cumulative() {
                let bound = if bound.is_infinite() {
                    "+Inf".into()
                } else {
                    bound.to_string()
                };
                let _ = writeln!(page, "{text}_bucket{{{labels},le=\"{bound}\"}} {count}");
            }
            let _ = writeln!(page, "{text}_sum{{{labels}}} {}", histogram.sum());
            let _ = writeln!(page, "{text}_count{{{labels}}} {}\n", histogram.count());
        }
    }
}

fn set_engine(maker: &Maker<'_>, stats: &EngineStats, health: &Health) {
    let scheduler = &stats.scheduler;
    maker.set(&RUNNING, &[], scheduler.running as f64);
    maker.set(&WAITING, &[], scheduler.waiting as f64);
    maker.set(&IN_FLIGHT, &[], stats.in_flight as f64);
    let total = scheduler.blocks_total.max(1);
    maker.set(&KV_USAGE, &[], scheduler.blocks_used as f64 / total as f64);
    for (state, blocks) in [
        ("total", scheduler.blocks_total),
        ("used", scheduler.blocks_used),
        ("cached", scheduler.blocks_cached),
    ] {
        maker.set(
            &KV_BLOCKS,
            &[Label::from_static_parts("state", state)],
            blocks as f64,
        );
    }
    maker.count(&PREEMPTIONS, scheduler.preemptions);
    maker.count(&PREFIX_QUERIES, scheduler.prefix_queried_tokens);
    maker.count(&PREFIX_HITS, scheduler.prefix_hit_tokens);
    maker.count(&EVICTIONS, scheduler.evictions);
    maker.count(&GENERATED_TOKENS, scheduler.generated_tokens);
    maker.count(&COMPUTED_TOKENS, scheduler.computed_tokens);
    maker.count(&CANCELLED, scheduler.cancelled);
    maker.count(&SUBMITTED, stats.submitted);
    maker.count(&REFUSED, stats.refused);
    maker.count(&STEPS, stats.steps);
    maker.count(&FAILED_STEPS, stats.failed_steps);
    for (reason, rebuilds) in [("oom", stats.rebuilds_oom), ("wake", stats.rebuilds_wake)] {
        let reason = [Label::from_static_parts("reason", reason)];
        maker
            .counter(&REBUILDS, &reason)
            .each(|counter| counter.absolute(rebuilds));
    }
    maker.set(&HEALTHY, &[], f64::from(u8::from(health.phase != Phase::Dead)));
    maker.set(
        &STALLED,
        &[],
        health.stalled_for.unwrap_or_default().as_secs_f64(),
    );
}

fn set_memory(maker: &Maker<'_>, memory: &dyn Memory) {
    let meters = memory.meters();
    for (component, bytes) in meters.by_component.iter() {
        maker.set(
            &MEMORY,
            &[Label::from_static_parts("component", component.name())],
            bytes as f64,
        );
    }
    let gauges = [
        (&MEMORY_TOTAL, meters.total),
        (&MEMORY_FREE, meters.free),
        (&MEMORY_PEERS, meters.peers()),
        (&MEMORY_HIGH, meters.reserved_high),
        (&MEMORY_USED_HIGH, meters.used_high),
        (&PROVED_PEAK, memory.proved_peak()),
        (&FRAGMENTATION, meters.fragmentation()),
        (&HEADROOM, meters.headroom()),
    ];
    for (name, bytes) in gauges {
        maker.set(name, &[], bytes as f64);
    }
    maker.count(&ALLOCATIONS, memory.allocations_after_ready());
}
