//! The decoder's weights in device memory.

mod layout;

use half::bf16;
use plimsoll_device::cuda::{GpuSlab, GpuSlice};

use crate::DecoderSpec;
use layout::{Layout, Span};

/// All weights of a decoder on a GPU, in one piece of memory: `bf16`, matrices row-major, `[outputs, inputs]`.
#[derive(Debug)]
pub struct GpuWeights {
    spec: DecoderSpec,
    layout: Layout,
    slab: GpuSlab,
}

/// Views of one block's weights.
#[derive(Clone, Copy, Debug)]
pub struct GpuLayer<'a> {
    /// `[hidden]`.
    pub attention_norm: GpuSlice<'a, bf16>,
    /// q, k and v, stacked: `[q_size + 2 * kv_size, hidden]`.
    pub qkv: GpuSlice<'a, bf16>,
    /// `[q_size + 2 * kv_size]`.
    pub qkv_bias: Option<GpuSlice<'a, bf16>>,
    /// Norms of the heads of q and of k, `[head_dim]` each.
    pub qk_norm: Option<[GpuSlice<'a, bf16>; 2]>,
    /// `[hidden, q_size]`.
    pub output: GpuSlice<'a, bf16>,
    /// `[hidden]`.
    pub mlp_norm: GpuSlice<'a, bf16>,
    /// Gate and up, stacked: `[2 * inner, hidden]`.
    pub gate_up: GpuSlice<'a, bf16>,
    /// `[hidden, inner]`.
    pub down: GpuSlice<'a, bf16>,
    /// Tokens attention sees; `None` is all.
    pub window: Option<usize>,
}

impl GpuWeights {
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

    /// `[vocab, hidden]`: the embedding's memory where tied.
    pub fn lm_head(&self) -> GpuSlice<'_, bf16> {
        self.view(self.layout.lm_head)
    }

    /// `[hidden]`.
    pub fn final_norm(&self) -> GpuSlice<'_, bf16> {
        self.view(self.layout.final_norm)
    }

    /// Radians per position of each pair of a head's elements, `[head_dim / 2]`.
    pub fn frequencies(&self) -> GpuSlice<'_, f32> {
        self.slab.slice::<u8>().range(self.layout.frequencies.range()).cast()
    }

    /// Block `index`.
    ///
    /// # Panics
    /// If there is none.
    pub fn layer(&self, index: usize) -> GpuLayer<'_> {
        let layer = &self.layout.layers[index];
        let view = |span: Span| self.view(span);
        GpuLayer {
            attention_norm: view(layer.attention_norm),
            qkv: view(layer.qkv),
            qkv_bias: layer.qkv_bias.map(view),
            qk_norm: layer.qk_norm.map(|norms| norms.map(view)),
            output: view(layer.output),
            mlp_norm: view(layer.mlp_norm),
            gate_up: view(layer.gate_up),
            down: view(layer.down),
            window: self.spec.window(index),
        }
    }

    fn view(&self, span: Span) -> GpuSlice<'_, bf16> {
        self.slab.slice::<u8>().range(span.range()).cast()
    }
}
