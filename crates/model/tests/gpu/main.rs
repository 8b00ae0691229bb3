//! Models on an NVIDIA GPU: `make test-gpu`.

#[path = "../common/mod.rs"]
mod common;
mod weights;
