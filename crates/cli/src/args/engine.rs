//! What is loaded, where it runs, and in how many bytes.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use clap::{Args, ValueEnum};
use plimsoll_core::BlockSize;
use plimsoll_model::{HfOverrides, OnlineQuantization};
use plimsoll_profiler::MemFraction;

use crate::args::values::{
    block_size, context, duration, fraction, json, milliseconds, positive, quantization, ranks, tokens, whole,
};
use crate::args::{LogArgs, MediaCounts, PoolingArgs, ProcessorArgs};
use crate::bytes::Bytes;

/// Where `plimsoll serve` without MODEL gets its model.
pub const DEFAULT_MODEL: &str = "HuggingFaceTB/SmolLM2-135M-Instruct";

/// The branch that repositories have.
const DEFAULT_REVISION: &str = "main";

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

/// Which model, and how it is loaded.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Model")]
pub struct ModelArgs {
    /// Directory, .gguf file, Hugging Face Hub id (owner/name; owner/name:Q4_K_M for one of several GGUF files), or `sim` for a
    /// simulated model, to try everything without weights (`sim:0.02`: 0.02 s per step; CONTRIBUTING.md has its other options)
    /// [default: HuggingFaceTB/SmolLM2-135M-Instruct]
    #[arg(
        value_name = "MODEL",
        conflicts_with = "model_flag",
        help_heading = "Arguments"
    )]
    model: Option<String>,
    /// The same as MODEL
    #[arg(long = "model", value_name = "MODEL", hide = true)]
    model_flag: Option<String>,
    /// Format of the weights: auto, safetensors, gguf, or dummy (random weights, from config.json alone)
    #[arg(
        long,
        value_enum,
        default_value_t,
        value_name = "FORMAT",
        hide_possible_values = true
    )]
    pub load_format: LoadFormat,
    /// Quantise the linear layers of a model that is stored in floats while it is loaded to a GPU: fp8 (8 bits, a scale per
    /// output) [default: none; quantised models are served as they are stored]
    #[arg(long, value_name = "FORMAT", value_parser = quantization)]
    pub quantization: Option<OnlineQuantization>,
    /// Fields of the model's config.json to replace, as JSON; null removes a field
    #[arg(long, value_name = "JSON", value_parser = json::<HfOverrides>)]
    pub hf_overrides: Option<HfOverrides>,
    /// Directory, tokenizer.json, .gguf file or Hub id of the tokenizer [default: MODEL]
    #[arg(long, value_name = "PATH")]
    pub tokenizer: Option<String>,
    /// Where it is downloaded from and to.
    #[command(flatten)]
    pub hub: HubArgs,
}

/// The Hub and its cache.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Model")]
pub struct HubArgs {
    /// Branch, tag or commit of the Hub repository
    #[arg(long, value_name = "REVISION", default_value = DEFAULT_REVISION)]
    pub revision: String,
    /// Hub token, for gated and private models [default: HF_TOKEN, or what `hf auth login` stored]
    #[arg(long, value_name = "TOKEN", hide_default_value = true)]
    pub hf_token: Option<String>,
    /// Directory for downloads from the Hub [default: HF_HUB_CACHE, or ~/.cache/huggingface/hub]
    #[arg(long, value_name = "DIR")]
    pub download_dir: Option<PathBuf>,
}

impl HubArgs {
    /// Whether another revision than the default one is asked for.
    pub fn has_revision(&self) -> bool {
        self.revision != DEFAULT_REVISION
    }
}

impl ModelArgs {
    /// MODEL as given, or the default.
    pub fn model(&self) -> &str {
        self.given().unwrap_or(DEFAULT_MODEL)
    }

    /// MODEL, if it was typed in its place.
    pub fn typed(&self) -> Option<&str> {
        self.model.as_deref()
    }

    /// MODEL, if it was given.
    pub fn given(&self) -> Option<&str> {
        self.model.as_deref().or(self.model_flag.as_deref())
    }
}

/// Where the model runs.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Device")]
pub struct DeviceArgs {
    /// Device: cpu; cuda (the first GPU, or one for each rank); cuda:N (GPU number N, from 0) or cuda:N,M,...; or auto (cuda, but the
    /// CPU if there is no GPU, no driver, or no GPU code in this binary)
    #[arg(long, value_name = "DEVICE", default_value_t)]
    pub device: DeviceChoice,
    /// Data type of weights; auto: bfloat16 on a GPU, the model's own on a CPU, which keeps them as they are stored
    #[arg(
        long,
        value_enum,
        default_value_t,
        value_name = "DTYPE",
        hide_possible_values = true
    )]
    pub dtype: DType,
    /// Ranks that serve the model together, each with a part of every layer: 1 to 8, as many as heads and widths of the model can
    /// be divided among. On GPUs (1, 2, 4 or 8) each rank has one; on a CPU they are threads, and each gets an equal part of the memory,
    /// or --device-memory. Also -tp N, as in vLLM
    #[arg(long, aliases = ["tp-size", "tp"], value_name = "N", default_value = "1", value_parser = ranks)]
    pub tensor_parallel_size: usize,
    /// Directory of lock files, by which servers that start on the same device wait for each other. Containers that share a
    /// device must share this directory [default: /tmp/plimsoll]
    #[arg(long, value_name = "DIR")]
    pub device_lock_dir: Option<PathBuf>,
    /// How long to wait while another server starts on the device, in seconds
    #[arg(long, value_name = "SECONDS", default_value = "600", value_parser = duration)]
    pub device_lock_timeout: Duration,
    /// Launch every kernel separately instead of using CUDA graphs: slower decoding, but no memory or time for graphs
    #[arg(long, overrides_with = "no_enforce_eager")]
    pub enforce_eager: bool,
    /// Replay decode steps as CUDA graphs (the default)
    #[arg(long, overrides_with = "enforce_eager", hide = true)]
    no_enforce_eager: bool,
}

/// Limits of a step and of a request.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Limits")]
pub struct LimitArgs {
    /// Maximum prompt plus output tokens of one request, such as 8192 or 32k [default: decided at start: the context that the
    /// model was trained for]
    #[arg(long, value_name = "TOKENS", value_parser = context)]
    pub max_model_len: Option<usize>,
    /// Maximum number of requests that run at once [default: decided at start: 1024 on a GPU of at
    /// least 70 GiB where the KV cache has room for them, 512 on other GPUs, 32 on a CPU; fewer where a step
    /// (--max-num-batched-tokens) has no room for a token of each, or where states (Qwen3.5) would leave too little KV (--mean-request-len)]
    #[arg(long, value_name = "N", value_parser = positive)]
    pub max_num_seqs: Option<usize>,
    /// Mean length of a request, prompt plus output tokens, of models whose layers keep a state per request (Qwen3.5). States and KV
    /// share the memory: there are as many states as leave KV for half of this length to each, so a smaller value lets more requests
    /// run at once. --max-num-seqs sets the number of states itself [default: 8192, or --max-model-len if that is less]
    #[arg(long, value_name = "TOKENS", value_parser = tokens)]
    pub mean_request_len: Option<usize>,
    /// Maximum number of tokens in one step; longer prompts are computed in chunks [default: decided at start: 8192 on a GPU,
    /// 512 on a CPU]
    #[arg(long, value_name = "TOKENS", value_parser = tokens)]
    pub max_num_batched_tokens: Option<usize>,
    /// Aim for at most this time between two tokens of a request, in milliseconds: while requests generate, steps compute fewer prompt
    /// tokens, to stay below it where possible [default: no target; each step weighs throughput against latency, from step times
    /// measured at start]
    #[arg(long, value_name = "MS", value_parser = milliseconds)]
    pub target_itl: Option<Duration>,
    /// Tokens per block of the KV cache: 8, 16 or 32
    #[arg(long, value_name = "TOKENS", default_value_t, value_parser = block_size)]
    pub block_size: BlockSize,
    /// Reuse the KV of common prefixes (the default)
    #[arg(long, overrides_with = "no_enable_prefix_caching")]
    enable_prefix_caching: bool,
    /// Compute every prompt from the beginning, without a prefix cache
    #[arg(long, overrides_with = "enable_prefix_caching")]
    no_enable_prefix_caching: bool,
    /// Data type of the KV cache: on a GPU bfloat16 (auto), or fp8 (e4m3) for twice as many tokens; on a CPU float16, float32,
    /// or auto (float16 unless all weights are float32)
    #[arg(
        long,
        value_parser = kv_dtypes(),
        default_value = "auto",
        value_name = "DTYPE",
        hide_possible_values = true
    )]
    pub kv_cache_dtype: KvDtype,
    /// Maximum number of images of one request, as JSON; 0 serves text alone, without the encoder [default: {"image": 16}]
    #[arg(long, value_name = "JSON", value_parser = json::<MediaCounts>)]
    pub limit_mm_per_prompt: Option<MediaCounts>,
    /// Maximum number of pixels of an image, as JSON such as {"max_pixels": 4194304}, up to the model's own bound: larger images
    /// are scaled down. The memory of the encoder grows with it [default: {"max_pixels": 1048576}]
    #[arg(long, value_name = "JSON", value_parser = json::<ProcessorArgs>)]
    pub mm_processor_kwargs: Option<ProcessorArgs>,
    /// Seed of dummy weights, benchmark prompts and requests without a seed [default: 0; requests: random]
    #[arg(long, value_name = "SEED", value_parser = whole::<u64>)]
    pub seed: Option<u64>,
    /// Compute threads on a CPU [default: decided at start: the number of CPUs that this process may use]
    #[arg(long, value_name = "N", value_parser = positive)]
    pub threads: Option<usize>,
}

impl LimitArgs {
    /// Whether prompts that begin alike share their KV.
    pub fn prefix_caching(&self) -> bool {
        !self.no_enable_prefix_caching
    }
}

/// Memory limits, and settings of the auto-profile.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Memory")]
pub struct MemoryArgs {
    /// Maximum device memory of this server, such as 8GiB: weights, KV cache, steps and graphs together [default: decided at
    /// start: the whole GPU; on a CPU, half of the available memory or three quarters of the cgroup's limit]
    #[arg(long, visible_alias = "max-device-memory", value_name = "BYTES")]
    pub device_memory: Option<Bytes>,
    /// --device-memory as a fraction of the GPU's memory, at most 1.0
    #[arg(long, value_name = "FRACTION", value_parser = fraction, conflicts_with = "device_memory")]
    pub gpu_memory_utilization: Option<MemFraction>,
    /// Fraction of the memory left by weights and worst step that becomes KV cache, at most 1.0 [default: 0.95]
    #[arg(long, value_name = "FRACTION", value_parser = fraction)]
    pub mem_fraction: Option<MemFraction>,
    /// Size of the KV cache in tokens: skips the search for it, not the proof [default: measured at start; on a CPU at
    /// most 32768 or one request of --max-model-len, unless --device-memory or --mem-fraction is set]
    #[arg(long, value_name = "TOKENS", value_parser = tokens, conflicts_with = "kv_cache_memory_bytes")]
    pub max_total_token_num: Option<usize>,
    /// Size of the KV cache in bytes: skips the search for it, not the proof [default: measured at start]
    #[arg(long, value_name = "BYTES")]
    pub kv_cache_memory_bytes: Option<Bytes>,
    /// Write the auto-profile's report to this file, as JSON
    #[arg(long, value_name = "FILE")]
    pub profile_report: Option<PathBuf>,
    /// Directory of measurements for later starts [default: $XDG_CACHE_HOME/plimsoll/profiles, or
    /// ~/.cache/plimsoll/profiles]
    #[arg(long, value_name = "DIR")]
    pub profile_cache_dir: Option<PathBuf>,
    /// Always measure, and store nothing for later starts
    #[arg(long, overrides_with = "profile_cache")]
    no_profile_cache: bool,
    /// Skip the measurement if this model, build, device and limits were measured before; the size is still proved (the
    /// default)
    #[arg(long, overrides_with = "no_profile_cache", hide = true)]
    profile_cache: bool,
}

impl MemoryArgs {
    /// Whether measurements are stored for later starts and reused.
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
    /// 8 bits: e4m3 with a scale for each layer.
    #[value(alias = "fp8_e4m3")]
    Fp8,
}

/// Reads `--kv-cache-dtype`; a name that vLLM has and we have not is refused with a reason.
fn kv_dtypes() -> impl TypedValueParser<Value = KvDtype> {
    let known = KvDtype::value_variants()
        .iter()
        .filter_map(ValueEnum::to_possible_value);
    let names = known.chain([PossibleValue::new("fp8_e5m2").hide(true)]);
    PossibleValuesParser::new(names).try_map(|text| kv_dtype(&text))
}

fn kv_dtype(text: &str) -> Result<KvDtype, String> {
    match text {
        "fp8_e5m2" => Err("two bits of mantissa are not supported; fp8 is e4m3, which has three".to_owned()),
        _ => KvDtype::from_str(text, false),
    }
}

/// `--device`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum DeviceChoice {
    /// As [`Self::Cuda`]; the CPU where there is no GPU, no driver, or no GPU code in this binary.
    #[default]
    Auto,
    /// The CPU.
    Cpu,
    /// The first GPUs that the driver shows, one for each rank.
    Cuda,
    /// The GPUs of these numbers among those that the driver shows, in the order of ranks: at least one.
    Gpus(Vec<usize>),
}

impl FromStr for DeviceChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once(':') {
            None if text == "auto" => Some(Self::Auto),
            None if text == "cpu" => Some(Self::Cpu),
            None if text == "cuda" => Some(Self::Cuda),
            Some(("cuda", numbers)) => {
                let numbers = numbers.split(',').map(|number| number.parse().ok());
                numbers.collect::<Option<Vec<usize>>>().map(Self::Gpus)
            }
            _ => None,
        }
        .filter(|choice| match choice {
            Self::Gpus(numbers) => (1..numbers.len()).all(|at| !numbers[..at].contains(&numbers[at])),
            Self::Auto | Self::Cpu | Self::Cuda => true,
        })
        .ok_or_else(|| "auto, cpu, cuda, cuda:N, or different GPUs as in cuda:0,1 are expected".to_owned())
    }
}

impl DeviceChoice {
    /// Numbers of the GPUs to look for, one for each of so many ranks; none on a CPU.
    ///
    /// # Errors
    /// What is wrong where it names another number of GPUs.
    pub(crate) fn gpus(&self, ranks: usize) -> Result<Vec<usize>, String> {
        match self {
            Self::Cpu => Ok(Vec::new()),
            Self::Auto | Self::Cuda => Ok((0..ranks).collect()),
            Self::Gpus(numbers) if numbers.len() == ranks => Ok(numbers.clone()),
            Self::Gpus(numbers) => Err(format!(
                "{self} names {} of --tensor-parallel-size {ranks}: give as many GPUs as ranks, or cuda for the first ones",
                match numbers.len() {
                    1 => "one GPU".to_owned(),
                    gpus => format!("{gpus} GPUs"),
                }
            )),
        }
    }
}

impl fmt::Display for DeviceChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda => f.write_str("cuda"),
            Self::Gpus(numbers) => {
                let numbers: Vec<_> = numbers.iter().map(usize::to_string).collect();
                write!(f, "cuda:{}", numbers.join(","))
            }
        }
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_of_the_cache_have_vllms_names() {
        assert_eq!(kv_dtype("fp8"), Ok(KvDtype::Fp8));
        assert_eq!(kv_dtype("fp8_e4m3"), Ok(KvDtype::Fp8));
        assert_eq!(kv_dtype("auto"), Ok(KvDtype::Auto));
        assert!(kv_dtype("fp8_e5m2").unwrap_err().contains("fp8 is e4m3"));
    }

    #[test]
    fn devices_have_names() {
        for (text, choice) in [
            ("auto", DeviceChoice::Auto),
            ("cpu", DeviceChoice::Cpu),
            ("cuda", DeviceChoice::Cuda),
            ("cuda:11", DeviceChoice::Gpus(vec![11])),
            ("cuda:2,0", DeviceChoice::Gpus(vec![2, 0])),
        ] {
            assert_eq!(choice.to_string(), text);
            assert_eq!(text.parse(), Ok(choice));
        }
        let wrong = [
            "", "gpu", "cuda:", "cuda:-1", "cuda:x", "cuda:0,", "cuda:1,1", "cpu:0", "auto:1",
        ];
        for wrong in wrong {
            assert!(wrong.parse::<DeviceChoice>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn each_rank_has_a_gpu() {
        let gpus = |choice: &str, ranks| choice.parse::<DeviceChoice>().unwrap().gpus(ranks);
        assert_eq!(gpus("cpu", 2), Ok(vec![]));
        assert_eq!(gpus("auto", 1), Ok(vec![0]));
        assert_eq!(gpus("cuda", 2), Ok(vec![0, 1]));
        assert_eq!(gpus("cuda:3", 1), Ok(vec![3]));
        assert_eq!(gpus("cuda:2,0", 2), Ok(vec![2, 0]));
        let error = gpus("cuda:2,0", 1).unwrap_err();
        assert!(error.contains("2 GPUs of --tensor-parallel-size 1"), "{error}");
        assert!(gpus("cuda:0", 2).unwrap_err().contains("one GPU"));
    }
}
