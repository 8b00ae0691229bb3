//! Records of finished requests, for access logs and traces.

use std::fmt;
use std::time::{Duration, SystemTime};

use axum::http::{Method, StatusCode};

/// Receives the record of every finished HTTP request: access logs, traces.
pub trait RequestSink: fmt::Debug + Send + Sync {
    /// Must not block: it is called on the async runtime's threads.
    fn ended(&self, record: &RequestRecord);
}

/// One HTTP request from its head to the end of its response.
#[derive(Clone, Debug)]
pub struct RequestRecord {
    /// When its head arrived.
    pub began: SystemTime,
    /// From then until the response was sent and all work on it ended.
    pub duration: Duration,
    /// The client's `X-Request-Id`, or a random one.
    pub request_id: String,
    /// Name of the API key.
    pub key: Option<String>,
    /// HTTP method.
    pub method: Method,
    /// Path, without the query.
    pub path: String,
    /// Status of the response; 499 where the client disconnected before it began.
    pub status: StatusCode,
    /// `code` of the error that the response is, or that ends its stream.
    pub error: Option<&'static str>,
    /// The response was sent in full.
    pub complete: bool,
    /// W3C Trace Context of the caller: `traceparent`.
    pub traceparent: Option<String>,
    /// W3C Trace Context of the caller: `tracestate`.
    pub tracestate: Option<String>,
    /// What was generated, for requests that generate.
    pub generation: Option<Generation>,
}

/// What a request generated.
#[derive(Clone, Debug, Default)]
pub struct Generation {
    /// The served model.
    pub model: String,
    /// `max_tokens` in force; absent: as many as fit.
    pub max_tokens: Option<usize>,
    /// `temperature` in force.
    pub temperature: Option<f64>,
    /// `top_p` in force.
    pub top_p: Option<f64>,
    /// Prompt tokens, each prompt once.
    pub prompt_tokens: usize,
    /// Of these, found in the prefix cache.
    pub cached_tokens: usize,
    /// Tokens generated, over all choices.
    pub output_tokens: usize,
    /// From arrival until the first choice was admitted.
    pub queued: Option<Duration>,
    /// From arrival to the first token of any choice.
    pub first_token: Option<Duration>,
    /// Finish reasons of the choices, in the order in which they ended.
    pub finish_reasons: Vec<&'static str>,
}
