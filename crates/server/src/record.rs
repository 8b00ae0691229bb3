//! Records of finished requests, for access logs and traces.

use std::fmt;
use std::time::{Duration, SystemTime};

use axum::http::{Method, StatusCode};

/// Told of every HTTP request when nothing works on it any more: access logs, traces.
pub trait RequestSink: fmt::Debug + Send + Sync {
    /// Must not block: it is called on the server's threads.
    fn ended(&self, record: &RequestRecord);
}

/// One HTTP request from its head to the end of its response.
#[derive(Clone, Debug)]
pub struct RequestRecord {
    /// When its head had arrived.
    pub began: SystemTime,
    /// From then until the last byte was handed on and nothing worked on it any more.
    pub duration: Duration,
    /// The client's `X-Request-Id`, or a fresh one.
    pub request_id: String,
    /// Name of the API key.
    pub key: Option<String>,
    /// HTTP method.
    pub method: Method,
    /// Path, without the query.
    pub path: String,
    /// Status of the response; 499 where the client left before there was one.
    pub status: StatusCode,
    /// `code` of the error, if it is one of those before the response began.
    pub error: Option<&'static str>,
    /// The response was handed on whole.
    pub complete: bool,
    /// W3C Trace Context of the caller.
    pub traceparent: Option<String>,
    /// W3C Trace Context of the caller.
    pub tracestate: Option<String>,
    /// What was generated, if anything was to be.
    pub generation: Option<Generation>,
}

/// What a request had generated.
#[derive(Clone, Debug, Default)]
pub struct Generation {
    /// The served model.
    pub model: String,
    /// `max_tokens` as asked for.
    pub max_tokens: Option<usize>,
    /// `temperature` in force.
    pub temperature: Option<f64>,
    /// `top_p` in force.
    pub top_p: Option<f64>,
    /// Prompt tokens, each prompt once.
    pub prompt_tokens: usize,
    /// Of these, found in the prefix cache.
    pub cached_tokens: usize,
    /// Tokens generated, of all choices.
    pub output_tokens: usize,
    /// From the arrival until the first choice ran.
    pub queued: Option<Duration>,
    /// From the arrival to the first token of any choice.
    pub first_token: Option<Duration>,
    /// Why choices ended, in the order of their end.
    pub finish_reasons: Vec<&'static str>,
}
