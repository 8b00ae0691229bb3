//! What is kept of files and batches.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use plimsoll_server::FileLimits;

use crate::args::values::{duration, whole};
use crate::bytes::Bytes;

/// The store of `/v1/files` and `/v1/batches`.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Server")]
pub struct FileArgs {
    /// Directory for files and batches: the next start goes on with what is in it [default: a temporary one, removed at the end]
    #[arg(long, value_name = "DIR")]
    pub file_store_dir: Option<PathBuf>,
    /// Maximum number of files, and of batches; 0 turns both endpoints off
    #[arg(long, value_name = "N", default_value_t = FileLimits::default().count, value_parser = whole::<usize>)]
    file_store_max_count: usize,
    /// Maximum disk space for files
    #[arg(long, value_name = "BYTES", default_value = "1GiB")]
    file_store_max_bytes: Bytes,
    /// Time after which files and ended batches are deleted, in seconds (2592000: 30 days); uploads can ask for less
    #[arg(long, value_name = "SECONDS", default_value = "2592000", value_parser = duration)]
    file_store_expiry: Duration,
}

impl FileArgs {
    /// What the flags say; `None` if there are to be no files.
    pub fn limits(&self) -> Option<FileLimits> {
        (self.file_store_max_count > 0).then_some(FileLimits {
            count: self.file_store_max_count,
            bytes: self.file_store_max_bytes.0,
            expiry: self.file_store_expiry,
        })
    }
}
