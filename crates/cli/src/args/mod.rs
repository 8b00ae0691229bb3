//! The command line. Flags that vLLM has carry vLLM's names and meaning.

mod access;
mod api;
mod bench;
mod chat;
mod engine;
mod events;
mod files;
mod logs;
mod media;
mod models;
mod pages;
mod pooling;
mod responses;
mod server;
mod values;

use clap::{Args, Parser, Subcommand};

use crate::bench::ServeBenchArgs;
use crate::chat::ChatCommandArgs;
use crate::selftest::SelftestArgs;
use crate::source;

pub use access::{AccessArgs, Secret};
pub use api::ApiArgs;
pub use bench::{LatencyArgs, ThroughputArgs};
pub use chat::ChatArgs;
pub use engine::{
    DEFAULT_MODEL, DType, DeviceArgs, DeviceChoice, EngineArgs, HubArgs, KvDtype, LimitArgs, LoadFormat,
    MemoryArgs, ModelArgs, SIM_MODEL,
};
pub use events::EventArgs;
pub use files::FileArgs;
pub use logs::{LogArgs, LogFormat, LogLevels};
pub use media::{MediaArgs, MediaCounts, ProcessorArgs};
pub use models::{ListArgs, PullArgs, RmArgs};
pub use pages::PagesArgs;
pub use pooling::{PoolerConfig, PoolingArgs, RunnerKind};
pub use responses::ResponseArgs;
pub use server::{SchedulingPolicy, ServerArgs, UnknownFieldPolicy};
pub(crate) use values::{duration, json, positive, ratio, whole};

const EXIT_CODES: &str = "\
Every flag of serve can also be set in the file given by --config (TOML, key = flag without the dashes) or in the \
environment (PLIMSOLL_MAX_NUM_SEQS=8). Flags win over the environment, and the environment over the file.

Exit codes:
  0        success
  1        unexpected failure
  2        wrong flag or configuration
  3        the model cannot be found or loaded
  4        the model does not fit the memory
  5        the address cannot be bound
  6        the drain timeout cut off requests
  7        the GPU cannot be used, or its driver failed
  8        another server measured the device for too long
  9        chat, selftest: no server answers; selftest: it is not ready or not idle
  10       selftest: inconclusive, too short to reach every limit
  11       the watchdog ended the process because a step hung
  128 + N  signal N, before the server was ready or a second time";

/// An LLM inference server that measures how much KV cache fits, proves it, and then serves.
#[derive(Debug, Parser)]
#[command(name = "plimsoll", version = crate::version::long(), max_term_width = 110, after_help = EXIT_CODES)]
#[command(mut_subcommands(with_negative_values))]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The same command, of which every flag that takes a value takes `-1` for one, so that the flag's own parser says what is wrong with it.
fn with_negative_values(command: clap::Command) -> clap::Command {
    let negative = |arg: clap::Arg| match arg.get_long().is_some() && arg.get_action().takes_values() {
        true => arg.allow_negative_numbers(true),
        false => arg,
    };
    command.mut_args(negative).mut_subcommands(with_negative_values)
}

/// The subcommands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Serve a model over HTTP with the OpenAI API
    Serve(Box<ServeArgs>),
    /// Chat in the terminal, with a running server or one of its own
    Chat(Box<ChatCommandArgs>),
    /// Download a model into the Hub cache
    Pull(Box<PullArgs>),
    /// List the models in the Hub cache, with whether they fit this device
    List(Box<ListArgs>),
    /// Remove models from the Hub cache
    Rm(RmArgs),
    /// Measure what a model needs and how much KV cache fits, without serving
    Profile(Box<ProfileArgs>),
    /// Predict what a model needs and how much KV cache fits, from its configuration alone: no weights are downloaded or read
    Plan(Box<PlanArgs>),
    /// Show every setting of serve, with its value and its source: default, file, environment or flag
    Config(Box<ConfigArgs>),
    /// Measure latency or throughput
    #[command(subcommand)]
    Bench(BenchCommand),
    /// Load a running server up to its proved limits and check every answer
    Selftest(Box<SelftestArgs>),
}

impl Command {
    /// The model that this process is to load, if any.
    pub fn model(&self) -> Option<&ModelArgs> {
        match self {
            Self::Serve(args) => Some(&args.engine.model),
            Self::Profile(args) => Some(&args.serve.engine.model),
            Self::Plan(args) => Some(&args.serve.engine.model),
            Self::Bench(BenchCommand::Latency(args)) => Some(&args.engine.model),
            Self::Bench(BenchCommand::Throughput(args)) => Some(&args.engine.model),
            Self::Bench(BenchCommand::Serve(_)) | Self::Chat(_) | Self::Config(_) | Self::Selftest(_) => None,
            Self::Pull(_) | Self::List(_) | Self::Rm(_) => None,
        }
    }

    /// Whether this process may ask the Hub.
    pub fn may_download(&self) -> bool {
        let remote = |args: &ModelArgs| source::is_remote(args.model(), args.tokenizer.as_deref());
        matches!(self, Self::Pull(_)) || self.model().is_some_and(remote)
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
    /// What the API offers.
    #[command(flatten)]
    pub api: ApiArgs,
    /// What chats are made of.
    #[command(flatten)]
    pub chat: ChatArgs,
    /// Images of requests.
    #[command(flatten)]
    pub media: MediaArgs,
    /// What is kept of responses.
    #[command(flatten)]
    pub responses: ResponseArgs,
    /// What is kept of files.
    #[command(flatten)]
    pub files: FileArgs,
    /// What browsers get.
    #[command(flatten)]
    pub pages: PagesArgs,
    /// What routers are told.
    #[command(flatten)]
    pub events: EventArgs,
}

/// `plimsoll profile`.
#[derive(Clone, Debug, Args)]
#[command(args_override_self = true, after_help = PROFILE_HELP)]
pub struct ProfileArgs {
    /// What serve would be started with. What has nothing to do with memory changes nothing here.
    #[command(flatten)]
    pub serve: ServeArgs,
    /// Print the report and the prediction as one JSON document instead of tables
    #[arg(long, help_heading = "General")]
    pub json: bool,
}

/// `plimsoll plan`.
#[derive(Clone, Debug, Args)]
#[command(args_override_self = true, after_help = PLAN_HELP)]
pub struct PlanArgs {
    /// What serve would be started with. What has nothing to do with memory is only repeated in the command to serve.
    #[command(flatten)]
    pub serve: ServeArgs,
    /// Print one JSON document instead of the table
    #[arg(long, help_heading = "General")]
    pub json: bool,
}

/// `plimsoll config`.
#[derive(Clone, Debug, Args)]
#[command(args_override_self = true, after_help = CONFIG_HELP)]
pub struct ConfigArgs {
    /// What serve would be started with.
    #[command(flatten)]
    pub serve: ServeArgs,
    /// Print one JSON document: sizes in bytes, times in seconds
    #[arg(long, help_heading = "General", conflicts_with = "toml")]
    pub json: bool,
    /// Print a file for --config; secrets are left out
    #[arg(long, help_heading = "General")]
    pub toml: bool,
}

const CONFIG_HELP: &str = "\
Takes the arguments of serve, and loads nothing. Secrets are not shown. Values that are decided at start are described in \
parentheses.";

const PROFILE_HELP: &str = "\
Takes the arguments of serve; those that have nothing to do with memory, such as --port, have no effect.";

const PLAN_HELP: &str = "\
Takes the arguments of serve, and prints the command to serve with them. For a GPU that this machine does not have: \
--device cuda --device-memory 80GiB. If the model would not fit, the exit code is 4 and the error lists flags that make it \
fit. `plimsoll profile` measures instead, and also reports the error of this prediction.";
