use crate::parallel::{Disjoint, run_ranges};
use crate::simd::{Kernel, LANES, Level, Simd, dispatch, exp};

/// `silu(gate) × up` ([SwiGLU](https://arxiv.org/abs/2002.05202)): `gate_up` is `[tokens, 2n]`, each row the gate and then
/// the up projection; `out` is `[tokens, n]`. `n` is `width`.
pub fn silu_mul(gate_up: &[f32], width: usize, out: &mut [f32]) {
    silu_mul_at(Level::detect(), gate_up, width, out);
}

fn silu_mul_at(level: Level, gate_up: &[f32], width: usize, out: &mut [f32]) {
    assert_eq!(gate_up.len(), 2 * out.len(), "gate and up for every output");
    assert_eq!(out.len() % width.max(1), 0, "whole rows");
    let rows = out.len() / width.max(1);
    let out = Disjoint::new(out);
    run_ranges(rows, (8192 / width.max(1)).max(1), &|rows| {
        for row in rows {
            let (gate, up) = gate_up[2 * row * width..2 * (row + 1) * width].split_at(width);
            // SAFETY: rows are disjoint.
            let out = unsafe { out.part(row * width, width) };
            dispatch(level, SiluMul { gate, up, out });
        }
    });
}

struct SiluMul<'a> {
    gate: &'a [f32],
    up: &'a [f32],
    out: &'a mut [f32],
}

impl Kernel for SiluMul<'_> {
    type Out = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let whole = self.out.len() / LANES * LANES;
        for i in (0..whole).step_by(LANES) {
            // SAFETY: the three rows are equally long and have sixteen elements from `i` on.
            unsafe {
                let y = silu_mul_lanes::<S>(S::load(self.gate[i..].as_ptr()), S::load(self.up[i..].as_ptr()));
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
                let y = silu_mul_lanes::<S>(S::load(gate.as_ptr()), S::load(up.as_ptr()));
                S::store(gate.as_mut_ptr(), y);
            }
            self.out[whole..].copy_from_slice(&gate[..rest]);
        }
    }
}

#[inline(always)]
unsafe fn silu_mul_lanes<S: Simd>(gate: S::F, up: S::F) -> S::F {
    // SAFETY: the caller has the features of `S`.
    unsafe {
        let denominator = S::add(S::splat(1.0), exp::<S>(S::sub(S::splat(0.0), gate)));
        S::mul(S::div(gate, denominator), up)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{assert_close, assert_same_bits, normal, rng, seeds};
    use rand::Rng;

    #[test]
    fn matches_the_definition_on_every_instruction_set() {
        for seed in seeds(8) {
            let mut rng = rng(seed);
            let (rows, n) = (rng.random_range(1..40), rng.random_range(1..400));
            let x: Vec<f32> = normal(&mut rng, rows * 2 * n).iter().map(|x| x * 10.0).collect();
            let silu = |x: f64| x / (1.0 + (-x).exp());
            let want: Vec<f64> = (0..rows * n)
                .map(|i| (i / n * 2 * n + i % n, i))
                .map(|(gate, _)| silu(f64::from(x[gate])) * f64::from(x[gate + n]))
                .collect();
            let mut out = vec![f32::NAN; rows * n];
            silu_mul(&x, n, &mut out);
            assert_close(&out, &want, 1e-6, &format!("seed {seed}"));
            for level in Level::available() {
                let mut again = vec![f32::NAN; rows * n];
                silu_mul_at(level, &x, n, &mut again);
                assert_same_bits(&again, &out, &format!("seed {seed} {level:?}"));
            }
        }
    }

    #[test]
    fn extremes_saturate() {
        let mut out = [f32::NAN; 4];
        silu_mul(&[1e30, -1e30, f32::NAN, 0.0, 1.0, 1.0, 1.0, 5.0], 4, &mut out);
        assert_eq!((out[0], out[3]), (1e30, 0.0));
        assert!(out[1].abs() < 1e-6 && out[2].is_nan(), "{out:?}");
    }
}
