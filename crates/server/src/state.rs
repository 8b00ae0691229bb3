use std::fmt;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::available_parallelism;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::http::HeaderValue;
use plimsoll_core::{Meters, TokenId};
use plimsoll_engine::{EngineHandle, Health};
use plimsoll_text::grammar::GrammarCompiler;
use plimsoll_text::{ChatTemplate, ReasoningFormat, Tokenizer, ToolFormat};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use serde_json::Value;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};

use crate::connect::Tls;
use crate::context::RequestSink;
use crate::embeddings::EmbeddingInfo;
use crate::error::ApiError;
use crate::keys::ApiKeys;
use crate::meters::MeterReader;
use crate::metrics::Metrics;
use crate::quota::{KeyLimits, Quotas};
use crate::responses::ResponseStore;
use crate::room::Room;
use crate::status::Status;

/// The model, as far as the API knows it.
#[derive(Debug)]
pub struct ModelInfo {
    /// The name under which it is served; the first of `/v1/models`, and what responses say.
    pub id: String,
    /// Further names that requests may use.
    pub aliases: Vec<String>,
    /// Text to tokens and back.
    pub tokenizer: Tokenizer,
    /// Messages to text; without it there are only completions.
    pub template: Option<ChatTemplate>,
    /// How its answers are taken apart.
    pub answers: AnswerStyle,
    /// Tokens that end generation unless the request says `ignore_eos`.
    pub eos_token_ids: Vec<TokenId>,
    /// What a request gets that does not say.
    pub defaults: GenerationDefaults,
    /// How it makes vectors, where it is served for embeddings: it generates no text then.
    pub embedding: Option<EmbeddingInfo>,
}

/// How a model's answers are taken apart into reasoning, content and calls of tools.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AnswerStyle {
    /// How it writes calls; where nobody knows, tools are refused unless one must be called, which a grammar enforces.
    pub tools: Option<ToolFormat>,
    /// How it marks reasoning, if it reasons.
    pub reasoning: Option<ReasoningFormat>,
    /// Requests may leave it to the model whether it calls a tool.
    pub auto_tool_choice: bool,
}

impl AnswerStyle {
    /// What the chat template shows. Models whose template knows no tools are told of them in a system message.
    pub fn detect(template: Option<&ChatTemplate>) -> Self {
        let tools = template.and_then(|template| match template.takes_tools() {
            true => ToolFormat::detect(template.tool_source()),
            false => Some(ToolFormat::Json),
        });
        Self {
            tools,
            reasoning: template.and_then(|template| ReasoningFormat::detect(template.source())),
            auto_tool_choice: true,
        }
    }

    /// The special tokens that mark parts of answers: they are read as text.
    fn marks(&self, tokenizer: &Tokenizer) -> Arc<[TokenId]> {
        let tools = self.tools.map(ToolFormat::marks).unwrap_or_default();
        let reasoning = self.reasoning.map(|format| format.marks().as_slice());
        let marks = tools.iter().chain(reasoning.unwrap_or_default());
        marks.filter_map(|mark| tokenizer.special_token(mark)).collect()
    }
}

/// Sampling defaults of the model (`generation_config.json`); absent ones are the API's.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct GenerationDefaults {
    /// Default `temperature`.
    pub temperature: Option<f64>,
    /// Default `top_p`.
    pub top_p: Option<f64>,
    /// Default `top_k`.
    pub top_k: Option<i64>,
    /// Default `min_p`.
    pub min_p: Option<f64>,
    /// Default `repetition_penalty`.
    pub repetition_penalty: Option<f64>,
    /// Default `max_tokens` of chats, as far as it fits.
    pub max_new_tokens: Option<usize>,
}

/// Where `/memory` and the memory metrics come from.
pub trait Memory: Send + Sync + 'static {
    /// The profile's report.
    fn report(&self) -> Value;

    /// The device's meters, now. Asks the device or the operating system, which may hang.
    fn meters(&self) -> Meters;

    /// Allocations that were made since the server is ready, those for building its state again left out.
    fn allocations_after_ready(&self) -> u64;

    /// Highest bytes that were held while the worst steps ran, without the canary, by the process's own account.
    fn proved_peak(&self) -> u64;

    /// How the start went, and the proof of the state in use.
    fn start(&self) -> StartNumbers;
}

/// Numbers of a start.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StartNumbers {
    /// Seconds of each stage, in their order; names are constants.
    pub stages: Vec<(&'static str, f64)>,
    /// Sizes of the KV cache that were tried for the state in use. The last was proved.
    pub tried: usize,
}

/// How long a large request waits for others to be read.
const MAX_WAIT: Duration = Duration::from_secs(10);

/// How much the store of responses holds; the oldest of the key that holds the most make room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoreLimits {
    /// Most responses; 0 keeps none.
    pub responses: usize,
    /// Most bytes of them.
    pub bytes: usize,
}

impl Default for StoreLimits {
    fn default() -> Self {
        Self {
            responses: 10_000,
            bytes: 256 << 20,
        }
    }
}

/// Knobs of the HTTP side.
#[derive(Clone, Debug)]
pub struct ServerOptions {
    /// Larger bodies get a 413.
    pub max_body_bytes: usize,
    /// Bodies that arrive more slowly get a 408.
    pub body_timeout: Duration,
    /// A streaming client that reads nothing for this long is cut off and its request cancelled.
    pub slow_client_timeout: Duration,
    /// `/ready` fails once there has been work and no step has ended for this long.
    pub ready_patience: Duration,
    /// Serving ends once that has lasted so long.
    pub watchdog_timeout: Option<Duration>,
    /// How long a shutdown lets requests finish.
    pub drain_timeout: Duration,
    /// Seeds the requests that bring no seed; a random one if absent.
    pub seed: Option<u64>,
    /// `/sleep`, `/wake_up` and `/is_sleeping` exist.
    pub enable_sleep_mode: bool,
    /// `/admin/drain` exists.
    pub enable_admin_api: bool,
    /// The pages for browsers, `/` and `/docs`, exist.
    pub pages: bool,
    /// Web pages of these origins may use the server from a browser; `*` for all.
    pub allowed_origins: Vec<HeaderValue>,
    /// Who may use the server.
    pub keys: ApiKeys,
    /// `/metrics` needs a key too.
    pub metrics_require_key: bool,
    /// How much each key may use.
    pub key_limits: KeyLimits,
    /// A request that was not begun after this time gets a 429.
    pub queue_timeout: Option<Duration>,
    /// A request that is not done after this time gets a 504, and holds nothing any more.
    pub request_timeout: Option<Duration>,
    /// Keys share no prefixes: none learns from the cache what another sent.
    pub isolate_prefix_cache: bool,
    /// Bytes of large requests that may be in at once until they are tokens; one more waits, and gets a 503 in the end.
    pub request_bytes: usize,
    /// Requests may say which of them come first.
    pub priorities: bool,
    /// Requests may bring a chat template of their own.
    pub trust_request_chat_template: bool,
    /// Who is told of every request at its end.
    pub sinks: Vec<Arc<dyn RequestSink>>,
    /// Encrypts connections.
    pub tls: Option<Tls>,
    /// Connections at once; one more is closed.
    pub max_connections: usize,
    /// A connection on which no request's head arrives for this long is closed.
    pub header_timeout: Duration,
    /// What is kept of `/v1/responses`.
    pub response_store: StoreLimits,
}

impl Default for ServerOptions {
    fn default() -> Self {
        Self {
            max_body_bytes: 32 << 20,
            body_timeout: Duration::from_secs(60),
            slow_client_timeout: Duration::from_secs(60),
            ready_patience: Duration::from_secs(60),
            watchdog_timeout: None,
            drain_timeout: Duration::from_secs(30),
            seed: None,
            enable_sleep_mode: false,
            enable_admin_api: false,
            pages: true,
            allowed_origins: Vec::new(),
            keys: ApiKeys::default(),
            metrics_require_key: false,
            key_limits: KeyLimits::default(),
            queue_timeout: None,
            request_timeout: None,
            isolate_prefix_cache: false,
            request_bytes: 128 << 20,
            priorities: false,
            trust_request_chat_template: false,
            sinks: Vec::new(),
            tls: None,
            max_connections: 8192,
            header_timeout: Duration::from_secs(60),
            response_store: StoreLimits::default(),
        }
    }
}

/// Everything the handlers share; cheap to clone.
#[derive(Clone)]
pub struct AppState(Arc<Inner>);

struct Inner {
    engine: EngineHandle,
    model: Arc<ModelInfo>,
    memory: Arc<dyn Memory>,
    meters: MeterReader,
    options: ServerOptions,
    metrics: Metrics,
    answer_marks: Arc<[TokenId]>,
    quotas: Quotas,
    responses: ResponseStore,
    room: Room,
    longest_text: usize,
    seeds: Mutex<StdRng>,
    large_bodies: Arc<Semaphore>,
    grammars: Arc<GrammarCompiler>,
    compiling: Arc<Semaphore>,
    drain_asked: Notify,
    /// From the beginning of the drain: whether there were requests in.
    draining: OnceLock<bool>,
    started: u64,
}

impl fmt::Debug for AppState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AppState")
            .field("model", &self.0.model.id)
            .field("options", &self.0.options)
            .finish()
    }
}

impl AppState {
    /// Made once the engine is ready.
    pub fn new(
        engine: EngineHandle,
        model: ModelInfo,
        memory: Arc<dyn Memory>,
        options: ServerOptions,
    ) -> Self {
        let metrics = Metrics::new(&model.id, engine.limits().max_model_len, options.ready_patience);
        let grammars = GrammarCompiler::new(model.tokenizer.clone(), &model.eos_token_ids);
        let cores = available_parallelism().map_or(1, usize::from);
        let answer_marks = model.answers.marks(&model.tokenizer);
        let ids = 0..TokenId::try_from(model.tokenizer.vocab_size()).unwrap_or(TokenId::MAX);
        let longest = ids.map(|id| model.tokenizer.token_bytes(id).len()).max();
        let longest = longest.unwrap_or(0).max(1);
        let longest_text = engine.limits().max_request_tokens().saturating_mul(longest);
        let model = Arc::new(model);
        let seeds = Mutex::new(
            options
                .seed
                .map_or_else(StdRng::from_os_rng, StdRng::seed_from_u64),
        );
        Self(Arc::new(Inner {
            engine,
            model,
            meters: MeterReader::new(memory.as_ref()),
            memory,
            quotas: Quotas::new(options.key_limits),
            responses: ResponseStore::new(options.response_store),
            room: Room::new(
                options.request_bytes.max(options.max_body_bytes),
                MAX_WAIT.min(options.body_timeout / 2),
            ),
            longest_text,
            options,
            metrics,
            answer_marks,
            seeds,
            large_bodies: Arc::new(Semaphore::new(1)),
            grammars: Arc::new(grammars),
            compiling: Arc::new(Semaphore::new((cores / 2).max(1))),
            drain_asked: Notify::new(),
            draining: OnceLock::new(),
            started: unix_seconds(),
        }))
    }

    /// The engine.
    pub fn engine(&self) -> &EngineHandle {
        &self.0.engine
    }

    pub(crate) fn model(&self) -> &Arc<ModelInfo> {
        &self.0.model
    }

    pub(crate) fn memory(&self) -> &dyn Memory {
        self.0.memory.as_ref()
    }

    /// The device's meters: now, or as last read where it does not answer.
    pub(crate) async fn meters(&self) -> Meters {
        self.0.meters.read(&self.0.memory).await
    }

    /// What `/ready` says.
    pub(crate) fn status(&self, health: &Health) -> Status {
        Status::of(health, self.options().ready_patience)
    }

    pub(crate) fn options(&self) -> &ServerOptions {
        &self.0.options
    }

    /// Compiles what clients want their text to be.
    pub(crate) fn grammars(&self) -> &Arc<GrammarCompiler> {
        &self.0.grammars
    }

    /// One permit for each grammar that may be compiled at a time, lest they take all cores.
    pub(crate) fn compiling(&self) -> &Arc<Semaphore> {
        &self.0.compiling
    }

    pub(crate) fn quotas(&self) -> &Quotas {
        &self.0.quotas
    }

    pub(crate) fn responses(&self) -> &ResponseStore {
        &self.0.responses
    }

    /// Room for what large requests say.
    pub(crate) fn text_room(&self) -> &Room {
        &self.0.room
    }

    /// Bytes of text that fit into the context at most, were all of it the longest token.
    pub(crate) fn longest_text(&self) -> usize {
        self.0.longest_text
    }

    pub(crate) fn metrics(&self) -> &Metrics {
        &self.0.metrics
    }

    /// Special tokens that mark parts of answers.
    pub(crate) fn answer_marks(&self) -> &Arc<[TokenId]> {
        &self.0.answer_marks
    }

    /// A seed for a request that brings none.
    pub(crate) fn draw_seed(&self) -> u64 {
        self.0
            .seeds
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .random()
    }

    /// The turn of one large body to be parsed; it ends with the drop.
    pub(crate) async fn large_body(&self) -> Option<OwnedSemaphorePermit> {
        // Nobody closes it.
        Arc::clone(&self.0.large_bodies).acquire_owned().await.ok()
    }

    /// Accepts no more requests; [`crate::Server::serve`] ends once those that are in are done. Whether there were any when
    /// the drain began.
    pub(crate) fn begin_drain(&self) -> bool {
        *self.0.draining.get_or_init(|| {
            let busy = self.engine().stats().in_flight > 0;
            self.engine().begin_drain(self.options().drain_timeout);
            self.0.drain_asked.notify_one();
            busy
        })
    }

    /// Ends when [`Self::begin_drain`] was called.
    pub(crate) async fn drain_asked(&self) {
        self.0.drain_asked.notified().await;
    }

    /// Whether connections are to be closed after their next response.
    pub(crate) fn is_draining(&self) -> bool {
        self.0.draining.get().is_some()
    }

    /// When the server started, in seconds since 1970.
    pub(crate) fn started(&self) -> u64 {
        self.0.started
    }

    /// Tokens that fit behind `prompt`.
    pub(crate) fn room(&self, prompt: &[TokenId]) -> usize {
        let most = self.engine().limits().max_request_tokens();
        most.saturating_sub(prompt.len())
    }

    /// The model's own default of `max_tokens`, as far as it fits behind `prompt`.
    pub(crate) fn default_max_tokens(&self, prompt: &[TokenId]) -> Option<usize> {
        let room = self.room(prompt);
        self.model()
            .defaults
            .max_new_tokens
            .map(|tokens| tokens.min(room.max(1)))
    }

    /// A model that is served for embeddings generates no text.
    pub(crate) fn check_generates(&self) -> Result<(), ApiError> {
        let model = self.model();
        match &model.embedding {
            None => Ok(()),
            Some(_) => Err(ApiError::invalid(
                "model",
                format!("`{}` is served for embeddings: ask /v1/embeddings", model.id),
            )),
        }
    }

    /// A request may leave the model out; a wrong one is an error.
    pub(crate) fn check_model(&self, wanted: Option<&str>) -> Result<(), ApiError> {
        let model = self.model();
        match wanted {
            Some(name) if name != model.id && !model.aliases.iter().any(|alias| alias == name) => {
                Err(ApiError::ModelNotFound(name.to_owned(), model.id.clone()))
            }
            _ => Ok(()),
        }
    }
}

pub(crate) fn unix_seconds() -> u64 {
    // A clock before 1970 shows as 0.
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default()
        .as_secs()
}
