//! Tells routers what the prefix cache holds, in the wire format of vLLM's KV events, so that the routers of llm-d and Dynamo
//! send a request to the replica that has computed most of its prompt already.
//!
//! [`Publisher::bind`] opens the sockets of a [`Config`] and gives a [`Queue`], which the engine fills without ever waiting.
//! Where it is full, everything in it is given up: subscribers see a gap in the sequence numbers, and behind it a batch that
//! begins with `AllBlocksCleared` and tells all that is cached. Nobody takes a block for cached that is not for longer than
//! until the next batch.

mod address;
mod config;
mod log;
mod publisher;
mod queue;
mod wire;
mod zmtp;

pub use config::{Config, ConfigError, Kind, Settings};
pub use publisher::{BindError, Publisher};
pub use queue::Queue;
