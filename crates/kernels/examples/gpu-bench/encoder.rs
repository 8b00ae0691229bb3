//! An encoder's layer of Qwen3-VL-8B's shape: 16 heads of 72, 4304 inside, images of 1024 and of 4096 patches.

use std::sync::Arc;

use half::bf16;
use plimsoll_core::Component;
use plimsoll_device::cuda::{Gpu, GpuSlab, GpuSlice};
use plimsoll_kernels::Gelu;
use plimsoll_kernels::cuda::{
    EncoderKernels, FusedKernels, GpuLayerNorm, GpuLinear, GpuMatrix, GpuWeight, Linears, PatchAttention,
    PatchGrid, PatchSegments,
};

use crate::common::{BF16_RATE, READ_BANDWIDTH, time_us};

const HEADS: usize = 16;
const DIM: usize = 72;
const HIDDEN: usize = HEADS * DIM;
const INNER: usize = 4304;
const MOST: usize = 4096;

fn noise(gpu: &Gpu, kernels: &FusedKernels, elements: usize) -> GpuSlab {
    let slab = gpu
        .alloc(Component::Arena, 2 * elements)
        .expect("room on the GPU");
    kernels.fill_random(slab.slice(), 1, 1.0).expect("random values");
    slab
}

fn rows(slab: &GpuSlab, elements: usize) -> GpuSlice<'_, bf16> {
    slab.slice().range(0..elements)
}

fn line(name: &str, patches: usize, floor: f64, us: f64) {
    println!(
        "{name:24} {patches:6} {us:9.2} us  floor {floor:8.2} us  x{:.2}",
        us / floor
    );
}

pub(crate) fn bench(gpu: &Gpu) {
    let fused = FusedKernels::load(gpu).expect("kernels");
    let kernels = EncoderKernels::load(gpu).expect("kernels");
    let workspace = gpu.alloc(Component::Runtime, Linears::WORKSPACE_BYTES);
    let linears = Linears::load(gpu, workspace.expect("room")).expect("cuBLAS");
    let [hidden, delta, normed] = [0; 3].map(|_| noise(gpu, &fused, MOST * HIDDEN));
    let [wide, other] = [0; 2].map(|_| noise(gpu, &fused, MOST * INNER));
    let angles = gpu.alloc(Component::Arena, MOST * DIM * 4).expect("room");
    let weights = Arc::new(noise(gpu, &fused, INNER * INNER));
    let floats = gpu.alloc(Component::Arena, 4 * INNER).expect("room");
    gpu.fill(floats.slice(), 0).expect("zeros");
    for side in [32, 64] {
        let patches = side * side;
        let moved = |elements: usize| (patches * elements * 2) as f64 / READ_BANDWIDTH * 1e6;
        let grid = PatchGrid {
            patches,
            height: side,
            width: side,
            merge: 2,
            order: None,
        };
        let turned = angles.slice().range(0..patches * DIM);
        let us = time_us(gpu, 16, |_| kernels.patch_angles(grid, 1e4, 0.0, turned));
        line("patch_angles", patches, moved(2 * DIM), us);
        let norm = GpuLayerNorm {
            weight: floats.slice().range(0..HIDDEN),
            bias: floats.slice().range(0..HIDDEN),
            eps: 1e-6,
        };
        let (x, added, out) = (
            rows(&hidden, patches * HIDDEN),
            rows(&delta, patches * HIDDEN),
            rows(&normed, patches * HIDDEN),
        );
        let us = time_us(gpu, 16, |_| kernels.layer_norm(x, Some(added), norm, out));
        line("layer_norm", patches, moved(4 * HIDDEN), us);
        let qkv = rows(&wide, patches * 3 * HIDDEN);
        let us = time_us(gpu, 16, |_| kernels.rotate(qkv, HEADS, turned, patches));
        line("rotate", patches, moved(4 * HIDDEN), us);
        let args = PatchAttention {
            qkv,
            heads: HEADS,
            head_dim: DIM,
            segments: PatchSegments::Equal {
                len: patches,
                rows: 0..patches,
            },
            scale: 1.0 / (DIM as f32).sqrt(),
            out,
        };
        let us = time_us(gpu, 8, |_| kernels.attention(&args));
        let work = (4 * patches * patches * HIDDEN) as f64 / BF16_RATE * 1e6;
        line("attention", patches, work, us);
        let us = time_us(gpu, 16, |_| {
            kernels.gelu(Gelu::Tanh, rows(&wide, patches * INNER))
        });
        line("gelu", patches, moved(2 * INNER), us);
        for (name, n, k) in [
            ("patches", HIDDEN, 1536),
            ("qkv", 3 * HIDDEN, HIDDEN),
            ("output", HIDDEN, HIDDEN),
            ("up", INNER, HIDDEN),
            ("down", HIDDEN, INNER),
        ] {
            let matrix = GpuMatrix::Bf16(GpuWeight::new(&weights, 0..n * k));
            let linear = GpuLinear::new(matrix, Some(GpuWeight::new(&weights, 0..n)), n, k);
            let us = time_us(gpu, 8, |_| {
                linears.forward(rows(&wide, patches * k), &linear, rows(&other, patches * n))
            });
            line(name, patches, (2 * patches * n * k) as f64 / BF16_RATE * 1e6, us);
        }
    }
}
