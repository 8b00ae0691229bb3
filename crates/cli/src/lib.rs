//! The `plimsoll` binary as a library, so that tests can start a server in their own process: arguments, configuration,
//! the Hub, and the wiring of all other crates. Nothing depends on this crate.

mod access_log;
pub mod args;
pub mod backend;
pub mod bench;
mod bytes;
pub mod chat;
mod client;
pub mod command_line;
pub mod config;
mod display;
pub mod error;
pub mod exit;
mod hardware;
pub mod hub;
mod keys;
mod kv_events;
pub mod layers;
mod listen;
pub mod lock;
pub mod logging;
pub mod models;
mod patience;
pub mod plan;
pub mod plan_cache;
mod program;
mod progress;
mod report_file;
mod request_log;
pub mod selftest;
pub mod serve;
mod serve_settings;
pub mod settings;
pub mod signals;
mod simulated;
pub mod source;
pub mod start;
pub mod templates;
mod terminal;
mod tls;
mod traces;
mod version;
mod watch;

pub use bytes::Bytes;
pub use error::Error;
pub use program::main;
