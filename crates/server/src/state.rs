use std::fmt;
use std::sync::{Arc, OnceLock};
use std::thread::available_parallelism;
use std::time::Duration;

use parking_lot::Mutex;
use plimsoll_core::{Meters, TokenId};
use plimsoll_engine::{EngineHandle, Health};
use plimsoll_text::Fim;
use plimsoll_text::grammar::GrammarCompiler;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};

use crate::error::ApiError;
use crate::load::Load;
use crate::memory::Memory;
use crate::meters::MeterReader;
use crate::metrics::Metrics;
use crate::model::ModelInfo;
use crate::options::ServerOptions;
use crate::quota::Quotas;
use crate::request_memory::{RequestMemory, SMALL};
use crate::response_store::ResponseStore;
use crate::status::Status;
use crate::time::unix_seconds;

/// How long a large request waits for memory that others hold.
const MAX_WAIT: Duration = Duration::from_secs(10);

/// State shared by all handlers; cheap to clone.
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
    fim: Option<Fim>,
    quotas: Quotas,
    responses: ResponseStore,
    request_memory: RequestMemory,
    fetch_memory: RequestMemory,
    image_memory: RequestMemory,
    longest_text: usize,
    seeds: Mutex<StdRng>,
    large_bodies: Arc<Semaphore>,
    grammars: Arc<GrammarCompiler>,
    compiling: Arc<Semaphore>,
    processing: Arc<Semaphore>,
    load: Load,
    background: Arc<Semaphore>,
    drain_asked: Notify,
    /// Set when a drain begins: whether there were requests in flight.
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
    /// Created once the engine is ready.
    pub fn new(
        engine: EngineHandle,
        mut model: ModelInfo,
        memory: Arc<dyn Memory>,
        options: ServerOptions,
    ) -> Self {
        let metrics = Metrics::new(&model.id, engine.limits().max_model_len, options.ready_patience);
        for end in model.answers.ends(&model.tokenizer) {
            if !model.eos_token_ids.contains(&end) {
                model.eos_token_ids.push(end);
            }
        }
        let grammars = GrammarCompiler::new(model.tokenizer.clone(), &model.eos_token_ids);
        let cores = available_parallelism().map_or(1, usize::from);
        let answer_marks = model.answers.marks(&model.tokenizer);
        let fim = Fim::detect(&model.tokenizer);
        let ids = 0..TokenId::try_from(model.tokenizer.vocab_size()).unwrap_or(TokenId::MAX);
        let longest = ids.map(|id| model.tokenizer.token_bytes(id).len()).max();
        let longest = longest.unwrap_or(0).max(1);
        let longest_text = engine.limits().max_request_tokens().saturating_mul(longest);
        let model = Arc::new(model);
        // Most of the places are left to other requests.
        let background = (engine.capacity() / 4).clamp(1, Semaphore::MAX_PERMITS);
        let seeds = options.seed;
        let seeds = seeds.map_or_else(StdRng::from_os_rng, StdRng::seed_from_u64);
        Self(Arc::new(Inner {
            engine,
            model,
            meters: MeterReader::new(memory.as_ref()),
            memory,
            quotas: Quotas::new(options.key_limits),
            responses: ResponseStore::new(options.response_store),
            request_memory: RequestMemory::new(
                "large request bodies",
                options.request_bytes.max(options.max_body_bytes),
                SMALL,
                MAX_WAIT.min(options.body_timeout / 2),
            ),
            // Not that of bodies: they are held while their images wait.
            fetch_memory: RequestMemory::new("images that are fetched", options.request_bytes, 0, MAX_WAIT),
            image_memory: RequestMemory::new("images", options.image_bytes, 0, MAX_WAIT),
            longest_text,
            options,
            metrics,
            answer_marks,
            fim,
            seeds: Mutex::new(seeds),
            large_bodies: Arc::new(Semaphore::new(1)),
            grammars: Arc::new(grammars),
            compiling: Arc::new(Semaphore::new((cores / 2).max(1))),
            processing: Arc::new(Semaphore::new(cores)),
            load: Load::default(),
            background: Arc::new(Semaphore::new(background)),
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

    /// The device's meters, of each rank; the last known ones where the device does not answer in time.
    pub(crate) async fn meters(&self) -> Vec<Meters> {
        self.0.meters.read(&self.0.memory).await
    }

    /// The status that `/ready` reports.
    pub(crate) fn status(&self, health: &Health) -> Status {
        Status::of(health, self.options().ready_patience)
    }

    pub(crate) fn options(&self) -> &ServerOptions {
        &self.0.options
    }

    /// Compiles grammars for structured output.
    pub(crate) fn grammars(&self) -> &Arc<GrammarCompiler> {
        &self.0.grammars
    }

    /// Limits concurrent grammar compilations, so that they do not take all cores.
    pub(crate) fn compiling(&self) -> &Arc<Semaphore> {
        &self.0.compiling
    }

    /// Permit to decode and resize images: as many at once as there are cores.
    pub(crate) async fn processing_turn(&self) -> Option<OwnedSemaphorePermit> {
        // The semaphore is never closed.
        Arc::clone(&self.0.processing).acquire_owned().await.ok()
    }

    pub(crate) fn quotas(&self) -> &Quotas {
        &self.0.quotas
    }

    pub(crate) fn responses(&self) -> &ResponseStore {
        &self.0.responses
    }

    /// Memory for the text of large requests.
    pub(crate) fn request_memory(&self) -> &RequestMemory {
        &self.0.request_memory
    }

    /// Memory for files of images that are fetched.
    pub(crate) fn fetch_memory(&self) -> &RequestMemory {
        &self.0.fetch_memory
    }

    /// Memory for images of requests.
    pub(crate) fn image_memory(&self) -> &RequestMemory {
        &self.0.image_memory
    }

    /// Upper bound of the bytes of text that fit the context: every token the longest one.
    pub(crate) fn longest_text(&self) -> usize {
        self.0.longest_text
    }

    pub(crate) fn metrics(&self) -> &Metrics {
        &self.0.metrics
    }

    /// Requests in progress.
    pub(crate) fn load(&self) -> &Load {
        &self.0.load
    }

    /// Places for requests of batches.
    pub(crate) fn background(&self) -> &Arc<Semaphore> {
        &self.0.background
    }

    /// Special tokens that mark reasoning and tool calls in answers.
    pub(crate) fn answer_marks(&self) -> &Arc<[TokenId]> {
        &self.0.answer_marks
    }

    /// How the model fills in the middle, if it does.
    pub(crate) fn fim(&self) -> Option<&Fim> {
        self.0.fim.as_ref()
    }

    /// A seed for a request without one.
    pub(crate) fn draw_seed(&self) -> u64 {
        self.0.seeds.lock().random()
    }

    /// Permit to parse a large body: one at a time.
    pub(crate) async fn large_body(&self) -> Option<OwnedSemaphorePermit> {
        // The semaphore is never closed.
        Arc::clone(&self.0.large_bodies).acquire_owned().await.ok()
    }

    /// Stops accepting requests; [`crate::Server::serve`] returns once those in flight are done. Returns whether there were
    /// any when the drain began.
    pub(crate) fn begin_drain(&self) -> bool {
        *self.0.draining.get_or_init(|| {
            let busy = self.engine().stats().in_flight > 0;
            self.engine().begin_drain(self.options().drain_timeout);
            self.0.drain_asked.notify_one();
            busy
        })
    }

    /// Completes when [`Self::begin_drain`] is called.
    pub(crate) async fn drain_asked(&self) {
        self.0.drain_asked.notified().await;
    }

    /// Whether connections close after their next response.
    pub(crate) fn is_draining(&self) -> bool {
        self.0.draining.get().is_some()
    }

    /// When the server started, in seconds since 1970.
    pub(crate) fn started(&self) -> u64 {
        self.0.started
    }

    /// An error where the model is served for embeddings: it generates no text.
    pub(crate) fn check_generates(&self) -> Result<(), ApiError> {
        let model = self.model();
        match &model.embedding {
            None => Ok(()),
            Some(embedding) => {
                let instead = match embedding.scorer {
                    None => "is served for embeddings: use /v1/embeddings",
                    Some(_) => "is a cross-encoder: use /v1/rerank or /v1/score",
                };
                Err(ApiError::invalid("model", format!("`{}` {instead}", model.id)))
            }
        }
    }

    /// An error where a request names a model that is not served; it may name none, or leave the name empty.
    pub(crate) fn check_model(&self, wanted: Option<&str>) -> Result<(), ApiError> {
        let model = self.model();
        match wanted {
            Some(name)
                if !name.is_empty()
                    && name != model.id
                    && !model.aliases.iter().any(|alias| alias == name) =>
            {
                Err(ApiError::ModelNotFound(name.to_owned(), model.id.clone()))
            }
            _ => Ok(()),
        }
    }
}
