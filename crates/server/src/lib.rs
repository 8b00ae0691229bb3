//! The OpenAI API over HTTP.
//!
//! `server` listens from the start on; until there is an engine `start` answers, then the routes of `app`.
//! Every request passes `observe` (its id, its key, its limits, its record). One that generates goes through `body` (JSON, fields), its endpoint (`chat`, `completions`), `conversation` or `prompt` (template
//! and tokenizer, on the blocking pool), `generate` (engine requests; tokens to text), `conversation` again (text to
//! reasoning, content and tool calls), and `respond` (whole, or as server-sent events).
//! Errors become statuses in `error` alone, metric names stand in `metrics` alone.

mod activity;
mod admin;
mod anthropic;
mod app;
mod blocking;
mod body;
mod chat;
mod completions;
mod connect;
mod context;
mod conversation;
mod drain;
mod embeddings;
mod error;
mod generate;
mod job;
mod keys;
mod memory;
mod messages;
mod meters;
mod metrics;
mod model;
mod observe;
mod openapi;
mod options;
mod origin;
mod pages;
mod prompt;
mod quota;
mod record;
mod respond;
mod response_store;
mod responses;
mod room;
mod scores;
mod sealed;
mod server;
mod sleep;
mod start;
mod starting;
mod state;
mod status;
mod structured;
mod text;
mod time;
mod tls;
mod tools;
mod transcript;
mod watched;
mod wire;

pub use app::router;
pub use error::{ApiError, Counted};
pub use keys::{ApiKey, ApiKeys, KeyError};
pub use memory::{Memory, StartNumbers};
pub use metrics::names as metric_names;
pub use model::{AnswerStyle, EmbeddingInfo, GenerationDefaults, ModelInfo};
pub use options::{ServerOptions, StoreLimits};
pub use quota::KeyLimits;
pub use record::{Generation, RequestRecord, RequestSink};
pub use server::{ServeError, Server};
pub use start::{Start, StartPhase, StartStatus};
pub use state::AppState;
pub use tls::Tls;
pub use wire::error::FieldError;
