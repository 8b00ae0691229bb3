//! The OpenAI API over HTTP.
//!
//! A request goes through `body` (JSON, fields), its endpoint (`chat`, `completions`), `conversation` or `prompt` (template
//! and tokenizer, on the blocking pool), `generate` (engine requests; tokens to text), `conversation` again (text to
//! reasoning, content and tool calls), and `respond` (whole, or as server-sent events).
//! Errors become statuses in `error` alone, metric names stand in `metrics` alone.

mod admin;
mod app;
mod body;
mod chat;
mod completions;
mod conversation;
mod embeddings;
mod error;
mod fields;
mod generate;
mod messages;
mod metrics;
mod openapi;
mod pages;
mod prompt;
mod respond;
mod sleep;
mod state;
mod structured;
mod text;
mod tools;
mod wire;

pub use app::{ServeError, router, serve};
pub use embeddings::EmbeddingInfo;
pub use error::ApiError;
pub use metrics::names as metric_names;
pub use state::{AnswerStyle, AppState, GenerationDefaults, Memory, ModelInfo, ServerOptions};
