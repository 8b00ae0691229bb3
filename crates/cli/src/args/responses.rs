//! What is kept of responses.

use clap::Args;
use plimsoll_server::StoreLimits;

use crate::bytes::Bytes;

/// The store of `/v1/responses`.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Server")]
pub struct ResponseArgs {
    /// Number of responses stored for previous_response_id, the newest ones; 0 stores none
    #[arg(long, value_name = "N", default_value_t = StoreLimits::default().responses)]
    response_store_max_count: usize,
    /// Most host memory for stored responses
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
