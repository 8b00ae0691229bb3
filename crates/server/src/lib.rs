//! The OpenAI API over HTTP.
//!
//! A request goes through `body` (JSON, fields), its endpoint (`chat`, `completions`), `prompt` (template and tokenizer, on
//! the blocking pool), `generate` (engine requests; tokens to text), and `respond` (whole, or as server-sent events).
//! Errors become statuses in `error` alone, metric names stand in `metrics` alone.

mod admin;
mod app;
mod body;
mod chat;
mod completions;
mod embeddings;
mod error;
mod fields;
mod generate;
mod metrics;
mod openapi;
mod pages;
mod prompt;
mod respond;
mod sleep;
mod state;
mod structured;
mod text;
mod wire;

pub use app::{ServeError, router, serve};
pub use embeddings::EmbeddingInfo;
pub use error::ApiError;
pub use metrics::names as metric_names;
pub use state::{AppState, GenerationDefaults, Memory, ModelInfo, ServerOptions};
