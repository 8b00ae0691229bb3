//! Attention of one row per request: time against the bytes of keys and values.

use half::bf16;
use plimsoll_core::{BlockSize, Component};
use plimsoll_device::Pod;
use plimsoll_device::cuda::{Gpu, GpuSlab};
use plimsoll_kernels::KvLayout;
use plimsoll_kernels::cuda::{DecodeArgs, DecodeItem, DecodeKernels, GpuRun};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::common::{READ_BANDWIDTH, plain, time_us, wide};

/// Bytes of cache that calls walk through before they begin again: more than any L2 holds.
const PAST_L2: usize = 256 << 20;

/// A batch of requests of one length.
struct Shape {
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    batch: usize,
    context: usize,
    window: Option<usize>,
}

pub(crate) fn bench(gpu: &Gpu) {
    println!(
        "{:>7} {:>4} {:>6} {:>8} {:>7} {:>7} {:>6} {:>9} {:>9} {:>6}",
        "heads", "dim", "batch", "context", "window", "items", "chunk", "us", "floor us", "ratio"
    );
    let kernels = DecodeKernels::load(gpu).expect("kernels for this GPU");
    let llama = [
        (1, 128),
        (1, 512),
        (1, 2048),
        (1, 8192),
        (1, 32_768),
        (1, 131_072),
        (8, 512),
        (32, 128),
        (32, 256),
        (64, 600),
        (64, 4096),
        (256, 600),
    ];
    let other = [(1, 512), (1, 131_072), (32, 256), (64, 4096), (256, 600)];
    for (heads, kv_heads, head_dim, sizes) in [
        (32, 8, 128, &llama[..]),
        (32, 8, 64, &other),
        (32, 8, 96, &other),
        (16, 8, 256, &other),
        (32, 32, 128, &other[2..]),
        (64, 2, 128, &other),
        (32, 4, 512, &other),
    ] {
        for &(batch, context) in sizes {
            let shape = Shape {
                heads,
                kv_heads,
                head_dim,
                batch,
                context,
                window: None,
            };
            run(gpu, &kernels, &shape);
        }
    }
    let windowed = Shape {
        heads: 32,
        kv_heads: 8,
        head_dim: 128,
        batch: 64,
        context: 8192,
        window: Some(1000),
    };
    run(gpu, &kernels, &windowed);
}

fn run(gpu: &Gpu, kernels: &DecodeKernels, shape: &Shape) {
    let &Shape {
        heads,
        batch,
        context,
        window,
        ..
    } = shape;
    let layout = KvLayout {
        kv_heads: shape.kv_heads,
        head_dim: shape.head_dim,
        block_size: BlockSize::new(16).expect("a block size"),
    };
    let table = layout.block_size.blocks_for(context);
    let seen = window.map_or(context, |window| window.min(context));
    let bytes = 2 * size_of::<bf16>() * batch * seen * layout.kv_heads * layout.head_dim;
    let rounds = PAST_L2.div_ceil(bytes).min(64);
    // The blocks of a request are apart, as they come to be in a cache that is in use.
    let total = rounds * batch * table;
    let blocks: Vec<i32> = (0..total).map(|i| (i * 7919 % total) as i32).collect();
    let runs: Vec<GpuRun> = (0..batch)
        .map(|i| GpuRun {
            first_row: i as i32,
            len: 1,
            context_end: context as i32,
            block_offset: (i * table) as i32,
        })
        .collect();
    let planner = kernels
        .planner(layout, heads, window, batch)
        .expect("an occupancy");
    let mut items = vec![DecodeItem::default(); planner.max_items()];
    let header = planner.plan((0..batch).map(|run| (run, context)), &mut items);

    let width = heads * layout.head_dim;
    let zeros = |bytes: usize| {
        let slab = gpu.alloc(Component::Arena, bytes).expect("room on the GPU");
        gpu.fill(slab.slice(), 0).expect("a fill");
        slab
    };
    let cache = layout.elements(total);
    let (k, v, q) = (random(gpu, cache), random(gpu, cache), random(gpu, batch * width));
    let out = zeros(batch * width * size_of::<bf16>());
    let scratch = zeros(planner.scratch_floats() * size_of::<f32>());
    let counters = zeros(planner.counters() * size_of::<u32>());
    let (runs, blocks, list) = (upload(gpu, &runs), upload(gpu, &blocks), upload(gpu, &items));
    let header_on_gpu = upload(gpu, &[header]);
    let args = |round: usize| DecodeArgs {
        q: q.slice(),
        q_stride: width,
        kv: wide(k.slice(), v.slice(), layout.elements(1)),
        runs: runs.slice(),
        blocks: blocks
            .slice()
            .range(round * batch * table..(round + 1) * batch * table),
        header: header_on_gpu.slice(),
        items: list.slice(),
        out: out.slice(),
        scratch: scratch.slice(),
        counters: counters.slice(),
        options: plain(layout.head_dim),
    };
    let us = time_us(gpu, rounds.max(4), |call| {
        kernels.forward(&planner, &args(call % rounds))
    });
    let floor = bytes as f64 / READ_BANDWIDTH * 1e6;
    println!(
        "{heads:>4}/{:<2} {:>4} {batch:>6} {context:>8} {:>7} {:>7} {:>6} {us:>9.1} {floor:>9.1} {:>6.2}",
        layout.kv_heads,
        layout.head_dim,
        window.unwrap_or(0),
        header.items,
        header.chunk,
        us / floor
    );
}

/// Values in -1..1, some thousands of them over and over.
fn random(gpu: &Gpu, len: usize) -> GpuSlab {
    let mut rng = StdRng::seed_from_u64(len as u64);
    let values: Vec<bf16> = (0..len.min(100_003))
        .map(|_| bf16::from_f32(rng.random_range(-1.0..1.0)))
        .collect();
    let slab = gpu
        .alloc(Component::Arena, len * size_of::<bf16>())
        .expect("room on the GPU");
    let all = slab.slice::<bf16>();
    let mut filled = values.len();
    gpu.upload(&values, all.range(0..filled))
        .expect("a copy to the GPU");
    while filled < len {
        let more = filled.min(len - filled);
        gpu.copy(all.range(0..more), all.range(filled..filled + more))
            .expect("a copy");
        filled += more;
    }
    slab
}

fn upload<T: Pod>(gpu: &Gpu, values: &[T]) -> GpuSlab {
    let slab = gpu
        .alloc(Component::Arena, size_of_val(values))
        .expect("room on the GPU");
    gpu.upload(values, slab.slice()).expect("a copy to the GPU");
    slab
}
