//! Stored matrices, with what belongs to their elements, and those in eight bits.

use half::bf16;
use plimsoll_kernels::{WeightType, e4m3_to_f32};
use rayon::prelude::*;

use super::int4::Int4;
use super::{Tensor, mxfp4};
use crate::ModelError;
use crate::blocks::Matrix;
use crate::quantization::{FP8_BLOCK, Fp8Scales};

/// A matrix as it is stored.
#[derive(Debug)]
pub(crate) struct StoredMatrix<'a> {
    /// Its elements, or their codes.
    pub(crate) tensor: Tensor<'a>,
    pub(crate) beside: Beside<'a>,
}

/// What belongs to the elements of a matrix.
#[derive(Debug)]
pub(crate) enum Beside<'a> {
    /// Nothing: they are floats, or in blocks of ggml's.
    Nothing,
    /// Of one in eight bits.
    Scales(Scales),
    /// Of one in MXFP4: a byte for each block of its rows, which lie as the tensor's do.
    Exponents(Tensor<'a>),
    /// Of one in integers of four bits.
    Int4(Int4<'a>),
}

/// The scales of a matrix, `[rows, cols]`, each for a block of its elements.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Scales {
    values: Vec<f32>,
    cols: usize,
    /// Rows and columns of a block.
    block: [usize; 2],
}

impl Scales {
    /// `values` are as many as there are blocks.
    pub(crate) fn new(values: Vec<f32>, scales: Fp8Scales, matrix: &Matrix) -> Self {
        let [rows, cols] = scales.shape(matrix.outputs, matrix.inputs);
        assert_eq!(values.len(), rows * cols, "scales of `{}`", matrix.module);
        let block = match scales {
            Fp8Scales::Tensor => matrix.shape(),
            Fp8Scales::Channel => [1, matrix.inputs],
            Fp8Scales::Block => [FP8_BLOCK; 2],
        };
        Self { values, cols, block }
    }

    /// Those of one row of the matrix, each for as many elements as a block has columns.
    pub(crate) fn of_row(&self, row: usize) -> &[f32] {
        &self.values[row / self.block[0] * self.cols..][..self.cols]
    }

    /// Elements of a row of codes.
    pub(crate) fn widen(&self, row: usize, codes: &[u8]) -> impl Iterator<Item = f32> {
        let scales = self.of_row(row);
        let width = self.block[1];
        let scaled = move |(index, code): (usize, &u8)| e4m3_to_f32(*code) * scales[index / width];
        codes.iter().enumerate().map(scaled)
    }
}

impl<'a> StoredMatrix<'a> {
    /// In which a CPU keeps it.
    pub(crate) fn kept_type(&self) -> WeightType {
        match self.beside {
            Beside::Scales(_) | Beside::Int4(_) => WeightType::Bf16,
            Beside::Exponents(_) => WeightType::Mxfp4,
            Beside::Nothing => self.tensor.dtype,
        }
    }

    /// In a type that a CPU computes with, its rows one after another: eight bits times scales become `bf16`, and so do integers
    /// of four.
    ///
    /// # Errors
    /// [`ModelError::Weights`] where a scale of these is no number.
    pub(crate) fn dequantised(self) -> Result<Tensor<'a>, ModelError> {
        let dtype = self.kept_type();
        let scales = match self.beside {
            Beside::Nothing => return Ok(self.tensor.in_order()),
            Beside::Exponents(exponents) => {
                return Ok(mxfp4::in_blocks(self.tensor.in_order(), exponents.in_order()));
            }
            Beside::Int4(int4) => return int4.dequantised(self.tensor),
            Beside::Scales(scales) => scales,
        };
        let inputs = self.tensor.shape.0[1];
        let row_bytes = inputs * size_of::<bf16>();
        let mut rounded = vec![0; self.tensor.data.len() * size_of::<bf16>()];
        let rows = self.tensor.data.par_chunks_exact(inputs);
        let pairs = rows.zip(rounded.par_chunks_exact_mut(row_bytes));
        pairs.enumerate().for_each(|(row, (codes, out))| {
            for (out, value) in out.as_chunks_mut().0.iter_mut().zip(scales.widen(row, codes)) {
                *out = bf16::from_f32(value).to_le_bytes();
            }
        });
        let rounded = Tensor {
            dtype,
            data: rounded.into(),
            ..self.tensor
        };
        Ok(rounded.in_order())
    }
}
