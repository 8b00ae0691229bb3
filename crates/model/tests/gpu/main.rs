//! Models on an NVIDIA GPU: `make test-gpu`.

#[path = "../common/mod.rs"]
mod common;
mod embeddings;
mod experts;
mod gguf;
mod golden;
mod images;
mod kv;
mod memory;
mod not_finite;
mod ranks;
mod reference;
mod row_layers;
mod rows;
mod sampling;
mod scheduling;
mod scores;
mod setup;
mod smollm2;
mod weights;
