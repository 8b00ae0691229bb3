//! From stored elements to those in device memory.

mod int4;
mod mxfp4;
mod windows;

use std::ops::Range;

use plimsoll_device::cast_slice_mut;
use plimsoll_kernels::{E4M3_MAX, WeightType, e4m3_from_f32};

use super::layout::{Element, Part, Stored};
use crate::ModelError;
use crate::blocks::{Among, Matrix, RowOrder};
use crate::weights::{Beside, Checked, StoredMatrix, Tensor};
use int4::input_order;
pub(super) use int4::widen_int4;
pub(super) use mxfp4::widen_mxfp4;

/// A stored tensor on its way to its place.
#[derive(Debug)]
pub(super) struct Job<'a> {
    tensor: Tensor<'a>,
    /// Of a matrix.
    beside: Beside<'a>,
    /// Which elements of its rows are the rank's, where they are not all.
    columns: Option<Range<usize>>,
    /// Which input each is on the device, where the part has a place for that.
    order: Option<Vec<u32>>,
    part: Part,
}

impl<'a> Job<'a> {
    /// Takes the part's tensors, and checks that [`Self::write_rows`] can do what it has to.
    pub(super) fn new(tensors: &mut Checked<'a>, part: &Part) -> Result<Self, ModelError> {
        let (StoredMatrix { mut tensor, beside }, columns) = match &part.stored {
            Stored::Vector(vector) => {
                let tensor = tensors.vector(vector)?;
                let beside = Beside::Nothing;
                (StoredMatrix { tensor, beside }, None)
            }
            Stored::Matrix(matrix) => tensors.with_whole_rows(matrix)?,
        };
        if matches!(tensor.order, RowOrder::Columns(_)) && part.element != Element::Bf16 {
            tensor = tensor.in_order();
        }
        match (&part.stored, &beside) {
            (Stored::Vector(_), _) => drop(tensor.widen()?),
            (Stored::Matrix(_), Beside::Exponents(_) | Beside::Int4(_)) => {}
            (Stored::Matrix(_), Beside::Nothing | Beside::Scales(_)) => drop(tensor.matrix()?),
        }
        if let Element::Gguf(format) = part.element
            && tensor.dtype != format.dtype()
        {
            return Err(ModelError::Weights {
                name: tensor.name,
                message: format!(
                    "it is in {}, and was in {} when the file was opened: load it again",
                    tensor.dtype.name(),
                    format.dtype().name()
                ),
            });
        }
        let order = match &beside {
            Beside::Int4(int4) => input_order(int4, part, &tensor.name)?,
            _ => None,
        };
        Ok(Self {
            tensor,
            beside,
            columns,
            order,
            part: part.clone(),
        })
    }

    pub(super) fn part(&self) -> &Part {
        &self.part
    }

    /// The stored tensor.
    pub(super) fn name(&self) -> &str {
        &self.tensor.name
    }

    /// Which input each is on the device, where the part has a place for that.
    pub(super) fn order(&self) -> Option<&[u32]> {
        self.order.as_deref()
    }

    /// The type in which a matrix is stored that becomes `bf16`.
    pub(super) fn narrowed_from(&self) -> Option<WeightType> {
        let is_matrix = matches!(self.part.stored, Stored::Matrix(_));
        let dtype = self.tensor.dtype;
        (is_matrix && self.part.element == Element::Bf16 && dtype != WeightType::Bf16).then_some(dtype)
    }

    /// Where the stored bytes lie, for going through them in order.
    pub(super) fn address(&self) -> usize {
        self.tensor.data.as_ptr().addr()
    }

    /// Stored bytes of `rows` rows, as far as they are the rank's.
    pub(super) fn stored_bytes(&self, rows: usize) -> usize {
        let of_row = self.tensor.bytes() / self.part.rows();
        let own = self.columns.clone().map(|columns| self.in_bytes(columns).len());
        own.unwrap_or(of_row) * rows
    }

    /// Where some elements of a row lie, which are whole blocks of its type.
    fn in_bytes(&self, columns: Range<usize>) -> Range<usize> {
        let dtype = self.tensor.dtype;
        let at = |column: usize| column / dtype.block_len() * dtype.block_bytes();
        at(columns.start)..at(columns.end)
    }

    /// Writes what a range of rows becomes in device memory, and adds the scales that begin there.
    pub(super) fn write_rows(
        &self,
        rows: Range<usize>,
        out: &mut [u8],
        scales: &mut Vec<f32>,
    ) -> Result<(), ModelError> {
        let Stored::Matrix(Matrix { inputs, .. }) = self.part.stored else {
            let values = &self.tensor.widen()?[rows];
            match self.part.element {
                Element::F32 => cast_slice_mut(out).copy_from_slice(values),
                Element::Bf16 => narrow(values, out),
                Element::Fp8 | Element::Mxfp4 | Element::Int4 | Element::ExpertInt4 | Element::Gguf(_) => {
                    unreachable!("vectors have no scales")
                }
            }
            return Ok(());
        };
        if let Beside::Exponents(exponents) = &self.beside {
            return self.write_mxfp4(exponents, inputs, rows, out);
        }
        if let Beside::Int4(int4) = &self.beside {
            return self.write_int4(int4, rows, out, scales);
        }
        let matrix = self.tensor.matrix()?;
        if let RowOrder::Columns(among) = self.tensor.order {
            write_columns(&matrix, among, rows, out);
            return Ok(());
        }
        let stored = rows.clone().map(|row| self.tensor.order.stored(row));
        let pairs = stored.zip(out.chunks_exact_mut(self.part.row_bytes()));
        let own = |row: usize| match &self.columns {
            None => matrix.row(row),
            Some(columns) => &matrix.row(row)[self.in_bytes(columns.clone())],
        };
        let mut wide = vec![0.0; matrix.cols()];
        let columns = self.columns.clone().unwrap_or(0..inputs);
        match (self.part.element, self.part.scales, &self.beside) {
            (Element::Fp8, Some(place), Beside::Scales(stored)) => {
                pairs.for_each(|(row, out)| out.copy_from_slice(own(row)));
                let firsts = place.first_rows(rows);
                firsts.for_each(|row| place.add_row(stored.of_row(row), scales));
            }
            (Element::Fp8, ..) => {
                for (row, out) in pairs {
                    matrix.widen_row(row, &mut wide);
                    let scale = quantise(&wide[columns.clone()], out).ok_or_else(|| ModelError::Weights {
                        name: self.tensor.name.clone(),
                        message: format!(
                            "row {row} holds an infinite number, which no scale brings into eight bits"
                        ),
                    })?;
                    scales.push(scale);
                }
            }
            (Element::Gguf(format), ..) => {
                pairs.for_each(|(row, out)| format.pack_row(own(row), out));
            }
            _ if matrix.dtype() == WeightType::Bf16 => {
                pairs.for_each(|(row, out)| out.copy_from_slice(own(row)));
            }
            _ => {
                for (row, out) in pairs {
                    matrix.widen_row(row, &mut wide);
                    narrow(&wide[columns.clone()], out);
                }
            }
        }
        Ok(())
    }
}

/// Rows of a matrix that is stored transposed, `[inputs, rows and others]`, as `bf16`.
fn write_columns(stored: &plimsoll_kernels::Matrix<'_>, among: Among, rows: Range<usize>, out: &mut [u8]) {
    let (inputs, element) = (stored.rows(), size_of::<u16>());
    let mut wide = vec![0.0; among.all];
    let mut narrowed = vec![0; among.all * element];
    for input in 0..inputs {
        let column = match stored.dtype() {
            WeightType::Bf16 => stored.row(input),
            _ => {
                stored.widen_row(input, &mut wide);
                narrow(&wide, &mut narrowed);
                &narrowed
            }
        };
        for (index, row) in rows.clone().enumerate() {
            let from = (among.first + row * among.step) * element;
            let to = (index * inputs + input) * element;
            out[to..to + element].copy_from_slice(&column[from..from + element]);
        }
    }
}

/// Rounds a row to the nearest `e4m3` of its elements over a scale, which is returned: that at which the largest magnitude
/// becomes the largest there is. `None` where that magnitude is infinite; one that is not a number stays none.
fn quantise(row: &[f32], out: &mut [u8]) -> Option<f32> {
    let largest = row.iter().fold(0.0, |most: f32, value| most.max(value.abs()));
    if largest.is_infinite() {
        return None;
    }
    // Rows of zeros have a scale too.
    let scale = (largest / E4M3_MAX).max(f32::MIN_POSITIVE);
    let codes = row.iter().map(|value| e4m3_from_f32(value / scale));
    out.iter_mut().zip(codes).for_each(|(out, code)| *out = code);
    Some(scale)
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
    use half::bf16;
    use plimsoll_kernels::e4m3_to_f32;
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

    /// Each element is off by half a unit in the last place at most, which is 1/16 of it, or 2^-10 of the scale if it is small.
    #[test]
    fn quantised_rows_are_the_nearest_within_the_range() {
        let mut rng = StdRng::seed_from_u64(2);
        for spread in [1e-30_f32, 0.02, 1.0, 1e30] {
            let mut row: Vec<f32> = (0..999)
                .map(|_| spread * rng.random_range(-1.0..1.0_f32).powi(3))
                .collect();
            row.push(2.0 * spread);
            let mut out = vec![0; row.len()];
            let scale = quantise(&row, &mut out).unwrap();
            assert_eq!(scale, 2.0 * spread / 448.0);
            assert_eq!(out.last(), Some(&0x7e));
            for (value, code) in row.iter().zip(out) {
                let error = (e4m3_to_f32(code) * scale - value).abs();
                assert!(
                    error <= (value.abs() / 16.0).max(scale / 1024.0) * 1.0001,
                    "{value:e}"
                );
            }
        }
        let mut out = vec![9; 2];
        assert!(quantise(&[0.0, -0.0], &mut out).unwrap() > 0.0);
        assert_eq!(out, [0, 0x80]);
        assert_eq!(quantise(&[0.0, f32::INFINITY], &mut out), None);
        assert!(quantise(&[1.0, f32::NAN], &mut out).is_some());
        assert!(e4m3_to_f32(out[1]).is_nan());
    }
}
