//! What a start goes by: flags, environment and file, resolved into plain values once.

use std::time::Duration;

use plimsoll_core::BlockSize;
use plimsoll_model::{Cancel, KvCacheDtype, LoadOptions, ServeAs, Shard};
use plimsoll_profiler::{KvSize, MemFraction};
use plimsoll_text::Renderer;

use crate::args::{DType, DeviceChoice, EngineArgs, HubArgs, KvDtype, LoadFormat};
use crate::error::Error;
use crate::lock::Locks;
use crate::plan_cache::PlanCache;
use crate::report_file::ReportFile;
use crate::templates;

/// Which model is loaded, where it runs, and in how many bytes.
#[derive(Clone, Debug)]
pub struct EngineSettings {
    /// MODEL as given, or the default.
    pub model: String,
    /// Where weights come from.
    pub load_format: LoadFormat,
    /// Where the tokenizer comes from, if not from MODEL.
    pub tokenizer: Option<String>,
    /// Where it is downloaded from and to.
    pub hub: HubArgs,
    /// Task, pooling, and fields in place of config.json's.
    pub serve_as: ServeAs,
    /// Images of one request; 0: text alone is served.
    pub max_images: usize,
    /// Pixels of one image after resizing; `None`: the default.
    pub max_pixels: Option<usize>,
    /// Where it runs.
    pub device: DeviceChoice,
    /// Ranks that serve the model together, each with a part of it.
    pub tensor_parallel_size: usize,
    /// Data type of weights and activations.
    pub dtype: DType,
    /// Data type of the KV cache.
    pub kv_cache_dtype: KvDtype,
    /// Launch every kernel instead of replaying CUDA graphs.
    pub enforce_eager: bool,
    /// Compute threads of a CPU.
    pub threads: Option<usize>,
    /// Tokens of one request; `None`: what the model was trained for.
    pub max_model_len: Option<usize>,
    /// Requests that run at once; `None`: what suits the device.
    pub max_num_seqs: Option<usize>,
    /// Tokens of a request on average, where this decides how many run at once; `None`: the default.
    pub mean_request_len: Option<usize>,
    /// Least of these where nobody gave a number: a benchmark knows how many requests come.
    pub least_num_seqs: usize,
    /// Tokens of one step; `None`: what suits the device.
    pub max_num_batched_tokens: Option<usize>,
    /// Longest step in which requests generate.
    pub target_itl: Option<Duration>,
    /// Tokens per block of the KV cache.
    pub block_size: BlockSize,
    /// Whether prompts that begin alike share their KV.
    pub prefix_caching: bool,
    /// Seed of dummy weights, benchmark prompts and requests without their own.
    pub seed: Option<u64>,
    /// Bytes of the device that may be used.
    pub device_memory: Option<u64>,
    /// The same as a fraction of a GPU.
    pub gpu_memory_utilization: Option<MemFraction>,
    /// Part of the measured room that becomes KV cache.
    pub mem_fraction: MemFraction,
    /// Whether the KV cache may take all of that room: a flag says how much memory there is for it.
    pub fills_memory: bool,
    /// Size of the KV cache.
    pub kv_size: KvSize,
    /// Where the profile's report is written.
    pub report_file: ReportFile,
    /// Measurements of earlier starts.
    pub plans: PlanCache,
    /// How starts on one device are kept apart.
    pub locks: Locks,
    /// Where chat templates are rendered.
    pub renderer: Renderer,
}

impl EngineSettings {
    /// As the arguments say.
    ///
    /// # Errors
    /// [`Error::Write`] where the report could not be written.
    pub fn new(args: EngineArgs) -> Result<Self, Error> {
        let EngineArgs {
            model,
            pooling,
            device,
            limits,
            memory,
            ..
        } = args;
        let name = model.model().to_owned();
        Ok(Self {
            load_format: model.load_format,
            tokenizer: model.tokenizer,
            hub: model.hub,
            serve_as: pooling.serve_as(model.hf_overrides.unwrap_or_default(), model.quantization),
            max_images: limits.limit_mm_per_prompt.unwrap_or_default().images(),
            max_pixels: limits
                .mm_processor_kwargs
                .and_then(|args| args.max_pixels)
                .map(usize::from),
            device: device.device.clone(),
            tensor_parallel_size: device.tensor_parallel_size,
            dtype: device.dtype,
            kv_cache_dtype: limits.kv_cache_dtype,
            enforce_eager: device.enforce_eager,
            threads: limits.threads,
            max_model_len: limits.max_model_len,
            max_num_seqs: limits.max_num_seqs,
            mean_request_len: limits.mean_request_len,
            least_num_seqs: 0,
            max_num_batched_tokens: limits.max_num_batched_tokens,
            target_itl: limits.target_itl,
            block_size: limits.block_size,
            prefix_caching: limits.prefix_caching(),
            seed: limits.seed,
            device_memory: memory.device_memory.map(|bytes| bytes.0),
            gpu_memory_utilization: memory.gpu_memory_utilization,
            mem_fraction: memory.mem_fraction.unwrap_or_default(),
            fills_memory: memory.device_memory.is_some() || memory.mem_fraction.is_some(),
            kv_size: match (memory.max_total_token_num, memory.kv_cache_memory_bytes) {
                (Some(tokens), _) => KvSize::Tokens(tokens),
                (None, Some(bytes)) => KvSize::Bytes(bytes.0),
                (None, None) => KvSize::Auto,
            },
            plans: match memory.profile_cache() {
                true => PlanCache::in_dir(memory.profile_cache_dir),
                false => PlanCache::off(),
            },
            report_file: ReportFile::new("--profile-report", memory.profile_report)?,
            renderer: templates::renderer(),
            locks: Locks::new(device.device_lock_dir, device.device_lock_timeout, &name),
            model: name,
        })
    }

    /// Whether weights are random ones, made from config.json alone.
    pub fn is_dummy(&self) -> bool {
        self.load_format == LoadFormat::Dummy
    }

    /// Seed of dummy weights and benchmark prompts.
    pub fn fixed_seed(&self) -> u64 {
        self.seed.unwrap_or(0)
    }

    /// How the model's files are read.
    pub(crate) fn load_options(&self) -> LoadOptions {
        LoadOptions {
            format: match self.is_dummy() {
                true => plimsoll_model::LoadFormat::Dummy {
                    seed: self.fixed_seed(),
                },
                false => plimsoll_model::LoadFormat::Auto,
            },
            kv_cache_dtype: match self.kv_cache_dtype {
                // Without fp8 a GPU knows no other than bfloat16, and a CPU refused it.
                KvDtype::Auto | KvDtype::Bfloat16 => KvCacheDtype::Auto,
                KvDtype::Fp8 => KvCacheDtype::Fp8,
                KvDtype::Float32 => KvCacheDtype::F32,
                KvDtype::Float16 => KvCacheDtype::F16,
            },
            serve_as: self.serve_as.clone(),
            shard: Shard::WHOLE,
            cancel: Cancel::default(),
            linear_ways: None,
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use clap::Parser;

    use super::*;
    use crate::args::{Cli, Command};

    /// Those of `plimsoll profile` with these arguments.
    pub(crate) fn settings(arguments: &str) -> EngineSettings {
        let argv = ["plimsoll", "profile"]
            .into_iter()
            .chain(arguments.split_whitespace());
        match Cli::try_parse_from(argv).unwrap().command {
            Command::Profile(args) => EngineSettings::new(args.serve.engine).unwrap(),
            other => panic!("not profile: {other:?}"),
        }
    }
}
