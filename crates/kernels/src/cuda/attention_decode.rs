use bytemuck::{Pod, Zeroable};
use half::bf16;
use plimsoll_device::cuda::{Function, Gpu, GpuError, GpuSlice, Launch};

use super::fused::int;
use super::{AssumedGpu, GpuAttentionOptions, GpuKv, GpuKvElement, GpuRun, HEAD_DIMS, load};
use crate::KvLayout;

/// Keys that a warp takes at once; splits begin at multiples of it.
const TILE: usize = 16;
/// Query heads that share a read of the keys.
const ROWS: usize = 16;
/// Partial results that are merged at once.
const FAN_IN: usize = 16;
/// The shortest split: with shorter ones warps have nothing to do.
const SHORTEST_SPLIT: usize = 64;
/// Units of work for each block of threads that runs at once; with more, neither balance nor anything else improves.
const UNITS_PER_SLOT: usize = 8;

/// What it costs to split, measured on an H200: in keys of 128 elements that a block of threads takes while all others run
/// too. A block that is alone needs this fraction of the time for a key.
const ALONE: f32 = 0.3;
/// To begin a unit.
const BEGIN: f32 = 30.0;
/// To store a part of a context, and go on to another.
const NEXT: f32 = 90.0;
/// To merge, for each level, and for each partial result of a row.
const MERGE: f32 = 30.0;
const MERGE_ROW: f32 = 0.125;

/// `Shape` of `kernels/attention_decode.cu`.
#[derive(Clone, Copy, Debug)]
struct Shape {
    head_dim: usize,
    warps: usize,
    /// Warps that share a ring are one.
    teams: usize,
    stages: usize,
}

impl Shape {
    const fn new(head_dim: usize) -> Self {
        let (warps, teams, stages) = match head_dim {
            ..128 => (4, 4, 4),
            128 => (4, 4, 3),
            129..=256 => (2, 2, 2),
            _ => (2, 1, 2),
        };
        Self {
            head_dim,
            warps,
            teams,
            stages,
        }
    }

    /// Each team's ring of tiles of keys and values; large queries are in shared memory too.
    fn shared_bytes(self) -> usize {
        let queries = if self.head_dim > 128 {
            ROWS * self.head_dim
        } else {
            0
        };
        (self.teams * self.stages * 2 * TILE * self.head_dim + queries) * size_of::<bf16>()
    }

    fn threads(self) -> usize {
        self.warps * 32
    }
}

/// What every block of threads reads first. `Header` of `kernels/attention_decode.cu`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C, align(16))]
pub struct DecodeHeader {
    /// Entries of the work list.
    pub items: i32,
    /// Most keys of a split.
    pub chunk: i32,
    /// Runs.
    pub runs: i32,
    padding: i32,
}

/// One split of the context of one run; those of a run follow each other. `Item` of `kernels/attention_decode.cu`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C, align(8))]
pub struct DecodeItem {
    /// Index into the step's runs.
    pub run: i32,
    /// Which of the run's splits.
    pub split: i32,
}

/// Cuts the contexts of a step into splits, on the host. Plain arithmetic: layers with another window need another planner,
/// or take this one's list if their window is shorter.
#[derive(Clone, Copy, Debug)]
pub struct DecodePlanner {
    layout: KvLayout,
    heads: usize,
    window: Option<usize>,
    /// Blocks of threads that the GPU runs at once.
    slots: usize,
    max_runs: usize,
}

impl DecodePlanner {
    /// For steps of up to `max_runs` runs, with `heads` query heads over a cache of `layout`, each token seeing `window`
    /// tokens, itself included (`None`: all); `slots` blocks of threads run at once.
    ///
    /// # Panics
    /// If the heads are not a multiple of the KV heads, or the head size is none of [`HEAD_DIMS`].
    pub fn new(layout: KvLayout, heads: usize, window: Option<usize>, slots: usize, max_runs: usize) -> Self {
        assert!(
            heads > 0 && heads.is_multiple_of(layout.kv_heads),
            "{heads} query heads, {} KV heads",
            layout.kv_heads
        );
        assert!(
            HEAD_DIMS.contains(&layout.head_dim),
            "head size {}",
            layout.head_dim
        );
        assert!(window != Some(0) && slots > 0);
        Self {
            layout,
            heads,
            window,
            slots,
            max_runs,
        }
    }

    /// As [`DecodeKernels::planner`] would make it on that GPU.
    ///
    /// # Panics
    /// As [`Self::new`].
    pub fn assumed(
        layout: KvLayout,
        heads: usize,
        window: Option<usize>,
        gpu: AssumedGpu,
        max_runs: usize,
    ) -> Self {
        let shared = Shape::new(layout.head_dim).shared_bytes();
        Self::new(layout, heads, window, gpu.slots(shared), max_runs)
    }

    /// The same for steps of up to `max_runs` runs.
    #[must_use]
    pub fn for_runs(self, max_runs: usize) -> Self {
        Self { max_runs, ..self }
    }

    /// Entries of a work list that is long enough for every step.
    pub fn max_items(&self) -> usize {
        self.max_runs + self.spare_items()
    }

    /// Floats of scratch that are enough for every step.
    pub fn scratch_floats(&self) -> usize {
        let rows = self.group().min(ROWS);
        self.max_items() * self.tiles() * rows * (self.layout.head_dim + 4)
    }

    /// Counters that are enough for every step.
    pub fn counters(&self) -> usize {
        // Two levels of merges for each split.
        2 * self.max_items() * self.tiles()
    }

    /// Blocks of threads of a launch: the same for every step.
    pub fn grid(&self) -> usize {
        self.slots.min(self.max_items() * self.tiles())
    }

    /// Fills the front of `items`, which the device must see with the header. `contexts` are pairs of the index of a run and
    /// its tokens in the cache, the current one included.
    ///
    /// # Panics
    /// If there are more than `max_runs` runs, a context is empty, or `items` is shorter than [`Self::max_items`].
    pub fn plan(
        &self,
        contexts: impl Iterator<Item = (usize, usize)> + Clone,
        items: &mut [DecodeItem],
    ) -> DecodeHeader {
        let chunk = self.chunk(contexts.clone().map(|(_, context)| self.keys(context)));
        let (mut count, mut runs) = (0, 0);
        for (run, context) in contexts {
            assert!(context > 0, "run {run} has no context");
            for split in 0..self.keys(context).div_ceil(chunk) {
                items[count] = DecodeItem {
                    run: run as i32,
                    split: split as i32,
                };
                count += 1;
            }
            runs += 1;
        }
        assert!(runs <= self.max_runs, "{runs} runs");
        DecodeHeader {
            items: count as i32,
            chunk: chunk as i32,
            runs: runs as i32,
            padding: 0,
        }
    }

    /// The split length that is done soonest.
    fn chunk(&self, keys: impl Iterator<Item = usize> + Clone) -> usize {
        let (total, longest) = keys.clone().fold((0, 0), |(total, longest): (usize, usize), k| {
            (total + k, longest.max(k))
        });
        // From here on there are at most `max_items` splits: each run has at most one that is not full.
        let shortest = total
            .div_ceil(self.spare_items())
            .max(SHORTEST_SPLIT)
            .next_multiple_of(TILE);
        candidates(shortest, longest)
            .min_by(|&a, &b| self.cost(a, keys.clone()).total_cmp(&self.cost(b, keys.clone())))
            .unwrap_or(shortest)
    }

    /// Estimated time of a step beside what all splits have in common, in the unit of [`ALONE`].
    fn cost(&self, chunk: usize, keys: impl Iterator<Item = usize>) -> f32 {
        let (mut units, mut of_split, mut longest, mut most) = (0, 0, 0, 0);
        for k in keys {
            let splits = k.div_ceil(chunk);
            units += splits;
            of_split += if splits > 1 { splits } else { 0 };
            longest = longest.max(k.div_ceil(splits.max(1)));
            most = most.max(splits);
        }
        let waves = (units * self.tiles()) as f32 / self.slots as f32;
        // The fewer blocks the last wave has, the faster is each, but all together take longer.
        let last = waves + 1.0 - waves.ceil();
        let idle = longest as f32 * (ALONE.hypot(last) - last);
        let mut overhead = waves * BEGIN;
        if of_split * 2 > units {
            overhead += (waves - 1.0).max(0.0) * NEXT;
        }
        if most > 1 {
            let levels = if most > FAN_IN { 2.0 } else { 1.0 };
            overhead += levels * MERGE + (most * self.group().min(ROWS)) as f32 * MERGE_ROW;
        }
        idle + overhead * 128.0 / self.layout.head_dim as f32
    }

    /// Keys of a run's splits: those seen, from the start of a tile on.
    fn keys(&self, context: usize) -> usize {
        let unseen = self.window.map_or(0, |window| context.saturating_sub(window));
        context - unseen / TILE * TILE
    }

    /// Entries beyond one for each run.
    fn spare_items(&self) -> usize {
        (UNITS_PER_SLOT * self.slots).div_ceil(self.tiles())
    }

    /// Query heads of one KV head.
    fn group(&self) -> usize {
        self.heads / self.layout.kv_heads
    }

    /// Units of work of a split.
    fn tiles(&self) -> usize {
        self.layout.kv_heads * self.group().div_ceil(ROWS)
    }
}

/// Split lengths no shorter than `shortest` that cut `longest` into more and more splits.
fn candidates(shortest: usize, longest: usize) -> impl Iterator<Item = usize> {
    std::iter::successors(Some(1), |splits| Some(splits + (splits / 8).max(1)))
        .map(move |splits: usize| longest.div_ceil(splits).next_multiple_of(TILE))
        .take_while(move |&chunk| chunk >= shortest)
}

/// What [`DecodeKernels::forward`] works on.
///
/// `header`, `items`, `runs` and `blocks`, and keys and values of all positions but each run's last, are read while kernels ahead
/// of this one may still run, back to the last that was launched without programmatic dependent launch, copy or graph. The
/// same step must not write them in kernels: copies and earlier steps do.
#[derive(Clone, Copy, Debug)]
pub struct DecodeArgs<'a> {
    /// Queries, `heads * head_dim` elements at the start of each row.
    pub q: GpuSlice<'a, bf16>,
    /// Elements from one row of `q` to the next, a multiple of 8: `q` may be a part of wider rows.
    pub q_stride: usize,
    /// The layer's cache.
    pub kv: GpuKv<'a>,
    /// The step's runs; those that the work list names have one row.
    pub runs: GpuSlice<'a, GpuRun>,
    /// Their block tables.
    pub blocks: GpuSlice<'a, i32>,
    /// What [`DecodePlanner::plan`] returned.
    pub header: GpuSlice<'a, DecodeHeader>,
    /// The work list it filled.
    pub items: GpuSlice<'a, DecodeItem>,
    /// `[rows, heads * head_dim]`; rows of other runs stay as they are.
    pub out: GpuSlice<'a, bf16>,
    /// [`DecodePlanner::scratch_floats`] of any content.
    pub scratch: GpuSlice<'a, f32>,
    /// [`DecodePlanner::counters`], zero before the first launch, and again after each.
    pub counters: GpuSlice<'a, u32>,
    /// What becomes of the scores.
    pub options: GpuAttentionOptions<'a>,
}

/// Attention of runs of one row over their cached context
/// ([Flash-Decoding](https://crfm.stanford.edu/2023/10/12/flashdecoding.html)).
#[derive(Debug)]
pub struct DecodeKernels {
    gpu: Gpu,
    /// For each of [`HEAD_DIMS`] and each element of the cache, without and with a soft cap.
    attention: [[[Function; 2]; GpuKvElement::ALL.len()]; HEAD_DIMS.len()],
}

impl DecodeKernels {
    /// Loads them.
    ///
    /// # Errors
    /// [`GpuError`] if the binary has none for this GPU.
    pub fn load(gpu: &Gpu) -> Result<Self, GpuError> {
        let module = load(gpu, "attention_decode")?;
        let function = |head_dim| {
            let named = |variant: &str, element: GpuKvElement| {
                let name = format!("attention_decode{variant}{}_{head_dim}", element.infix());
                let function = module.function(&name)?;
                function.allow_shared(Shape::new(head_dim).shared_bytes())?;
                Ok::<_, GpuError>(function)
            };
            let of = |element| Ok::<_, GpuError>([named("", element)?, named("_capped", element)?]);
            let [wide, fp8] = GpuKvElement::ALL.map(of);
            Ok::<_, GpuError>([wide?, fp8?])
        };
        let [a, b, c, d, e] = HEAD_DIMS.map(function);
        Ok(Self {
            gpu: gpu.clone(),
            attention: [a?, b?, c?, d?, e?],
        })
    }

    /// A planner for this GPU; see [`DecodePlanner::new`].
    ///
    /// # Errors
    /// [`GpuError`] of the driver.
    ///
    /// # Panics
    /// As [`DecodePlanner::new`].
    pub fn planner(
        &self,
        layout: KvLayout,
        heads: usize,
        window: Option<usize>,
        max_runs: usize,
    ) -> Result<DecodePlanner, GpuError> {
        // Those for elements of 8 bits take as much shared memory.
        let (shape, [[function, _], _]) = self.shape(layout.head_dim);
        let per_sm = function.blocks_per_sm(shape.threads(), shape.shared_bytes())?;
        let slots = per_sm * self.gpu.info().sm_count;
        Ok(DecodePlanner::new(layout, heads, window, slots, max_runs))
    }

    /// Attends as the work list in device memory says. The launch depends on `planner` and lengths alone, so a captured one
    /// serves every list of that planner.
    ///
    /// # Errors
    /// [`GpuError`] of the driver.
    ///
    /// # Panics
    /// If a length in `args` does not fit `planner`.
    pub fn forward(&self, planner: &DecodePlanner, args: &DecodeArgs<'_>) -> Result<(), GpuError> {
        let DecodePlanner { layout, heads, .. } = *planner;
        let row = heads * layout.head_dim;
        assert!(
            args.q_stride >= row && args.q_stride.is_multiple_of(8),
            "rows of q"
        );
        assert!(args.out.len().is_multiple_of(row), "rows of out");
        let block_rows = args.kv.block_rows(&layout);
        assert!(!args.header.is_empty());
        assert!(
            args.items.len() >= planner.max_items(),
            "entries of the work list"
        );
        assert!(
            args.scratch.len() >= planner.scratch_floats(),
            "floats of scratch"
        );
        assert!(args.counters.len() >= planner.counters(), "counters");
        args.options.check(heads);

        let window = planner
            .window
            .map_or(i32::MAX, |window| i32::try_from(window).unwrap_or(i32::MAX));
        let params = [
            args.q.into(),
            args.kv.k.into(),
            args.kv.v.into(),
            args.runs.into(),
            args.blocks.into(),
            args.header.into(),
            args.items.into(),
            args.out.into(),
            args.scratch.into(),
            args.counters.into(),
            (args.q_stride as i32).into(),
            (layout.kv_heads as i32).into(),
            (planner.group() as i32).into(),
            layout.block_size.tokens().ilog2().into(),
            int(block_rows),
            window.into(),
            args.options.factor(&args.kv).into(),
            args.options.inner(&args.kv).into(),
            args.options.sinks().into(),
            args.kv.v_scale.into(),
        ];
        let (shape, functions) = self.shape(layout.head_dim);
        let function = &functions[args.kv.element.index()][args.options.variant()];
        let launch = Launch::new([planner.grid() as u32, 1, 1], shape.threads() as u32)
            .shared(shape.shared_bytes())
            .pdl(true);
        // SAFETY: the arguments are those of the kernel; the caller keeps the memory and promises what it holds.
        unsafe { self.gpu.launch(function, launch, &params) }
    }

    fn shape(&self, head_dim: usize) -> (Shape, &[[Function; 2]; GpuKvElement::ALL.len()]) {
        let at = HEAD_DIMS.iter().position(|&dim| dim == head_dim);
        let at = at.expect("the planner has checked the head size");
        (Shape::new(head_dim), &self.attention[at])
    }
}

#[cfg(test)]
mod tests;
