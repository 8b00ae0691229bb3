//! Norms of heads, rotation, and keys and values to the cache.

use half::bf16;
use plimsoll_device::cuda::{GpuError, GpuSlice, Launch};

use super::{
    FusedKernels, GpuKvWrite, GpuNorm, GpuQkNorm, GpuRope, MAX_THREADS, PairAxes, VEC, WARP, int, row_len,
};
use crate::CachedValues;

/// What a row of the projection has, in heads, and where keys and values go: their addresses.
struct Row {
    heads: usize,
    gate_heads: usize,
    kv_heads: usize,
    value_heads: usize,
    head_dim: usize,
    slots: u64,
    cache: [u64; 2],
    /// Index among elements of the cache.
    element: usize,
    inverse_scales: [f32; 2],
    block_size: usize,
    block_stride: usize,
}

/// Addresses of the weights of q's and k's heads.
struct HeadNorms {
    weights: [u64; 2],
    eps: f32,
    /// Of values too.
    all: bool,
}

impl FusedKernels {
    /// From the fused projection to attention's inputs: normalises the heads of q and k if asked to, rotates them (element
    /// `i` with `i + pairs`), scales q by its position, leaves it in its place and writes k and what [`GpuKvWrite::values`] says into
    /// the cache. Twin of [`qk_norm_rope_kv_write`](crate::qk_norm_rope_kv_write).
    ///
    /// `qkv` is `[tokens, (heads + 2 × kv_heads) × head_dim]`, or as many columns fewer as v has where values are keys, with as many
    /// columns of gates as of q behind these where [`GpuKvWrite::gated`]; its other columns are left as they were.
    ///
    /// # Errors
    /// [`GpuError`] of the launch.
    pub fn qk_norm_rope_kv_write(
        &self,
        qkv: GpuSlice<'_, bf16>,
        norm: Option<GpuQkNorm<'_>>,
        rope: GpuRope<'_>,
        kv: GpuKvWrite<'_>,
    ) -> Result<(), GpuError> {
        let (rows, dim) = (kv.slots.len(), kv.head_dim);
        let width = row_len(qkv, rows);
        assert_eq!(rope.rows(), rows, "one position per row");
        assert!(kv.block_size > 0 && kv.kv_heads > 0 && dim > 0);
        let (value_heads, eps) = match kv.values {
            CachedValues::Projected => (kv.kv_heads, None),
            CachedValues::Normalised(eps) => (kv.kv_heads, Some(eps)),
            CachedValues::NormalisedKeys(eps) => (0, Some(eps)),
        };
        let of_kv = kv.kv_heads + value_heads;
        assert!(
            width.is_multiple_of(dim) && width / dim > of_kv,
            "qkv is not [tokens, heads and those of k and v, head_dim]"
        );
        assert!(
            eps.is_none() || norm.map(|norm| norm.eps) == eps,
            "values are normalised where q and k are, with one eps"
        );
        let others = width / dim - of_kv;
        assert!(!kv.gated || others.is_multiple_of(2), "a gate for each head");
        let (heads, gate_heads) = match kv.gated {
            false => (others, 0),
            true => (others / 2, others / 2),
        };
        let own = kv.kv_heads * kv.block_size * dim;
        kv.kv.check_blocks(own, dim);
        let norms = norm.map(|norm| {
            let weights = [norm.q, norm.k].map(|weight| {
                assert_eq!(weight.len(), dim, "norms are not [head_dim]");
                weight.ptr()
            });
            HeadNorms {
                weights,
                eps: norm.eps,
                all: eps.is_some(),
            }
        });
        let row = Row {
            heads,
            gate_heads,
            kv_heads: kv.kv_heads,
            value_heads,
            head_dim: dim,
            slots: kv.slots.ptr(),
            cache: [kv.kv.k.ptr(), kv.kv.v.ptr()],
            element: kv.kv.element.index(),
            inverse_scales: [kv.kv.k_scale.recip(), kv.kv.v_scale.recip()],
            block_size: kv.block_size,
            block_stride: kv.kv.block_stride,
        };
        self.rotate(qkv, norms, rope, &row)
    }

    /// The part of it that makes queries, for layers that attend to what another one has cached: `q` is `[tokens, heads × head_dim]`,
    /// `norm` a weight `[head_dim]` and what is added to the mean square. Twin of [`rotate_queries`](crate::rotate_queries).
    ///
    /// # Errors
    /// [`GpuError`] of the launch.
    pub fn rotate_queries(
        &self,
        q: GpuSlice<'_, bf16>,
        head_dim: usize,
        norm: Option<GpuNorm<'_>>,
        rope: GpuRope<'_>,
    ) -> Result<(), GpuError> {
        let width = row_len(q, rope.rows());
        assert!(
            head_dim > 0 && width.is_multiple_of(head_dim),
            "q is not [tokens, heads, head_dim]"
        );
        let norms = norm.map(|norm| {
            assert_eq!(norm.weight.len(), head_dim, "the norm is not [head_dim]");
            HeadNorms {
                weights: [norm.weight.ptr(); 2],
                eps: norm.eps,
                all: false,
            }
        });
        let row = Row {
            heads: width / head_dim,
            gate_heads: 0,
            kv_heads: 0,
            value_heads: 0,
            head_dim,
            // Something is read, and not used.
            slots: rope.positions.ptr(),
            cache: [0; 2],
            element: 0,
            inverse_scales: [1.0; 2],
            block_size: 1,
            block_stride: 0,
        };
        self.rotate(q, norms, rope, &row)
    }

    fn rotate(
        &self,
        qkv: GpuSlice<'_, bf16>,
        norms: Option<HeadNorms>,
        rope: GpuRope<'_>,
        row: &Row,
    ) -> Result<(), GpuError> {
        let (rows, dim, pairs) = (rope.rows(), row.head_dim, rope.frequencies.len() / 2);
        assert!(
            dim.is_multiple_of(2 * VEC)
                && dim <= 2 * VEC * WARP
                && pairs.is_multiple_of(VEC)
                && 2 * pairs <= dim,
            "heads of {dim} with {pairs} rotated pairs are not supported"
        );
        let lanes = (dim / (2 * VEC)).next_power_of_two();
        let heads = row.heads + 2 * row.kv_heads;
        let threads = (heads * lanes).next_multiple_of(WARP).min(MAX_THREADS);
        let kernels = match &norms {
            None => &self.rope_kv_write,
            Some(norms) if norms.all => &self.qkv_norm_rope_kv_write,
            Some(_) => &self.qk_norm_rope_kv_write,
        };
        let ([q_norm, k_norm], eps) = norms.map_or(([0; 2], 0.0), |norms| (norms.weights, norms.eps));
        let (beta, original) = rope
            .query_scale
            .map_or((0.0, 1), |scale| (scale.beta, scale.original));
        assert!(original > 0, "positions of pretraining");
        let ([k_cache, v_cache], [k_inverse, v_inverse]) = (row.cache, row.inverse_scales);
        let args = [
            qkv.into(),
            rope.positions.into(),
            row.slots.into(),
            rope.frequencies.into(),
            rope.factor.into(),
            q_norm.into(),
            k_norm.into(),
            eps.into(),
            k_cache.into(),
            v_cache.into(),
            int(row.heads),
            int(row.gate_heads),
            int(row.kv_heads),
            int(row.value_heads),
            int(dim),
            int(pairs),
            int(row.block_size),
            int(row.block_stride),
            int(lanes.trailing_zeros() as usize),
            beta.into(),
            int(original),
            k_inverse.into(),
            v_inverse.into(),
        ];
        let args = [&args[..], &PairAxes::args(rope.axes)].concat();
        let launch =
            Launch::new([rows as u32, 1, 1], threads as u32).shared((pairs + 1) * size_of::<[f32; 2]>());
        let kernel = &kernels[row.element][usize::from(rope.query_scale.is_some())];
        self.launch(kernel, launch, &args)
    }
}
