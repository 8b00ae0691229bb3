//! The API: address, names, limits of what it accepts.

use std::path::PathBuf;
use std::time::Duration;

use clap::{ArgAction, Args, ValueEnum};
use plimsoll_server::UnknownFields;
use reqwest::header::HeaderValue;

use crate::args::AccessArgs;
use crate::args::values::{Origins, duration, port, positive, some_time, whole};
use crate::bytes::Bytes;

/// The API.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Server")]
pub struct ServerArgs {
    /// Address to listen on; 0.0.0.0 for every interface
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1")]
    pub host: String,
    /// Port to listen on; 0 for any free one
    #[arg(long, value_name = "PORT", default_value_t = 8000, value_parser = port)]
    pub port: u16,
    /// Names of the model in the API; answers contain the first one [default: MODEL]
    #[arg(long, value_name = "NAME", num_args = 1.., action = ArgAction::Set)]
    pub served_model_name: Option<Vec<String>>,
    /// Chat template to use instead of the model's: a file, the template itself, or `harmony` for OpenAI's format (gpt-oss)
    #[arg(long, value_name = "TEMPLATE")]
    pub chat_template: Option<String>,
    /// Sampling defaults: auto (the model's generation_config.json), vllm (none), or a directory
    #[arg(long, value_name = "SOURCE", default_value = "auto")]
    pub generation_config: String,
    /// Fields of requests that the API does not have: error (400), or warn (ignored, and named in the header
    /// X-Ignored-Fields)
    #[arg(
        long,
        value_enum,
        default_value_t,
        value_name = "POLICY",
        hide_possible_values = true
    )]
    pub unknown_fields: UnknownFieldPolicy,
    /// Maximum number of waiting requests, in addition to running ones; more get 429
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = whole::<usize>)]
    pub max_queue: usize,
    /// Maximum time in the queue, in seconds; then a request gets 429 [default: no limit]
    #[arg(long, value_name = "SECONDS", value_parser = duration)]
    pub queue_timeout: Option<Duration>,
    /// Maximum total time of a request, in seconds; then it is cancelled and gets 504. Clients can set less with the field
    /// `timeout` or the header X-Request-Timeout [default: no limit]
    #[arg(long, value_name = "SECONDS", value_parser = duration)]
    pub request_timeout: Option<Duration>,
    /// Order of the queue: fcfs (API keys take turns, each in the order of arrival), or priority (requests with the lowest
    /// `priority` first)
    #[arg(
        long,
        value_enum,
        default_value_t,
        value_name = "POLICY",
        hide_possible_values = true
    )]
    pub scheduling_policy: SchedulingPolicy,
    /// Disconnect a streaming client, and cancel its request, if it reads nothing for this long, in seconds
    #[arg(long, value_name = "SECONDS", default_value = "60", value_parser = duration)]
    pub slow_client_timeout: Duration,
    /// Maximum number of connections; more are closed
    #[arg(long, value_name = "N", default_value_t = 8192, value_parser = positive)]
    pub max_connections: usize,
    /// Close a connection if no complete request head arrives for this long, in seconds
    #[arg(long, value_name = "SECONDS", default_value = "60", value_parser = duration)]
    pub header_timeout: Duration,
    /// Maximum size of a request body
    #[arg(long, value_name = "BYTES", default_value = "32MiB")]
    pub max_body_size: Bytes,
    /// Origins whose web pages may use the server, such as `https://example.org`; * for all [default: none]
    #[arg(long, value_name = "ORIGIN", num_args = 1.., action = ArgAction::Set)]
    pub allowed_origins: Option<Vec<Origins>>,
    /// Enable POST /sleep, which frees everything but the weights, and POST /wake_up
    #[arg(long, overrides_with = "no_enable_sleep_mode")]
    pub enable_sleep_mode: bool,
    /// Offer no sleep mode (the default)
    #[arg(long, overrides_with = "enable_sleep_mode", hide = true)]
    no_enable_sleep_mode: bool,
    /// How long a shutdown (Ctrl-C, SIGTERM) waits for accepted requests, in seconds
    #[arg(
        long,
        visible_alias = "shutdown-timeout",
        value_name = "SECONDS",
        default_value = "30",
        value_parser = duration
    )]
    pub drain_timeout: Duration,
    /// Shut down as on SIGTERM when standard input is closed, for programs that run the server as their child
    #[arg(long, overrides_with = "no_exit_on_stdin_close")]
    pub exit_on_stdin_close: bool,
    /// Do not read standard input (the default)
    #[arg(long, overrides_with = "exit_on_stdin_close", hide = true)]
    no_exit_on_stdin_close: bool,
    /// Fail GET /ready if there is work and no step ends for this long, in seconds [default: five times the slowest step of
    /// the proof, at least 5]
    #[arg(long, value_name = "SECONDS", value_parser = some_time)]
    pub stall_timeout: Option<Duration>,
    /// End the process with exit code 11 if there is work and no step ends for this long, in seconds; 0: never
    /// [default: thirty times the slowest step of the proof, at least 120]
    #[arg(long, value_name = "SECONDS", value_parser = duration)]
    pub watchdog_timeout: Option<Duration>,
    /// Enable POST /admin/drain, which finishes the accepted requests and ends the server, and POST /reset_prefix_cache; any API key
    /// may call them
    #[arg(long, overrides_with = "no_enable_admin_api")]
    pub enable_admin_api: bool,
    /// Do not offer it: only signals end the server (the default)
    #[arg(long, overrides_with = "enable_admin_api", hide = true)]
    no_enable_admin_api: bool,
    /// Maximum number of log lines about ended requests per second; the next line has the number of skipped ones. 0: none
    #[arg(long, value_name = "N", default_value_t = 10)]
    pub request_log_rate: u32,
    /// File to which a line of JSON is appended when a request ends; - for stderr
    #[arg(long, value_name = "FILE")]
    pub access_log: Option<PathBuf>,
    /// URL for OpenTelemetry traces of requests (OTLP over HTTP), such as http://localhost:4318/v1/traces
    #[arg(long, value_name = "URL")]
    pub otlp_traces_endpoint: Option<String>,
    /// Who may use it, and how much.
    #[command(flatten)]
    pub access: AccessArgs,
}

/// `--unknown-fields`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum UnknownFieldPolicy {
    /// Refuse the request.
    #[default]
    Error,
    /// Ignore them, and tell the client.
    Warn,
}

impl From<UnknownFieldPolicy> for UnknownFields {
    fn from(policy: UnknownFieldPolicy) -> Self {
        match policy {
            UnknownFieldPolicy::Error => Self::Error,
            UnknownFieldPolicy::Warn => Self::Warn,
        }
    }
}

/// `--scheduling-policy`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum SchedulingPolicy {
    /// In the order of arrival, keys in turn.
    #[default]
    Fcfs,
    /// The lowest `priority` first.
    Priority,
}

impl ServerArgs {
    /// Whose web pages may use the server.
    pub fn allowed_origins(&self) -> Vec<HeaderValue> {
        let given = self.allowed_origins.iter().flatten();
        given.flat_map(|origins| origins.all().to_vec()).collect()
    }
}
