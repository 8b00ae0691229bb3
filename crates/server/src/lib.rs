//! The OpenAI API over HTTP.
//!
//! `server` listens from the start on: until there is an engine `starting` answers, then the routes of `app`.
//!
//! Every request passes `observe` (id, API key, limits, record). One that generates is parsed by `body` into a type of `wire`,
//! becomes a checked `job` in its endpoint (`completions`) or in `conversation` (chat template, tools, `images`), is submitted by
//! `generate`, which turns tokens into text, and is answered by `respond` or as one JSON object.
//!
//! Only `error` maps errors to HTTP statuses; only `metrics` has metric names.

mod activity;
mod admin;
mod anthropic;
mod app;
mod batches;
mod blocking;
mod bodies;
mod body;
mod chat;
mod completions;
mod connect;
mod context;
mod conversation;
mod drain;
mod embeddings;
mod error;
mod file_store;
mod generate;
mod image_input;
mod images;
mod job;
mod keys;
mod load;
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
mod paging;
mod pairs;
mod prefix_cache;
mod prompt;
mod quota;
mod record;
mod request_memory;
mod respond;
mod response_store;
mod responses;
mod scores;
mod scoring;
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
mod tokenizer_info;
mod tools;
mod transcript;
mod vectors;
mod wire;

pub use app::router;
pub use connect::Listener;
pub use error::{ApiError, Counted};
pub use file_store::{FileLimits, FileStore};
pub use image_input::ImageInput;
pub use keys::{ApiKey, ApiKeys, KeyError};
pub use memory::{Memory, StartNumbers};
pub use metrics::names as metric_names;
pub use model::{AnswerStyle, EmbeddingInfo, GenerationDefaults, ModelInfo, Scorer};
pub use options::{MediaLimits, ServerOptions, StoreLimits};
pub use quota::KeyLimits;
pub use record::{Generation, RequestRecord, RequestSink};
pub use server::{ServeError, Server};
pub use start::{Start, StartPhase, StartStatus};
pub use state::AppState;
pub use tls::Tls;
pub use wire::error::FieldError;
pub use wire::known::UnknownFields;
