//! `plimsoll bench`.

mod dataset;
mod http;
mod offline;
mod report;
mod stats;

pub use http::{ServeBenchArgs, run as serve};
pub use offline::{latency, throughput};
pub(crate) use report::command_line;
