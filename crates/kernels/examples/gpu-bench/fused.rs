//! Element-wise kernels in the shape of an 8B model: 4096 hidden, 32 + 2 × 8 heads of 128, 14336 inner.

use half::bf16;
use plimsoll_core::Component;
use plimsoll_device::Pod;
use plimsoll_device::cuda::{Gpu, GpuSlab};
use plimsoll_kernels::cuda::{
    FusedKernels, GpuKvWrite, GpuNorm, GpuQkNorm, GpuRope, GpuTokens, GpuVocabulary, rope_frequencies,
};
use plimsoll_kernels::{Activation, CachedValues};

use crate::common::{READ_BANDWIDTH, time_us, wide};

const HIDDEN: usize = 4096;
const INNER: usize = 14336;
const HEADS: usize = 32;
const KV_HEADS: usize = 8;
const DIM: usize = 128;
const VOCAB: usize = 128_256;
const BLOCK_SIZE: usize = 16;
/// Bytes that no cache holds.
const COLD: usize = 256 << 20;

struct Bench<'a> {
    gpu: &'a Gpu,
    kernels: FusedKernels,
}

impl Bench<'_> {
    fn alloc<T: Pod>(&self, values: &[T]) -> GpuSlab {
        let slab = self
            .gpu
            .alloc(Component::Arena, size_of_val(values))
            .expect("room on the GPU");
        self.gpu
            .upload(values, slab.slice::<T>().range(0..values.len()))
            .expect("a copy");
        slab
    }

    /// Random `bf16`, as many as all copies of `len` elements that together no cache holds; and how many those are.
    fn copies(&self, len: usize, tokens: usize) -> (GpuSlab, usize) {
        // Small activations are in the cache in a real step too.
        let count = if tokens > 256 {
            COLD.div_ceil(len * size_of::<bf16>()).clamp(2, 64)
        } else {
            2
        };
        let slab = self
            .gpu
            .alloc(Component::Arena, count * len * size_of::<bf16>())
            .expect("room on the GPU");
        self.kernels
            .fill_random(slab.slice(), 1, 1.0)
            .expect("random values");
        (slab, count)
    }

    fn line(&self, name: &str, tokens: usize, bytes: usize, us: f64) {
        let floor = bytes as f64 / READ_BANDWIDTH * 1e6;
        println!(
            "{name:24} {tokens:6} {us:9.2} us  floor {floor:8.2} us  x{:.2}",
            us / floor
        );
    }

    fn layer(&self, tokens: usize) {
        let row = tokens * HIDDEN;
        let (hidden, count) = self.copies(row, tokens);
        let (delta, _) = self.copies(row, tokens);
        let (out, _) = self.copies(row, tokens);
        let weight = self.alloc(&[1f32; HIDDEN]);
        let norm = GpuNorm {
            weight: weight.slice(),
            eps: 1e-5,
        };
        // Distinct copies of the same size, by index of the call.
        let part = |i: usize, len: usize| (i % count) * len..(i % count + 1) * len;
        let us = time_us(self.gpu, 64, |i| {
            self.kernels.rms_norm(
                hidden.slice().range(part(i, row)),
                norm,
                out.slice().range(part(i, row)),
            )
        });
        self.line("rms_norm", tokens, 2 * row * 2, us);
        let us = time_us(self.gpu, 64, |i| {
            self.kernels.add_rms_norm(
                hidden.slice().range(part(i, row)),
                delta.slice().range(part(i, row)),
                norm,
                out.slice().range(part(i, row)),
            )
        });
        self.line("add_rms_norm", tokens, 4 * row * 2, us);
        let us = time_us(self.gpu, 64, |i| {
            self.kernels.sandwich_norm(
                hidden.slice().range(part(i, row)),
                delta.slice().range(part(i, row)),
                weight.slice(),
                None,
                norm,
                out.slice().range(part(i, row)),
            )
        });
        self.line("sandwich_norm", tokens, 4 * row * 2, us);

        let table_rows = 20_000;
        let (table, _) = self.copies(table_rows * HIDDEN, 1);
        let ids: Vec<i32> = (0..tokens).map(|i| (i * 7919 % table_rows) as i32).collect();
        let (ids, resolved) = (self.alloc(&ids), self.alloc(&ids));
        let us = time_us(self.gpu, 64, |i| {
            let input = GpuTokens {
                tokens: ids.slice(),
                prev_sampled: ids.slice(),
                resolved: resolved.slice(),
            };
            let table = table.slice().range(0..table_rows * HIDDEN);
            self.kernels.embedding(
                table,
                GpuVocabulary::whole(table_rows),
                input,
                1.0,
                out.slice().range(part(i, row)),
            )
        });
        self.line("embedding", tokens, 2 * row * 2, us);
        drop((hidden, delta, out, table));

        let width = (HEADS + 2 * KV_HEADS) * DIM;
        let (qkv, count) = self.copies(tokens * width, tokens);
        let slots = tokens.next_multiple_of(BLOCK_SIZE);
        let (cache, _) = self.copies(2 * slots * KV_HEADS * DIM, tokens);
        let kv_len = slots * KV_HEADS * DIM;
        let indices: Vec<i32> = (0..tokens as i32).collect();
        let (positions, slots) = (self.alloc(&indices), self.alloc(&indices));
        let frequencies = self.alloc(&rope_frequencies(&[0.1; DIM / 2]));
        let head_norm = self.alloc(&[1f32; DIM]);
        for (name, norm) in [("rope_kv_write", false), ("qk_norm_rope_kv_write", true)] {
            let norm = norm.then_some(GpuQkNorm {
                q: head_norm.slice(),
                k: head_norm.slice(),
                eps: 1e-6,
            });
            let us = time_us(self.gpu, 64, |i| {
                let rope = GpuRope {
                    positions: positions.slice(),
                    axes: None,
                    frequencies: frequencies.slice(),
                    factor: 1.0,
                    query_scale: None,
                };
                let kv = GpuKvWrite {
                    kv: wide(
                        cache.slice().range(0..kv_len),
                        cache.slice().range(kv_len..2 * kv_len),
                        KV_HEADS * BLOCK_SIZE * DIM,
                    ),
                    slots: slots.slice(),
                    kv_heads: KV_HEADS,
                    block_size: BLOCK_SIZE,
                    head_dim: DIM,
                    gated: false,
                    values: CachedValues::Projected,
                };
                let at = (i % count) * tokens * width;
                self.kernels
                    .qk_norm_rope_kv_write(qkv.slice().range(at..at + tokens * width), norm, rope, kv)
            });
            self.line(name, tokens, 2 * tokens * width * 2, us);
        }
        drop((qkv, cache));

        let (gate_up, count) = self.copies(2 * tokens * INNER, tokens);
        let (out, _) = self.copies(tokens * INNER, tokens);
        for activation in [Activation::Silu, Activation::GeluTanh] {
            let us = time_us(self.gpu, 64, |i| {
                let at = (i % count) * 2 * tokens * INNER;
                self.kernels.glu(
                    activation,
                    gate_up.slice().range(at..at + 2 * tokens * INNER),
                    INNER,
                    out.slice().range(0..tokens * INNER),
                )
            });
            self.line(&format!("glu {activation:?}"), tokens, 3 * tokens * INNER * 2, us);
        }
    }

    fn sampled_rows(&self, rows: usize) {
        let tokens = 8192;
        let (hidden, _) = self.copies(tokens * HIDDEN, 1);
        let (out, _) = self.copies(rows * HIDDEN, 1);
        let picked: Vec<i32> = (0..rows).map(|i| (i * tokens / rows) as i32).collect();
        let picked = self.alloc(&picked);
        let (from, to) = (0..tokens * HIDDEN, 0..rows * HIDDEN);
        let us = time_us(self.gpu, 64, |_| {
            self.kernels.gather_rows(
                hidden.slice().range(from.clone()),
                picked.slice(),
                out.slice().range(to.clone()),
            )
        });
        self.line("gather_rows", rows, 2 * rows * HIDDEN * 2, us);
    }

    fn weights(&self) {
        let len = VOCAB * HIDDEN;
        let (out, _) = self.copies(len, 1);
        let to = out.slice().range(0..len);
        let us = time_us(self.gpu, 4, |i| self.kernels.fill_random(to, i as u64, 0.02));
        self.line("fill_random", VOCAB, len * 2, us);
    }
}

pub(crate) fn bench(gpu: &Gpu) {
    let bench = Bench {
        gpu,
        kernels: FusedKernels::load(gpu).expect("kernels"),
    };
    for tokens in [1, 8, 32, 256, 2048, 8192] {
        bench.layer(tokens);
    }
    for rows in [1, 32, 256] {
        bench.sampled_rows(rows);
    }
    bench.weights();
}
