//! What the element-wise kernels take.

use plimsoll_device::cuda::{Arg, GpuSlice};

use super::int;
use crate::cuda::GpuKv;
use crate::{CachedValues, QueryScale};

/// Input tokens of a step.
#[derive(Clone, Copy, Debug)]
pub struct GpuTokens<'a> {
    /// Per row: a token, or `-1 - i` for element `i` of `prev_sampled`.
    pub tokens: GpuSlice<'a, i32>,
    /// Tokens the step before sampled.
    pub prev_sampled: GpuSlice<'a, i32>,
    /// Out: the token each row stands for. May be `tokens` itself.
    pub resolved: GpuSlice<'a, i32>,
}

/// Which tokens a table has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GpuVocabulary {
    /// Tokens of the vocabulary.
    pub all: usize,
    /// The first of the table.
    pub first: usize,
    /// As many are in it.
    pub count: usize,
}

impl GpuVocabulary {
    /// All tokens.
    pub fn whole(all: usize) -> Self {
        Self {
            all,
            first: 0,
            count: all,
        }
    }
}

/// Weight `[n]` of a norm and what is added to the mean square.
///
/// The weight is `f32`: read from the cache it costs little beside the rows, and weights that are stored as their difference
/// from 1 lose nothing when the 1 is added.
#[derive(Clone, Copy, Debug)]
pub struct GpuNorm<'a> {
    /// `[n]`.
    pub weight: GpuSlice<'a, f32>,
    /// Added to the mean square.
    pub eps: f32,
}

/// Norms of the heads of q and k before the rotation (Qwen3), with one `eps`.
#[derive(Clone, Copy, Debug)]
pub struct GpuQkNorm<'a> {
    /// Of every query head, `[head_dim]`.
    pub q: GpuSlice<'a, f32>,
    /// Of every key head, `[head_dim]`.
    pub k: GpuSlice<'a, f32>,
    /// Added to the mean square.
    pub eps: f32,
}

/// Rotary embedding of a step's rows.
#[derive(Clone, Copy, Debug)]
pub struct GpuRope<'a> {
    /// Position of each row: one number, or three with `axes`, `[rows, 3]`.
    pub positions: GpuSlice<'a, i32>,
    /// With which number of a position each pair turns, where there are three.
    pub axes: Option<PairAxes>,
    /// `[pairs, 2]`: frequencies, as [`rope_frequencies`] splits them. Elements beyond `2 × pairs` of a head are not rotated; a layer
    /// without rotary embedding has no pairs.
    pub frequencies: GpuSlice<'a, f32>,
    /// Multiplies cosines and sines ([YaRN](https://arxiv.org/abs/2309.00071)'s attention factor); 1 for none.
    pub factor: f32,
    /// What q is multiplied by.
    pub query_scale: Option<QueryScale>,
}

impl GpuRope<'_> {
    /// Rows that have a position.
    ///
    /// # Panics
    /// If one has some of its numbers.
    pub(in crate::cuda) fn rows(&self) -> usize {
        let numbers = self.axes.map_or(1, |_| PairAxes::NUMBERS);
        assert!(
            self.positions.len().is_multiple_of(numbers),
            "positions of {numbers} numbers"
        );
        self.positions.len() / numbers
    }
}

/// With which of three numbers of a position each pair turns (mRoPE, [Qwen2-VL](https://arxiv.org/abs/2409.12191)): a bit for each
/// that turns with the second, and with the third.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PairAxes {
    second: u128,
    third: u128,
}

impl PairAxes {
    /// Numbers of a position.
    pub const NUMBERS: usize = 3;

    /// Of the number of each pair.
    ///
    /// # Panics
    /// If a number is not below 3, or there are more than 128 pairs, as no head has.
    pub fn new(axes: &[usize]) -> Self {
        assert!(axes.len() <= 128 && axes.iter().all(|&axis| axis < Self::NUMBERS));
        let turning_with = |number: usize| {
            let pairs = axes.iter().enumerate();
            pairs.fold(0, |bits, (pair, &axis)| bits | u128::from(axis == number) << pair)
        };
        Self {
            second: turning_with(1),
            third: turning_with(2),
        }
    }

    /// `Axes` of `kernels/rope.cu`: numbers of a position, and the bits in words.
    pub(super) fn args(axes: Option<Self>) -> [Arg; 5] {
        let Self { second, third } = axes.unwrap_or(Self { second: 0, third: 0 });
        let numbers = if axes.is_some() { Self::NUMBERS } else { 1 };
        let low = |bits: u128| Arg::from(bits as u64);
        [
            int(numbers),
            low(second),
            low(second >> 64),
            low(third),
            low(third >> 64),
        ]
    }
}

/// Where a layer's keys and values go.
#[derive(Clone, Copy, Debug)]
pub struct GpuKvWrite<'a> {
    /// Beyond 448 times its scale, an element of 8 bits is that.
    pub kv: GpuKv<'a>,
    /// Per row: block × block size + offset, or -1 to write nothing.
    pub slots: GpuSlice<'a, i32>,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Tokens per block.
    pub block_size: usize,
    /// Elements per head: a multiple of 16.
    pub head_dim: usize,
    /// The projection has a gate for each element of q, between q and k.
    pub gated: bool,
    /// What is cached as values; where they are normalised, q and k are too, with the same addend.
    pub values: CachedValues,
}

/// Frequencies in turns per position instead of radians, each as a sum of two `f32` (`[pairs, 2]`, large part first), for
/// [`GpuRope`]: so the kernel can take the fraction of a turn at any position without `f64`, and needs no table of angles.
pub fn rope_frequencies(frequencies: &[f32]) -> Vec<f32> {
    let split = |&frequency: &f32| {
        let per_position = f64::from(frequency) / std::f64::consts::TAU;
        let large = per_position as f32;
        [large, (per_position - f64::from(large)) as f32]
    };
    frequencies.iter().flat_map(split).collect()
}

#[cfg(test)]
mod tests {
    use super::rope_frequencies;

    #[test]
    fn frequencies_keep_48_bits() {
        let frequencies = [1.0f32, 0.333, 1.2e-6, 0.0];
        for (parts, &frequency) in rope_frequencies(&frequencies).chunks_exact(2).zip(&frequencies) {
            let sum = f64::from(parts[0]) + f64::from(parts[1]);
            let exact = f64::from(frequency) / std::f64::consts::TAU;
            assert!((sum - exact).abs() <= exact * 2f64.powi(-47), "{frequency}");
        }
    }
}
