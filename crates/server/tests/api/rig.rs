//! A server in this process, over a simulated model whose executor the test can slow down and break.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::http::{HeaderMap, Request, StatusCode};
use plimsoll_core::{
    BlockSize, BuildError, CacheKind, CacheLayout, Component, DeviceTime, Executor, FillMasks, Meters, Oom,
    RefusedBy, StateConfig, StepError, StepLimits, StepOutput, StepPlan,
};
use plimsoll_engine::{EngineConfig, EngineHandle, RebuildError, StateSource};
use plimsoll_profiler::{BuildProgress, KvSize, Margins, ProfileSpec, Proved, Target, profile};
use plimsoll_server::{
    AnswerStyle, AppState, EmbeddingInfo, GenerationDefaults, Memory, ModelInfo, ServerOptions, StartNumbers,
    router,
};
use plimsoll_sim::{SimConfig, SimExecutor, SimModel, StepTime};
use plimsoll_text::{ChatTemplate, Renderer, Tokenizer};
use serde_json::{Value, json};
use tower::ServiceExt;

/// Longer than any test takes on a busy machine.
pub const PATIENCE: Duration = Duration::from_secs(60);

const TOTAL: u64 = 1 << 30;
const BYTES_PER_TOKEN: u64 = 64;

/// Controls the executor while the server runs.
#[derive(Debug, Default)]
pub struct Script {
    /// Duration of steps, which may change while one is in progress.
    pub step_micros: AtomicU64,
    /// The next step panics.
    pub panic: AtomicBool,
    /// The next step runs out of memory.
    pub oom: AtomicBool,
    /// The next token that is sampled is none: its logits are not finite.
    pub not_finite: AtomicBool,
    /// Building the state fails.
    pub full: AtomicBool,
    reserved: AtomicU64,
    /// Memory of other processes.
    pub peers: AtomicU64,
    /// The process's own memory counters.
    pub high_water: AtomicU64,
    proved_peak: AtomicU64,
    /// Ranks beside the first.
    pub more_ranks: AtomicU64,
    /// `/memory` panics.
    pub meters_panic: AtomicBool,
    /// The driver does not answer.
    pub meters_hold: AtomicBool,
    /// Number of callers waiting for it.
    pub meters_waiting: AtomicUsize,
}

impl Script {
    fn step(&self) -> Duration {
        Duration::from_micros(self.step_micros.load(Ordering::SeqCst))
    }

    fn meters(&self) -> Meters {
        assert!(!self.meters_panic.load(Ordering::SeqCst), "told to panic");
        let began = Instant::now();
        self.meters_waiting.fetch_add(1, Ordering::SeqCst);
        while self.meters_hold.load(Ordering::SeqCst) {
            assert!(began.elapsed() < PATIENCE, "nobody lets go");
            std::thread::sleep(Duration::from_millis(1));
        }
        self.meters_waiting.fetch_sub(1, Ordering::SeqCst);
        let reserved = self.reserved.load(Ordering::SeqCst);
        let mut meters = Meters {
            total: TOTAL,
            free: TOTAL - reserved - self.peers.load(Ordering::SeqCst),
            used: reserved,
            reserved,
            used_high: reserved,
            reserved_high: reserved,
            ..Default::default()
        };
        *meters.by_component.get_mut(Component::Kv) = reserved;
        meters
    }
}

#[derive(Debug)]
struct Rigged {
    inner: SimExecutor,
    script: Arc<Script>,
    bytes: u64,
    steps: u32,
}

impl Executor for Rigged {
    fn launch(&mut self, plan: &StepPlan) -> Result<(), StepError> {
        assert!(!self.script.panic.swap(false, Ordering::SeqCst), "told to panic");
        if self.script.oom.swap(false, Ordering::SeqCst) {
            return Err(oom(&self.script, 4096).into());
        }
        let began = Instant::now();
        while let Some(left) = self.script.step().checked_sub(began.elapsed())
            && !left.is_zero()
        {
            std::thread::sleep(left.min(Duration::from_millis(1)));
        }
        self.inner.launch(plan)
    }

    fn sample(&mut self, fill: &mut FillMasks<'_>) -> Result<(), StepError> {
        self.inner.sample(fill)
    }

    fn finish(&mut self) -> Result<StepOutput, StepError> {
        self.steps += 1;
        let mut output = self.inner.finish()?;
        let mut samples = output.samples.iter_mut().enumerate();
        if self.script.not_finite.load(Ordering::SeqCst)
            && let Some((index, sample)) = samples.find(|(_, sample)| sample.is_some())
        {
            self.script.not_finite.store(false, Ordering::SeqCst);
            *sample = None;
            output.not_finite.push(index);
        }
        Ok(output)
    }

    fn device_time(&self) -> Option<DeviceTime> {
        Some(DeviceTime {
            busy_seconds: f64::from(self.steps) * 0.5,
            idle_seconds: f64::from(self.steps) * 0.25,
        })
    }
}

impl Drop for Rigged {
    fn drop(&mut self) {
        self.script.reserved.fetch_sub(self.bytes, Ordering::SeqCst);
    }
}

fn oom(script: &Script, requested: u64) -> Oom {
    Oom {
        requested,
        component: Component::Arena,
        refused_by: RefusedBy::Device,
        meters: Box::new(script.meters()),
    }
}

#[derive(Clone)]
struct Device {
    spec: ProfileSpec,
    limits: StepLimits,
    script: Arc<Script>,
}

impl Target for Device {
    type State = Rigged;

    fn build(
        &mut self,
        config: &StateConfig,
        _: &mut dyn FnMut(BuildProgress),
    ) -> Result<Rigged, BuildError> {
        let bytes = config.kv.capacity_tokens() as u64 * BYTES_PER_TOKEN;
        if self.script.full.load(Ordering::SeqCst) {
            return Err(oom(&self.script, bytes).into());
        }
        self.script.reserved.fetch_add(bytes, Ordering::SeqCst);
        let (kv, limits) = (config.kv, self.limits);
        let mut inner = SimExecutor::new(SimConfig {
            kv,
            limits,
            model: SimModel::text(),
            step_time: StepTime::default(),
        });
        inner.allow_synthetic(true);
        Ok(Rigged {
            inner,
            script: Arc::clone(&self.script),
            bytes,
            steps: 0,
        })
    }

    fn meters(&self) -> Meters {
        self.script.meters()
    }

    fn reset_high_water(&mut self) {}

    fn trim(&mut self) {}

    fn take_scratch_high_water(&mut self, _: &mut Rigged) -> u64 {
        0
    }

    fn release_canary(&mut self, state: &mut Rigged) {
        state.inner.allow_synthetic(false);
    }
}

struct Reader(Arc<Script>);

impl Memory for Reader {
    fn report(&self) -> Value {
        json!({ "phase": "validate" })
    }

    fn meters(&self) -> Vec<Meters> {
        let rank = |rank| Meters {
            total: TOTAL + rank,
            ..self.0.meters()
        };
        (0..=self.0.more_ranks.load(Ordering::SeqCst)).map(rank).collect()
    }

    fn allocations_after_ready(&self) -> u64 {
        0
    }

    fn proved_peaks(&self) -> Vec<u64> {
        let first = self.0.proved_peak.load(Ordering::SeqCst);
        let ranks = 0..=self.0.more_ranks.load(Ordering::SeqCst);
        ranks.map(|rank| first + rank).collect()
    }

    fn start(&self) -> StartNumbers {
        StartNumbers {
            stages: vec![("weights", 1.5), ("validate", 0.25)],
            tried: 3,
        }
    }
}

impl StateSource<Rigged> for Device {
    fn high_water(&self) -> u64 {
        self.script.high_water.load(Ordering::SeqCst)
    }

    fn proved_peak(&self) -> u64 {
        self.script.proved_peak.load(Ordering::SeqCst)
    }

    fn meters(&self) -> Meters {
        self.script.meters()
    }

    fn trim(&mut self) {}

    fn rebuild(&mut self, _: &mut dyn FnMut()) -> Result<Proved<Rigged>, RebuildError> {
        let spec = self.spec.clone();
        Ok(profile(self, &spec, &mut ())?)
    }
}

/// What differs between tests.
#[derive(Debug)]
pub struct Setup {
    /// Sequences that run at once.
    pub max_num_seqs: usize,
    /// Requests that wait.
    pub max_queue: usize,
    /// Tokens of one request.
    pub max_model_len: usize,
    /// Tokens of the KV cache.
    pub kv_tokens: usize,
    /// What each layer keeps.
    pub layers: Vec<CacheKind>,
    /// The chat template.
    pub template: Option<&'static str>,
    /// Detected from the template if absent.
    pub answers: Option<AnswerStyle>,
    /// Sampling defaults.
    pub defaults: GenerationDefaults,
    /// Set if the model is served for embeddings.
    pub embedding: Option<EmbeddingInfo>,
    /// Ids are those of bytes, but for special tokens.
    pub tokenizer: Tokenizer,
    /// Set if the model takes images.
    pub images: Option<plimsoll_server::ImageInput>,
    /// How long requests wait for a rebuild.
    pub outage_patience: Duration,
    /// HTTP options.
    pub options: ServerOptions,
}

impl Default for Setup {
    fn default() -> Self {
        Self {
            max_num_seqs: 16,
            max_queue: 64,
            max_model_len: 1024,
            kv_tokens: 16384,
            layers: vec![CacheKind::Full],
            template: Some(
                "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}\
                 {% if add_generation_prompt %}<assistant>{% endif %}{{ suffix }}",
            ),
            answers: None,
            defaults: GenerationDefaults::default(),
            embedding: None,
            tokenizer: Tokenizer::bytes(),
            images: None,
            outage_patience: PATIENCE,
            options: ServerOptions {
                max_body_bytes: 1 << 20,
                ..Default::default()
            },
        }
    }
}

/// The server.
#[derive(Debug)]
pub struct Rig {
    /// The handlers' state.
    pub state: AppState,
    /// Control of its executor.
    pub script: Arc<Script>,
    router: Router,
}

/// A response read to its end.
#[derive(Debug)]
pub struct Answer {
    /// Of the response.
    pub status: StatusCode,
    /// Of the response.
    pub headers: HeaderMap,
    /// The body.
    pub text: String,
}

impl Answer {
    /// The body, which is JSON.
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.text).unwrap_or_else(|e| panic!("{e}: {}", self.text))
    }

    /// The error object, whose shape is checked.
    pub fn error(&self, status: u16) -> Value {
        assert_eq!(self.status, status, "{}", self.text);
        let mut body = self.json();
        let keys: Vec<_> = body.as_object().unwrap().keys().map(String::as_str).collect();
        assert_eq!(keys, ["error"]);
        let error = body["error"].take();
        let keys: Vec<_> = error.as_object().unwrap().keys().map(String::as_str).collect();
        assert_eq!(keys, ["message", "type", "param", "code"]);
        error
    }

    /// Checks the shape of an error of Anthropic's API.
    pub fn anthropic_error(&self, status: u16) {
        assert_eq!(self.status, status, "{}", self.text);
        let body = self.json();
        let keys = |object: &Value| object.as_object().unwrap().keys().cloned().collect::<Vec<_>>();
        assert_eq!(keys(&body), ["type", "error", "request_id"]);
        assert_eq!(keys(&body["error"]), ["type", "message"]);
    }

    /// The data of server-sent events, without the final `[DONE]`.
    pub fn events(&self) -> Vec<Value> {
        assert_eq!(self.status, 200, "{}", self.text);
        assert_eq!(self.headers["content-type"], "text/event-stream");
        let events = self
            .text
            .split_terminator("\n\n")
            .filter(|event| !event.starts_with(':'));
        let mut data: Vec<_> = events
            .map(|event| event.strip_prefix("data: ").expect("data alone"))
            .collect();
        assert_eq!(data.pop(), Some("[DONE]"));
        data.into_iter()
            .map(|data| serde_json::from_str(data).unwrap())
            .collect()
    }
}

impl Rig {
    /// Profiles and starts the engine.
    pub fn new(setup: Setup) -> Self {
        let script = Arc::new(Script::default());
        let limits = StepLimits {
            max_num_batched_tokens: 256,
            max_num_seqs: setup.max_num_seqs,
            max_model_len: setup.max_model_len,
        };
        let vocab_size = SimModel::text().vocab_size();
        let mut spec = ProfileSpec::new(limits, vocab_size, BlockSize::default(), BYTES_PER_TOKEN);
        spec.pooling = setup.embedding.as_ref().map(|embedding| embedding.pooling);
        spec.size = KvSize::Tokens(setup.kv_tokens);
        let layout = CacheLayout::new(&setup.layers, setup.max_model_len);
        spec.groups = layout.expect("the layers are of few kinds").groups;
        spec.margins = Margins {
            canary_bytes: 0,
            min_fragmentation_bytes: 0,
        };
        let mut device = Device {
            spec: spec.clone(),
            limits,
            script: Arc::clone(&script),
        };
        let proved = profile(&mut device, &spec, &mut ()).expect("the simulated device is large");
        for mark in [&script.high_water, &script.proved_peak] {
            mark.store(script.reserved.load(Ordering::SeqCst), Ordering::SeqCst);
        }
        let config = EngineConfig {
            max_queue: setup.max_queue,
            vocab_size,
            images: setup.images.as_ref().map(|images| {
                let processor = images.processor();
                plimsoll_core::ImageInput {
                    placeholder: processor.markers().placeholder,
                    patch: processor.patch(),
                    merge: 2,
                    only: None,
                    mutual: false,
                    limits: plimsoll_core::EncoderLimits {
                        max_patches: processor.worst_image().plan.grid.patches(),
                        max_images_per_prompt: setup.options.media.max_images,
                    },
                }
            }),
            enable_prefix_caching: true,
            steps_in_flight: 1,
            outage_patience: setup.outage_patience,
            target_itl: None,
            cache_listener: None,
        };
        let engine = EngineHandle::spawn(proved, device, &config).unwrap();
        let tokenizer = setup.tokenizer;
        let renderer = Renderer::in_process();
        let template = setup
            .template
            .map(|t| ChatTemplate::new(t, tokenizer.special_tokens(), &renderer).unwrap());
        let model = ModelInfo {
            tokenizer_config: serde_json::Map::new(),
            id: "sim".into(),
            aliases: vec!["org/sim".into()],
            answers: setup
                .answers
                .unwrap_or_else(|| AnswerStyle::detect(template.as_ref())),
            template,
            renderer,
            eos_token_ids: tokenizer.eos_ids().to_vec(),
            tokenizer,
            defaults: setup.defaults,
            embedding: setup.embedding,
            images: setup.images,
            quantization: None,
            bits_per_weight: None,
            num_parameters: None,
            num_active_parameters: None,
            expert_loads: None,
        };
        let state = AppState::new(
            engine,
            model,
            Arc::new(Reader(Arc::clone(&script))),
            setup.options,
        );
        let router = router(state.clone());
        Self {
            state,
            script,
            router,
        }
    }

    /// The response to a request, with its body unread.
    pub async fn send(&self, request: Request<Body>) -> axum::response::Response {
        self.router.clone().oneshot(request).await.unwrap()
    }

    async fn read(&self, request: Request<Body>) -> Answer {
        let response = self.send(request).await;
        let (parts, body) = response.into_parts();
        let bytes = tokio::time::timeout(PATIENCE, to_bytes(body, usize::MAX))
            .await
            .expect("a response hangs");
        let text = String::from_utf8(bytes.unwrap().to_vec()).unwrap();
        Answer {
            status: parts.status,
            headers: parts.headers,
            text,
        }
    }

    /// The answer to a GET.
    pub async fn get(&self, path: &str) -> Answer {
        self.read(Request::get(path).body(Body::empty()).unwrap()).await
    }

    /// The answer to a POST of JSON.
    pub async fn post(&self, path: &str, body: Value) -> Answer {
        self.read(post(path, body.to_string())).await
    }

    /// The answer to a POST with Content-Type JSON.
    pub async fn post_raw(&self, path: &str, body: impl Into<Body>) -> Answer {
        self.read(post(path, body)).await
    }

    /// Sets the duration of steps, also of the one in progress.
    pub fn set_step(&self, duration: Duration) {
        self.script
            .step_micros
            .store(duration.as_micros() as u64, Ordering::SeqCst);
    }

    /// Waits until `condition` holds.
    pub async fn until(&self, what: &str, condition: impl Fn(&Self) -> bool) {
        let began = Instant::now();
        while !condition(self) {
            assert!(
                began.elapsed() < PATIENCE,
                "{what} did not happen: {:?}",
                self.state.engine().stats()
            );
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    /// Waits until this many requests are in flight.
    pub async fn until_in_flight(&self, requests: usize) {
        self.until("the number of requests", |rig| {
            rig.state.engine().stats().in_flight == requests
        })
        .await;
    }
}

/// A POST with Content-Type JSON.
pub fn post(path: &str, body: impl Into<Body>) -> Request<Body> {
    Request::post(path)
        .header("content-type", "application/json")
        .body(body.into())
        .unwrap()
}
