//! `plimsoll bench latency` and `throughput`.

use std::path::PathBuf;

use clap::Args;

use super::EngineArgs;
use super::values::{positive, ratio, whole};
use crate::bench::DatasetArgs;

/// `plimsoll bench latency`.
#[derive(Clone, Debug, Args)]
pub struct LatencyArgs {
    /// The engine under test.
    #[command(flatten)]
    pub engine: EngineArgs,
    /// Prompt length in tokens
    #[arg(long, value_name = "TOKENS", default_value_t = 32, value_parser = positive)]
    pub(crate) input_len: usize,
    /// Output length in tokens
    #[arg(long, value_name = "TOKENS", default_value_t = 128, value_parser = positive)]
    pub(crate) output_len: usize,
    /// Requests that run at once
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = positive)]
    pub(crate) batch_size: usize,
    /// Batches before the measurement
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = whole::<usize>)]
    pub(crate) num_iters_warmup: usize,
    /// Batches measured
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = positive)]
    pub(crate) num_iters: usize,
    /// On a GPU: let a profiler that was started with `ncu --profile-from-start off` watch the measured batches alone
    #[arg(long)]
    pub(crate) profile: bool,
    /// Generate JSON under the schema in this file, whose texts must be longer than the output; its whitespace is bounded
    #[arg(long, value_name = "FILE")]
    pub(crate) guided_json: Option<PathBuf>,
    /// Write everything measured to this file, as JSON
    #[arg(long, value_name = "FILE")]
    pub(crate) output_json: Option<PathBuf>,
}

/// `plimsoll bench throughput`.
#[derive(Clone, Debug, Args)]
pub struct ThroughputArgs {
    /// The engine under test.
    #[command(flatten)]
    pub engine: EngineArgs,
    /// What prompts hold.
    #[command(flatten)]
    pub(crate) dataset: DatasetArgs,
    /// Mean prompt length in tokens
    #[arg(long, value_name = "TOKENS", default_value_t = 256, value_parser = positive)]
    pub(crate) input_len: usize,
    /// Mean output length in tokens
    #[arg(long, value_name = "TOKENS", default_value_t = 128, value_parser = positive)]
    pub(crate) output_len: usize,
    /// Fraction by which lengths vary around their mean, in [0, 1)
    #[arg(long, value_name = "RATIO", default_value_t = 0.0, value_parser = ratio)]
    pub(crate) random_range_ratio: f64,
    /// Requests, all there from the start
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = positive)]
    pub(crate) num_prompts: usize,
    /// Warm-up requests before the measurement, with other prompts
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = whole::<usize>)]
    pub(crate) num_warmups: usize,
    /// Generate JSON under the schema in this file, whose texts must be longer than the output; its whitespace is bounded
    #[arg(long, value_name = "FILE")]
    pub(crate) guided_json: Option<PathBuf>,
    /// Write everything measured to this file, as JSON
    #[arg(long, value_name = "FILE")]
    pub(crate) output_json: Option<PathBuf>,
}
