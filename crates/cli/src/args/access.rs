//! Who may use the server, how much of it, and over what kind of connection.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use clap::Args;

use crate::args::values::positive;

/// Access control and limits.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Access")]
pub struct AccessArgs {
    /// API key that requests must send (`Authorization: Bearer KEY`); repeat for several keys. Other users of this machine can
    /// read command lines: --api-key-file and PLIMSOLL_API_KEY are safer [default: no key needed]
    #[arg(long, value_name = "KEY")]
    pub api_key: Vec<Secret>,
    /// File of API keys, one per line: KEY, or NAME KEY with a name for the log; # begins a comment, after a key with spaces around it.
    /// Changes take effect within seconds
    #[arg(long, value_name = "FILE")]
    pub api_key_file: Option<PathBuf>,
    /// Require an API key for /metrics too
    #[arg(long, overrides_with = "no_metrics_require_key")]
    pub metrics_require_key: bool,
    /// Serve /metrics without a key, like /health and /ready (the default)
    #[arg(long, overrides_with = "metrics_require_key", hide = true)]
    no_metrics_require_key: bool,
    /// Maximum number of concurrent HTTP requests per API key; more get 429
    #[arg(long, value_name = "N", value_parser = positive)]
    pub max_concurrent_requests_per_key: Option<usize>,
    /// Maximum number of HTTP requests per API key and minute; more get 429
    #[arg(long, value_name = "N", value_parser = positive)]
    pub requests_per_minute_per_key: Option<usize>,
    /// Prompt and output tokens per API key and minute; once they are used up, requests get 429
    #[arg(long, value_name = "TOKENS", value_parser = positive)]
    pub tokens_per_minute_per_key: Option<usize>,
    /// Give each API key its own prefix cache, so that cached_tokens and response times do not reveal what other keys have sent
    #[arg(long, overrides_with = "no_isolate_prefix_cache")]
    pub isolate_prefix_cache: bool,
    /// Share the prefix cache between keys, which saves work for common prefixes (the default)
    #[arg(long, overrides_with = "isolate_prefix_cache", hide = true)]
    no_isolate_prefix_cache: bool,
    /// Certificate chain (PEM): serve HTTPS (HTTP/1.1 and HTTP/2). Changed files take effect within seconds
    #[arg(long, value_name = "FILE")]
    pub ssl_certfile: Option<PathBuf>,
    /// Private key of the certificate (PEM)
    #[arg(long, value_name = "FILE")]
    pub ssl_keyfile: Option<PathBuf>,
}

/// A text that is never shown.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    /// The text.
    pub fn reveal(&self) -> &str {
        &self.0
    }
}

impl FromStr for Secret {
    type Err = std::convert::Infallible;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Ok(Self(text.to_owned()))
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}
