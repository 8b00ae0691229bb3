//! The operations of a step: on the CPU at the top level, on an NVIDIA GPU in [`cuda`].
//!
//! On the CPU: slices in, slices out, `f32` activations. All matrices are row-major; `[tokens, n]` is one row of `n` per
//! token. Operations that need scratch take it from the step [`Arena`](plimsoll_device::Arena) in a frame of their own, so
//! no other frame of that arena may be open.
//!
//! Two promises hold for every operation on the CPU, and make a model's text independent of scheduling:
//! - a row's result depends on that row (and its context) alone, never on the rows it is batched with: matrix products,
//!   norms and attention accumulate in an order fixed by position, whatever the tile;
//! - all instruction sets give the same bits (see `simd`).

#![allow(
    clippy::needless_range_loop,
    reason = "register tiles are several arrays under one index"
)]

mod activation;
mod attention;
pub mod cuda;
mod delta_rule;
mod dense;
mod dtype;
mod e4m3;
mod embedding;
mod exchange;
mod format;
mod gelu;
mod gguf;
mod kv;
mod linear;
mod moe;
mod norm;
mod pack;
mod panel;
mod parallel;
mod philox;
mod pool;
mod quantize;
mod quantized;
mod rope;
mod sample;
mod score;
mod simd;
mod soft_cap;
#[cfg(test)]
mod testing;

pub use activation::{Activation, ExpertActivation, expert_activation, glu};
pub use attention::{AttentionOptions, Sees, attention, attention_scratch};
pub use delta_rule::{DeltaGates, DeltaLayout, StateRun, causal_conv, gated_delta_rule, sigmoid_gate};
pub use dtype::{Matrix, WeightError, WeightType};
pub use e4m3::{E4M3_MAX, e4m3_from_f32, e4m3_to_f32};
pub use embedding::Embedding;
pub use exchange::Exchange;
pub use gelu::{Gelu, gelu};
pub use gguf::GgufFormat;
pub use kv::{KvElement, KvLayout, PagedKv, PagedKvMut, RunMeta};
pub use linear::{Linear, LinearShape};
pub use moe::{ExpertBuffers, ExpertWeights, Route, Router, RouterSoftmax, add_gated, experts, route};
pub use norm::{add_normed, add_rms_norm, layer_norm, rms_norm, sandwich_norm};
pub use parallel::{set_threads, threads};
pub use pool::sum_rows;
pub use rope::{
    CachedValues, QkNorm, QueryScale, Rotation, qk_norm_rope_kv_write, rope_angles, rope_angles_of_axes,
    rotate_queries,
};
pub use sample::{SampleError, apply_mask, sample, sample_scratch};
pub use score::{ScoreRow, score};
pub use simd::instruction_set;
pub use soft_cap::soft_cap;
