//! Where each weight lies in the one piece of memory, and which stored tensors go there.

use std::ops::Range;

use half::bf16;

use crate::DecoderSpec;

/// Alignment of every weight, in bytes: that of a line of L2, and what bulk copies and tensor maps ask for.
const ALIGN: usize = 256;

/// A place in device memory, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Span {
    pub(super) start: usize,
    pub(super) len: usize,
}

impl Span {
    pub(super) fn range(self) -> Range<usize> {
        self.start..self.start + self.len
    }
}

/// Places of all weights.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Layout {
    pub(super) frequencies: Span,
    pub(super) embedding: Span,
    pub(super) lm_head: Span,
    pub(super) layers: Vec<LayerLayout>,
    pub(super) final_norm: Span,
}

/// Places of one block's weights; see [`super::GpuLayer`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct LayerLayout {
    pub(super) attention_norm: Span,
    pub(super) qkv: Span,
    pub(super) qkv_bias: Option<Span>,
    pub(super) qk_norm: Option<[Span; 2]>,
    pub(super) output: Span,
    pub(super) mlp_norm: Span,
    pub(super) gate_up: Span,
    pub(super) down: Span,
}

/// A stored tensor that is copied to the device: `[rows, cols]`, or a vector of `rows` where `cols` is `None`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Part {
    /// As Hugging Face checkpoints call it.
    pub(super) name: String,
    pub(super) rows: usize,
    pub(super) cols: Option<usize>,
    /// Where its first element goes, in bytes.
    pub(super) start: usize,
}
