//! Attention of prompts and chunks: time against the operations of the causal half, or the bytes of the context where those
//! take longer.

use half::bf16;
use plimsoll_core::{BlockSize, Component};
use plimsoll_device::Pod;
use plimsoll_device::cuda::{Gpu, GpuSlab, GpuSlice};
use plimsoll_kernels::KvLayout;
use plimsoll_kernels::cuda::{GpuKvElement, GpuRun, PrefillArgs, PrefillItem, PrefillKernels};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::common::{BF16_RATE, READ_BANDWIDTH, plain, time_us, wide};

/// `count` runs of `len` tokens at the end of contexts of `context` tokens.
struct Shape {
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    count: usize,
    len: usize,
    context: usize,
}

pub(crate) fn bench(gpu: &Gpu) {
    println!(
        "{:>9} {:>4} {:>6} {:>6} {:>8} {:>10} {:>8} {:>10} {:>6}",
        "heads", "dim", "runs", "len", "context", "us", "TFLOP/s", "floor us", "ratio"
    );
    let own = PrefillKernels::load(gpu).expect("kernels for this GPU");
    let portable = PrefillKernels::load_portable(gpu).expect("kernels for all GPUs");
    for (kernels, heads, kv_heads, head_dim) in [
        (&portable, 32, 8, 128),
        (&own, 32, 8, 128),
        (&own, 32, 8, 64),
        (&own, 32, 32, 96),
        (&own, 16, 8, 256),
        (&own, 32, 4, 512),
    ] {
        let shapes = [
            (16, 512, 512),
            (1, 512, 512),
            (1, 2048, 2048),
            (1, 8192, 8192),
            (1, 32_768, 32_768),
            (1, 2048, 100_000),
            (1, 1500, 100_000),
            (1, 64, 100_000),
            (1, 64, 8192),
            (8, 16, 2000),
            (1, 8192, 32_768),
            (1, 8192, 65_536),
            (1, 65_000, 65_000),
        ];
        // The slow ones not for kernels that are slow as well.
        let shapes = match (std::ptr::eq(kernels, &raw const own), head_dim) {
            (true, 128) => &shapes[..],
            (true, ..=256) => &shapes[..12],
            _ => &shapes[..10],
        };
        for &(count, len, context) in shapes {
            run(
                gpu,
                kernels,
                &Shape {
                    heads,
                    kv_heads,
                    head_dim,
                    count,
                    len,
                    context,
                },
            );
        }
    }
}

fn run(gpu: &Gpu, kernels: &PrefillKernels, shape: &Shape) {
    let layout = KvLayout {
        kv_heads: shape.kv_heads,
        head_dim: shape.head_dim,
        block_size: BlockSize::new(16).expect("a block size"),
    };
    let table = layout.block_size.blocks_for(shape.context);
    let blocks: Vec<i32> = (0..(table * shape.count) as i32).rev().collect();
    let runs: Vec<GpuRun> = (0..shape.count)
        .map(|i| GpuRun {
            first_row: (i * shape.len) as i32,
            len: shape.len as i32,
            context_end: shape.context as i32,
            block_offset: (i * table) as i32,
        })
        .collect();
    let planner = kernels
        .planner(layout, shape.heads, None, GpuKvElement::Bf16)
        .expect("an occupancy");
    let tokens = shape.count * shape.len;
    let mut items = vec![PrefillItem::default(); planner.max_entries(tokens, shape.count)];
    let plan = planner.plan(&runs, None, &mut items);

    let width = shape.heads * shape.head_dim;
    let q = random(gpu, tokens * width);
    let k = random(gpu, layout.elements(blocks.len()));
    let v = random(gpu, layout.elements(blocks.len()));
    let out = alloc(gpu, tokens * width * size_of::<bf16>());
    let scratch = alloc(gpu, planner.scratch_floats() * size_of::<f32>());
    let (runs, blocks, items) = (upload(gpu, &runs), upload(gpu, &blocks), upload(gpu, &items));
    let kv = wide(k.slice(), v.slice(), layout.elements(1));
    let maps = kernels.maps(shape.head_dim, &kv).expect("maps of the cache");
    let args = PrefillArgs {
        q: q.slice(),
        q_stride: width,
        kv,
        maps: maps.as_ref(),
        runs: runs.slice(),
        blocks: blocks.slice(),
        items: items.slice(),
        out: out.slice::<bf16>().range(0..tokens * width),
        scratch: scratch.slice(),
        ends: None,
        options: plain(shape.head_dim),
    };
    let us = time_us(gpu, 3, |_| kernels.forward(&planner, plan, &args));

    let seen = shape.len as f64 * (shape.context as f64 - (shape.len as f64 - 1.0) / 2.0);
    let operations = 4.0 * seen * width as f64 * shape.count as f64;
    let bytes = 2.0
        * (2 * shape.count * shape.context * layout.kv_heads * layout.head_dim + 2 * tokens * width) as f64;
    let floor = 1e6 * (operations / BF16_RATE).max(bytes / READ_BANDWIDTH);
    println!(
        "{:>6}/{:<2} {:>4} {:>6} {:>6} {:>8} {us:>10.1} {:>8.0} {floor:>10.1} {:>6.2}",
        shape.heads,
        shape.kv_heads,
        shape.head_dim,
        shape.count,
        shape.len,
        shape.context,
        operations / us / 1e6,
        us / floor
    );
}

fn alloc(gpu: &Gpu, bytes: usize) -> GpuSlab {
    gpu.alloc(Component::Arena, bytes).expect("room on the GPU")
}

fn upload<T: Pod>(gpu: &Gpu, values: &[T]) -> GpuSlab {
    let slab = alloc(gpu, size_of_val(values));
    gpu.upload(values, slab.slice::<T>().range(0..values.len()))
        .expect("a copy to the GPU");
    slab
}

/// Values in -1..1, a million different ones over and over.
fn random(gpu: &Gpu, len: usize) -> GpuSlab {
    let mut rng = StdRng::seed_from_u64(len as u64);
    let values: Vec<bf16> = (0..len.min(1_000_003))
        .map(|_| bf16::from_f32(rng.random_range(-1.0..1.0)))
        .collect();
    let slab = alloc(gpu, len * size_of::<bf16>());
    let all: GpuSlice<'_, bf16> = slab.slice();
    for start in (0..len).step_by(values.len()) {
        let here = values.len().min(len - start);
        gpu.upload(&values[..here], all.range(start..start + here))
            .expect("a copy to the GPU");
    }
    slab
}
