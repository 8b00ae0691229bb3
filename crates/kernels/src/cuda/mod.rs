//! The operations of a step on an NVIDIA GPU: the kernels of the top-level `kernels/` directory and cuBLAS, behind one
//! struct per operation. Activations and KV are `bf16`, weights too or e4m3, sums `f32`, logits `f32`; matrices are row-major.
//!
//! A method launches on the GPU's one stream and returns; nothing allocates or waits. Methods check lengths, not contents:
//! indices in device memory (tokens, slots, block tables) are the caller's promise.

mod all_reduce;
mod attention_decode;
mod attention_options;
mod attention_prefill;
mod chain;
mod delta_chunks;
mod delta_rule;
mod encoder;
mod fused;
mod host_copies;
mod image;
mod kv;
mod linear;
mod meta;
mod moe;
mod sample;
mod state_runs;

pub use all_reduce::{
    AllReduce, AllReducePath, GpuAdded, SentHalf, SentRoom, communication_bytes, sent_bytes,
};
pub use attention_decode::{DecodeArgs, DecodeHeader, DecodeItem, DecodeKernels, DecodePlanner};
pub use attention_options::GpuAttentionOptions;
pub use attention_prefill::{
    PrefillArgs, PrefillItem, PrefillKernels, PrefillMaps, PrefillPlan, PrefillPlanner, hopper_head_dims,
};
pub use chain::GpuChainEnd;
pub use delta_rule::{DeltaArgs, DeltaBound, DeltaKernels, DeltaSize, GpuDeltaGates};
pub use encoder::{EncoderKernels, GpuLayerNorm, KeptRows, PatchAttention, PatchGrid, PatchSegments};
pub use fused::{
    FusedKernels, GpuKvWrite, GpuNorm, GpuQkNorm, GpuRope, GpuTokens, GpuVocabulary, PairAxes,
    rope_frequencies,
};
pub use host_copies::HostCopies;
pub use image::{check, has_hopper_kernels, has_images, load, open_libraries};
pub use kv::{GpuKv, GpuKvElement};
pub use linear::{
    AddNormed, ChainUse, EXPERT_WINDOW, FP8_BLOCK, FP8_CAPABILITY, Fp8Scaling, GgufKernels, GpuChain,
    GpuFp8Rows, GpuInputs, GpuLinear, GpuMatrix, GpuResidual, GpuRowAttention, GpuRowLayer, GpuRowLayers,
    GpuRows, GpuValues, GpuWeight, INT4_ROWS, INT4_WINDOW, Int4Group, Int4Kernels, LinearChoice, LinearCut,
    LinearLibrary, LinearOutput, LinearPath, LinearRoom, LinearScratch, LinearTile, LinearUse, LinearWays,
    Linears, MOST_DEQUANTISED, PART_OUTPUTS, Preparing, RowLayerProducts, RowLayersUse, StaleWays, SumNorms,
    TimedWay, dequantised_room, expert_int4_pitch, int4_pitch, mxfp4_pitch, mxfp4_word,
};
pub use meta::{AssumedGpu, HEAD_DIMS, RunMeta as GpuRun};
pub use moe::{
    DenseLayers, EXPERT_TILES, GpuExpertLoads, GpuExpertOutputs, GpuExperts, GpuMoeChain, GpuRouter,
    GpuRoutes, MOST_EXPERTS, MOST_ROUTES, MoeChainLayers, MoeKernels, SandwichNorms,
};
pub use sample::{
    RankArgs, RowLogprobs, SampleArgs, SampleKernels, SampleLists, SampleRow, TokenBias, TokenRank,
};
pub use state_runs::{GpuStateRun, GpuStateTile};
