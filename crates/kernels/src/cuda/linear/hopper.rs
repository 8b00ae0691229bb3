//! Products of few rows with bf16 or e4m3 weights, by wgmma (`kernels/linear_hopper.cu`).

use std::sync::Arc;

use plimsoll_device::cuda::{Arg, Function, Gpu, GpuError, GpuSlab, GpuSlice, Launch};

use super::LinearOutput;
use super::choice::Choice;
use super::cublas_lt::{Operands, Shape, WORKSPACE};
use super::matrix::{Fp8Scaling, GpuValues};
use crate::Activation;
use crate::cuda::{has_hopper_kernels, load};

/// Constants of `kernels/linear_hopper.cu`.
const THREADS: usize = 416;
const FEATURES: usize = 64;
const STAGE_ROW_BYTES: usize = 256;
const PIECE: usize = 16;
const ALIGN: usize = 1024;
/// The most rows of each kernel, and its number of stages.
const STAGES: [(usize, usize); 3] = [(8, 11), (16, 10), (MOST_ROWS, 8)];
const MOST_ROWS: usize = 32;

/// One thread block runs on each multiprocessor; no GPU of that generation has more than this.
const MOST_BLOCKS: usize = 144;
/// Behind cuBLASLt's part of the workspace: partial sums that thread blocks leave to each other.
pub(super) const SUM_BYTES: usize = MOST_BLOCKS * FEATURES * MOST_ROWS * size_of::<f32>();
/// Every byte of a sum that is not there yet.
const NONE: u8 = 0xff;

#[derive(Debug)]
pub(super) struct HopperKernels {
    gpu: Gpu,
    /// By type of values, one for each of [`STAGES`]; empty where kernels made for Hopper do not run.
    kernels: Vec<(GpuValues, Vec<Function>)>,
    /// Whether e4m3 values are multiplied as they are.
    fp8_products: bool,
    workspace: Arc<GpuSlab>,
}

impl HopperKernels {
    /// `workspace` has [`SUM_BYTES`] behind cuBLASLt's [`WORKSPACE`], which nobody else uses.
    pub(super) fn load(gpu: &Gpu, workspace: &Arc<GpuSlab>, fp8_products: bool) -> Result<Self, GpuError> {
        let mut kernels = Vec::new();
        if has_hopper_kernels(gpu) {
            let module = load(gpu, "linear_hopper")?;
            let types = [
                ("linear_hopper", GpuValues::Bf16),
                ("linear_hopper_fp8", GpuValues::Fp8(Fp8Scaling::Rows)),
                ("linear_hopper_fp8_blocks", GpuValues::Fp8(Fp8Scaling::Blocks)),
            ];
            for (name, values) in types {
                let functions = STAGES.map(|(rows, stages)| -> Result<Function, GpuError> {
                    let function = module.function(&format!("{name}_{rows}"))?;
                    function.allow_shared(shared_bytes(rows, stages))?;
                    Ok(function)
                });
                kernels.push((values, functions.into_iter().collect::<Result<_, _>>()?));
            }
            gpu.fill(sums(workspace), NONE)?;
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
        let &Shape { m, n, pitch, .. } = shape;
        let row_bytes = row_bytes(shape);
        // Gate and up of a tile must each lie within one block of weights.
        let whole_blocks = shape.scaling() != Some(Fp8Scaling::Blocks)
            || output.stacked() == 1
            || n.is_multiple_of(FEATURES / 2);
        !self.kernels.is_empty()
            && self.gpu.info().sm_count <= MOST_BLOCKS
            && (self.fp8_products || shape.scaling().is_none())
            && whole_blocks
            && m <= MOST_ROWS
            // Inputs are copied 16 bytes at a time, and bf16 outputs are stored in pairs.
            && row_bytes.is_some_and(|bytes| bytes.is_multiple_of(PIECE))
            && (output == LinearOutput::F32 || n.is_multiple_of(2) && pitch.is_multiple_of(2))
            // The kernel counts pieces of weights in 32 bits.
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
        let at = STAGES.iter().position(|(rows, _)| *rows >= shape.m);
        let at = at.expect("no more than MOST_ROWS");
        let (rows, stages) = STAGES[at];
        let activation = match output {
            LinearOutput::Glu(Activation::GeluTanh) => 1,
            LinearOutput::Glu(Activation::Silu) | LinearOutput::Bf16 | LinearOutput::F32 => 0,
        };
        let (x_stride, stride) = match shape.scaling() {
            Some(scaling) => (scaling.input_stride(shape.m), scaling.stride(shape.k)),
            None => (0, 0),
        };
        let args: [Arg; 15] = [
            operands.x.into(),
            operands.weight.into(),
            operands.x_scales.into(),
            operands.weight_scales.into(),
            operands.bias.into(),
            operands.out.into(),
            sums(&self.workspace).ptr().into(),
            (shape.m as i32).into(),
            (shape.n as i32).into(),
            (shape.k as i32).into(),
            (shape.pitch as i32).into(),
            output.mode().into(),
            activation.into(),
            (x_stride as i32).into(),
            (stride as i32).into(),
        ];
        let tiles = (output.stacked() * shape.n).div_ceil(FEATURES);
        let row = row_bytes(shape).expect("as `can` says");
        let grid = self
            .gpu
            .info()
            .sm_count
            .min(tiles * row.div_ceil(STAGE_ROW_BYTES));
        let launch = Launch::new([grid as u32, 1, 1], THREADS as u32)
            .shared(shared_bytes(rows, stages))
            .pdl(true);
        let of_type = self.kernels.iter().find(|(values, _)| *values == shape.values);
        let (_, functions) = of_type.expect("as `can` says");
        // SAFETY: the caller's promise; the arguments are those of `LINEAR_HOPPER` in kernels/linear_hopper.cu.
        unsafe { self.gpu.launch(&functions[at], launch, &args) }
    }
}

/// Bytes of a row of weights, of the types that these kernels have.
fn row_bytes(shape: &Shape) -> Option<usize> {
    match shape.values {
        GpuValues::Bf16 => Some(2 * shape.k),
        GpuValues::Fp8(_) => Some(shape.k),
        GpuValues::Int4(_) | GpuValues::Gguf(_) => None,
    }
}

/// Behind cuBLASLt's part of the workspace.
fn sums(workspace: &GpuSlab) -> GpuSlice<'_, u8> {
    workspace.slice().range(WORKSPACE..WORKSPACE + SUM_BYTES)
}

/// Stages of weights and inputs with their barriers, sums of a warp group, and alignment.
fn shared_bytes(rows: usize, stages: usize) -> usize {
    let stage = (FEATURES + rows) * STAGE_ROW_BYTES + 2 * size_of::<u64>();
    (stages * stage + rows * FEATURES * size_of::<f32>()).next_multiple_of(ALIGN) + ALIGN
}
