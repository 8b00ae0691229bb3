//! What an encoder of images is made of.

pub(crate) mod families;

use plimsoll_core::ImageInput;
use plimsoll_kernels::{Activation, Gelu};

use crate::spec::NormSpec;
pub use families::EncoderFamily;
pub(crate) use families::MergerNames;

/// A vision transformer whose rows take the place of tokens' embeddings: patches are projected and know their places by learned
/// positions or by rotation; in each layer those of one image, or of one window of it, see each other, and in the end
/// `merge × merge` of them become one row.
#[derive(Clone, Debug, PartialEq)]
pub struct EncoderSpec {
    /// What all encoders of its family have in common.
    pub family: &'static EncoderFamily,
    /// The images that it takes.
    pub input: ImageInput,
    /// The shape in which the patches' projection is stored beyond its outputs: channels, frames if a patch has such, rows, columns.
    pub patch_shape: Vec<usize>,
    /// Width of its residual stream.
    pub hidden_size: usize,
    /// Heads of attention.
    pub heads: usize,
    /// Width inside the MLPs.
    pub intermediate_size: usize,
    /// Of the MLPs.
    pub mlp: EncoderMlp,
    /// Layers.
    pub layers: usize,
    /// Added to the variance in the transformer's norms.
    pub eps: f32,
    /// Rows, and columns, of the table of learned positions, where there is one. It is interpolated to the size of the image.
    pub positions_per_side: Option<usize>,
    /// Base of the rotary frequencies, where patches turn by their row and column.
    pub theta: Option<f64>,
    /// Where not all layers see all of an image.
    pub windows: Option<PatchWindows>,
    /// Added to the variance in the norm before rows are made.
    pub merger_eps: f32,
    /// Width of the rows that it makes: that of the decoder's residual stream.
    pub out_size: usize,
    /// Layers, ascending, whose output becomes rows too, which are added to the output of the decoder's first layers
    /// ([DeepStack](https://arxiv.org/abs/2406.04334)).
    pub features: Vec<usize>,
}

/// An encoder's MLP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EncoderMlp {
    /// Up, the activation, down.
    Plain(Gelu),
    /// Gate and up, down.
    Gated(Activation),
}

/// Squares of an image that see each other in most layers ([Qwen2.5-VL](https://arxiv.org/abs/2502.13923)).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PatchWindows {
    /// Rows of the encoder's output along a side of a window; those at the right and the lower edge may be smaller.
    pub side: usize,
    /// Layers in which all patches of an image see each other.
    pub full_layers: Vec<usize>,
}

impl EncoderSpec {
    /// Elements of one head.
    pub fn head_dim(&self) -> usize {
        self.hidden_size / self.heads
    }

    /// Patches that become one row.
    pub(crate) fn merged(&self) -> usize {
        self.input.merge * self.input.merge
    }

    /// Sides of the squares of patches that follow each other in memory.
    pub(crate) fn together(&self) -> usize {
        match self.family.merged_are_together {
            true => self.input.merge,
            false => 1,
        }
    }

    /// Rows of the largest image.
    pub(crate) fn most_rows(&self) -> usize {
        self.input.limits.max_patches / self.merged()
    }

    /// Elements of all that is made of a row: its embedding, and what layers add to it.
    pub(crate) fn row_size(&self) -> usize {
        self.out_size * (1 + self.features.len())
    }

    /// Whether rows are projected by an MLP of their own width.
    pub(crate) fn has_projection(&self) -> bool {
        matches!(self.family.merger, MergerNames::Projected { .. })
    }

    /// Whether patches see no more than their window in this layer.
    pub(crate) fn is_windowed(&self, layer: usize) -> bool {
        let windows = self.windows.as_ref();
        windows.is_some_and(|windows| !windows.full_layers.contains(&layer))
    }

    /// Of the transformer, stored whole.
    pub(crate) fn norm(&self) -> NormSpec {
        NormSpec {
            eps: self.eps,
            unit_offset: false,
        }
    }
}
