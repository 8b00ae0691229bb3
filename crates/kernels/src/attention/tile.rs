//! One tile of keys for all rows of an item: scores, softmax, weighted values. The two products are register-tiled: a few
//! rows share each vector of keys or values, which lie as the cache has them or, for many rows, widened once.

use std::ops::Range;

use super::state::{State, exp_one};
use super::{Item, Job};
use crate::kv::KvElement;
use crate::simd::{Kernel, LANES, Simd, exp};
use crate::soft_cap::soft_cap_lanes;

/// Keys handled between two updates of the running maximum.
pub(super) const TILE: usize = 64;
const TILE_VECTORS: usize = TILE / LANES;
/// Rows that share a load of keys or values.
const HEIGHT: usize = 4;

/// Rows whose accumulators fit the registers, [`HEIGHT`] or one.
const fn height<S: Simd>() -> usize {
    if S::ACCUMULATORS >= HEIGHT * TILE_VECTORS {
        HEIGHT
    } else {
        1
    }
}

/// Scratch of a tile.
pub(super) struct Workspace<'a> {
    /// `[rows][head_dim]`: the item's queries, scaled.
    queries: &'a mut [f32],
    /// `[rows][TILE]`: scores, then weights.
    scores: &'a mut [f32],
    /// Widened copy of the tile, of the keys (`[head_dim][TILE]`), then of the values (`[TILE][width]`).
    copy: &'a mut [f32],
    /// `[rows]`: what makes the sums so far relative to the new maximum.
    factors: &'a mut [f32],
}

impl<'a> Workspace<'a> {
    /// Floats of a workspace, whole vectors.
    pub(super) fn len(rows: usize, width: usize) -> usize {
        (rows * (width + TILE + 1) + TILE * width).next_multiple_of(LANES)
    }

    pub(super) fn new<E: KvElement>(job: &Job<'_, E>, memory: &'a mut [f32]) -> Self {
        let (queries, rest) = memory.split_at_mut(job.rows() * job.width);
        let (scores, rest) = rest.split_at_mut(job.rows() * TILE);
        let (copy, factors) = rest.split_at_mut(TILE * job.width);
        Self {
            queries,
            scores,
            copy,
            factors,
        }
    }

    /// Gathers the query rows of `item`.
    pub(super) fn load_queries<E: KvElement>(&mut self, job: &Job<'_, E>, item: &Item<'_>) {
        let dim = job.kv.layout.head_dim;
        for (row, queries) in self
            .queries
            .chunks_exact_mut(dim)
            .take(item.tokens * job.group)
            .enumerate()
        {
            let q = &job.q[job.row_offset(item, row)..][..dim];
            for (to, q) in queries.iter_mut().zip(q) {
                *to = q * job.options.scale;
            }
        }
    }
}

/// One tile of keys for all rows of an item, whose queries are loaded.
pub(super) struct Tile<'a, 's, 'w, E> {
    pub(super) job: &'a Job<'a, E>,
    pub(super) item: &'a Item<'a>,
    /// Position of the first key.
    pub(super) first: usize,
    /// Keys before the first that the item's first token sees: they may not exist.
    pub(super) unseen: usize,
    /// Keys in the tile that the item's last token sees, with those before.
    pub(super) keys: usize,
    pub(super) state: &'a mut State<'s>,
    pub(super) workspace: &'a mut Workspace<'w>,
}

impl<E: KvElement> Kernel for Tile<'_, '_, '_, E> {
    type Out = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(mut self) {
        let layout = &self.job.kv.layout;
        let rows = self.item.tokens * self.job.group;
        // For a single register tile of rows the copy would cost more than it saves.
        let widen = rows > HEIGHT && size_of::<E>() < size_of::<f32>();
        // SAFETY: the features are there by the caller's promise; the pointers are of tiles of `keys` keys.
        unsafe {
            if layout.block_size.tokens().is_multiple_of(LANES) {
                let keys = KeyTile::in_place(&self);
                if widen {
                    let keys = keys.widened::<S>(layout.head_dim, self.workspace.copy);
                    self.scores::<S, _>(&keys);
                } else {
                    self.scores::<S, _>(&keys);
                }
            } else {
                let keys = self.gather_keys::<S>();
                self.scores::<S, _>(&keys);
            }
            if let Some(cap) = self.job.options.soft_cap {
                for lanes in self.workspace.scores[..rows * TILE].chunks_exact_mut(LANES) {
                    S::store(
                        lanes.as_mut_ptr(),
                        soft_cap_lanes::<S>(S::load(lanes.as_ptr()), cap),
                    );
                }
            }
            self.softmax::<S>();
            if widen || self.job.width != layout.head_dim {
                let values = self.widen_values::<S>();
                self.add_values::<S, _>(&values);
            } else {
                let mut values = [std::ptr::null(); TILE];
                for first in self.blocks() {
                    for (value, at) in self.values(first).zip(&mut values[first..]) {
                        *at = value.as_ptr();
                    }
                }
                self.add_values::<S, _>(&values);
            }
        }
    }
}

impl<'a, E: KvElement> Tile<'a, '_, '_, E> {
    /// Copies and widens keys of blocks that are smaller than a vector.
    #[inline(always)]
    unsafe fn gather_keys<S: Simd>(&mut self) -> KeyTile<f32> {
        let block_size = self.job.kv.layout.block_size.tokens();
        assert!(LANES.is_multiple_of(block_size));
        for part in 0..TILE / block_size {
            let key = part * block_size;
            let block = self
                .job
                .block(self.job.kv.k, self.item, self.readable(key, block_size));
            for (i, elements) in block.chunks(LANES).enumerate() {
                let mut wide = [0f32; LANES];
                if elements.len() == LANES {
                    // SAFETY: the caller has the features of `S`; both have sixteen elements.
                    unsafe { S::store(wide.as_mut_ptr(), E::load::<S>(elements.as_ptr())) };
                } else {
                    wide.iter_mut()
                        .zip(elements)
                        .for_each(|(wide, e)| *wide = e.to_f32());
                }
                let pieces = wide[..elements.len()].chunks_exact(block_size);
                for (piece, d) in pieces.zip(i * LANES / block_size..) {
                    self.workspace.copy[d * TILE + key..][..block_size].copy_from_slice(piece);
                }
            }
        }
        KeyTile::of(self.workspace.copy)
    }

    /// The position of `key`, the first of a group of `size` keys; where nobody sees any of these, of a group that exists:
    /// their scores are masked.
    #[inline(always)]
    fn readable(&self, key: usize, size: usize) -> usize {
        let seen = key + size > self.unseen && key < self.keys;
        self.first + if seen { key } else { self.unseen / size * size }
    }

    /// `q · k` of all rows.
    #[inline(always)]
    unsafe fn scores<S: Simd, T: KvElement>(&mut self, keys: &KeyTile<T>) {
        let dim = self.job.kv.layout.head_dim;
        let rows = self.item.tokens * self.job.group;
        let height = height::<S>();
        let queries = self.workspace.queries.chunks(height * dim);
        let scores = self.workspace.scores[..rows * TILE].chunks_mut(height * TILE);
        for (scores, queries) in scores.zip(queries) {
            // SAFETY: the caller's promise.
            unsafe {
                match scores.len() / TILE {
                    1 => keys.scores::<S, 1>(dim, queries, scores),
                    2 => keys.scores::<S, 2>(dim, queries, scores),
                    3 => keys.scores::<S, 3>(dim, queries, scores),
                    _ => keys.scores::<S, HEIGHT>(dim, queries, scores),
                }
            }
        }
    }

    /// Turns scores into weights.
    #[inline(always)]
    unsafe fn softmax<S: Simd>(&mut self) {
        let Workspace { scores, factors, .. } = &mut *self.workspace;
        let mut rows = scores.chunks_exact_mut(TILE).zip(factors.iter_mut()).enumerate();
        for token in 0..self.item.tokens {
            let end = self.item.end_of(token, &self.job.options);
            let seen = end.saturating_sub(self.first).min(self.keys);
            let unseen = self.job.options.first_seen(self.item.start() + token);
            let unseen = unseen.saturating_sub(self.first).min(TILE);
            for (row, (scores, factor)) in rows.by_ref().take(self.job.group) {
                // SAFETY: the caller's promise.
                *factor = unsafe { softmax_row::<S>(scores, unseen..seen, self.state, row) };
            }
        }
    }

    /// Keys of the tile that are the first of a block of which something is seen.
    #[inline(always)]
    fn blocks(&self) -> impl Iterator<Item = usize> + use<E> {
        let size = self.job.kv.layout.block_size.tokens();
        (self.unseen / size * size..self.keys).step_by(size)
    }

    /// Values of the keys from `first` to the end of its block.
    #[inline(always)]
    fn values(&self, first: usize) -> std::slice::ChunksExact<'a, E> {
        let dim = self.job.kv.layout.head_dim;
        let block = self.job.block(self.job.kv.v, self.item, self.first + first);
        let keys = (self.keys - first).min(block.len() / dim);
        block[..keys * dim].chunks_exact(dim)
    }

    /// Copies and widens the values, to whole vectors.
    #[inline(always)]
    unsafe fn widen_values<S: Simd>(&mut self) -> [*const f32; TILE] {
        let width = self.job.width;
        let mut rows = [std::ptr::null(); TILE];
        for first in self.blocks() {
            let values = self.values(first);
            let copies = self.workspace.copy[first * width..].chunks_exact_mut(width);
            for ((value, copy), row) in values.zip(copies).zip(&mut rows[first..]) {
                // SAFETY: the caller's promise.
                unsafe { widen::<S, E>(value, copy) };
                *row = copy.as_ptr();
            }
        }
        rows
    }

    /// Adds the weighted values to all rows.
    #[inline(always)]
    unsafe fn add_values<S: Simd, T: KvElement>(&mut self, values: &[*const T; TILE]) {
        let width = self.job.width;
        let rows = self.item.tokens * self.job.group;
        let values = &values[self.unseen..self.keys];
        let height = height::<S>();
        for row in (0..rows).step_by(height) {
            let here = height.min(rows - row);
            let rows = Rows {
                acc: &mut self.state.acc[row * width..(row + here) * width],
                weights: &self.workspace.scores[row * TILE + self.unseen..(row + here) * TILE],
                factors: &self.workspace.factors[row..row + here],
            };
            // SAFETY: the caller's promise; values are `width` wide.
            unsafe {
                match here {
                    1 => rows.add::<S, T, 1>(values),
                    2 => rows.add::<S, T, 2>(values),
                    3 => rows.add::<S, T, 3>(values),
                    _ => rows.add::<S, T, HEIGHT>(values),
                }
            }
        }
    }
}

/// Widens a value and pads it to whole vectors.
#[inline(always)]
unsafe fn widen<S: Simd, E: KvElement>(value: &[E], copy: &mut [f32]) {
    let vectors = value.len() / LANES;
    for i in 0..vectors {
        let (from, to) = (&value[i * LANES..][..LANES], &mut copy[i * LANES..][..LANES]);
        // SAFETY: the caller has the features of `S`; both have sixteen elements.
        unsafe { S::store(to.as_mut_ptr(), E::load::<S>(from.as_ptr())) };
    }
    let (last, padding) = copy[vectors * LANES..].split_at_mut(value.len() % LANES);
    for (to, from) in last.iter_mut().zip(&value[vectors * LANES..]) {
        *to = from.to_f32();
    }
    padding.fill(0.0);
}

/// Where the keys of a tile lie: for each vector of sixteen, element `d` of all of them at `vectors[i] + d × stride`.
struct KeyTile<T> {
    vectors: [*const T; TILE_VECTORS],
    stride: usize,
}

impl KeyTile<f32> {
    /// Keys laid out `[head_dim][TILE]`.
    fn of(copy: &[f32]) -> Self {
        Self {
            vectors: std::array::from_fn(|i| copy[i * LANES..].as_ptr()),
            stride: TILE,
        }
    }
}

impl<T: KvElement> KeyTile<T> {
    /// Keys in the cache, in blocks of whole vectors.
    #[inline(always)]
    fn in_place(tile: &Tile<'_, '_, '_, T>) -> Self {
        let stride = tile.job.kv.layout.block_size.tokens();
        let vector = |i: usize| {
            let position = tile.readable(i * LANES, LANES);
            let block = tile.job.block(tile.job.kv.k, tile.item, position);
            block[position % stride..].as_ptr()
        };
        Self {
            vectors: std::array::from_fn(vector),
            stride,
        }
    }

    /// Copies `dim` elements of every key.
    #[inline(always)]
    unsafe fn widened<S: Simd>(&self, dim: usize, copy: &mut [f32]) -> KeyTile<f32> {
        for (d, copy) in copy.chunks_exact_mut(TILE).take(dim).enumerate() {
            for (vector, copy) in self.vectors.iter().zip(copy.chunks_exact_mut(LANES)) {
                // SAFETY: the caller has the features of `S`; each vector has sixteen keys for each of `dim` elements.
                unsafe { S::store(copy.as_mut_ptr(), T::load::<S>(vector.add(d * self.stride))) };
            }
        }
        KeyTile::of(copy)
    }

    /// `q · k` of `R` rows, one chain of fused multiply-adds over the head for each.
    #[inline(always)]
    unsafe fn scores<S: Simd, const R: usize>(&self, dim: usize, queries: &[f32], scores: &mut [f32]) {
        assert!(queries.len() >= R * dim && scores.len() >= R * TILE);
        // SAFETY: each vector has sixteen keys for each of `dim` elements; the rest was checked.
        unsafe {
            let mut acc = [[S::splat(0.0); TILE_VECTORS]; R];
            for d in 0..dim {
                let mut k = [S::splat(0.0); TILE_VECTORS];
                for i in 0..TILE_VECTORS {
                    k[i] = T::load::<S>(self.vectors[i].add(d * self.stride));
                }
                for r in 0..R {
                    let q = S::splat(*queries.get_unchecked(r * dim + d));
                    for i in 0..TILE_VECTORS {
                        acc[r][i] = S::fma(q, k[i], acc[r][i]);
                    }
                }
            }
            for r in 0..R {
                for i in 0..TILE_VECTORS {
                    S::store(scores.as_mut_ptr().add(r * TILE + i * LANES), acc[r][i]);
                }
            }
        }
    }
}

/// Turns a row of scores into weights relative to the row's new maximum; keys outside `seen` get 0. Returns the factor that
/// makes the sums so far relative to it too.
#[inline(always)]
unsafe fn softmax_row<S: Simd>(
    scores: &mut [f32],
    seen: Range<usize>,
    state: &mut State<'_>,
    row: usize,
) -> f32 {
    assert_eq!(scores.len(), TILE);
    if seen.is_empty() {
        scores.fill(0.0);
        return 1.0;
    }
    let all = seen == (0..TILE);
    // SAFETY: the caller has the features of `S`; `scores` is TILE_VECTORS vectors.
    unsafe {
        let masked = S::splat(f32::NEG_INFINITY);
        let mut v = [masked; TILE_VECTORS];
        let mut largest = masked;
        for i in 0..TILE_VECTORS {
            v[i] = S::load(scores[i * LANES..].as_ptr());
            if !all {
                let s = S::keep_below(v[i], seen.end.saturating_sub(i * LANES), masked);
                v[i] = S::keep_below(masked, seen.start.saturating_sub(i * LANES), s);
            }
            largest = S::max(v[i], largest);
        }
        let max = state.max[row].max(S::largest(largest));
        if max == f32::NEG_INFINITY {
            // All scores are -inf or NaN: nothing to weigh, and a sum of 0 makes the result NaN.
            scores.fill(0.0);
            return 1.0;
        }
        let mut sum = S::splat(0.0);
        for i in 0..TILE_VECTORS {
            let p = exp::<S>(S::sub(v[i], S::splat(max)));
            S::store(scores[i * LANES..].as_mut_ptr(), p);
            sum = S::add(sum, p);
        }
        let factor = if state.max[row] == max {
            1.0
        } else {
            exp_one::<S>(state.max[row] - max)
        };
        state.sum[row] = state.sum[row] * factor + S::sum(sum);
        state.max[row] = max;
        factor
    }
}

/// Some rows of the weighted sums, with their factors, and their weights, `TILE` apart.
struct Rows<'a> {
    acc: &'a mut [f32],
    weights: &'a [f32],
    factors: &'a [f32],
}

impl Rows<'_> {
    /// `acc = acc × factor + Σ weight × value` for `R` rows, the keys in order.
    #[inline(always)]
    unsafe fn add<S: Simd, T: KvElement, const R: usize>(self, values: &[*const T]) {
        let Self {
            acc,
            weights,
            factors,
        } = self;
        let width = acc.len() / R;
        let mut column = 0;
        // SAFETY: the caller's promise.
        unsafe {
            while column + 4 * LANES <= width {
                add_columns::<S, T, R, 4>(acc, column, values, weights, factors);
                column += 4 * LANES;
            }
            while column < width {
                add_columns::<S, T, R, 1>(acc, column, values, weights, factors);
                column += LANES;
            }
        }
    }
}

#[inline(always)]
unsafe fn add_columns<S: Simd, T: KvElement, const R: usize, const C: usize>(
    sums: &mut [f32],
    column: usize,
    values: &[*const T],
    weights: &[f32],
    factors: &[f32],
) {
    let width = sums.len() / R;
    assert!(column + C * LANES <= width && weights.len() >= (R - 1) * TILE + values.len());
    // SAFETY: the caller has the features of `S` and `width` elements behind each of `values`; the rest was checked.
    unsafe {
        let at = |r: usize, c: usize| r * width + column + c * LANES;
        let mut acc = [[S::splat(0.0); C]; R];
        for r in 0..R {
            let factor = S::splat(factors[r]);
            for c in 0..C {
                acc[r][c] = S::mul(S::load(sums.as_ptr().add(at(r, c))), factor);
            }
        }
        for (key, value) in values.iter().enumerate() {
            let mut v = [S::splat(0.0); C];
            for c in 0..C {
                v[c] = T::load::<S>(value.add(column + c * LANES));
            }
            for r in 0..R {
                let weight = S::splat(*weights.as_ptr().add(r * TILE + key));
                for c in 0..C {
                    acc[r][c] = S::fma(weight, v[c], acc[r][c]);
                }
            }
        }
        for r in 0..R {
            for c in 0..C {
                S::store(sums.as_mut_ptr().add(at(r, c)), acc[r][c]);
            }
        }
    }
}
