//! The decoder's weights in device memory.

mod convert;
mod layout;
mod transfer;

use std::path::Path;
use std::sync::Arc;

use half::bf16;
use plimsoll_core::Component;
use plimsoll_device::Pod;
use plimsoll_device::cuda::{Gpu, GpuError, GpuSlab, GpuSlice};
use plimsoll_kernels::cuda::{FusedKernels, GpuLinear, GpuWeight, rope_turns};

use crate::model::Description;
use crate::weights::{Checked, OuterTensors, Vector};
use crate::{DecoderSpec, LoadFormat, ModelError, Progress, ServeAs};
use convert::Job;
use layout::{Layout, Part, Span};
use transfer::transfer;

/// All weights of a decoder on a GPU, in one piece of memory. Matrices are row-major, `[outputs, inputs]`.
#[derive(Debug)]
pub struct GpuWeights {
    spec: DecoderSpec,
    layout: Layout,
    slab: Arc<GpuSlab>,
}

/// Views of one block's weights.
#[derive(Clone, Copy, Debug)]
pub struct GpuLayer<'a> {
    /// `[hidden]`.
    pub attention_norm: GpuSlice<'a, f32>,
    /// q, k and v, stacked: `[q_size + 2 * kv_size, hidden]`.
    pub qkv: GpuSlice<'a, bf16>,
    /// `[q_size + 2 * kv_size]`.
    pub qkv_bias: Option<GpuSlice<'a, bf16>>,
    /// Norms of the heads of q and of k, `[head_dim]` each.
    pub qk_norm: Option<[GpuSlice<'a, f32>; 2]>,
    /// `[hidden, q_size]`.
    pub output: GpuSlice<'a, bf16>,
    /// `[hidden]`.
    pub mlp_norm: GpuSlice<'a, f32>,
    /// Gate and up, stacked: `[2 * inner, hidden]`.
    pub gate_up: GpuSlice<'a, bf16>,
    /// `[hidden, inner]`.
    pub down: GpuSlice<'a, bf16>,
    /// Tokens attention sees; `None` is all.
    pub window: Option<usize>,
}

/// Bytes of a model's weights; `None` if no memory could hold them.
pub(super) fn weights_bytes(spec: &DecoderSpec) -> Option<usize> {
    Layout::new(spec).map(|layout| layout.bytes)
}

/// The linear layers of one block.
#[derive(Debug)]
pub(super) struct GpuLinears {
    pub(super) qkv: GpuLinear,
    pub(super) output: GpuLinear,
    pub(super) gate_up: GpuLinear,
    pub(super) down: GpuLinear,
}

impl GpuWeights {
    /// Loads the weights of a model directory or a GGUF file; `progress` hears of every few megabytes.
    ///
    /// # Errors
    /// [`ModelError`], which names what is at fault. [`ModelError::Oom`] if the weights do not fit.
    pub fn load(
        path: &Path,
        format: LoadFormat,
        gpu: &Gpu,
        kernels: &FusedKernels,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<Self, ModelError> {
        Self::load_described(
            &Description::read(path, ServeAs::default())?,
            format,
            gpu,
            kernels,
            progress,
        )
    }

    /// As [`Self::load`], of a model that is already described.
    pub(crate) fn load_described(
        description: &Description,
        format: LoadFormat,
        gpu: &Gpu,
        kernels: &FusedKernels,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<Self, ModelError> {
        let spec = &description.config.spec;
        let source = description.source(format)?;
        let mut tensors = Checked::new(&*source);
        let mut done = Progress {
            done: 0,
            total: tensors.total_bytes(),
        };
        let layout = Layout::new(spec);
        let bytes = layout.as_ref().map_or(u64::MAX, |layout| layout.bytes as u64);
        let Some(layout) = layout.filter(|_| bytes <= gpu.info().total_bytes) else {
            return Err(gpu.budget().oom(Component::Weights, bytes).into());
        };
        let jobs = match format {
            LoadFormat::Auto => jobs(&mut tensors, layout.parts(spec)),
            // Matrices are made on the device.
            LoadFormat::Dummy { .. } => jobs(
                &mut tensors,
                layout.parts(spec).filter(|part| part.cols.is_none()),
            ),
        }?;
        let factors = rope_factors(&mut tensors, spec)?;
        tensors.finish()?;

        let slab = gpu.alloc(Component::Weights, layout.bytes)?;
        let weights = Self {
            spec: spec.clone(),
            layout,
            slab: Arc::new(slab),
        };
        let frequencies = spec.rope.scaled_frequencies(spec.head_dim, factors.as_deref());
        gpu.upload(&rope_turns(&frequencies), weights.turns())?;
        if let LoadFormat::Dummy { seed } = format {
            weights.fill_matrices(kernels, seed)?;
            gpu.synchronize()?;
        }
        transfer(gpu, &weights.slab, &jobs, |bytes| {
            done.done += bytes as u64;
            progress(done);
        })?;
        Ok(weights)
    }

    /// Random matrices that keep the variance of what they are applied to.
    fn fill_matrices(&self, kernels: &FusedKernels, seed: u64) -> Result<(), GpuError> {
        let matrices = self.layout.parts(&self.spec);
        for (index, part) in (0_u64..).zip(matrices) {
            if let Some(inputs) = part.cols {
                let span = Span {
                    start: part.start,
                    len: part.bytes(),
                };
                kernels.fill_random(
                    self.view(span),
                    seed.wrapping_add(index),
                    1.0 / (inputs as f32).sqrt(),
                )?;
            }
        }
        Ok(())
    }

    /// The network.
    pub fn spec(&self) -> &DecoderSpec {
        &self.spec
    }

    /// Bytes of device memory.
    pub fn bytes(&self) -> usize {
        self.slab.bytes()
    }

    /// `[vocab, hidden]`.
    pub fn embedding(&self) -> GpuSlice<'_, bf16> {
        self.view(self.layout.embedding)
    }

    /// `[vocab, hidden]`: the embedding's memory where tied; a model for embeddings has none.
    pub fn lm_head(&self) -> Option<GpuSlice<'_, bf16>> {
        self.layout.lm_head.map(|span| self.view(span))
    }

    /// `[hidden]`.
    pub fn final_norm(&self) -> GpuSlice<'_, f32> {
        self.view(self.layout.final_norm)
    }

    /// The rotary frequencies as [`rope_turns`], `[head_dim / 2, 2]`.
    pub fn turns(&self) -> GpuSlice<'_, f32> {
        self.view(self.layout.turns)
    }

    /// Block `index`.
    ///
    /// # Panics
    /// If there is none.
    pub fn layer(&self, index: usize) -> GpuLayer<'_> {
        assert!(
            index < self.spec.num_layers,
            "block {index} of {}",
            self.spec.num_layers
        );
        let (layer, base) = (&self.layout.layer, self.layout.layer_start(index));
        let matrix = |span: Span| self.view(span.after(base));
        let norm = |span: Span| self.view(span.after(base));
        GpuLayer {
            attention_norm: norm(layer.attention_norm),
            qkv: matrix(layer.qkv),
            qkv_bias: layer.qkv_bias.map(matrix),
            qk_norm: layer.qk_norm.map(|norms| norms.map(norm)),
            output: matrix(layer.output),
            mlp_norm: norm(layer.mlp_norm),
            gate_up: matrix(layer.gate_up),
            down: matrix(layer.down),
            window: self.spec.window(index),
        }
    }

    /// The linear layers of block `index`.
    pub(super) fn linears(&self, index: usize) -> GpuLinears {
        let (layer, base) = (&self.layout.layer, self.layout.layer_start(index));
        let spec = &self.spec;
        let (hidden, inner, q) = (spec.hidden_size, spec.intermediate_size, spec.q_size());
        let linear = |weight: Span, bias: Option<Span>, n, k| {
            let part = |span: Span| self.weight(span.after(base));
            GpuLinear::new(part(weight), bias.map(part), n, k)
        };
        GpuLinears {
            qkv: linear(layer.qkv, layer.qkv_bias, q + 2 * spec.kv_size(), hidden),
            output: linear(layer.output, None, hidden, q),
            gate_up: linear(layer.gate_up, None, 2 * inner, hidden),
            down: linear(layer.down, None, hidden, inner),
        }
    }

    /// The linear layer from the last norm to logits, if there is one.
    pub(super) fn head(&self) -> Option<GpuLinear> {
        let (vocab, hidden) = (self.spec.vocab_size, self.spec.hidden_size);
        let span = self.layout.lm_head?;
        Some(GpuLinear::new(self.weight(span), None, vocab, hidden))
    }

    fn weight(&self, span: Span) -> GpuWeight {
        let element = size_of::<bf16>();
        GpuWeight::new(
            &self.slab,
            span.start / element..(span.start + span.len) / element,
        )
    }

    fn view<T: Pod>(&self, span: Span) -> GpuSlice<'_, T> {
        self.slab.slice::<u8>().range(span.range()).cast()
    }
}

fn jobs<'a>(
    tensors: &mut Checked<'a>,
    parts: impl Iterator<Item = Part>,
) -> Result<Vec<Job<'a>>, ModelError> {
    parts
        .map(|part| Job::new(tensors.tensor(&part.name, &part.shape())?, part))
        .collect()
}

fn rope_factors(tensors: &mut Checked<'_>, spec: &DecoderSpec) -> Result<Option<Vec<f32>>, ModelError> {
    let Vector { name, len } = OuterTensors::new(spec).rope_factors;
    let tensor = tensors.optional(&name, &[len])?;
    tensor.map(|tensor| tensor.widen()).transpose()
}
