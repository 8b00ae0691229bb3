//! Sums of rows. One body for the CPU twin and the GPU.

use half::bf16;
use plimsoll_kernels as cpu;
use plimsoll_kernels::cuda::FusedKernels;
use rand::Rng;

use crate::common::{assert_close, download, gpu, poisoned, random, rng, upload, widen};

/// Tolerance of sums in f32.
const F32: f64 = 1e-5;
/// Elements behind an output that must stay poisoned.
const GUARD: usize = 64;

/// Calls `run` with rows of `n`, and spans of them; it returns their sums.
fn check(run: impl Fn(&[bf16], usize, &[[i32; 2]]) -> Vec<f32>) {
    let mut rng = rng("sum_rows");
    for (rows, n) in [(1, 8), (40, 576), (700, 64), (300, 4096), (5, 16392)] {
        let x = random(&mut rng, rows * n);
        let mut spans = vec![[0, rows as i32], [rows as i32 - 1, 1]];
        for _ in 0..rng.random_range(0..30) {
            let first = rng.random_range(0..rows as i32);
            spans.push([first, rng.random_range(1..=rows as i32 - first)]);
        }
        let mut want = Vec::new();
        for &[first, len] in &spans {
            let rows = x.chunks_exact(n).skip(first as usize).take(len as usize);
            let mut sum = vec![0.0; n];
            rows.for_each(|row| sum.iter_mut().zip(row).for_each(|(sum, &x)| *sum += f64::from(x)));
            want.extend(sum);
        }
        assert_close(
            &format!("sum_rows [{rows}, {n}]"),
            &run(&x, n, &spans),
            &want,
            F32,
        );
    }
}

#[test]
fn sums_of_rows_on_the_cpu() {
    check(|x, n, spans| {
        let x = widen(x);
        let sums = spans.iter().flat_map(|&[first, len]| {
            let (first, len) = (first as usize, len as usize);
            let mut sum = vec![0.0; n];
            cpu::sum_rows(&x[first * n..(first + len) * n], &mut sum);
            sum.into_iter().map(|sum| sum as f32)
        });
        sums.collect()
    });
}

#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn sums_of_rows() {
    let gpu = gpu();
    let kernels = FusedKernels::load(&gpu).unwrap();
    check(|x, n, spans| {
        let len = spans.len() * n;
        let (rows, flat) = (upload(&gpu, x), upload(&gpu, spans.as_flattened()));
        let out = poisoned::<f32>(&gpu, len + GUARD);
        let (x, spans) = (
            rows.slice().range(0..x.len()),
            flat.slice().range(0..2 * spans.len()),
        );
        kernels.sum_rows(x, spans, out.slice().range(0..len)).unwrap();
        let mut all: Vec<f32> = download(&gpu, &out, len + GUARD);
        let behind = all.split_off(len);
        assert!(
            behind.iter().all(|x| x.to_bits() == u32::MAX),
            "written beyond the end"
        );
        all
    });
}
