//! Soft caps of logits. One body for the CPU twin and the GPU.

use plimsoll_kernels as cpu;
use plimsoll_kernels::cuda::FusedKernels;
use rand::Rng;

use crate::common::{download, gpu, rng, upload};

/// Values behind the last that must stay as they are.
const GUARD: usize = 64;

/// Calls `run` with values and a cap.
fn check(run: impl Fn(&[f32], f32) -> Vec<f32>) {
    let mut rng = rng("soft_cap");
    for len in [1, 3, 4, 160, 4097, 256_000, 1_000_003] {
        let cap = rng.random_range(0.5..60.0);
        let mut x: Vec<f32> = (0..len).map(|_| rng.random_range(-200.0..200.0)).collect();
        x[0] = rng.random_range(-0.01..0.01);
        let out = run(&x, cap);
        assert_eq!(out.len(), len);
        for (x, out) in x.iter().zip(out) {
            let want = f64::from(cap) * (f64::from(*x) / f64::from(cap)).tanh();
            let error = (f64::from(out) - want).abs();
            assert!(
                error <= 1e-6 * f64::from(cap),
                "cap {cap}: {x} gives {out}, not {want}"
            );
        }
    }
    let out = run(&[f32::NAN, 1e30, -1e30], 30.0);
    assert!(out[0].is_nan() && out[1..] == [30.0, -30.0], "{out:?}");
}

#[test]
fn soft_caps_on_the_cpu() {
    check(|x, cap| {
        let mut x = x.to_vec();
        cpu::soft_cap(&mut x, cap);
        x
    });
}

#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn soft_caps() {
    let gpu = gpu();
    let kernels = FusedKernels::load(&gpu).unwrap();
    check(|x, cap| {
        let mut all = x.to_vec();
        all.extend([123.0; GUARD]);
        let slab = upload(&gpu, &all);
        kernels.soft_cap(slab.slice().range(0..x.len()), cap).unwrap();
        let mut all: Vec<f32> = download(&gpu, &slab, all.len());
        assert_eq!(all.split_off(x.len()), [123.0; GUARD], "written beyond the end");
        all
    });
}
