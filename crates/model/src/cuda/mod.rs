//! Models on NVIDIA GPUs.

mod weights;

pub use weights::{GpuLayer, GpuWeights};
