mod maps;

use std::cmp::Reverse;
use std::ops::Range;

use bytemuck::{Pod, Zeroable};
use half::bf16;
use plimsoll_device::cuda::{Function, Gpu, GpuError, GpuSlice, Launch};

use super::fused::int;
use super::{
    AssumedGpu, GpuAttentionOptions, GpuKv, GpuKvElement, GpuRun, HEAD_DIMS, has_hopper_kernels, load,
};
use crate::KvLayout;
pub use maps::PrefillMaps;

/// Keys by which the planner measures work and cuts contexts; a multiple of what a kernel takes at once.
const UNIT: usize = 128;
/// A split of a context is worth its partial result from this many units on.
const SHORTEST_SPLIT: usize = 2;
/// Splits of about this many units cost next to nothing.
const LONG_SPLIT: usize = 16;
/// Partial results for each block of threads that runs at once; `LONG_SPLIT` and the divisor of `PrefillPlanner::target`
/// keep to it.
const PARTIALS_PER_SLOT: usize = 4;
const MERGE_THREADS: usize = 256;

/// Head sizes that have kernels made for compute capability 9.0 alone, over a cache with such elements.
pub fn hopper_head_dims(element: GpuKvElement) -> &'static [usize] {
    match element {
        GpuKvElement::Bf16 => &[64, 96, 128, 256],
        // With heads of 96, results at 32k tokens were not those of the portable kernel.
        GpuKvElement::Fp8 => &[64, 128, 256],
    }
}
/// Parameters of a kernel; the merge takes two more.
const ATTENTION_PARAMS: usize = 21;

/// One piece of the work list of [`PrefillKernels`], in device memory: query rows of one run and the keys they are attended
/// over. `Item` of `kernels/attention_prefill.cu`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C, align(16))]
pub struct PrefillItem {
    run: i32,
    /// First row: token of the run × query heads of a KV head + query head.
    row: i32,
    /// Keys `begin..end`, or for a merge partial results `begin..end`.
    begin: i32,
    end: i32,
    /// Which partial result this is; -1: the whole one.
    partial: i32,
    padding: [i32; 3],
}

/// How much of a work list [`PrefillPlanner::plan`] has filled: pieces of work, then merges of partial results.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PrefillPlan {
    items: usize,
    merges: usize,
}

impl PrefillPlan {
    /// Entries of the work list that the device must see.
    pub fn entries(&self) -> usize {
        self.items + self.merges
    }
}

/// Cuts the attention of a step into pieces of about equal work, on the host. Plain arithmetic: a layer of another window
/// needs another planner, all other layers share a plan.
#[derive(Clone, Copy, Debug)]
pub struct PrefillPlanner {
    layout: KvLayout,
    heads: usize,
    window: Option<usize>,
    tiling: Tiling,
}

/// What a plan needs to know of the kernel that runs it.
#[derive(Clone, Copy, Debug)]
struct Tiling {
    /// Query rows of one piece of work.
    rows: usize,
    /// Blocks of threads that the GPU runs at once.
    slots: usize,
}

impl PrefillPlanner {
    fn new(layout: KvLayout, heads: usize, window: Option<usize>, tiling: Tiling) -> Self {
        assert!(
            heads.is_multiple_of(layout.kv_heads),
            "{heads} query heads, {} KV heads",
            layout.kv_heads
        );
        assert!(window != Some(0), "a token sees at least itself");
        Self {
            layout,
            heads,
            window,
            tiling,
        }
    }

    /// As [`PrefillKernels::planner`] would make it on that GPU, of the generation of the H200.
    ///
    /// # Panics
    /// If the heads are not a multiple of the KV heads.
    pub fn assumed(
        layout: KvLayout,
        heads: usize,
        window: Option<usize>,
        element: GpuKvElement,
        gpu: AssumedGpu,
    ) -> Self {
        let shape = Shape::fastest(layout.head_dim, element, true);
        let tiling = Tiling {
            rows: shape.rows,
            slots: gpu.slots(shape.shared),
        };
        Self::new(layout, heads, window, tiling)
    }

    /// Entries of a work list that is long enough for every step of up to `max_runs` runs and `max_tokens` tokens.
    pub fn max_entries(&self, max_tokens: usize, max_runs: usize) -> usize {
        let tiles = max_tokens * self.group() / self.tiling.rows + max_runs;
        tiles + self.max_partials() * 3 / 2
    }

    /// Floats of scratch that are enough for every step.
    pub fn scratch_floats(&self) -> usize {
        self.partial_floats() * self.max_partials()
    }

    /// Fills `items`, longest pieces first. Every run has at least one token and a context no shorter than itself. `ends` are those of
    /// [`PrefillArgs::ends`], if there are any.
    ///
    /// # Panics
    /// If `items` is shorter than [`Self::max_entries`] demands.
    pub fn plan(&self, runs: &[GpuRun], ends: Option<&[i32]>, items: &mut [PrefillItem]) -> PrefillPlan {
        let target = self.target(runs, ends);
        let (mut count, mut partials) = (0, 0);
        for tile in self.tiles(runs, ends) {
            let splits = splits(tile.units().len(), target);
            for split in 0..splits {
                let partial = if splits > 1 { (partials + split) as i32 } else { -1 };
                items[count] = tile.item(split, splits, partial);
                count += 1;
            }
            partials += if splits > 1 { splits } else { 0 };
        }
        assert!(partials <= self.max_partials(), "{partials} partial results");
        items[..count].sort_unstable_by_key(|item| Reverse(item.end - item.begin));

        let (mut merges, mut first) = (0, 0);
        for tile in self.tiles(runs, ends) {
            let splits = splits(tile.units().len(), target);
            if splits > 1 {
                items[count + merges] = tile.merge(first..first + splits);
                first += splits;
                merges += 1;
            }
        }
        PrefillPlan { items: count, merges }
    }

    /// Query heads of one KV head.
    fn group(&self) -> usize {
        self.heads / self.layout.kv_heads
    }

    /// Most partial results of a step, each for all KV heads.
    fn max_partials(&self) -> usize {
        (PARTIALS_PER_SLOT * self.tiling.slots).div_ceil(self.layout.kv_heads)
    }

    /// Floats of one partial result of all KV heads: sums, and maximum and weight of each row.
    fn partial_floats(&self) -> usize {
        self.layout.kv_heads * self.tiling.rows * (self.layout.head_dim + 2)
    }

    /// Units that a piece should have. An even share of the work is `fair`; pieces of a third of it leave little to wait for
    /// at the end, but very short ones cost more than they save.
    fn target(&self, runs: &[GpuRun], ends: Option<&[i32]>) -> usize {
        let work: usize = self.tiles(runs, ends).map(|tile| tile.units().len()).sum();
        let fair = (work * self.layout.kv_heads).div_ceil(self.tiling.slots);
        fair.min(LONG_SPLIT).max(fair.div_ceil(3)).max(SHORTEST_SPLIT)
    }

    fn tiles<'a>(&'a self, runs: &'a [GpuRun], ends: Option<&'a [i32]>) -> impl Iterator<Item = Tile> + 'a {
        let rows = self.tiling.rows;
        runs.iter().enumerate().flat_map(move |(index, run)| {
            (0..run.len as usize * self.group())
                .step_by(rows)
                .map(move |row| self.tile(index, run, ends, row..row + rows))
        })
    }

    fn tile(&self, index: usize, run: &GpuRun, ends: Option<&[i32]>, rows: Range<usize>) -> Tile {
        let (len, end) = (run.len as usize, run.context_end as usize);
        let last = rows.end.min(len * self.group()) - 1;
        let position = |row| end - len + row / self.group();
        // What a later row sees ends no earlier.
        let seen = match ends {
            None => position(last) + 1,
            Some(ends) => ends[run.first_row as usize + last / self.group()] as usize,
        };
        let seen_from = |at: usize| self.window.map_or(0, |window| (at + 1).saturating_sub(window));
        Tile {
            run: index,
            row: rows.start,
            keys: seen_from(position(rows.start))..seen,
        }
    }
}

/// Rows of one run that are worked on together, and the keys that any of them sees.
struct Tile {
    run: usize,
    row: usize,
    keys: Range<usize>,
}

impl Tile {
    /// The units its keys lie in.
    fn units(&self) -> Range<usize> {
        self.keys.start / UNIT..self.keys.end.div_ceil(UNIT)
    }

    fn item(&self, split: usize, splits: usize, partial: i32) -> PrefillItem {
        let units = self.units();
        let cut = |split: usize| (units.start + units.len() * split / splits) * UNIT;
        PrefillItem {
            run: self.run as i32,
            row: self.row as i32,
            begin: cut(split).max(self.keys.start) as i32,
            end: cut(split + 1).min(self.keys.end) as i32,
            partial,
            padding: [0; 3],
        }
    }

    fn merge(&self, partials: Range<usize>) -> PrefillItem {
        PrefillItem {
            run: self.run as i32,
            row: self.row as i32,
            begin: partials.start as i32,
            end: partials.end as i32,
            partial: -1,
            padding: [0; 3],
        }
    }
}

/// Into how many pieces a tile of that many units is cut: rounded, so at least two mean at least 1.5 times the target and all
/// pieces of a step number at most 4/3 of its work over the target.
fn splits(units: usize, target: usize) -> usize {
    ((units + target / 2) / target).max(1)
}

/// What one call of [`PrefillKernels::forward`] works on.
#[derive(Clone, Copy, Debug)]
pub struct PrefillArgs<'a> {
    /// Queries: a row of `heads × head_dim` for every token, [`Self::q_stride`] apart.
    pub q: GpuSlice<'a, bf16>,
    /// Elements from one token's queries to the next token's.
    pub q_stride: usize,
    /// The layer's cache; keys and values of the runs themselves are in it.
    pub kv: GpuKv<'a>,
    /// What [`PrefillKernels::maps`] returned for this cache.
    pub maps: Option<&'a PrefillMaps>,
    /// The step's runs, as planned.
    pub runs: GpuSlice<'a, GpuRun>,
    /// Their block tables.
    pub blocks: GpuSlice<'a, i32>,
    /// What the planner wrote, on the device.
    pub items: GpuSlice<'a, PrefillItem>,
    /// `[tokens, heads × head_dim]`: the rows of the runs are written.
    pub out: GpuSlice<'a, bf16>,
    /// At least [`PrefillPlanner::scratch_floats`].
    pub scratch: GpuSlice<'a, f32>,
    /// Of each row of [`Self::out`] the position behind the last that it sees: behind itself, at most at the end of its run, and no earlier
    /// than that of the row before in its run. Without them each sees up to itself.
    pub ends: Option<GpuSlice<'a, i32>>,
    /// What becomes of the scores.
    pub options: GpuAttentionOptions<'a>,
}

/// Grouped-query attention of runs of any length over the paged cache, causal but where rows see what follows them.
#[derive(Debug)]
pub struct PrefillKernels {
    gpu: Gpu,
    /// For each of [`HEAD_DIMS`] and each element of the cache.
    attention: [[Kernel; GpuKvElement::ALL.len()]; HEAD_DIMS.len()],
    merge: Function,
}

#[derive(Debug)]
struct Kernel {
    /// Without and with a soft cap.
    functions: [Function; 2],
    shape: Shape,
}

/// How a kernel is launched.
#[derive(Clone, Copy, Debug)]
struct Shape {
    threads: usize,
    shared: usize,
    /// Query rows of a piece of work.
    rows: usize,
    /// Its blocks take pieces of work until none is left, others have one each.
    persistent: bool,
}

impl PrefillKernels {
    /// Loads the fastest kernels for this GPU.
    ///
    /// # Errors
    /// [`GpuError`] if this binary has none for it.
    pub fn load(gpu: &Gpu) -> Result<Self, GpuError> {
        Self::load_with(gpu, has_hopper_kernels(gpu))
    }

    /// Loads the kernels that run on all GPUs.
    ///
    /// # Errors
    /// As [`Self::load`].
    pub fn load_portable(gpu: &Gpu) -> Result<Self, GpuError> {
        Self::load_with(gpu, false)
    }

    fn load_with(gpu: &Gpu, hopper: bool) -> Result<Self, GpuError> {
        let module = load(gpu, "attention_prefill")?;
        let attention = |head_dim, element: GpuKvElement| {
            let shape = Shape::fastest(head_dim, element, hopper);
            let name = match shape.persistent {
                true => "attention_prefill_hopper",
                false => "attention_prefill",
            };
            let function = |variant: &str| {
                let name = format!("{name}{variant}{}_{head_dim}", element.infix());
                let function = module.function(&name)?;
                function.allow_shared(shape.shared)?;
                Ok::<_, GpuError>(function)
            };
            let functions = [function("")?, function("_capped")?];
            Ok::<_, GpuError>(Kernel { functions, shape })
        };
        let attention = |head_dim| {
            let [wide, fp8] = GpuKvElement::ALL.map(|element| attention(head_dim, element));
            Ok::<_, GpuError>([wide?, fp8?])
        };
        let [a, b, c, d, e] = HEAD_DIMS.map(attention);
        Ok(Self {
            gpu: gpu.clone(),
            attention: [a?, b?, c?, d?, e?],
            merge: module.function("attention_prefill_merge")?,
        })
    }

    /// A planner for `heads` query heads over a cache of `layout` and `element`, each token seeing `window` tokens, itself
    /// included (`None`: all).
    ///
    /// # Errors
    /// [`GpuError`] of the driver.
    ///
    /// # Panics
    /// If the heads are not a multiple of the KV heads, or the head size is none of [`HEAD_DIMS`].
    pub fn planner(
        &self,
        layout: KvLayout,
        heads: usize,
        window: Option<usize>,
        element: GpuKvElement,
    ) -> Result<PrefillPlanner, GpuError> {
        let kernel = self.kernel(layout.head_dim, element);
        let per_sm = kernel.functions[0].blocks_per_sm(kernel.shape.threads, kernel.shape.shared)?;
        let tiling = Tiling {
            rows: kernel.shape.rows,
            slots: per_sm * self.gpu.info().sm_count,
        };
        Ok(PrefillPlanner::new(layout, heads, window, tiling))
    }

    /// Attends as `planner` has planned.
    ///
    /// # Errors
    /// [`GpuError`] of the driver.
    ///
    /// # Panics
    /// If a length in `args` does not fit `planner` and `plan`, or the maps are those of another cache.
    pub fn forward(
        &self,
        planner: &PrefillPlanner,
        plan: PrefillPlan,
        args: &PrefillArgs<'_>,
    ) -> Result<(), GpuError> {
        let PrefillPlanner { layout, heads, .. } = *planner;
        let (dim, kv_heads) = (layout.head_dim, layout.kv_heads);
        if plan.items == 0 {
            return Ok(());
        }
        assert!(
            args.q_stride >= heads * dim && args.q_stride.is_multiple_of(8),
            "rows of q"
        );
        assert!(args.out.len().is_multiple_of(heads * dim), "rows of out");
        let block_rows = args.kv.block_rows(&layout);
        assert!(args.items.len() >= plan.entries(), "entries of the work list");
        assert!(
            args.scratch.len() >= planner.scratch_floats(),
            "floats of scratch"
        );
        args.options.check(heads);
        assert!(
            args.ends
                .is_none_or(|ends| ends.len() == args.out.len() / (heads * dim)),
            "an end for each row of out"
        );
        let kernel = self.kernel(dim, args.kv.element);
        assert_eq!(planner.tiling.rows, kernel.shape.rows, "another kernel's planner");

        let window = planner
            .window
            .map_or(i32::MAX, |window| i32::try_from(window).unwrap_or(i32::MAX));
        let work = plan.items * kv_heads;
        let group = planner.group();
        // See `PrefillArgs::token`.
        let inverse = if group == 1 {
            0
        } else {
            u32::MAX / group as u32 + 1
        };
        let merges = args.items.range(plan.items..plan.entries());
        let mut params = [
            args.q.into(),
            args.kv.k.into(),
            args.kv.v.into(),
            args.runs.into(),
            args.blocks.into(),
            args.items.into(),
            args.out.into(),
            args.scratch.into(),
            (args.q_stride as i32).into(),
            (kv_heads as i32).into(),
            (group as i32).into(),
            inverse.into(),
            layout.block_size.tokens().ilog2().into(),
            int(block_rows),
            window.into(),
            args.options.factor(&args.kv).into(),
            args.options.inner(&args.kv).into(),
            args.options.sinks().into(),
            args.ends.map_or(0, |ends| ends.ptr()).into(),
            args.kv.v_scale.into(),
            (work as i32).into(),
            // What only the merge takes.
            (dim as i32).into(),
            (kernel.shape.rows as i32).into(),
        ];
        let grid = if kernel.shape.persistent {
            [work.min(planner.tiling.slots) as u32, 1, 1]
        } else {
            [kv_heads as u32, plan.items as u32, 1]
        };
        let function = &kernel.functions[args.options.variant()];
        let launch = Launch::new(grid, kernel.shape.threads as u32)
            .shared(kernel.shape.shared)
            .pdl(true);
        let params_of_attention = &params[..ATTENTION_PARAMS];
        if self.copies_by_maps(dim, args.kv.element) {
            let maps = args.maps.expect("maps of the cache");
            let maps = maps.of(&args.kv);
            // SAFETY: the arguments are those of the kernel; the caller keeps the memory and promises what it holds.
            unsafe {
                self.gpu
                    .launch_with_maps(function, launch, &maps, params_of_attention)?;
            }
        } else {
            // SAFETY: as above.
            unsafe { self.gpu.launch(function, launch, params_of_attention)? };
        }
        if plan.merges == 0 {
            return Ok(());
        }
        params[5] = merges.into();
        let rows_of_block = MERGE_THREADS / 32;
        let grid = [
            kv_heads as u32,
            plan.merges as u32,
            (kernel.shape.rows / rows_of_block) as u32,
        ];
        let launch = Launch::new(grid, MERGE_THREADS as u32).pdl(true);
        // SAFETY: as above.
        unsafe { self.gpu.launch(&self.merge, launch, &params) }
    }

    /// Whether its kernel copies keys and values as they are, by tensor maps.
    fn copies_by_maps(&self, head_dim: usize, element: GpuKvElement) -> bool {
        element == GpuKvElement::Bf16 && self.kernel(head_dim, element).shape.persistent
    }

    fn kernel(&self, head_dim: usize, element: GpuKvElement) -> &Kernel {
        let at = HEAD_DIMS.iter().position(|&dim| dim == head_dim);
        let at = at.unwrap_or_else(|| panic!("no attention kernel for head size {head_dim}"));
        &self.attention[at][element.index()]
    }
}

impl Shape {
    /// The fastest kernel for a head size, on a GPU of the generation of the H200 or on any.
    fn fastest(head_dim: usize, element: GpuKvElement, hopper: bool) -> Self {
        match hopper && hopper_head_dims(element).contains(&head_dim) {
            true => Self::hopper(head_dim, element),
            false => Self::portable(head_dim, element),
        }
    }

    /// `PortablePrefill`: queries and three tiles of keys or values, or two and as many of 8 bits; two lists of cache rows.
    fn portable(head_dim: usize, element: GpuKvElement) -> Self {
        let (rows, keys) = match head_dim {
            ..=128 => (128, 64),
            129..=256 => (64, 32),
            _ => (32, 16),
        };
        let (tiles, raw) = match element {
            GpuKvElement::Bf16 => (3, 0),
            GpuKvElement::Fp8 => (2, 2 * keys * head_dim),
        };
        let lists = 2 * (keys / 8) * size_of::<i32>();
        Self {
            threads: 128,
            shared: (rows + tiles * keys) * head_dim * size_of::<bf16>() + raw + lists,
            rows,
            persistent: false,
        }
    }

    /// `HopperPrefill`: tiles of keys and of values; parts of tiles of 8 bits, from which these are filled; queries (the next ones too where there
    /// is room), whose rows later hold the results and are padded for these unless they are a multiple of 128 bytes; less than a kilobyte of
    /// barriers and notes; alignment to as much.
    fn hopper(head_dim: usize, element: GpuKvElement) -> Self {
        let rows = 128;
        let (keys, buffers) = if head_dim <= 128 { (128, 2) } else { (64, 1) };
        // Tiles, and those of 8 bits beside them, all parts together.
        let (threads, tiles, narrow) = match (element, head_dim) {
            (GpuKvElement::Bf16, ..=64) => (384, 8, 0),
            (GpuKvElement::Bf16, 65..=96) => (384, 6, 0),
            (GpuKvElement::Bf16, _) => (384, 5, 0),
            (GpuKvElement::Fp8, ..=64) => (512, 8, 4),
            (GpuKvElement::Fp8, _) => (512, 4, 2),
        };
        let padding = if head_dim.is_multiple_of(64) { 0 } else { 8 };
        let elements = tiles * keys * head_dim + buffers * rows * (head_dim + padding);
        Self {
            threads,
            shared: elements * size_of::<bf16>() + narrow * keys * head_dim + 2 * 1024,
            rows,
            persistent: true,
        }
    }
}

#[cfg(test)]
mod tests;
