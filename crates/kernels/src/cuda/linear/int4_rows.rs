//! Products of few rows with weights of four bits, whose inputs are held in registers (`kernels/linear_int4_rows.cu`).

use std::sync::Arc;

use half::bf16;
use plimsoll_device::cuda::{Arg, Function, Gpu, GpuError, GpuSlab, Launch};

use super::cublas_lt::{Operands, Shape};
use super::matrix::{GpuValues, INT4_ROWS, INT4_WINDOW, Int4Group};
use super::stream::NormOperands;
use super::{LinearOutput, exchange};
use crate::cuda::{has_hopper_kernels, load};

/// Constants of the kernels: warps that multiply, threads, bytes of a block, and rows of weights of a tile.
const WARPS: usize = 16;
const ALIGN: usize = 128;
const THREADS: u32 = 640;
const MOST_SHARED_BYTES: usize = 224 << 10;
const TILE_ROWS: usize = 16;
/// Rows of inputs that a product of a warp takes.
const EIGHT: usize = 8;

/// Rows of inputs of the kernels, and windows of inputs that a warp holds at most. With more rows, stream-K is faster.
const KERNELS: [(usize, usize); 3] = [(8, 2), (16, 2), (24, 1)];
/// How many slabs more than the least are considered: they may divide the work better.
const MORE_SLABS: usize = 4;

#[derive(Debug)]
pub(super) struct Int4RowsKernels {
    gpu: Gpu,
    /// By rising number of rows; empty where kernels made for Hopper do not run.
    kernels: Vec<Kernel>,
    workspace: Arc<GpuSlab>,
}

#[derive(Debug)]
struct Kernel {
    group: Int4Group,
    most_rows: usize,
    windows: usize,
    function: Function,
    /// That which makes the norm of the inputs too.
    norm: Option<Function>,
    shared_bytes: usize,
}

impl Int4RowsKernels {
    /// `workspace` has the room of [`exchange`].
    pub(super) fn load(gpu: &Gpu, workspace: &Arc<GpuSlab>) -> Result<Self, GpuError> {
        let mut kernels = Vec::new();
        if has_hopper_kernels(gpu) {
            let module = load(gpu, "linear_int4_rows")?;
            for group in [Int4Group::Of32, Int4Group::Of64, Int4Group::Of128] {
                for (most_rows, windows) in KERNELS {
                    // Registers do not suffice for more.
                    if group == Int4Group::Of32 && most_rows > 16 {
                        continue;
                    }
                    let shared_bytes = shared_bytes(group, most_rows, windows);
                    let function = |name: String| {
                        let function = module.function(&name)?;
                        function.allow_shared(shared_bytes)?;
                        Ok(function)
                    };
                    let inputs = group.inputs();
                    // With more rows a norm of its own is faster.
                    let norm = (most_rows == EIGHT).then(|| format!("linear_int4_rows_norm_{inputs}"));
                    kernels.push(Kernel {
                        group,
                        most_rows,
                        windows,
                        function: function(format!("linear_int4_rows_{inputs}_{most_rows}"))?,
                        norm: norm.map(function).transpose()?,
                        shared_bytes,
                    });
                }
            }
        }
        Ok(Self {
            gpu: gpu.clone(),
            kernels,
            workspace: Arc::clone(workspace),
        })
    }

    /// Into how many slabs k is divided, which decides the order of sums; `None` where they cannot compute a product.
    pub(super) fn slabs(&self, shape: &Shape, output: LinearOutput) -> Option<usize> {
        let kernel = self.kernel(shape).filter(|_| shape.n > 0)?;
        let all = shape.k.div_ceil(INT4_WINDOW);
        let least = all.div_ceil(WARPS * kernel.windows);
        // What the busiest block multiplies, in windows of a tile. Partial sums count for about as much as one for each eight rows.
        let work = |slabs: usize| {
            let blocks = self.blocks(shape, output, slabs) / slabs;
            let exchanged = if slabs > 1 { kernel.most_rows / EIGHT } else { 0 };
            tiles(shape, output).div_ceil(blocks) * (all.div_ceil(slabs) + exchanged)
        };
        let most = (least + MORE_SLABS).min(all).min(self.gpu.info().sm_count);
        let can = |slabs: &usize| self.can(shape, output, *slabs);
        (least..=most)
            .filter(can)
            .min_by_key(|&slabs| (work(slabs), slabs))
    }

    /// Whether they can compute a product in so many slabs.
    pub(super) fn can(&self, shape: &Shape, output: LinearOutput, slabs: usize) -> bool {
        let &Shape { n, k, pitch, .. } = shape;
        let Some(kernel) = self.kernel(shape) else {
            return false;
        };
        let all = k.div_ceil(INT4_WINDOW);
        let sums = tiles(shape, output) * slabs * TILE_ROWS * kernel.most_rows * size_of::<f32>();
        let windows = output.stacked() * n / INT4_ROWS * all;
        // The warps of a block hold all inputs of a slab, and a slab has a block of its own.
        (1..=all.min(self.gpu.info().sm_count)).contains(&slabs)
            && all.div_ceil(slabs) <= WARPS * kernel.windows
            && n.is_multiple_of(INT4_ROWS)
            && (slabs == 1 || sums <= exchange::BYTES)
            // Outputs in bf16 are stored in pairs.
            && (output == LinearOutput::F32 || pitch.is_multiple_of(2))
            && i32::try_from(windows).is_ok()
    }

    /// Whether they can compute a product and the norm ahead of it.
    pub(super) fn can_norm(&self, shape: &Shape, output: LinearOutput, slabs: usize) -> bool {
        // Each block has all inputs of a row, and for each window a block stores sums.
        let blocks = self.blocks(shape, output, slabs);
        slabs == 1
            && self.can(shape, output, slabs)
            && self.kernel(shape).is_some_and(|kernel| kernel.norm.is_some())
            && shape.k.is_multiple_of(INT4_WINDOW)
            && shape.k / INT4_WINDOW <= blocks
    }

    /// The one for the fewest rows that are enough.
    fn kernel(&self, shape: &Shape) -> Option<&Kernel> {
        let fits =
            |kernel: &&Kernel| shape.values == GpuValues::Int4(kernel.group) && kernel.most_rows >= shape.m;
        self.kernels.iter().find(fits)
    }

    /// One for each multiprocessor, or for each tile of a slab.
    fn blocks(&self, shape: &Shape, output: LinearOutput, slabs: usize) -> usize {
        self.gpu.info().sm_count.min(slabs * tiles(shape, output))
    }

    /// Launches a product. `shape.n` counts outputs, of which [`LinearOutput::Glu`] has half as many as rows of weights.
    ///
    /// # Safety
    /// As [`CublasLt::run`](super::cublas_lt::CublasLt::run); they must be able to compute it, as [`Self::can`] says, and
    /// [`Self::can_norm`] if there is one.
    pub(super) unsafe fn run(
        &self,
        shape: &Shape,
        output: LinearOutput,
        slabs: usize,
        operands: &Operands,
        norm: &NormOperands,
    ) -> Result<(), GpuError> {
        let kernel = self.kernel(shape).expect("as `can` says");
        let args: [Arg; 17] = [
            operands.x.into(),
            operands.weight.into(),
            operands.weight_scales.into(),
            operands.bias.into(),
            operands.out.into(),
            exchange::sums(&self.workspace).ptr().into(),
            (shape.m as i32).into(),
            (shape.n as i32).into(),
            (shape.k as i32).into(),
            (shape.pitch as i32).into(),
            output.mode().into(),
            output.activation().into(),
            (slabs as i32).into(),
            norm.delta.into(),
            norm.weight.into(),
            norm.sum.into(),
            norm.eps.into(),
        ];
        let (function, args) = match norm.weight {
            0 => (&kernel.function, &args[..13]),
            _ => (kernel.norm.as_ref().expect("as `can_norm` says"), &args[..]),
        };
        let blocks = self.blocks(shape, output, slabs) as u32;
        let launch = Launch::new([blocks, 1, 1], THREADS)
            .shared(kernel.shared_bytes)
            .pdl(true);
        // SAFETY: the caller's promise; the arguments are those of `LINEAR_INT4_ROWS` and `LINEAR_INT4_ROWS_NORM` in
        // kernels/linear_int4_rows.cu.
        unsafe { self.gpu.launch(function, launch, args) }
    }
}

/// As many stages of weights as fit beside two tiles' sums, inputs on their way to registers and totals of groups of inputs.
fn shared_bytes(group: Int4Group, rows: usize, windows: usize) -> usize {
    let (groups, eights) = (INT4_WINDOW / group.inputs(), rows / EIGHT);
    // Codes and words of groups of two eights of rows, and two barriers.
    let of_window = 2 * INT4_ROWS * (INT4_WINDOW / 2 + groups * size_of::<u32>());
    let stage = WARPS * windows * of_window + 2 * size_of::<u64>();
    let sums = 2 * TILE_ROWS * rows * size_of::<f32>();
    let inputs = EIGHT * INT4_WINDOW / 2 * size_of::<bf16>();
    let totals = windows * groups * eights * EIGHT * size_of::<f32>();
    let others = WARPS * (sums + inputs + totals) + ALIGN;
    ((MOST_SHARED_BYTES - others) / stage * stage + others).next_multiple_of(ALIGN)
}

/// Of a slab: 16 rows of weights, half of them of the gate if there is one.
fn tiles(shape: &Shape, output: LinearOutput) -> usize {
    (output.stacked() * shape.n).div_ceil(TILE_ROWS)
}

#[cfg(test)]
mod tests {
    use super::{Int4Group, KERNELS, shared_bytes};
    use crate::cuda::AssumedGpu;

    #[test]
    fn blocks_fit_on_hopper() {
        for group in [Int4Group::Of32, Int4Group::Of64, Int4Group::Of128] {
            for (rows, windows) in KERNELS {
                // There is none for so many rows in such groups.
                if group == Int4Group::Of32 && rows > 16 {
                    continue;
                }
                let shared = shared_bytes(group, rows, windows);
                assert_eq!(AssumedGpu::H200.blocks(shared), 1, "{rows} rows, {group:?}");
            }
        }
    }
}
