//! A model on an NVIDIA GPU: the same specification and weights' names as on the CPU, `bf16` throughout.
//!
//! A step is packed on the host into pinned memory, sent in one copy, and computed without the host: a decode step as one
//! CUDA graph, others by launches. What it samples stays on the device for the next step and is copied to the host
//! beside it. So the host prepares step N + 1 while the GPU computes step N.
//!
//! A step with constrained rows is launched like any other, but its sampler skips all rows: the host computes the masks while the
//! GPU computes the step, and then has the logits sampled where they lie. So graphs know nothing of masks.

mod clock;
mod decoder;
mod experts;
mod footprint;
mod formats;
mod graphs;
mod input;
mod masks;
mod output;
mod planners;
mod runner;
mod scores;
mod staging;
mod states;
mod step;
mod vectors;
mod weights;

use std::ops::Deref;
use std::path::Path;
use std::sync::Arc;

use plimsoll_core::{BlockSize, BuildError, Component, KvConfig, StateConfig, StepLimits};
use plimsoll_device::cuda::{DeviceError, Gpu, GpuError};
use plimsoll_kernels::cuda::{DeltaKernels, DeltaSize, FusedKernels, GpuKvElement, HEAD_DIMS};

use crate::model::Description;
use crate::spec::{AttentionSpec, Mlp, Values};
use crate::state::StateCache;
use crate::{About, DecoderSpec, KvCacheDtype, LoadOptions, ModelError, Progress};
use decoder::Decoder;
pub use footprint::{GpuFootprint, GpuStateShape};
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
        progress: &mut dyn FnMut(Progress),
    ) -> Result<Arc<Self>, ModelError> {
        let kv_element = kv_element(options.kv_cache_dtype)?;
        let mut description = Description::read(path, &options.serve_as.without_images())?;
        description.read_scoring_row(options.format)?;
        check(description.about.spec())?;
        description.about.log_what_is_left_out();
        let fused = FusedKernels::load(gpu)?;
        let weights = GpuWeights::load(&description, &options, kv_element, gpu, &fused, progress)?;
        let decoder = Decoder::new(gpu, weights, fused)?;
        Ok(Arc::new(Self {
            about: description.about,
            decoder,
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
        GpuRunner::new(Arc::clone(self), config, limits, options, graphs).map_err(|error| match error {
            DeviceError::Gpu(error) => self.gpu().failed(Component::Runtime, 0, error).into(),
            oom => oom.into(),
        })
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

    /// How attention's work is cut for a cache of that block size.
    fn planners(&self, block_size: BlockSize, max_runs: usize) -> Result<Planners, GpuError> {
        let Decoder { decode, prefill, .. } = &self.decoder;
        planners(self.spec(), block_size, self.kv_element, |kind| {
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

/// Parts of networks that a CPU alone computes.
fn check_parts(spec: &DecoderSpec) -> Result<(), ModelError> {
    let refused = |field: &str, value: String| {
        let supported = "on a GPU no model that has it is; --device cpu serves it";
        Err(ModelError::unsupported(field, value, supported))
    };
    if let Some(per_layer) = &spec.per_layer {
        return refused("hidden_size_per_layer_input", per_layer.width.to_string());
    }
    let shares = |attention: &&AttentionSpec| attention.shares_kv.is_some();
    match spec.attention().filter(shares).count() {
        0 => {}
        layers => return refused("num_kv_shared_layers", layers.to_string()),
    }
    if spec.layers.iter().any(|layer| matches!(layer.mlp, Mlp::Both(..))) {
        return refused("enable_moe_block", "true".to_owned());
    }
    if spec
        .attention()
        .any(|attention| attention.values != Values::Projected)
    {
        return refused("values", "normalised, as in Gemma 4".to_owned());
    }
    if spec.layers.iter().any(|layer| layer.scalar) {
        return refused("layer_scalar", "stored for each layer".to_owned());
    }
    let sizes = spec.attention().map(AttentionSpec::kv_size);
    match sizes.max() {
        Some(most) if most != spec.kv_column() => refused(
            "num_key_value_heads x head_dim",
            "not the same in all layers".to_owned(),
        ),
        _ => Ok(()),
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
    check_parts(spec)?;
    multiple("hidden_size", spec.hidden_size, 8)?;
    for layer in &spec.layers {
        match &layer.mlp {
            Mlp::Dense(mlp) | Mlp::Both(mlp, _) => {
                multiple("intermediate_size", mlp.intermediate_size, 8)?;
            }
            Mlp::Moe(moe) => {
                multiple("moe_intermediate_size", moe.intermediate_size, 8)?;
                if let Some(shared) = &moe.shared {
                    multiple("shared_expert_intermediate_size", shared.intermediate_size, 8)?;
                }
            }
        }
    }
    experts::check(spec)?;
    for attention in spec.attention() {
        if !HEAD_DIMS.contains(&attention.head_dim) {
            let supported = format!("it is one of {HEAD_DIMS:?}");
            return Err(unsupported("head_dim", attention.head_dim, supported));
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
    formats::check(spec)
}
