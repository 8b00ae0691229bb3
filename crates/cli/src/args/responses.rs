//! What is kept of responses.

use clap::Args;
use plimsoll_server::StoreLimits;

use crate::args::values::whole;
use crate::bytes::Bytes;

/// The store of `/v1/responses`.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Server")]
pub struct ResponseArgs {
    /// Maximum number of responses stored for previous_response_id; 0 stores none
    #[arg(long, value_name = "N", default_value_t = StoreLimits::default().responses, value_parser = whole::<usize>)]
    response_store_max_count: usize,
    /// Maximum host memory for stored responses
    #[arg(long, value_name = "BYTES", default_value = "256MiB")]
    response_store_max_bytes: Bytes,
}

impl ResponseArgs {
    /// What the flags say.
    pub fn limits(&self) -> StoreLimits {
        StoreLimits {
            responses: self.response_store_max_count,
            bytes: usize::try_from(self.response_store_max_bytes.0).unwrap_or(usize::MAX),
        }
    }
}
