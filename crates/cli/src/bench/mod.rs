//! `plimsoll bench`.

mod dataset;
mod http;
mod mm;
mod offline;
mod report;
mod stats;

pub use http::{ServeBenchArgs, run as serve};
pub(crate) use mm::DatasetArgs;
pub use offline::{latency, throughput};
