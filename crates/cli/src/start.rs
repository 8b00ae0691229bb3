//! From files to an engine that is proved: load, profile, spawn. Nothing listens yet.

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use plimsoll_core::{Component, Executor, KvConfig, StepLimits, TokenId};
use plimsoll_device::{Budget, capacity};
use plimsoll_engine::{EngineConfig, EngineHandle};
use plimsoll_model::{GenerationConfig, GgufFile, KvCacheDtype, LoadOptions, Model};
use plimsoll_profiler::{KvSize, Margins, ProfileSpec, Proved, Report, Target, profile};
use plimsoll_sim::SimModel;
use plimsoll_text::{ChatTemplate, Tokenizer};

use crate::args::{EngineArgs, KvDtype, LoadFormat};
use crate::bytes::Bytes;
use crate::error::Error;
use crate::progress::{ProfileProgress, bytes_bar};
use crate::source::Source;
use crate::target::{ModelTarget, SIM_KV_BYTES_PER_TOKEN, SimTarget};

/// Context length of the simulated model.
const SIM_MODEL_LEN: usize = 8192;

/// Bytes the simulated device has unless `--device-memory` says more or less.
const SIM_DEVICE_BYTES: u64 = 4 << 30;

/// A KV cache of more tokens than this is of no use at the speed of a CPU, but would take the machine's memory from
/// everybody else. `--max-total-token-num` may ask for more.
const USEFUL_TOKENS: usize = 1 << 17;

/// Turns messages and text into tokens and back, the way the model was trained.
#[derive(Debug)]
pub struct Text {
    /// Text to tokens and back.
    pub tokenizer: Tokenizer,
    /// Messages to text, if the model says how.
    pub template: Option<ChatTemplate>,
    /// Tokens that end a text.
    pub eos_token_ids: Vec<TokenId>,
    /// Sampling defaults the model brings along.
    pub generation: GenerationConfig,
}

/// An engine that may serve.
#[derive(Debug)]
pub struct Ready {
    /// Where requests go.
    pub engine: EngineHandle,
    /// The proved KV cache.
    pub kv: KvConfig,
    /// How it came to that size.
    pub report: Report,
}

/// A model that is loaded: weights and text, but no engine yet.
#[derive(Debug)]
pub struct Loaded {
    /// Text in and out.
    pub text: Text,
    limits: StepLimits,
    vocab_size: usize,
    weights: Weights,
    budget: Budget,
}

#[derive(Debug)]
enum Weights {
    Model(Arc<Model>),
    Sim,
}

/// The memory that `--device-memory` grants, or what this machine can spare.
pub fn budget(source: &Source, args: &EngineArgs) -> Result<Budget, Error> {
    let bytes = match (args.memory.device_memory, source) {
        (Some(Bytes(bytes)), _) => bytes,
        (None, Source::Sim) => SIM_DEVICE_BYTES,
        (None, Source::Files { .. }) => {
            let capacity = capacity::default_capacity()?;
            tracing::info!("device memory: {}, {}", Bytes(capacity.bytes), capacity.bound);
            capacity.bytes
        }
    };
    Ok(Budget::new(bytes))
}

impl Loaded {
    /// Reads the model; its weights are charged to `budget`.
    pub fn new(source: &Source, args: &EngineArgs, budget: Budget) -> Result<Self, Error> {
        if let Some(threads) = args.limits.threads {
            plimsoll_kernels::set_threads(threads);
        }
        match source {
            Source::Sim => {
                let text = Text::simulated()?;
                let limits = step_limits(args, SIM_MODEL_LEN)?;
                let vocab_size = SimModel::text().vocab_size();
                Ok(Self {
                    text,
                    limits,
                    vocab_size,
                    weights: Weights::Sim,
                    budget,
                })
            }
            Source::Files { model, tokenizer } => {
                let mut text = Text::read(tokenizer, args.model.load_format)?;
                let model = load_weights(model, args, &budget)?;
                text.generation = model.generation().clone();
                text.eos_token_ids.extend(model.eos_token_ids());
                text.eos_token_ids.sort_unstable();
                text.eos_token_ids.dedup();
                let limits = step_limits(args, model.spec().max_position_embeddings)?;
                let vocab_size = model.spec().vocab_size;
                Ok(Self {
                    text,
                    limits,
                    vocab_size,
                    weights: Weights::Model(model),
                    budget,
                })
            }
        }
    }

    /// Measures and proves, without an engine.
    pub fn profile(&self, args: &EngineArgs) -> Result<Report, Error> {
        Ok(match &self.weights {
            Weights::Model(model) => self
                .prove(self.model_target(model), model.kv_bytes_per_token(), args)?
                .report()
                .clone(),
            Weights::Sim => self
                .prove(self.sim_target(), SIM_KV_BYTES_PER_TOKEN, args)?
                .report()
                .clone(),
        })
    }

    /// Measures, proves, and starts the engine; at most `max_queue` requests may wait there.
    pub fn start(&self, args: &EngineArgs, max_queue: usize) -> Result<Ready, Error> {
        match &self.weights {
            Weights::Model(model) => self.spawn(
                self.prove(self.model_target(model), model.kv_bytes_per_token(), args)?,
                args,
                max_queue,
            ),
            Weights::Sim => self.spawn(
                self.prove(self.sim_target(), SIM_KV_BYTES_PER_TOKEN, args)?,
                args,
                max_queue,
            ),
        }
    }

    fn model_target(&self, model: &Arc<Model>) -> ModelTarget {
        ModelTarget {
            model: Arc::clone(model),
            limits: self.limits,
            budget: self.budget.clone(),
        }
    }

    fn sim_target(&self) -> SimTarget {
        SimTarget {
            limits: self.limits,
            budget: self.budget.clone(),
        }
    }

    fn prove<T: Target>(
        &self,
        mut target: T,
        kv_bytes_per_token: u64,
        args: &EngineArgs,
    ) -> Result<Proved<T::State>, Error> {
        let limits = self.limits;
        let useful = limits.max_num_seqs.saturating_mul(limits.max_model_len);
        let mut spec = ProfileSpec::new(
            limits,
            self.vocab_size,
            args.limits.block_size,
            kv_bytes_per_token,
        );
        spec.useful_tokens = Some(useful.min(USEFUL_TOKENS.max(limits.max_model_len)));
        spec.margins = Margins::scaled_to(self.budget.meters().total);
        spec.mem_fraction = args.memory.mem_fraction;
        spec.size = match (args.memory.max_total_token_num, args.memory.kv_cache_memory_bytes) {
            (Some(tokens), _) => KvSize::Tokens(tokens),
            (None, Some(Bytes(bytes))) => KvSize::Bytes(bytes),
            (None, None) => KvSize::Auto,
        };
        let mut progress = ProfileProgress::new();
        let proved = profile(&mut target, &spec, &mut progress);
        progress.finish();
        let proved = proved?;
        if let Some(path) = &args.memory.profile_report {
            write_json(path, proved.report())?;
        }
        Ok(proved)
    }

    fn spawn<S: Executor + 'static>(
        &self,
        proved: Proved<S>,
        args: &EngineArgs,
        max_queue: usize,
    ) -> Result<Ready, Error> {
        let (kv, report) = (proved.config().kv, proved.report().clone());
        let config = EngineConfig {
            max_queue,
            vocab_size: self.vocab_size,
            enable_prefix_caching: args.limits.prefix_caching(),
            // Both executors compute inside `launch`.
            steps_in_flight: 1,
        };
        Ok(Ready {
            engine: EngineHandle::spawn(proved, &config)?,
            kv,
            report,
        })
    }
}

impl Text {
    fn simulated() -> Result<Self, Error> {
        let tokenizer = Tokenizer::bytes();
        let template = Some(ChatTemplate::new(SIM_TEMPLATE, tokenizer.special_tokens())?);
        let eos_token_ids = tokenizer.eos_ids().to_vec();
        Ok(Self {
            tokenizer,
            template,
            eos_token_ids,
            generation: GenerationConfig::default(),
        })
    }

    /// From a directory or a GGUF file. Dummy weights need no tokenizer: without one, bytes are tokens.
    fn read(path: &Path, format: LoadFormat) -> Result<Self, Error> {
        let (tokenizer, template) = if path.is_dir() {
            if format == LoadFormat::Dummy && !path.join("tokenizer.json").exists() {
                tracing::warn!("{} has no tokenizer.json: every byte is a token", path.display());
                return Self::simulated();
            }
            (Tokenizer::from_dir(path)?, ChatTemplate::from_dir(path)?)
        } else {
            let file = GgufFile::open(path)?;
            let tokenizer = Tokenizer::from_gguf(file.metadata())?;
            let template = ChatTemplate::from_gguf(file.metadata(), tokenizer.special_tokens())?;
            (tokenizer, template)
        };
        let eos_token_ids = tokenizer.eos_ids().to_vec();
        Ok(Self {
            tokenizer,
            template,
            eos_token_ids,
            generation: GenerationConfig::default(),
        })
    }
}

/// For a model that was trained on no chats.
const SIM_TEMPLATE: &str = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}\
    {% if add_generation_prompt %}assistant: {% endif %}";

fn step_limits(args: &EngineArgs, trained_for: usize) -> Result<StepLimits, Error> {
    let limits = &args.limits;
    let max_model_len = limits.max_model_len.unwrap_or(trained_for);
    if max_model_len > trained_for {
        let message =
            format!("the model was made for at most {trained_for} tokens, {max_model_len} were asked for");
        return Err(Error::Configuration {
            origin: "--max-model-len".to_owned(),
            message,
        });
    }
    if limits.max_num_batched_tokens < limits.max_num_seqs {
        let message = format!(
            "{} tokens per step cannot hold one of each of {} requests; raise it or lower --max-num-seqs",
            limits.max_num_batched_tokens, limits.max_num_seqs
        );
        return Err(Error::Configuration {
            origin: "--max-num-batched-tokens".to_owned(),
            message,
        });
    }
    Ok(StepLimits {
        max_num_batched_tokens: limits.max_num_batched_tokens,
        max_num_seqs: limits.max_num_seqs,
        max_model_len,
    })
}

fn load_weights(path: &Path, args: &EngineArgs, budget: &Budget) -> Result<Arc<Model>, Error> {
    let options = LoadOptions {
        format: match args.model.load_format {
            LoadFormat::Dummy => plimsoll_model::LoadFormat::Dummy {
                seed: args.limits.fixed_seed(),
            },
            LoadFormat::Auto | LoadFormat::Safetensors | LoadFormat::Gguf => plimsoll_model::LoadFormat::Auto,
        },
        kv_cache_dtype: match args.limits.kv_cache_dtype {
            KvDtype::Auto => KvCacheDtype::Auto,
            KvDtype::Float32 => KvCacheDtype::F32,
            KvDtype::Float16 => KvCacheDtype::F16,
        },
    };
    let bar = bytes_bar("weights", 0);
    let begin = Instant::now();
    let model = Model::load(path, options, budget, &mut |progress| {
        bar.set_length(progress.total);
        bar.set_position(progress.done);
    });
    bar.finish_and_clear();
    let model = model?;
    let weights = budget.meters().by_component.get(Component::Weights);
    tracing::info!(
        "loaded {}: {} in {:.1} s",
        path.display(),
        Bytes(weights),
        begin.elapsed().as_secs_f64()
    );
    Ok(model)
}

fn write_json(path: &Path, report: &Report) -> Result<(), Error> {
    let mut text = serde_json::to_string_pretty(report).expect("a report is JSON");
    text.push('\n');
    std::fs::write(path, text).map_err(|source| Error::Write {
        path: path.to_owned(),
        source,
    })
}
