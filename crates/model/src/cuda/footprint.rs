//! What a model and its states take on a GPU, told without loading it: see [`crate::Footprint`].

use std::convert::Infallible;
use std::path::Path;
use std::sync::Arc;

use plimsoll_core::{BlockSize, Component, KvConfig, StepLimits};
use plimsoll_device::cuda::{DeviceError, DryGpuArena, Gpu, POOL_CHUNK, POOL_UNIT};
use plimsoll_kernels::cuda::{
    AssumedGpu, DecodeKernels, DecodePlanner, DeltaKernels, EncoderKernels, FusedKernels, GpuKvElement,
    Linears, MoeKernels, PrefillKernels, PrefillPlanner, SampleKernels, communication_bytes, sent_bytes,
};

use super::encoder::{self, EncoderState};
use super::graphs::ladder;
use super::input::StepInputs;
use super::loads::Loads;
use super::masks::Masks;
use super::output::Outputs;
use super::planners::{AttentionPlanners, Planners, attention_counters, planners, planners_on};
use super::shape::{ImageInputs, Sampling};
use super::states::States;
use super::step::StepLayout;
use super::weights::weights_bytes;
use super::{GpuOptions, kv_element, part_of};
use crate::footprint::{ArenaUse, StepSize};
use crate::model::Description;
use crate::spec::Mlp;
use crate::state::StateCache;
use crate::tables::LayerPage;
use crate::{DecoderSpec, KvCacheDtype, ModelConfig, ModelError, ServeAs, Shard};

/// Context, kernels and libraries with their workspace on an H200, as measured there (tests/bench/h200/kv-full.json).
const H200_RUNTIME_BYTES: u64 = 572 << 20;

/// What a graph takes for each block of the decoder: 48 MiB for the 51 graphs of 32 blocks each, as measured there.
const GRAPH_LAYER_BYTES: u64 = 30 << 10;

/// What a state on a GPU is made for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuStateShape {
    /// The largest step.
    pub limits: StepLimits,
    /// Tokens of a block of the KV cache.
    pub block_size: BlockSize,
    /// Its element.
    pub kv_cache_dtype: KvCacheDtype,
    /// How it works.
    pub options: GpuOptions,
    /// Text or embeddings.
    pub serve_as: ServeAs,
    /// The rank that it is for.
    pub shard: Shard,
}

/// A model on a GPU, without its weights, or without the GPU.
#[derive(Debug)]
pub struct GpuFootprint {
    config: ModelConfig,
    shape: GpuStateShape,
    kv_element: GpuKvElement,
    /// Bytes; `u64::MAX` if they fit no memory.
    weights: u64,
    planners: Planners,
    /// What a loaded model would have loaded too.
    kernels: Option<Arc<Kernels>>,
}

#[derive(Debug)]
struct Kernels {
    decode: DecodeKernels,
    prefill: PrefillKernels,
    _fused: FusedKernels,
    _linears: Linears,
    _sampler: Option<SampleKernels>,
    _delta: Option<DeltaKernels>,
    _experts: Option<MoeKernels>,
    _encoder: Option<EncoderKernels>,
}

impl GpuFootprint {
    /// For a GPU that is there, onto which the kernels are loaded and nothing else: as long as this lives, its meters show
    /// what the runtime takes.
    ///
    /// # Errors
    /// As [`super::GpuModel::load`], as far as the configuration tells.
    pub fn on(gpu: &Gpu, path: &Path, shape: GpuStateShape) -> Result<Self, ModelError> {
        let (config, element) = read_config(path, &shape)?;
        let kernels = Kernels::load(gpu, &config)?;
        let runs = shape.limits.max_num_seqs;
        let planners = planners(
            &config.spec,
            &pages(&config.spec, shape.block_size),
            element,
            |kind| planners_on(&kernels.decode, &kernels.prefill, kind, runs),
        );
        let planners = planners.map_err(ModelError::Gpu)?;
        Ok(Self::new(config, element, shape, planners, Some(kernels)))
    }

    /// For a GPU that is not there: like an H200, but for the size of its memory.
    ///
    /// # Errors
    /// As [`Self::on`].
    pub fn assumed(path: &Path, shape: GpuStateShape) -> Result<Self, ModelError> {
        let gpu = AssumedGpu::H200;
        let (config, element) = read_config(path, &shape)?;
        let runs = shape.limits.max_num_seqs;
        let Ok(planners) = planners::<Infallible>(
            &config.spec,
            &pages(&config.spec, shape.block_size),
            element,
            |kind| {
                Ok(AttentionPlanners {
                    kind,
                    decode: DecodePlanner::assumed(kind.layout, kind.heads, kind.window, gpu, runs),
                    prefill: PrefillPlanner::assumed(kind.layout, kind.heads, kind.window, kind.element, gpu),
                })
            },
        );
        Ok(Self::new(config, element, shape, planners, None))
    }

    fn new(
        config: ModelConfig,
        kv_element: GpuKvElement,
        shape: GpuStateShape,
        planners: Planners,
        kernels: Option<Kernels>,
    ) -> Self {
        Self {
            weights: weights_bytes(&config).map_or(u64::MAX, pooled),
            config,
            kv_element,
            shape,
            planners,
            kernels: kernels.map(Arc::new),
        }
    }

    /// The same for other limits.
    #[must_use]
    pub fn for_limits(&self, limits: &StepLimits) -> Self {
        let planners = self.planners.iter().map(|planners| AttentionPlanners {
            decode: planners.decode.for_runs(limits.max_num_seqs),
            ..*planners
        });
        Self {
            config: self.config.clone(),
            kv_element: self.kv_element,
            shape: GpuStateShape {
                limits: *limits,
                ..self.shape.clone()
            },
            weights: self.weights,
            planners: planners.collect(),
            kernels: self.kernels.clone(),
        }
    }

    /// What the model says about itself.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Bytes of the runtime of a GPU that is not there.
    pub const ASSUMED_RUNTIME_BYTES: u64 = H200_RUNTIME_BYTES;

    /// Bytes of the weights; `u64::MAX` if they fit no memory.
    pub fn weights_bytes(&self) -> u64 {
        self.weights
    }

    /// Bytes that the GPU holds for exchanging sums with those of other ranks; they are there before a model is loaded.
    pub fn communication_bytes(&self) -> u64 {
        communication_bytes(self.shape.shard.ranks) as u64
    }

    /// Bytes that a state adds to these, for what ranks send each other beside kernels.
    pub fn sent_bytes(&self) -> u64 {
        let (ranks, tokens) = (self.shape.shard.ranks, self.shape.limits.max_num_batched_tokens);
        sent_bytes(ranks, tokens, self.config.spec.hidden_size) as u64
    }

    /// As [`super::GpuModel::kv_bytes_per_token`].
    pub fn kv_bytes_per_token(&self) -> u64 {
        self.config.spec.kv_bytes_per_token(self.kv_element.bytes())
    }

    /// Bytes of a KV cache.
    pub fn kv_bytes(&self, config: KvConfig) -> u64 {
        mapped(self.config.spec.kv_bytes(config, self.kv_element.bytes()))
    }

    /// As [`super::GpuModel::state_bytes`].
    pub fn state_bytes(&self) -> u64 {
        StateCache::slot_bytes(&self.config.spec)
    }

    /// Bytes of the states of so many slots.
    pub fn states_bytes(&self, slots: usize) -> u64 {
        mapped(States::bytes(&self.config.spec, slots))
    }

    /// Bytes of a fixed arena of `scratch` bytes.
    pub fn fixed_arena(&self, scratch: u64) -> u64 {
        mapped(scratch)
    }

    /// Bytes of a state's staging.
    pub fn staging_bytes(&self) -> u64 {
        let GpuStateShape {
            limits, block_size, ..
        } = &self.shape;
        let sampling = Sampling::of(&self.config);
        let parts = [
            StepInputs::bytes(
                limits,
                *block_size,
                &self.config.spec.cache_groups(*block_size),
                sampling,
                ImageInputs::of(&self.config),
                &self.planners,
            ),
            attention_counters(&self.planners) * size_of::<u32>(),
            Outputs::bytes(sampling.most_rows(limits)),
            Masks::bytes(sampling.most_rows(limits), self.config.spec.num_logits()),
        ];
        let loads = Loads::bytes(&self.config.spec);
        parts.into_iter().chain(loads).map(pooled).sum()
    }

    /// Bytes that a state has for images: what the largest that limits allow takes, and rows that are kept.
    pub fn encoder_bytes(&self) -> u64 {
        let spec = self.config.encoder.as_ref();
        let bytes = |spec| EncoderState::bytes(spec).map_or(u64::MAX, |bytes| mapped(bytes as u64));
        spec.map_or(0, bytes)
    }

    /// Bytes that the pool holds without using them, beside weights, the libraries' workspace and `staging` bytes.
    pub fn slack_bytes(&self, staging: u64) -> u64 {
        let used = self
            .weights
            .saturating_add(staging)
            .saturating_add(pooled(Linears::WORKSPACE_BYTES));
        used.checked_next_multiple_of(POOL_CHUNK as u64)
            .map_or(0, |held| held - used)
    }

    /// Bytes of a state's graphs.
    pub fn graph_bytes(&self) -> u64 {
        let spec = &self.config.spec;
        // Layers with experts launch half as many kernels again, with experts beside an MLP twice as many; inputs of layers are half as
        // many.
        let more = spec.layers.iter().map(|layer| match layer.mlp {
            Mlp::Dense(_) => 0,
            Mlp::Moe(_) => 1,
            Mlp::Both(..) => 2,
        });
        let inputs = spec.per_layer.map_or(0, |_| spec.layers.len());
        let halves = 2 * spec.layers.len() + more.sum::<usize>() + inputs;
        mapped(GRAPH_LAYER_BYTES * (self.graphs().len() * halves) as u64 / 2)
    }

    /// What capturing the graphs, and then `steps`, take from the arena; of each step whether it runs as a graph.
    pub fn arena(&self, steps: &[(StepSize, bool)]) -> ArenaUse {
        let counted = self.count(steps);
        counted.unwrap_or_else(|| ArenaUse::boundless(steps.len()))
    }

    fn count(&self, steps: &[(StepSize, bool)]) -> Option<ArenaUse> {
        let (spec, graphs) = (&self.config.spec, self.graphs());
        let mut arena = DryGpuArena::default();
        let count = |step, arena: &mut DryGpuArena| {
            arena.reset();
            arena.alloc::<u8>(StepLayout::new(spec, step, &self.planners)?.bytes)
        };
        // As `GpuRunner::reserve_for_graphs`.
        if let Some(&size) = graphs.last() {
            let step = StepSize {
                tokens: size,
                samples: size,
                scored: 0,
            };
            count(step, &mut arena)?;
        }
        let mut scratch = Vec::with_capacity(steps.len());
        for &(step, graph) in steps {
            if graphs.is_empty() || !graph {
                count(step, &mut arena)?;
            }
            scratch.push(arena.take_high_water() as u64);
        }
        let mapped = arena.mapped() as u64;
        Some(ArenaUse {
            scratch,
            peak: mapped,
            held: mapped,
        })
    }

    /// Batch sizes that have a graph.
    fn graphs(&self) -> Vec<usize> {
        match self.shape.options.enforce_eager || self.config.embedding.is_some() {
            true => Vec::new(),
            false => ladder(self.shape.limits.max_num_seqs),
        }
    }
}

/// Where layers have their keys and values in blocks of that size.
fn pages(spec: &DecoderSpec, block_size: BlockSize) -> Vec<LayerPage> {
    let layout = spec.cache_layout(&spec.cache_groups(block_size), block_size);
    LayerPage::all(&layout, block_size)
}

fn read_config(path: &Path, shape: &GpuStateShape) -> Result<(ModelConfig, GpuKvElement), ModelError> {
    let element = kv_element(shape.kv_cache_dtype)?;
    let mut about = Description::read(path, &shape.serve_as)?.about;
    about.config.spec = part_of(about.spec(), shape.shard)?;
    let config = about.config;
    config.encoder.as_ref().map_or(Ok(()), encoder::check)?;
    Ok((config, element))
}

impl Kernels {
    /// Everything that the runtime loads for a model, as far as it can be without one.
    fn load(gpu: &Gpu, config: &ModelConfig) -> Result<Self, DeviceError> {
        let samples = config.embedding.is_none();
        let has_experts = config.spec.mixtures().next().is_some();
        let workspace = gpu.alloc(Component::Runtime, Linears::WORKSPACE_BYTES)?;
        let kernels = Self {
            _linears: Linears::load(gpu, workspace)?,
            _fused: FusedKernels::load(gpu)?,
            _sampler: samples.then(|| SampleKernels::load(gpu)).transpose()?,
            _delta: (config.spec.is_hybrid().then(|| DeltaKernels::load(gpu))).transpose()?,
            _experts: has_experts.then(|| MoeKernels::load(gpu)).transpose()?,
            _encoder: (config.encoder.as_ref())
                .map(|_| EncoderKernels::load(gpu))
                .transpose()?,
            decode: DecodeKernels::load(gpu)?,
            prefill: PrefillKernels::load(gpu)?,
        };
        gpu.settle_runtime()?;
        Ok(kernels)
    }
}

/// Bytes of the pool that an allocation takes.
fn pooled(bytes: usize) -> u64 {
    bytes.max(1).next_multiple_of(POOL_UNIT) as u64
}

/// Bytes that are mapped for as many.
fn mapped(bytes: u64) -> u64 {
    bytes
        .checked_next_multiple_of(DryGpuArena::GRANULARITY as u64)
        .unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests;
