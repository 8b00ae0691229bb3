//! What is done around the recurrence: unit vectors, gates, the gated norm.

use super::DeltaLayout;
use crate::norm::SquareSum;
use crate::parallel::{Disjoint, run_ranges};
use crate::simd::{Kernel, LANES, Level, Simd, dispatch, times_sigmoid};

/// What decides how fast a layer forgets and learns, and the norm of its output.
#[derive(Clone, Copy, Debug)]
pub struct DeltaGates<'a> {
    /// Logarithm of the rate at which each head forgets, `[value_heads]`.
    pub a_log: &'a [f32],
    /// Added to the input of that gate, `[value_heads]`.
    pub dt_bias: &'a [f32],
    /// Of every head of the output, `[value_dim]`.
    pub norm: &'a [f32],
    /// Added to the mean square.
    pub eps: f32,
}

/// The gates of a head at a token.
pub(super) struct Gates {
    /// What is left of the state.
    pub(super) decay: f32,
    /// How much of the new value is learnt.
    pub(super) beta: f32,
}

impl DeltaGates<'_> {
    pub(super) fn check(&self, layout: &DeltaLayout) {
        assert_eq!(
            [self.a_log.len(), self.dt_bias.len(), self.norm.len()],
            [layout.value_heads, layout.value_heads, layout.value_dim],
            "gates of {layout:?}"
        );
    }

    /// `ba` is b and a of one row.
    #[inline(always)]
    pub(super) fn of(&self, head: usize, ba: &[f32]) -> Gates {
        let (b, a) = ba.split_at(self.a_log.len());
        Gates {
            decay: (-self.a_log[head].exp() * softplus(a[head] + self.dt_bias[head])).exp(),
            beta: 1.0 / (1.0 + (-b[head]).exp()),
        }
    }
}

/// `ln(1 + e^x)`, which is `x` where that is all that `f32` can tell, as in PyTorch.
#[inline(always)]
fn softplus(x: f32) -> f32 {
    if x > 20.0 { x } else { x.exp().ln_1p() }
}

/// Scales each vector of `dim` elements to length `scale`.
pub(super) fn normalise(level: Level, vectors: &mut [f32], dim: usize, scale: f32) {
    for vector in vectors.chunks_exact_mut(dim) {
        let square = dispatch(level, SquareSum(vector));
        // Added to the square, as in flash-linear-attention.
        let factor = (square + 1e-6).sqrt().recip() * scale;
        vector.iter_mut().for_each(|x| *x *= factor);
    }
}

/// `out = out / sqrt(mean(out²) + eps) × weight × silu(gate)`: norm before gate.
pub(super) struct GatedNorm<'a> {
    pub(super) weight: &'a [f32],
    pub(super) eps: f32,
    pub(super) gate: &'a [f32],
    pub(super) out: &'a mut [f32],
}

impl Kernel for GatedNorm<'_> {
    type Out = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let Self {
            weight,
            eps,
            gate,
            out,
        } = self;
        // SAFETY: the features are there.
        let square = unsafe { SquareSum(out).run::<S>() };
        let factor = (square / out.len() as f32 + eps).sqrt().recip();
        for (x, weight) in out.iter_mut().zip(weight) {
            *x = *x * factor * weight;
        }
        let times = Times {
            gate,
            out,
            is_silu: true,
        };
        // SAFETY: the features are there.
        unsafe { times.run::<S>() };
    }
}

/// `out × silu(gate)` or `out × sigmoid(gate)`.
struct Times<'a> {
    gate: &'a [f32],
    out: &'a mut [f32],
    is_silu: bool,
}

impl Kernel for Times<'_> {
    type Out = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let Self { gate, out, is_silu } = self;
        for (out, gate) in out.chunks_mut(LANES).zip(gate.chunks(LANES)) {
            let (mut x, mut lanes) = ([0f32; LANES], [0f32; LANES]);
            x[..out.len()].copy_from_slice(out);
            lanes[..gate.len()].copy_from_slice(gate);
            // SAFETY: the features are there, and both are arrays of sixteen.
            unsafe {
                let (value, gate) = (S::load(x.as_ptr()), S::load(lanes.as_ptr()));
                let value = if is_silu { S::mul(value, gate) } else { value };
                S::store(x.as_mut_ptr(), times_sigmoid::<S>(value, gate));
            }
            out.copy_from_slice(&x[..out.len()]);
        }
    }
}

/// Attention's output times the sigmoid of its gates ([gated attention](https://arxiv.org/abs/2505.06708)): `out` is
/// `[tokens, n]`, `gates` are the `n` elements of each of its rows that begin at `first`, and a row of `gates` has `width`.
pub fn sigmoid_gate(out: &mut [f32], n: usize, gates: &[f32], width: usize, first: usize) {
    let rows = out.len() / n;
    assert!(
        first + n <= width && gates.len() == rows * width && out.len() == rows * n,
        "gates for every element"
    );
    let (out, level) = (Disjoint::new(out), Level::detect());
    run_ranges(rows, (8192 / n).max(1), &|rows| {
        for row in rows {
            let times = Times {
                gate: &gates[row * width + first..][..n],
                // SAFETY: rows are disjoint.
                out: unsafe { out.part(row * n, n) },
                is_silu: false,
            };
            dispatch(level, times);
        }
    });
}
