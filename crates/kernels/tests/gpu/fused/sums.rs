//! Sums with norms where no norm follows, and gates that lie elsewhere.

use super::*;
use crate::common::wide;

/// What is added to rows, and what the sums are multiplied by.
struct Case {
    n: usize,
    x: Vec<bf16>,
    y: Vec<bf16>,
    weights: [Vec<f32>; 2],
}

impl Case {
    fn all(rng: &mut StdRng) -> Vec<Self> {
        let sizes = [8, 256, 576, 1152, 2816, 5376, 8200, 16384];
        let case = |n: usize| {
            let rows = rng.random_range(1..30) * if n == 256 { 60 } else { 1 };
            Self {
                n,
                x: random(rng, rows * n),
                y: random(rng, rows * n),
                weights: [random_f32(rng, n), random_f32(rng, n)],
            }
        };
        sizes.into_iter().map(case).collect()
    }

    /// The sum with what is added, normalised or not, times `factor`.
    fn added(&self, is_normalised: bool, factor: f64) -> Vec<f64> {
        let y = match is_normalised {
            true => normalised(&wide(&self.y), &self.weights[0]),
            false => wide(&self.y),
        };
        let sums = wide(&self.x).into_iter().zip(y);
        sums.map(|(x, y)| (x + y) * factor).collect()
    }

    fn what(&self) -> String {
        format!("[{}, {}]", self.x.len() / self.n, self.n)
    }
}

#[test]
fn add_normed_on_the_cpu() {
    for case in Case::all(&mut rng("add_normed")) {
        let mut x = widen(&case.x);
        cpu::add_normed(&mut x, &widen(&case.y), &case.weights[0], EPS);
        assert_close(&case.what(), &x, &case.added(true, 1.0), BF16);
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn fused_add_normed() {
    let gpu = gpu();
    let kernels = FusedKernels::load(&gpu).unwrap();
    for case in Case::all(&mut rng("add_normed")) {
        let len = case.x.len();
        let weight = upload(&gpu, &case.weights[0]);
        let norm = GpuNorm {
            weight: weight.slice::<f32>().range(0..case.n),
            eps: EPS,
        };
        let number = upload(&gpu, &[0.625f32]);
        for (norm, factor, scalar) in [
            (None, 1.0, false),
            (Some(norm), 1.0, false),
            (None, 1.0, true),
            (Some(norm), std::f32::consts::FRAC_1_SQRT_2, true),
        ] {
            let mut padded = case.x.clone();
            padded.extend([bf16::from_bits(0xffff); GUARD]);
            let (x, y) = (upload(&gpu, &padded), upload(&gpu, &case.y));
            let (to, from) = (x.slice().range(0..len), y.slice().range(0..len));
            let scalar = scalar.then(|| number.slice().range(0..1));
            kernels
                .add_normed(to, from, case.n, norm, (factor, scalar))
                .unwrap();
            let factor = f64::from(factor) * if scalar.is_some() { 0.625 } else { 1.0 };
            let what = format!("{}, norm {}, times {factor}", case.what(), norm.is_some());
            let found = widen(&written(&gpu, &x, len));
            assert_close(&what, &found, &case.added(norm.is_some(), factor), BF16);
        }
    }
}

/// The norm of a sum that a number multiplies.
#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn fused_sandwich_norm_with_a_scalar() {
    let gpu = gpu();
    let kernels = FusedKernels::load(&gpu).unwrap();
    for case in Case::all(&mut rng("sandwich_norm")) {
        let len = case.x.len();
        let (x, y, out) = (
            upload(&gpu, &case.x),
            upload(&gpu, &case.y),
            guarded::<bf16>(&gpu, len),
        );
        let weights = case.weights.each_ref().map(|weight| upload(&gpu, weight));
        let [added, weight] = weights.each_ref().map(|weight| weight.slice().range(0..case.n));
        let number = upload(&gpu, &[0.625f32]);
        let (hidden, delta) = (x.slice().range(0..len), y.slice().range(0..len));
        let norm = GpuNorm { weight, eps: EPS };
        let scalar = Some(number.slice().range(0..1));
        kernels
            .sandwich_norm(hidden, delta, added, scalar, norm, out.slice().range(0..len))
            .unwrap();
        let sums = case.added(true, 0.625);
        let found: Vec<bf16> = gpu.download(hidden).unwrap();
        assert_close(&format!("{} sum", case.what()), &widen(&found), &sums, BF16);
        let found = widen(&written(&gpu, &out, len));
        let reference = normalised(&sums, &case.weights[1]);
        assert_close(&format!("{} norm", case.what()), &found, &reference, BF16);
    }
}

/// Twin of two norms and a sum on the CPU.
#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn fused_sum_norms() {
    let gpu = gpu();
    let kernels = FusedKernels::load(&gpu).unwrap();
    for case in Case::all(&mut rng("sum_norms")) {
        let len = case.x.len();
        let mut padded = case.x.clone();
        padded.extend([bf16::from_bits(0xffff); GUARD]);
        let (x, y) = (upload(&gpu, &padded), upload(&gpu, &case.y));
        let weights = case.weights.each_ref().map(|weight| upload(&gpu, weight));
        let slices = weights.each_ref().map(|weight| weight.slice().range(0..case.n));
        kernels
            .sum_norms(x.slice().range(0..len), y.slice().range(0..len), slices, EPS)
            .unwrap();
        let norms = [(&case.x, &case.weights[0]), (&case.y, &case.weights[1])]
            .map(|(values, weight)| normalised(&wide(values), weight));
        let reference: Vec<f64> = norms[0].iter().zip(&norms[1]).map(|(a, b)| a + b).collect();
        assert_close(&case.what(), &widen(&written(&gpu, &x, len)), &reference, BF16);
    }
}

/// Gates in their own rows, and what they gate as a part of wider ones, which is also what is gathered.
#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn fused_parts_of_rows() {
    let gpu = gpu();
    let kernels = FusedKernels::load(&gpu).unwrap();
    let mut rng = rng("parts of rows");
    for (rows, inner, stride, first) in [(1, 8, 8, 0), (7, 256, 8960, 512), (300, 256, 10752, 10496)] {
        let (gates, all) = (random(&mut rng, rows * inner), random(&mut rng, rows * stride));
        let (gate, ups) = (upload(&gpu, &gates), upload(&gpu, &all));
        let up = ups.slice::<bf16>().range(first..rows * stride);
        let part = |row: usize| &all[row * stride + first..][..inner];
        for activation in ACTIVATIONS {
            let out = guarded::<bf16>(&gpu, rows * inner);
            let to = out.slice().range(0..rows * inner);
            kernels
                .glu_of(
                    activation,
                    gate.slice().range(0..rows * inner),
                    (up, stride),
                    inner,
                    to,
                )
                .unwrap();
            let pairs = (0..rows).flat_map(|row| gates[row * inner..].iter().zip(part(row)));
            let want: Vec<f64> = pairs
                .map(|(gate, up)| activate(activation, gate.to_f64()) * up.to_f64())
                .collect();
            let found = widen(&written(&gpu, &out, rows * inner));
            assert_close(&format!("{activation:?} [{rows}, {inner}]"), &found, &want, BF16);
        }
        let picked: Vec<i32> = (0..rows as i32).rev().collect();
        let (at, out) = (upload(&gpu, &picked), guarded::<bf16>(&gpu, rows * inner));
        kernels
            .gather_part(
                up,
                stride,
                at.slice().range(0..rows),
                out.slice().range(0..rows * inner),
            )
            .unwrap();
        let want: Vec<bf16> = picked
            .iter()
            .flat_map(|&row| part(row as usize))
            .copied()
            .collect();
        assert!(
            written::<bf16>(&gpu, &out, rows * inner) == want,
            "gather [{rows}, {inner}]"
        );
    }
}
