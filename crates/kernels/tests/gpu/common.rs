//! Inputs, references and comparisons that all operations share.

use half::bf16;
use plimsoll_core::{BlockSize, Component};
use plimsoll_device::Pod;
use plimsoll_device::cuda::{Gpu, GpuSlab};
use plimsoll_kernels::cuda::{GpuAttentionOptions, has_hopper_kernels};
use plimsoll_kernels::{AttentionOptions, KvLayout, Sees};
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};
use rayon::iter::{IntoParallelIterator, ParallelIterator};

/// The first GPU.
pub(crate) fn gpu() -> Gpu {
    Gpu::open(0).expect("an NVIDIA GPU")
}

/// The same, where it runs what is made for Hopper.
pub(crate) fn hopper() -> Option<Gpu> {
    Some(gpu()).filter(has_hopper_kernels)
}

/// Fresh random inputs in every run; the seed is printed, so a failure can be repeated with the variable `SEED`.
#[allow(clippy::print_stdout, reason = "shown where a test fails")]
pub(crate) fn rng(test: &str) -> StdRng {
    let seed = std::env::var("SEED").map_or_else(|_| rand::random(), |seed| seed.parse().expect("a number"));
    println!("{test}: seed {seed}");
    StdRng::seed_from_u64(seed)
}

/// Values in -1..1, exact in bf16.
pub(crate) fn random(rng: &mut StdRng, len: usize) -> Vec<bf16> {
    (0..len)
        .map(|_| bf16::from_f32(rng.random_range(-1.0..1.0)))
        .collect()
}

pub(crate) fn widen(values: &[bf16]) -> Vec<f32> {
    values.iter().map(|x| x.to_f32()).collect()
}

pub(crate) fn wide(values: &[bf16]) -> Vec<f64> {
    values.iter().map(|x| x.to_f64()).collect()
}

/// Device memory that holds `values`.
pub(crate) fn upload<T: Pod>(gpu: &Gpu, values: &[T]) -> GpuSlab {
    let slab = gpu
        .alloc(Component::Arena, size_of_val(values).max(1))
        .expect("room on the GPU");
    gpu.upload(values, slab.slice::<T>().range(0..values.len()))
        .expect("a copy to the GPU");
    slab
}

/// Device memory of `len` elements, poisoned: NaN as bf16 and f32, -1 as an integer.
pub(crate) fn poisoned<T: Pod>(gpu: &Gpu, len: usize) -> GpuSlab {
    let slab = gpu
        .alloc(Component::Arena, (len * size_of::<T>()).max(1))
        .expect("room on the GPU");
    gpu.fill(slab.slice::<u8>(), 0xff).expect("a fill");
    slab
}

/// The first `len` elements.
pub(crate) fn download<T: Pod>(gpu: &Gpu, slab: &GpuSlab, len: usize) -> Vec<T> {
    gpu.download(slab.slice::<T>().range(0..len))
        .expect("a copy from the GPU")
}

/// What becomes of attention's scores.
#[derive(Clone, Debug)]
pub(crate) struct Scores {
    pub(crate) scale: f32,
    pub(crate) soft_cap: Option<f32>,
    pub(crate) sinks: Option<Vec<f32>>,
}

impl Scores {
    /// Plain ones, and such with a soft cap, sinks or both.
    pub(crate) fn random(rng: &mut StdRng, heads: usize, scale: f32) -> Self {
        let soft_cap = [None, None, Some(0.7), Some(50.0)][rng.random_range(0..4)];
        // From next to nothing to nearly all of the weight.
        let sinks = (0..heads).map(|_| rng.random_range(-5.0..10.0)).collect();
        Self {
            scale,
            soft_cap,
            sinks: rng.random_bool(0.5).then_some(sinks),
        }
    }

    /// Weights of the products of a query of `head` with keys: the softmax in f64.
    pub(crate) fn softmax(&self, head: usize, products: &[f64]) -> Vec<f64> {
        let score = |product: &f64| {
            let score = product * f64::from(self.scale);
            self.soft_cap
                .map_or(score, |cap| f64::from(cap) * (score / f64::from(cap)).tanh())
        };
        let scores: Vec<f64> = products.iter().map(score).collect();
        let sink = self.sinks.as_ref().map(|sinks| f64::from(sinks[head]));
        let largest = scores
            .iter()
            .copied()
            .chain(sink)
            .fold(f64::NEG_INFINITY, f64::max);
        let total: f64 = scores
            .iter()
            .copied()
            .chain(sink)
            .map(|s| (s - largest).exp())
            .sum();
        scores.iter().map(|s| (s - largest).exp() / total).collect()
    }

    pub(crate) fn on_cpu(&self, window: Option<usize>) -> AttentionOptions<'_> {
        AttentionOptions {
            scale: self.scale,
            window,
            soft_cap: self.soft_cap,
            sinks: self.sinks.as_deref(),
            sees: Sees::Past,
        }
    }

    /// The sinks in device memory, for [`Self::on_gpu`].
    pub(crate) fn upload(&self, gpu: &Gpu) -> GpuSlab {
        upload(gpu, self.sinks.as_deref().unwrap_or_default())
    }

    pub(crate) fn on_gpu<'a>(&self, sinks: &'a GpuSlab) -> GpuAttentionOptions<'a> {
        GpuAttentionOptions {
            scale: self.scale,
            soft_cap: self.soft_cap,
            sinks: (self.sinks.as_ref()).map(|values| sinks.slice().range(0..values.len())),
        }
    }
}

/// Elements from one block of a cache to the next: those of one block, or more where other layers' are between them.
pub(crate) fn block_stride(rng: &mut StdRng, layout: KvLayout) -> usize {
    let head = layout.elements(1) / layout.kv_heads;
    layout.elements(1) + [0, 0, 1, 5][rng.random_range(0..4)] * head
}

/// First position that anyone sees of a run of `len` rows that ends at `context`.
pub(crate) fn first_seen(len: usize, context: usize, window: Option<usize>) -> usize {
    window.map_or(0, |window| (context - len + 1).saturating_sub(window))
}

/// Block tables of runs, one after the other, as a step has them.
pub(crate) struct Tables {
    pub(crate) blocks: Vec<i32>,
    /// Where each run's table begins, or would begin if it had the blocks that nobody sees: perhaps below 0.
    pub(crate) offsets: Vec<i32>,
    /// Blocks of the cache. Some are nobody's: what reads them reads what was never written.
    pub(crate) total: usize,
}

impl Tables {
    /// For runs of `(len, context)`. In front of a table there may be a few entries of a block that is nobody's.
    pub(crate) fn new(
        rng: &mut StdRng,
        block_size: BlockSize,
        window: Option<usize>,
        runs: &[(usize, usize)],
    ) -> Self {
        let spans = runs.iter().map(|&(len, context)| {
            let first = first_seen(len, context, window) / block_size.tokens();
            first..block_size.blocks_for(context)
        });
        let used: usize = spans.clone().map(|span| span.len()).sum();
        let total = used + 3;
        let mut free: Vec<i32> = (0..total as i32).collect();
        free.shuffle(rng);
        let nobodys = free[used];
        let (mut blocks, mut offsets) = (Vec::new(), Vec::new());
        for span in spans {
            blocks.extend(vec![nobodys; rng.random_range(0..3)]);
            offsets.push(blocks.len() as i32 - span.start as i32);
            blocks.extend(free.drain(..span.len()));
        }
        Self {
            blocks,
            offsets,
            total,
        }
    }
}

/// `x Wᵀ + b` in `f64`: `x` has rows of `k` inputs, `weight` is `[n, k]`, and the result has rows of `n` outputs.
pub(crate) fn product(x: &[f64], weight: &[f64], k: usize, bias: Option<&[bf16]>) -> Vec<f64> {
    let (rows, n) = (x.len() / k, weight.len() / k);
    let output = |at: usize| {
        let (row, output) = (at / n, at % n);
        let sum = dot(&x[row * k..][..k], &weight[output * k..][..k]);
        sum + bias.map_or(0.0, |bias| bias[output].to_f64())
    };
    (0..rows * n).into_par_iter().map(output).collect()
}

/// The sum of products, as eight partial sums, so that additions need not wait for each other.
fn dot(a: &[f64], b: &[f64]) -> f64 {
    let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<8>(), b.as_chunks::<8>());
    let mut sums = [0.0; 8];
    for (a, b) in a.iter().zip(b) {
        for (sum, (a, b)) in sums.iter_mut().zip(a.iter().zip(b)) {
            *sum += a * b;
        }
    }
    let rest = a_rest.iter().zip(b_rest).map(|(a, b)| a * b);
    sums.into_iter().chain(rest).sum()
}

/// ‖out − reference‖ / ‖reference‖, or ‖out‖ if the reference is 0.
pub(crate) fn relative_error(out: &[f32], reference: &[f64]) -> f64 {
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
    let error = norm(&mut out.iter().zip(reference).map(|(&x, y)| f64::from(x) - y));
    let size = norm(&mut reference.iter().copied());
    if size == 0.0 { error } else { error / size }
}

/// [`relative_error`] is at most `tolerance`, and no element is NaN.
#[track_caller]
pub(crate) fn assert_close(what: &str, out: &[f32], reference: &[f64], tolerance: f64) {
    assert_eq!(out.len(), reference.len(), "{what}: lengths");
    if let Some(at) = out.iter().position(|x| !x.is_finite()) {
        panic!("{what}: element {at} is {}", out[at]);
    }
    let relative = relative_error(out, reference);
    assert!(
        relative <= tolerance,
        "{what}: relative error {relative:.2e} over {tolerance:.0e}"
    );
}
