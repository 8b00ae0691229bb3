//! What an encoder of images is made of.

use plimsoll_core::ImageInput;
use plimsoll_kernels::Gelu;

use crate::spec::NormSpec;

/// A vision transformer whose rows take the place of tokens' embeddings
/// ([Qwen3-VL](https://arxiv.org/abs/2511.21631)): patches are projected, get a learned position, interpolated from a square
/// table, and turn by their row and column; in each layer those of one image see each other, and in the end `merge × merge` of
/// them become one row.
#[derive(Clone, Debug, PartialEq)]
pub struct EncoderSpec {
    /// The images that it takes.
    pub input: ImageInput,
    /// The shape in which the patches' projection is stored beyond its outputs: channels, frames, rows, columns.
    pub patch_shape: [usize; 4],
    /// Width of its residual stream.
    pub hidden_size: usize,
    /// Heads of attention.
    pub heads: usize,
    /// Width inside the MLPs.
    pub intermediate_size: usize,
    /// Of the MLPs.
    pub activation: Gelu,
    /// Layers.
    pub layers: usize,
    /// Added to the variance in all norms.
    pub eps: f32,
    /// Rows, and columns, of the table of positions.
    pub positions_per_side: usize,
    /// Base of the rotary frequencies.
    pub theta: f64,
    /// Width of the rows that it makes: that of the decoder's residual stream.
    pub out_size: usize,
    /// Layers, ascending, whose output becomes rows too, which are added to the output of the decoder's first layers
    /// ([DeepStack](https://arxiv.org/abs/2406.04334)).
    pub features: Vec<usize>,
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

    /// Rows of the largest image.
    pub(crate) fn most_rows(&self) -> usize {
        self.input.limits.max_patches / self.merged()
    }

    /// Elements of all that is made of a row: its embedding, and what layers add to it.
    pub(crate) fn row_size(&self) -> usize {
        self.out_size * (1 + self.features.len())
    }

    /// Stored whole.
    pub(crate) fn norm(&self) -> NormSpec {
        NormSpec {
            eps: self.eps,
            unit_offset: false,
        }
    }
}
