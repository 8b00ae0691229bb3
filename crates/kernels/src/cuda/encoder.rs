use std::f32::consts::LOG2_E;
use std::ops::Range;

use half::bf16;
use plimsoll_device::cuda::{Arg, Function, Gpu, GpuError, GpuSlice, Launch, Module};

use super::fused::int;
use super::load;
use crate::Gelu;

/// Elements of one 16-byte access; rows are multiples of it.
const VEC: usize = 8;
const MAX_THREADS: usize = 1024;
const WARP: usize = 32;
/// Longest row of a norm.
const MAX_NORM: usize = 2 * VEC * MAX_THREADS;
const THREADS: usize = 256;
const ATTENTION_THREADS: u32 = 128;

/// What encoders of images do beside their products, and what takes their rows to the decoder: `kernels/encoder.cu`.
#[derive(Debug)]
pub struct EncoderKernels {
    gpu: Gpu,
    /// From the smallest heads up.
    attention: [(AttentionShape, Function); ATTENTION_SHAPES.len()],
    layer_norm: [Function; 2],
    gelu_exact: Function,
    gelu_tanh: Function,
    add_positions: Function,
    patch_angles: Function,
    rotate_heads: Function,
    keep_rows: Function,
    put_rows: Function,
    add_rows: Function,
    _module: Module,
}

/// A size that heads are padded to.
#[derive(Clone, Copy, Debug)]
struct AttentionShape {
    dim: usize,
    /// Queries of a block of threads.
    rows: usize,
}

const ATTENTION_SHAPES: [AttentionShape; 3] = [
    AttentionShape { dim: 64, rows: 128 },
    AttentionShape { dim: 80, rows: 128 },
    AttentionShape { dim: 128, rows: 64 },
];

impl AttentionShape {
    /// Keys of a tile.
    const KEYS: usize = 64;

    fn shared(self) -> usize {
        (self.rows + 4 * Self::KEYS) * (self.dim + VEC) * size_of::<bf16>()
    }
}

/// How the patches of an image lie: in each frame rows and columns, of which `merge × merge` follow each other in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PatchGrid {
    /// Patches in all: `height × width` for each frame.
    pub patches: usize,
    /// Rows of patches.
    pub height: usize,
    /// Columns of patches.
    pub width: usize,
    /// Rows and columns that follow each other.
    pub merge: usize,
}

/// Attention in which the rows of a segment, a frame's patches, see each other.
#[derive(Clone, Debug)]
pub struct PatchAttention<'a> {
    /// `[rows, 3, heads, head_dim]`: q, k and v.
    pub qkv: GpuSlice<'a, bf16>,
    /// Heads, of q as of k and v.
    pub heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Rows that see each other: consecutive ones.
    pub segment: usize,
    /// Those whose attention is computed: rows of one segment, or whole segments.
    pub rows: Range<usize>,
    /// Multiplies the scores; more than 0.
    pub scale: f32,
    /// `[rows, heads, head_dim]`.
    pub out: GpuSlice<'a, bf16>,
}

/// Weight and bias `[n]` of a norm, in `f32`.
#[derive(Clone, Copy, Debug)]
pub struct GpuLayerNorm<'a> {
    /// `[n]`.
    pub weight: GpuSlice<'a, f32>,
    /// `[n]`.
    pub bias: GpuSlice<'a, f32>,
    /// Added to the variance.
    pub eps: f32,
}

/// Rows of images that are kept, `[rows, stride]`: of each, `n` elements from `column` on.
#[derive(Clone, Copy, Debug)]
pub struct KeptRows<'a> {
    /// All of them.
    pub rows: GpuSlice<'a, bf16>,
    /// Elements of a row.
    pub stride: usize,
    /// First of those that are read or written.
    pub column: usize,
}

impl EncoderKernels {
    /// Largest head that attention takes: multiples of 8 up to it.
    pub const MAX_HEAD_DIM: usize = ATTENTION_SHAPES[ATTENTION_SHAPES.len() - 1].dim;

    /// Longest row that [`Self::layer_norm`] takes.
    pub const MAX_NORM: usize = MAX_NORM;

    /// Loads `kernels/encoder.cu`.
    ///
    /// # Errors
    /// [`GpuError`] if this binary carries no code for this GPU.
    pub fn load(gpu: &Gpu) -> Result<Self, GpuError> {
        let module = load(gpu, "encoder")?;
        let attention = |shape: AttentionShape| {
            let function = module.function(&format!("encoder_attention_{}", shape.dim))?;
            function.allow_shared(shape.shared())?;
            Ok::<_, GpuError>((shape, function))
        };
        let [small, middle, large] = ATTENTION_SHAPES;
        Ok(Self {
            gpu: gpu.clone(),
            attention: [attention(small)?, attention(middle)?, attention(large)?],
            layer_norm: [module.function("layer_norm_1")?, module.function("layer_norm_2")?],
            gelu_exact: module.function("gelu_exact_in_place")?,
            gelu_tanh: module.function("gelu_tanh_in_place")?,
            add_positions: module.function("add_positions")?,
            patch_angles: module.function("patch_angles")?,
            rotate_heads: module.function("rotate_heads")?,
            keep_rows: module.function("keep_rows")?,
            put_rows: module.function("put_rows")?,
            add_rows: module.function("add_rows")?,
            _module: module,
        })
    }

    /// Twin of [`attention`](crate::attention()) with [`Sees::Run`](crate::Sees::Run), each segment a run.
    ///
    /// # Errors
    /// [`GpuError`] of the launch.
    ///
    /// # Panics
    /// If a length does not fit, rows are no whole segments, or heads are not a multiple of 8 up to [`Self::MAX_HEAD_DIM`].
    pub fn attention(&self, args: &PatchAttention<'_>) -> Result<(), GpuError> {
        let PatchAttention {
            qkv,
            heads,
            head_dim: dim,
            segment,
            ref rows,
            scale,
            out,
        } = *args;
        let width = heads * dim;
        assert!(width > 0 && segment > 0, "no heads, or no rows");
        assert!(
            dim.is_multiple_of(VEC),
            "heads of {dim} are not a multiple of {VEC}"
        );
        assert!(
            out.len().is_multiple_of(width * segment),
            "out is not [segments, {segment}, {width}]"
        );
        assert_eq!(qkv.len(), 3 * out.len(), "qkv is not [rows, 3, {width}]");
        assert!(
            rows.end * width <= out.len(),
            "{rows:?} of {} rows",
            out.len() / width
        );
        let fitting = self.attention.iter().find(|(shape, _)| shape.dim >= dim);
        let (shape, function) = fitting.unwrap_or_else(|| panic!("heads of {dim}"));
        if rows.is_empty() {
            return Ok(());
        }
        // Of how many segments which rows.
        let first = rows.start / segment * segment;
        let (begin, end) = (rows.start - first, rows.end - first);
        let (segments, end) = match end <= segment {
            true => (1, end),
            false => (end / segment, segment),
        };
        assert!(
            segments == 1 || (begin == 0 && rows.end == first + segments * segment),
            "rows {rows:?} of segments of {segment} are neither in one nor all of some"
        );
        let out = out.range(first * width..out.len());
        let part = |index: usize| Arg::from(qkv.range((3 * first + index) * width..qkv.len()));
        let args = [
            part(0),
            part(1),
            part(2),
            out.into(),
            int(3 * width),
            int(dim),
            int(segment),
            int(begin),
            int(end),
            (scale * LOG2_E).into(),
        ];
        let tiles = (end - begin).div_ceil(shape.rows);
        let grid = [tiles as u32, heads as u32, segments as u32];
        let launch = Launch::new(grid, ATTENTION_THREADS).shared(shape.shared());
        self.launch(function, launch, &args)
    }

    /// `hidden += delta`, if there is any, rounded to `bf16`; then the norm of its rows of `weight.len()` elements into `out`. Sums in
    /// `f32`, one rounding. Twin of [`layer_norm`](crate::layer_norm).
    ///
    /// # Errors
    /// [`GpuError`] of the launch.
    ///
    /// # Panics
    /// If lengths differ, or rows are not a multiple of 8 elements up to [`Self::MAX_NORM`].
    pub fn layer_norm(
        &self,
        hidden: GpuSlice<'_, bf16>,
        delta: Option<GpuSlice<'_, bf16>>,
        norm: GpuLayerNorm<'_>,
        out: GpuSlice<'_, bf16>,
    ) -> Result<(), GpuError> {
        let n = norm.weight.len();
        assert_eq!(norm.bias.len(), n, "weight and bias differ");
        assert!(
            n > 0 && n.is_multiple_of(VEC) && n <= MAX_NORM && out.len().is_multiple_of(n),
            "out is not rows of {n}, a multiple of {VEC} up to {MAX_NORM}"
        );
        assert_eq!(hidden.len(), out.len(), "hidden and out differ");
        if let Some(delta) = delta {
            assert_eq!(delta.len(), out.len(), "delta and out differ");
        }
        let vecs = if n / VEC > MAX_THREADS { 2 } else { 1 };
        let threads = (n / VEC).div_ceil(vecs).next_multiple_of(WARP);
        let args = [
            hidden.into(),
            delta.map_or(0, |delta| delta.ptr()).into(),
            norm.weight.into(),
            norm.bias.into(),
            out.into(),
            int(n),
            norm.eps.into(),
        ];
        let launch = Launch::new([(out.len() / n) as u32, 1, 1], threads as u32);
        self.launch(&self.layer_norm[vecs - 1], launch, &args)
    }

    /// In place. Twin of [`gelu`](crate::gelu()).
    ///
    /// # Errors
    /// [`GpuError`] of the launch.
    ///
    /// # Panics
    /// If it is not a multiple of 8 elements.
    pub fn gelu(&self, form: Gelu, x: GpuSlice<'_, bf16>) -> Result<(), GpuError> {
        assert!(x.len().is_multiple_of(VEC), "{} elements", x.len());
        let kernel = match form {
            Gelu::Exact => &self.gelu_exact,
            Gelu::Tanh => &self.gelu_tanh,
        };
        let blocks = (x.len() / VEC).div_ceil(THREADS);
        let args = [x.into(), (x.len() as u64).into()];
        self.launch(kernel, Launch::new([blocks as u32, 1, 1], THREADS as u32), &args)
    }

    /// Adds what a table of positions, `[side², n]`, has at the place of each patch, to `hidden`, `[grid.patches, n]`: interpolated
    /// between the four next to it where table and grid have the same corners.
    ///
    /// # Errors
    /// [`GpuError`] of the launch.
    ///
    /// # Panics
    /// If a length does not fit.
    pub fn add_positions(
        &self,
        hidden: GpuSlice<'_, bf16>,
        table: GpuSlice<'_, f32>,
        side: usize,
        grid: PatchGrid,
    ) -> Result<(), GpuError> {
        let n = table.len().checked_div(side * side).unwrap_or(0);
        assert!(n > 0 && n.is_multiple_of(VEC), "rows of {n}");
        assert_eq!(
            table.len(),
            side * side * n,
            "the table is not [{side} x {side}, n]"
        );
        assert_eq!(hidden.len(), grid.patches * n, "hidden is not [patches, {n}]");
        let args = [
            hidden.into(),
            table.into(),
            int(n),
            int(grid.height),
            int(grid.width),
            int(grid.merge),
            int(side),
        ];
        self.launch(&self.add_positions, per_row(grid.patches, n), &args)
    }

    /// Cosines and sines of all patches, `[grid.patches, pairs, 2]`: the first half of the pairs turns with the row, the other with
    /// the column. Twin of [`rope_angles_of_axes`](crate::rope_angles_of_axes).
    ///
    /// # Errors
    /// [`GpuError`] of the launch.
    ///
    /// # Panics
    /// If a length does not fit.
    pub fn patch_angles(
        &self,
        grid: PatchGrid,
        theta: f64,
        angles: GpuSlice<'_, f32>,
    ) -> Result<(), GpuError> {
        let pairs = angles.len().checked_div(2 * grid.patches).unwrap_or(0);
        assert_eq!(angles.len(), grid.patches * pairs * 2, "not [patches, pairs, 2]");
        assert!(pairs.is_multiple_of(2), "{pairs} pairs for two axes");
        let args = [
            angles.into(),
            int(grid.patches),
            int(pairs),
            (theta.log2() as f32).into(),
            int(grid.height),
            int(grid.width),
            int(grid.merge),
        ];
        let blocks = (grid.patches * pairs).div_ceil(THREADS);
        let launch = Launch::new([blocks as u32, 1, 1], THREADS as u32);
        self.launch(&self.patch_angles, launch, &args)
    }

    /// Rotates q and k of `qkv`, `[rows, 3, heads, 2 × pairs]`, by `angles`, `[rows, pairs, 2]`: element `i` with `i + pairs`.
    ///
    /// # Errors
    /// [`GpuError`] of the launch.
    ///
    /// # Panics
    /// If a length does not fit, or pairs are not a multiple of 4.
    pub fn rotate(
        &self,
        qkv: GpuSlice<'_, bf16>,
        heads: usize,
        angles: GpuSlice<'_, f32>,
        rows: usize,
    ) -> Result<(), GpuError> {
        let pairs = angles.len().checked_div(2 * rows).unwrap_or(0);
        assert_eq!(angles.len(), rows * pairs * 2, "not [rows, pairs, 2]");
        assert!(pairs.is_multiple_of(4), "{pairs} pairs");
        assert_eq!(
            qkv.len(),
            rows * 6 * heads * pairs,
            "qkv is not [rows, 3, {heads}, 2 x {pairs}]"
        );
        let args = [
            qkv.into(),
            angles.into(),
            int(rows),
            int(6 * heads * pairs),
            int(2 * heads),
            int(pairs),
        ];
        let blocks = (rows * 2 * heads * pairs / 4).div_ceil(THREADS);
        let launch = Launch::new([blocks as u32, 1, 1], THREADS as u32);
        self.launch(&self.rotate_heads, launch, &args)
    }

    /// Row `i` of `x`, `[rows, n]`, goes to row `pages[i / page] × page + i % page` of what is kept.
    ///
    /// # Errors
    /// [`GpuError`] of the launch.
    ///
    /// # Panics
    /// If a length does not fit.
    pub fn keep_rows(
        &self,
        x: GpuSlice<'_, bf16>,
        rows: usize,
        (pages, page): (GpuSlice<'_, i32>, usize),
        kept: KeptRows<'_>,
    ) -> Result<(), GpuError> {
        let n = kept.check(x.len(), rows);
        assert_eq!(pages.len(), rows.div_ceil(page), "pages of {page} of {rows} rows");
        let args = [
            x.into(),
            pages.into(),
            kept.rows.into(),
            int(n),
            int(kept.stride),
            int(kept.column),
            int(page),
        ];
        self.launch(&self.keep_rows, per_row(rows, n), &args)
    }

    /// For each two numbers of `pairs`, a row of `hidden`, `[rows, n]`, becomes a row of what is kept.
    ///
    /// # Errors
    /// [`GpuError`] of the launch.
    ///
    /// # Panics
    /// If a length does not fit.
    pub fn put_rows(
        &self,
        kept: KeptRows<'_>,
        pairs: GpuSlice<'_, i32>,
        hidden: GpuSlice<'_, bf16>,
        rows: usize,
    ) -> Result<(), GpuError> {
        self.take_rows(&self.put_rows, kept, pairs, hidden, rows)
    }

    /// As [`Self::put_rows`], but what is kept is added.
    ///
    /// # Errors
    /// [`GpuError`] of the launch.
    ///
    /// # Panics
    /// If a length does not fit.
    pub fn add_rows(
        &self,
        kept: KeptRows<'_>,
        pairs: GpuSlice<'_, i32>,
        hidden: GpuSlice<'_, bf16>,
        rows: usize,
    ) -> Result<(), GpuError> {
        self.take_rows(&self.add_rows, kept, pairs, hidden, rows)
    }

    fn take_rows(
        &self,
        kernel: &Function,
        kept: KeptRows<'_>,
        pairs: GpuSlice<'_, i32>,
        hidden: GpuSlice<'_, bf16>,
        rows: usize,
    ) -> Result<(), GpuError> {
        let n = kept.check(hidden.len(), rows);
        assert!(pairs.len().is_multiple_of(2), "a pair is two numbers");
        let args = [
            kept.rows.into(),
            pairs.into(),
            hidden.into(),
            int(n),
            int(kept.stride),
            int(kept.column),
        ];
        self.launch(kernel, per_row(pairs.len() / 2, n), &args)
    }

    fn launch(&self, kernel: &Function, launch: Launch, args: &[Arg]) -> Result<(), GpuError> {
        if launch.grid[0] == 0 {
            return Ok(());
        }
        // SAFETY: the methods pass what the kernels declare and check the lengths; indices are the caller's promise.
        unsafe { self.gpu.launch(kernel, launch.pdl(true), args) }
    }
}

impl KeptRows<'_> {
    /// Elements of each of `rows` rows of `len` elements in all, which what is kept has from its column on.
    fn check(&self, len: usize, rows: usize) -> usize {
        let n = len.checked_div(rows).unwrap_or(0);
        assert_eq!(len, rows * n, "not {rows} rows");
        assert!(
            [n, self.stride, self.column]
                .iter()
                .all(|len| len.is_multiple_of(VEC)),
            "{n} elements from {} on of {}",
            self.column,
            self.stride
        );
        assert!(
            self.column + n <= self.stride && self.rows.len().is_multiple_of(self.stride.max(1)),
            "{n} elements from {} on of rows of {}",
            self.column,
            self.stride
        );
        n
    }
}

/// One block per row, one thread per vector as far as there are threads.
fn per_row(rows: usize, n: usize) -> Launch {
    let threads = (n / VEC).next_multiple_of(WARP).clamp(WARP, MAX_THREADS);
    Launch::new([rows as u32, 1, 1], threads as u32)
}
