//! The blocks' operations of an encoder as launches.

use half::bf16;
use plimsoll_core::ImageGrid;
use plimsoll_device::cuda::{Gpu, GpuError, GpuSlice};
use plimsoll_kernels::Gelu;
use plimsoll_kernels::cuda::{
    AllReduce, EncoderKernels, FusedKernels, GpuLayerNorm, GpuLinear, GpuNorm, KeptRows, Linears,
    PatchAttention, PatchGrid, PatchSegments,
};

use std::ops::Range;

use super::layout::Part;
use crate::blocks::{EncoderLayer, EncoderNorm, EncoderOperations, Merger};
use crate::cuda::weights::{GpuEncoderWeights, GpuVector};
use crate::encoder::PAGE;
use crate::{EncoderMlp, EncoderSpec};

/// What multiplies with which weights.
#[derive(Clone, Copy, Debug)]
pub(in crate::cuda) struct Products<'a> {
    pub(in crate::cuda) linears: &'a Linears,
    pub(in crate::cuda) weights: &'a GpuEncoderWeights,
    /// Norms without a mean.
    pub(in crate::cuda) fused: &'a FusedKernels,
    /// Where GPUs meet, if there are several: each encodes all of an image.
    pub(in crate::cuda) all_reduce: Option<&'a AllReduce>,
}

/// Whether nothing is left to be added to the residual stream before this layer: rows were made of it.
pub(super) fn is_added(spec: &EncoderSpec, layer: usize) -> bool {
    layer
        .checked_sub(1)
        .is_none_or(|before| spec.features.contains(&before))
}

/// The activations of one image.
pub(super) struct Step<'a> {
    pub(super) gpu: &'a Gpu,
    pub(super) spec: &'a EncoderSpec,
    pub(super) kernels: &'a EncoderKernels,
    pub(super) products: Products<'a>,
    pub(super) grid: ImageGrid,
    /// Rows that it becomes.
    pub(super) rows: usize,
    /// Of each layer.
    pub(super) parts: Vec<Part>,
    /// Nothing is to be added to the residual stream.
    pub(super) is_added: bool,
    pub(super) hidden: GpuSlice<'a, bf16>,
    pub(super) normed: GpuSlice<'a, bf16>,
    pub(super) delta: GpuSlice<'a, bf16>,
    pub(super) wide: GpuSlice<'a, bf16>,
    pub(super) inner: GpuSlice<'a, bf16>,
    pub(super) activated: GpuSlice<'a, bf16>,
    pub(super) angles: GpuSlice<'a, f32>,
    pub(super) merged: GpuSlice<'a, bf16>,
    pub(super) pages: GpuSlice<'a, i32>,
    /// Which of the image's rows each is, where windows are one after the other.
    pub(super) order: Option<GpuSlice<'a, i32>>,
    /// Where windows begin, and where the last ends.
    pub(super) windows: GpuSlice<'a, i32>,
    /// Patches of the largest of them.
    pub(super) largest_window: usize,
    pub(super) kept: KeptRows<'a>,
}

impl<'a> Step<'a> {
    /// Turns the pixels of patches into the values that the encoder reads.
    pub(super) fn read_patches(
        &self,
        pixels: GpuSlice<'_, u8>,
        levels: GpuSlice<'_, f32>,
    ) -> Result<(), GpuError> {
        let shape = self.spec.input.patch;
        let values = self.wide(shape.values());
        self.kernels
            .read_patches(pixels, levels, shape, self.patch_grid(), values)
    }

    /// Computes the angles of all patches, if they turn.
    pub(super) fn find_angles(&self) -> Result<(), GpuError> {
        let (grid, shift) = (self.patch_grid(), self.spec.family.column_shift);
        self.spec.theta.map_or(Ok(()), |theta| {
            self.kernels.patch_angles(grid, theta, shift, self.angles)
        })
    }

    fn patch_grid(&self) -> PatchGrid<'a> {
        PatchGrid {
            patches: self.grid.patches(),
            height: self.grid.height,
            width: self.grid.width,
            merge: self.spec.together(),
            order: self.order,
        }
    }

    /// The first elements of the widest activation: as many as all patches have of this width.
    fn wide(&self, width: usize) -> GpuSlice<'a, bf16> {
        self.wide.range(0..self.grid.patches() * width)
    }

    /// The norm of the residual stream, to which what is left is added first.
    fn norm(&mut self, norm: &EncoderNorm<GpuVector>) -> Result<(), GpuError> {
        let is_added = std::mem::replace(&mut self.is_added, true);
        self.norm_of(norm, 0..self.grid.patches(), !is_added, self.normed)
    }

    /// The same of some patches, to their rows of `out`.
    fn norm_of(
        &self,
        norm: &EncoderNorm<GpuVector>,
        patches: Range<usize>,
        is_left: bool,
        out: GpuSlice<'a, bf16>,
    ) -> Result<(), GpuError> {
        let Some(bias) = &norm.bias else {
            return self.rms_norm_of(&norm.weight, self.spec.eps, patches, is_left, out);
        };
        let of = |x| self.rows_of(x, &patches);
        let weights = GpuLayerNorm {
            weight: norm.weight.slice(),
            bias: bias.slice(),
            eps: self.spec.eps,
        };
        let delta = is_left.then(|| of(self.delta));
        self.kernels.layer_norm(of(self.hidden), delta, weights, of(out))
    }

    /// The same by the root of the mean square.
    fn rms_norm_of(
        &self,
        weight: &GpuVector,
        eps: f32,
        patches: Range<usize>,
        is_left: bool,
        out: GpuSlice<'a, bf16>,
    ) -> Result<(), GpuError> {
        let of = |x| self.rows_of(x, &patches);
        let weight = weight.slice();
        let norm = GpuNorm { weight, eps };
        let fused = self.products.fused;
        match is_left {
            true => fused.add_rms_norm(of(self.hidden), of(self.delta), norm, of(out)),
            false => fused.rms_norm(of(self.hidden), norm, of(out)),
        }
    }

    /// Rows of an activation of `[patches, hidden_size]`.
    fn rows_of(&self, x: GpuSlice<'a, bf16>, patches: &Range<usize>) -> GpuSlice<'a, bf16> {
        let width = self.spec.hidden_size;
        x.range(patches.start * width..patches.end * width)
    }

    fn linear(
        &self,
        x: GpuSlice<'_, bf16>,
        linear: &GpuLinear,
        out: GpuSlice<'_, bf16>,
    ) -> Result<(), GpuError> {
        self.products.linears.forward(x, linear, out)
    }

    /// Chips of one kind may compute a product in different ways, which differ in the last bits, and ranks that sample different tokens
    /// are an error. So all take the rows of the first: a sum with zeros is exact.
    fn take_rows_of_first_rank(&self) -> Result<(), GpuError> {
        let Some(all_reduce) = self.products.all_reduce else {
            return Ok(());
        };
        if all_reduce.rank() > 0 {
            self.gpu.fill(self.merged.cast(), 0)?;
        }
        all_reduce.sum(self.merged)
    }
}

impl EncoderOperations<GpuLinear, GpuVector> for Step<'_> {
    type Error = GpuError;

    fn embed(&mut self, patches: &GpuLinear, positions: Option<&GpuVector>) -> Result<(), GpuError> {
        let values = self.wide(self.spec.input.patch.values());
        self.linear(values, patches, self.hidden)?;
        let Some((positions, side)) = positions.zip(self.spec.positions_per_side) else {
            return Ok(());
        };
        self.kernels
            .add_positions(self.hidden, positions.slice(), side, self.patch_grid())
    }

    fn normalise(&mut self, norm: &EncoderNorm<GpuVector>) -> Result<(), GpuError> {
        // Each row is read before it is written.
        self.norm_of(norm, 0..self.grid.patches(), false, self.hidden)
    }

    fn parts(&self) -> usize {
        self.parts.len()
    }

    fn project(&mut self, layer: &EncoderLayer<GpuLinear, GpuVector>) -> Result<(), GpuError> {
        self.norm(&layer.attention_norm)?;
        let qkv = self.wide(3 * self.spec.hidden_size);
        self.linear(self.normed, &layer.qkv, qkv)?;
        if self.spec.theta.is_none() {
            return Ok(());
        }
        let (heads, patches) = (self.spec.heads, self.grid.patches());
        self.kernels.rotate(qkv, heads, self.angles, patches)
    }

    fn attend(&mut self, layer: &EncoderLayer<GpuLinear, GpuVector>, part: usize) -> Result<(), GpuError> {
        let Part { rows, windows } = self.parts[part].clone();
        let (heads, head_dim) = (self.spec.heads, self.spec.head_dim());
        let segments = match layer.is_windowed {
            true => PatchSegments::Between {
                starts: self.windows.range(windows.start..windows.end + 1),
                longest: self.largest_window,
            },
            // Patches of one frame see each other.
            false => PatchSegments::Equal {
                len: self.grid.height * self.grid.width,
                rows: rows.clone(),
            },
        };
        self.kernels.attention(&PatchAttention {
            qkv: self.wide(3 * self.spec.hidden_size),
            heads,
            head_dim,
            segments,
            scale: 1.0 / (head_dim as f32).sqrt(),
            out: self.normed,
        })?;
        let (attended, delta) = (self.rows_of(self.normed, &rows), self.rows_of(self.delta, &rows));
        self.linear(attended, &layer.output, delta)
    }

    fn mlp(&mut self, layer: &EncoderLayer<GpuLinear, GpuVector>, part: usize) -> Result<(), GpuError> {
        let rows = self.parts[part].rows.clone();
        self.norm_of(&layer.mlp_norm, rows.clone(), true, self.normed)?;
        let width = self.spec.intermediate_size;
        let (normed, delta) = (self.rows_of(self.normed, &rows), self.rows_of(self.delta, &rows));
        let activated = match self.spec.mlp {
            EncoderMlp::Plain(form) => {
                let inner = self.inner.range(0..rows.len() * width);
                self.linear(normed, &layer.up, inner)?;
                self.kernels.gelu(form, inner)?;
                inner
            }
            EncoderMlp::Gated(activation) => {
                let inner = self.inner.range(0..rows.len() * 2 * width);
                let activated = self.activated.range(0..rows.len() * width);
                self.linear(normed, &layer.up, inner)?;
                self.kernels.glu(activation, inner, width, activated)?;
                activated
            }
        };
        // Of the last part, that of all of them.
        self.is_added = false;
        self.linear(activated, &layer.down, delta)
    }

    fn merge(&mut self, merger: &Merger<GpuLinear, GpuVector>, column: usize) -> Result<(), GpuError> {
        let (hidden, out) = (self.spec.hidden_size, self.spec.out_size);
        let squares = [hidden, self.grid.width, self.spec.input.merge];
        match merger {
            Merger::Mlp { norm, up, down } => {
                // Merged patches are neighbours in memory: a norm of them is one of wider rows.
                self.norm(norm)?;
                self.linear(self.normed, up, self.delta)?;
                self.kernels.gelu(Gelu::Exact, self.delta)?;
                self.linear(self.delta, down, self.merged)?;
            }
            Merger::Mean {
                last_norm,
                norm,
                projection,
            } => {
                self.norm(last_norm)?;
                let [mean, normed] = [self.delta, self.normed].map(|x| x.range(0..self.rows * hidden));
                self.kernels.average_squares(self.normed, squares, mean)?;
                let norm = GpuNorm {
                    weight: norm.slice(),
                    eps: self.spec.merger_eps,
                };
                self.products.fused.rms_norm(mean, norm, normed)?;
                self.linear(normed, projection, self.merged)?;
            }
            Merger::Projected {
                norm,
                merge,
                up,
                down,
            } => {
                let is_added = std::mem::replace(&mut self.is_added, true);
                let (eps, all) = (self.spec.merger_eps, 0..self.grid.patches());
                self.rms_norm_of(norm, eps, all, !is_added, self.normed)?;
                self.kernels.gather_squares(self.normed, squares, self.delta)?;
                let joined = self.normed.range(0..self.rows * hidden);
                self.linear(self.delta, merge, joined)?;
                let inner = self.wide.range(0..self.rows * out);
                self.linear(joined, up, inner)?;
                self.kernels.gelu(Gelu::Exact, inner)?;
                self.linear(inner, down, self.merged)?;
            }
        }
        self.take_rows_of_first_rank()?;
        let kept = KeptRows {
            column: column * out,
            ..self.kept
        };
        self.kernels
            .keep_rows(self.merged, self.rows, self.order, (self.pages, PAGE), kept)
    }
}
