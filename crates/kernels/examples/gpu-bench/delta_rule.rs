//! A Gated DeltaNet layer in the shape of Qwen3.5-9B: 16 key heads and 32 value heads of 128, a convolution of 4 taps.

use half::bf16;
use plimsoll_core::Component;
use plimsoll_device::Pod;
use plimsoll_device::cuda::{Gpu, GpuSlab};
use plimsoll_kernels::cuda::{
    DeltaArgs, DeltaKernels, FusedKernels, GpuDeltaGates, GpuStateRun, GpuStateTile,
};
use plimsoll_kernels::{DeltaLayout, StateRun};

use crate::common::{READ_BANDWIDTH, time_us};

const LAYOUT: DeltaLayout = DeltaLayout {
    key_heads: 16,
    value_heads: 32,
    adjacent: 2,
    key_dim: 128,
    value_dim: 128,
    taps: 4,
};
/// States of as many requests, which no cache holds.
const SLOTS: usize = 256;
/// Tokens of each request before.
const START: usize = 64;

struct Bench<'a> {
    gpu: &'a Gpu,
    kernels: DeltaKernels,
    weights: [GpuSlab; 4],
    states: [GpuSlab; 2],
}

/// Device memory that holds `values`.
fn upload<T: Pod>(gpu: &Gpu, values: &[T]) -> GpuSlab {
    let slab = gpu
        .alloc(Component::Arena, size_of_val(values))
        .expect("room on the GPU");
    gpu.upload(values, slab.slice::<T>().range(0..values.len()))
        .expect("a copy");
    slab
}

impl<'a> Bench<'a> {
    fn new(gpu: &'a Gpu) -> Self {
        let heads = vec![-1f32; LAYOUT.value_heads];
        Self {
            gpu,
            kernels: DeltaKernels::load(gpu).expect("kernels"),
            weights: [
                upload(gpu, &vec![0.3f32; LAYOUT.channels() * LAYOUT.taps]),
                upload(gpu, &heads),
                upload(gpu, &heads),
                upload(gpu, &vec![1f32; LAYOUT.value_dim]),
            ],
            states: [LAYOUT.conv_state(), LAYOUT.head_states()]
                .map(|elements| upload(gpu, &vec![0f32; SLOTS * elements])),
        }
    }

    /// Runs of so many tokens, longest first, none of them new.
    fn runs(&self, lens: &[usize]) {
        let (runs, rows) = (lens.len(), lens.iter().sum::<usize>());
        let fused = FusedKernels::load(self.gpu).expect("kernels");
        let random = |elements: usize| {
            let slab = self
                .gpu
                .alloc(Component::Arena, elements * size_of::<bf16>())
                .expect("room on the GPU");
            fused.fill_random(slab.slice(), 1, 1.0).expect("random values");
            slab
        };
        let x = random(rows * LAYOUT.width());
        let out = random(rows * LAYOUT.values());
        let scratch = random(2 * rows * DeltaKernels::scratch_floats(&LAYOUT));
        let in_chunks = lens.iter().filter(|&&len| len > 1).count();
        // Calls take other slots in turn, so that states are not in the cache.
        let sets: Vec<_> = (0..(SLOTS / runs).min(64))
            .map(|set| {
                let run = |index: usize| {
                    let run = StateRun {
                        first_row: lens[..index].iter().sum(),
                        len: lens[index],
                        before: Some(set * runs + index),
                        after: set * runs + index,
                    };
                    GpuStateRun::new(run, START, index < in_chunks)
                };
                let list: Vec<_> = (0..runs).map(run).collect();
                let tiles: Vec<_> = GpuStateTile::all(&list).collect();
                let chunks: Vec<_> = GpuStateTile::chunks(&list).collect();
                let counts = [tiles.len(), chunks.len()];
                // Memory for at least one.
                let chunks = [&chunks[..], &tiles[..1]].concat();
                let lists = [upload(self.gpu, &tiles), upload(self.gpu, &chunks)];
                (upload(self.gpu, &list), lists, counts)
            })
            .collect();
        let [conv, a_log, dt_bias, norm] = &self.weights;
        let us = time_us(self.gpu, 16, |call| {
            let (list, lists, counts) = &sets[call % sets.len()];
            let [tiles, chunks] = [0, 1].map(|i| lists[i].slice().range(0..counts[i]));
            self.kernels.forward(&DeltaArgs {
                layout: LAYOUT,
                conv: conv.slice(),
                gates: GpuDeltaGates {
                    a_log: a_log.slice(),
                    dt_bias: dt_bias.slice(),
                    norm: norm.slice(),
                    eps: 1e-6,
                },
                runs: list.slice().range(0..runs),
                tiles,
                chunks,
                in_chunks,
                of_one_token: runs - in_chunks,
                x: x.slice(),
                conv_states: self.states[0].slice(),
                head_states: self.states[1].slice(),
                scratch: scratch.slice(),
                out: out.slice(),
            })
        });
        // States are read and written, rows are read, and outputs written.
        let states = 2 * runs * (LAYOUT.conv_state() + LAYOUT.head_states()) * size_of::<f32>();
        let bytes = states + rows * (LAYOUT.width() + LAYOUT.values()) * size_of::<bf16>();
        let floor = bytes as f64 / READ_BANDWIDTH * 1e6;
        let [longest, shortest] = [lens[0], lens[runs - 1]];
        println!(
            "{runs:4} runs of {shortest:5} to {longest:5} {us:9.2} us  {:8.1} GB/s  floor {floor:8.2} us  x{:.2}  {:7.3} us a token",
            bytes as f64 / us / 1e3,
            us / floor,
            us / longest as f64,
        );
    }
}

pub(crate) fn bench(gpu: &Gpu) {
    let bench = Bench::new(gpu);
    for (runs, len) in [
        (1, 1),
        (8, 1),
        (32, 1),
        (256, 1),
        (1, 512),
        (1, 8192),
        (4, 2048),
        (16, 512),
    ] {
        bench.runs(&vec![len; runs]);
    }
    // A prompt beside requests that generate.
    let mut lens = vec![1; 32];
    lens[0] = 8192;
    bench.runs(&lens);
}
