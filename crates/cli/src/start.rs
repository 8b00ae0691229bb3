//! From files to an engine that is proved: load, profile, spawn. Nothing listens yet.

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use plimsoll_core::{Executor, KvConfig, StepLimits, TokenId};
use plimsoll_device::Budget;
use plimsoll_engine::{EngineConfig, EngineHandle};
use plimsoll_kernels::WeightType;
use plimsoll_model::cuda::{GpuModel, GpuOptions};
use plimsoll_model::{GenerationConfig, GgufFile, KvCacheDtype, LoadOptions, Model, ModelConfig};
use plimsoll_profiler::{KvSize, Margins, ProfileSpec, Proved, Report, Target, profile};
use plimsoll_sim::SimModel;
use plimsoll_text::{ChatTemplate, Tokenizer};

use crate::args::{EngineArgs, KvDtype, LoadFormat};
use crate::bytes::Bytes;
use crate::device::Device;
use crate::error::Error;
use crate::progress::{ProfileProgress, bytes_bar};
use crate::source::Source;
use crate::target::{GpuTarget, ModelTarget, SIM_KV_BYTES_PER_TOKEN, SimTarget};

/// Context length of the simulated model.
const SIM_MODEL_LEN: usize = 8192;

/// A KV cache of more tokens than this is of no use at the speed of a CPU, but would take the machine's memory from
/// everybody else. `--max-total-token-num` may ask for more.
const USEFUL_TOKENS: usize = 1 << 17;

/// What suits a device where nobody says.
#[derive(Clone, Copy, Debug)]
struct Defaults {
    max_num_seqs: usize,
    max_num_batched_tokens: usize,
    /// One where the executor computes inside `launch`; on a GPU the host prepares the next step meanwhile.
    steps_in_flight: usize,
}

const CPU: Defaults = Defaults {
    max_num_seqs: 32,
    max_num_batched_tokens: 512,
    steps_in_flight: 1,
};

const GPU: Defaults = Defaults {
    max_num_seqs: 512,
    max_num_batched_tokens: 8192,
    steps_in_flight: 2,
};

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
}

/// Weights, and the account of the memory that they and the engine take.
#[derive(Debug)]
enum Weights {
    Cpu(Arc<Model>, Budget),
    Gpu(Arc<GpuModel>),
    Sim(Budget),
}

impl Weights {
    fn account(&self) -> &Budget {
        match self {
            Self::Cpu(_, budget) | Self::Sim(budget) => budget,
            Self::Gpu(model) => model.gpu().budget(),
        }
    }

    fn kv_bytes_per_token(&self) -> u64 {
        match self {
            Self::Cpu(model, _) => model.kv_bytes_per_token(),
            Self::Gpu(model) => model.kv_bytes_per_token(),
            Self::Sim(_) => SIM_KV_BYTES_PER_TOKEN,
        }
    }

    fn defaults(&self) -> Defaults {
        match self {
            Self::Cpu(..) | Self::Sim(_) => CPU,
            Self::Gpu(_) => GPU,
        }
    }
}

impl Loaded {
    /// Reads the model; its weights are charged to `device`.
    pub fn new(source: &Source, args: &EngineArgs, device: impl Into<Device>) -> Result<Self, Error> {
        if let Some(threads) = args.limits.threads {
            plimsoll_kernels::set_threads(threads);
        }
        let (text, weights, trained_for, vocab_size) = match (source, device.into()) {
            (Source::Files { model, tokenizer }, device) => {
                let mut text = Text::read(tokenizer, args.model.load_format)?;
                let (weights, about) = load_weights(model, args, device)?;
                text.generation = about.generation;
                text.eos_token_ids.extend(about.eos_token_ids);
                text.eos_token_ids.sort_unstable();
                text.eos_token_ids.dedup();
                let spec = &about.config.spec;
                (text, weights, spec.max_position_embeddings, spec.vocab_size)
            }
            (Source::Sim, device) => {
                let budget = device.account().clone();
                let vocab_size = SimModel::text().vocab_size();
                (
                    Text::simulated()?,
                    Weights::Sim(budget),
                    SIM_MODEL_LEN,
                    vocab_size,
                )
            }
        };
        Ok(Self {
            text,
            limits: step_limits(args, trained_for, weights.defaults())?,
            vocab_size,
            weights,
        })
    }

    /// Measures and proves, without an engine.
    pub fn profile(&self, args: &EngineArgs) -> Result<Report, Error> {
        Ok(match &self.weights {
            Weights::Cpu(model, budget) => self.prove(self.cpu(model, budget), args)?.report().clone(),
            Weights::Gpu(model) => self.prove(self.gpu(model, args), args)?.report().clone(),
            Weights::Sim(budget) => self.prove(self.sim(budget), args)?.report().clone(),
        })
    }

    /// Measures, proves, and starts the engine; at most `max_queue` requests may wait there.
    pub fn start(&self, args: &EngineArgs, max_queue: usize) -> Result<Ready, Error> {
        match &self.weights {
            Weights::Cpu(model, budget) => {
                self.spawn(self.prove(self.cpu(model, budget), args)?, args, max_queue)
            }
            Weights::Gpu(model) => self.spawn(self.prove(self.gpu(model, args), args)?, args, max_queue),
            Weights::Sim(budget) => self.spawn(self.prove(self.sim(budget), args)?, args, max_queue),
        }
    }

    fn cpu(&self, model: &Arc<Model>, budget: &Budget) -> ModelTarget {
        ModelTarget {
            model: Arc::clone(model),
            limits: self.limits,
            budget: budget.clone(),
        }
    }

    fn gpu(&self, model: &Arc<GpuModel>, args: &EngineArgs) -> GpuTarget {
        GpuTarget {
            model: Arc::clone(model),
            limits: self.limits,
            options: GpuOptions {
                enforce_eager: args.device.enforce_eager(),
            },
        }
    }

    fn sim(&self, budget: &Budget) -> SimTarget {
        SimTarget {
            limits: self.limits,
            budget: budget.clone(),
        }
    }

    fn spec(&self, args: &EngineArgs) -> ProfileSpec {
        let (limits, total) = (self.limits, self.weights.account().meters().total);
        let mut spec = ProfileSpec::new(
            limits,
            self.vocab_size,
            args.limits.block_size,
            self.weights.kv_bytes_per_token(),
        );
        spec.margins = Margins::scaled_to(total);
        spec.mem_fraction = args.memory.mem_fraction;
        spec.size = match (args.memory.max_total_token_num, args.memory.kv_cache_memory_bytes) {
            (Some(tokens), _) => KvSize::Tokens(tokens),
            (None, Some(Bytes(bytes))) => KvSize::Bytes(bytes),
            (None, None) => KvSize::Auto,
        };
        match &self.weights {
            // Nobody else has a use for the GPU's memory, and a prefix cache is never too large.
            Weights::Gpu(model) => spec.largest_device = Some(model.gpu().info().total_bytes),
            Weights::Cpu(..) | Weights::Sim(_) => {
                let useful = limits.max_num_seqs.saturating_mul(limits.max_model_len);
                spec.useful_tokens = Some(useful.min(USEFUL_TOKENS.max(limits.max_model_len)));
            }
        }
        spec
    }

    fn prove<T: Target>(&self, mut target: T, args: &EngineArgs) -> Result<Proved<T::State>, Error> {
        let mut progress = ProfileProgress::new();
        let proved = profile(&mut target, &self.spec(args), &mut progress);
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
            steps_in_flight: self.weights.defaults().steps_in_flight,
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

fn step_limits(args: &EngineArgs, trained_for: usize, defaults: Defaults) -> Result<StepLimits, Error> {
    let limits = &args.limits;
    let max_num_seqs = limits.max_num_seqs.unwrap_or(defaults.max_num_seqs);
    let max_num_seqs = max_num_seqs.max(limits.least_num_seqs);
    let max_num_batched_tokens = limits
        .max_num_batched_tokens
        .unwrap_or(defaults.max_num_batched_tokens);
    let max_model_len = limits.max_model_len.unwrap_or(trained_for);
    if max_model_len > trained_for {
        let message =
            format!("the model was made for at most {trained_for} tokens, {max_model_len} were asked for");
        return Err(Error::Configuration {
            origin: "--max-model-len".to_owned(),
            message,
        });
    }
    if max_num_batched_tokens < max_num_seqs {
        let message = format!(
            "{max_num_batched_tokens} tokens per step cannot hold one of each of {max_num_seqs} requests; raise it or \
             lower --max-num-seqs"
        );
        return Err(Error::Configuration {
            origin: "--max-num-batched-tokens".to_owned(),
            message,
        });
    }
    Ok(StepLimits {
        max_num_batched_tokens,
        max_num_seqs,
        max_model_len,
    })
}

/// What a model says about itself.
struct About {
    config: ModelConfig,
    generation: GenerationConfig,
    eos_token_ids: Vec<TokenId>,
}

fn load_weights(path: &Path, args: &EngineArgs, device: Device) -> Result<(Weights, About), Error> {
    let options = LoadOptions {
        format: match args.model.load_format {
            LoadFormat::Dummy => plimsoll_model::LoadFormat::Dummy {
                seed: args.limits.fixed_seed(),
            },
            LoadFormat::Auto | LoadFormat::Safetensors | LoadFormat::Gguf => plimsoll_model::LoadFormat::Auto,
        },
        kv_cache_dtype: match args.limits.kv_cache_dtype {
            // A GPU knows no other than bfloat16, and a CPU refused it.
            KvDtype::Auto | KvDtype::Bfloat16 => KvCacheDtype::Auto,
            KvDtype::Float32 => KvCacheDtype::F32,
            KvDtype::Float16 => KvCacheDtype::F16,
        },
    };
    let bar = bytes_bar("weights", 0);
    let begin = Instant::now();
    let progress = &mut |progress: plimsoll_model::Progress| {
        bar.set_length(progress.total);
        bar.set_position(progress.done);
    };
    let loaded = match &device {
        Device::Cpu(budget) => Model::load(path, options, budget, progress).map(|model| {
            let about = About {
                config: model.config().clone(),
                generation: model.generation().clone(),
                eos_token_ids: model.eos_token_ids(),
            };
            (Weights::Cpu(model, budget.clone()), about)
        }),
        Device::Gpu(gpu) => GpuModel::load(path, options, gpu, progress).map(|model| {
            let about = About {
                config: model.config().clone(),
                generation: model.generation().clone(),
                eos_token_ids: model.eos_token_ids(),
            };
            (Weights::Gpu(model), about)
        }),
    };
    bar.finish_and_clear();
    let (weights, about) = loaded?;
    if let (Weights::Gpu(_), Some(stored)) = (&weights, stored_as(path, args, &about.config)) {
        tracing::info!("weights are stored as {stored}: a GPU computes with them as bfloat16");
    }
    tracing::info!(
        "loaded {}: {} in {:.1} s",
        path.display(),
        Bytes(device.weights_bytes()),
        begin.elapsed().as_secs_f64()
    );
    Ok((weights, about))
}

/// The number format of weights that become bfloat16 as they are loaded.
fn stored_as(path: &Path, args: &EngineArgs, config: &ModelConfig) -> Option<&'static str> {
    match config.dtype {
        _ if args.model.load_format == LoadFormat::Dummy => None,
        _ if path.is_file() => Some("GGUF"),
        Some(WeightType::F32) => Some("float32"),
        Some(WeightType::F16) => Some("float16"),
        _ => None,
    }
}

fn write_json(path: &Path, report: &Report) -> Result<(), Error> {
    let mut text = serde_json::to_string_pretty(report).expect("a report is JSON");
    text.push('\n');
    std::fs::write(path, text).map_err(|source| Error::Write {
        path: path.to_owned(),
        source,
    })
}
