//! The API: address, names, limits of what it accepts.

use std::path::PathBuf;
use std::time::Duration;

use clap::{ArgAction, Args, ValueEnum};
use reqwest::header::HeaderValue;

use crate::args::values::{Origins, duration, positive, some_time};
use crate::args::{AccessArgs, ModelArgs};
use crate::bytes::Bytes;

/// The API.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Server")]
pub struct ServerArgs {
    /// Address to listen on; 0.0.0.0 for every interface
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1")]
    pub host: String,
    /// Port to listen on; 0 for any free one
    #[arg(long, value_name = "PORT", default_value_t = 8000)]
    pub port: u16,
    /// Names the API knows the model by; the first is the one in answers [default: MODEL]
    #[arg(long, value_name = "NAME", num_args = 1.., action = ArgAction::Set)]
    pub served_model_name: Option<Vec<String>>,
    /// Chat template to use instead of the model's: a file, or the template itself
    #[arg(long, value_name = "TEMPLATE")]
    pub chat_template: Option<String>,
    /// Sampling defaults: auto (the model's generation_config.json), vllm (none), or a directory
    #[arg(long, value_name = "SOURCE", default_value = "auto")]
    pub generation_config: String,
    /// Requests that may wait beyond those that run; more get 429
    #[arg(long, value_name = "N", default_value_t = 256)]
    pub max_queue: usize,
    /// Longest time that a request waits for its turn, in seconds; then it gets 429 [default: for as long as it takes]
    #[arg(long, value_name = "SECONDS", value_parser = duration)]
    pub queue_timeout: Option<Duration>,
    /// Longest time that a request takes in all, in seconds; then it gets 504 and is given up. Clients may ask for less,
    /// by the field `timeout` or the header X-Request-Timeout [default: for as long as it takes]
    #[arg(long, value_name = "SECONDS", value_parser = duration)]
    pub request_timeout: Option<Duration>,
    /// Who is next in the queue: fcfs (keys take turns, each in the order of arrival), or priority (first the lowest
    /// `priority` of the requests)
    #[arg(
        long,
        value_enum,
        default_value_t,
        value_name = "POLICY",
        hide_possible_values = true
    )]
    pub scheduling_policy: SchedulingPolicy,
    /// A streaming client that reads nothing for this long is cut off, and its request cancelled, in seconds
    #[arg(long, value_name = "SECONDS", default_value = "60", value_parser = duration)]
    pub slow_client_timeout: Duration,
    /// Connections at once; one more is closed
    #[arg(long, value_name = "N", default_value_t = 8192, value_parser = positive)]
    pub max_connections: usize,
    /// A connection on which no whole request head arrives for this long is closed, in seconds
    #[arg(long, value_name = "SECONDS", default_value = "60", value_parser = duration)]
    pub header_timeout: Duration,
    /// Largest request body
    #[arg(long, value_name = "BYTES", default_value = "32MiB")]
    pub max_body_size: Bytes,
    /// Web pages of these origins, such as `https://example.org`, may use the server from a browser; * for all [default: none]
    #[arg(long, value_name = "ORIGIN", num_args = 1.., action = ArgAction::Set)]
    pub allowed_origins: Option<Vec<Origins>>,
    /// Offer POST /sleep and /wake_up, which give the memory of everything but the weights back for a time
    #[arg(long, overrides_with = "no_enable_sleep_mode")]
    enable_sleep_mode: bool,
    /// Never give memory back (the default)
    #[arg(long, overrides_with = "enable_sleep_mode", hide = true)]
    no_enable_sleep_mode: bool,
    /// How long a stop (Ctrl-C, SIGTERM) waits for running requests, in seconds
    #[arg(
        long,
        visible_alias = "shutdown-timeout",
        value_name = "SECONDS",
        default_value = "30",
        value_parser = duration
    )]
    pub drain_timeout: Duration,
    /// GET /ready fails once there has been work and no step has ended for this long, in seconds [default: five times the
    /// slowest step of the proof, at least 5]
    #[arg(long, value_name = "SECONDS", value_parser = some_time)]
    pub stall_timeout: Option<Duration>,
    /// The process ends, with exit code 11, once there has been work and no step has ended for this long, in seconds; 0: never
    /// [default: thirty times the slowest step of the proof, at least 120]
    #[arg(long, value_name = "SECONDS", value_parser = duration)]
    pub watchdog_timeout: Option<Duration>,
    /// Offer POST /admin/drain, which ends the server once its requests are done; where there are API keys, each of them may
    #[arg(long, overrides_with = "no_enable_admin_api")]
    enable_admin_api: bool,
    /// Only signals end the server (the default)
    #[arg(long, overrides_with = "enable_admin_api", hide = true)]
    no_enable_admin_api: bool,
    /// Lines about requests, each at its end, that the log gets in a second at most; the next one says how many were left
    /// out. 0: none
    #[arg(long, value_name = "N", default_value_t = 10)]
    pub request_log_rate: u32,
    /// Append a line of JSON to this file for every request at its end; - for stderr
    #[arg(long, value_name = "FILE")]
    pub access_log: Option<PathBuf>,
    /// Send OpenTelemetry traces of requests to this address, by OTLP over HTTP, such as http://localhost:4318/v1/traces
    #[arg(long, value_name = "URL")]
    pub otlp_traces_endpoint: Option<String>,
    /// Who may use it, and how much.
    #[command(flatten)]
    pub access: AccessArgs,
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
    /// Whether there is a sleep mode.
    pub fn enable_sleep_mode(&self) -> bool {
        self.enable_sleep_mode
    }

    /// Whether the server can be told to end by HTTP.
    pub fn enable_admin_api(&self) -> bool {
        self.enable_admin_api
    }

    /// Whose web pages may use the server.
    pub fn allowed_origins(&self) -> Vec<HeaderValue> {
        let given = self.allowed_origins.iter().flatten();
        given.flat_map(|origins| origins.all().to_vec()).collect()
    }

    /// The names the API knows the model by, at least one.
    pub fn served_names(&self, model: &ModelArgs) -> Vec<String> {
        match &self.served_model_name {
            Some(names) => names.clone(),
            None => vec![model.model().to_owned()],
        }
    }
}
