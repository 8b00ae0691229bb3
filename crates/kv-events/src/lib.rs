//! Publishes the contents of the prefix cache in the wire format of vLLM's KV events, so that the routers of llm-d and Dynamo
//! send a request to the replica that has most of its prompt cached.
//!
//! [`Publisher::bind`] opens the sockets of a [`Config`] and gives a [`Queue`], which the engine fills without ever waiting.
//! If it is full, everything in it is dropped: subscribers see a gap in the sequence numbers, followed by a batch that begins
//! with `AllBlocksCleared` and contains a snapshot of the cache. So a subscriber never believes for longer than one batch that
//! an evicted block is cached.

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
