//! Attention of one row per request over the paged cache.

use half::bf16;
use plimsoll_core::{BlockSize, PageId, Scratch};
use plimsoll_device::cuda::{Gpu, GpuSlab};
use plimsoll_device::{Arena, Budget};
use plimsoll_kernels::cuda::{DecodeArgs, DecodeItem, DecodeKernels, DecodePlanner, GpuRun, HEAD_DIMS};
use plimsoll_kernels::{KvLayout, PagedKv, RunMeta, attention};
use rand::Rng;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rayon::iter::{IntoParallelIterator, ParallelIterator};

use crate::cache::Cache;
use crate::common::{
    Scores, Tables, assert_close, block_stride, download, first_seen, gpu, poisoned, random, rng, upload,
    widen,
};

/// One step: runs of one row with other rows between them, and a cache that is NaN where no token is.
struct Case {
    layout: KvLayout,
    heads: usize,
    window: Option<usize>,
    scores: Scores,
    cache: Cache,
    runs: Vec<GpuRun>,
    blocks: Vec<i32>,
    /// Elements from one block of the cache to the next.
    block_stride: usize,
    rows: usize,
    /// Elements of a row of `q`, more than its heads have.
    q_stride: usize,
    q: Vec<bf16>,
    k: Vec<bf16>,
    v: Vec<bf16>,
}

impl Case {
    fn new(
        rng: &mut StdRng,
        layout: KvLayout,
        heads: usize,
        window: Option<usize>,
        contexts: &[usize],
    ) -> Self {
        let lengths: Vec<(usize, usize)> = contexts.iter().map(|&context| (1, context)).collect();
        let tables = Tables::new(rng, layout.block_size, window, &lengths);
        let mut rows = 0;
        let mut runs = Vec::new();
        for (&context, &block_offset) in contexts.iter().zip(&tables.offsets) {
            rows += rng.random_range(0..3);
            runs.push(GpuRun {
                first_row: rows as i32,
                len: 1,
                context_end: context as i32,
                block_offset,
            });
            rows += 1;
        }
        rows += 1;
        runs.shuffle(rng);
        let row = heads * layout.head_dim;
        let q_stride = row + 8 * rng.random_range(0..5);
        let scale = rng.random_range(0.5..4.0) / (layout.head_dim as f32).sqrt();
        let scores = Scores::random(rng, heads, scale);
        let block_stride = block_stride(rng, layout);
        let mut case = Self {
            layout,
            heads,
            window,
            scores,
            cache: Cache::random(rng),
            runs,
            blocks: tables.blocks,
            block_stride,
            rows,
            q_stride,
            q: random(rng, rows * q_stride),
            k: vec![bf16::NAN; tables.total * block_stride],
            v: vec![bf16::NAN; tables.total * block_stride],
        };
        for run in case.runs.clone() {
            for position in case.first_seen(&run)..run.context_end as usize {
                for kv_head in 0..layout.kv_heads {
                    let at = case.offset(&run, kv_head, position);
                    let values = case.cache.values(rng, 2 * layout.head_dim);
                    let (k, v) = values.split_at(layout.head_dim);
                    case.k[at..at + layout.head_dim].copy_from_slice(k);
                    case.v[at..at + layout.head_dim].copy_from_slice(v);
                }
            }
        }
        case
    }

    /// Where the key or value of a position lies.
    fn offset(&self, run: &GpuRun, kv_head: usize, position: usize) -> usize {
        let size = self.layout.block_size.tokens();
        let block = self.blocks[(run.block_offset + (position / size) as i32) as usize] as usize;
        block * self.block_stride + (kv_head * size + position % size) * self.layout.head_dim
    }

    /// Elements up to the end of the last block.
    fn elements(&self) -> usize {
        self.k.len() - self.block_stride + self.layout.elements(1)
    }

    fn first_seen(&self, run: &GpuRun) -> usize {
        first_seen(1, run.context_end as usize, self.window)
    }

    fn group(&self) -> usize {
        self.heads / self.layout.kv_heads
    }

    /// The query of a head.
    fn query(&self, run: &GpuRun, head: usize) -> &[bf16] {
        let dim = self.layout.head_dim;
        &self.q[run.first_row as usize * self.q_stride + head * dim..][..dim]
    }

    /// Rows of the runs, in their order.
    fn reference(&self) -> Vec<f64> {
        let dim = self.layout.head_dim;
        let of_head = |at: usize| {
            let (run, head) = (&self.runs[at / self.heads], at % self.heads);
            let (start, end) = (self.first_seen(run), run.context_end as usize);
            let offset = |position| self.offset(run, head / self.group(), position);
            let product = |position| {
                let key = &self.k[offset(position)..][..dim];
                let products = self
                    .query(run, head)
                    .iter()
                    .zip(key)
                    .map(|(q, k)| q.to_f64() * k.to_f64());
                products.sum::<f64>() * f64::from(self.cache.k_scale)
            };
            let products: Vec<f64> = (start..end).map(product).collect();
            let mut row = vec![0.0; dim];
            for (position, weight) in (start..end).zip(self.scores.softmax(head, &products)) {
                for (sum, value) in row.iter_mut().zip(&self.v[offset(position)..]) {
                    *sum += weight * value.to_f64() * f64::from(self.cache.v_scale);
                }
            }
            row
        };
        let heads = 0..self.runs.len() * self.heads;
        heads.into_par_iter().flat_map_iter(of_head).collect()
    }

    fn check(&self, run: &impl Fn(&Case) -> Vec<f32>, tolerance: f64) {
        let Self {
            layout,
            heads,
            window,
            scores,
            cache,
            ..
        } = self;
        let contexts: Vec<usize> = self.contexts().map(|(_, context)| context).collect();
        let what = format!(
            "{layout:?}, blocks {} apart, {heads} heads, window {window:?}, {scores:?}, {cache:?}, contexts {contexts:?}",
            self.block_stride
        );
        assert_close(&what, &run(self), &self.reference(), tolerance);
    }

    fn contexts(&self) -> impl Iterator<Item = (usize, usize)> + Clone {
        self.runs
            .iter()
            .enumerate()
            .map(|(index, run)| (index, run.context_end as usize))
    }
}

/// A case in device memory.
struct OnGpu {
    q_stride: usize,
    scores: Scores,
    cache: Cache,
    elements: (usize, usize),
    sinks: GpuSlab,
    q: GpuSlab,
    k: GpuSlab,
    v: GpuSlab,
    runs: GpuSlab,
    blocks: GpuSlab,
    header: GpuSlab,
    items: GpuSlab,
    out: GpuSlab,
    scratch: GpuSlab,
    counters: GpuSlab,
}

impl OnGpu {
    fn new(gpu: &Gpu, case: &Case, planner: &DecodePlanner) -> Self {
        let mut items = vec![DecodeItem::default(); planner.max_items()];
        let header = planner.plan(case.contexts(), &mut items);
        Self {
            q: upload(gpu, &case.q),
            k: case.cache.upload(gpu, &case.k),
            v: case.cache.upload(gpu, &case.v),
            elements: (case.elements(), case.block_stride),
            cache: case.cache,
            runs: upload(gpu, &case.runs),
            blocks: upload(gpu, &case.blocks),
            header: upload(gpu, &[header]),
            items: upload(gpu, &items),
            out: poisoned::<bf16>(gpu, case.rows * case.heads * case.layout.head_dim),
            scratch: poisoned::<f32>(gpu, planner.scratch_floats()),
            counters: upload(gpu, &vec![0u32; planner.counters()]),
            q_stride: case.q_stride,
            sinks: case.scores.upload(gpu),
            scores: case.scores.clone(),
        }
    }

    fn args(&self) -> DecodeArgs<'_> {
        DecodeArgs {
            q: self.q.slice(),
            q_stride: self.q_stride,
            kv: self.cache.on_gpu(&self.k, &self.v, self.elements),
            runs: self.runs.slice(),
            blocks: self.blocks.slice(),
            header: self.header.slice(),
            items: self.items.slice(),
            out: self.out.slice(),
            scratch: self.scratch.slice(),
            counters: self.counters.slice(),
            options: self.scores.on_gpu(&self.sinks),
        }
    }

    /// Rows of the runs, in their order; all other rows are untouched.
    fn rows(&self, gpu: &Gpu, case: &Case) -> Vec<f32> {
        let row = case.heads * case.layout.head_dim;
        let all: Vec<bf16> = download(gpu, &self.out, case.rows * row);
        for (index, values) in all.chunks_exact(row).enumerate() {
            if !case.runs.iter().any(|run| run.first_row as usize == index) {
                assert!(
                    values.iter().all(|x| x.to_bits() == 0xffff),
                    "row {index} was written"
                );
            }
        }
        let of = |run: &GpuRun| widen(&all[run.first_row as usize * row..][..row]);
        case.runs.iter().flat_map(of).collect()
    }
}

fn on_gpu(gpu: &Gpu, kernels: &DecodeKernels, case: &Case) -> Vec<f32> {
    let Case {
        layout,
        heads,
        window,
        ..
    } = *case;
    let planner = kernels
        .planner(layout, heads, window, case.runs.len())
        .expect("a planner");
    let memory = OnGpu::new(gpu, case, &planner);
    kernels.forward(&planner, &memory.args()).expect("a launch");
    let first = memory.rows(gpu, case);
    // Counters are as they were, and splits are merged in one order.
    kernels.forward(&planner, &memory.args()).expect("a launch");
    assert_eq!(memory.rows(gpu, case), first, "the second launch");
    let counters: Vec<u32> = download(gpu, &memory.counters, planner.counters());
    assert!(counters.iter().all(|&c| c == 0), "counters");
    first
}

fn on_cpu(case: &Case) -> Vec<f32> {
    let KvLayout {
        head_dim, block_size, ..
    } = case.layout;
    let size = block_size.tokens();
    let v: Vec<f32> = case.v.iter().map(|v| v.to_f32() * case.cache.v_scale).collect();
    // The CPU's keys are transposed within a block.
    let mut k = vec![0.0; v.len()];
    for (from, to) in case
        .k
        .chunks_exact(size * head_dim)
        .zip(k.chunks_exact_mut(size * head_dim))
    {
        for (index, value) in from.iter().enumerate() {
            to[index % head_dim * size + index / head_dim] = value.to_f32() * case.cache.k_scale;
        }
    }
    let blocks: Vec<PageId> = case.blocks.iter().map(|&b| PageId(b as u32)).collect();
    let runs: Vec<RunMeta<'_>> = case
        .runs
        .iter()
        .enumerate()
        .map(|(row, run)| {
            let first_block = case.first_seen(run) / size;
            RunMeta {
                first_row: row,
                len: 1,
                start: run.context_end as usize - 1,
                first_block,
                blocks: &blocks[(run.block_offset + first_block as i32) as usize..],
            }
        })
        .collect();
    let q: Vec<f32> = case
        .runs
        .iter()
        .flat_map(|run| (0..case.heads).flat_map(|head| widen(case.query(run, head))))
        .collect();
    let mut out = vec![f32::NAN; q.len()];
    let budget = Budget::new(1 << 32);
    let arena = Arena::new(&budget, Scratch::Growable).expect("an empty arena");
    let kv = PagedKv {
        k: &k,
        v: &v,
        layout: case.layout,
        stride: case.block_stride,
    };
    let options = case.scores.on_cpu(case.window);
    attention(&q, kv, &runs, options, &mut out, &arena).expect("room in the arena");
    out
}

/// All head sizes, block sizes, groups and edges of contexts and windows, and a few at random.
fn check(test: &str, run: impl Fn(&Case) -> Vec<f32>, tolerance: f64) {
    let mut rng = rng(test);
    let groups = [1, 2, 3, 4, 5, 7, 8, 12, 16, 17, 40];
    for head_dim in HEAD_DIMS {
        for block_size in [8, 16, 32] {
            for round in 0..3 {
                let layout = KvLayout {
                    kv_heads: rng.random_range(1..4),
                    head_dim,
                    block_size: BlockSize::new(block_size).expect("a size offered"),
                };
                let group = groups[rng.random_range(0..groups.len())];
                let contexts: Vec<usize> = match round {
                    0 => vec![1, 15, 16, 17, 63, 64, 65, 129],
                    1 => vec![rng.random_range(1000..5000)],
                    _ => (0..rng.random_range(1..20))
                        .map(|_| rng.random_range(1..700))
                        .collect(),
                };
                let window = [None, Some(1), Some(rng.random_range(2..300)), Some(100_000)];
                let window = window[rng.random_range(0..window.len())];
                let case = Case::new(&mut rng, layout, layout.kv_heads * group, window, &contexts);
                case.check(&run, tolerance);
            }
        }
    }
    // Many splits, merged in two levels.
    for (head_dim, group, least) in [
        (64, 9, 140_000),
        (128, 4, 140_000),
        (256, 1, 40_000),
        (256, 2, 40_000),
        (512, 3, 20_000),
    ] {
        let layout = KvLayout {
            kv_heads: 1,
            head_dim,
            block_size: BlockSize::default(),
        };
        let contexts = [rng.random_range(least..least + least / 2), 300];
        Case::new(&mut rng, layout, group, None, &contexts).check(&run, tolerance);
    }
}

#[test]
fn decode_attention_on_the_cpu() {
    check("decode_attention_on_the_cpu", on_cpu, 1e-5);
}

#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn decode_attention_on_the_gpu() {
    let gpu = gpu();
    let kernels = DecodeKernels::load(&gpu).expect("kernels for this GPU");
    check(
        "decode_attention_on_the_gpu",
        |case| on_gpu(&gpu, &kernels, case),
        8e-3,
    );
}

/// A graph captured once serves other contexts, batches and splits.
#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn decode_attention_in_a_graph() {
    let mut rng = rng("decode_attention_in_a_graph");
    let gpu = gpu();
    let kernels = DecodeKernels::load(&gpu).expect("kernels for this GPU");
    let layout = KvLayout {
        kv_heads: 2,
        head_dim: 128,
        block_size: BlockSize::default(),
    };
    let (heads, max_runs) = (8, 12);
    let planner = kernels.planner(layout, heads, None, max_runs).expect("a planner");
    let large = Case::new(&mut rng, layout, heads, None, &[4000; 12]);
    let fits =
        |case: &Case| case.cache.element == large.cache.element && case.block_stride == large.block_stride;
    let memory = OnGpu::new(&gpu, &large, &planner);
    let graph = gpu
        .capture(|| kernels.forward(&planner, &memory.args()))
        .expect("a capture");
    for contexts in [vec![1], vec![3000], vec![70; 4], vec![4000, 1, 600]] {
        let draw = || Case::new(&mut rng, layout, heads, None, &contexts);
        let mut case = std::iter::repeat_with(draw).find(fits).expect("they are random");
        // What is part of the graph stays.
        case.scores = large.scores.clone();
        case.cache = large.cache;
        assert_eq!(case.block_stride, large.block_stride);
        case.q_stride = large.q_stride;
        case.q = random(&mut rng, case.rows * case.q_stride);
        let other = OnGpu::new(&gpu, &case, &planner);
        for (from, to) in [
            (&other.q, &memory.q),
            (&other.k, &memory.k),
            (&other.v, &memory.v),
            (&other.runs, &memory.runs),
            (&other.blocks, &memory.blocks),
            (&other.header, &memory.header),
            (&other.items, &memory.items),
        ] {
            let bytes = from.bytes();
            gpu.copy(from.slice::<u8>(), to.slice::<u8>().range(0..bytes))
                .expect("a copy");
        }
        gpu.fill(memory.out.slice(), 0xff).expect("a fill");
        graph.launch().expect("a replay");
        let out = memory.rows(&gpu, &case);
        assert_close(&format!("contexts {contexts:?}"), &out, &case.reference(), 8e-3);
    }
}
