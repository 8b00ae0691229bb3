use std::f64::consts::{FRAC_1_SQRT_2, FRAC_2_SQRT_PI};

use crate::parallel::{Disjoint, run_ranges};
use crate::simd::{InPlace, Lanes, Level, Simd, dispatch, times_sigmoid};

/// The two forms of [GELU](https://arxiv.org/abs/1606.08415).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Gelu {
    /// `x / 2 × (1 + erf(x / √2))`.
    Exact,
    /// `x / 2 × (1 + tanh(√(2/π) (x + 0.044715 x³)))`.
    Tanh,
}

/// Elements below which another thread costs more than it brings.
const GRAIN: usize = 4096;

/// Applies it to each element, in place.
pub fn gelu(form: Gelu, x: &mut [f32]) {
    gelu_at(Level::detect(), form, x);
}

fn gelu_at(level: Level, form: Gelu, x: &mut [f32]) {
    let len = x.len();
    let x = Disjoint::new(x);
    run_ranges(len, GRAIN, &|range| {
        // SAFETY: ranges are disjoint.
        let x = unsafe { x.part(range.start, range.len()) };
        match form {
            Gelu::Exact => x.iter_mut().for_each(|x| *x = exact(*x)),
            Gelu::Tanh => dispatch(level, InPlace(x, Tanh)),
        }
    });
}

fn exact(x: f32) -> f32 {
    let x = f64::from(x);
    (0.5 * x * (1.0 + erf(x * FRAC_1_SQRT_2))) as f32
}

/// `2/√π × exp(-x²) × Σ 2ⁿ x²ⁿ⁺¹ / (2n+1)!!` ([DLMF 7.6](https://dlmf.nist.gov/7.6)): no terms cancel.
fn erf(x: f64) -> f64 {
    if x.abs() > 6.0 {
        return x.signum();
    }
    let (mut term, mut sum, mut n) = (x, x, 1.0);
    while term.abs() > 1e-17 * sum.abs() {
        term *= 2.0 * x * x / (2.0 * n + 1.0);
        sum += term;
        n += 1.0;
    }
    FRAC_2_SQRT_PI * (-x * x).exp() * sum
}

struct Tanh;

impl Lanes for Tanh {
    #[inline(always)]
    unsafe fn of<S: Simd>(&self, x: S::F) -> S::F {
        // SAFETY: the caller's promise.
        unsafe { gelu_tanh::<S>(x) }
    }
}

/// [`Gelu::Tanh`] of a vector: `(1 + tanh(u)) / 2` is `sigmoid(2u)`.
///
/// # Safety
/// The CPU has the features of `S`.
#[inline(always)]
pub(crate) unsafe fn gelu_tanh<S: Simd>(x: S::F) -> S::F {
    // SAFETY: the caller's promise.
    unsafe {
        let (linear, cubic) = (S::splat(1.595_769), S::splat(0.071_354_82));
        let twice = S::mul(x, S::fma(cubic, S::mul(x, x), linear));
        times_sigmoid::<S>(x, twice)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{assert_close, assert_same_bits, normal, rng, seeds};
    use rand::Rng;

    #[test]
    fn both_forms_match_their_definitions_on_every_instruction_set() {
        for seed in seeds(4) {
            let mut rng = rng(seed);
            let len = rng.random_range(1..20_000);
            let x: Vec<f32> = normal(&mut rng, len).iter().map(|x| 3.0 * x).collect();
            for form in [Gelu::Exact, Gelu::Tanh] {
                let want: Vec<f64> = x.iter().map(|&x| defined(form, f64::from(x))).collect();
                let mut out = x.clone();
                gelu(form, &mut out);
                assert_close(&out, &want, 1e-6, &format!("seed {seed} {form:?}"));
                for level in Level::available() {
                    let mut again = x.clone();
                    gelu_at(level, form, &mut again);
                    assert_same_bits(&again, &out, &format!("seed {seed} {form:?} {level:?}"));
                }
            }
        }
    }

    fn defined(form: Gelu, x: f64) -> f64 {
        match form {
            Gelu::Tanh => {
                0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3))).tanh())
            }
            // The integral of the density, by Simpson's rule.
            Gelu::Exact => {
                let steps = 2000;
                let h = x / f64::from(steps);
                let density = |t: f64| (-t * t / 2.0).exp() / (2.0 * std::f64::consts::PI).sqrt();
                let inner: f64 = (1..steps)
                    .map(|i| if i % 2 == 1 { 4.0 } else { 2.0 } * density(h * f64::from(i)))
                    .sum();
                x * (0.5 + (density(0.0) + inner + density(x)) * h / 3.0)
            }
        }
    }

    #[test]
    fn numbers_that_are_none_stay_so() {
        for form in [Gelu::Exact, Gelu::Tanh] {
            let mut x = [f32::NAN, 40.0, -40.0];
            gelu(form, &mut x);
            assert!(x[0].is_nan() && x[1] == 40.0 && x[2].abs() < 1e-6, "{x:?}");
        }
    }
}
