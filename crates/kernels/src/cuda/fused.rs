mod operands;

use half::bf16;
use plimsoll_device::Pod;
use plimsoll_device::cuda::{Arg, Function, Gpu, GpuError, GpuSlice, Launch, Module};

use super::GpuKvElement;
use super::linear::{FP8_BLOCK, Fp8Scaling, GpuFp8Rows, GpuRows};
use crate::Activation;

pub use operands::{GpuKvWrite, GpuNorm, GpuQkNorm, GpuRope, GpuTokens, rope_turns};

/// Elements of one 16-byte access; rows are multiples of it.
pub(super) const VEC: usize = 8;
pub(super) const MAX_THREADS: usize = 1024;
pub(super) const WARP: usize = 32;
/// Longest row of a norm.
pub(super) const MAX_NORM: usize = 2 * VEC * MAX_THREADS;
/// Longest row that is quantised.
const MAX_QUANTISED: usize = 4 * VEC * MAX_THREADS;

/// The element-wise steps of a decoder layer, and random weights: `kernels/fused.cu`.
#[derive(Debug)]
pub struct FusedKernels {
    gpu: Gpu,
    embedding: Function,
    rms_norm: NormKernels,
    add_rms_norm: NormKernels,
    sandwich_norm: NormKernels,
    /// For each element of the cache, without and with a scale of q.
    rope_kv_write: [[Function; 2]; GpuKvElement::ALL.len()],
    qk_norm_rope_kv_write: [[Function; 2]; GpuKvElement::ALL.len()],
    silu_mul: GluKernels,
    gelu_tanh_mul: GluKernels,
    quantise: [Function; 3],
    soft_cap: Function,
    gather_rows: Function,
    sum_rows: Function,
    fill_random: Function,
    fill_random_e4m3: Function,
    _module: Module,
}

/// Of rows of which a thread keeps one vector or two.
#[derive(Debug)]
struct NormKernels {
    plain: [Function; 2],
    /// Their outputs are quantised.
    fp8: [Function; 2],
}

#[derive(Debug)]
struct GluKernels {
    plain: Function,
    /// Their outputs are quantised; for rows of which a thread keeps 1, 2 and 4 vectors.
    fp8: [Function; 3],
}

impl FusedKernels {
    /// Loads `kernels/fused.cu`.
    ///
    /// # Errors
    /// [`GpuError`] if this binary carries no code for this GPU.
    pub fn load(gpu: &Gpu) -> Result<Self, GpuError> {
        let module = super::load(gpu, "fused")?;
        let function = |name: &str, vecs: usize| module.function(&format!("{name}_{vecs}"));
        let norms = |name: &str| -> Result<NormKernels, GpuError> {
            let fp8 = &format!("{name}_fp8");
            Ok(NormKernels {
                plain: [function(name, 1)?, function(name, 2)?],
                fp8: [function(fp8, 1)?, function(fp8, 2)?],
            })
        };
        let quantising = |name: &str| -> Result<[Function; 3], GpuError> {
            Ok([function(name, 1)?, function(name, 2)?, function(name, 4)?])
        };
        let ropes = |name: &str| {
            let of = |element: GpuKvElement| {
                let function =
                    |scale: &str| module.function(&format!("{name}{scale}_kv_write{}", element.infix()));
                Ok::<_, GpuError>([function("")?, function("_scale")?])
            };
            let [wide, fp8] = GpuKvElement::ALL.map(of);
            Ok::<_, GpuError>([wide?, fp8?])
        };
        Ok(Self {
            gpu: gpu.clone(),
            embedding: module.function("embedding")?,
            rms_norm: norms("rms_norm")?,
            add_rms_norm: norms("add_rms_norm")?,
            sandwich_norm: norms("sandwich_norm")?,
            rope_kv_write: ropes("rope")?,
            qk_norm_rope_kv_write: ropes("qk_norm_rope")?,
            silu_mul: GluKernels {
                plain: module.function("silu_mul")?,
                fp8: quantising("silu_mul_fp8")?,
            },
            gelu_tanh_mul: GluKernels {
                plain: module.function("gelu_tanh_mul")?,
                fp8: quantising("gelu_tanh_mul_fp8")?,
            },
            quantise: quantising("quantise_fp8")?,
            soft_cap: module.function("soft_cap")?,
            gather_rows: module.function("gather_rows")?,
            sum_rows: module.function("sum_rows")?,
            fill_random: module.function("fill_random")?,
            fill_random_e4m3: module.function("fill_random_e4m3")?,
            _module: module,
        })
    }

    /// Rows of `table`, `[vocab, n]`, by token into `out`, `[tokens, n]`, times `scale` rounded to `bf16`, as Hugging Face's
    /// Gemma does. Tokens outside the vocabulary (of padding rows, or sampled from damaged logits) are taken for the nearest
    /// in it.
    ///
    /// # Errors
    /// [`GpuError`] of the launch.
    pub fn embedding(
        &self,
        table: GpuSlice<'_, bf16>,
        tokens: GpuTokens<'_>,
        scale: f32,
        out: GpuSlice<'_, bf16>,
    ) -> Result<(), GpuError> {
        let rows = tokens.tokens.len();
        let n = row_len(out, rows);
        assert_eq!(tokens.resolved.len(), rows, "one resolved token per row");
        assert!(
            n > 0 && table.len().is_multiple_of(n),
            "the table is not [vocab, n]"
        );
        let args = [
            table.into(),
            tokens.tokens.into(),
            tokens.prev_sampled.into(),
            tokens.resolved.into(),
            out.into(),
            bf16::from_f32(scale).to_f32().into(),
            int(table.len() / n),
            int(n),
        ];
        self.launch(&self.embedding, per_row(rows, n / VEC), &args)
    }

    /// Root mean square norm of the rows of `x` into `out`, both `[tokens, n]`; sums in `f32`, one rounding. Twin of
    /// [`rms_norm`](crate::rms_norm).
    ///
    /// # Errors
    /// [`GpuError`] of the launch.
    pub fn rms_norm<'a>(
        &self,
        x: GpuSlice<'_, bf16>,
        norm: GpuNorm<'_>,
        out: impl Into<GpuRows<'a>>,
    ) -> Result<(), GpuError> {
        let out = out.into();
        assert_eq!(x.len(), out.len(), "x and out differ");
        let sources = [x.into(), 0u64.into(), 0u64.into()];
        self.norm(&self.rms_norm, sources, norm, out)
    }

    /// `hidden += delta`, rounded to `bf16`, then its norm into `out`; all `[tokens, n]`. Twin of
    /// [`add_rms_norm`](crate::add_rms_norm).
    ///
    /// # Errors
    /// [`GpuError`] of the launch.
    pub fn add_rms_norm<'a>(
        &self,
        hidden: GpuSlice<'_, bf16>,
        delta: GpuSlice<'_, bf16>,
        norm: GpuNorm<'_>,
        out: impl Into<GpuRows<'a>>,
    ) -> Result<(), GpuError> {
        let out = out.into();
        assert_eq!(
            (hidden.len(), delta.len()),
            (out.len(), out.len()),
            "lengths differ"
        );
        let sources = [hidden.into(), delta.into(), 0u64.into()];
        self.norm(&self.add_rms_norm, sources, norm, out)
    }

    /// `hidden +=` the norm of `delta` with `delta_weight` (`[n]`), rounded to `bf16` once, then the sum's norm into `out`;
    /// both norms have one `eps`. Twin of [`sandwich_norm`](crate::sandwich_norm).
    ///
    /// # Errors
    /// [`GpuError`] of the launch.
    pub fn sandwich_norm<'a>(
        &self,
        hidden: GpuSlice<'_, bf16>,
        delta: GpuSlice<'_, bf16>,
        delta_weight: GpuSlice<'_, f32>,
        norm: GpuNorm<'_>,
        out: impl Into<GpuRows<'a>>,
    ) -> Result<(), GpuError> {
        let out = out.into();
        assert_eq!(
            (hidden.len(), delta.len()),
            (out.len(), out.len()),
            "lengths differ"
        );
        assert_eq!(delta_weight.len(), norm.weight.len(), "norms of different widths");
        let sources = [hidden.into(), delta.into(), delta_weight.into()];
        self.norm(&self.sandwich_norm, sources, norm, out)
    }

    fn norm(
        &self,
        kernels: &NormKernels,
        [hidden, delta, delta_weight]: [Arg; 3],
        norm: GpuNorm<'_>,
        out: GpuRows<'_>,
    ) -> Result<(), GpuError> {
        let n = norm.weight.len();
        assert!(n > 0 && out.len().is_multiple_of(n), "out is not [rows, n]");
        assert!(
            n.is_multiple_of(VEC) && n <= MAX_NORM,
            "norms are of a multiple of {VEC} elements up to {MAX_NORM}, not {n}"
        );
        let rows = out.len() / n;
        let many = rows > 4 * self.gpu.info().sm_count;
        let vecs = if n / VEC > MAX_THREADS || many { 2 } else { 1 };
        let threads = (n / VEC).div_ceil(vecs).next_multiple_of(WARP);
        let launch = Launch::new([rows as u32, 1, 1], threads as u32);
        let sources = [hidden, delta, delta_weight, norm.weight.into()];
        let shape = [int(n), norm.eps.into()];
        match out {
            GpuRows::Bf16(out) => {
                let args = [&sources[..], &[out.into()], &shape].concat();
                self.launch(&kernels.plain[vecs - 1], launch, &args)
            }
            GpuRows::Fp8(out) => {
                let args = [&sources[..], &fp8_args(&out, rows, n), &shape].concat();
                self.launch(&kernels.fp8[vecs - 1], launch, &args)
            }
        }
    }

    /// Rows of `x` quantised into `out`, both `[tokens, n]`: factors are the largest magnitude of what shares them over 448, values
    /// rounded to nearest. Norms and [`Self::glu`] do that to what they compute before it is rounded.
    ///
    /// # Errors
    /// [`GpuError`] of the launch.
    pub fn quantise(&self, x: GpuSlice<'_, bf16>, n: usize, out: GpuFp8Rows<'_>) -> Result<(), GpuError> {
        assert_eq!(x.len(), out.values.len(), "x and out differ");
        self.quantise_rows(&self.quantise, x, n, &out)
    }

    fn quantise_rows(
        &self,
        kernels: &[Function; 3],
        x: GpuSlice<'_, bf16>,
        n: usize,
        out: &GpuFp8Rows<'_>,
    ) -> Result<(), GpuError> {
        assert!(
            n > 0 && n.is_multiple_of(VEC) && n <= MAX_QUANTISED,
            "rows of a multiple of {VEC} elements up to {MAX_QUANTISED} are quantised, not {n}"
        );
        let rows = out.values.len() / n;
        // Few vectors a thread: each row is one block's, so what counts is how many of its loads are under way.
        let shift = [1, 2, 4]
            .iter()
            .position(|vecs| n.div_ceil(VEC * vecs) <= MAX_THREADS);
        let shift = shift.expect("the length was checked");
        let threads = n.div_ceil(VEC << shift).next_multiple_of(WARP);
        let launch = Launch::new([rows as u32, 1, 1], threads as u32);
        let args = [&[x.into()], &fp8_args(out, rows, n)[..], &[int(n)]].concat();
        self.launch(&kernels[shift], launch, &args)
    }

    /// From the fused projection to attention's inputs: normalises the heads of q and k if asked to, rotates them (element
    /// `i` with `i + pairs`), scales q by its position, leaves it in its place and writes k and v into the cache. Twin of
    /// [`qk_norm_rope_kv_write`](crate::qk_norm_rope_kv_write).
    ///
    /// `qkv` is `[tokens, (heads + 2 × kv_heads) × head_dim]`, with as many columns of gates as of q behind these where
    /// [`GpuKvWrite::gated`]; its other columns are left as they were.
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
        let (rows, dim) = (rope.positions.len(), kv.head_dim);
        let width = row_len(qkv, rows);
        let pairs = rope.turns.len() / 2;
        assert_eq!(kv.slots.len(), rows, "one slot per row");
        assert!(
            dim > 0 && width.is_multiple_of(dim) && width / dim > 2 * kv.kv_heads,
            "qkv is not [tokens, heads + 2 kv_heads, head_dim]"
        );
        assert!(
            dim.is_multiple_of(2 * VEC)
                && dim <= 2 * VEC * WARP
                && pairs.is_multiple_of(VEC)
                && 2 * pairs <= dim,
            "heads of {dim} with {pairs} rotated pairs are not supported"
        );
        let block = kv.kv_heads * kv.block_size * dim;
        assert!(
            block > 0 && kv.kv.elements().is_multiple_of(block),
            "k and v are not [blocks, kv_heads, block_size, head_dim]"
        );
        let others = width / dim - 2 * kv.kv_heads;
        assert!(!kv.gated || others.is_multiple_of(2), "a gate for each head");
        let (q_heads, gate_heads) = match kv.gated {
            false => (others, 0),
            true => (others / 2, others / 2),
        };
        let heads = q_heads + 2 * kv.kv_heads;
        let lanes = (dim / (2 * VEC)).next_power_of_two();
        let threads = (heads * lanes).next_multiple_of(WARP).min(MAX_THREADS);
        let (kernels, q_norm, k_norm, eps) = match norm {
            Some(norm) => {
                assert_eq!(
                    (norm.q.len(), norm.k.len()),
                    (dim, dim),
                    "norms are not [head_dim]"
                );
                (&self.qk_norm_rope_kv_write, norm.q.ptr(), norm.k.ptr(), norm.eps)
            }
            None => (&self.rope_kv_write, 0, 0, 0.0),
        };
        let (beta, original) = rope
            .query_scale
            .map_or((0.0, 1), |scale| (scale.beta, scale.original));
        assert!(original > 0, "positions of pretraining");
        let args = [
            qkv.into(),
            rope.positions.into(),
            kv.slots.into(),
            rope.turns.into(),
            rope.factor.into(),
            q_norm.into(),
            k_norm.into(),
            eps.into(),
            kv.kv.k.into(),
            kv.kv.v.into(),
            int(q_heads),
            int(gate_heads),
            int(kv.kv_heads),
            int(dim),
            int(pairs),
            int(kv.block_size),
            int(lanes.trailing_zeros() as usize),
            beta.into(),
            int(original),
            kv.kv.k_scale.recip().into(),
            kv.kv.v_scale.recip().into(),
        ];
        let launch =
            Launch::new([rows as u32, 1, 1], threads as u32).shared((pairs + 1) * size_of::<[f32; 2]>());
        let kernel = &kernels[kv.kv.element.index()][usize::from(rope.query_scale.is_some())];
        self.launch(kernel, launch, &args)
    }

    /// `activation(gate) × up`: `gate_up` is `[tokens, 2 × inner]`, gate first, `out` `[tokens, inner]`; one rounding. Twin
    /// of [`glu`](crate::glu).
    ///
    /// # Errors
    /// [`GpuError`] of the launch.
    pub fn glu<'a>(
        &self,
        activation: Activation,
        gate_up: GpuSlice<'_, bf16>,
        inner: usize,
        out: impl Into<GpuRows<'a>>,
    ) -> Result<(), GpuError> {
        let out = out.into();
        assert!(
            inner > 0 && inner.is_multiple_of(VEC),
            "rows of {inner} are not a multiple of {VEC}"
        );
        let rows = out.len() / inner;
        assert_eq!(
            (out.len(), gate_up.len()),
            (rows * inner, 2 * rows * inner),
            "gate_up is not [tokens, 2, inner]"
        );
        let kernels = match activation {
            Activation::Silu => &self.silu_mul,
            Activation::GeluTanh => &self.gelu_tanh_mul,
        };
        let out = match out {
            GpuRows::Bf16(out) => out,
            GpuRows::Fp8(out) => return self.quantise_rows(&kernels.fp8, gate_up, inner, &out),
        };
        // Small blocks, so that a single row is spread over many multiprocessors.
        let threads = if rows < 16 { 64 } else { 256 };
        let blocks_per_row = (inner / VEC).div_ceil(threads);
        let launch = Launch::new([(rows * blocks_per_row) as u32, 1, 1], threads as u32);
        let args = [gate_up.into(), out.into(), int(inner), int(blocks_per_row)];
        self.launch(&kernels.plain, launch, &args)
    }

    /// `cap × tanh(x / cap)` of every value, in place; `cap` is more than 0. Twin of [`soft_cap`](crate::soft_cap()).
    ///
    /// # Errors
    /// [`GpuError`] of the launch.
    pub fn soft_cap(&self, x: GpuSlice<'_, f32>, cap: f32) -> Result<(), GpuError> {
        assert!(cap > 0.0);
        assert!(
            x.ptr().is_multiple_of(16),
            "values begin at a multiple of 16 bytes"
        );
        let args = [x.into(), (x.len() as u64).into(), cap.into()];
        let blocks = x.len().div_ceil(256 * 4).min(self.gpu.info().sm_count * 16);
        self.launch(&self.soft_cap, Launch::new([blocks as u32, 1, 1], 256), &args)
    }

    /// The given rows of `x`, `[tokens, n]`, into `out`, `[rows, n]`.
    ///
    /// # Errors
    /// [`GpuError`] of the launch.
    pub fn gather_rows(
        &self,
        x: GpuSlice<'_, bf16>,
        rows: GpuSlice<'_, i32>,
        out: GpuSlice<'_, bf16>,
    ) -> Result<(), GpuError> {
        let n = row_len(out, rows.len());
        assert!(n == 0 || x.len().is_multiple_of(n), "x is not [tokens, n]");
        let args = [x.into(), rows.into(), out.into(), int(n)];
        self.launch(&self.gather_rows, per_row(rows.len(), n / VEC), &args)
    }

    /// Sums of rows of `x`, `[tokens, n]`, into `out`, `[spans, n]`; `spans` has the first row and the number of rows of
    /// each. Twin of [`sum_rows`](crate::sum_rows), but in `f32`.
    ///
    /// # Errors
    /// [`GpuError`] of the launch.
    pub fn sum_rows(
        &self,
        x: GpuSlice<'_, bf16>,
        spans: GpuSlice<'_, i32>,
        out: GpuSlice<'_, f32>,
    ) -> Result<(), GpuError> {
        assert!(spans.len().is_multiple_of(2), "a span is two numbers");
        let count = spans.len() / 2;
        let n = out.len().checked_div(count).unwrap_or(0);
        assert_eq!(out.len(), count * n, "out is not [spans, n]");
        assert!(n.is_multiple_of(VEC), "rows of {n} are not a multiple of {VEC}");
        assert!(n == 0 || x.len().is_multiple_of(n), "x is not [tokens, n]");
        let args = [x.into(), spans.into(), out.into(), int(n)];
        let blocks = n.div_ceil(VEC * WARP);
        self.launch(
            &self.sum_rows,
            Launch::new([count as u32, blocks as u32, 1], 512),
            &args,
        )
    }

    /// Roughly normal values of standard deviation `scale`, the same for the same seed: weights where speed matters and
    /// text does not.
    ///
    /// # Errors
    /// [`GpuError`] of the launch.
    pub fn fill_random(&self, out: GpuSlice<'_, bf16>, seed: u64, scale: f32) -> Result<(), GpuError> {
        self.fill(&self.fill_random, out, seed, scale)
    }

    /// The same in `e4m3`.
    ///
    /// # Errors
    /// [`GpuError`] of the launch.
    pub fn fill_random_e4m3(&self, out: GpuSlice<'_, u8>, seed: u64, scale: f32) -> Result<(), GpuError> {
        self.fill(&self.fill_random_e4m3, out, seed, scale)
    }

    fn fill<T: Pod>(
        &self,
        kernel: &Function,
        out: GpuSlice<'_, T>,
        seed: u64,
        scale: f32,
    ) -> Result<(), GpuError> {
        let len = out.len() as u64;
        let args = [out.into(), len.into(), seed.into(), scale.into()];
        // Its threads stride over the elements.
        let blocks = out.len().div_ceil(256 * VEC).min(self.gpu.info().sm_count * 16);
        self.launch(kernel, Launch::new([blocks as u32, 1, 1], 256), &args)
    }

    fn launch(&self, kernel: &Function, launch: Launch, args: &[Arg]) -> Result<(), GpuError> {
        if launch.grid[0] == 0 {
            return Ok(());
        }
        // SAFETY: the methods pass what the kernels declare and check the lengths; indices are the caller's promise.
        unsafe { self.gpu.launch(kernel, launch.pdl(true), args) }
    }
}

/// One block per row, one thread per vector as far as there are threads.
fn per_row(rows: usize, vecs: usize) -> Launch {
    let threads = vecs.next_multiple_of(WARP).clamp(WARP, MAX_THREADS);
    Launch::new([rows as u32, 1, 1], threads as u32)
}

/// Elements per row of `rows` rows.
fn row_len(matrix: GpuSlice<'_, bf16>, rows: usize) -> usize {
    let n = matrix.len().checked_div(rows).unwrap_or(0);
    assert_eq!(matrix.len(), rows * n, "the matrix does not have {rows} rows");
    assert!(n.is_multiple_of(VEC), "rows of {n} are not a multiple of {VEC}");
    n
}

/// `Fp8Rows` of `kernels/fused.cu`.
pub(super) fn fp8_args(out: &GpuFp8Rows<'_>, rows: usize, n: usize) -> [Arg; 3] {
    assert_eq!(out.scales.len(), out.scaling.input_scales(rows, n), "scales");
    assert!(
        out.scaling == Fp8Scaling::Rows || n.is_multiple_of(FP8_BLOCK),
        "rows of {n} are not whole blocks"
    );
    let stride = out.scaling.input_stride(rows);
    [out.values.into(), out.scales.into(), int(stride)]
}

pub(super) fn int(value: usize) -> Arg {
    i32::try_from(value)
        .expect("sizes of a step are below 2^31")
        .into()
}
