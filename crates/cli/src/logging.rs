//! Log lines on stderr.

use std::io::{IsTerminal, stderr};

use tracing_subscriber::EnvFilter;

use crate::args::LogFormat;

/// `RUST_LOG` chooses what is logged; our own `info` and everybody's warnings if it is not set.
pub fn init(format: LogFormat) {
    const DEFAULT: &str = "warn,plimsoll=info,plimsoll_cli=info,plimsoll_device=info,plimsoll_engine=info,\
        plimsoll_model=info,plimsoll_profiler=info,plimsoll_server=info";
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(DEFAULT));
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(stderr)
        .with_ansi(stderr().is_terminal())
        .with_target(false);
    match format {
        LogFormat::Text => builder.init(),
        LogFormat::Json => builder.json().init(),
    }
}
