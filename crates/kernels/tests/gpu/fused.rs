//! Element-wise kernels. Each test has one body, which the CPU twin and the GPU fill in.

mod rope;

use half::{bf16, f16};
use plimsoll_core::{BlockSize, PageId};
use plimsoll_device::Pod;
use plimsoll_device::cuda::{Gpu, GpuSlab};
use plimsoll_kernels as cpu;
use plimsoll_kernels::cuda::{FusedKernels, GpuKvWrite, GpuNorm, GpuQkNorm, GpuRope, GpuTokens, rope_turns};
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

/// A norm's input: `delta` is empty where nothing is added; `rows` picks rows.
struct NormCase {
    n: usize,
    hidden: Vec<bf16>,
    delta: Vec<bf16>,
    weight: Vec<f32>,
    rows: Option<Vec<i32>>,
}

/// Calls `run` with cases; it returns the residual stream afterwards and the norm.
fn check_norm(name: &str, add: bool, gather: bool, run: impl Fn(&NormCase) -> (Vec<f32>, Vec<f32>)) {
    let mut rng = rng(name);
    for n in [8, 576, 2048, 4096, 5120, 8192, 8200, 16384] {
        let tokens = rng.random_range(1..40) * if n == 576 { 50 } else { 1 };
        let case = NormCase {
            n,
            hidden: random(&mut rng, tokens * n),
            delta: random(&mut rng, if add { tokens * n } else { 0 }),
            weight: random_f32(&mut rng, n),
            rows: gather.then(|| {
                (0..rng.random_range(1..60))
                    .map(|_| rng.random_range(0..tokens as i32))
                    .collect()
            }),
        };
        let (residual, out) = run(&case);
        let sum: Vec<f64> = (0..tokens * n)
            .map(|i| f64::from(case.hidden[i]) + case.delta.get(i).map_or(0.0, |&d| f64::from(d)))
            .collect();
        let all: Vec<i32> = (0..tokens as i32).collect();
        let rows = case.rows.as_ref().unwrap_or(&all);
        let mut want = Vec::new();
        for &row in rows {
            let row = &sum[row as usize * n..][..n];
            let mean = row.iter().map(|x| x * x).sum::<f64>() / n as f64;
            let scale = 1.0 / (mean + f64::from(EPS)).sqrt();
            want.extend(
                row.iter()
                    .zip(&case.weight)
                    .map(|(x, &w)| x * scale * f64::from(w)),
            );
        }
        assert_close(&format!("{name} [{tokens}, {n}]"), &out, &want, BF16);
        let hidden: Vec<f64> = case.hidden.iter().map(|&x| f64::from(x)).collect();
        let kept = if add && !gather { &sum } else { &hidden };
        assert_close(&format!("{name} [{tokens}, {n}] residual"), &residual, kept, BF16);
    }
}

fn norm_on_gpu(gpu: &Gpu, kernels: &FusedKernels, case: &NormCase) -> (Vec<f32>, Vec<f32>) {
    let len = case.hidden.len();
    let mut hidden = case.hidden.clone();
    hidden.extend([bf16::from_bits(0xffff); GUARD]);
    let (hidden, delta) = (upload(gpu, &hidden), upload(gpu, &case.delta));
    let weight = upload(gpu, &case.weight);
    let norm = GpuNorm {
        weight: weight.slice::<f32>().range(0..case.n),
        eps: EPS,
    };
    let rows = case.rows.as_ref().map_or(len / case.n, Vec::len);
    let out = guarded::<bf16>(gpu, rows * case.n);
    let (h, o) = (hidden.slice().range(0..len), out.slice().range(0..rows * case.n));
    match &case.rows {
        Some(rows) => {
            let picked = upload(gpu, rows);
            let picked = picked.slice::<i32>().range(0..rows.len());
            let done = kernels.add_rms_norm_gathered(h, delta.slice().range(0..len), picked, norm, o);
            done.and_then(|()| gpu.synchronize())
        }
        None if case.delta.is_empty() => kernels.rms_norm(h, norm, o),
        None => kernels.add_rms_norm(h, delta.slice().range(0..len), norm, o),
    }
    .unwrap();
    (
        widen(&written(gpu, &hidden, len)),
        widen(&written(gpu, &out, rows * case.n)),
    )
}

fn norm_on_cpu(case: &NormCase) -> (Vec<f32>, Vec<f32>) {
    let mut hidden = widen(&case.hidden);
    let mut out = vec![f32::NAN; hidden.len()];
    if case.delta.is_empty() {
        cpu::rms_norm(&hidden, &case.weight, EPS, &mut out);
    } else {
        cpu::add_rms_norm(&mut hidden, &widen(&case.delta), &case.weight, EPS, &mut out);
    }
    (hidden, out)
}

#[test]
fn norms_on_the_cpu() {
    check_norm("rms_norm", false, false, norm_on_cpu);
    check_norm("add_rms_norm", true, false, norm_on_cpu);
}

#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn fused_norms() {
    let gpu = gpu();
    let kernels = FusedKernels::load(&gpu).unwrap();
    let run = |case: &NormCase| norm_on_gpu(&gpu, &kernels, case);
    check_norm("rms_norm", false, false, run);
    check_norm("add_rms_norm", true, false, run);
    check_norm("add_rms_norm_gathered", true, true, run);
}

/// The residual stream is what Hugging Face's is: the exact sum, rounded once.
#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn fused_residual_is_rounded_once() {
    let gpu = gpu();
    let kernels = FusedKernels::load(&gpu).unwrap();
    let mut rng = rng("residual");
    let case = NormCase {
        n: 576,
        hidden: random(&mut rng, 33 * 576),
        delta: random(&mut rng, 33 * 576),
        weight: vec![1.0; 576],
        rows: None,
    };
    let (residual, _) = norm_on_gpu(&gpu, &kernels, &case);
    for (i, got) in residual.iter().enumerate() {
        let want = bf16::from_f32(case.hidden[i].to_f32() + case.delta[i].to_f32());
        assert_eq!(*got, want.to_f32(), "element {i}");
    }
}

/// Calls `run` with gate and up, the inner size; it returns the products.
fn check_silu_mul(run: impl Fn(&[bf16], usize) -> Vec<f32>) {
    let mut rng = rng("silu_mul");
    for (rows, inner) in [(1, 8), (3, 1536), (17, 14336), (200, 2056), (1, 14336)] {
        let mut gate_up = random(&mut rng, rows * 2 * inner);
        gate_up
            .iter_mut()
            .for_each(|x| *x = bf16::from_f32(x.to_f32() * 30.0));
        let mut want = Vec::new();
        for row in gate_up.chunks_exact(2 * inner) {
            let pair = |i: usize| (f64::from(row[i]), f64::from(row[inner + i]));
            want.extend(
                (0..inner)
                    .map(pair)
                    .map(|(gate, up)| gate / (1.0 + (-gate).exp()) * up),
            );
        }
        assert_close(
            &format!("silu_mul [{rows}, {inner}]"),
            &run(&gate_up, inner),
            &want,
            BF16,
        );
    }
}

#[test]
fn silu_mul_on_the_cpu() {
    check_silu_mul(|gate_up, inner| {
        let mut out = vec![f32::NAN; gate_up.len() / 2];
        cpu::silu_mul(&widen(gate_up), inner, &mut out);
        out
    });
}

#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn fused_silu_mul() {
    let gpu = gpu();
    let kernels = FusedKernels::load(&gpu).unwrap();
    check_silu_mul(|gate_up, inner| {
        let len = gate_up.len() / 2;
        let (input, out) = (upload(&gpu, gate_up), guarded::<bf16>(&gpu, len));
        let gate_up = input.slice().range(0..gate_up.len());
        kernels
            .silu_mul(gate_up, inner, out.slice().range(0..len))
            .unwrap();
        widen(&written(&gpu, &out, len))
    });
    // Far out: silu is 0 or the gate itself, never NaN.
    let inner = 8;
    let gate = [-3e38, -100.0, -88.0, 0.0, 88.0, 100.0, 1e30, 3e38].map(bf16::from_f32);
    let input = upload(&gpu, &[gate, [bf16::ONE; 8]].concat());
    let out = guarded::<bf16>(&gpu, inner);
    kernels
        .silu_mul(input.slice().range(0..16), inner, out.slice().range(0..8))
        .unwrap();
    let got = written::<bf16>(&gpu, &out, inner);
    assert!(got[..3].iter().all(|x| x.to_f32().abs() < 1e-30), "{got:?}");
    assert_eq!(got[4..], gate[4..]);
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
        kernels
            .embedding(table_, input, out.slice().range(0..rows * n))
            .unwrap();
        assert_eq!(written::<i32>(&gpu, &resolved, rows), want, "resolved tokens");
        assert!(
            written::<bf16>(&gpu, &out, rows * n) == want_rows,
            "embedding [{vocab}, {n}]"
        );

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
        .embedding(table.slice().range(0..640), input, out.slice().range(0..3 * 64))
        .unwrap();
    assert_eq!(download::<i32>(&gpu, &tokens, 3), [9, 0, 9]);
    written::<bf16>(&gpu, &out, 3 * 64);
}

#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn fused_weights() {
    let gpu = gpu();
    let kernels = FusedKernels::load(&gpu).unwrap();
    let mut rng = rng("weights");
    for len in [1, 7, 8, 1000, 1_000_003] {
        let values: Vec<f32> = (0..len).map(|_| rng.random_range(-9.0..9.0)).collect();
        let halves: Vec<f16> = values.iter().map(|&x| f16::from_f32(x)).collect();
        let (floats_, halves_) = (upload(&gpu, &values), upload(&gpu, &halves));
        let out = guarded::<bf16>(&gpu, len);
        let to = out.slice().range(0..len);
        kernels.convert_f32(floats_.slice().range(0..len), to).unwrap();
        let want: Vec<bf16> = values.iter().map(|&x| bf16::from_f32(x)).collect();
        assert!(written::<bf16>(&gpu, &out, len) == want, "f32, {len}");
        kernels.convert_f16(halves_.slice().range(0..len), to).unwrap();
        let want: Vec<bf16> = halves.iter().map(|x| bf16::from_f32(x.to_f32())).collect();
        assert!(written::<bf16>(&gpu, &out, len) == want, "f16, {len}");

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
