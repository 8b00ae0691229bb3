//! Where a model runs: one implementation for each kind of device. Nothing above this module knows which it is.

mod choose;
mod cpu;
mod gpu;
mod predicted;
mod ranks;
mod ranks_on_gpus;
mod sim;

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use plimsoll_core::{
    BlockSize, BuildError, CacheGroups, Component, Executor, ExpertLoads, ImageInput, Meters, Pooling,
    StateConfig, StepLimits, TokenId,
};
use plimsoll_device::Budget;
use plimsoll_kernels::cuda::LinearWays;
use plimsoll_model::{Cancel, GenerationConfig, LoadProgress, ModelConfig};
use plimsoll_profiler::{BuildProgress, Disabled, Footprint, Target};
use plimsoll_server::{EmbeddingInfo, Scorer};

use crate::error::Error;
use crate::plan_cache::DeviceKey;
use crate::settings::EngineSettings;

pub use choose::{Place, look, open};
pub use cpu::{CpuBackend, CpuRank};
pub use gpu::{AssumedBytes, AssumedGpu, GpuBackend, GpuPart};
pub(crate) use ranks::Targets;
pub use ranks::{RanksBackend, SharedExchange};
pub use sim::SimBackend;

/// What a model's configuration tells without the device.
pub trait Configured {
    /// Tokens of the longest request that the model was made for.
    ///
    /// # Errors
    /// Where its configuration cannot be read or served.
    fn max_model_len(&self) -> Result<usize, Error>;

    /// Layers of the model that keep a state of fixed size per request.
    ///
    /// # Errors
    /// As [`Self::max_model_len`].
    fn state_layers(&self) -> Result<usize, Error>;

    /// Tokens of a prompt that only one step can compute: those of an image that see each other; 1 where there are none such.
    ///
    /// # Errors
    /// As [`Self::max_model_len`].
    fn tokens_at_once(&self) -> Result<usize, Error> {
        Ok(1)
    }

    /// Size of the model's vocabulary, from its configuration alone: weights may be loading at the same time.
    ///
    /// # Errors
    /// As [`Self::max_model_len`].
    fn vocab_size(&self) -> Result<usize, Error>;

    /// The model of images and text of which text alone is served, by its name in config.json.
    ///
    /// # Errors
    /// As [`Self::max_model_len`].
    fn text_part_of(&self) -> Result<Option<&'static str>, Error> {
        Ok(None)
    }
}

/// A device and the model that is to run there, as far as can be told without loading it. The device may not be here.
pub trait Device: Configured + fmt::Debug + Send + Sync {
    /// `cpu` or `cuda`.
    fn kind(&self) -> &'static str;

    /// For people.
    fn name(&self) -> String {
        self.kind().to_owned()
    }

    /// How many ranks serve the model together, each with a part of it and as much memory.
    fn ranks(&self) -> usize {
        1
    }

    /// Whether the device is not here, and only its size is known.
    fn is_assumed(&self) -> bool {
        false
    }

    /// What suits the device where flags say nothing.
    fn defaults(&self) -> Defaults;

    /// Most bytes that could be granted, where that is known.
    fn largest(&self) -> Option<u64> {
        None
    }

    /// Tokens of a prompt for which states are computed together, as [`plimsoll_core::Executor::state_chunk`] at most.
    fn state_chunk(&self) -> usize {
        1
    }

    /// What the model and a state for these limits would take.
    ///
    /// # Errors
    /// As [`Backend::load`], as far as configuration and headers tell.
    fn footprint(&self, limits: StepLimits) -> Result<(ModelFacts, Box<dyn Footprint>), Error>;
}

/// A device that is here: it loads the model, builds states that serve it, and has meters.
pub trait Backend: Device {
    /// Reads the weights, which are charged to [`Self::account`]; `progress` hears about every tensor, and
    /// `cancel` ends it early. `earlier` is [`LoadedModel::linear_ways`] of an earlier start, or empty.
    ///
    /// # Errors
    /// Where they cannot be read, or do not fit.
    fn load(
        &self,
        earlier: &[LinearWays],
        cancel: &Cancel,
        progress: &mut dyn FnMut(LoadProgress),
    ) -> Result<LoadedModel, Error>;

    /// What this process has allocated there.
    fn account(&self) -> &Budget;

    /// The same of each rank, in order.
    fn accounts(&self) -> Vec<&Budget> {
        vec![self.account()]
    }

    /// Each rank of several, and where it meets the others, in order; empty for one alone.
    fn parts(&self) -> &[(Arc<dyn Backend>, SharedExchange)] {
        &[]
    }

    /// The device's meters, now. Asks the device or the operating system: not for the step path.
    fn meters(&self) -> Meters {
        self.account().look();
        self.account().meters()
    }

    /// Allocations made there so far, by all ranks.
    fn allocations(&self) -> u64 {
        let accounts = self.accounts().into_iter();
        accounts.map(|account| account.meters().allocations).sum()
    }

    /// Sets the high-water marks to what is in use now.
    fn reset_high_water(&self) {
        self.account().reset_high_water();
    }

    /// Charges to the runtime what libraries have taken since it was last called: they load parts of themselves when those
    /// are first used.
    fn settle_runtime(&self) {}

    /// Waits for the device and returns what allocators hold without using it.
    fn trim(&self) {}

    /// What a measurement on this device depends on.
    fn plan_key(&self) -> DeviceKey;

    /// Logs which other processes hold memory of the device, where that can be told.
    fn log_neighbours(&self) {}

    /// Lets a profiler that waits for it record from here on, or no longer.
    ///
    /// # Errors
    /// Where there is no such profiler.
    fn watch(&self, _on: bool) -> Result<(), Error> {
        Err(Error::Bench("--profile is for models on a GPU".to_owned()))
    }
}

/// A model's files, and the device for them.
#[derive(Debug)]
pub struct ModelOn<D> {
    /// A directory, or a GGUF file.
    model: PathBuf,
    settings: Arc<EngineSettings>,
    device: D,
    /// What the model says about itself, once somebody has asked.
    config: OnceLock<ModelConfig>,
}

impl<D> ModelOn<D> {
    /// For the model at `model`, a directory or a GGUF file.
    pub fn new(model: &Path, settings: &Arc<EngineSettings>, device: D) -> Self {
        Self {
            model: model.to_owned(),
            settings: Arc::clone(settings),
            device,
            config: OnceLock::new(),
        }
    }

    fn config(&self) -> Result<&ModelConfig, Error> {
        if let Some(config) = self.config.get() {
            return Ok(config);
        }
        let config = ModelConfig::read(&self.model, &self.settings.serve_as.without_images())?;
        Ok(self.config.get_or_init(|| config))
    }
}

/// What a model is to run on.
pub trait Hardware {
    /// Whether it can run there as the settings say.
    ///
    /// # Errors
    /// Where it cannot.
    fn check(&self, _: &EngineSettings, _: &ModelConfig) -> Result<(), Error> {
        Ok(())
    }
}

impl<D: Hardware> Configured for ModelOn<D> {
    fn max_model_len(&self) -> Result<usize, Error> {
        let config = self.config()?;
        self.device.check(&self.settings, config)?;
        Ok(config.max_tokens())
    }

    fn state_layers(&self) -> Result<usize, Error> {
        Ok(self.config()?.spec.state_layers())
    }

    fn tokens_at_once(&self) -> Result<usize, Error> {
        let config = ModelConfig::read(&self.model, &self.settings.serve_as)?;
        Ok(config.image_input().map_or(1, |input| input.tokens_at_once()))
    }

    fn vocab_size(&self) -> Result<usize, Error> {
        Ok(self.config()?.spec.vocab_size)
    }

    fn text_part_of(&self) -> Result<Option<&'static str>, Error> {
        let config = ModelConfig::read(&self.model, &self.settings.serve_as)?;
        let around = config.text_part_of.filter(|_| config.encoder.is_none());
        Ok(around.map(|around| around.name))
    }
}

/// What suits a device where nobody says.
#[derive(Clone, Copy, Debug)]
pub struct Defaults {
    /// `--max-num-seqs`.
    pub max_num_seqs: usize,
    /// `--max-num-batched-tokens`.
    pub max_num_batched_tokens: usize,
    /// One where the executor computes inside `launch`; on a GPU the host prepares the next step meanwhile.
    pub steps_in_flight: usize,
    /// Whether a step may take more memory the longer its contexts are.
    pub contexts_take_memory: bool,
    /// Tokens of the KV cache, or of one request if that is more, where no flag says how much memory it may take. A larger one
    /// is of little use at the device's speed, but would take memory from others.
    pub useful_tokens: Option<usize>,
}

/// Of a CPU, and of the simulated device.
const CPU_DEFAULTS: Defaults = Defaults {
    max_num_seqs: 32,
    max_num_batched_tokens: 512,
    steps_in_flight: 1,
    contexts_take_memory: true,
    useful_tokens: Some(1 << 15),
};

/// What the rest of a server needs to know of a model.
#[derive(Clone, Debug)]
pub struct ModelFacts {
    /// Tokens of its vocabulary.
    pub vocab_size: usize,
    /// Which images its prompts may have; `None` where it is served for text alone.
    pub images: Option<ImageInput>,
    /// How it makes vectors, if it is served for embeddings: it generates no text then.
    pub embedding: Option<EmbeddingInfo>,
    /// How its KV cache is cut.
    pub groups: CacheGroups,
    /// Bytes of KV that a token takes while every layer keeps it.
    pub kv_bytes_per_token: u64,
    /// Bytes of the states of fixed size that a request has beside its KV; 0 where no layer has one.
    pub state_bytes: u64,
    /// How its linear layers are stored, if not in floats.
    pub quantization: Option<String>,
    /// Weights it has; `None` for a simulated model.
    pub num_parameters: Option<u64>,
    /// Those that are read for one token.
    pub num_active_parameters: Option<u64>,
    /// Those that one rank has.
    pub num_parameters_of_rank: Option<u64>,
}

impl ModelFacts {
    /// `row` is a cross-encoder's, where its weights were read.
    fn of(
        config: &ModelConfig,
        row: Option<&Arc<[f32]>>,
        block_size: BlockSize,
        kv_bytes_per_token: u64,
        state_bytes: u64,
    ) -> Self {
        let embedding = config.embedding.as_ref();
        Self {
            vocab_size: config.spec.vocab_size,
            images: config.image_input(),
            embedding: embedding.map(|embedding| EmbeddingInfo {
                pooling: embedding.pooling,
                normalize: embedding.normalize,
                size: config.spec.hidden_size,
                matryoshka: config.matryoshka.clone(),
                scorer: embedding.scoring.as_ref().map(|scoring| Scorer {
                    row: row.cloned().unwrap_or_default(),
                    sigmoid: scoring.sigmoid,
                    always_rendered: scoring.is_of_text_model(),
                    instruction: scoring.instruction.clone(),
                    template_kwargs: scoring.template_kwargs.clone(),
                    add_generation_prompt: scoring.add_generation_prompt,
                }),
            }),
            groups: config.spec.cache_groups(block_size),
            kv_bytes_per_token,
            state_bytes,
            quantization: config.spec.quantization.name(),
            num_parameters: Some(config.spec.num_parameters()),
            num_active_parameters: Some(config.spec.num_active_parameters()),
            num_parameters_of_rank: Some(config.spec.num_parameters_of_rank()),
        }
    }

    /// Whether requests share prefixes: as the settings say, but never if every row of a prompt is needed.
    pub(crate) fn shares_prefixes(&self, settings: &EngineSettings) -> bool {
        settings.prefix_caching && !self.pooling().is_some_and(Pooling::needs_every_row)
    }

    /// How rows are pooled, if it is served for embeddings.
    pub fn pooling(&self) -> Option<Pooling> {
        self.embedding.as_ref().map(|embedding| embedding.pooling)
    }
}

/// A model whose weights are on its device.
#[derive(Debug)]
pub struct LoadedModel {
    /// About the model.
    pub facts: ModelFacts,
    /// Sampling defaults that it brings along.
    pub generation: GenerationConfig,
    /// Tokens that end a text.
    pub eos_token_ids: Vec<TokenId>,
    /// Where tokens go, if it has experts and the device counts that.
    pub expert_loads: Option<Arc<ExpertLoads>>,
    /// What the device or its kernels do without for this model.
    pub disabled: Vec<Disabled>,
    /// What was measured of the linear layers of each rank, in order; empty where the device measures nothing, or all took over what an
    /// earlier start had measured.
    pub linear_ways: Vec<LinearWays>,
    /// Builds what serves it: of each rank, in order.
    pub weights: Vec<Arc<dyn Weights>>,
}

/// Weights from which states that serve are built.
pub trait Weights: fmt::Debug + Send + Sync {
    /// A state: KV cache, step arena, staging, graphs and canary, as one value that gives all of it back when dropped. `piece`
    /// hears of its parts.
    ///
    /// # Errors
    /// [`BuildError`], with everything given back.
    fn build(
        &self,
        config: &StateConfig,
        limits: &StepLimits,
        piece: &mut dyn FnMut(BuildProgress),
    ) -> Result<Box<dyn EngineState>, BuildError>;

    /// How long the largest image took to encode when a state was built: that much longer a step may take than the worst of the
    /// proof, which has none.
    fn slowest_encode(&self) -> Duration {
        Duration::ZERO
    }
}

/// What serves.
pub trait EngineState: Executor {
    /// Most bytes of the step arena in use at once since the state was built or this was last called.
    fn take_arena_high_water(&mut self) -> u64;

    /// Frees the canary: the last thing before serving.
    fn release_canary(&mut self);
}

/// A backend with its loaded model, as the auto-profile sees it.
#[derive(Clone, Debug)]
pub(crate) struct ProfiledBackend {
    pub(crate) backend: Arc<dyn Backend>,
    pub(crate) weights: Arc<dyn Weights>,
    pub(crate) limits: StepLimits,
}

impl Target for ProfiledBackend {
    type State = Box<dyn EngineState>;

    fn build(
        &mut self,
        config: &StateConfig,
        piece: &mut dyn FnMut(BuildProgress),
    ) -> Result<Self::State, BuildError> {
        self.weights.build(config, &self.limits, piece)
    }

    fn meters(&self) -> Meters {
        self.backend.meters()
    }

    fn reset_high_water(&mut self) {
        self.backend.settle_runtime();
        self.backend.reset_high_water();
    }

    fn trim(&mut self) {
        self.backend.trim();
    }

    fn take_scratch_high_water(&mut self, state: &mut Self::State) -> u64 {
        self.backend.settle_runtime();
        state.take_arena_high_water()
    }

    fn release_canary(&mut self, state: &mut Self::State) {
        state.release_canary();
        self.backend.trim();
    }
}

/// Bytes of the weights that were loaded.
pub(crate) fn weights_bytes(backend: &dyn Backend) -> u64 {
    backend.account().meters().by_component.get(Component::Weights)
}
