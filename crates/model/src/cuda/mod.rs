//! A model on an NVIDIA GPU: the same specification and weights' names as on the CPU, `bf16` throughout.
//!
//! A step is packed on the host into pinned memory, sent in one copy, and computed without the host: a decode step as one
//! CUDA graph, others by launches. What it samples stays on the device for the next step and is copied to the host
//! beside it. So the host prepares step N + 1 while the GPU computes step N.
//!
//! A step with constrained rows is launched like any other, but its sampler skips all rows: the host computes the masks while the
//! GPU computes the step, and then has the logits sampled where they lie. So graphs know nothing of masks.
//!
//! An image is encoded on the same stream ahead of the first step that has rows of it, which is no graph.

mod clock;
mod decoder;
mod encoder;
mod experts;
mod footprint;
mod formats;
mod graphs;
mod input;
mod laps;
mod link;
mod loads;
mod masks;
mod output;
mod parts;
mod planners;
mod runner;
mod scores;
mod shape;
mod staging;
mod states;
mod step;
mod vectors;
mod weights;

use std::ops::Deref;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use plimsoll_core::{BuildError, Component, ExpertLoads, KvConfig, StateConfig, StepError, StepLimits};
use plimsoll_device::cuda::{DeviceError, Gpu, GpuError};
use plimsoll_kernels::cuda::{
    DeltaKernels, DeltaSize, FusedKernels, GpuKvElement, HEAD_DIMS, LinearLibrary, LinearWays,
};

use crate::blocks::check_formats;
use crate::encoder::SlowestEncode;
use crate::model::Description;
use crate::spec::Mlp;
use crate::state::StateCache;
use crate::tables::LayerPage;
use crate::{About, DecoderSpec, KvCacheDtype, LoadOptions, LoadProgress, ModelError, Shard};
use decoder::Decoder;
use encoder::Encoder;
pub use footprint::{GpuFootprint, GpuStateShape};
use graphs::WarmedUp;
use laps::Laps;
use link::Abandon;
pub use link::RankLink;
use planners::{Planners, planners, planners_on};
pub use runner::GpuRunner;
use weights::GpuWeights;

/// How a state on a GPU works.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GpuOptions {
    /// Launch every kernel of a decode step instead of replaying a CUDA graph (`--enforce-eager`).
    pub enforce_eager: bool,
}

/// A model's configuration, and its weights on a GPU. States that serve it are built with [`GpuModel::build_state`].
#[derive(Debug)]
pub struct GpuModel {
    about: About,
    decoder: Decoder,
    /// Of a model that takes images.
    encoder: Option<Encoder>,
    slowest_encode: SlowestEncode,
    /// Where its states' tokens went, if it has experts.
    expert_loads: Option<Arc<ExpertLoads>>,
    warmed_up: WarmedUp,
    kv_element: GpuKvElement,
}

impl Deref for GpuModel {
    type Target = About;

    fn deref(&self) -> &About {
        &self.about
    }
}

impl GpuModel {
    /// Loads a model directory (config.json, safetensors) or a GGUF file to `gpu`: weights of few bits as they are stored, where there are
    /// kernels for them, and all others as `bf16`. `progress` hears
    /// about every tensor.
    ///
    /// # Errors
    /// [`ModelError`], which names what is at fault. [`ModelError::Oom`] if the weights do not fit.
    pub fn load(
        path: &Path,
        options: LoadOptions,
        gpu: &Gpu,
        progress: &mut dyn FnMut(LoadProgress),
    ) -> Result<Arc<Self>, ModelError> {
        Self::load_rank(path, options, gpu, None, progress)
    }

    /// As [`Self::load`], for the rank of `options`, which meets the others at `link`. All ranks load at the same time: in the end
    /// they measure together which way of each product is fastest.
    ///
    /// # Errors
    /// As [`Self::load`]; [`ModelError::Flag`] where the model cannot be divided among so many ranks,
    /// [`ModelError::Cancelled`] where another rank failed.
    ///
    /// # Panics
    /// If the rank is one of several and there is no link.
    pub fn load_rank(
        path: &Path,
        options: LoadOptions,
        gpu: &Gpu,
        link: Option<RankLink>,
        progress: &mut dyn FnMut(LoadProgress),
    ) -> Result<Arc<Self>, ModelError> {
        assert_eq!(
            link.is_some(),
            options.shard.ranks > 1,
            "ranks of several meet the others"
        );
        let guard = Abandon::begin(link.as_ref());
        let loaded = Self::load_part(path, options, gpu, link.clone(), progress);
        if let Ok(_) | Err(ModelError::Cancelled | ModelError::RankLost(_)) = loaded {
            guard.keep();
        }
        loaded
    }

    fn load_part(
        path: &Path,
        options: LoadOptions,
        gpu: &Gpu,
        link: Option<RankLink>,
        progress: &mut dyn FnMut(LoadProgress),
    ) -> Result<Arc<Self>, ModelError> {
        let kv_element = kv_element(options.kv_cache_dtype)?;
        let mut description = Description::read(path, &options.serve_as)?;
        description.read_scoring_row(options.format)?;
        let spec = part_of(description.about.spec(), options.shard)?;
        let images = description.about.config().encoder.as_ref();
        images.map_or(Ok(()), encoder::check)?;
        description.about.log_what_is_left_out();
        let mut laps = Laps::begin();
        let fused = FusedKernels::load(gpu)?;
        let library = LinearLibrary::open(gpu)?;
        // Weights are read meanwhile, kernels are loaded, and our own ways are measured.
        let _preparing = library.prepare();
        laps.end("first kernels");
        let weights = GpuWeights::load(&description, spec, &options, kv_element, gpu, &fused, progress)?;
        link.as_ref().map_or(Ok(()), RankLink::agree_to_load)?;
        let decoder = Decoder::new(gpu, weights, fused, &library, link, options.linear_ways.as_ref())?;
        let encoder = images.map(|spec| Encoder::load(gpu, spec)).transpose()?;
        description.about.config.spec = decoder.spec().clone();
        Ok(Arc::new(Self {
            expert_loads: decoder.spec().expert_loads().map(Arc::new),
            encoder,
            about: description.about,
            decoder,
            slowest_encode: SlowestEncode::default(),
            warmed_up: WarmedUp::default(),
            kv_element,
        }))
    }

    /// Everything that serves: KV cache, step arena, staging, graphs, canary, as one value that is dropped whole. Before each
    /// graph is captured, `graphs` gets how many are done, and of how many.
    ///
    /// # Errors
    /// [`BuildError`], with everything given back.
    pub fn build_state(
        self: &Arc<Self>,
        config: &StateConfig,
        limits: &StepLimits,
        options: GpuOptions,
        graphs: &mut dyn FnMut(usize, usize),
    ) -> Result<GpuRunner, BuildError> {
        let mut guard = Abandon::begin(self.link());
        let built = self.build_part(config, limits, options, graphs, &mut guard);
        if let Ok(_) | Err(BuildError::OtherRank(_) | BuildError::RankLost(_)) = built {
            guard.keep();
        }
        built
    }

    /// All ranks allocate, and only then launch what waits for others.
    fn build_part(
        self: &Arc<Self>,
        config: &StateConfig,
        limits: &StepLimits,
        options: GpuOptions,
        graphs: &mut dyn FnMut(usize, usize),
        guard: &mut Abandon<'_>,
    ) -> Result<GpuRunner, BuildError> {
        let failed = |error| BuildError::from(self.failed(error));
        let mut laps = Laps::begin();
        if let Some(link) = self.link() {
            link.renew(|| self.gpu().synchronize().map_err(|error| failed(error.into())))?;
        }
        let mut runner = GpuRunner::new(Arc::clone(self), config, limits).map_err(failed)?;
        if options.enforce_eager || !runner.samples() {
            return Ok(runner);
        }
        runner.reserve_for_graphs().map_err(failed)?;
        laps.end("memory of a state");
        self.link().map_or(Ok(()), RankLink::agree_to_build)?;
        let shape = (config.kv.block_size, limits.max_num_seqs);
        if !self.warmed_up.is_for(shape) {
            guard.launched = self.link().is_some();
            runner.warm_up(graphs).map_err(failed)?;
            if let Some(link) = self.link() {
                link.check().map_err(|error| match error {
                    StepError::OtherRank(rank) => BuildError::OtherRank(rank),
                    error => BuildError::RankLost(error.to_string()),
                })?;
                link.agree_to_build()?;
            }
            // Behind the agreement, so that all ranks skip it for the same states.
            self.warmed_up.set(shape);
            laps.end("first decode steps");
        }
        runner.capture_graphs(graphs).map_err(failed)?;
        laps.end("CUDA graphs");
        Ok(runner)
    }

    /// What a failure of the device comes to: a driver that lacks memory for a launch is not broken.
    fn failed(&self, error: DeviceError) -> DeviceError {
        match error {
            DeviceError::Gpu(error) => self.gpu().failed(Component::Runtime, 0, error),
            oom => oom,
        }
    }

    /// Where it meets the other ranks, if there are any.
    fn link(&self) -> Option<&RankLink> {
        self.decoder.link()
    }

    /// Where it runs.
    pub fn gpu(&self) -> &Gpu {
        self.decoder.gpu()
    }

    /// Bytes of KV cache that a token takes while every layer keeps it.
    pub fn kv_bytes_per_token(&self) -> u64 {
        self.spec().kv_bytes_per_token(self.kv_element.bytes())
    }

    /// Bytes of a KV cache.
    pub fn kv_bytes(&self, config: KvConfig) -> u64 {
        self.spec().kv_bytes(config, self.kv_element.bytes())
    }

    /// Bytes of the states of fixed size of one request; 0 where no layer has one.
    pub fn state_bytes(&self) -> u64 {
        StateCache::slot_bytes(self.spec())
    }

    /// What was measured of the linear layers; `None` where [`LoadOptions::linear_ways`] held.
    pub fn measured_linear_ways(&self) -> Option<LinearWays> {
        self.decoder.measured_linear_ways()
    }

    /// As [`crate::Model::slowest_encode`].
    pub fn slowest_encode(&self) -> Duration {
        self.slowest_encode.get()
    }

    /// As [`crate::Model::expert_loads`]: at most a second behind the steps of the state built last, and not at all behind a state
    /// that rests. A rank counts as all others do.
    pub fn expert_loads(&self) -> Option<&Arc<ExpertLoads>> {
        self.expert_loads.as_ref()
    }

    /// Element of the KV cache.
    pub fn kv_cache_dtype(&self) -> &'static str {
        match self.kv_element {
            GpuKvElement::Bf16 => "bfloat16",
            GpuKvElement::Fp8 => "fp8_e4m3",
        }
    }

    fn decoder(&self) -> &Decoder {
        &self.decoder
    }

    /// How attention's work is cut for keys and values in `pages`.
    fn planners(&self, pages: &[LayerPage], max_runs: usize) -> Result<Planners, GpuError> {
        let Decoder { decode, prefill, .. } = &self.decoder;
        planners(self.spec(), pages, self.kv_element, |kind| {
            planners_on(decode, prefill, kind, max_runs)
        })
    }

    /// A stored tensor as it lies in device memory; `None` if the model has none of that name. For oracles.
    ///
    /// # Errors
    /// [`GpuError`] of the copy.
    pub fn tensor(&self, name: &str) -> Result<Option<Vec<f32>>, GpuError> {
        self.decoder.tensor(name)
    }
}

/// # Errors
/// [`ModelError::Unsupported`] for what only a CPU has.
fn kv_element(dtype: KvCacheDtype) -> Result<GpuKvElement, ModelError> {
    match dtype {
        KvCacheDtype::Auto => Ok(GpuKvElement::Bf16),
        KvCacheDtype::Fp8 => Ok(GpuKvElement::Fp8),
        KvCacheDtype::F32 | KvCacheDtype::F16 => Err(ModelError::unsupported(
            "--kv-cache-dtype",
            format!("{dtype:?}"),
            "auto, bfloat16 and fp8 are on a GPU",
        )),
    }
}

/// Tokens of the smallest blocks.
const LEAST_BLOCK: usize = 8;

/// The part of a network that a rank has, which the kernels can compute.
///
/// # Errors
/// [`ModelError::Unsupported`], which says so where the whole could be computed.
fn part_of(whole: &DecoderSpec, shard: Shard) -> Result<DecoderSpec, ModelError> {
    let part = whole.shard(shard)?;
    match check(&part) {
        Ok(()) => Ok(part),
        Err(error) if shard.ranks > 1 && check(whole).is_ok() => Err(error.because_divided(shard.ranks)),
        Err(error) => Err(error),
    }
}

/// What the kernels ask of a model, beyond what the CPU does.
fn check(spec: &DecoderSpec) -> Result<(), ModelError> {
    let unsupported = |field: &str, value: usize, supported: String| ModelError::Unsupported {
        field: field.to_owned(),
        value: value.to_string(),
        supported: format!("on a GPU {supported}; --device cpu has no such bound"),
    };
    let multiple = |field, width: usize, of: usize| match width.is_multiple_of(of) {
        true => Ok(()),
        false => Err(unsupported(field, width, format!("it is a multiple of {of}"))),
    };
    multiple("hidden_size", spec.hidden_size, 8)?;
    for layer in &spec.layers {
        match &layer.mlp {
            Mlp::Dense(mlp) => multiple("intermediate_size", mlp.intermediate_size, 8)?,
            Mlp::Moe(moe) => {
                multiple("moe_intermediate_size", moe.intermediate_size, 8)?;
                if let Some(shared) = &moe.shared {
                    multiple("shared_expert_intermediate_size", shared.intermediate_size, 8)?;
                }
            }
            Mlp::Both(mlp, moe) => {
                multiple("intermediate_size", mlp.intermediate_size, 8)?;
                multiple("moe_intermediate_size", moe.intermediate_size, 8)?;
            }
        }
    }
    if let Some(per_layer) = &spec.per_layer {
        multiple("hidden_size_per_layer_input", per_layer.width, 8)?;
    }
    experts::check(spec)?;
    let column = spec.kv_column();
    let is_wide = spec.attention().any(|attention| attention.kv_size() != column);
    for attention in spec.attention() {
        if !HEAD_DIMS.contains(&attention.head_dim) {
            let supported = format!("it is one of {HEAD_DIMS:?}");
            return Err(unsupported("head_dim", attention.head_dim, supported));
        }
        // Blocks of the cache begin at whole rows of a head, whatever other layers have between them.
        if is_wide && !(column * LEAST_BLOCK).is_multiple_of(attention.head_dim) {
            let supported = format!(
                "on a GPU {LEAST_BLOCK} times {column}, of which all layers' keys are multiples, is a multiple of each head_dim; \
                 --device cpu has no such bound"
            );
            return Err(ModelError::unsupported(
                "num_key_value_heads x head_dim",
                attention.head_dim,
                supported,
            ));
        }
        if let Some(rope) = &attention.rope {
            // The kernel rotates eight pairs at a time.
            multiple("head_dim * partial_rotary_factor", rope.rotary_dim, 16)?;
        }
    }
    for delta_net in spec.delta_nets() {
        if let Err(bound) = DeltaKernels::check(&delta_net.layout) {
            let field = match bound.name {
                DeltaSize::KeyDim => "linear_key_head_dim",
                DeltaSize::ValueDim => "linear_value_head_dim",
                DeltaSize::Taps => "linear_conv_kernel_dim",
            };
            return Err(unsupported(
                field,
                bound.size,
                format!("it is {}", bound.supported),
            ));
        }
    }
    // Of a rank's part; the whole was checked as it was read.
    check_formats(spec)?;
    formats::check(spec)
}
