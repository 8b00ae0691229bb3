//! Choosing tokens from logits `[rows, 128256]`.

use plimsoll_core::{Component, SampleSpec, SamplingOptions, SamplingParams};
use plimsoll_device::Pod;
use plimsoll_device::cuda::{Gpu, GpuSlab};
use plimsoll_kernels::cuda::{RowLogprobs, SampleArgs, SampleKernels, SampleLists, SampleRow};

use crate::common::{READ_BANDWIDTH, time_us};

const VOCAB: usize = 128_256;

fn alloc<T: Pod>(gpu: &Gpu, values: &[T], copies: usize) -> GpuSlab {
    let slab = gpu
        .alloc(Component::Arena, (size_of_val(values) * copies).max(1))
        .expect("room on the GPU");
    for copy in 0..copies {
        let to = slab
            .slice::<T>()
            .range(copy * values.len()..(copy + 1) * values.len());
        gpu.upload(values, to).expect("a copy");
    }
    slab
}

/// Bell-shaped, of standard deviation `spread`, the same every time.
fn logits(spread: f32) -> Vec<f32> {
    let mut state = 1u32;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 24) as f32 - 0.5
    };
    (0..VOCAB)
        .map(|_| (0..12).map(|_| next()).sum::<f32>() * spread)
        .collect()
}

pub(crate) fn bench(gpu: &Gpu) {
    let kernels = SampleKernels::load(gpu).expect("kernels");
    let all = SamplingOptions::default();
    let with = |temperature, top_k, top_p| SamplingOptions {
        temperature: Some(temperature),
        top_k: Some(top_k),
        top_p: Some(top_p),
        ..all.clone()
    };
    let cases = [
        ("greedy", 2.0, with(0.0, 0, 1.0)),
        ("temperature", 2.0, with(0.7, 0, 1.0)),
        ("top_k 50", 2.0, with(0.7, 50, 1.0)),
        ("top_p 0.9 peaked", 3.0, with(0.7, 0, 0.9)),
        ("top_k 50, top_p 0.9", 2.0, with(0.7, 50, 0.9)),
        ("top_p 0.9 flat", 0.5, with(1.0, 0, 0.9)),
        (
            "greedy, 20 logprobs",
            2.0,
            SamplingOptions {
                logprobs: Some(20),
                ..with(0.0, 0, 1.0)
            },
        ),
        (
            "greedy, penalties",
            2.0,
            SamplingOptions {
                frequency_penalty: Some(0.5),
                ..with(0.0, 0, 1.0)
            },
        ),
    ];
    for (name, spread, options) in cases {
        let row = logits(spread);
        let params = std::sync::Arc::new(SamplingParams::new(&options, VOCAB).expect("legal"));
        for rows in [1, 8, 32, 64, 256] {
            // Past the L2 cache, as after the projection that makes them they partly are too.
            let copies = if rows > 64 { 3 } else { 2 };
            let logits = alloc(gpu, &row, rows * copies);
            let mut lists = SampleLists::default();
            let specs: Vec<SampleRow> = (0..rows)
                .map(|i| {
                    let spec = SampleSpec {
                        params: params.clone(),
                        seed: i as u64,
                        index: 7,
                        history: (0..1000).collect(),
                        prompt_len: 500,
                        constrained: false,
                    };
                    SampleRow::new(&spec, None, &mut lists)
                })
                .collect();
            let specs = alloc(gpu, &specs, 1);
            let (history, biases) = (alloc(gpu, &lists.history, 1), alloc(gpu, &lists.biases, 1));
            let sampled = alloc(gpu, &vec![0i32; rows], 1);
            let logprobs = gpu
                .alloc(Component::Arena, rows * size_of::<RowLogprobs>())
                .expect("room on the GPU");
            let us = time_us(gpu, 20, |i| {
                let at = i % copies * rows * VOCAB;
                kernels.sample(&SampleArgs {
                    logits: logits.slice().range(at..at + rows * VOCAB),
                    rows: specs.slice(),
                    history: history.slice(),
                    biases: biases.slice(),
                    resolved: sampled.slice(),
                    masks: None,
                    sampled: sampled.slice(),
                    logprobs: logprobs.slice(),
                })
            });
            let floor = (rows * VOCAB * 4) as f64 / READ_BANDWIDTH * 1e6;
            println!(
                "{name:22} {rows:4} {us:9.2} us  floor {floor:7.2} us  x{:.2}",
                us / floor
            );
        }
    }
}
