use std::io::ErrorKind;
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use plimsoll_core::{ExpertLoads, KvConfig, TokenId};
use plimsoll_device::{Budget, Charge};
use plimsoll_kernels::cuda::LinearWays;
use plimsoll_kernels::{Exchange, WeightType};

use crate::decoder::Decoder;
use crate::embedding::{self, ServeAs};
use crate::encoder::{Encoder, SlowestEncode};
use crate::quantization::Quantization;
use crate::state::{KvCacheDtype, KvElementType, StateCache};
use crate::weights::{Checkpoint, DummyWeights, GgufWeights, Loader, Source};
use crate::{
    Around, Cancel, DecoderSpec, GenerationConfig, GgufFile, LoadProgress, ModelConfig, ModelError, Shard,
};

/// How to load a model.
#[derive(Clone, Debug, Default)]
pub struct LoadOptions {
    /// Where the weights come from.
    pub format: LoadFormat,
    /// Element of the KV cache.
    pub kv_cache_dtype: KvCacheDtype,
    /// Text or embeddings.
    pub serve_as: ServeAs,
    /// The rank whose part is loaded.
    pub shard: Shard,
    /// Ends it early.
    pub cancel: Cancel,
    /// What an earlier process measured of this rank's linear layers, for a GPU: it is measured again where it does not hold on all ranks.
    pub linear_ways: Option<LinearWays>,
}

/// Where weights come from (`--load-format`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LoadFormat {
    /// From the files: safetensors in a directory, or a GGUF file.
    #[default]
    Auto,
    /// Random, for benchmarks and tests that need a configuration alone.
    Dummy {
        /// The same seed gives the same weights.
        seed: u64,
    },
}

/// A model's configuration and weights. States that serve it are built with [`Model::build_state`].
#[derive(Debug)]
pub struct Model {
    about: About,
    pub(crate) decoder: Decoder,
    pub(crate) encoder: Option<Encoder>,
    pub(crate) slowest_encode: SlowestEncode,
    pub(crate) kv_element: KvElementType,
    /// Where it meets the other ranks, if there are any: one state at a time computes steps.
    pub(crate) exchange: Option<Arc<Mutex<Exchange>>>,
    /// Given back after the weights: fields are dropped in order.
    _charges: Vec<Charge>,
}

impl Model {
    /// Loads a model directory (config.json, safetensors) or a GGUF file. Every weight is charged to `budget` before it is
    /// allocated; `progress` hears about every tensor.
    ///
    /// # Errors
    /// [`ModelError`], which names what is at fault. [`ModelError::Oom`] if the weights do not fit.
    pub fn load(
        path: &Path,
        options: LoadOptions,
        budget: &Budget,
        progress: &mut dyn FnMut(LoadProgress),
    ) -> Result<Arc<Self>, ModelError> {
        Self::load_rank(path, options, budget, None, progress)
    }

    /// As [`Self::load`], for the rank of `options`, which meets the others at `exchange`.
    ///
    /// # Errors
    /// As [`Self::load`]; [`ModelError::Flag`] where the model cannot be divided among so many ranks.
    pub fn load_rank(
        path: &Path,
        options: LoadOptions,
        budget: &Budget,
        exchange: Option<Arc<Mutex<Exchange>>>,
        progress: &mut dyn FnMut(LoadProgress),
    ) -> Result<Arc<Self>, ModelError> {
        let mut description = Description::read(path, &options.serve_as)?;
        description.read_scoring_row(options.format)?;
        let spec = description.about.spec().shard(options.shard)?;
        check_cpu(&spec)?;
        description.about.log_what_is_left_out();
        let source = description.source(options.format)?;
        let mut loader = Loader::new(&*source, budget, &options.cancel, progress);
        let decoder = Decoder::load(&spec, &mut loader)?;
        let kv_element = KvElementType::choose(options.kv_cache_dtype, loader.all_f32())?;
        let encoder = match &description.about.config.encoder {
            None => None,
            Some(spec) => Some(Encoder::load(spec, &mut loader)?),
        };
        let charges = loader.finish()?;
        drop(source);
        description.about.config.spec = spec;
        Ok(Arc::new(Self {
            about: description.about,
            decoder,
            encoder,
            slowest_encode: SlowestEncode::default(),
            kv_element,
            exchange,
            _charges: charges,
        }))
    }

    /// Bytes of KV cache that a token takes while every layer keeps it.
    pub fn kv_bytes_per_token(&self) -> u64 {
        self.spec().kv_bytes_per_token(self.kv_element.size())
    }

    /// Bytes of a KV cache.
    pub fn kv_bytes(&self, config: KvConfig) -> u64 {
        self.spec().kv_bytes(config, self.kv_element.size())
    }

    /// How long the largest image that limits allow took to encode, at most, when a state was built; zero without images.
    pub fn slowest_encode(&self) -> Duration {
        self.slowest_encode.get()
    }

    /// Bytes of the states of fixed size that a request has beside its KV; 0 where no layer has one.
    pub fn state_bytes(&self) -> u64 {
        StateCache::slot_bytes(self.spec())
    }

    /// Where tokens go since the state that serves was proved, if the model has experts.
    pub fn expert_loads(&self) -> Option<&Arc<ExpertLoads>> {
        self.decoder.expert_loads.as_ref()
    }

    /// `f32` or `f16`: the element of the KV cache.
    pub fn kv_cache_dtype(&self) -> &'static str {
        self.kv_element.name()
    }
}

impl Deref for Model {
    type Target = About;

    fn deref(&self) -> &About {
        &self.about
    }
}

/// What a model's files say about it beside its weights.
#[derive(Debug)]
pub struct About {
    pub(crate) config: ModelConfig,
    generation: GenerationConfig,
    /// Of a cross-encoder whose weights were read.
    scoring_row: Option<Arc<[f32]>>,
}

impl About {
    /// What the model says about itself.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// The network.
    pub fn spec(&self) -> &DecoderSpec {
        &self.config.spec
    }

    /// Where only a part of the model is loaded.
    pub(crate) fn log_what_is_left_out(&self) {
        match &self.config.text_part_of {
            Some(Around { name, .. }) if self.config.encoder.is_none() => {
                tracing::info!("{name}: only its text part is served, weights for images are not loaded");
            }
            _ => {}
        }
    }

    /// Sampling defaults that the model brings along.
    pub fn generation(&self) -> &GenerationConfig {
        &self.generation
    }

    /// What a cross-encoder multiplies a pair's vector with, which makes the score: on the host, and as long as the vector. `None`
    /// for other models, and before weights are read.
    pub fn scoring_row(&self) -> Option<&Arc<[f32]>> {
        self.scoring_row.as_ref()
    }

    /// Tokens that end a text, ascending: those of config.json, generation_config.json or the GGUF metadata.
    pub fn eos_token_ids(&self) -> Vec<TokenId> {
        let mut ids = self.config.eos_token_ids.clone();
        ids.extend(&self.generation.eos_token_ids);
        ids.sort_unstable();
        ids.dedup();
        ids
    }
}

impl ModelConfig {
    /// Reads the config.json of a model directory, or the header of a GGUF file, of a model that is served so.
    ///
    /// # Errors
    /// [`ModelError`], which names what is at fault.
    pub fn read(path: &Path, serve_as: &ServeAs) -> Result<Self, ModelError> {
        Description::read(path, serve_as).map(|description| description.about.config)
    }
}

/// What only a GPU can do.
pub(crate) fn check_cpu(spec: &DecoderSpec) -> Result<(), ModelError> {
    match spec.quantization.is_online() {
        false => Ok(()),
        true => Err(ModelError::flag(
            "--quantization",
            "quantising to fp8 needs a GPU; a CPU serves weights as they are stored: leave the flag out",
        )),
    }
}

/// All that is known before the weights are read.
pub(crate) struct Description {
    path: PathBuf,
    pub(crate) about: About,
    gguf: Option<GgufFile>,
}

impl Description {
    pub(crate) fn read(path: &Path, serve_as: &ServeAs) -> Result<Self, ModelError> {
        let (config, generation, gguf) = if path.is_dir() {
            let mut config = ModelConfig::read_json(&path.join("config.json"), &serve_as.hf_overrides)?;
            if let Some(embedding) = embedding::read_directory(path, serve_as)? {
                config.embedding = Some(embedding);
            }
            let embedding = config.embedding.as_mut();
            if let Some(scoring) = embedding.and_then(|embedding| embedding.scoring.as_mut()) {
                scoring.beside(path)?;
            }
            let config = config.served(path, serve_as)?;
            let generation = GenerationConfig::read(path, config.spec.vocab_size)?;
            (config, generation, None)
        } else {
            let file = GgufFile::open(path)?;
            let mut config = file.config(&serve_as.hf_overrides)?.served(path, serve_as)?;
            if !config.spec.quantization.is_online() {
                let types = GgufWeights::new(&file, config.architecture, &config.spec).types(&config.spec)?;
                config.spec.quantization = Quantization::of_gguf(types);
            }
            (config, GenerationConfig::default(), Some(file))
        };
        Ok(Self {
            path: path.to_owned(),
            about: About {
                config,
                generation,
                scoring_row: None,
            },
            gguf,
        })
    }

    /// Where the weights come from.
    pub(crate) fn source(&self, format: LoadFormat) -> Result<Box<dyn Source + '_>, ModelError> {
        Ok(match (format, &self.gguf) {
            (LoadFormat::Dummy { seed }, _) => Box::new(self.dummy(seed)),
            (LoadFormat::Auto, Some(file)) => Box::new(GgufWeights::new(
                file,
                self.about.config.architecture,
                self.about.spec(),
            )),
            (LoadFormat::Auto, None) => Box::new(Checkpoint::open(&self.path)?),
        })
    }

    /// Reads what a cross-encoder has beside its network.
    pub(crate) fn read_scoring_row(&mut self, format: LoadFormat) -> Result<(), ModelError> {
        let embedding = self.about.config.embedding.as_ref();
        if let Some(scoring) = embedding.and_then(|embedding| embedding.scoring.as_ref()) {
            let row = scoring.row(&*self.source(format)?, self.about.spec())?;
            self.about.scoring_row = Some(row.into());
        }
        Ok(())
    }

    /// Where the weights are, as far as their headers go; [`None`] where a directory has none, or not all, as a download of
    /// the configuration alone leaves it.
    pub(crate) fn stored(&self) -> Result<Option<Box<dyn Source + '_>>, ModelError> {
        match self.source(LoadFormat::Auto) {
            Ok(source) => Ok(Some(source)),
            Err(ModelError::NotAModel { .. }) => Ok(None),
            Err(ModelError::Io { source, .. }) if source.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    pub(crate) fn dummy(&self, seed: u64) -> DummyWeights {
        DummyWeights {
            seed,
            dtype: self.about.config.dtype.unwrap_or(WeightType::F32),
            quantization: self.about.spec().quantization.clone(),
        }
    }
}

#[cfg(test)]
mod tests;
