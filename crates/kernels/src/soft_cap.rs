use crate::parallel::{Disjoint, run_ranges};
use crate::simd::{InPlace, Lanes, Level, Simd, dispatch, exp};

/// `cap × tanh(x / cap)` of every value, in place: nearly `x` where it is small, and never beyond `cap`
/// ([Gemma 2](https://arxiv.org/abs/2408.00118)). `cap` is more than 0. NaN stays NaN.
pub fn soft_cap(values: &mut [f32], cap: f32) {
    soft_cap_at(Level::detect(), values, cap);
}

fn soft_cap_at(level: Level, values: &mut [f32], cap: f32) {
    let len = values.len();
    let values = Disjoint::new(values);
    run_ranges(len, 8192, &|range| {
        // SAFETY: ranges are disjoint.
        let values = unsafe { values.part(range.start, range.len()) };
        dispatch(level, InPlace(values, SoftCap { cap }));
    });
}

struct SoftCap {
    cap: f32,
}

impl Lanes for SoftCap {
    #[inline(always)]
    unsafe fn of<S: Simd>(&self, x: S::F) -> S::F {
        // SAFETY: the caller's promise.
        unsafe { soft_cap_lanes::<S>(x, self.cap) }
    }
}

/// The same of a vector: `tanh(t)` is `1 - 2 / (e^2t + 1)`.
///
/// # Safety
/// The CPU has the features of `S`.
#[inline(always)]
pub(crate) unsafe fn soft_cap_lanes<S: Simd>(x: S::F, cap: f32) -> S::F {
    // SAFETY: the caller's promise.
    unsafe {
        // From here on tanh is 1; with this order of arguments NaN stays, of which `exp` would make a number.
        const MOST: f32 = 40.0;
        let twice = S::mul(x, S::splat(2.0 / cap));
        let twice = S::max(S::splat(-MOST), S::min(S::splat(MOST), twice));
        let denominator = S::add(exp::<S>(twice), S::splat(1.0));
        let capped = S::sub(S::splat(cap), S::div(S::splat(2.0 * cap), denominator));
        S::fma(S::splat(0.0), twice, capped)
    }
}

#[cfg(test)]
mod tests {
    use rand::Rng;

    use super::*;
    use crate::testing::{assert_same_bits, normal, rng, seeds};

    #[test]
    fn matches_the_definition_on_every_instruction_set() {
        for seed in seeds(8) {
            let mut rng = rng(seed);
            let cap = rng.random_range(0.5..60.0);
            let spread = [0.01, 1.0, 100.0][rng.random_range(0..3)];
            let len = rng.random_range(1..40_000);
            let x: Vec<f32> = normal(&mut rng, len).iter().map(|x| x * spread).collect();
            let mut out = x.clone();
            soft_cap(&mut out, cap);
            for (x, out) in x.iter().zip(&out) {
                let want = f64::from(cap) * (f64::from(*x) / f64::from(cap)).tanh();
                let error = (f64::from(*out) - want).abs();
                assert!(
                    error <= 4e-7 * f64::from(cap),
                    "seed {seed}: {x} gives {out}, not {want}"
                );
            }
            for level in Level::available() {
                let mut again = x.clone();
                soft_cap_at(level, &mut again, cap);
                assert_same_bits(&again, &out, &format!("seed {seed} {level:?}"));
            }
        }
    }

    #[test]
    fn extremes_saturate_and_nan_stays() {
        for level in Level::available() {
            let mut x = [
                0.0,
                f32::INFINITY,
                f32::NEG_INFINITY,
                f32::NAN,
                1e30,
                -1e30,
                4000.0,
            ];
            soft_cap_at(level, &mut x, 30.0);
            assert_eq!(x[..3], [0.0, 30.0, -30.0], "{level:?}");
            assert!(x[3].is_nan(), "{level:?}");
            assert_eq!(x[4..], [30.0, -30.0, 30.0], "{level:?}");
        }
    }
}
