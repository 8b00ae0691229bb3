//! The types of the API as they go over the wire, and nothing else.

pub(crate) mod about;
pub(crate) mod anthropic;
pub(crate) mod chat;
pub(crate) mod common;
pub(crate) mod completion;
pub(crate) mod content;
pub(crate) mod embedding;
pub(crate) mod error;
pub(crate) mod extra;
pub(crate) mod responses;
pub(crate) mod structured;
pub(crate) mod tokenize;
