//! The API's requests and responses as JSON. Nothing here knows of HTTP, the engine or the server's state.

pub(crate) mod about;
pub(crate) mod anthropic;
pub(crate) mod batch;
pub(crate) mod chat;
pub(crate) mod common;
pub(crate) mod completion;
pub(crate) mod content;
pub(crate) mod embedding;
pub(crate) mod error;
pub(crate) mod extra;
pub(crate) mod fields;
pub(crate) mod known;
pub(crate) mod request;
pub(crate) mod responses;
pub(crate) mod schema;
pub(crate) mod scoring;
pub(crate) mod structured;
pub(crate) mod tokenize;
