//! The gate of attention. One body for the CPU twin and the GPU.

use half::bf16;
use plimsoll_kernels as cpu;
use plimsoll_kernels::cuda::DeltaKernels;

use crate::common::{assert_close, download, gpu, random, rng, upload, widen};

/// Of an output that is rounded to bf16 once.
const BF16: f64 = 4e-3;
/// Elements behind an output that must stay poisoned.
const GUARD: usize = 64;

/// Calls `run` with rows to be gated, their length, gates, their stride, and where they begin.
fn check_gates(run: impl Fn(&[bf16], usize, &[bf16], usize, usize) -> Vec<f32>, tolerance: f64) {
    let mut rng = rng("sigmoid_gate");
    for (rows, n, width, first) in [
        (1, 8, 8, 0),
        (3, 128, 512, 256),
        (40, 4096, 10_240, 4096),
        (7, 72, 240, 80),
    ] {
        let x = random(&mut rng, rows * n);
        let gates: Vec<bf16> = random(&mut rng, rows * width)
            .into_iter()
            .map(|x| bf16::from_f32(10.0 * x.to_f32()))
            .collect();
        let want: Vec<f64> = (0..rows * n)
            .map(|i| {
                let gate = gates[i / n * width + first + i % n].to_f64();
                x[i].to_f64() / (1.0 + (-gate).exp())
            })
            .collect();
        let what = format!("gates of [{rows}, {n}]");
        assert_close(&what, &run(&x, n, &gates, width, first), &want, tolerance);
    }
}

#[test]
fn gates_of_attention_on_the_cpu() {
    check_gates(
        |x, n, gates, width, first| {
            let mut out = widen(x);
            cpu::sigmoid_gate(&mut out, n, &widen(gates), width, first);
            out
        },
        1e-5,
    );
}

#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn gates_of_attention() {
    let gpu = gpu();
    let kernels = DeltaKernels::load(&gpu).unwrap();
    check_gates(
        |x, n, gates, width, first| {
            let mut all = x.to_vec();
            all.extend([bf16::from_bits(u16::MAX); GUARD]);
            let (out, gates_on_gpu) = (upload(&gpu, &all), upload(&gpu, gates));
            let gates = gates_on_gpu.slice().range(0..gates.len());
            let to = out.slice().range(0..x.len());
            kernels.sigmoid_gate(to, n, gates, width, first).unwrap();
            let mut all: Vec<bf16> = download(&gpu, &out, all.len());
            assert!(all.split_off(x.len()).iter().all(|x| x.to_bits() == u16::MAX));
            widen(&all)
        },
        BF16,
    );
}
