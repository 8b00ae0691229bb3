//! What is loaded, where it runs, and in how many bytes.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum};
use plimsoll_core::BlockSize;
use plimsoll_model::{HfOverrides, ServeAs};
use plimsoll_profiler::MemFraction;

use crate::args::values::{block_size, context, duration, fraction, json, positive, tokens};
use crate::args::{LogArgs, PoolingArgs};
use crate::bytes::Bytes;
use crate::device::DeviceChoice;

/// Where `plimsoll serve` without MODEL gets its model.
pub const DEFAULT_MODEL: &str = "HuggingFaceTB/SmolLM2-135M-Instruct";

/// The MODEL that stands for the simulated model.
pub const SIM_MODEL: &str = "sim";

/// Flags that decide what is loaded and how it runs.
#[derive(Clone, Debug, Args)]
#[command(args_override_self = true)]
pub struct EngineArgs {
    /// Which model.
    #[command(flatten)]
    pub model: ModelArgs,
    /// What it is served for.
    #[command(flatten)]
    pub pooling: PoolingArgs,
    /// Where it runs.
    #[command(flatten)]
    pub device: DeviceArgs,
    /// How much at once.
    #[command(flatten)]
    pub limits: LimitArgs,
    /// In how many bytes.
    #[command(flatten)]
    pub memory: MemoryArgs,
    /// TOML file with values for these flags
    #[arg(long, value_name = "FILE", help_heading = "General")]
    pub config: Option<PathBuf>,
    /// Logging.
    #[command(flatten)]
    pub log: LogArgs,
}

impl EngineArgs {
    /// What the model is served for, and what takes the place of its own settings.
    pub fn serve_as(&self) -> ServeAs {
        let overrides = self.model.hf_overrides.clone();
        self.pooling.serve_as(overrides.unwrap_or_default())
    }
}

/// Which model, and how it is loaded.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Model")]
pub struct ModelArgs {
    /// Directory, .gguf file, Hugging Face Hub id (a GGUF of a repository: owner/name:Q4_K_M), or `sim` for a
    /// simulated model (`sim:0.02`: steps take 0.02 s; `sim:window=64`: most layers see 64 tokens; `sim:fail=90,oom=800,hang=7000`: every 90th step fails, every
    /// 800th runs out of memory, the 7000th never ends; `sim:device=9`: the driver fails at the 9th use of the device during
    /// the start) [default: HuggingFaceTB/SmolLM2-135M-Instruct]
    #[arg(
        value_name = "MODEL",
        overrides_with = "model_flag",
        help_heading = "Arguments"
    )]
    model: Option<String>,
    /// The same as MODEL
    #[arg(long = "model", value_name = "MODEL", overrides_with = "model", hide = true)]
    model_flag: Option<String>,
    /// Where weights come from: auto, safetensors, gguf, or dummy (random ones, from config.json alone)
    #[arg(
        long,
        value_enum,
        default_value_t,
        value_name = "FORMAT",
        hide_possible_values = true
    )]
    pub load_format: LoadFormat,
    /// Fields of the model's config.json to set, as JSON; null stands for none
    #[arg(long, value_name = "JSON", value_parser = json::<HfOverrides>)]
    pub hf_overrides: Option<HfOverrides>,
    /// Directory, tokenizer.json, .gguf file or Hub id of the tokenizer [default: MODEL]
    #[arg(long, value_name = "PATH")]
    pub tokenizer: Option<String>,
    /// Branch, tag or commit of the Hub repository
    #[arg(long, value_name = "REVISION", default_value = "main")]
    pub revision: String,
    /// Hub token, for gated and private models [default: HF_TOKEN, or what `hf auth login` stored]
    #[arg(long, value_name = "TOKEN", hide_default_value = true)]
    pub hf_token: Option<String>,
    /// Directory for downloads [default: HF_HUB_CACHE, or ~/.cache/huggingface/hub]
    #[arg(long, value_name = "DIR")]
    pub download_dir: Option<PathBuf>,
}

impl ModelArgs {
    /// MODEL as given, or the default.
    pub fn model(&self) -> &str {
        self.model
            .as_deref()
            .or(self.model_flag.as_deref())
            .unwrap_or(DEFAULT_MODEL)
    }
}

/// Where the model runs.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Device")]
pub struct DeviceArgs {
    /// Where the model runs: cpu, cuda, cuda:N (the N-th GPU from 0), or auto (the first GPU; the CPU where there is
    /// no GPU, no driver, or no GPU code in this binary)
    #[arg(long, value_name = "DEVICE", default_value_t)]
    pub device: DeviceChoice,
    /// Data type of weights and activations; auto: bfloat16 on a GPU, the model's own on a CPU
    #[arg(
        long,
        value_enum,
        default_value_t,
        value_name = "DTYPE",
        hide_possible_values = true
    )]
    pub dtype: DType,
    /// Where servers leave their lock files: while one of them measures a device, others that start on it wait.
    /// Containers that share a device must share this directory [default: /tmp/plimsoll]
    #[arg(long, value_name = "DIR")]
    pub device_lock_dir: Option<PathBuf>,
    /// How long to wait for another server that is starting on the device, in seconds
    #[arg(long, value_name = "SECONDS", default_value = "600", value_parser = duration)]
    pub device_lock_timeout: Duration,
    /// Launch every kernel separately instead of replaying CUDA graphs: slower, but needs no capture at start
    #[arg(long, overrides_with = "no_enforce_eager")]
    enforce_eager: bool,
    /// Replay decode steps as CUDA graphs (the default)
    #[arg(long, overrides_with = "enforce_eager", hide = true)]
    no_enforce_eager: bool,
}

impl DeviceArgs {
    /// Whether there shall be no CUDA graphs.
    pub fn enforce_eager(&self) -> bool {
        self.enforce_eager
    }
}

/// Limits of a step and of a request.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Limits")]
pub struct LimitArgs {
    /// Maximum prompt plus output tokens of one request, such as 8192 or 32k [default: decided at start: what the model was
    /// trained for]
    #[arg(long, value_name = "TOKENS", value_parser = context, allow_negative_numbers = true)]
    pub max_model_len: Option<usize>,
    /// Maximum number of requests that run at once [default: decided at start: 32, on a GPU 512]
    #[arg(long, value_name = "N", value_parser = positive)]
    pub max_num_seqs: Option<usize>,
    /// Maximum number of tokens in one step; longer prompts are computed in chunks [default: decided at start:
    /// 512, on a GPU 8192]
    #[arg(long, value_name = "TOKENS", value_parser = tokens)]
    pub max_num_batched_tokens: Option<usize>,
    /// Tokens per block of the KV cache: 8, 16 or 32
    #[arg(long, value_name = "TOKENS", default_value_t, value_parser = block_size)]
    pub block_size: BlockSize,
    /// Reuse the KV of common prefixes (the default)
    #[arg(long, overrides_with = "no_enable_prefix_caching")]
    enable_prefix_caching: bool,
    /// Compute every prompt from the beginning
    #[arg(long, overrides_with = "enable_prefix_caching")]
    no_enable_prefix_caching: bool,
    /// Data type of the KV cache: float16, float32, or auto (float16 unless all weights are float32); on a GPU
    /// bfloat16
    #[arg(
        long,
        value_enum,
        default_value_t,
        value_name = "DTYPE",
        hide_possible_values = true
    )]
    pub kv_cache_dtype: KvDtype,
    /// Seed of dummy weights, benchmark prompts and requests without their own [default: 0; requests: random]
    #[arg(long, value_name = "SEED")]
    pub seed: Option<u64>,
    /// Compute threads on a CPU [default: decided at start: as many as this process may use]
    #[arg(long, value_name = "N", value_parser = positive)]
    pub threads: Option<usize>,
    /// Raises what `--max-num-seqs` comes to, for who knows how many requests there will be.
    #[arg(skip)]
    pub least_num_seqs: usize,
}

impl LimitArgs {
    /// Whether prompts that begin alike share their KV.
    pub fn prefix_caching(&self) -> bool {
        !self.no_enable_prefix_caching
    }

    /// Seed of dummy weights and benchmark prompts.
    pub fn fixed_seed(&self) -> u64 {
        self.seed.unwrap_or(0)
    }
}

/// Memory limits, and settings of the auto-profile.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Memory")]
pub struct MemoryArgs {
    /// Most device memory of this server, such as 8GiB: weights, KV cache, steps and graphs together [default: decided at
    /// start: the whole GPU; on a CPU, half of the available memory or three quarters of the cgroup's limit]
    #[arg(long, visible_alias = "max-device-memory", value_name = "BYTES")]
    pub device_memory: Option<Bytes>,
    /// The same as a fraction of the GPU's memory, at most 1.0
    #[arg(long, value_name = "FRACTION", value_parser = fraction, conflicts_with = "device_memory")]
    pub gpu_memory_utilization: Option<MemFraction>,
    /// Fraction of the memory left after weights and the worst step that becomes KV cache, at most 1.0
    #[arg(long, value_name = "FRACTION", default_value = "0.95", value_parser = fraction)]
    pub mem_fraction: MemFraction,
    /// Tokens in the KV cache: skips the search for the size, but proves it [default: measured at start]
    #[arg(long, value_name = "TOKENS", value_parser = tokens, conflicts_with = "kv_cache_memory_bytes")]
    pub max_total_token_num: Option<usize>,
    /// Bytes of the KV cache: skips the search for the size, but proves it [default: measured at start]
    #[arg(long, value_name = "BYTES")]
    pub kv_cache_memory_bytes: Option<Bytes>,
    /// Write the auto-profile's report to this file, as JSON
    #[arg(long, value_name = "FILE")]
    pub profile_report: Option<PathBuf>,
    /// Directory for measurements that later starts reuse [default: $XDG_CACHE_HOME/plimsoll/profiles, or
    /// ~/.cache/plimsoll/profiles]
    #[arg(long, value_name = "DIR")]
    pub profile_cache_dir: Option<PathBuf>,
    /// Always measure, and keep nothing for later starts
    #[arg(long, overrides_with = "profile_cache")]
    no_profile_cache: bool,
    /// Skip the measurement if this model, build, device and limits were measured before; the size is still proved (the
    /// default)
    #[arg(long, overrides_with = "no_profile_cache", hide = true)]
    profile_cache: bool,
}

impl MemoryArgs {
    /// Whether starts may learn from each other.
    pub fn profile_cache(&self) -> bool {
        !self.no_profile_cache
    }
}

/// `--load-format`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum LoadFormat {
    /// What the model directory or file holds.
    #[default]
    Auto,
    /// Random weights of the configured shapes.
    Dummy,
    /// Only `*.safetensors`.
    Safetensors,
    /// Only `*.gguf`.
    Gguf,
}

/// `--kv-cache-dtype`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum KvDtype {
    /// What suits the device.
    #[default]
    Auto,
    /// 32 bits.
    Float32,
    /// 16 bits, IEEE.
    Float16,
    /// 16 bits with the range of 32.
    Bfloat16,
}

/// `--dtype`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum DType {
    /// What suits the device.
    #[default]
    Auto,
    /// 16 bits with the range of 32.
    Bfloat16,
    /// 16 bits, IEEE.
    #[value(alias = "half")]
    Float16,
    /// 32 bits.
    #[value(alias = "float")]
    Float32,
}
