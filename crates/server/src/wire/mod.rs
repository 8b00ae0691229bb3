//! The types of the API as they go over the wire, and nothing else.

pub(crate) mod chat;
pub(crate) mod common;
pub(crate) mod completion;
pub(crate) mod tokenize;
