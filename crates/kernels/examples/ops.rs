//! Times the operations of a step with the shapes of SmolLM2-135M: best of many, in microseconds.
//!
//! `cargo run --release -p plimsoll-kernels --example ops [THREADS]`
#![allow(clippy::print_stdout, reason = "a benchmark prints")]

use std::time::{Duration, Instant};

use plimsoll_core::{BlockSize, PageId, SampleSpec, SamplingOptions, SamplingParams, Scratch};
use plimsoll_device::{Arena, Budget};
use plimsoll_kernels::{
    Activation, AttentionOptions, KvLayout, Linear, Matrix, PagedKv, RunMeta, Sees, WeightType, add_rms_norm,
    attention, glu, instruction_set, sample, set_threads, threads,
};
use rand::{Rng, SeedableRng, rngs::StdRng};

const BATCHES: [usize; 4] = [1, 4, 16, 512];

fn main() {
    if let Some(count) = std::env::args().nth(1).and_then(|arg| arg.parse().ok()) {
        set_threads(count);
    }
    println!("{} threads, {}", threads(), instruction_set());
    let mut bench = Bench::new();
    for dtype in [
        WeightType::Q4_1,
        WeightType::Q4_0,
        WeightType::Q4K,
        WeightType::Q6K,
        WeightType::Bf16,
        WeightType::F32,
    ] {
        for (inputs, outputs) in [(768, 960), (576, 960), (576, 3072), (1536, 576)] {
            bench.linear(dtype, inputs, outputs);
        }
    }
    bench.linear(WeightType::Q8_0, 576, 49152);
    for (batch, len, context) in [(1, 1, 64), (1, 1, 512), (1, 1, 4096), (16, 1, 512), (1, 512, 0)] {
        bench.attention(batch, len, context);
    }
    bench.rows();
    bench.sampler();
}

struct Bench {
    budget: Budget,
    arena: Arena,
    rng: StdRng,
}

impl Bench {
    fn new() -> Self {
        let budget = Budget::new(4 << 30);
        let arena = Arena::new(&budget, Scratch::Growable).expect("an empty arena");
        Self {
            budget,
            arena,
            rng: StdRng::seed_from_u64(1),
        }
    }

    fn floats(&mut self, len: usize) -> Vec<f32> {
        (0..len).map(|_| self.rng.random_range(-1.0..1.0)).collect()
    }

    fn linear(&mut self, dtype: WeightType, inputs: usize, outputs: usize) {
        let Some(row) = dtype.row_bytes(inputs) else {
            return;
        };
        let mut data = vec![0u8; outputs * row];
        match dtype {
            // 1 / 128 to 1, and never a subnormal.
            WeightType::F32 | WeightType::F16 | WeightType::Bf16 => {
                data.iter_mut()
                    .enumerate()
                    .for_each(|(i, b)| *b = if i % 2 == 1 { 0x3c } else { i as u8 });
            }
            // Small bytes everywhere keep every format's scales finite.
            _ => data.fill_with(|| self.rng.random_range(0..60)),
        }
        let matrix = Matrix::new(dtype, outputs, inputs, &data).expect("the shape is right");
        // Several copies, rotated, so that weights come from memory as they do in a model.
        let copies = (64 << 20) / data.len().max(1 << 20);
        let layers: Vec<Linear> = (0..copies)
            .map(|_| Linear::new(&[matrix], None, &self.budget).expect("memory"))
            .collect();
        for m in BATCHES {
            let x = self.floats(m * inputs);
            let mut out = vec![0f32; m * outputs];
            let mut next = 0;
            let time = best(copies * 2, || {
                layers[next % copies]
                    .forward(&x, &mut out, &self.arena)
                    .expect("memory");
                next += 1;
            });
            let seconds = time.as_secs_f64();
            println!(
                "linear {dtype:?} {inputs}x{outputs} m {m}: {:.1} us, {:.1} GB/s, {:.0} GOP/s",
                seconds * 1e6,
                layers[0].bytes() as f64 / seconds / 1e9,
                2.0 * (m * inputs * outputs) as f64 / seconds / 1e9,
            );
        }
    }

    fn attention(&mut self, batch: usize, len: usize, context: usize) {
        let layout = KvLayout {
            kv_heads: 3,
            head_dim: 64,
            block_size: BlockSize::default(),
        };
        let per_run = layout.block_size.blocks_for(context + len);
        let blocks: Vec<Vec<PageId>> = (0..batch)
            .map(|b| (0..per_run).map(|i| PageId((i * batch + b) as u32)).collect())
            .collect();
        let (k, v) = (
            self.floats(layout.elements(batch * per_run)),
            self.floats(layout.elements(batch * per_run)),
        );
        let q = self.floats(batch * len * 576);
        let mut out = vec![0f32; q.len()];
        let run = |b: usize| RunMeta {
            first_row: b * len,
            len,
            start: context,
            first_block: 0,
            blocks: &blocks[b],
        };
        let runs: Vec<RunMeta<'_>> = (0..batch).map(run).collect();
        let options = AttentionOptions {
            scale: 0.125,
            window: None,
            soft_cap: None,
            sinks: None,
            sees: Sees::Past,
        };
        let kv = PagedKv {
            k: &k,
            v: &v,
            layout,
            stride: layout.elements(1),
        };
        let time = best(200, || {
            attention(&q, kv, &runs, options, &mut out, &self.arena).expect("memory")
        });
        println!(
            "attention {batch} x {len} tokens after {context}: {:.1} us",
            time.as_secs_f64() * 1e6
        );
    }

    fn rows(&mut self) {
        for m in BATCHES {
            let (mut residual, x, weight) = (self.floats(m * 576), vec![0f32; m * 576], self.floats(576));
            let mut out = vec![0f32; m * 576];
            let time = best(200, || add_rms_norm(&mut residual, &x, &weight, 1e-5, &mut out));
            let gate_up = self.floats(m * 3072);
            let mut activated = vec![0f32; m * 1536];
            let silu = best(200, || glu(Activation::Silu, &gate_up, 1536, &mut activated));
            println!(
                "m {m}: add_rms_norm {:.1} us, silu_mul {:.1} us",
                time.as_secs_f64() * 1e6,
                silu.as_secs_f64() * 1e6
            );
        }
    }

    fn sampler(&mut self) {
        let vocab = 49152;
        let logits = self.floats(vocab);
        let options = [
            (
                "greedy",
                SamplingOptions {
                    temperature: Some(0.0),
                    ..Default::default()
                },
            ),
            ("temperature", SamplingOptions::default()),
            (
                "top_p 0.9",
                SamplingOptions {
                    top_p: Some(0.9),
                    ..Default::default()
                },
            ),
            (
                "top_k 40",
                SamplingOptions {
                    top_k: Some(40),
                    ..Default::default()
                },
            ),
            (
                "top_k 40, 20 logprobs",
                SamplingOptions {
                    top_k: Some(40),
                    logprobs: Some(20),
                    ..Default::default()
                },
            ),
        ];
        for (name, options) in options {
            let params = SamplingParams::new(&options, vocab).expect("legal").into();
            let spec = SampleSpec {
                params,
                seed: 1,
                index: 0,
                history: vec![],
                prompt_len: 0,
                constrained: false,
            };
            let mut row = logits.clone();
            let time = best(50, || {
                drop(sample(&mut row, &[&spec], &self.arena).expect("memory"))
            });
            println!("sample {name}: {:.1} us", time.as_secs_f64() * 1e6);
        }
    }
}

/// The least of `times` calls.
fn best(times: usize, mut call: impl FnMut()) -> Duration {
    let once = |_| {
        let start = Instant::now();
        call();
        start.elapsed()
    };
    (0..times).map(once).min().unwrap_or_default()
}
