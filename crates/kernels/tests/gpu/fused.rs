//! Element-wise kernels. Each test has one body, which the CPU twin and the GPU fill in.

mod rope;
mod sums;

use half::bf16;
use plimsoll_core::{BlockSize, PageId};
use plimsoll_device::Pod;
use plimsoll_device::cuda::{Gpu, GpuSlab};
use plimsoll_kernels::cuda::{
    FusedKernels, GpuKvWrite, GpuNorm, GpuQkNorm, GpuRope, GpuTokens, GpuVocabulary, rope_frequencies,
};
use plimsoll_kernels::{self as cpu, Activation, e4m3_to_f32};
use rand::Rng;
use rand::rngs::StdRng;

use crate::common::{assert_close, download, gpu, poisoned, random, rng, upload, widen};

/// Tolerance of an output rounded to bf16 once.
const BF16: f64 = 4e-3;
const EPS: f32 = 1e-5;
/// Elements behind an output that must stay poisoned.
const GUARD: usize = 64;

fn guarded<T: Pod>(gpu: &Gpu, len: usize) -> GpuSlab {
    poisoned::<T>(gpu, len + GUARD)
}

/// What a kernel wrote to `guarded` memory.
#[track_caller]
fn written<T: Pod>(gpu: &Gpu, slab: &GpuSlab, len: usize) -> Vec<T> {
    let mut all: Vec<T> = download(gpu, slab, len + GUARD);
    let behind: &[u8] = bytes(&all[len..]);
    assert!(
        behind.iter().all(|&b| b == 0xff),
        "written beyond the end of {len} elements"
    );
    all.truncate(len);
    all
}

fn bytes<T: Pod>(values: &[T]) -> &[u8] {
    // SAFETY: plain old data has no padding, and any byte is a `u8`.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) }
}

fn random_f32(rng: &mut StdRng, len: usize) -> Vec<f32> {
    (0..len).map(|_| rng.random_range(0.5..1.5)).collect()
}

/// What is added to the residual stream ahead of its norm.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Added {
    Nothing,
    Delta,
    /// The norm of delta.
    Normalised,
}

/// A norm's input.
struct NormCase {
    added: Added,
    n: usize,
    hidden: Vec<bf16>,
    delta: Vec<bf16>,
    delta_weight: Vec<f32>,
    weight: Vec<f32>,
}

/// The norm of rows, in f64.
fn normalised(x: &[f64], weight: &[f32]) -> Vec<f64> {
    let rows = x.chunks_exact(weight.len());
    rows.flat_map(|row| {
        let mean = row.iter().map(|x| x * x).sum::<f64>() / row.len() as f64;
        let scale = 1.0 / (mean + f64::from(EPS)).sqrt();
        row.iter()
            .zip(weight)
            .map(move |(x, &w)| x * scale * f64::from(w))
    })
    .collect()
}

/// Calls `run` with cases; it returns the residual stream afterwards and the norm.
fn check_norm(run: impl Fn(&NormCase) -> (Vec<f32>, Vec<f32>)) {
    let mut rng = rng("norms");
    let sizes = [8, 576, 1152, 2048, 3840, 4096, 5120, 8192, 8200, 16384];
    for (n, added) in sizes
        .into_iter()
        .flat_map(|n| [Added::Nothing, Added::Delta, Added::Normalised].map(|added| (n, added)))
    {
        let tokens = rng.random_range(1..40) * if n == 576 { 50 } else { 1 };
        let case = NormCase {
            added,
            n,
            hidden: random(&mut rng, tokens * n),
            delta: random(&mut rng, tokens * n),
            delta_weight: random_f32(&mut rng, n),
            weight: random_f32(&mut rng, n),
        };
        let (residual, out) = run(&case);
        let [mut sum, delta] =
            [&case.hidden, &case.delta].map(|x| -> Vec<f64> { x.iter().map(|&x| x.into()).collect() });
        let delta = match added {
            Added::Nothing => vec![0.0; tokens * n],
            Added::Delta => delta,
            Added::Normalised => normalised(&delta, &case.delta_weight),
        };
        sum.iter_mut().zip(delta).for_each(|(x, d)| *x += d);
        let what = format!("{added:?} [{tokens}, {n}]");
        assert_close(&format!("{what} residual"), &residual, &sum, BF16);
        assert_close(&what, &out, &normalised(&sum, &case.weight), BF16);
    }
}

fn norm_on_gpu(gpu: &Gpu, kernels: &FusedKernels, case: &NormCase) -> (Vec<f32>, Vec<f32>) {
    let len = case.hidden.len();
    let mut hidden = case.hidden.clone();
    hidden.extend([bf16::from_bits(0xffff); GUARD]);
    let (hidden, delta) = (upload(gpu, &hidden), upload(gpu, &case.delta));
    let (weight, delta_weight) = (upload(gpu, &case.weight), upload(gpu, &case.delta_weight));
    let norm = GpuNorm {
        weight: weight.slice::<f32>().range(0..case.n),
        eps: EPS,
    };
    let out = guarded::<bf16>(gpu, len);
    let (h, d, o) = (
        hidden.slice().range(0..len),
        delta.slice().range(0..len),
        out.slice().range(0..len),
    );
    match case.added {
        Added::Nothing => kernels.rms_norm(h, norm, o),
        Added::Delta => kernels.add_rms_norm(h, d, norm, o),
        Added::Normalised => {
            let weight = delta_weight.slice().range(0..case.n);
            kernels.sandwich_norm(h, d, weight, None, norm, o)
        }
    }
    .unwrap();
    (
        widen(&written(gpu, &hidden, len)),
        widen(&written(gpu, &out, len)),
    )
}

fn norm_on_cpu(case: &NormCase) -> (Vec<f32>, Vec<f32>) {
    let (mut hidden, delta) = (widen(&case.hidden), widen(&case.delta));
    let mut out = vec![f32::NAN; hidden.len()];
    match case.added {
        Added::Nothing => cpu::rms_norm(&hidden, &case.weight, EPS, &mut out),
        Added::Delta => cpu::add_rms_norm(&mut hidden, &delta, &case.weight, EPS, &mut out),
        Added::Normalised => {
            cpu::sandwich_norm(
                &mut hidden,
                &delta,
                &case.delta_weight,
                &case.weight,
                EPS,
                &mut out,
            );
        }
    }
    (hidden, out)
}

#[test]
fn norms_on_the_cpu() {
    check_norm(norm_on_cpu);
}

#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn fused_norms() {
    let gpu = gpu();
    let kernels = FusedKernels::load(&gpu).unwrap();
    check_norm(|case| norm_on_gpu(&gpu, &kernels, case));
}

/// The residual stream is what Hugging Face's is: the exact sum, rounded once.
#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn fused_residual_is_rounded_once() {
    let gpu = gpu();
    let kernels = FusedKernels::load(&gpu).unwrap();
    let mut rng = rng("residual");
    let case = NormCase {
        added: Added::Delta,
        n: 576,
        hidden: random(&mut rng, 33 * 576),
        delta: random(&mut rng, 33 * 576),
        delta_weight: Vec::new(),
        weight: vec![1.0; 576],
    };
    let (residual, _) = norm_on_gpu(&gpu, &kernels, &case);
    for (i, got) in residual.iter().enumerate() {
        let want = bf16::from_f32(case.hidden[i].to_f32() + case.delta[i].to_f32());
        assert_eq!(*got, want.to_f32(), "element {i}");
    }
}

/// An activation in f64.
pub(crate) fn activate(activation: Activation, x: f64) -> f64 {
    match activation {
        Activation::Silu => x / (1.0 + (-x).exp()),
        Activation::GeluTanh => {
            let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3));
            x / 2.0 * (1.0 + inner.tanh())
        }
    }
}

pub(crate) const ACTIVATIONS: [Activation; 2] = [Activation::Silu, Activation::GeluTanh];

/// Calls `run` with the activation, gate and up, the inner size; it returns the products.
fn check_glu(run: impl Fn(Activation, &[bf16], usize) -> Vec<f32>) {
    let mut rng = rng("glu");
    for (rows, inner) in [(1, 8), (3, 1536), (17, 14336), (200, 2056), (1, 14336)] {
        for (activation, range) in ACTIVATIONS.into_iter().flat_map(|a| [(a, 30.0), (a, 3.0)]) {
            let mut gate_up = random(&mut rng, rows * 2 * inner);
            gate_up
                .iter_mut()
                .for_each(|x| *x = bf16::from_f32(x.to_f32() * range));
            let mut want = Vec::new();
            for row in gate_up.chunks_exact(2 * inner) {
                let pair = |i: usize| (f64::from(row[i]), f64::from(row[inner + i]));
                want.extend(
                    (0..inner)
                        .map(pair)
                        .map(|(gate, up)| activate(activation, gate) * up),
                );
            }
            assert_close(
                &format!("{activation:?} [{rows}, {inner}] up to {range}"),
                &run(activation, &gate_up, inner),
                &want,
                BF16,
            );
        }
    }
}

#[test]
fn glu_on_the_cpu() {
    check_glu(|activation, gate_up, inner| {
        let mut out = vec![f32::NAN; gate_up.len() / 2];
        cpu::glu(activation, &widen(gate_up), inner, &mut out);
        out
    });
}

#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn fused_glu() {
    let gpu = gpu();
    let kernels = FusedKernels::load(&gpu).unwrap();
    let run = |activation: Activation, gate_up: &[bf16], inner: usize| {
        let len = gate_up.len() / 2;
        let (input, out) = (upload(&gpu, gate_up), guarded::<bf16>(&gpu, len));
        let gate_up = input.slice().range(0..gate_up.len());
        kernels
            .glu(activation, gate_up, inner, out.slice().range(0..len))
            .unwrap();
        widen(&written(&gpu, &out, len))
    };
    check_glu(run);
    // Far out: 0 or the gate itself, never NaN.
    let gate = [-3e38, -100.0, -88.0, 0.0, 88.0, 100.0, 1e30, 3e38].map(bf16::from_f32);
    for activation in ACTIVATIONS {
        let got = run(activation, &[gate, [bf16::ONE; 8]].concat(), 8);
        assert!(got[..4].iter().all(|x| x.abs() < 1e-30), "{activation:?} {got:?}");
        assert_eq!(got[4..], widen(&gate[4..]), "{activation:?}");
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn fused_embedding_and_gather() {
    let gpu = gpu();
    let kernels = FusedKernels::load(&gpu).unwrap();
    let mut rng = rng("embedding");
    for (vocab, n) in [(7, 8), (1000, 576), (300, 4096), (50, 16392)] {
        let rows = rng.random_range(1..70);
        let table = random(&mut rng, vocab * n);
        let sampled: Vec<i32> = (0..9).map(|_| rng.random_range(0..vocab as i32)).collect();
        let tokens: Vec<i32> = (0..rows).map(|_| rng.random_range(-9..vocab as i32)).collect();
        let want: Vec<i32> = tokens
            .iter()
            .map(|&t| if t < 0 { sampled[(-1 - t) as usize] } else { t })
            .collect();
        let want_rows: Vec<bf16> = want
            .iter()
            .flat_map(|&t| &table[t as usize * n..][..n])
            .copied()
            .collect();
        // The scale is rounded, then the product, as in Hugging Face's Gemma.
        let scale = (n as f32).sqrt();
        let scaled: Vec<bf16> = want_rows
            .iter()
            .map(|x| bf16::from_f32(x.to_f32() * bf16::from_f32(scale).to_f32()))
            .collect();

        let (table_, tokens_, sampled_) = (
            upload(&gpu, &table),
            upload(&gpu, &tokens),
            upload(&gpu, &sampled),
        );
        let (out, resolved) = (guarded::<bf16>(&gpu, rows * n), guarded::<i32>(&gpu, rows));
        let input = GpuTokens {
            tokens: tokens_.slice().range(0..rows),
            prev_sampled: sampled_.slice().range(0..9),
            resolved: resolved.slice().range(0..rows),
        };
        let table_ = table_.slice().range(0..vocab * n);
        let whole = GpuVocabulary::whole(vocab);
        for (scale, want_rows) in [(1.0, &want_rows), (scale, &scaled)] {
            kernels
                .embedding(table_, whole, input, scale, out.slice().range(0..rows * n))
                .unwrap();
            assert_eq!(written::<i32>(&gpu, &resolved, rows), want, "resolved tokens");
            assert!(
                written::<bf16>(&gpu, &out, rows * n) == *want_rows,
                "embedding [{vocab}, {n}] times {scale}"
            );
        }

        // Of two parts of the vocabulary each row is in one, and the other's are zeros.
        for part in [0..vocab / 3, vocab / 3..vocab] {
            let vocabulary = GpuVocabulary {
                all: vocab,
                first: part.start,
                count: part.len(),
            };
            let table = table_.range(part.start * n..part.end * n);
            let out_ = out.slice().range(0..rows * n);
            kernels.embedding(table, vocabulary, input, 1.0, out_).unwrap();
            assert_eq!(written::<i32>(&gpu, &resolved, rows), want, "resolved tokens");
            let found = written::<bf16>(&gpu, &out, rows * n);
            let pairs = found.chunks_exact(n).zip(want_rows.chunks_exact(n)).zip(&want);
            for ((found, row), &token) in pairs {
                match part.contains(&(token as usize)) {
                    true => assert!(found == row, "token {token} of {part:?}"),
                    false => assert!(
                        found.iter().all(|x| x.to_f32() == 0.0),
                        "token {token} of {part:?}"
                    ),
                }
            }
        }

        let picked = upload(&gpu, &want);
        let out = guarded::<bf16>(&gpu, rows * n);
        kernels
            .gather_rows(
                table_,
                picked.slice().range(0..rows),
                out.slice().range(0..rows * n),
            )
            .unwrap();
        assert!(
            written::<bf16>(&gpu, &out, rows * n) == want_rows,
            "gather [{vocab}, {n}]"
        );
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn fused_embedding_survives_garbage() {
    let gpu = gpu();
    let kernels = FusedKernels::load(&gpu).unwrap();
    let table = upload(&gpu, &random(&mut rng("garbage"), 10 * 64));
    let tokens = upload(&gpu, &[99i32, -1, -2]);
    let sampled = upload(&gpu, &[-1i32, i32::MAX]);
    let out = guarded::<bf16>(&gpu, 3 * 64);
    let input = GpuTokens {
        tokens: tokens.slice().range(0..3),
        prev_sampled: sampled.slice().range(0..2),
        resolved: tokens.slice().range(0..3),
    };
    kernels
        .embedding(
            table.slice().range(0..640),
            GpuVocabulary::whole(10),
            input,
            1.0,
            out.slice().range(0..3 * 64),
        )
        .unwrap();
    assert_eq!(download::<i32>(&gpu, &tokens, 3), [9, 0, 9]);
    written::<bf16>(&gpu, &out, 3 * 64);
}

#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn fused_random_weights() {
    let gpu = gpu();
    let kernels = FusedKernels::load(&gpu).unwrap();
    for len in [1, 7, 8, 1000, 1_000_003] {
        let out = guarded::<bf16>(&gpu, len);
        let to = out.slice().range(0..len);
        kernels.fill_random(to, 5, 0.02).unwrap();
        let first = written::<bf16>(&gpu, &out, len);
        kernels.fill_random(to, 5, 0.02).unwrap();
        assert!(first == written::<bf16>(&gpu, &out, len), "the same seed");
        kernels.fill_random(to, 6, 0.02).unwrap();
        let other = widen(&written::<bf16>(&gpu, &out, len));
        if len > 100_000 {
            let first = widen(&first);
            let mean = |f: &dyn Fn(usize) -> f32| (0..len).map(|i| f64::from(f(i))).sum::<f64>() / len as f64;
            let variance = mean(&|i| first[i] * first[i]);
            assert!(mean(&|i| first[i]).abs() < 1e-4, "mean");
            assert!(
                (variance.sqrt() - 0.02).abs() < 1e-4,
                "deviation {}",
                variance.sqrt()
            );
            assert!(
                mean(&|i| first[i] * other[i]).abs() < 1e-6,
                "seeds are independent"
            );
            assert!(
                mean(&|i| first[i] * first[(i + 1) % len]).abs() < 2e-6,
                "neighbours are independent"
            );
        }
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn fused_random_weights_in_eight_bits() {
    let gpu = gpu();
    let kernels = FusedKernels::load(&gpu).unwrap();
    for len in [1, 7, 8, 1000, 1_000_003] {
        let out = guarded::<u8>(&gpu, len);
        let to = out.slice().range(0..len);
        let filled = |seed| {
            kernels.fill_random_e4m3(to, seed, 4.0).unwrap();
            written::<u8>(&gpu, &out, len)
        };
        let first = filled(5);
        assert!(first == filled(5), "the same seed");
        let other = filled(6);
        if len > 100_000 {
            let mean = |f: &dyn Fn(usize) -> f32| (0..len).map(|i| f64::from(f(i))).sum::<f64>() / len as f64;
            let value = |codes: &[u8], i: usize| e4m3_to_f32(codes[i]);
            let deviation = mean(&|i| value(&first, i).powi(2)).sqrt();
            assert!(mean(&|i| value(&first, i)).abs() < 0.02, "mean");
            assert!((deviation - 4.0).abs() < 0.05, "deviation {deviation}");
            let product = mean(&|i| value(&first, i) * value(&other, i));
            assert!(product.abs() < 0.1, "seeds are independent");
            // What `bf16` weights of the same seed are, rounded.
            let wide = guarded::<bf16>(&gpu, len);
            kernels.fill_random(wide.slice().range(0..len), 6, 4.0).unwrap();
            let wide = widen(&written::<bf16>(&gpu, &wide, len));
            let near =
                |(code, wide): (&u8, &f32)| (e4m3_to_f32(*code) - wide).abs() <= wide.abs() / 14.0 + 2e-3;
            assert!(other.iter().zip(&wide).all(near), "the same values");
        }
    }
}
