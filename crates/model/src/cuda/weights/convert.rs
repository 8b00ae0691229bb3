//! From stored elements to those in device memory.

use std::ops::Range;

use half::bf16;
use half::slice::HalfFloatSliceExt;
use plimsoll_device::cast_slice_mut;
use plimsoll_kernels::WeightType;

use super::layout::{Element, Part};
use crate::ModelError;
use crate::weights::Tensor;

/// A stored tensor on its way to its place.
#[derive(Debug)]
pub(super) struct Job<'a> {
    tensor: Tensor<'a>,
    part: Part,
}

impl<'a> Job<'a> {
    /// Checks that [`Self::write_rows`] can do what it has to.
    pub(super) fn new(tensor: Tensor<'a>, part: Part) -> Result<Self, ModelError> {
        match part.cols {
            Some(_) => drop(tensor.matrix()?),
            None => drop(tensor.widen()?),
        }
        Ok(Self { tensor, part })
    }

    pub(super) fn part(&self) -> &Part {
        &self.part
    }

    /// Where the stored bytes lie, for going through them in order.
    pub(super) fn address(&self) -> usize {
        self.tensor.data.as_ptr().addr()
    }

    /// Stored bytes of `rows` rows.
    pub(super) fn stored_bytes(&self, rows: usize) -> usize {
        self.tensor.data.len() / self.part.rows * rows
    }

    /// Writes what a range of rows becomes in device memory.
    pub(super) fn write_rows(&self, rows: Range<usize>, out: &mut [u8]) -> Result<(), ModelError> {
        let Some(cols) = self.part.cols else {
            let values = &self.tensor.widen()?[rows];
            match self.part.element {
                Element::F32 => cast_slice_mut(out).copy_from_slice(values),
                Element::Bf16 => cast_slice_mut::<_, bf16>(out).convert_from_f32_slice(values),
            }
            return Ok(());
        };
        let matrix = self.tensor.matrix()?;
        let row_bytes = cols * size_of::<bf16>();
        let stored = rows.map(|row| self.tensor.order.stored(row));
        let pairs = stored.zip(out.chunks_exact_mut(row_bytes));
        if matrix.dtype() == WeightType::Bf16 {
            pairs.for_each(|(row, out)| out.copy_from_slice(matrix.row(row)));
        } else {
            let mut wide = vec![0.0; cols];
            for (row, out) in pairs {
                matrix.widen_row(row, &mut wide);
                cast_slice_mut::<_, bf16>(out).convert_from_f32_slice(&wide);
            }
        }
        Ok(())
    }
}
