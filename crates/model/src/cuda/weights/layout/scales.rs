//! Where scales lie.

use std::ops::Range;

use plimsoll_kernels::cuda::{Fp8Scaling, Int4Group};

use super::Span;
use crate::blocks::Matrix;
use crate::quantization::{FP8_BLOCK, Fp8Scales, Int4Groups, MatrixFormat};

/// Where the scales of a linear layer lie, in rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) struct ScaleSpan {
    pub(in super::super) span: Span,
    pub(in super::super) kept: KeptScales,
}

/// What elements of few bits have scales for on a GPU, which are four bytes each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) enum KeptScales {
    /// Of e4m3, `f32`: one for each output, or `[outputs / 128, inputs / 128]`, one for each block, with padded rows.
    Fp8(Fp8Scales),
    /// Of integers of four bits: for each group of each output a word, which has the zero too.
    Int4(Int4Group),
}

impl KeptScales {
    pub(super) fn of(format: MatrixFormat) -> Option<Self> {
        match format {
            MatrixFormat::Int4(format) => Some(Self::Int4(match format.groups {
                Int4Groups::Of32 => Int4Group::Of32,
                Int4Groups::Of64 => Int4Group::Of64,
                // Several groups of the kernels may have one word.
                Int4Groups::Of128 | Int4Groups::Channel => Int4Group::Of128,
            })),
            other => other.kept_scales().map(Self::Fp8),
        }
    }

    /// Rows and columns, without padding.
    pub(super) fn shape(self, outputs: usize, inputs: usize) -> [usize; 2] {
        match self {
            Self::Fp8(scales) => scales.shape(outputs, inputs),
            Self::Int4(group) => [outputs, group.stride(inputs)],
        }
    }

    /// From the beginning of one row to that of the next.
    pub(super) fn stride(self, inputs: usize) -> usize {
        match self {
            Self::Fp8(Fp8Scales::Tensor | Fp8Scales::Channel) => 1,
            Self::Fp8(Fp8Scales::Block) => Fp8Scaling::Blocks.stride(inputs),
            Self::Int4(group) => group.stride(inputs),
        }
    }
}

/// Where the scales of a part go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) struct ScalePlace {
    /// The first, in bytes.
    start: usize,
    /// Rows of the matrix that share a row of scales.
    height: usize,
    /// Scales in a row.
    cols: usize,
    /// Scales between the beginnings of two rows.
    stride: usize,
}

impl ScalePlace {
    /// For a matrix whose scales begin at a byte.
    pub(super) fn new(scales: KeptScales, matrix: &Matrix, start: usize) -> Self {
        let [_, cols] = scales.shape(matrix.outputs, matrix.inputs);
        let height = match scales {
            KeptScales::Fp8(Fp8Scales::Tensor) => matrix.outputs,
            KeptScales::Fp8(Fp8Scales::Channel) | KeptScales::Int4(_) => 1,
            KeptScales::Fp8(Fp8Scales::Block) => FP8_BLOCK,
        };
        let stride = scales.stride(matrix.inputs);
        Self {
            start,
            height,
            cols,
            stride,
        }
    }

    /// Adds a row of scales as it is kept.
    pub(in super::super) fn add_row(self, row: &[f32], scales: &mut Vec<f32>) {
        scales.extend_from_slice(row);
        scales.resize(scales.len() + self.stride - self.cols, 0.0);
    }

    /// Scales as they are stored, from those that are kept.
    pub(in super::super) fn without_padding(self, kept: &[f32]) -> Vec<f32> {
        let rows = kept.chunks_exact(self.stride);
        rows.flat_map(|row| &row[..self.cols]).copied().collect()
    }

    /// Of these rows of the matrix, the first of each that share a row of scales: those that begin here.
    pub(in super::super) fn first_rows(self, rows: Range<usize>) -> impl Iterator<Item = usize> {
        (rows.start.next_multiple_of(self.height)..rows.end).step_by(self.height)
    }

    /// Place of the scales that begin in these rows.
    pub(in super::super) fn span(self, rows: Range<usize>) -> Span {
        let row_bytes = self.stride * size_of::<f32>();
        let (first, end) = (rows.start.div_ceil(self.height), rows.end.div_ceil(self.height));
        Span {
            start: self.start + first * row_bytes,
            len: (end - first) * row_bytes,
        }
    }
}
