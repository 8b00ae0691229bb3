//! The command line. Flags that vLLM has carry vLLM's names and meaning.

mod chat;
mod pages;
mod pooling;

use std::path::PathBuf;
use std::time::Duration;

use clap::{ArgAction, Args, Parser, Subcommand, ValueEnum};
use plimsoll_core::BlockSize;
use plimsoll_profiler::MemFraction;
use reqwest::header::HeaderValue;

use crate::bench::{LatencyArgs, ServeBenchArgs, ThroughputArgs};
use crate::bytes::Bytes;
use crate::device::DeviceChoice;
use crate::selftest::SelftestArgs;
pub use chat::ChatArgs;

pub use pages::PagesArgs;
pub use pooling::{HfOverrides, PoolerConfig, PoolingArgs, RunnerKind};

/// Where `plimsoll serve` without MODEL gets its model.
pub const DEFAULT_MODEL: &str = "HuggingFaceTB/SmolLM2-135M-Instruct";

/// The MODEL that stands for the simulated model.
pub const SIM_MODEL: &str = "sim";

const EXIT_CODES: &str = "\
Every flag of serve can also stand in the file given by --config (TOML, key = flag without the dashes) or in the \
environment (PLIMSOLL_MAX_NUM_SEQS=8). The later wins: defaults, file, environment, flags.

Exit codes: 0 done, 1 unexpected failure, 2 wrong flag or configuration, 3 the model cannot be found or loaded, \
4 it does not fit the memory, 5 the address cannot be bound, 6 requests were cut off by the drain timeout, \
7 the GPU cannot be used, 8 another server was measuring the device for too long, 9 selftest: no server answers, or it is \
not ready or not idle, 10 selftest: inconclusive, its time was too short to reach every limit.";

/// Serves large language models, and measures its own load line first.
#[derive(Debug, Parser)]
#[command(name = "plimsoll", version = crate::version::long(), max_term_width = 110, after_help = EXIT_CODES)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The subcommands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Serve a model over HTTP with the OpenAI API
    Serve(Box<ServeArgs>),
    /// Measure what a model needs and how much KV cache fits, without serving
    Profile(Box<ProfileArgs>),
    /// Predict what a model would need and how much KV cache would fit, from its configuration alone: no weights are
    /// downloaded or read
    Plan(Box<PlanArgs>),
    /// Measure latency or throughput
    #[command(subcommand)]
    Bench(BenchCommand),
    /// Drive a running server at its proved limits and say whether it holds
    Selftest(Box<SelftestArgs>),
}

impl Command {
    /// The model that this process is to load, if any.
    pub fn model(&self) -> Option<&ModelArgs> {
        match self {
            Self::Serve(args) => Some(&args.engine.model),
            Self::Profile(args) => Some(&args.engine.model),
            Self::Plan(args) => Some(&args.engine.model),
            Self::Bench(BenchCommand::Latency(args)) => Some(&args.engine.model),
            Self::Bench(BenchCommand::Throughput(args)) => Some(&args.engine.model),
            Self::Bench(BenchCommand::Serve(_)) | Self::Selftest(_) => None,
        }
    }
}

/// The benchmarks.
#[derive(Debug, Subcommand)]
pub enum BenchCommand {
    /// Latency of one batch, in this process
    Latency(Box<LatencyArgs>),
    /// Throughput of many requests, in this process
    Throughput(Box<ThroughputArgs>),
    /// Load on a running server, over HTTP
    Serve(Box<ServeBenchArgs>),
}

/// `plimsoll serve`.
#[derive(Clone, Debug, Args)]
#[command(args_override_self = true)]
pub struct ServeArgs {
    /// Model, limits and memory.
    #[command(flatten)]
    pub engine: EngineArgs,
    /// The API.
    #[command(flatten)]
    pub server: ServerArgs,
    /// What chats are made of.
    #[command(flatten)]
    pub chat: ChatArgs,
    /// What browsers get.
    #[command(flatten)]
    pub pages: PagesArgs,
}

/// `plimsoll profile`.
#[derive(Clone, Debug, Args)]
#[command(args_override_self = true)]
pub struct ProfileArgs {
    /// Model, limits and memory.
    #[command(flatten)]
    pub engine: EngineArgs,
    /// Print one JSON document in place of the tables: the report, and the prediction beside it
    #[arg(long, help_heading = "General")]
    pub json: bool,
}

/// `plimsoll plan`.
#[derive(Clone, Debug, Args)]
#[command(args_override_self = true, after_help = PLAN_HELP)]
pub struct PlanArgs {
    /// Model, limits and memory.
    #[command(flatten)]
    pub engine: EngineArgs,
    /// Print one JSON document in place of the table
    #[arg(long, help_heading = "General")]
    pub json: bool,
}

const PLAN_HELP: &str = "\
The flags are those of profile; the ones that do not change what fits are left to it. A GPU that this machine does not \
have can be planned for: --device cuda --device-memory 80GiB. Exit code 4: it would not fit, with the flags that would make it. `plimsoll profile` measures instead, and says how far off the plan is.";

/// Everything that decides what is loaded and how it runs.
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
    /// Log lines on stderr: text or json; RUST_LOG chooses which
    #[arg(
        long,
        value_enum,
        default_value_t,
        value_name = "FORMAT",
        hide_possible_values = true,
        help_heading = "General"
    )]
    pub log_format: LogFormat,
}

/// Which model, and how it is loaded.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Model")]
pub struct ModelArgs {
    /// Directory, .gguf file, Hugging Face Hub id (a GGUF of a repository: owner/name:Q4_K_M), or `sim` for a
    /// simulated model (`sim:0.02`: one whose steps take 0.02 s) [default: HuggingFaceTB/SmolLM2-135M-Instruct]
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
    /// Directory, tokenizer.json, .gguf file or Hub id to take the tokenizer from [default: MODEL]
    #[arg(long, value_name = "PATH")]
    pub tokenizer: Option<String>,
    /// Branch, tag or commit of the Hub repository
    #[arg(long, value_name = "REVISION", default_value = "main")]
    pub revision: String,
    /// Hub token, for gated and private models [default: HF_TOKEN, or what `hf auth login` stored]
    #[arg(long, value_name = "TOKEN", hide_default_value = true)]
    pub hf_token: Option<String>,
    /// Where downloads go [default: HF_HUB_CACHE, or ~/.cache/huggingface/hub]
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
    /// Where the model runs: cpu, cuda, cuda:N (the N-th GPU from 0), or auto (the first GPU if it can be used)
    #[arg(long, value_name = "DEVICE", default_value_t)]
    pub device: DeviceChoice,
    /// Number format of weights and activations; auto: bfloat16 on a GPU, what the model has on a CPU
    #[arg(
        long,
        value_enum,
        default_value_t,
        value_name = "DTYPE",
        hide_possible_values = true
    )]
    pub dtype: DType,
    /// Where servers leave their lock files: while one of them measures a device, others that start on it wait.
    /// Containers that share a device must share this directory [default: /run/lock/plimsoll and /tmp/plimsoll, as far as
    /// this user may use them]
    #[arg(long, value_name = "DIR")]
    pub device_lock_dir: Option<PathBuf>,
    /// How long to wait for another server that measures the device, in seconds
    #[arg(long, value_name = "SECONDS", default_value = "600", value_parser = duration)]
    pub device_lock_timeout: Duration,
    /// Launch every kernel by itself instead of replaying CUDA graphs: slower, but starts at once
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

/// How much is worked on at once.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Limits")]
pub struct LimitArgs {
    /// Prompt plus output tokens of one request [default: what the model was trained for]
    #[arg(long, value_name = "TOKENS", value_parser = positive)]
    pub max_model_len: Option<usize>,
    /// Requests that run at once [default: 32; 512 on a GPU]
    #[arg(long, value_name = "N", value_parser = positive)]
    pub max_num_seqs: Option<usize>,
    /// Tokens computed in one step; longer prompts are computed in chunks [default: 512; 8192 on a GPU]
    #[arg(long, value_name = "TOKENS", value_parser = positive)]
    pub max_num_batched_tokens: Option<usize>,
    /// Tokens per block of the KV cache: 8, 16 or 32
    #[arg(long, value_name = "TOKENS", default_value_t, value_parser = block_size)]
    pub block_size: BlockSize,
    /// Reuse the KV of prompts that begin alike (the default)
    #[arg(long, overrides_with = "no_enable_prefix_caching")]
    enable_prefix_caching: bool,
    /// Compute every prompt anew
    #[arg(long, overrides_with = "enable_prefix_caching")]
    no_enable_prefix_caching: bool,
    /// Number format of the KV cache: float16, float32, or auto (float16 unless all weights are float32); on a GPU
    /// bfloat16
    #[arg(
        long,
        value_enum,
        default_value_t,
        value_name = "DTYPE",
        hide_possible_values = true
    )]
    pub kv_cache_dtype: KvDtype,
    /// Seeds dummy weights, benchmark prompts and requests without a seed [default: 0; requests: random]
    #[arg(long, value_name = "SEED")]
    pub seed: Option<u64>,
    /// Threads that compute on a CPU [default: as many as this process may use]
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

/// What the auto-profile may use, or is told.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Memory")]
pub struct MemoryArgs {
    /// Most bytes this server may use, such as 8GiB: weights, KV cache, steps and graphs together [default: the whole GPU; on
    /// a CPU measured: cgroup limit or available memory]
    #[arg(long, visible_alias = "max-device-memory", value_name = "BYTES")]
    pub device_memory: Option<Bytes>,
    /// The same as a part of the GPU's memory, at most 1.0
    #[arg(long, value_name = "FRACTION", value_parser = fraction, conflicts_with = "device_memory")]
    pub gpu_memory_utilization: Option<MemFraction>,
    /// Part of the memory left after weights and worst step that the KV cache gets, at most 1.0
    #[arg(long, value_name = "FRACTION", default_value = "0.95", value_parser = fraction)]
    pub mem_fraction: MemFraction,
    /// Tokens in the KV cache: skips the measurement of what fits, still proves it
    #[arg(long, value_name = "TOKENS", value_parser = positive, conflicts_with = "kv_cache_memory_bytes")]
    pub max_total_token_num: Option<usize>,
    /// Bytes of the KV cache, likewise
    #[arg(long, value_name = "BYTES")]
    pub kv_cache_memory_bytes: Option<Bytes>,
    /// Write the auto-profile's report to this file, as JSON
    #[arg(long, value_name = "FILE")]
    pub profile_report: Option<PathBuf>,
    /// Where what a start measured is kept for the next one [default: $XDG_CACHE_HOME/plimsoll/profiles, or
    /// ~/.cache/plimsoll/profiles]
    #[arg(long, value_name = "DIR")]
    pub profile_cache_dir: Option<PathBuf>,
    /// Measure at this start too, and keep nothing for the next
    #[arg(long, overrides_with = "profile_cache")]
    no_profile_cache: bool,
    /// Skip the measurement where this model, build, device and shape were measured before; still prove the size (the
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

/// The API.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Server")]
pub struct ServerArgs {
    /// Address to listen on; 0.0.0.0 for every interface
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1")]
    pub host: String,
    /// Port to listen on; 0 for any free one
    #[arg(long, value_name = "PORT", default_value_t = 8000)]
    pub port: u16,
    /// Names the API knows the model by; the first is the one in answers [default: MODEL]
    #[arg(long, value_name = "NAME", num_args = 1.., action = ArgAction::Set)]
    pub served_model_name: Option<Vec<String>>,
    /// Chat template to use instead of the model's: a file, or the template itself
    #[arg(long, value_name = "TEMPLATE")]
    pub chat_template: Option<String>,
    /// Sampling defaults: auto (the model's generation_config.json), vllm (none), or a directory
    #[arg(long, value_name = "SOURCE", default_value = "auto")]
    pub generation_config: String,
    /// Requests that may wait beyond those that run; more get 429
    #[arg(long, value_name = "N", default_value_t = 256)]
    pub max_queue: usize,
    /// Largest request body
    #[arg(long, value_name = "BYTES", default_value = "32MiB")]
    pub max_body_size: Bytes,
    /// Web pages of these origins may use the server from a browser; * for all [default: none]
    #[arg(long, value_name = "ORIGIN", num_args = 1.., action = ArgAction::Set, value_parser = origin)]
    pub allowed_origins: Option<Vec<HeaderValue>>,
    /// Offer POST /sleep and /wake_up, which give the memory of everything but the weights back for a time
    #[arg(long, overrides_with = "no_enable_sleep_mode")]
    enable_sleep_mode: bool,
    /// Never give memory back (the default)
    #[arg(long, overrides_with = "enable_sleep_mode", hide = true)]
    no_enable_sleep_mode: bool,
    /// How long a stop (Ctrl-C, SIGTERM) waits for running requests, in seconds
    #[arg(long, value_name = "SECONDS", default_value = "30", value_parser = duration)]
    pub drain_timeout: Duration,
}

impl ServerArgs {
    /// Whether there is a sleep mode.
    pub fn enable_sleep_mode(&self) -> bool {
        self.enable_sleep_mode
    }

    /// The names the API knows the model by, at least one.
    pub fn served_names(&self, model: &ModelArgs) -> Vec<String> {
        match &self.served_model_name {
            Some(names) => names.clone(),
            None => vec![model.model().to_owned()],
        }
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

/// `--log-format`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// Lines for people.
    #[default]
    Text,
    /// One JSON object per line.
    Json,
}

pub(crate) fn positive(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(0) => Err("it must be at least 1".to_owned()),
        Ok(value) => Ok(value),
        Err(_) => Err("a whole number is expected".to_owned()),
    }
}

fn origin(text: &str) -> Result<HeaderValue, String> {
    HeaderValue::from_str(text).map_err(|_| "an origin such as https://example.org is expected".to_owned())
}

fn block_size(text: &str) -> Result<BlockSize, String> {
    text.parse()
        .ok()
        .and_then(BlockSize::new)
        .ok_or_else(|| "a block holds 8, 16 or 32 tokens".to_owned())
}

fn fraction(text: &str) -> Result<MemFraction, String> {
    let fraction = text.parse().ok().and_then(MemFraction::new);
    fraction.ok_or_else(|| "a number above 0 and at most 1.0 is expected".to_owned())
}

/// Longest time a flag gives: clocks can still add it to now.
const MAX_DURATION: Duration = Duration::from_secs(366 * 24 * 3600);

pub(crate) fn duration(text: &str) -> Result<Duration, String> {
    const UNITS: [(char, f64); 3] = [('s', 1.0), ('m', 60.0), ('h', 3600.0)];
    let with_unit = UNITS
        .iter()
        .find_map(|&(suffix, unit)| Some((text.strip_suffix(suffix)?, unit)));
    let (number, unit) = with_unit.unwrap_or((text, 1.0));
    number
        .parse::<f64>()
        .ok()
        .and_then(|number| Duration::try_from_secs_f64(number * unit).ok())
        .filter(|time| *time <= MAX_DURATION)
        .ok_or_else(|| "a time of at most a year is expected, such as 30, 30s, 8m or 1h".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times() {
        for (text, seconds) in [
            ("0", 0.0),
            ("1.5", 1.5),
            ("30s", 30.0),
            ("8m", 480.0),
            ("1h", 3600.0),
            ("8784h", 366.0 * 86400.0),
        ] {
            assert_eq!(duration(text), Ok(Duration::from_secs_f64(seconds)), "{text}");
        }
        for wrong in ["", "s", "-1", "1d", "nan", "inf", "1e300h", "1e19", "8785h"] {
            assert!(duration(wrong).is_err(), "{wrong}");
        }
    }
}
