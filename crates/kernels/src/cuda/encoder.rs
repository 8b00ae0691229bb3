mod attention;

use half::bf16;
use plimsoll_core::PatchShape;
use plimsoll_device::cuda::{Arg, Function, Gpu, GpuError, GpuSlice, Launch, Module};

use super::fused::{MAX_NORM, MAX_THREADS, VEC, WARP, int};
use super::load;
use crate::{Activation, Gelu};
use attention::AttentionKernels;
pub use attention::{PatchAttention, PatchSegments};

const THREADS: usize = 256;
/// Elements of rows inside a gated MLP are multiples of it.
const QUAD: usize = 4;

/// What encoders of images do beside their products, and what takes their rows to the decoder: `kernels/encoder.cu`.
#[derive(Debug)]
pub struct EncoderKernels {
    gpu: Gpu,
    attention: AttentionKernels,
    layer_norm: [Function; 2],
    gelu_exact: Function,
    gelu_tanh: Function,
    gate_silu: Function,
    gate_gelu_tanh: Function,
    read_patches: Function,
    add_positions: Function,
    patch_angles: Function,
    rotate_heads: Function,
    average_squares: Function,
    gather_squares: Function,
    keep_rows: Function,
    put_rows: Function,
    add_rows: Function,
    _module: Module,
}

/// How the patches of an image lie: in each frame rows and columns, of which `merge × merge` follow each other in memory.
#[derive(Clone, Copy, Debug)]
pub struct PatchGrid<'a> {
    /// Patches in all: `height × width` for each frame.
    pub patches: usize,
    /// Rows of patches.
    pub height: usize,
    /// Columns of patches.
    pub width: usize,
    /// Rows and columns that follow each other.
    pub merge: usize,
    /// For each group of `merge²` patches in memory, its index line by line; without it they lie in that order.
    pub order: Option<GpuSlice<'a, i32>>,
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
    pub const MAX_HEAD_DIM: usize = AttentionKernels::MAX_HEAD_DIM;

    /// Longest row that [`Self::layer_norm`] takes.
    pub const MAX_NORM: usize = MAX_NORM;

    /// Loads `kernels/encoder.cu`.
    ///
    /// # Errors
    /// [`GpuError`] if this binary carries no code for this GPU.
    pub fn load(gpu: &Gpu) -> Result<Self, GpuError> {
        let module = load(gpu, "encoder")?;
        Ok(Self {
            gpu: gpu.clone(),
            attention: AttentionKernels::load(gpu, &module)?,
            layer_norm: [module.function("layer_norm_1")?, module.function("layer_norm_2")?],
            gelu_exact: module.function("gelu_exact_in_place")?,
            gelu_tanh: module.function("gelu_tanh_in_place")?,
            gate_silu: module.function("gate_silu")?,
            gate_gelu_tanh: module.function("gate_gelu_tanh")?,
            read_patches: module.function("read_patches")?,
            add_positions: module.function("add_positions")?,
            patch_angles: module.function("patch_angles")?,
            rotate_heads: module.function("rotate_heads")?,
            average_squares: module.function("average_squares")?,
            gather_squares: module.function("gather_squares")?,
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
    /// If a length does not fit, rows are neither of one segment nor whole segments, or heads are not a multiple of 8 up to [`Self::MAX_HEAD_DIM`].
    pub fn attention(&self, args: &PatchAttention<'_>) -> Result<(), GpuError> {
        self.attention.forward(args)
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

    /// `activation(gate) × up`: `gate_up` is `[rows, 2 × inner]`, gate first, `out` `[rows, inner]`; one rounding. Twin of
    /// [`glu`](crate::glu), of rows that [`FusedKernels::glu`](super::FusedKernels::glu) does not take: a multiple of 4 elements.
    ///
    /// # Errors
    /// [`GpuError`] of the launch.
    ///
    /// # Panics
    /// If a length does not fit.
    pub fn glu(
        &self,
        activation: Activation,
        gate_up: GpuSlice<'_, bf16>,
        inner: usize,
        out: GpuSlice<'_, bf16>,
    ) -> Result<(), GpuError> {
        assert!(
            inner > 0 && inner.is_multiple_of(QUAD) && out.len().is_multiple_of(inner),
            "out is not rows of {inner}, a multiple of {QUAD}"
        );
        assert_eq!(gate_up.len(), 2 * out.len(), "gate_up is not [rows, 2 x {inner}]");
        let kernel = match activation {
            Activation::Silu => &self.gate_silu,
            Activation::GeluTanh => &self.gate_gelu_tanh,
        };
        let blocks = (out.len() / QUAD).div_ceil(THREADS);
        let args = [gate_up.into(), out.into(), int(inner), (out.len() as u64).into()];
        self.launch(kernel, Launch::new([blocks as u32, 1, 1], THREADS as u32), &args)
    }

    /// Turns the bytes of patches, `[grid.patches, shape.bytes()]`, into the values that the encoder reads, `[grid.patches,
    /// shape.values()]`, in the order of the grid; `levels` are `[3, 256]`. Twin of [`Image::read_patch`](plimsoll_core::Image::read_patch).
    ///
    /// # Errors
    /// [`GpuError`] of the launch.
    ///
    /// # Panics
    /// If a length does not fit.
    pub fn read_patches(
        &self,
        bytes: GpuSlice<'_, u8>,
        levels: GpuSlice<'_, f32>,
        shape: PatchShape,
        grid: PatchGrid<'_>,
        out: GpuSlice<'_, bf16>,
    ) -> Result<(), GpuError> {
        assert_eq!(bytes.len(), grid.patches * shape.bytes(), "bytes of {shape:?}");
        assert_eq!(levels.len(), 3 * 256, "levels of three colours");
        assert_eq!(out.len(), grid.patches * shape.values(), "values of {shape:?}");
        let args = [
            bytes.into(),
            levels.into(),
            grid.order_address(),
            out.into(),
            int(shape.pixels),
            int(shape.frames),
            int(grid.merge * grid.merge),
        ];
        let launch = Launch::new([grid.patches as u32, 1, 1], THREADS as u32);
        self.launch(&self.read_patches, launch, &args)
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
        grid: PatchGrid<'_>,
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
            grid.order_address(),
            int(n),
            int(grid.height),
            int(grid.width),
            int(grid.merge),
            int(side),
        ];
        self.launch(&self.add_positions, per_row(grid.patches, n), &args)
    }

    /// Cosines and sines of all patches, `[grid.patches, pairs, 2]`: the first half of the pairs turns with the row, the other with
    /// the column, pair `i` of a half by `theta^(-i / half)`, of columns with `column_shift` added to `i`. Twin of
    /// [`rope_angles_of_axes`](crate::rope_angles_of_axes).
    ///
    /// # Errors
    /// [`GpuError`] of the launch.
    ///
    /// # Panics
    /// If a length does not fit.
    pub fn patch_angles(
        &self,
        grid: PatchGrid<'_>,
        theta: f64,
        column_shift: f64,
        angles: GpuSlice<'_, f32>,
    ) -> Result<(), GpuError> {
        let pairs = angles.len().checked_div(2 * grid.patches).unwrap_or(0);
        assert_eq!(angles.len(), grid.patches * pairs * 2, "not [patches, pairs, 2]");
        assert!(pairs.is_multiple_of(2), "{pairs} pairs for two axes");
        let args = [
            angles.into(),
            grid.order_address(),
            int(grid.patches),
            int(pairs),
            (theta.log2() as f32).into(),
            (column_shift as f32).into(),
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

    /// Of patches that lie line by line, `width` in each, to `out`, `[squares, merge² × n]`: for each square of `merge × merge` of them all
    /// first elements, then all second ones, and so on.
    ///
    /// # Errors
    /// [`GpuError`] of the launch.
    ///
    /// # Panics
    /// If a length does not fit.
    pub fn gather_squares(
        &self,
        x: GpuSlice<'_, bf16>,
        [n, width, merge]: [usize; 3],
        out: GpuSlice<'_, bf16>,
    ) -> Result<(), GpuError> {
        let rows = squares(x, [n, width, merge]);
        assert_eq!(out.len(), x.len(), "x and out differ");
        let args = [x.into(), out.into(), int(n), int(width), int(merge)];
        let threads = (merge * merge * n).next_multiple_of(WARP).min(MAX_THREADS);
        let launch = Launch::new([rows as u32, 1, 1], threads as u32);
        self.launch(&self.gather_squares, launch, &args)
    }

    /// As [`Self::gather_squares`], but `out`, `[squares, n]`, has the mean of each square: sums in `f32`, one rounding.
    ///
    /// # Errors
    /// [`GpuError`] of the launch.
    ///
    /// # Panics
    /// If a length does not fit.
    pub fn average_squares(
        &self,
        x: GpuSlice<'_, bf16>,
        [n, width, merge]: [usize; 3],
        out: GpuSlice<'_, bf16>,
    ) -> Result<(), GpuError> {
        let rows = squares(x, [n, width, merge]);
        assert!(n.is_multiple_of(VEC), "rows of {n}");
        assert_eq!(out.len(), rows * n, "out is not [{rows}, {n}]");
        let args = [x.into(), out.into(), int(n), int(width), int(merge)];
        self.launch(&self.average_squares, per_row(rows, n), &args)
    }

    /// Row `i` of `x`, `[rows, n]`, which is row `r = order[i]` of an image, or `i` without an order, goes to row
    /// `pages[r / page] × page + r % page` of what is kept.
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
        order: Option<GpuSlice<'_, i32>>,
        (pages, page): (GpuSlice<'_, i32>, usize),
        kept: KeptRows<'_>,
    ) -> Result<(), GpuError> {
        let n = kept.check(x.len(), rows);
        assert_eq!(pages.len(), rows.div_ceil(page), "pages of {page} of {rows} rows");
        assert!(
            order.is_none_or(|order| order.len() == rows),
            "an order of {rows} rows"
        );
        let args = [
            x.into(),
            order.map_or(0, |order| order.ptr()).into(),
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

impl PatchGrid<'_> {
    /// 0 for none.
    fn order_address(&self) -> Arg {
        let squares = self.patches / (self.merge * self.merge);
        assert!(
            self.order.is_none_or(|order| order.len() == squares),
            "an order of {squares} squares"
        );
        self.order.map_or(0, |order| order.ptr()).into()
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

/// How many squares of `merge × merge` patches of `n` elements there are in lines of `width` patches.
fn squares(x: GpuSlice<'_, bf16>, [n, width, merge]: [usize; 3]) -> usize {
    assert!(
        merge > 0 && width > 0 && width.is_multiple_of(merge),
        "lines of {width} are not squares of {merge}"
    );
    assert!(
        n > 0 && x.len().is_multiple_of(merge * width * n),
        "x is not [{merge} x lines, {width}, {n}]"
    );
    x.len() / (merge * merge * n)
}

/// One block per row, one thread per vector as far as there are threads.
fn per_row(rows: usize, n: usize) -> Launch {
    let threads = (n / VEC).next_multiple_of(WARP).clamp(WARP, MAX_THREADS);
    Launch::new([rows as u32, 1, 1], threads as u32)
}
