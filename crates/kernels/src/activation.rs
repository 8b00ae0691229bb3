use std::marker::PhantomData;

use serde::{Deserialize, Serialize};

use crate::gelu::gelu_tanh;
use crate::parallel::{Disjoint, run_ranges};
use crate::simd::{Kernel, LANES, Level, Simd, dispatch, times_sigmoid};

/// What a gated MLP applies to its gate ([GLU variants](https://arxiv.org/abs/2002.05202)).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Activation {
    /// `x × sigmoid(x)` (SwiGLU).
    Silu,
    /// [GELU](https://arxiv.org/abs/1606.08415) in its tanh form (GeGLU): `x / 2 × (1 + tanh(√(2/π) (x + 0.044715 x³)))`.
    GeluTanh,
}

/// How gate and up of an expert become its inner row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ExpertActivation {
    /// `activation(gate) × up`.
    Glu(Activation),
    /// `g × sigmoid(1.702 g) × (u + 1)`, where `g` is the gate, at most 7, and `u` is up, between -7 and 7
    /// ([gpt-oss](https://arxiv.org/abs/2508.10925)).
    ClampedSwiglu,
}

impl ExpertActivation {
    /// The constants of [`Self::ClampedSwiglu`]: what the gate is multiplied by, and the bound.
    pub const CLAMPED_SWIGLU: [f32; 2] = [1.702, 7.0];
}

/// `activation(gate) × up`: `gate_up` is `[tokens, 2n]`, each row the gate and then the up projection; `out` is
/// `[tokens, n]`. `n` is `width`.
pub fn glu(activation: Activation, gate_up: &[f32], width: usize, out: &mut [f32]) {
    expert_activation(ExpertActivation::Glu(activation), gate_up, width, out);
}

/// The same for what experts have.
pub fn expert_activation(activation: ExpertActivation, gate_up: &[f32], width: usize, out: &mut [f32]) {
    activate_at(Level::detect(), activation, gate_up, width, out);
}

fn activate_at(level: Level, activation: ExpertActivation, gate_up: &[f32], width: usize, out: &mut [f32]) {
    assert_eq!(gate_up.len(), 2 * out.len(), "gate and up for every output");
    assert_eq!(out.len() % width.max(1), 0, "whole rows");
    let rows = out.len() / width.max(1);
    let out = Disjoint::new(out);
    run_ranges(rows, (8192 / width.max(1)).max(1), &|rows| {
        for row in rows {
            let (gate, up) = gate_up[2 * row * width..2 * (row + 1) * width].split_at(width);
            // SAFETY: rows are disjoint.
            let out = unsafe { out.part(row * width, width) };
            match activation {
                ExpertActivation::Glu(Activation::Silu) => dispatch(level, Rows::<Silu>::new(gate, up, out)),
                ExpertActivation::Glu(Activation::GeluTanh) => {
                    dispatch(level, Rows::<GeluTanh>::new(gate, up, out));
                }
                ExpertActivation::ClampedSwiglu => {
                    dispatch(level, Rows::<ClampedSwiglu>::new(gate, up, out));
                }
            }
        }
    });
}

/// From gate and up to the inner row.
trait GatedUnit {
    /// # Safety
    /// The CPU has the features of `S`.
    unsafe fn of<S: Simd>(gate: S::F, up: S::F) -> S::F;
}

struct Silu;

impl GatedUnit for Silu {
    #[inline(always)]
    unsafe fn of<S: Simd>(gate: S::F, up: S::F) -> S::F {
        // SAFETY: the caller's promise.
        unsafe { S::mul(times_sigmoid::<S>(gate, gate), up) }
    }
}

struct GeluTanh;

impl GatedUnit for GeluTanh {
    #[inline(always)]
    unsafe fn of<S: Simd>(gate: S::F, up: S::F) -> S::F {
        // SAFETY: the caller's promise.
        unsafe { S::mul(gelu_tanh::<S>(gate), up) }
    }
}

struct ClampedSwiglu;

impl GatedUnit for ClampedSwiglu {
    #[inline(always)]
    unsafe fn of<S: Simd>(gate: S::F, up: S::F) -> S::F {
        let [alpha, limit] = ExpertActivation::CLAMPED_SWIGLU;
        // SAFETY: the caller's promise.
        unsafe {
            // With these orders of arguments NaN stays.
            let gate = S::min(S::splat(limit), gate);
            let up = S::max(S::splat(-limit), S::min(S::splat(limit), up));
            let gated = times_sigmoid::<S>(gate, S::mul(S::splat(alpha), gate));
            S::mul(gated, S::add(up, S::splat(1.0)))
        }
    }
}

struct Rows<'a, A> {
    gate: &'a [f32],
    up: &'a [f32],
    out: &'a mut [f32],
    activation: PhantomData<A>,
}

impl<'a, A> Rows<'a, A> {
    fn new(gate: &'a [f32], up: &'a [f32], out: &'a mut [f32]) -> Self {
        Self {
            gate,
            up,
            out,
            activation: PhantomData,
        }
    }
}

impl<A: GatedUnit> Kernel for Rows<'_, A> {
    type Out = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let whole = self.out.len() / LANES * LANES;
        for i in (0..whole).step_by(LANES) {
            // SAFETY: the three rows are equally long and have sixteen elements from `i` on.
            unsafe {
                let y = A::of::<S>(S::load(self.gate[i..].as_ptr()), S::load(self.up[i..].as_ptr()));
                S::store(self.out[i..].as_mut_ptr(), y);
            }
        }
        let rest = self.out.len() - whole;
        if rest > 0 {
            let (mut gate, mut up) = ([0f32; LANES], [0f32; LANES]);
            gate[..rest].copy_from_slice(&self.gate[whole..]);
            up[..rest].copy_from_slice(&self.up[whole..]);
            // SAFETY: arrays of sixteen.
            unsafe {
                let y = A::of::<S>(S::load(gate.as_ptr()), S::load(up.as_ptr()));
                S::store(gate.as_mut_ptr(), y);
            }
            self.out[whole..].copy_from_slice(&gate[..rest]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{assert_close, assert_same_bits, normal, rng, seeds};
    use rand::Rng;

    type Definition = fn(f64, f64) -> f64;

    const DEFINITIONS: [(ExpertActivation, Definition); 3] = [
        (ExpertActivation::Glu(Activation::Silu), |gate, up| {
            gate / (1.0 + (-gate).exp()) * up
        }),
        (ExpertActivation::Glu(Activation::GeluTanh), |gate, up| {
            let inner = (2.0 / std::f64::consts::PI).sqrt() * (gate + 0.044715 * gate.powi(3));
            gate / 2.0 * (1.0 + inner.tanh()) * up
        }),
        (ExpertActivation::ClampedSwiglu, |gate, up| {
            let (gate, up) = (gate.min(7.0), up.clamp(-7.0, 7.0));
            gate / (1.0 + (-1.702 * gate).exp()) * (up + 1.0)
        }),
    ];

    #[test]
    fn matches_the_definition_on_every_instruction_set() {
        for seed in seeds(8) {
            let mut rng = rng(seed);
            let (rows, n) = (rng.random_range(1..40), rng.random_range(1..400));
            let x: Vec<f32> = normal(&mut rng, rows * 2 * n).iter().map(|x| x * 10.0).collect();
            for (activation, exact) in DEFINITIONS {
                let want: Vec<f64> = (0..rows * n)
                    .map(|i| i / n * 2 * n + i % n)
                    .map(|gate| exact(f64::from(x[gate]), f64::from(x[gate + n])))
                    .collect();
                let mut out = vec![f32::NAN; rows * n];
                expert_activation(activation, &x, n, &mut out);
                assert_close(&out, &want, 1e-6, &format!("seed {seed} {activation:?}"));
                for level in Level::available() {
                    let mut again = vec![f32::NAN; rows * n];
                    activate_at(level, activation, &x, n, &mut again);
                    assert_same_bits(&again, &out, &format!("seed {seed} {activation:?} {level:?}"));
                }
            }
        }
    }

    #[test]
    fn extremes_saturate() {
        for (activation, _) in DEFINITIONS {
            let mut out = [f32::NAN; 4];
            let gate_up = [1e30, -1e30, f32::NAN, 0.0, 1.0, 1.0, 1.0, 5.0];
            expert_activation(activation, &gate_up, 4, &mut out);
            let most = match activation {
                ExpertActivation::Glu(_) => 1e30,
                ExpertActivation::ClampedSwiglu => 14.0,
            };
            assert!((out[0] / most - 1.0).abs() < 1e-5, "{activation:?}: {out:?}");
            assert_eq!(out[3], 0.0, "{activation:?}");
            assert!(out[1].abs() < 1e-6 && out[2].is_nan(), "{activation:?}: {out:?}");
        }
    }
}
