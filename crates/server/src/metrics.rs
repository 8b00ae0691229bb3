//! `/metrics`. All metric names are in [`catalog`]: our own `plimsoll_*`, and vLLM's names for metrics that existing
//! dashboards, autoscalers and the Gateway API inference extension use.

mod catalog;
mod experts;
mod http;
pub mod names;
mod process;
mod start;
mod timer;

use std::collections::HashSet;
use std::fmt::Write;
use std::time::Duration;

use metrics::{Counter, Gauge, Key, Label, Metadata, Recorder, SharedString};
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle, PrometheusRecorder};
use parking_lot::Mutex;
use plimsoll_core::{KvConfig, Meters};
use plimsoll_engine::{EngineHandle, EngineStats, Health, Histogram, Phase};
use strum::IntoEnumIterator;

use crate::memory::{Memory, StartNumbers, kv_groups};
use crate::model::ModelInfo;
use crate::status::Status;
use crate::time::unix_seconds;

use catalog::*;
pub(crate) use http::HttpRequest;
pub(crate) use start::start_page;
pub(crate) use timer::Timer;

/// The server's metrics.
pub(crate) struct Metrics {
    recorder: PrometheusRecorder,
    handle: PrometheusHandle,
    /// vLLM's labels, on every metric.
    labels: Vec<Label>,
    pub(crate) per_request: PerRequest,
    http_in_flight: Both<Gauge>,
    /// Labels of the fields that were ignored.
    ignored_fields: Mutex<HashSet<String>>,
    stall_timeout: Duration,
}

impl std::fmt::Debug for Metrics {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Metrics").finish_non_exhaustive()
    }
}

/// Metrics recorded by each request.
#[derive(Clone, Debug)]
pub(crate) struct PerRequest {
    prompt_tokens: Both<Counter>,
    stopped: Both<Counter>,
    length: Both<Counter>,
    failed: Both<Counter>,
    aborted: Both<Counter>,
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
    choices: Both<metrics::Histogram>,
}

impl PerRequest {
    /// A request with `n` choices per prompt was submitted.
    pub(crate) fn submitted(&self, n: usize) {
        self.choices.count(n);
    }
}

/// One metric under our name and vLLM's.
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

    fn count(&self, things: usize) {
        self.each(|histogram| histogram.record(things as f64));
    }
}

const METADATA: Metadata<'static> = Metadata::new(module_path!(), metrics::Level::INFO, None);

/// Registers metrics with their labels.
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

    /// A counter only under vLLM's name, for a label value that ours does not have.
    fn alias(&self, name: &Name, extra: &[Label]) -> Option<Counter> {
        let &Name(_, other, help) = name;
        other.map(|other| self.counter(&Name(other, None, help), extra).0)
    }

    fn gauge(&self, name: &Name, extra: &[Label]) -> Both<Gauge> {
        self.make(name, extra, |text, key| {
            self.recorder
                .describe_gauge(text.into(), None, SharedString::const_str(name.2));
            self.recorder.register_gauge(key, &METADATA)
        })
    }

    fn histogram(&self, name: &Name, extra: &[Label]) -> Both<metrics::Histogram> {
        self.make(name, extra, |text, key| {
            self.recorder
                .describe_histogram(text.into(), None, SharedString::const_str(name.2));
            self.recorder.register_histogram(key, &METADATA)
        })
    }

    /// The same with the label of a rank, where several serve the model together.
    fn of_rank<T>(&self, rank: Option<usize>, make: impl FnOnce(&Maker<'_>) -> T) -> T {
        let rank = rank.map(|rank| Label::new("rank", rank.to_string()));
        let labels: Vec<Label> = self.labels.iter().cloned().chain(rank).collect();
        make(&Maker {
            recorder: self.recorder,
            labels: &labels,
        })
    }

    fn set(&self, name: &Name, value: f64) {
        self.gauge(name, &[]).each(|gauge| gauge.set(value));
    }

    /// A gauge with one value for each value of `label`.
    fn set_each(
        &self,
        name: &Name,
        label: &'static str,
        values: impl IntoIterator<Item = (&'static str, f64)>,
    ) {
        for (of, value) in values {
            let label = [Label::from_static_parts(label, of)];
            self.gauge(name, &label).each(|gauge| gauge.set(value));
        }
    }

    /// The same for a counter.
    fn count_each(&self, name: &Name, label: &'static str, values: [(&'static str, u64); 2]) {
        for (of, value) in values {
            let label = [Label::from_static_parts(label, of)];
            self.counter(name, &label).each(|counter| counter.absolute(value));
        }
    }

    fn count(&self, name: &Name, value: u64) {
        self.counter(name, &[]).each(|counter| counter.absolute(value));
    }
}

impl Metrics {
    /// Metrics of a server of `model`. `/ready` fails if no step completes for `stall_timeout`.
    pub(crate) fn new(model: &str, max_model_len: usize, stall_timeout: Duration) -> Self {
        let mut builder = PrometheusBuilder::new();
        for (name, ours, others) in buckets(max_model_len) {
            for (name, bounds) in [(Some(name.0), ours), (name.1, others)] {
                let Some(name) = name else { continue };
                builder = builder
                    .set_buckets_for_metric(Matcher::Full(name.into()), bounds)
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
            failed: Both(
                maker.counter(&FAILED, &[]).0,
                maker.alias(&FINISHED, &reason("error")),
            ),
            aborted: Both(
                maker.counter(&CANCELLED, &[]).0,
                maker.alias(&FINISHED, &reason("abort")),
            ),
            ttft: maker.histogram(&TTFT, &[]),
            itl: maker.histogram(&ITL, &[]),
            tpot: maker.histogram(&TPOT, &[]),
            e2e: maker.histogram(&E2E, &[]),
            queue: maker.histogram(&QUEUE, &[]),
            prefill: maker.histogram(&PREFILL, &[]),
            decode: maker.histogram(&DECODE, &[]),
            inference: maker.histogram(&INFERENCE, &[]),
            prompt: maker.histogram(&REQUEST_PROMPT, &[]),
            generated: maker.histogram(&REQUEST_GENERATED, &[]),
            max_tokens: maker.histogram(&REQUEST_MAX_TOKENS, &[]),
            choices: maker.histogram(&REQUEST_N, &[]),
        };
        maker.set(&START_TIME, unix_seconds() as f64);
        // So that it can be watched before there is any.
        maker.counter(&IGNORED_FIELDS, &[http::OTHER_FIELD]);
        let http_in_flight = maker.gauge(&HTTP_IN_FLIGHT, &[]);
        maker.set_each(&START_PROGRESS, "phase", [("ready", 1.0)]);
        maker.set(&STALL_TIMEOUT, stall_timeout.as_secs_f64());
        Self {
            handle: recorder.handle(),
            recorder,
            labels,
            per_request,
            http_in_flight,
            ignored_fields: Mutex::default(),
            stall_timeout,
        }
    }

    fn maker(&self) -> Maker<'_> {
        Maker {
            recorder: &self.recorder,
            labels: &self.labels,
        }
    }

    /// Folds observations into histogram buckets, as [`Self::render`] does; otherwise they would accumulate.
    pub(crate) fn run_upkeep(&self) {
        self.handle.run_upkeep();
    }

    /// Renders the page. `meters` are those of `memory`, of each rank, read separately because the device may be slow to answer.
    pub(crate) fn render(
        &self,
        engine: &EngineHandle,
        model: &ModelInfo,
        memory: &dyn Memory,
        meters: &[Meters],
    ) -> String {
        let (stats, health, kv) = (&engine.stats(), &engine.health(), engine.kv());
        let maker = self.maker();
        let now = Status::of(health, self.stall_timeout);
        let statuses = Status::iter().map(|status| (status.name(), f64::from(u8::from(status == now))));
        maker.set_each(&STATUS, "status", statuses);
        set_engine(&maker, stats, health);
        set_kv(&maker, &kv, stats, &meters[0]);
        let peaks = memory.proved_peaks();
        for (rank, (meters, &peak)) in meters.iter().zip(&peaks).enumerate() {
            let rank = (peaks.len() > 1).then_some(rank);
            maker.of_rank(rank, |maker| set_meters(maker, meters, peak));
        }
        set_start(&maker, memory);
        maker.count(&ABOVE_PROOF, stats.high_water_above_proof);
        maker.count(&ABOVE_TARGET_ITL, stats.steps_above_target_itl);
        let mut page = self.handle.render();
        self.write_cache_config(&mut page, kv);
        self.write_histogram(&mut page, &STEP_SECONDS, &stats.step_seconds);
        self.write_histogram(&mut page, &STEP_TOKENS, &stats.step_tokens);
        self.write_histogram(&mut page, &ITERATION_TOKENS, &stats.iteration_tokens);
        self.write_histogram(&mut page, &STEP_PROMPT_TOKENS, &stats.step_prompt_tokens);
        self.write_histogram(&mut page, &STEP_REQUESTS, &stats.step_requests);
        self.write_no_adapters(&mut page);
        if let Some(loads) = &model.expert_loads {
            experts::write(&mut page, &self.label_text(), loads);
        }
        let (decode, mixed) = (stats.seconds_by_kind.decode, stats.seconds_by_kind.mixed);
        let by_kind = |decode, mixed| [(Some("decode"), decode), (Some("mixed"), mixed)];
        self.write_seconds(&mut page, &STEP_ACTUAL, by_kind(decode.actual, mixed.actual));
        self.write_seconds(
            &mut page,
            &STEP_EXPECTED,
            by_kind(decode.expected, mixed.expected),
        );
        if let Some(time) = stats.device_time {
            self.write_seconds(&mut page, &GPU_BUSY, [(None, time.busy_seconds)]);
            self.write_seconds(&mut page, &GPU_IDLE, [(None, time.idle_seconds)]);
        }
        process::write(&mut page);
        page
    }

    /// Written by hand: the recorder would keep the labels of every past cache configuration.
    fn write_cache_config(&self, page: &mut String, kv: KvConfig) {
        let Name(ours, other, help) = CACHE_CONFIG;
        let labels = self.label_text();
        let (size, blocks) = (kv.block_size, kv.num_pages);
        for text in [Some(ours), other].into_iter().flatten() {
            page.push_str(&head(text, "gauge", help));
            let _ = writeln!(
                page,
                "{text}{{{labels},block_size=\"{size}\",num_gpu_blocks=\"{blocks}\"}} 1\n"
            );
        }
    }

    /// For endpoint pickers that route by LoRA adapter: this server has none.
    fn write_no_adapters(&self, page: &mut String) {
        let labels = self.label_text();
        let _ = writeln!(
            page,
            "# HELP {LORA_REQUESTS} Running and waiting LoRA adapters: none.\n# TYPE {LORA_REQUESTS} gauge\n\
             {LORA_REQUESTS}{{{labels},max_lora=\"0\",running_lora_adapters=\"\",waiting_lora_adapters=\"\"}} {}\n",
            unix_seconds()
        );
    }

    /// A counter for each kind of what is counted. Written by hand: the recorder's counters are integers.
    fn write_seconds<const N: usize>(
        &self,
        page: &mut String,
        name: &Name,
        by_kind: [(Option<&str>, f64); N],
    ) {
        let Name(text, _, help) = name;
        page.push_str(&head(text, "counter", help));
        for (kind, seconds) in by_kind {
            let kind = kind.map(|kind| format!(",{}", label("kind", kind)));
            let _ = writeln!(
                page,
                "{text}{{{}{}}} {seconds}",
                self.label_text(),
                kind.unwrap_or_default()
            );
        }
        page.push('\n');
    }

    fn label_text(&self) -> String {
        let labels = self.labels.iter().map(|l| label(l.key(), l.value()));
        labels.collect::<Vec<_>>().join(",")
    }

    /// Written by hand: the engine keeps its own histogram buckets.
    fn write_histogram(&self, page: &mut String, name: &Name, histogram: &Histogram) {
        let labels = self.label_text();
        for text in [Some(name.0), name.1].into_iter().flatten() {
            page.push_str(&head(text, "histogram", name.2));
            for (bound, count) in histogram.cumulative() {
                let bound = match bound.is_infinite() {
                    true => "+Inf".to_owned(),
                    false => bound.to_string(),
                };
                let _ = writeln!(page, "{text}_bucket{{{labels},le=\"{bound}\"}} {count}");
            }
            let _ = writeln!(page, "{text}_sum{{{labels}}} {}", histogram.sum());
            let _ = writeln!(page, "{text}_count{{{labels}}} {}\n", histogram.count());
        }
    }
}

/// The lines before a metric's values.
fn head(name: &str, kind: &str, help: &str) -> String {
    format!("# HELP {name} {help}\n# TYPE {name} {kind}\n")
}

/// A label with Prometheus's three escapes.
fn label(key: &str, value: &str) -> String {
    let value = value
        .replace('\\', r"\\")
        .replace('"', r#"\""#)
        .replace('\n', r"\n");
    format!("{key}=\"{value}\"")
}

fn set_engine(maker: &Maker<'_>, stats: &EngineStats, health: &Health) {
    let scheduler = &stats.scheduler;
    maker.set(&RUNNING, scheduler.running as f64);
    maker.set(&WAITING, scheduler.waiting as f64);
    let (waiting, is_running) = (scheduler.waiting as f64, health.phase == Phase::Running);
    let reasons = [
        ("capacity", if is_running { waiting } else { 0.0 }),
        ("deferred", if is_running { 0.0 } else { waiting }),
    ];
    maker.set_each(&WAITING_BY_REASON, "reason", reasons);
    maker.set(&IN_FLIGHT, stats.in_flight as f64);
    let Name(ours, _, help) = PREEMPTIONS;
    let causes = [
        ("kv_full", scheduler.preemptions),
        ("kv_lost", scheduler.restarts),
    ];
    maker.count_each(&Name(ours, None, help), "cause", causes);
    if let Some(sum) = maker.alias(&PREEMPTIONS, &[]) {
        sum.absolute(scheduler.preemptions + scheduler.restarts);
    }
    maker.count(&PREFIX_QUERIES, scheduler.prefix_queried_tokens);
    maker.count(&PREFIX_HITS, scheduler.prefix_hit_tokens);
    maker.count(&EVICTIONS, scheduler.evictions);
    if let Some(events) = stats.cache_events {
        maker.count(&EVENTS_PUBLISHED, events.published);
        maker.count(&EVENTS_DROPPED, events.dropped);
    }
    maker.count(&GENERATED_TOKENS, scheduler.generated_tokens);
    maker.count(&COMPUTED_TOKENS, scheduler.computed_tokens);
    maker.count(&SUBMITTED, stats.submitted);
    maker.count(&REFUSED, stats.refused);
    maker.count(&STEPS, stats.steps);
    maker.count(&FAILED_STEPS, stats.failed_steps);
    let rebuilds = [("oom", stats.rebuilds_oom), ("wake", stats.rebuilds_wake)];
    maker.count_each(&REBUILDS, "reason", rebuilds);
    maker.set(&HEALTHY, f64::from(u8::from(health.phase != Phase::Dead)));
    let stalled = health.stalled_for.unwrap_or_default();
    maker.set(&STALLED, stalled.as_secs_f64());
}

fn set_kv(maker: &Maker<'_>, kv: &KvConfig, stats: &EngineStats, meters: &Meters) {
    let scheduler = &stats.scheduler;
    let (total, used) = (scheduler.pages_total, scheduler.pages_used);
    maker.set(&KV_USAGE, used as f64 / total.max(1) as f64);
    maker.set(&KV_TAIL, scheduler.tail_tokens as f64);
    let mut cached = 0;
    for (index, group) in kv_groups(kv, scheduler, meters).into_iter().enumerate() {
        cached += group.blocks_cached * group.pages_per_block;
        let set = |name, more: &[Label], value: usize| {
            let index = Label::new("group", index.to_string());
            let labels = [&[index, Label::from_static_parts("kind", group.kind)], more].concat();
            maker.gauge(name, &labels).each(|gauge| gauge.set(value as f64));
        };
        let window = group.window.map(|window| window.to_string());
        let info = [
            Label::new("window", window.unwrap_or_default()),
            Label::new("layers", group.layers.to_string()),
            Label::new("pages_per_block", group.pages_per_block.to_string()),
        ];
        set(&KV_GROUP, &info, 1);
        set(&KV_ROUNDING, &[], group.rounding_bytes as usize);
        for (state, blocks) in [
            ("total", group.blocks),
            ("used", group.blocks_used),
            ("cached", group.blocks_cached),
        ] {
            let state = Label::from_static_parts("state", state);
            set(&KV_GROUP_BLOCKS, &[state], blocks);
        }
    }
    let pages = [("total", total), ("used", used), ("cached", cached)];
    let pages = pages.map(|(state, pages)| (state, pages as f64));
    maker.set_each(&KV_BLOCKS, "state", pages);
    let slots = [
        ("total", scheduler.slots.total as f64),
        ("used", scheduler.slots.used as f64),
        ("cached", scheduler.slots.snapshots as f64),
    ];
    maker.set_each(&STATE_SLOTS, "state", slots);
}

fn set_meters(maker: &Maker<'_>, meters: &Meters, proved_peak: u64) {
    let components = meters.by_component.iter();
    let components = components.map(|(component, bytes)| (component.name(), bytes as f64));
    maker.set_each(&MEMORY, "component", components);
    let gauges = [
        (&MEMORY_TOTAL, meters.total),
        (&MEMORY_FREE, meters.free),
        (&MEMORY_PEERS, meters.peers()),
        (&MEMORY_HIGH, meters.reserved_high),
        (&MEMORY_USED_HIGH, meters.used_high),
        (&PROVED_PEAK, proved_peak),
        (&FRAGMENTATION, meters.fragmentation()),
        (&HEADROOM, meters.headroom()),
    ];
    for (name, bytes) in gauges {
        maker.set(name, bytes as f64);
    }
}

fn set_start(maker: &Maker<'_>, memory: &dyn Memory) {
    maker.count(&ALLOCATIONS, memory.allocations_after_ready());
    let StartNumbers { stages, tried } = memory.start();
    maker.set_each(&START_STAGE, "stage", stages);
    let tried = [("proved", 1.0), ("out_of_memory", tried.saturating_sub(1) as f64)];
    maker.set_each(&PROFILE_ATTEMPTS, "outcome", tried);
}

#[cfg(test)]
mod tests {
    use super::label;

    #[test]
    fn labels_have_prometheus_escapes_and_no_others() {
        let odd = "a\"b\\c\nd\te\u{200b}";
        assert_eq!(
            label("model_name", odd),
            "model_name=\"a\\\"b\\\\c\\nd\te\u{200b}\""
        );
    }
}
