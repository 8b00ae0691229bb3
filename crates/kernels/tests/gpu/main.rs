//! Every kernel and its CPU twin against a reference in `f64`: one test body, two backends.
//!
//! The GPU halves need an NVIDIA GPU: `make test-gpu`.

mod all_reduce;
mod attention_decode;
mod attention_prefill;
mod cache;
mod chain;
mod common;
mod delta_rule;
mod encoder;
mod fp8;
mod fused;
mod gguf;
mod host_copies;
mod int4;
mod linear;
mod linear_many;
mod moe;
mod pool;
mod row_layers;
mod sample;
mod sigmoid_gate;
mod soft_cap;
