//! Products of many rows with weights of four bits or in GGUF's types: by cuBLASLt, for which some outputs' weights at a time become
//! `bf16` in room of the caller's.

use half::bf16;
use plimsoll_device::cuda::GpuError;

use super::cublas_lt::{Algorithm, Operands, Shape};
use super::matrix::int4_pitch;
use super::{GpuValues, Key, Linears};

/// Most weights of a matrix that become `bf16` at a time: 128 MiB, so that a product of few rows takes long compared with its launch.
pub const MOST_DEQUANTISED: usize = 64 << 20;
/// The same for products of [`MANY_ROWS`] and more, which fill a GPU with fewer weights too: 16 MiB, which fit in the L2 of
/// an H100 or H200 ([measurements](../../../../../tests/bench/h200/kernels.md)).
const MOST_FOR_MANY_ROWS: usize = 8 << 20;
/// See [`MOST_FOR_MANY_ROWS`].
const MANY_ROWS: usize = 1024;
/// Outputs of a part of a matrix are a multiple of this, but for the last: whole tiles of any product.
const OUTPUTS: usize = 128;

/// Elements of [`LinearRoom::weights`](super::LinearRoom) for a matrix `[n, k]`: all of it, or as many outputs as there may be at a time.
pub fn dequantised_room(n: usize, k: usize) -> usize {
    slice(n, k, MOST_DEQUANTISED).saturating_mul(k)
}

/// Outputs whose weights, at most so many, become `bf16` at a time.
fn slice(n: usize, k: usize, most: usize) -> usize {
    match n.saturating_mul(k) > most {
        true => (most / k / OUTPUTS * OUTPUTS).clamp(OUTPUTS.min(n), n),
        false => n,
    }
}

impl Shape {
    /// Weights become `bf16` before cuBLASLt multiplies them.
    pub(super) fn is_dequantised(&self) -> bool {
        matches!(self.values, GpuValues::Int4(_) | GpuValues::Gguf(_))
    }

    /// The first of the products that cuBLASLt computes for it.
    pub(super) fn first_slice(&self) -> Self {
        let most = match self.m {
            0..MANY_ROWS => MOST_DEQUANTISED,
            _ => MOST_FOR_MANY_ROWS,
        };
        match self.is_dequantised() {
            true => Self {
                n: slice(self.n, self.k, most),
                ..*self
            },
            false => *self,
        }
    }
}

impl Linears {
    /// A product by an algorithm for its first slice.
    ///
    /// # Safety
    /// As [`CublasLt::run`](super::cublas_lt::CublasLt::run), and there is as much room as [`dequantised_room`] says.
    pub(super) unsafe fn dequantised_product(
        &self,
        key: &Key,
        algorithm: &Algorithm,
        operands: &Operands,
    ) -> Result<(), GpuError> {
        let whole = &key.shape;
        let first = whole.first_slice();
        for output in (0..whole.n).step_by(first.n) {
            let shape = Shape {
                n: (whole.n - output).min(first.n),
                ..first
            };
            // SAFETY: the caller's promise, of some of the outputs.
            unsafe { self.dequantise(&shape, output, operands)? };
            let of_slice = Operands {
                weight: operands.room,
                bias: match operands.bias {
                    0 => 0,
                    bias => bias + (output * size_of::<bf16>()) as u64,
                },
                out: operands.out + (output * key.output.bytes()) as u64,
                ..*operands
            };
            // The last is smaller, and what is right for the others may not be for it.
            let other = match shape.n == first.n || self.lt.can(&shape, algorithm) {
                true => None,
                false => self.lt.algorithms(&shape, 1)?.first().copied(),
            };
            let algorithm = other.as_ref().unwrap_or(algorithm);
            // SAFETY: as above.
            unsafe { self.lt.run(&shape, algorithm, &of_slice)? };
        }
        Ok(())
    }

    /// The weights of `shape.n` outputs from `first` on to the room.
    ///
    /// # Safety
    /// As [`Self::dequantised_product`].
    unsafe fn dequantise(&self, shape: &Shape, first: usize, operands: &Operands) -> Result<(), GpuError> {
        let Shape { n, k, .. } = *shape;
        let Operands {
            weight,
            weight_scales,
            room,
            ..
        } = *operands;
        // SAFETY: the caller's promise.
        unsafe {
            match shape.values {
                GpuValues::Int4(group) => {
                    let codes = weight + (first * int4_pitch(k)) as u64;
                    let groups = weight_scales + (first * group.stride(k) * size_of::<u32>()) as u64;
                    self.int4.dequantise([codes, groups, room], [n, k], group)
                }
                GpuValues::Gguf(format) => {
                    let rows = weight + (first * format.pitch(k)) as u64;
                    self.gguf.dequantise([rows, room], [n, k], format)
                }
                GpuValues::Bf16 | GpuValues::Fp8(_) => unreachable!("they are multiplied as they are"),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn room_is_bounded() {
        for (n, k) in [
            (1, 8),
            (4096, 4096),
            (28672, 4096),
            (151_936, 8192),
            (57_344, 28_672),
        ] {
            let room = dequantised_room(n, k);
            assert!(room <= MOST_DEQUANTISED && room <= n * k, "[{n}, {k}]");
            assert!(room == n * k || (room / k).is_multiple_of(OUTPUTS), "[{n}, {k}]");
            assert!(2 * room > MOST_DEQUANTISED.min(n * k), "[{n}, {k}]");
        }
    }
}
