//! Types that all other crates share: ids, requests, step plans, events, memory meters, and the [`Executor`] trait between
//! scheduling (scheduler, KV cache manager, profiler) and devices (model, simulator).
//!
//! They have little behaviour, but for [`untrusted`], which reads files of models; this crate depends on `thiserror` only.

mod bans;
mod block_size;
mod cache;
mod cache_layout;
mod config;
mod constraint;
mod encoder;
mod event;
mod executor;
mod expert_loads;
mod ids;
mod image;
mod logprobs;
pub mod mask;
mod memory;
mod metadata;
mod plan;
mod pooling;
mod request;
mod sampling;
mod step_costs;
pub mod untrusted;

pub use bans::Bans;
pub use block_size::BlockSize;
pub use cache::{BlockImage, CacheContent, CacheEvent, CacheEventCounts, CacheListener};
pub use cache_layout::{
    CacheGroup, CacheGroups, CacheKind, CacheLayer, CacheLayout, CacheLayoutError, LayerPlace,
};
pub use config::{KvConfig, Scratch, StateConfig, StepLimits};
pub use constraint::{Constraint, ConstraintError, Constraints, Progress};
pub use encoder::{EncoderLimits, ImageInput};
pub use event::{Event, FinishReason, PromptEvent, TokenEvent};
pub use executor::{DeviceTime, Executor, FillMasks, StepError, allow_all};
pub use expert_loads::{ExpertLoads, ExpertSpread};
pub use ids::{PageId, RequestId, StateSlot, TenantId, TokenId};
pub use image::{Image, ImageGrid, ImageSpan, Levels, PatchShape};
pub use logprobs::{Logprobs, PromptLogprob, TokenLogprob};
pub use memory::{BuildError, Component, ComponentBytes, Meters, Oom, RefusedBy, human_bytes};
pub use metadata::{MetaValue, Metadata};
pub use plan::{
    GroupTable, PartialEncode, Run, RunInput, RunState, SampleSpec, Sampled, ScoreSpec, StepOutput, StepPlan,
};
pub use pooling::{Matryoshka, Pooling};
pub use request::{Limits, Request, RequestError, RequestOptions};
pub use sampling::{ParamError, SamplingOptions, SamplingParams};
pub use step_costs::{
    EncodeCost, MEASURED_DECODE_ROWS, MEASURED_MIXED_ROWS, OUTPUTS_BESIDE_PROMPTS, StepCost, StepCosts,
    larger_rows,
};
