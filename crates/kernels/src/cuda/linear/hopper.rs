//! Products of few rows on GPUs of Hopper's generation: with bf16 and e4m3 weights by wgmma (`kernels/linear_hopper.cu`), and with weights
//! in four bits (`kernels/linear_hopper_int4.cu`).

use std::sync::Arc;

use plimsoll_device::cuda::{Arg, Function, Gpu, GpuError, GpuSlab, Launch, MatrixRows, MatrixTiles};

use super::choice::Choice;
use super::cublas_lt::{Operands, Shape};
use super::matrix::{Fp8Scaling, GpuValues, INT4_ROWS, Int4Group};
use super::{LinearOutput, exchange};
use crate::cuda::{has_hopper_kernels, load};

/// Constants of the kernels; the first is the rows of weights whose sums a warp group has.
const GROUP_ROWS: usize = 64;
const STAGE_ROW_BYTES: usize = 256;
const INT4_STAGE_INPUTS: usize = 256;
const PIECE: usize = 16;
const ALIGN: usize = 1024;
/// The most rows of each kernel, and its number of stages; with weights in four bits there are as many as fit.
const STAGES: [(usize, usize); 3] = [(8, 11), (16, 10), (MOST_ROWS, 8)];
pub(super) const MOST_ROWS: usize = 32;
/// Shared memory of the kernels for weights in four bits: their `kSharedBytes`, and room to align it.
const INT4_SHARED_BYTES: usize = (226 << 10) + ALIGN;

/// One thread block runs on each multiprocessor; no GPU of that generation has more than this.
const MOST_BLOCKS: usize = 144;
/// Partial sums of all blocks: with weights in four bits a tile has the rows of two warp groups.
const SUM_BYTES: usize = MOST_BLOCKS * 2 * GROUP_ROWS * MOST_ROWS * size_of::<f32>();
const _: () = assert!(SUM_BYTES <= exchange::BYTES, "room for partial sums");

#[derive(Debug)]
pub(super) struct HopperKernels {
    gpu: Gpu,
    /// By type of values, by rising number of rows; empty where kernels made for Hopper do not run.
    kernels: Vec<(GpuValues, Vec<Kernel>)>,
    /// Whether e4m3 values are multiplied as they are.
    fp8_products: bool,
    workspace: Arc<GpuSlab>,
}

#[derive(Debug)]
struct Kernel {
    most_rows: usize,
    function: Function,
    shared_bytes: usize,
}

/// What a block computes at a time.
struct Tile {
    threads: usize,
    /// Rows of weights.
    rows: usize,
    stage_inputs: usize,
}

impl HopperKernels {
    /// `workspace` has the room of [`exchange`].
    pub(super) fn load(gpu: &Gpu, workspace: &Arc<GpuSlab>, fp8_products: bool) -> Result<Self, GpuError> {
        let mut kernels = Vec::new();
        if has_hopper_kernels(gpu) {
            let [module, int4] = ["linear_hopper", "linear_hopper_int4"].map(|name| load(gpu, name));
            let (module, int4) = (module?, int4?);
            let types = [
                ("linear_hopper".to_owned(), GpuValues::Bf16),
                ("linear_hopper_fp8".to_owned(), GpuValues::Fp8(Fp8Scaling::Rows)),
                (
                    "linear_hopper_fp8_blocks".to_owned(),
                    GpuValues::Fp8(Fp8Scaling::Blocks),
                ),
            ];
            let groups = [Int4Group::Of32, Int4Group::Of64, Int4Group::Of128].map(|group| {
                (
                    format!("linear_hopper_int4_{}", group.inputs()),
                    GpuValues::Int4(group),
                )
            });
            for (name, values) in types.into_iter().chain(groups) {
                let module = match values {
                    GpuValues::Int4(_) => &int4,
                    _ => &module,
                };
                let of_rows = STAGES.map(|(most_rows, stages)| -> Result<Kernel, GpuError> {
                    let function = module.function(&format!("{name}_{most_rows}"))?;
                    let shared_bytes = shared_bytes(values, most_rows, stages);
                    function.allow_shared(shared_bytes)?;
                    Ok(Kernel {
                        most_rows,
                        function,
                        shared_bytes,
                    })
                });
                kernels.push((values, of_rows.into_iter().collect::<Result<_, _>>()?));
            }
        }
        Ok(Self {
            gpu: gpu.clone(),
            kernels,
            fp8_products,
            workspace: Arc::clone(workspace),
        })
    }

    /// The choice that stands for these kernels on this GPU.
    pub(super) fn choice(&self) -> Choice {
        Choice::Hopper(self.gpu.info().sm_count)
    }

    /// Whether they can compute a product.
    pub(super) fn can(&self, shape: &Shape, output: LinearOutput) -> bool {
        let &Shape { m, n, k, pitch, .. } = shape;
        // Rows are copied in pieces of 16 bytes, and those of gate and up eight at a time.
        let whole_eights = output.stacked() == 1 || n.is_multiple_of(8);
        let rows_fit = match shape.values {
            GpuValues::Bf16 => (2 * k).is_multiple_of(PIECE) && whole_eights,
            GpuValues::Fp8(scaling) => {
                // Gate and up of a tile must each lie within one block of weights.
                let whole_blocks = output.stacked() == 1 || n.is_multiple_of(GROUP_ROWS / 2);
                self.fp8_products
                    && k.is_multiple_of(PIECE)
                    && whole_eights
                    && (scaling != Fp8Scaling::Blocks || whole_blocks)
            }
            // If gated, rows of gate and up are whole eights too.
            GpuValues::Int4(_) => n.is_multiple_of(INT4_ROWS),
            GpuValues::Gguf(_) => false,
        };
        !self.kernels.is_empty()
            && self.gpu.info().sm_count <= MOST_BLOCKS
            && rows_fit
            && m <= MOST_ROWS
            // Outputs in bf16 are stored in pairs.
            && (output == LinearOutput::F32 || n.is_multiple_of(2) && pitch.is_multiple_of(2))
            // Those of int4 count pieces of weights in 32 bits.
            && u32::try_from(output.stacked() * shape.weight_bytes() / PIECE).is_ok()
    }

    /// Launches a product. `shape.n` counts outputs, of which [`LinearOutput::Glu`] has half as many as rows of weights.
    ///
    /// # Safety
    /// As [`CublasLt::run`](super::cublas_lt::CublasLt::run); they must be able to compute it, as [`Self::can`] says.
    pub(super) unsafe fn run(
        &self,
        shape: &Shape,
        output: LinearOutput,
        operands: &Operands,
    ) -> Result<(), GpuError> {
        let of_type = self.kernels.iter().find(|(values, _)| *values == shape.values);
        let (_, of_rows) = of_type.expect("as `can` says");
        let kernel = of_rows.iter().find(|kernel| kernel.most_rows >= shape.m);
        let kernel = kernel.expect("no more than MOST_ROWS");
        // The kernels for weights in four bits take addresses of inputs and weights instead of maps, and neither strides nor factors of inputs.
        let strides = match shape.values {
            GpuValues::Fp8(scaling) => Some([scaling.input_stride(shape.m), scaling.stride(shape.k)]),
            GpuValues::Bf16 => Some([0, 0]),
            GpuValues::Int4(_) | GpuValues::Gguf(_) => None,
        };
        let mut args: Vec<Arg> = match strides {
            Some(_) => vec![operands.x_scales.into()],
            None => vec![operands.x.into(), operands.weight.into()],
        };
        args.extend::<[Arg; 10]>([
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
        ]);
        args.extend(
            strides
                .into_iter()
                .flatten()
                .map(|stride| Arg::from(stride as i32)),
        );
        let tile = tile(shape.values);
        let tiles = (output.stacked() * shape.n).div_ceil(tile.rows);
        let grid = self
            .gpu
            .info()
            .sm_count
            .min(tiles * shape.k.div_ceil(tile.stage_inputs));
        let launch = Launch::new([grid as u32, 1, 1], tile.threads as u32)
            .shared(kernel.shared_bytes)
            .pdl(true);
        if strides.is_none() {
            // SAFETY: the caller's promise; the arguments are those of `LINEAR_HOPPER_INT4` in kernels/linear_hopper_int4.cu.
            return unsafe { self.gpu.launch(&kernel.function, launch, &args) };
        }
        let row_bytes = shape.weight_bytes() / shape.n;
        let weight = self.gpu.rows_map(&MatrixRows {
            first: operands.weight,
            rows: shape.n,
            row_bytes,
            pair: output.stacked() == 2,
        })?;
        let x = self.gpu.tiles_map(&MatrixTiles {
            first: operands.x,
            rows: shape.m,
            row_bytes,
            copied: kernel.most_rows,
        })?;
        // SAFETY: the caller's promise; the arguments are those of `LINEAR_HOPPER` in kernels/linear_hopper.cu.
        unsafe {
            self.gpu
                .launch_with_maps(&kernel.function, launch, &[&weight, &x], &args)
        }
    }
}

fn tile(values: GpuValues) -> Tile {
    let (threads, rows, stage_inputs) = match values {
        GpuValues::Bf16 => (320, GROUP_ROWS, STAGE_ROW_BYTES / 2),
        GpuValues::Fp8(_) => (320, GROUP_ROWS, STAGE_ROW_BYTES),
        GpuValues::Int4(_) => (768, 2 * GROUP_ROWS, INT4_STAGE_INPUTS),
        GpuValues::Gguf(_) => unreachable!("as `can` says"),
    };
    Tile {
        threads,
        rows,
        stage_inputs,
    }
}

/// Stages of weights and inputs with their barriers, sums of those that share a tile, and alignment.
fn shared_bytes(values: GpuValues, rows: usize, stages: usize) -> usize {
    if matches!(values, GpuValues::Int4(_)) {
        return INT4_SHARED_BYTES;
    }
    let stage = (GROUP_ROWS + rows) * STAGE_ROW_BYTES + 3 * size_of::<u64>();
    (stages * stage + rows * GROUP_ROWS * size_of::<f32>()).next_multiple_of(ALIGN) + ALIGN
}

#[cfg(test)]
mod tests {
    use super::{GpuValues, Int4Group, STAGES, shared_bytes};
    use crate::cuda::{AssumedGpu, Fp8Scaling};

    #[test]
    fn blocks_fit_on_hopper() {
        let fp8 = GpuValues::Fp8(Fp8Scaling::Blocks);
        for values in [GpuValues::Bf16, fp8, GpuValues::Int4(Int4Group::Of32)] {
            for (rows, stages) in STAGES {
                let shared = shared_bytes(values, rows, stages);
                assert_eq!(AssumedGpu::H200.blocks(shared), 1, "{rows} rows of {values:?}");
            }
        }
    }
}
