//! From stored tensors to charged weights: [`Source`] gives tensors, [`Checked`] checks them, [`Loader`] packs them for the
//! CPU. [`crate::blocks`] says which there are.

mod checked;
mod dummy;
mod fp8;
mod gguf;
mod int4;
mod loader;
mod mxfp4;
mod rows;
mod safetensors;
mod scoring;
mod share;

use std::borrow::Cow;
use std::ops::Range;

use half::{bf16, f16};
use plimsoll_kernels::{Matrix, WeightError, WeightType};

use crate::blocks::RowOrder;
use crate::{ModelError, Shape};

pub(crate) use checked::Checked;
#[cfg(test)]
pub(crate) use checked::int4_tests;
pub(crate) use dummy::{DUMMY_SCALE, DummyWeights, mix};
pub(crate) use fp8::{Beside, Scales, StoredMatrix};
pub(crate) use gguf::GgufWeights;
pub(crate) use int4::{Int4, code as int4_code};
pub(crate) use loader::Loader;
pub(crate) use safetensors::Checkpoint;

/// Where tensors come from. Names are those of Hugging Face checkpoints; a source translates.
pub(crate) trait Source {
    /// Whether there is a tensor of this name.
    fn has(&self, name: &str) -> bool;

    /// The tensor, if there is one. `expected` is for sources that make tensors up; the caller compares shapes.
    fn tensor(&self, name: &str, expected: &[usize]) -> Result<Option<Tensor<'_>>, ModelError>;

    /// Names of all tensors, as the source calls them.
    fn names(&self) -> Vec<String>;

    /// Bytes of all tensors; 0 if unknown.
    fn total_bytes(&self) -> u64;

    /// Norms that checkpoints store less 1 are stored whole.
    fn has_whole_norms(&self) -> bool {
        false
    }

    /// What the source calls a tensor.
    fn stored_name(&self, name: &str) -> String {
        name.to_owned()
    }
}

/// A tensor as it is stored.
#[derive(Debug)]
pub(crate) struct Tensor<'a> {
    pub(crate) name: String,
    pub(crate) dtype: WeightType,
    pub(crate) shape: Shape,
    pub(crate) order: RowOrder,
    /// Stored less 1: a vector's elements are 1 more than is stored.
    pub(crate) unit_offset: bool,
    pub(crate) data: Cow<'a, [u8]>,
}

impl<'a> Tensor<'a> {
    /// With its rows in their order, and its elements as they are.
    fn plain(name: &str, dtype: WeightType, shape: &[usize], data: impl Into<Cow<'a, [u8]>>) -> Self {
        Self {
            name: name.to_owned(),
            dtype,
            shape: Shape(shape.to_vec()),
            order: RowOrder::Plain,
            unit_offset: false,
            data: data.into(),
        }
    }
}

impl Tensor<'_> {
    /// The stored rows of a tensor of two dimensions, also those between its own.
    pub(crate) fn matrix(&self) -> Result<Matrix<'_>, ModelError> {
        let (mut rows, mut cols) = (self.shape.0[0], self.shape.0[1]);
        match self.order {
            RowOrder::Plain | RowOrder::Interleaved { .. } | RowOrder::Grouped { .. } => {}
            RowOrder::Among(among) => rows = among.all,
            RowOrder::Columns(among) => (rows, cols) = (cols, among.all),
        }
        Matrix::new(self.dtype, rows, cols, &self.data).map_err(|error| weight_error(error, &self.name))
    }

    /// An element of a tensor of floats of 16 bits or 32.
    ///
    /// # Panics
    /// If it is none, or has fewer elements.
    pub(crate) fn element(&self, index: usize) -> f32 {
        match self.dtype {
            WeightType::F32 => f32::from_le_bytes(self.data.as_chunks().0[index]),
            WeightType::F16 => f16::from_le_bytes(self.data.as_chunks().0[index]).to_f32(),
            WeightType::Bf16 => bf16::from_le_bytes(self.data.as_chunks().0[index]).to_f32(),
            other => unreachable!("an element of {other:?}"),
        }
    }

    /// Elements of a row of a float matrix.
    ///
    /// # Panics
    /// If it has no such row.
    pub(crate) fn float_row(&self, row: usize) -> Result<Vec<f32>, ModelError> {
        let bytes = self.data.len() / self.shape.0[0];
        let own = row * bytes..(row + 1) * bytes;
        Tensor::plain(&self.name, self.dtype, &self.shape.0[1..], &self.data[own]).widen()
    }

    /// Elements of a float vector.
    pub(crate) fn widen(&self) -> Result<Vec<f32>, ModelError> {
        let data = &self.data;
        let mut values = match self.dtype {
            WeightType::F32 => elements(data, f32::from_le_bytes),
            WeightType::F16 => elements(data, |bytes| f16::from_le_bytes(bytes).to_f32()),
            WeightType::Bf16 => elements(data, |bytes| bf16::from_le_bytes(bytes).to_f32()),
            other => {
                return Err(ModelError::TensorType {
                    name: self.name.clone(),
                    found: format!("{other:?}"),
                    supported: "F32, F16 and BF16, as this is a vector",
                });
            }
        };
        if self.unit_offset {
            values.iter_mut().for_each(|value| *value += 1.0);
        }
        Ok(values)
    }
}

/// A part of stored bytes, which are not copied where they are borrowed.
fn slice(data: Cow<'_, [u8]>, part: Range<usize>) -> Cow<'_, [u8]> {
    match data {
        Cow::Borrowed(data) => Cow::Borrowed(&data[part]),
        Cow::Owned(data) => Cow::Owned(data[part].to_vec()),
    }
}

fn elements<const N: usize>(data: &[u8], element: impl Fn([u8; N]) -> f32) -> Vec<f32> {
    data.as_chunks().0.iter().map(|&bytes| element(bytes)).collect()
}

fn weight_error(error: WeightError, name: &str) -> ModelError {
    match error {
        WeightError::Oom(oom) => ModelError::Oom(oom),
        other => ModelError::Weights {
            name: name.to_owned(),
            message: other.to_string(),
        },
    }
}

/// How far loading has got.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoadProgress {
    /// Bytes of stored weights dealt with.
    pub done: u64,
    /// Bytes of all stored weights; 0 for made-up ones.
    pub total: u64,
}
