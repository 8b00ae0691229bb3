//! Models: configuration, weights, the decoder, the runner.
//!
//! [`Model::load`] reads a directory or a GGUF file into charged, packed weights; [`Model::build_state`] makes a [`Runner`],
//! the [`plimsoll_core::Executor`] that turns step plans into sampled tokens. A [`Footprint`] says what both would take.

pub mod arch;
mod batch;
mod blocks;
mod cancel;
mod config;
pub mod cuda;
mod decoder;
mod divide;
mod embedding;
mod encoder;
mod encoder_spec;
mod error;
mod footprint;
mod generation;
mod gguf;
mod images;
mod model;
mod names;
mod positions;
mod quantization;
pub mod rope;
mod runner;
mod shard;
mod spec;
mod state;
mod tables;
mod weights;

pub use arch::Architecture;
pub use cancel::Cancel;
pub use config::{Around, GgufTensors, HfOverrides, ModelConfig};
pub use embedding::{EmbeddingConfig, ScoringConfig, ServeAs, Task};
pub use encoder_spec::{EncoderFamily, EncoderMlp, EncoderSpec, PatchWindows};
pub use error::{ModelError, Shape};
pub use footprint::{ArenaUse, Footprint, StepSize};
pub use generation::GenerationConfig;
pub use gguf::GgufFile;
pub use model::{About, LoadFormat, LoadOptions, Model};
pub use plimsoll_kernels::{Activation, DeltaLayout, ExpertActivation, Gelu, QueryScale, RouterSoftmax};
pub use quantization::{
    FP8_BLOCK, Fp8Scales, Int4Format, Int4Groups, Int4Packing, MXFP4_BLOCK, MatrixFormat, OnlineQuantization,
    Quantization,
};
pub use runner::Runner;
pub use shard::{MAX_RANKS, Shard};
pub use spec::{
    AttentionSpec, DecoderSpec, DeltaNetSpec, DenseMlpSpec, LayerSpec, Mixer, Mlp, MoeNames, MoeSpec,
    NormSpec, OutputHead, PerLayerSpec, Projections, StackedExperts, Values,
};
pub use state::KvCacheDtype;
pub use weights::LoadProgress;
