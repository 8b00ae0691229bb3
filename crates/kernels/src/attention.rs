//! Attention over the paged cache: prefill, chunk and decode are one function.
//!
//! Online softmax over tiles of keys ([FlashAttention](https://arxiv.org/abs/2205.14135)), the context cut into splits
//! that can be worked on in parallel and are merged in order
//! ([Flash-Decoding](https://crfm.stanford.edu/2023/10/12/flashdecoding.html)). Tiles and splits lie at fixed positions of
//! the context, so a row's result does not depend on the run or batch it is computed in.

mod state;
mod tile;

use plimsoll_core::Oom;
use plimsoll_device::{Arena, DryArena};

use crate::kv::{KvElement, PagedKv, RunMeta};
use crate::parallel::{Disjoint, run, threads};
use crate::simd::{LANES, Level, dispatch};
use state::State;
use tile::{TILE, Tile, Workspace};

/// Keys whose partial result is one unit of parallel work and one operand of the merge.
const SPLIT: usize = 512;
/// Query rows (tokens × heads of one KV head) that share a read of the keys: each tile of keys comes from memory and is
/// widened once for all of them.
const MAX_ROWS: usize = 64;
/// Partial results kept at once when contexts are worked on in parallel.
const MAX_PARTIALS: usize = 32;

/// What attention needs to know beside its tensors.
#[derive(Clone, Copy, Debug)]
pub struct AttentionOptions<'a> {
    /// Multiplies the scores, usually `1 / sqrt(head_dim)`.
    pub scale: f32,
    /// Tokens seen, the current one included; `None` is all.
    pub window: Option<usize>,
    /// Scores become `cap × tanh(score / cap)` before the softmax ([Gemma 2](https://arxiv.org/abs/2408.00118)).
    pub soft_cap: Option<f32>,
    /// `[heads]`: a logit of each query head that takes part in the softmax and has no value
    /// ([gpt-oss](https://arxiv.org/abs/2508.10925)).
    pub sinks: Option<&'a [f32]>,
    /// What of its run a token sees beside what is before it.
    pub sees: Sees<'a>,
}

/// How far a token sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sees<'a> {
    /// Up to itself.
    Past,
    /// All of its run, what follows it included (encoders of images). There is no window then.
    Run,
    /// Of each row of `q` the position behind the last that it sees: behind itself, at most at the end of its run.
    UpTo(&'a [usize]),
}

impl AttentionOptions<'_> {
    /// First position that the token at `position` sees.
    fn first_seen(&self, position: usize) -> usize {
        self.window
            .map_or(0, |window| (position + 1).saturating_sub(window))
    }
}

/// Grouped-query attention, causal unless `options` say otherwise, of `runs` over their cached context, which includes their own keys and values.
///
/// `q` and `out` are `[tokens, heads × head_dim]`; `heads` is a multiple of the cache's KV heads. Every row must belong to
/// one of `runs`. Scratch does not depend on the lengths of the contexts.
///
/// # Errors
/// [`Oom`] if the arena has no room for the scratch.
pub fn attention<E: KvElement>(
    q: &[f32],
    kv: PagedKv<'_, E>,
    runs: &[RunMeta<'_>],
    options: AttentionOptions<'_>,
    out: &mut [f32],
    arena: &Arena,
) -> Result<(), Oom> {
    attention_at(Level::detect(), q, kv, runs, options, out, arena)
}

fn attention_at<E: KvElement>(
    level: Level,
    q: &[f32],
    kv: PagedKv<'_, E>,
    runs: &[RunMeta<'_>],
    options: AttentionOptions<'_>,
    out: &mut [f32],
    arena: &Arena,
) -> Result<(), Oom> {
    let tokens: usize = runs.iter().map(|run| run.len).sum();
    if tokens == 0 {
        return Ok(());
    }
    let layout = kv.layout;
    let group = q.len() / (tokens * layout.kv_heads * layout.head_dim);
    assert_eq!(
        q.len(),
        tokens * group * layout.kv_heads * layout.head_dim,
        "q is not [tokens, heads, head_dim]"
    );
    assert_eq!(out.len(), q.len());
    assert!(
        options
            .sinks
            .is_none_or(|sinks| sinks.len() == group * layout.kv_heads),
        "sinks are not [heads]"
    );
    assert!(
        options.sees != Sees::Run || options.window.is_none(),
        "a window of what follows"
    );
    if let Sees::UpTo(ends) = options.sees {
        assert_eq!(ends.len(), tokens, "how far each row sees");
        for run in runs {
            let mut rows = ends[run.first_row..run.first_row + run.len].iter().enumerate();
            let is_seen = |(row, &end): (usize, &usize)| run.start + row < end && end <= run.end();
            assert!(rows.all(is_seen), "a row sees itself, and nothing behind its run");
        }
    }
    for run in runs {
        let lowest = options.first_seen(run.start);
        run.check(&layout, kv.stride, kv.k.len().min(kv.v.len()), lowest);
    }

    let job = Job::new(q, kv, runs, options, group, level);
    let items = job.items();
    let frame = arena.frame();
    let [workers, splits] = scratch_floats(job.rows(), job.width);
    let workers: &mut [f32] = frame.alloc(workers)?;
    let splits: &mut [f32] = frame.alloc(splits)?;
    let workers = Disjoint::new(workers);
    let out = Disjoint::new(out);
    if items < 2 * threads() {
        job.in_splits(&workers, &out, splits);
        return Ok(());
    }
    run(items, &|worker, item| {
        let item = job.item(item);
        let (states, mut workspace) = job.scratch(&workers, worker);
        let (total, part) = states.split_at_mut(job.state_len());
        let mut total = State::new(&job, total);
        let mut part = State::new(&job, part);
        total.reset();
        workspace.load_queries(&job, &item);
        for split in job.splits(&item) {
            part.reset();
            job.attend(&item, split, &mut part, &mut workspace);
            total.merge(&part, level);
        }
        job.write(&item, &total, &out);
    });
    Ok(())
}

/// Counts what [`attention`] takes for any step that has tokens, with `group` query heads to a KV head, in a frame of its
/// own.
pub fn attention_scratch(head_dim: usize, group: usize, arena: &mut DryArena) -> Option<()> {
    let [workers, splits] = scratch_floats(tile_tokens(group) * group, padded_width(head_dim));
    arena.frame(|frame| {
        frame.alloc::<f32>(workers)?;
        frame.alloc::<f32>(splits)
    })
}

/// Floats for the workers, and for the splits of a step of few query tiles. Taken whatever the shape: if a small step needed
/// more than a large one, the profile's worst steps would not be the worst.
fn scratch_floats(rows: usize, width: usize) -> [usize; 2] {
    [
        threads() * worker_floats(rows, width),
        (MAX_PARTIALS + 2 * threads()) * State::len(rows, width),
    ]
}

/// Two states and a [`Workspace`].
fn worker_floats(rows: usize, width: usize) -> usize {
    2 * State::len(rows, width) + Workspace::len(rows, width)
}

/// Tokens of one query tile: prefer whole groups of four rows, the height of the register tile.
fn tile_tokens(group: usize) -> usize {
    let most = (MAX_ROWS / group).max(1);
    (1..=most)
        .rev()
        .find(|tokens| (tokens * group).is_multiple_of(4))
        .unwrap_or(most)
}

/// Head size rounded up to whole vectors.
fn padded_width(head_dim: usize) -> usize {
    head_dim.next_multiple_of(LANES)
}

/// The call's arguments and what follows from them.
struct Job<'a, E> {
    q: &'a [f32],
    kv: PagedKv<'a, E>,
    runs: &'a [RunMeta<'a>],
    options: AttentionOptions<'a>,
    /// Query heads of one KV head.
    group: usize,
    /// Tokens of one query tile.
    tile_tokens: usize,
    /// [`padded_width`].
    width: usize,
    level: Level,
}

/// Query tile: some tokens of one run, all query heads of one KV head.
#[derive(Clone, Copy)]
struct Item<'a> {
    run: &'a RunMeta<'a>,
    kv_head: usize,
    /// First token within the run.
    first: usize,
    tokens: usize,
}

impl Item<'_> {
    /// Position of the first token.
    fn start(&self) -> usize {
        self.run.start + self.first
    }

    /// Keys that the token sees that sees the most.
    fn end(&self, options: &AttentionOptions<'_>) -> usize {
        let ends = (0..self.tokens).map(|token| self.end_of(token, options));
        match options.sees {
            Sees::Past => self.start() + self.tokens,
            Sees::Run => self.run.end(),
            Sees::UpTo(_) => ends.max().unwrap_or_default(),
        }
    }

    /// Keys that one of the tokens sees.
    fn end_of(&self, token: usize, options: &AttentionOptions<'_>) -> usize {
        match options.sees {
            Sees::Past => self.start() + token + 1,
            Sees::Run => self.run.end(),
            Sees::UpTo(ends) => ends[self.run.first_row + self.first + token],
        }
    }
}

impl<'a, E: KvElement> Job<'a, E> {
    fn new(
        q: &'a [f32],
        kv: PagedKv<'a, E>,
        runs: &'a [RunMeta<'a>],
        options: AttentionOptions<'a>,
        group: usize,
        level: Level,
    ) -> Self {
        Self {
            q,
            kv,
            runs,
            options,
            group,
            tile_tokens: tile_tokens(group),
            width: padded_width(kv.layout.head_dim),
            level,
        }
    }

    fn rows(&self) -> usize {
        self.tile_tokens * self.group
    }

    fn tiles_of(&self, run: &RunMeta<'_>) -> usize {
        run.len.div_ceil(self.tile_tokens)
    }

    fn items(&self) -> usize {
        self.runs.iter().map(|run| self.tiles_of(run)).sum::<usize>() * self.kv.layout.kv_heads
    }

    /// Item `index`: runs, then query tiles from the last (longest) to the first, then KV heads.
    fn item(&self, index: usize) -> Item<'a> {
        let kv_heads = self.kv.layout.kv_heads;
        let (mut tile, kv_head) = (index / kv_heads, index % kv_heads);
        let run = self.runs.iter().find(|run| {
            let here = self.tiles_of(run);
            let found = tile < here;
            tile -= if found { 0 } else { here };
            found
        });
        let run = run.expect("the index is below the number of items");
        let first = (self.tiles_of(run) - 1 - tile) * self.tile_tokens;
        Item {
            run,
            kv_head,
            first,
            tokens: self.tile_tokens.min(run.len - first),
        }
    }

    fn splits(&self, item: &Item<'_>) -> std::ops::Range<usize> {
        self.options.first_seen(item.start()) / SPLIT..item.end(&self.options).div_ceil(SPLIT)
    }

    /// Floats of a [`State`].
    fn state_len(&self) -> usize {
        State::len(self.rows(), self.width)
    }

    /// Scratch of one worker: memory of two states, and the workspace.
    fn scratch<'w>(&self, workers: &Disjoint<'w, f32>, worker: usize) -> (&'w mut [f32], Workspace<'w>) {
        let size = worker_floats(self.rows(), self.width);
        // SAFETY: one task at a time runs on a worker.
        let floats = unsafe { workers.part(worker * size, size) };
        let (states, rest) = floats.split_at_mut(2 * self.state_len());
        (states, Workspace::new(self, rest))
    }

    /// Few query tiles: work on their splits in parallel, in waves of bounded memory, merging in order between waves.
    fn in_splits(&self, workers: &Disjoint<'_, f32>, out: &Disjoint<'_, f32>, scratch: &mut [f32]) {
        let size = self.state_len();
        let (partials, totals) = scratch.split_at_mut(MAX_PARTIALS * size);
        let totals = &mut totals[..self.items() * size];
        let units =
            || (0..self.items()).flat_map(|i| self.splits(&self.item(i)).map(move |split| (i, split)));
        for total in totals.chunks_exact_mut(size) {
            State::new(self, total).reset();
        }
        let count = units().count();
        for wave in (0..count).step_by(MAX_PARTIALS) {
            let here = MAX_PARTIALS.min(count - wave);
            let parts = Disjoint::new(&mut partials[..here * size]);
            run(here, &|worker, u| {
                let (item, split) = units().nth(wave + u).expect("below the count");
                // SAFETY: units are disjoint.
                let mut part = State::new(self, unsafe { parts.part(u * size, size) });
                part.reset();
                let (_, mut workspace) = self.scratch(workers, worker);
                let item = self.item(item);
                workspace.load_queries(self, &item);
                self.attend(&item, split, &mut part, &mut workspace);
            });
            for ((item, _), part) in units().skip(wave).zip(partials.chunks_exact_mut(size).take(here)) {
                let mut total = State::new(self, &mut totals[item * size..][..size]);
                total.merge(&State::new(self, part), self.level);
            }
        }
        for (i, total) in totals.chunks_exact_mut(size).enumerate() {
            self.write(&self.item(i), &State::new(self, total), out);
        }
    }

    /// Adds the keys of `split` to `state`.
    fn attend(&self, item: &Item<'_>, split: usize, state: &mut State<'_>, workspace: &mut Workspace<'_>) {
        let seen = item.end(&self.options);
        let end = seen.min((split + 1) * SPLIT);
        let lowest = self.options.first_seen(item.start());
        let first = (split * SPLIT).max(lowest) / TILE * TILE;
        for tile in (first..end).step_by(TILE) {
            let keys = TILE.min(seen - tile);
            dispatch(
                self.level,
                Tile {
                    job: self,
                    item,
                    first: tile,
                    unseen: lowest.saturating_sub(tile),
                    keys,
                    state,
                    workspace,
                },
            );
        }
    }

    fn write(&self, item: &Item<'_>, state: &State<'_>, out: &Disjoint<'_, f32>) {
        let dim = self.kv.layout.head_dim;
        for row in 0..item.tokens * self.group {
            // SAFETY: rows of different items are disjoint.
            let out = unsafe { out.part(self.row_offset(item, row), dim) };
            let sink = self.options.sinks.map(|sinks| sinks[self.head(item, row)]);
            let inverse = 1.0 / state.total(row, sink, self.level);
            for (y, a) in out.iter_mut().zip(&state.acc[row * self.width..]) {
                *y = a * inverse;
            }
        }
    }

    /// The block with the key or value of a position, in `cache` (K or V).
    #[inline(always)]
    fn block(&self, cache: &'a [E], item: &Item<'_>, position: usize) -> &'a [E] {
        let layout = &self.kv.layout;
        let block_size = layout.block_size.tokens();
        let block = item.run.block_of(position, block_size);
        &cache[layout.head_offset(self.kv.stride, block, item.kv_head)..][..layout.head_dim * block_size]
    }

    /// Where a query row of an item starts in `q` and `out`.
    fn row_offset(&self, item: &Item<'_>, row: usize) -> usize {
        let token = item.run.first_row + item.first + row / self.group;
        (token * self.kv.layout.kv_heads * self.group + self.head(item, row)) * self.kv.layout.head_dim
    }

    /// Query head of a row of an item.
    fn head(&self, item: &Item<'_>, row: usize) -> usize {
        item.kv_head * self.group + row % self.group
    }
}

#[cfg(test)]
mod tests;
