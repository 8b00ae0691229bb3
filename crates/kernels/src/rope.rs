use crate::kv::{KvElement, PagedKvMut, RunMeta};
use crate::norm::{InverseRms, RmsNorm};
use crate::parallel::{Disjoint, run_ranges};
use crate::simd::{Level, dispatch};

/// Cosines and sines of the rotary angles of a step's rows, times `factor` ([YaRN](https://arxiv.org/abs/2309.00071)'s
/// attention factor; 1 for none): `out` is `[tokens, 2 × pairs]`, each row the cosines and then the sines; `frequencies` is
/// `[pairs]`, in radians per position. Once per step, for all layers with these frequencies.
pub fn rope_angles(frequencies: &[f32], factor: f32, runs: &[RunMeta<'_>], out: &mut [f32]) {
    let pairs = frequencies.len();
    for run in runs {
        for i in 0..run.len {
            let row = &mut out[(run.first_row + i) * 2 * pairs..][..2 * pairs];
            let (cos, sin) = row.split_at_mut(pairs);
            for (pair, &frequency) in frequencies.iter().enumerate() {
                // In f64: at position 100,000 an f32 angle is off by 0.004.
                let angle = (run.start + i) as f64 * f64::from(frequency);
                let scaled = |x: f64| (x * f64::from(factor)) as f32;
                (sin[pair], cos[pair]) = (scaled(angle.sin()), scaled(angle.cos()));
            }
        }
    }
}

/// The same where positions have several dimensions (mRoPE, [Qwen2-VL](https://arxiv.org/abs/2409.12191), and 2-D rotary
/// embeddings of encoders): each pair turns with the position in its own, `axes[pair]`. `out` is
/// `[positions.len(), 2, frequencies.len()]`. Where a position is the same in all dimensions, it has the bits of
/// [`rope_angles`].
pub fn rope_angles_of_axes<const N: usize>(
    frequencies: &[f32],
    factor: f32,
    axes: &[usize],
    positions: &[[u32; N]],
    out: &mut [f32],
) {
    let pairs = frequencies.len();
    assert_eq!((axes.len(), out.len()), (pairs, positions.len() * 2 * pairs));
    // Layers without rotary embeddings have no pairs.
    for (row, position) in out.chunks_exact_mut((2 * pairs).max(1)).zip(positions) {
        let (cos, sin) = row.split_at_mut(pairs);
        for (pair, (&frequency, &axis)) in frequencies.iter().zip(axes).enumerate() {
            let angle = f64::from(position[axis]) * f64::from(frequency);
            let scaled = |x: f64| (x * f64::from(factor)) as f32;
            (sin[pair], cos[pair]) = (scaled(angle.sin()), scaled(angle.cos()));
        }
    }
}

/// What q is multiplied by at a position, so that attention stays sharp in long contexts (Llama 4, Ministral 3):
/// `1 + beta × ln(1 + floor(position / original))`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct QueryScale {
    /// How fast it grows.
    pub beta: f32,
    /// Positions that the model was pretrained with, more than 0: below, the factor is 1.
    pub original: usize,
}

impl QueryScale {
    fn at(self, position: usize) -> f32 {
        let passed = (position / self.original) as f64;
        (1.0 + f64::from(self.beta) * passed.ln_1p()) as f32
    }
}

/// Norms of the heads of q and k before the rotation (Qwen3).
#[derive(Clone, Copy, Debug)]
pub struct QkNorm<'a> {
    /// Of every query head, `[head_dim]`.
    pub q: &'a [f32],
    /// Of every key head, `[head_dim]`.
    pub k: &'a [f32],
    /// Added to the mean square.
    pub eps: f32,
}

/// What positions do to the heads of a step's rows.
#[derive(Clone, Copy, Debug, Default)]
pub struct Rotation<'a> {
    /// [`rope_angles`]'; none without positions.
    pub angles: &'a [f32],
    /// What q is multiplied by.
    pub query_scale: Option<QueryScale>,
}

/// What is cached as values.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum CachedValues {
    /// What is projected.
    Projected,
    /// Each head of it, divided by the root of its mean square and this ([RMSNorm](https://arxiv.org/abs/1910.07467) without a
    /// weight, Gemma 4).
    Normalised(f32),
    /// The same of the keys before their norm and rotation: no values are projected (Gemma 4's `attention_k_eq_v`).
    NormalisedKeys(f32),
}

/// The part of [`qk_norm_rope_kv_write`] that makes queries, for layers that attend to what another one has cached: `qkv` is
/// `[tokens, width]`, a row begins with the heads of q, of `dim` elements each. `norm` is a weight, `[dim]`, and what is added to the
/// mean square.
pub fn rotate_queries(
    qkv: &[f32],
    dim: usize,
    norm: Option<(&[f32], f32)>,
    rotation: Rotation<'_>,
    runs: &[RunMeta<'_>],
    q: &mut [f32],
) {
    let Rotation { angles, query_scale } = rotation;
    let tokens: usize = runs.iter().map(|run| run.len).sum();
    if tokens == 0 {
        return;
    }
    let (width, own, pairs) = (qkv.len() / tokens, q.len() / tokens, angles.len() / (2 * tokens));
    assert!(
        q.len() == tokens * own && own.is_multiple_of(dim),
        "q is not [tokens, heads, head_dim]"
    );
    assert!(
        qkv.len() == tokens * width && width >= own,
        "qkv is not [tokens, at least q]"
    );
    assert!(
        angles.len() == tokens * 2 * pairs && 2 * pairs <= dim,
        "angles are not [tokens, 2, pairs]"
    );
    let level = Level::detect();
    let q = Disjoint::new(q);
    let write = |run: &RunMeta<'_>, i: usize| {
        let row = run.first_row + i;
        let angles = angles[row * 2 * pairs..(row + 1) * 2 * pairs].split_at(pairs);
        // SAFETY: rows are disjoint.
        let out = unsafe { q.part(row * own, own) };
        let scale = query_scale.map(|scale| scale.at(run.start + i));
        queries(level, &qkv[row * width..][..own], dim, norm, angles, scale, out);
    };
    each_row(runs, width, &write);
}

/// The heads of q of one row.
fn queries(
    level: Level,
    heads: &[f32],
    dim: usize,
    norm: Option<(&[f32], f32)>,
    (cos, sin): (&[f32], &[f32]),
    scale: Option<f32>,
    out: &mut [f32],
) {
    for (head, out) in heads.chunks_exact(dim).zip(out.chunks_exact_mut(dim)) {
        norm_and_rotate(level, head, norm, cos, sin, out);
    }
    if let Some(scale) = scale {
        out.iter_mut().for_each(|q| *q *= scale);
    }
}

/// From the fused projection to attention's inputs: normalises the heads of q and k if asked to, rotates them
/// ([RoFormer](https://arxiv.org/abs/2104.09864), the "NeoX" pairing of element `i` with `i + pairs`), multiplies q by
/// its scale and writes k and what `values` says into the cache and q into `q`.
///
/// `qkv` is `[tokens, width]`: a row begins with the heads of q and ends with those of k and of v, and what is between them
/// (attention's gates, if it has any) is left alone; where values are keys, it ends with those. `rotation` has [`rope_angles`]' (elements beyond `2 × pairs` of a
/// head are not rotated; a layer without rotary embedding has no pairs), `q` is `[tokens, heads × head_dim]`. Every row must
/// belong to one of `runs`.
pub fn qk_norm_rope_kv_write<E: KvElement>(
    qkv: &[f32],
    norm: Option<QkNorm<'_>>,
    rotation: Rotation<'_>,
    values: CachedValues,
    runs: &[RunMeta<'_>],
    kv: &mut PagedKvMut<'_, E>,
    q: &mut [f32],
) {
    let Rotation { angles, query_scale } = rotation;
    let tokens: usize = runs.iter().map(|run| run.len).sum();
    if tokens == 0 {
        return;
    }
    let (layout, stride) = (kv.layout, kv.stride);
    let dim = layout.head_dim;
    let heads = q.len() / (tokens * dim);
    let width = qkv.len() / tokens;
    assert_eq!(
        q.len(),
        tokens * heads * dim,
        "q is not [tokens, heads, head_dim]"
    );
    let key_size = layout.kv_heads * dim;
    let projected = match values {
        CachedValues::NormalisedKeys(_) => 1,
        CachedValues::Projected | CachedValues::Normalised(_) => 2,
    };
    assert!(
        qkv.len() == tokens * width && width >= heads * dim + projected * key_size,
        "qkv is not [tokens, at least heads and those of k and v, head_dim]"
    );
    let pairs = angles.len() / (2 * tokens);
    assert!(
        angles.len() == tokens * 2 * pairs && 2 * pairs <= dim,
        "angles are not [tokens, 2, pairs]"
    );
    runs.iter()
        .for_each(|run| run.check(&layout, kv.stride, kv.k.len().min(kv.v.len()), run.start));

    let level = Level::detect();
    let (q, k_cache, v_cache) = (Disjoint::new(q), Disjoint::new(kv.k), Disjoint::new(kv.v));
    let block_size = layout.block_size.tokens();
    let write = |run: &RunMeta<'_>, i: usize| {
        let row = run.first_row + i;
        let (cos, sin) = angles[row * 2 * pairs..(row + 1) * 2 * pairs].split_at(pairs);
        let row_in = &qkv[row * width..(row + 1) * width];
        let q_in = &row_in[..heads * dim];
        let (k_in, v_in) = (
            &row_in[width - projected * key_size..],
            &row_in[width - key_size..],
        );
        // SAFETY: rows are disjoint.
        let q_out = unsafe { q.part(row * heads * dim, heads * dim) };
        let scale = query_scale.map(|scale| scale.at(run.start + i));
        queries(
            level,
            q_in,
            dim,
            norm.map(|n| (n.q, n.eps)),
            (cos, sin),
            scale,
            q_out,
        );
        let slot = (run.start + i) % block_size;
        let mut rotated = [0f32; MAX_HEAD_DIM];
        let rotated = &mut rotated[..dim];
        for head in 0..layout.kv_heads {
            let offset = layout.head_offset(stride, run.block_of(run.start + i, block_size), head);
            norm_and_rotate(
                level,
                &k_in[head * dim..][..dim],
                norm.map(|n| (n.k, n.eps)),
                cos,
                sin,
                rotated,
            );
            // SAFETY: this element is of this row's slot; slots of different rows are disjoint because the scheduler
            // gives each writable block to one request.
            let put = |cache: &Disjoint<'_, E>, at: usize, value: f32| unsafe {
                cache.part(at, 1)[0] = E::from_f32(value);
            };
            for (d, &value) in rotated.iter().enumerate() {
                put(&k_cache, offset + d * block_size + slot, value);
            }
            let v_in = &v_in[head * dim..][..dim];
            let scale = match values {
                CachedValues::Projected => 1.0,
                CachedValues::Normalised(eps) | CachedValues::NormalisedKeys(eps) => {
                    dispatch(level, InverseRms { x: v_in, eps })
                }
            };
            for (d, &value) in v_in.iter().enumerate() {
                put(&v_cache, offset + slot * dim + d, value * scale);
            }
        }
    };
    each_row(runs, width, &write);
}

/// Calls `task` for all rows of the runs, in parallel, with the run and the row's index in it. Rows are `width` wide.
fn each_row(runs: &[RunMeta<'_>], width: usize, task: &(dyn Fn(&RunMeta<'_>, usize) + Sync)) {
    let rows = runs.iter().map(|run| run.len).sum();
    run_ranges(rows, (8192 / width).max(1), &|range| {
        let mut before = 0;
        for run in runs {
            let own = range.start.max(before)..range.end.min(before + run.len);
            own.for_each(|row| task(run, row - before));
            before += run.len;
        }
    });
}

/// Largest head this crate handles; those of known models end at 512.
pub(crate) const MAX_HEAD_DIM: usize = 1024;

fn norm_and_rotate(
    level: Level,
    head: &[f32],
    norm: Option<(&[f32], f32)>,
    cos: &[f32],
    sin: &[f32],
    out: &mut [f32],
) {
    match norm {
        Some((weight, eps)) => dispatch(
            level,
            RmsNorm {
                x: head,
                weight,
                eps,
                out,
            },
        ),
        None => out.copy_from_slice(head),
    }
    let pairs = cos.len();
    let (first, rest) = out.split_at_mut(pairs);
    for (i, (a, b)) in first.iter_mut().zip(rest).enumerate() {
        (*a, *b) = (*a * cos[i] - *b * sin[i], *b * cos[i] + *a * sin[i]);
    }
}
