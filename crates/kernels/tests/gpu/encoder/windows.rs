//! What encoders with windows and gated MLPs do.

use half::bf16;
use plimsoll_kernels::cuda::{EncoderKernels, PatchAttention, PatchSegments};
use plimsoll_kernels::{self as cpu, Activation};
use rand::Rng;

use super::{Attention, BF16, GUARD, upload_guarded, written};
use crate::common::{assert_close, gpu, poisoned, random, rng, upload, widen};

/// Windows of different lengths, in two launches: each as if it were alone.
#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn encoder_attention_stays_within_windows() {
    let gpu = gpu();
    let kernels = EncoderKernels::load(&gpu).unwrap();
    let mut rng = rng("attention within windows");
    for [heads, dim] in [[3, 16], [16, 80], [2, 72], [2, 104], [1, 128], [4, 64]] {
        let lens = [1, 4, 16, 32, 63, 64, 64, 64, 100, 128, 200, 300];
        let count = rng.random_range(2..30);
        let mut windows: Vec<Attention> = (0..count)
            .map(|_| {
                let len = lens[rng.random_range(0..lens.len())];
                Attention::random(&mut rng, [heads, dim, len, 1])
            })
            .collect();
        let scale = windows[0].scale;
        windows.iter_mut().for_each(|window| window.scale = scale);
        let qkv: Vec<bf16> = windows.iter().flat_map(|window| window.qkv.clone()).collect();
        let want: Vec<f64> = windows.iter().flat_map(Attention::reference).collect();
        let mut starts = vec![0];
        for window in &windows {
            starts.push(starts[starts.len() - 1] + window.segment as i32);
        }
        let longest = windows.iter().map(|window| window.segment).max().unwrap_or(0);
        let (from, list) = (upload_guarded(&gpu, &qkv), upload(&gpu, &starts));
        let out = poisoned::<bf16>(&gpu, want.len() + GUARD);
        let cut = rng.random_range(0..=count);
        for some in [0..cut, cut..count] {
            kernels
                .attention(&PatchAttention {
                    qkv: from.slice().range(0..qkv.len()),
                    heads,
                    head_dim: dim,
                    segments: PatchSegments::Between {
                        starts: list.slice().range(some.start..some.end + 1),
                        longest,
                    },
                    scale,
                    out: out.slice().range(0..want.len()),
                })
                .unwrap();
        }
        let what = format!("{heads} heads of {dim} in windows that begin at {starts:?}, scale {scale}");
        assert_close(&what, &written(&gpu, &out, want.len()), &want, BF16);
    }
}

/// The twin's test is `activation.rs`'s own: here it is the reference.
#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn encoder_gates() {
    let gpu = gpu();
    let kernels = EncoderKernels::load(&gpu).unwrap();
    let mut rng = rng("gates");
    for inner in [4, 12, 56, 100, 3420, 4096] {
        for activation in [Activation::Silu, Activation::GeluTanh] {
            let rows = rng.random_range(1..40);
            let mut gate_up = random(&mut rng, 2 * rows * inner);
            // Gates of all sizes.
            for x in gate_up.iter_mut().step_by(3) {
                *x *= bf16::from_f32(6.0);
            }
            let mut want = vec![f32::NAN; rows * inner];
            cpu::glu(activation, &widen(&gate_up), inner, &mut want);
            let want: Vec<f64> = want.into_iter().map(f64::from).collect();
            let from = upload_guarded(&gpu, &gate_up);
            let out = poisoned::<bf16>(&gpu, want.len() + GUARD);
            kernels
                .glu(
                    activation,
                    from.slice().range(0..gate_up.len()),
                    inner,
                    out.slice().range(0..want.len()),
                )
                .unwrap();
            let what = format!("{activation:?} of {rows} rows of {inner}");
            assert_close(&what, &written(&gpu, &out, want.len()), &want, BF16);
        }
    }
}
