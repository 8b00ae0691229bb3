//! Attention of prompts and chunks over the paged cache.

use half::bf16;
use plimsoll_core::{BlockSize, PageId, Scratch};
use plimsoll_device::cuda::{Gpu, GpuError};
use plimsoll_device::{Arena, Budget};
use plimsoll_kernels::cuda::{
    GpuKv, GpuRun, HEAD_DIMS, PrefillArgs, PrefillItem, PrefillKernels, PrefillMaps, has_hopper_kernels,
};
use plimsoll_kernels::{AttentionOptions, KvLayout, PagedKv, RunMeta, Sees, attention};
use rand::Rng;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rayon::iter::{IntoParallelRefIterator, ParallelIterator};

use crate::cache::Cache;
use crate::common::{
    Scores, Tables, assert_close, block_stride, download, first_seen, gpu, poisoned, random, rng, upload,
    widen,
};

/// One step: queries with padding beside and between the runs, and a cache that is NaN where no token is.
#[derive(Debug)]
struct Case {
    heads: usize,
    layout: KvLayout,
    window: Option<usize>,
    scores: Scores,
    cache: Cache,
    runs: Vec<GpuRun>,
    blocks: Vec<i32>,
    /// Blocks of the cache.
    total: usize,
    /// Elements from one of them to the next.
    block_stride: usize,
    rows: usize,
    q_stride: usize,
    /// Of each row the position behind the last that it sees, where that is not itself.
    ends: Option<Vec<i32>>,
}

struct Data {
    q: Vec<bf16>,
    k: Vec<bf16>,
    v: Vec<bf16>,
}

impl Case {
    /// Runs of `(len, context)`.
    fn new(
        rng: &mut StdRng,
        heads: usize,
        layout: KvLayout,
        window: Option<usize>,
        runs: &[(usize, usize)],
    ) -> Self {
        let tables = Tables::new(rng, layout.block_size, window, runs);
        let mut rows = 0;
        let mut metas = Vec::new();
        for (&(len, context), &block_offset) in runs.iter().zip(&tables.offsets) {
            rows += rng.random_range(0..2);
            metas.push(GpuRun {
                first_row: rows as i32,
                len: len as i32,
                context_end: context as i32,
                block_offset,
            });
            rows += len;
        }
        let sharpness = [1.0, 8.0][rng.random_range(0..2)];
        let scores = Scores::random(rng, heads, sharpness / (layout.head_dim as f32).sqrt());
        Self {
            heads,
            layout,
            window,
            scores,
            cache: Cache::random(rng),
            runs: metas,
            blocks: tables.blocks,
            total: tables.total,
            block_stride: block_stride(rng, layout),
            rows: rows + rng.random_range(0..2),
            q_stride: heads * layout.head_dim + [0, 24, 512][rng.random_range(0..3)],
            ends: None,
        }
    }

    /// The same with spans whose tokens see each other.
    fn with_spans(mut self, rng: &mut StdRng) -> Self {
        let mut ends = vec![-1; self.rows];
        for run in &self.runs {
            let start = run.context_end - run.len;
            let mut at = start;
            while at < run.context_end {
                let longest = [3, 40, 300][rng.random_range(0..3)];
                let end = (at + rng.random_range(1..=longest)).min(run.context_end);
                let is_span = rng.random_bool(0.5);
                for position in at..end {
                    let row = (run.first_row + position - start) as usize;
                    ends[row] = if is_span { end } else { position + 1 };
                }
                at = end;
            }
        }
        self.ends = Some(ends);
        self
    }

    /// Behind the last position that a row sees.
    fn end(&self, row: usize, position: usize) -> usize {
        self.ends.as_ref().map_or(position + 1, |ends| ends[row] as usize)
    }

    fn random(rng: &mut StdRng, head_dim: usize) -> Self {
        let pick = |rng: &mut StdRng, from: &[usize]| from[rng.random_range(0..from.len())];
        let layout = KvLayout {
            kv_heads: pick(rng, &[1, 2, 3]),
            head_dim,
            block_size: BlockSize::new(pick(rng, &[8, 16, 32])).expect("a block size"),
        };
        let heads = layout.kv_heads * pick(rng, &[1, 2, 3, 4, 7, 8]);
        let runs: Vec<(usize, usize)> = (0..rng.random_range(1..6))
            .map(|_| {
                let most = pick(rng, &[1, 5, 70, 400]);
                let len = rng.random_range(1..=most);
                let most = pick(rng, &[0, 40, 900]);
                (len, len + rng.random_range(0..=most))
            })
            .collect();
        let window = [None, Some(1), Some(50), Some(300), Some(1 << 40)][rng.random_range(0..5)];
        Self::new(rng, heads, layout, window, &runs)
    }

    fn width(&self) -> usize {
        self.heads * self.layout.head_dim
    }

    /// Where the key or value of a position of a run lies.
    fn slot(&self, run: &GpuRun, kv_head: usize, position: usize) -> usize {
        let size = self.layout.block_size.tokens();
        let block = self.blocks[(run.block_offset + (position / size) as i32) as usize] as usize;
        block * self.block_stride + (kv_head * size + position % size) * self.layout.head_dim
    }

    fn first_seen(&self, run: &GpuRun) -> usize {
        first_seen(run.len as usize, run.context_end as usize, self.window)
    }

    fn data(&self, rng: &mut StdRng) -> Data {
        let dim = self.layout.head_dim;
        let elements = self.total * self.block_stride;
        let mut cache = || {
            let mut cache = vec![bf16::NAN; elements];
            for run in &self.runs {
                for position in self.first_seen(run)..run.context_end as usize {
                    for head in 0..self.layout.kv_heads {
                        let at = self.slot(run, head, position);
                        cache[at..at + dim].copy_from_slice(&self.cache.values(rng, dim));
                    }
                }
            }
            cache
        };
        let (k, v) = (cache(), cache());
        let mut q = vec![bf16::NAN; self.rows * self.q_stride];
        for row in self.covered() {
            q[row * self.q_stride..][..self.width()].copy_from_slice(&random(rng, self.width()));
        }
        Data { q, k, v }
    }

    /// Rows that belong to a run.
    fn covered(&self) -> Vec<usize> {
        let rows = |run: &GpuRun| run.first_row as usize..(run.first_row + run.len) as usize;
        self.runs.iter().flat_map(rows).collect()
    }

    /// One row, all heads, in f64.
    fn naive(&self, data: &Data, row: usize) -> Vec<f64> {
        let dim = self.layout.head_dim;
        let holds = |run: &&GpuRun| (run.first_row..run.first_row + run.len).contains(&(row as i32));
        let run = self.runs.iter().find(holds).expect("a covered row");
        let position = (run.context_end - run.len) as usize + row - run.first_row as usize;
        let first = self
            .window
            .map_or(0, |window| (position + 1).saturating_sub(window));
        let mut out = Vec::new();
        for head in 0..self.heads {
            let kv_head = head / (self.heads / self.layout.kv_heads);
            let q = &data.q[row * self.q_stride + head * dim..][..dim];
            let product = |position| {
                let k = &data.k[self.slot(run, kv_head, position)..][..dim];
                let product: f64 = q.iter().zip(k).map(|(a, b)| a.to_f64() * b.to_f64()).sum();
                product * f64::from(self.cache.k_scale)
            };
            let products: Vec<f64> = (first..self.end(row, position)).map(product).collect();
            let weights = self.scores.softmax(head, &products);
            let mut sum = vec![0.0; dim];
            for (i, weight) in weights.iter().enumerate() {
                let v = &data.v[self.slot(run, kv_head, first + i)..][..dim];
                sum.iter_mut()
                    .zip(v)
                    .for_each(|(sum, v)| *sum += weight * v.to_f64() * f64::from(self.cache.v_scale));
            }
            out.extend(sum);
        }
        out
    }

    fn on_gpu(&self, gpu: &Gpu, kernels: &PrefillKernels, data: &Data) -> Vec<f32> {
        self.on_gpu_by(gpu, kernels, data, |kv| {
            kernels.maps(self.layout.head_dim, kv).expect("maps of the cache")
        })
    }

    /// By the maps that there are for its cache.
    fn on_gpu_by(
        &self,
        gpu: &Gpu,
        kernels: &PrefillKernels,
        data: &Data,
        maps: impl FnOnce(&GpuKv<'_>) -> Option<PrefillMaps>,
    ) -> Vec<f32> {
        let planner = kernels
            .planner(self.layout, self.heads, self.window, self.cache.element)
            .expect("an occupancy");
        let mut items = vec![PrefillItem::default(); planner.max_entries(self.rows, self.runs.len())];
        let plan = planner.plan(&self.runs, self.ends.as_deref(), &mut items);
        items.truncate(plan.entries());
        let q = upload(gpu, &data.q);
        let [k, v] = [&data.k, &data.v].map(|values| self.cache.upload(gpu, values));
        let (runs, blocks, items) = (
            upload(gpu, &self.runs),
            upload(gpu, &self.blocks),
            upload(gpu, &items),
        );
        let scratch = poisoned::<f32>(gpu, planner.scratch_floats());
        let out = poisoned::<bf16>(gpu, self.rows * self.width());
        let sinks = self.scores.upload(gpu);
        let ends = self.ends.as_ref().map(|ends| upload(gpu, ends));
        let kv = self.cache.on_gpu(&k, &v, {
            let elements = (self.total - 1) * self.block_stride + self.layout.elements(1);
            (elements, self.block_stride)
        });
        let maps = maps(&kv);
        let args = PrefillArgs {
            q: q.slice().range(0..data.q.len()),
            q_stride: self.q_stride,
            kv,
            maps: maps.as_ref(),
            runs: runs.slice().range(0..self.runs.len()),
            blocks: blocks.slice().range(0..self.blocks.len()),
            items: items.slice().range(0..plan.entries()),
            out: out.slice().range(0..self.rows * self.width()),
            scratch: scratch.slice(),
            ends: ends.as_ref().map(|ends| ends.slice().range(0..self.rows)),
            options: self.scores.on_gpu(&sinks),
        };
        kernels.forward(&planner, plan, &args).expect("launches");
        gpu.synchronize().expect("the kernels end");
        widen(&download(gpu, &out, self.rows * self.width()))
    }

    /// Its cache holds keys transposed, and its queries are packed.
    fn on_cpu(&self, data: &Data) -> Vec<f32> {
        let (dim, size) = (self.layout.head_dim, self.layout.block_size.tokens());
        let v: Vec<f32> = data.v.iter().map(|v| v.to_f32() * self.cache.v_scale).collect();
        let mut k = widen(&data.k);
        for (head, from) in k
            .chunks_exact_mut(dim * size)
            .zip(data.k.chunks_exact(dim * size))
        {
            for (i, x) in head.iter_mut().enumerate() {
                *x = from[i % size * dim + i / size].to_f32() * self.cache.k_scale;
            }
        }
        let blocks: Vec<PageId> = self.blocks.iter().map(|&block| PageId(block as u32)).collect();
        let (mut q, mut runs, mut rows) = (Vec::new(), Vec::new(), 0);
        for run in &self.runs {
            for row in run.first_row..run.first_row + run.len {
                q.extend(widen(&data.q[row as usize * self.q_stride..][..self.width()]));
            }
            let len = run.len as usize;
            let first_block = self.first_seen(run) / size;
            runs.push(RunMeta {
                first_row: rows,
                len,
                start: run.context_end as usize - len,
                first_block,
                blocks: &blocks[(run.block_offset + first_block as i32) as usize..],
            });
            rows += len;
        }
        let arena = Arena::new(&Budget::new(1 << 32), Scratch::Growable).expect("an empty arena");
        // Of packed rows.
        let ends: Option<Vec<usize>> = self.ends.as_ref().map(|ends| {
            let rows = self.covered().into_iter();
            rows.map(|row| ends[row] as usize).collect()
        });
        let options = AttentionOptions {
            sees: ends.as_deref().map_or(Sees::Past, Sees::UpTo),
            ..self.scores.on_cpu(self.window)
        };
        let kv = PagedKv {
            k: &k,
            v: &v,
            layout: self.layout,
            stride: self.block_stride,
        };
        let mut packed = vec![f32::NAN; q.len()];
        attention::<f32>(&q, kv, &runs, options, &mut packed, &arena).expect("room");
        let mut out = vec![f32::NAN; self.rows * self.width()];
        for (row, packed) in self.covered().into_iter().zip(packed.chunks_exact(self.width())) {
            out[row * self.width()..][..self.width()].copy_from_slice(packed);
        }
        out
    }

    /// Every row of a run is written and no other; some of them (all of a small step) against the reference.
    fn check(&self, rng: &mut StdRng, tolerance: f64, attend: impl Fn(&Self, &Data) -> Vec<f32>) {
        let data = self.data(rng);
        let out = attend(self, &data);
        let mut covered = self.covered();
        let mut is_covered = vec![false; self.rows];
        covered.iter().for_each(|&row| is_covered[row] = true);
        let what = format!(
            "{} heads, {:?}, blocks {} apart, window {:?}, {:?}, {:?}, {:?}, ends {:?}",
            self.heads,
            self.layout,
            self.block_stride,
            self.window,
            self.scores,
            self.cache,
            self.runs,
            self.ends
        );
        for (row, values) in out.chunks_exact(self.width()).enumerate() {
            if is_covered[row] {
                assert!(values.iter().all(|x| x.is_finite()), "row {row}: {what}");
            } else {
                assert!(values.iter().all(|x| x.is_nan()), "row {row} is no run's: {what}");
            }
        }
        covered.shuffle(rng);
        // As many elements, whatever the size of heads: the reference is slow.
        covered.truncate(40 * 128 / self.layout.head_dim);
        let of = |row: &usize| out[row * self.width()..][..self.width()].to_vec();
        let got: Vec<f32> = covered.iter().flat_map(of).collect();
        let reference = covered.par_iter().flat_map_iter(|&row| self.naive(&data, row));
        let reference: Vec<f64> = reference.collect();
        assert_close(&what, &got, &reference, tolerance);
    }
}

fn random_steps(name: &str, steps: usize, tolerance: f64, attend: impl Fn(&Case, &Data) -> Vec<f32>) {
    let mut rng = rng(name);
    for _ in 0..steps {
        for head_dim in HEAD_DIMS {
            Case::random(&mut rng, head_dim).check(&mut rng, tolerance, &attend);
            let case = Case::random(&mut rng, head_dim).with_spans(&mut rng);
            case.check(&mut rng, tolerance, &attend);
        }
    }
}

#[test]
fn attention_prefill_of_random_steps_on_the_cpu() {
    random_steps("attention_prefill", 2, 1e-5, Case::on_cpu);
}

type Load = fn(&Gpu) -> Result<PrefillKernels, GpuError>;

fn random_steps_on_gpu(load: Load) {
    let gpu = gpu();
    let kernels = load(&gpu).expect("kernels for this GPU");
    random_steps("attention_prefill", 12, 6e-3, |case, data| {
        case.on_gpu(&gpu, &kernels, data)
    });
}

/// Few rows, much context: the context is split.
fn short_chunks_over_long_prefixes(load: Load) {
    let (gpu, mut rng) = (gpu(), rng("attention_prefill long"));
    let kernels = load(&gpu).expect("kernels for this GPU");
    let attend = |case: &Case, data: &Data| case.on_gpu(&gpu, &kernels, data);
    for (head_dim, (len, context)) in [
        (64, (1, 3000)),
        (96, (33, 9000)),
        (128, (1, 3000)),
        (128, (64, 20_011)),
        (256, (33, 9000)),
        (512, (33, 9000)),
        (512, (1, 3000)),
    ] {
        let layout = KvLayout {
            kv_heads: 2,
            head_dim,
            block_size: BlockSize::new(16).expect("a block size"),
        };
        for window in [None, Some(4097), Some(100)] {
            let runs = [(len, context), (40, 40), (7, 500)];
            Case::new(&mut rng, 8, layout, window, &runs).check(&mut rng, 6e-3, attend);
        }
    }
}

/// Enough pieces of work that none is split.
fn long_prompts(load: Load) {
    let (gpu, mut rng) = (gpu(), rng("attention_prefill prompts"));
    let kernels = load(&gpu).expect("kernels for this GPU");
    for head_dim in HEAD_DIMS {
        let layout = KvLayout {
            kv_heads: 4,
            head_dim,
            block_size: BlockSize::new(32).expect("a block size"),
        };
        for window in [None, Some(1024)] {
            let runs = [(4001, 4001), (2048, 6000), (3, 3)];
            let case = Case::new(&mut rng, 16, layout, window, &runs);
            let attend = |case: &Case, data: &Data| case.on_gpu(&gpu, &kernels, data);
            case.check(&mut rng, 6e-3, attend);
            case.with_spans(&mut rng).check(&mut rng, 6e-3, attend);
        }
    }
}

/// Here and in the tests of experts, kernels made for a GPU are told from portable ones.
#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn hopper_gpus_run_the_kernels_made_for_them() {
    let gpu = gpu();
    let is_hopper = gpu.info().compute_capability == (9, 0);
    assert_eq!(has_hopper_kernels(&gpu), is_hopper);
}

#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn attention_prefill_of_random_steps() {
    random_steps_on_gpu(PrefillKernels::load);
}

#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn attention_prefill_of_random_steps_portably() {
    random_steps_on_gpu(PrefillKernels::load_portable);
}

#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn attention_prefill_of_short_chunks() {
    short_chunks_over_long_prefixes(PrefillKernels::load);
}

#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn attention_prefill_of_short_chunks_portably() {
    short_chunks_over_long_prefixes(PrefillKernels::load_portable);
}

#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn attention_prefill_of_long_prompts() {
    long_prompts(PrefillKernels::load);
}

#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn attention_prefill_of_long_prompts_portably() {
    long_prompts(PrefillKernels::load_portable);
}

/// Two engine states may be alive at once, with caches of one size.
#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn maps_of_another_cache_are_refused() {
    let (gpu, mut rng) = (gpu(), rng("attention_prefill maps"));
    let kernels = PrefillKernels::load(&gpu).expect("kernels for this GPU");
    let layout = KvLayout {
        kv_heads: 2,
        head_dim: 128,
        block_size: BlockSize::new(16).expect("a block size"),
    };
    let mut case = Case::new(&mut rng, 8, layout, None, &[(200, 300)]);
    case.cache = Cache::BF16;
    let data = case.data(&mut rng);
    let other = upload(&gpu, &data.k);
    let attend = || {
        case.on_gpu_by(&gpu, &kernels, &data, |kv| {
            let other = GpuKv {
                k: other.slice().range(0..kv.k.len()),
                ..*kv
            };
            kernels.maps(layout.head_dim, &other).expect("maps of a cache")
        })
    };
    let refused = std::panic::catch_unwind(std::panic::AssertUnwindSafe(attend)).is_err();
    assert_eq!(refused, has_hopper_kernels(&gpu), "others need none");
}
