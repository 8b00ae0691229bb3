//! From stored elements to those in device memory.

use std::ops::Range;

use half::bf16;
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
        self.tensor.data.len() / self.part.rows() * rows
    }

    /// Writes what a range of rows becomes in device memory.
    pub(super) fn write_rows(&self, rows: Range<usize>, out: &mut [u8]) -> Result<(), ModelError> {
        let Some(cols) = self.part.cols else {
            let values = &self.tensor.widen()?[rows];
            match self.part.element {
                Element::F32 => cast_slice_mut(out).copy_from_slice(values),
                Element::Bf16 => narrow(values, out),
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
                narrow(&wide, out);
            }
        }
        Ok(())
    }
}

/// Rounds to the nearest `bf16`, ties to even. Without a branch, so that the compiler uses vectors; `half` takes four times
/// as long.
fn narrow(from: &[f32], out: &mut [u8]) {
    for (out, value) in out.as_chunks_mut().0.iter_mut().zip(from) {
        let bits = value.to_bits();
        let tie = bits >> 16 & 1;
        let rounded = bits.wrapping_add(0x7fff + tie) >> 16;
        // Quiet, as the part that is cut off may be all that made it a NaN.
        let nan = bits >> 16 | 0x40;
        let narrow = if value.is_nan() { nan } else { rounded };
        *out = (narrow as u16).to_le_bytes();
    }
}

#[cfg(test)]
mod tests {
    use rand::rngs::StdRng;
    use rand::{Rng, SeedableRng};

    use super::*;

    #[test]
    fn narrowing_is_that_of_half() {
        let edges = [
            0x0000_0000,
            0x8000_0000,
            0x0000_8000,
            0x0001_8000,
            0x3f80_7fff,
            0x3f80_8000,
            0x3f80_8001,
            0x3f81_8000,
            0x7f7f_ffff,
            0x7f80_0000,
            0xff80_0000,
            0x7f80_0001,
            0xffff_ffff,
        ];
        let mut rng = StdRng::seed_from_u64(1);
        let random = std::iter::repeat_with(|| rng.random()).take(1 << 20);
        let values: Vec<f32> = edges.into_iter().chain(random).map(f32::from_bits).collect();
        let mut out = vec![0; 2 * values.len()];
        narrow(&values, &mut out);
        for (value, &found) in values.iter().zip(out.as_chunks().0) {
            let want = bf16::from_f32(*value);
            assert_eq!(bf16::from_le_bytes(found).to_bits(), want.to_bits(), "{value:e}");
        }
    }
}
