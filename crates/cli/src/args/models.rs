//! The models of the Hub cache.

use std::path::PathBuf;

use clap::Args;

use crate::args::{EngineArgs, HubArgs, LogArgs};
use crate::hub::ModelName;

/// `plimsoll pull`.
#[derive(Clone, Debug, Args)]
#[command(args_override_self = true)]
pub struct PullArgs {
    /// Hugging Face Hub id: owner/name, owner/name:Q4_K_M for one of several GGUF files, owner/name@REVISION
    #[arg(value_name = "MODEL")]
    pub model: ModelName,
    /// Where it comes from and where it is stored.
    #[command(flatten)]
    pub hub: HubArgs,
    /// Logging.
    #[command(flatten)]
    pub log: LogArgs,
}

/// `plimsoll list`.
#[derive(Clone, Debug, Args)]
#[command(args_override_self = true, after_help = LIST_HELP, mut_arg("model", |model| model.help(LIST_MODEL)))]
pub struct ListArgs {
    /// Which model, and with which settings it would be served.
    #[command(flatten)]
    pub engine: EngineArgs,
    /// Print one JSON document instead of the table: sizes in bytes, times in seconds since 1970
    #[arg(long, help_heading = "General")]
    pub json: bool,
}

const LIST_MODEL: &str =
    "List only this repository (owner/name, or owner/name:Q4_K_M for one of its GGUF files) [default: all]";

const LIST_HELP: &str = "\
Takes the flags of serve that decide what fits: model, device, limits, memory; --download-dir lists another cache. \
No weights are read.";

/// `plimsoll rm`.
#[derive(Clone, Debug, Args)]
pub struct RmArgs {
    /// What to remove: owner/name, owner/name:Q4_K_M for one of several GGUF files, owner/name@REVISION for one revision
    #[arg(value_name = "MODEL", required = true)]
    pub models: Vec<ModelName>,
    /// Do not ask
    #[arg(short, long, visible_short_alias = 'f')]
    pub yes: bool,
    /// Directory of the cache [default: HF_HUB_CACHE, or ~/.cache/huggingface/hub]
    #[arg(long, value_name = "DIR")]
    pub download_dir: Option<PathBuf>,
}
