//! The weights of a model on its device.

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use plimsoll_core::{CacheGroups, TokenId};
use plimsoll_device::Budget;
use plimsoll_kernels::WeightType;
use plimsoll_model::cuda::GpuModel;
use plimsoll_model::{GenerationConfig, KvCacheDtype, LoadOptions, Model, ModelConfig};

use crate::args::{EngineArgs, KvDtype, LoadFormat};
use crate::bytes::Bytes;
use crate::device::Device;
use crate::error::Error;
use crate::progress::bytes_bar;
use crate::start::StartProgress;
use crate::target::SIM_KV_BYTES_PER_TOKEN;

/// What suits a device where nobody says.
#[derive(Clone, Copy, Debug)]
pub(super) struct Defaults {
    pub(super) max_num_seqs: usize,
    pub(super) max_num_batched_tokens: usize,
    /// One where the executor computes inside `launch`; on a GPU the host prepares the next step meanwhile.
    pub(super) steps_in_flight: usize,
}

pub(super) const CPU: Defaults = Defaults {
    max_num_seqs: 32,
    max_num_batched_tokens: 512,
    steps_in_flight: 1,
};

pub(super) const GPU: Defaults = Defaults {
    max_num_seqs: 512,
    max_num_batched_tokens: 8192,
    steps_in_flight: 2,
};

pub(super) fn defaults(device: &Device) -> Defaults {
    match device {
        Device::Cpu(_) => CPU,
        Device::Gpu(_) => GPU,
    }
}

/// Weights, and the account of the memory that they and the engine take.
#[derive(Debug)]
pub(super) enum Weights {
    Cpu(Arc<Model>, Budget),
    Gpu(Arc<GpuModel>),
    Sim(Budget, CacheGroups),
}

impl Weights {
    pub(super) fn account(&self) -> &Budget {
        match self {
            Self::Cpu(_, budget) | Self::Sim(budget, _) => budget,
            Self::Gpu(model) => model.gpu().budget(),
        }
    }

    pub(super) fn device(&self) -> Device {
        match self {
            Self::Cpu(_, budget) | Self::Sim(budget, _) => Device::Cpu(budget.clone()),
            Self::Gpu(model) => Device::Gpu(model.gpu().clone()),
        }
    }

    pub(super) fn kv_bytes_per_token(&self) -> u64 {
        match self {
            Self::Cpu(model, _) => model.kv_bytes_per_token(),
            Self::Gpu(model) => model.kv_bytes_per_token(),
            Self::Sim(..) => SIM_KV_BYTES_PER_TOKEN,
        }
    }

    /// How its KV cache is cut.
    pub(super) fn cache_groups(&self) -> CacheGroups {
        match self {
            Self::Cpu(model, _) => model.spec().cache_groups(),
            Self::Gpu(model) => model.spec().cache_groups(),
            Self::Sim(_, groups) => *groups,
        }
    }

    /// Bytes of the GPU, if it is one.
    pub(super) fn gpu_bytes(&self) -> Option<u64> {
        match self {
            Self::Cpu(..) | Self::Sim(..) => None,
            Self::Gpu(model) => Some(model.gpu().info().total_bytes),
        }
    }

    pub(super) fn defaults(&self) -> Defaults {
        defaults(&self.device())
    }
}

/// What a model says about itself.
pub(super) struct About {
    pub(super) config: ModelConfig,
    pub(super) generation: GenerationConfig,
    pub(super) eos_token_ids: Vec<TokenId>,
    /// The number format of stored weights, where they became another as they were loaded.
    pub(super) stored_as: Option<&'static str>,
}

/// How the flags say to load.
pub(super) fn load_options(args: &EngineArgs) -> LoadOptions {
    LoadOptions {
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
        serve_as: args.serve_as(),
    }
}

pub(super) fn load(
    path: &Path,
    args: &EngineArgs,
    device: Device,
    start: &StartProgress,
) -> Result<(Weights, About), Error> {
    let options = load_options(args);
    if !options.serve_as.hf_overrides.is_empty() {
        tracing::info!(
            "config.json with --hf-overrides {}",
            options.serve_as.hf_overrides
        );
    }
    let bar = bytes_bar("weights", 0);
    let begin = Instant::now();
    let progress = &mut |progress: plimsoll_model::Progress| {
        bar.set_length(progress.total);
        bar.set_position(progress.done);
        start.bytes(progress.done, progress.total);
    };
    let loaded = match &device {
        Device::Cpu(budget) => Model::load(path, options, budget, progress).map(|model| {
            let about = About {
                config: model.config().clone(),
                generation: model.generation().clone(),
                eos_token_ids: model.eos_token_ids(),
                stored_as: None,
            };
            (Weights::Cpu(model, budget.clone()), about)
        }),
        Device::Gpu(gpu) => GpuModel::load(path, options, gpu, progress).map(|model| {
            let about = About {
                config: model.config().clone(),
                generation: model.generation().clone(),
                eos_token_ids: model.eos_token_ids(),
                stored_as: None,
            };
            (Weights::Gpu(model), about)
        }),
    };
    bar.finish_and_clear();
    let (weights, mut about) = loaded?;
    if let Weights::Gpu(_) = &weights {
        about.stored_as = stored_as(path, args, &about.config);
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
