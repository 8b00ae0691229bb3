mod operands;
mod rope;
mod sums;

use half::bf16;
use plimsoll_device::Pod;
use plimsoll_device::cuda::{Arg, Function, Gpu, GpuError, GpuSlice, Launch, Module};

use super::linear::{FP8_BLOCK, Fp8Scaling, GpuFp8Rows, GpuRows};
use super::{GpuKvElement, HostCopies};
use crate::Activation;

pub use operands::{
    GpuKvWrite, GpuNorm, GpuQkNorm, GpuRope, GpuTokens, GpuVocabulary, PairAxes, rope_frequencies,
};

/// Elements of one 16-byte access; rows are multiples of it.
pub(super) const VEC: usize = 8;
pub(super) const MAX_THREADS: usize = 1024;
pub(super) const WARP: usize = 32;
/// Longest row of a norm.
pub(super) const MAX_NORM: usize = 2 * VEC * MAX_THREADS;
/// Longest row that is quantised.
const MAX_QUANTISED: usize = 4 * VEC * MAX_THREADS;

/// The element-wise steps of a decoder layer, and random weights: `kernels/fused.cu` and `kernels/rope.cu`.
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
    qkv_norm_rope_kv_write: [[Function; 2]; GpuKvElement::ALL.len()],
    /// Of rows of which a thread keeps one vector or two.
    add_normed: [Function; 2],
    sum_norms: [Function; 2],
    silu_mul: GluKernels,
    gelu_tanh_mul: GluKernels,
    quantise: [Function; 3],
    soft_cap: Function,
    copy_words: Function,
    gather_rows: Function,
    sum_rows: Function,
    fill_random: Function,
    fill_random_e4m3: Function,
    _modules: [Module; 2],
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
    /// Loads `kernels/fused.cu` and `kernels/rope.cu`.
    ///
    /// # Errors
    /// [`GpuError`] if this binary carries no code for this GPU.
    pub fn load(gpu: &Gpu) -> Result<Self, GpuError> {
        let (module, rope) = (super::load(gpu, "fused")?, super::load(gpu, "rope")?);
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
                    |scale: &str| rope.function(&format!("{name}{scale}_kv_write{}", element.infix()));
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
            qkv_norm_rope_kv_write: ropes("qkv_norm_rope")?,
            add_normed: [function("add_normed", 1)?, function("add_normed", 2)?],
            sum_norms: [function("sum_norms", 1)?, function("sum_norms", 2)?],
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
            copy_words: module.function("copy_words")?,
            gather_rows: module.function("gather_rows")?,
            sum_rows: module.function("sum_rows")?,
            fill_random: module.function("fill_random")?,
            fill_random_e4m3: module.function("fill_random_e4m3")?,
            _modules: [module, rope],
        })
    }

    /// Copies between the host and the device that are kernels.
    pub fn host_copies(&self) -> HostCopies {
        HostCopies::new(&self.gpu, self.copy_words.clone())
    }

    /// Rows of `table`, `[vocabulary.count, n]`, by token into `out`, `[tokens, n]`, times `scale` rounded to `bf16`, as Hugging Face's
    /// Gemma does. Tokens outside the vocabulary (of padding rows, or sampled from damaged logits) are taken for the nearest
    /// in it; rows of tokens that are not in this part of it are 0.
    ///
    /// # Errors
    /// [`GpuError`] of the launch.
    pub fn embedding(
        &self,
        table: GpuSlice<'_, bf16>,
        vocabulary: GpuVocabulary,
        tokens: GpuTokens<'_>,
        scale: f32,
        out: GpuSlice<'_, bf16>,
    ) -> Result<(), GpuError> {
        let rows = tokens.tokens.len();
        let n = row_len(out, rows);
        assert_eq!(tokens.resolved.len(), rows, "one resolved token per row");
        assert_eq!(table.len(), vocabulary.count * n, "the table is not [tokens, n]");
        let GpuVocabulary { all, first, count } = vocabulary;
        let args = [
            table.into(),
            tokens.tokens.into(),
            tokens.prev_sampled.into(),
            tokens.resolved.into(),
            out.into(),
            bf16::from_f32(scale).to_f32().into(),
            int(all),
            int(first),
            int(count),
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
        self.norm(&self.rms_norm, sources, norm, None, out)
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
        self.norm(&self.add_rms_norm, sources, norm, None, out)
    }

    /// `hidden +=` the norm of `delta` with `delta_weight` (`[n]`), times `scalar` (`[1]`) if there is one, rounded to `bf16` once, then
    /// the sum's norm into `out`; both norms have one `eps`. Twin of [`sandwich_norm`](crate::sandwich_norm).
    ///
    /// # Errors
    /// [`GpuError`] of the launch.
    pub fn sandwich_norm<'a>(
        &self,
        hidden: GpuSlice<'_, bf16>,
        delta: GpuSlice<'_, bf16>,
        delta_weight: GpuSlice<'_, f32>,
        scalar: Option<GpuSlice<'_, f32>>,
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
        self.norm(&self.sandwich_norm, sources, norm, scalar, out)
    }

    fn norm(
        &self,
        kernels: &NormKernels,
        [hidden, delta, delta_weight]: [Arg; 3],
        norm: GpuNorm<'_>,
        scalar: Option<GpuSlice<'_, f32>>,
        out: GpuRows<'_>,
    ) -> Result<(), GpuError> {
        let n = norm.weight.len();
        let rows = out.len() / n.max(1);
        let (vecs, launch) = Self::rows_of_norms(&self.gpu, out.len(), n);
        let sources = [hidden, delta, delta_weight, norm.weight.into()];
        let shape = [address(scalar), int(n), norm.eps.into()];
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

    /// How the rows of a norm are launched, and how many vectors a thread keeps.
    pub(super) fn rows_of_norms(gpu: &Gpu, len: usize, n: usize) -> (usize, Launch) {
        assert!(
            n > 0 && len.is_multiple_of(n),
            "{len} elements are not [rows, {n}]"
        );
        assert!(
            n.is_multiple_of(VEC) && n <= MAX_NORM,
            "norms are of a multiple of {VEC} elements up to {MAX_NORM}, not {n}"
        );
        let rows = len / n;
        let many = rows > 4 * gpu.info().sm_count;
        let vecs = if n / VEC > MAX_THREADS || many { 2 } else { 1 };
        let threads = (n / VEC).div_ceil(vecs).next_multiple_of(WARP);
        (vecs, Launch::new([rows as u32, 1, 1], threads as u32))
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
        match out {
            GpuRows::Bf16(out) => {
                let up = gate_up.range(inner.min(gate_up.len())..gate_up.len());
                self.gate(activation, [(gate_up, 2 * inner), (up, 2 * inner)], inner, out)
            }
            GpuRows::Fp8(out) => self.quantise_rows(&self.glu_kernels(activation).fp8, gate_up, inner, &out),
        }
    }

    /// The same where they are no neighbours: `gate` is `[tokens, inner]`, and `up` begins with a row's first element and has its rows
    /// `up_stride` elements apart.
    ///
    /// # Errors
    /// [`GpuError`] of the launch.
    pub fn glu_of(
        &self,
        activation: Activation,
        gate: GpuSlice<'_, bf16>,
        (up, up_stride): (GpuSlice<'_, bf16>, usize),
        inner: usize,
        out: GpuSlice<'_, bf16>,
    ) -> Result<(), GpuError> {
        assert!(
            inner > 0 && inner.is_multiple_of(VEC) && up_stride.is_multiple_of(VEC),
            "rows of {inner}, {up_stride} apart, are not multiples of {VEC}"
        );
        let rows = out.len() / inner;
        assert_eq!((out.len(), gate.len()), (rows * inner, out.len()), "gates");
        assert!(
            rows == 0 || up.len() >= (rows - 1) * up_stride + inner,
            "up is not [tokens, {up_stride}]"
        );
        self.gate(activation, [(gate, inner), (up, up_stride)], inner, out)
    }

    fn glu_kernels(&self, activation: Activation) -> &GluKernels {
        match activation {
            Activation::Silu => &self.silu_mul,
            Activation::GeluTanh => &self.gelu_tanh_mul,
        }
    }

    /// Gate and up, and the elements from one of their rows to the next.
    fn gate(
        &self,
        activation: Activation,
        [(gate, gate_stride), (up, up_stride)]: [(GpuSlice<'_, bf16>, usize); 2],
        inner: usize,
        out: GpuSlice<'_, bf16>,
    ) -> Result<(), GpuError> {
        let rows = out.len() / inner;
        // Small blocks, so that a single row is spread over many multiprocessors.
        let threads = if rows < 16 { 64 } else { 256 };
        let blocks_per_row = (inner / VEC).div_ceil(threads);
        let launch = Launch::new([(rows * blocks_per_row) as u32, 1, 1], threads as u32);
        let args = [
            gate.into(),
            up.into(),
            out.into(),
            int(inner),
            int(gate_stride),
            int(up_stride),
            int(blocks_per_row),
        ];
        self.launch(&self.glu_kernels(activation).plain, launch, &args)
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
        self.gather_part(x, row_len(out, rows.len()), rows, out)
    }

    /// The same of as many elements of each row of `x` as there is room for, whose rows are `stride` elements apart: the first of those
    /// that `x` begins with.
    ///
    /// # Errors
    /// [`GpuError`] of the launch.
    pub fn gather_part(
        &self,
        x: GpuSlice<'_, bf16>,
        stride: usize,
        rows: GpuSlice<'_, i32>,
        out: GpuSlice<'_, bf16>,
    ) -> Result<(), GpuError> {
        let n = row_len(out, rows.len());
        assert!(
            n <= stride && stride.is_multiple_of(VEC),
            "parts of {n} of rows of {stride}"
        );
        let args = [x.into(), rows.into(), out.into(), int(n), int(stride)];
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

/// Of what may not be there.
pub(super) fn address(of: Option<GpuSlice<'_, f32>>) -> Arg {
    of.map_or(0, |slice| slice.ptr()).into()
}

pub(super) fn int(value: usize) -> Arg {
    i32::try_from(value)
        .expect("sizes of a step are below 2^31")
        .into()
}
