use super::Simd;

/// `e^x`, within 2 units in the last place; 0 below -87.3 (where the result would be subnormal), capped at 88.3.
/// `exp(0)` is exactly 1. NaN gives 0.
///
/// Cephes' `expf`: a reduction by multiples of ln 2 and a polynomial of degree 5.
///
/// # Safety
/// The CPU has the features of `S`.
#[inline(always)]
pub(crate) unsafe fn exp<S: Simd>(x: S::F) -> S::F {
    // SAFETY: the caller's promise.
    unsafe {
        const LOWEST: f32 = -87.3;
        // With these orders of arguments NaN becomes a number.
        let clamped = S::max(S::min(x, S::splat(88.3)), S::splat(LOWEST));
        let n = S::round(S::mul(clamped, S::splat(std::f32::consts::LOG2_E)));
        // ln 2 in two parts, the first of them exact in few bits.
        let r = S::fma(n, S::splat(-0.693_359_4), clamped);
        let r = S::fma(n, S::splat(2.121_944_4e-4), r);
        let mut p = S::splat(1.987_569_1e-4);
        p = S::fma(p, r, S::splat(1.398_199_9e-3));
        p = S::fma(p, r, S::splat(8.333_452e-3));
        p = S::fma(p, r, S::splat(4.166_579_6e-2));
        p = S::fma(p, r, S::splat(1.666_666_5e-1));
        p = S::fma(p, r, S::splat(0.5));
        p = S::fma(S::mul(r, r), p, S::add(r, S::splat(1.0)));
        S::zero_below(x, S::splat(LOWEST), S::mul(p, S::pow2(n)))
    }
}

/// `x × sigmoid(y)`.
///
/// # Safety
/// The CPU has the features of `S`.
#[inline(always)]
pub(crate) unsafe fn times_sigmoid<S: Simd>(x: S::F, y: S::F) -> S::F {
    // SAFETY: the caller's promise.
    unsafe {
        let denominator = S::add(S::splat(1.0), exp::<S>(S::sub(S::splat(0.0), y)));
        S::div(x, denominator)
    }
}

#[cfg(test)]
mod tests {
    use crate::simd::{Kernel, LANES, Level, Simd, dispatch};

    struct Exp([f32; LANES]);

    impl Kernel for Exp {
        type Out = [f32; LANES];

        #[inline(always)]
        unsafe fn run<S: Simd>(mut self) -> Self::Out {
            // SAFETY: the features are there, the array has sixteen elements.
            unsafe {
                let y = super::exp::<S>(S::load(self.0.as_ptr()));
                S::store(self.0.as_mut_ptr(), y);
            }
            self.0
        }
    }

    #[test]
    fn is_within_two_units_in_the_last_place() {
        for level in Level::available() {
            for i in 0..20_000 {
                let x = -87.0 + i as f32 * (175.0 / 20_000.0);
                let got = dispatch(level, Exp([x; LANES]))[7];
                let want = f64::from(x).exp();
                assert!(
                    (f64::from(got) - want).abs() <= 2.0 * f64::from(f32::EPSILON) * want,
                    "{level:?} e^{x} = {got}"
                );
            }
        }
    }

    #[test]
    fn edges() {
        for level in Level::available() {
            let mut x = [0f32; LANES];
            x[..5].copy_from_slice(&[0.0, f32::NEG_INFINITY, f32::NAN, -100.0, f32::INFINITY]);
            let y = dispatch(level, Exp(x));
            assert_eq!(y[..4], [1.0, 0.0, 0.0, 0.0], "{level:?}");
            assert!(y[4] > 1e38 && y[4].is_finite(), "{level:?}");
        }
    }
}
