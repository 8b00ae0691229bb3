//! The integration tests of this crate: one program, for each would be linked anew.

mod candle;
mod checkpoints;
mod common;
mod configs;
mod embeddings;
mod experts;
mod footprint;
mod gemma4;
mod gguf;
mod golden;
mod groups;
mod hybrid;
mod images;
mod memory;
mod not_finite;
mod quantization;
mod ranks;
mod scheduling;
mod smollm2;
mod writers;
