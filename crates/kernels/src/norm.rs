use crate::parallel::{Disjoint, run_ranges};
use crate::simd::{Kernel, LANES, Level, Simd, dispatch};

/// [RMSNorm](https://arxiv.org/abs/1910.07467): `x / sqrt(mean(x²) + eps) × weight` for each row; `x` and `out` are
/// `[tokens, n]`, `weight` is `[n]`.
pub fn rms_norm(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    assert_eq!(x.len(), out.len());
    norm_rows(Level::detect(), Source::Plain(x), weight, eps, out);
}

/// [LayerNorm](https://arxiv.org/abs/1607.06450): `(x - mean(x)) / sqrt(var(x) + eps) × weight + bias` for each row; `x` and
/// `out` are `[tokens, n]`, `weight` and `bias` are `[n]`.
pub fn layer_norm(x: &[f32], weight: &[f32], bias: &[f32], eps: f32, out: &mut [f32]) {
    layer_norm_at(Level::detect(), x, weight, bias, eps, out);
}

fn layer_norm_at(level: Level, x: &[f32], weight: &[f32], bias: &[f32], eps: f32, out: &mut [f32]) {
    let n = weight.len();
    assert!(x.len() == out.len() && bias.len() == n && n > 0 && x.len().is_multiple_of(n));
    let rows = x.len() / n;
    let out = Disjoint::new(out);
    run_ranges(rows, (GRAIN / n).max(1), &|rows| {
        for row in rows {
            // SAFETY: rows are disjoint.
            let out = unsafe { out.part(row * n, n) };
            let x = &x[row * n..(row + 1) * n];
            let mean = dispatch(level, Sum(x)) / n as f32;
            out.iter_mut().zip(x).for_each(|(y, x)| *y = x - mean);
            let scale = 1.0 / (dispatch(level, SquareSum(out)) / n as f32 + eps).sqrt();
            for i in 0..n {
                out[i] = out[i] * scale * weight[i] + bias[i];
            }
        }
    });
}

/// `residual += x`, then [`rms_norm`] of the new residual into `out`; all three are `[tokens, n]`.
pub fn add_rms_norm(residual: &mut [f32], x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    assert_eq!((x.len(), residual.len()), (out.len(), out.len()));
    norm_rows(
        Level::detect(),
        Source::Sum(Disjoint::new(residual), x),
        weight,
        eps,
        out,
    );
}

/// The norms before and after a block of Gemma 3 ("sandwich", [CogView](https://arxiv.org/abs/2105.13290)):
/// `residual += rms_norm(x, post_weight)`, then [`rms_norm`] of the new residual with `weight` into `out`.
pub fn sandwich_norm(
    residual: &mut [f32],
    x: &[f32],
    post_weight: &[f32],
    weight: &[f32],
    eps: f32,
    out: &mut [f32],
) {
    assert_eq!((x.len(), residual.len()), (out.len(), out.len()));
    assert_eq!(post_weight.len(), weight.len(), "two norms of one width");
    let residual = Disjoint::new(residual);
    norm_rows(
        Level::detect(),
        Source::Sandwich(residual, x, post_weight),
        weight,
        eps,
        out,
    );
}

/// `residual += rms_norm(x, weight)`, both `[tokens, n]`, `weight` is `[n]`: what a block adds where nothing is normalised right
/// behind it.
pub fn add_normed(residual: &mut [f32], x: &[f32], weight: &[f32], eps: f32) {
    add_normed_at(Level::detect(), residual, x, weight, eps);
}

fn add_normed_at(level: Level, residual: &mut [f32], x: &[f32], weight: &[f32], eps: f32) {
    let n = weight.len();
    assert_eq!(x.len(), residual.len(), "what is added is not [tokens, n]");
    assert!(
        n > 0 && x.len().is_multiple_of(n),
        "{} elements are not rows of {n}",
        x.len()
    );
    let residual = Disjoint::new(residual);
    run_ranges(x.len() / n, (GRAIN / n).max(1), &|rows| {
        for row in rows {
            // SAFETY: rows are disjoint.
            let residual = unsafe { residual.part(row * n, n) };
            let x = &x[row * n..(row + 1) * n];
            let scale = dispatch(level, InverseRms { x, eps });
            for i in 0..n {
                residual[i] += x[i] * scale * weight[i];
            }
        }
    });
}

/// Elements below which another thread costs more than it brings.
const GRAIN: usize = 8192;

enum Source<'a> {
    Plain(&'a [f32]),
    /// Residual and what is added to it.
    Sum(Disjoint<'a, f32>, &'a [f32]),
    /// Residual, what is normalised and then added to it, and the weight of that norm.
    Sandwich(Disjoint<'a, f32>, &'a [f32], &'a [f32]),
}

fn norm_rows(level: Level, source: Source<'_>, weight: &[f32], eps: f32, out: &mut [f32]) {
    let n = weight.len();
    assert!(
        n > 0 && out.len().is_multiple_of(n),
        "{} elements are not rows of {n}",
        out.len()
    );
    let rows = out.len() / n;
    let out = Disjoint::new(out);
    run_ranges(rows, (GRAIN / n).max(1), &|rows| {
        for row in rows {
            // SAFETY: rows are disjoint.
            let out = unsafe { out.part(row * n, n) };
            let row = row * n..(row + 1) * n;
            let norm = |x: &[f32], weight: &[f32], out: &mut [f32]| {
                dispatch(level, RmsNorm { x, weight, eps, out });
            };
            match &source {
                Source::Plain(x) => norm(&x[row], weight, out),
                Source::Sum(residual, x) => {
                    // SAFETY: rows are disjoint.
                    let residual = unsafe { residual.part(row.start, n) };
                    add(residual, &x[row]);
                    norm(residual, weight, out);
                }
                Source::Sandwich(residual, x, post_weight) => {
                    // SAFETY: rows are disjoint.
                    let residual = unsafe { residual.part(row.start, n) };
                    norm(&x[row], post_weight, out);
                    add(residual, out);
                    norm(residual, weight, out);
                }
            }
        }
    });
}

fn add(residual: &mut [f32], x: &[f32]) {
    residual.iter_mut().zip(x).for_each(|(r, x)| *r += x);
}

/// One row; also the per-head norm of q and k.
pub(crate) struct RmsNorm<'a> {
    pub(crate) x: &'a [f32],
    pub(crate) weight: &'a [f32],
    pub(crate) eps: f32,
    pub(crate) out: &'a mut [f32],
}

impl Kernel for RmsNorm<'_> {
    type Out = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let Self { x, weight, eps, out } = self;
        let n = x.len();
        assert!(weight.len() == n && out.len() == n);
        // SAFETY: the caller's promise.
        let scale = unsafe { InverseRms { x, eps }.run::<S>() };
        for i in 0..n {
            out[i] = x[i] * scale * weight[i];
        }
    }
}

/// `1 / sqrt(mean(x²) + eps)`.
pub(crate) struct InverseRms<'a> {
    pub(crate) x: &'a [f32],
    pub(crate) eps: f32,
}

impl Kernel for InverseRms<'_> {
    type Out = f32;

    #[inline(always)]
    unsafe fn run<S: Simd>(self) -> f32 {
        let Self { x, eps } = self;
        // SAFETY: the caller's promise.
        let sum = unsafe { SquareSum(x).run::<S>() };
        1.0 / (sum / x.len() as f32 + eps).sqrt()
    }
}

/// Of the elements' squares.
pub(crate) struct SquareSum<'a>(pub(crate) &'a [f32]);

impl Kernel for SquareSum<'_> {
    type Out = f32;

    #[inline(always)]
    unsafe fn run<S: Simd>(self) -> f32 {
        // SAFETY: the features are there by the caller's promise, the array has sixteen elements.
        unsafe {
            let mut squares = S::splat(0.0);
            let mut chunks = self.0.chunks_exact(LANES);
            for chunk in &mut chunks {
                let v = S::load(chunk.as_ptr());
                squares = S::fma(v, v, squares);
            }
            let mut rest = [0f32; LANES];
            rest[..self.0.len() % LANES].copy_from_slice(chunks.remainder());
            let rest = S::load(rest.as_ptr());
            S::sum(S::fma(rest, rest, squares))
        }
    }
}

/// Of the elements.
struct Sum<'a>(&'a [f32]);

impl Kernel for Sum<'_> {
    type Out = f32;

    #[inline(always)]
    unsafe fn run<S: Simd>(self) -> f32 {
        // SAFETY: the features are there by the caller's promise, the array has sixteen elements.
        unsafe {
            let mut sum = S::splat(0.0);
            let mut chunks = self.0.chunks_exact(LANES);
            for chunk in &mut chunks {
                sum = S::add(sum, S::load(chunk.as_ptr()));
            }
            let mut rest = [0f32; LANES];
            rest[..self.0.len() % LANES].copy_from_slice(chunks.remainder());
            S::sum(S::add(sum, S::load(rest.as_ptr())))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{assert_close, assert_same_bits, normal, rng, seeds};
    use rand::Rng;

    #[test]
    fn layer_norms_match_the_definition_on_every_instruction_set() {
        for seed in seeds(8) {
            let mut rng = rng(seed);
            let (rows, n) = (rng.random_range(1..40), rng.random_range(1..700));
            let x: Vec<f32> = normal(&mut rng, rows * n).iter().map(|x| x + 3.0).collect();
            let (weight, bias) = (normal(&mut rng, n), normal(&mut rng, n));
            let mut want = Vec::new();
            for x in x.chunks_exact(n) {
                let mean = x.iter().map(|&x| f64::from(x)).sum::<f64>() / n as f64;
                let var = x.iter().map(|&x| (f64::from(x) - mean).powi(2)).sum::<f64>() / n as f64;
                let scaled = x.iter().map(|&x| (f64::from(x) - mean) / (var + 1e-2).sqrt());
                let affine = scaled.zip(&weight).zip(&bias);
                want.extend(affine.map(|((x, &w), &b)| x * f64::from(w) + f64::from(b)));
            }
            let mut out = vec![f32::NAN; rows * n];
            layer_norm(&x, &weight, &bias, 1e-2, &mut out);
            assert_close(&out, &want, 2e-6, &format!("seed {seed}"));
            for level in Level::available() {
                let mut again = vec![f32::NAN; rows * n];
                layer_norm_at(level, &x, &weight, &bias, 1e-2, &mut again);
                assert_same_bits(&again, &out, &format!("seed {seed} {level:?}"));
            }
        }
    }

    #[test]
    fn matches_the_definition_on_every_instruction_set() {
        for seed in seeds(8) {
            let mut rng = rng(seed);
            let (rows, n) = (rng.random_range(1..40), rng.random_range(1..700));
            let (x, y, weight, post) = (
                normal(&mut rng, rows * n),
                normal(&mut rng, rows * n),
                normal(&mut rng, n),
                normal(&mut rng, n),
            );
            let mut want = Vec::new();
            for row in 0..rows {
                let sum = |i: usize| f64::from(x[row * n + i] + y[row * n + i]);
                let square = (0..n).map(|i| sum(i).powi(2)).sum::<f64>() / n as f64;
                want.extend((0..n).map(|i| sum(i) / (square + 1e-5).sqrt() * f64::from(weight[i])));
            }
            let (mut residual, mut out) = (x.clone(), vec![f32::NAN; rows * n]);
            add_rms_norm(&mut residual, &y, &weight, 1e-5, &mut out);
            assert_close(&out, &want, 1e-6, &format!("seed {seed}"));
            let sums: Vec<f32> = x.iter().zip(&y).map(|(x, y)| x + y).collect();
            assert_same_bits(&residual, &sums, "residual");
            for level in Level::available() {
                let mut again = vec![f32::NAN; rows * n];
                norm_rows(level, Source::Plain(&residual), &weight, 1e-5, &mut again);
                assert_same_bits(&again, &out, &format!("seed {seed} {level:?}"));
            }

            // The sandwich is the norm of what is added, the sum, and the norm of that.
            let mut inner = vec![f32::NAN; rows * n];
            rms_norm(&y, &post, 1e-5, &mut inner);
            let (mut want_residual, mut want) = (x.clone(), vec![f32::NAN; rows * n]);
            add_rms_norm(&mut want_residual, &inner, &weight, 1e-5, &mut want);
            for level in Level::available() {
                let (mut residual, mut out) = (x.clone(), vec![f32::NAN; rows * n]);
                let source = Source::Sandwich(Disjoint::new(&mut residual), &y, &post);
                norm_rows(level, source, &weight, 1e-5, &mut out);
                assert_same_bits(&residual, &want_residual, &format!("seed {seed} {level:?}"));
                assert_same_bits(&out, &want, &format!("seed {seed} {level:?}"));
                let mut residual = x.clone();
                add_normed_at(level, &mut residual, &y, &post, 1e-5);
                assert_same_bits(&residual, &want_residual, &format!("seed {seed} {level:?}"));
            }
        }
    }
}
