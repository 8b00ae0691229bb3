//! Our own kernels for few rows, which are bound by reading the weights: `kernels/linear.cu`, and `kernels/linear_int4_few.cu` for weights of
//! four bits where all of x fits in shared memory.

use plimsoll_device::cuda::{Arg, Function, Gpu, GpuError, Launch};

use super::cublas_lt::{Operands, Shape};
use super::cuts::{Cuts, LinearCut, WARP, WARPS, most_rows, tiles};
use super::output::LinearOutput;
use super::{Fp8Scaling, GpuValues, Int4Group};
use crate::{Activation, GgufFormat};

/// The add and RMSNorm ahead of a product; `Norm` of `kernels/linear.cu`. Device addresses.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct NormOperands {
    pub(super) delta: u64,
    /// 0 for none of this.
    pub(super) weight: u64,
    pub(super) sum: u64,
    pub(super) eps: f32,
}

/// The kernels for one type of weights: for up to 8, 16 and perhaps 32 rows, by the activation where outputs are gated, which as an
/// argument would cost a register.
#[derive(Debug)]
struct Activations {
    silu: Vec<Function>,
    gelu_tanh: Vec<Function>,
}

impl Activations {
    fn of(&self, output: LinearOutput) -> &[Function] {
        match output {
            LinearOutput::Glu(Activation::GeluTanh) => &self.gelu_tanh,
            LinearOutput::Glu(Activation::Silu) | LinearOutput::Bf16 | LinearOutput::F32 => &self.silu,
        }
    }
}

#[derive(Debug)]
pub(super) struct StreamKernels {
    gpu: Gpu,
    /// By the weights.
    functions: Vec<(GpuValues, Activations)>,
    /// For up to 8 rows and weights of four bits, if all of x fits: one kernel each.
    few: Vec<(Int4Group, Activations)>,
    /// Stands for the small kernels between products.
    pause: Function,
    /// What they can compute on this GPU.
    pub(super) cuts: Cuts,
}

impl StreamKernels {
    pub(super) fn load(gpu: &Gpu) -> Result<Self, GpuError> {
        let module = crate::cuda::load(gpu, "linear")?;
        let functions = |name: &str, values| -> Result<Vec<Function>, GpuError> {
            let rows = [8, 16, 32].into_iter().filter(|&rows| rows <= most_rows(values));
            rows.map(|rows: usize| {
                let function = module.function(&format!("{name}_{rows}"))?;
                function.allow_shared(gpu.info().max_shared_bytes)?;
                Ok(function)
            })
            .collect()
        };
        let of_type = |(name, values): (&str, GpuValues)| -> Result<_, GpuError> {
            let activations = Activations {
                silu: functions(&format!("{name}_silu"), values)?,
                gelu_tanh: functions(&format!("{name}_gelu_tanh"), values)?,
            };
            Ok((values, activations))
        };
        let types = [
            ("linear", GpuValues::Bf16),
            ("linear_fp8", GpuValues::Fp8(Fp8Scaling::Rows)),
            ("linear_fp8_blocks", GpuValues::Fp8(Fp8Scaling::Blocks)),
            ("linear_int4_32", GpuValues::Int4(Int4Group::Of32)),
            ("linear_int4_64", GpuValues::Int4(Int4Group::Of64)),
            ("linear_int4_128", GpuValues::Int4(Int4Group::Of128)),
        ];
        let of_gguf =
            GgufFormat::ALL.map(|format| (format!("linear_{}", format.suffix()), GpuValues::Gguf(format)));
        let types = types
            .into_iter()
            .chain(of_gguf.iter().map(|(name, values)| (name.as_str(), *values)));
        let types = types.map(of_type).collect::<Result<Vec<_>, _>>()?;
        let few = crate::cuda::load(gpu, "linear_int4_few")?;
        let few = [Int4Group::Of32, Int4Group::Of64, Int4Group::Of128].map(|group| -> Result<_, GpuError> {
            let function = |activation: &str| -> Result<Vec<Function>, GpuError> {
                let function = few.function(&format!("linear_int4_few_{}_{activation}", group.inputs()))?;
                function.allow_shared(gpu.info().max_shared_bytes)?;
                Ok(vec![function])
            };
            let activations = Activations {
                silu: function("silu")?,
                gelu_tanh: function("gelu_tanh")?,
            };
            Ok((group, activations))
        });
        let mut clusters = [gpu.info().sm_count, 0, 0, 0];
        if gpu.info().compute_capability >= (9, 0) {
            for (shift, clusters) in clusters.iter_mut().enumerate().skip(1) {
                let whole = gpu.info().max_shared_bytes;
                *clusters = types[0].1.silu[0].clusters_at_once(1 << shift, WARPS * WARP, whole)?;
            }
        }
        Ok(Self {
            gpu: gpu.clone(),
            functions: types,
            few: few.into_iter().collect::<Result<_, _>>()?,
            pause: module.function("linear_pause")?,
            cuts: Cuts {
                sm_count: gpu.info().sm_count,
                most_shared: gpu.info().max_shared_bytes,
                clusters,
            },
        })
    }

    /// Launches a kernel that takes 2 us on an H100 or H200.
    pub(super) fn pause(&self) -> Result<(), GpuError> {
        let launch = Launch::new([1, 1, 1], 32).pdl(true);
        // SAFETY: it takes no arguments.
        unsafe { self.gpu.launch(&self.pause, launch, &[]) }
    }

    /// Launches a product. `shape.n` counts outputs, of which [`LinearOutput::Glu`] has half as many as rows of weights.
    ///
    /// # Safety
    /// As [`CublasLt::run`](super::cublas_lt::CublasLt::run); the cut must be one that [`Cuts::can`] compute the product, and
    /// [`Cuts::can_norm`] if there is one.
    pub(super) unsafe fn run(
        &self,
        shape: &Shape,
        output: LinearOutput,
        cut: LinearCut,
        operands: &Operands,
        norm: &NormOperands,
    ) -> Result<(), GpuError> {
        let stride = match shape.values {
            GpuValues::Bf16 | GpuValues::Int4(_) => 0,
            GpuValues::Fp8(scaling) => scaling.stride(shape.k),
            GpuValues::Gguf(format) => format.pitch(shape.k),
        };
        let args: [Arg; 17] = [
            operands.x.into(),
            operands.weight.into(),
            operands.bias.into(),
            operands.out.into(),
            (shape.m as i32).into(),
            (shape.n as i32).into(),
            (shape.k as i32).into(),
            (cut.row_warps as i32).into(),
            output.mode().into(),
            norm.delta.into(),
            norm.weight.into(),
            norm.sum.into(),
            norm.eps.into(),
            operands.weight_scales.into(),
            (stride as i32).into(),
            (shape.pitch as i32).into(),
            (self.cuts.input_bytes(shape, cut) as i32).into(),
        ];
        let grid = self.cuts.clusters_of(shape.n, output, cut) * cut.cluster;
        let (function, warps, args) = match shape.values {
            GpuValues::Int4(group) if self.cuts.few_bytes(shape, cut).is_some() => {
                let of_group = self.few.iter().find(|(of, _)| *of == group);
                let (_, of_group) = of_group.expect("there are kernels for all groups");
                // One warp adds what the others multiply. Room for inputs is what they need.
                (&of_group.of(output)[0], WARPS + 1, &args[..args.len() - 1])
            }
            values => {
                let of_type = self.functions.iter().find(|(of, _)| *of == values);
                let (_, of_type) = of_type.expect("there are kernels for all weights");
                (
                    &of_type.of(output)[tiles(shape.m).trailing_zeros() as usize],
                    WARPS,
                    &args[..],
                )
            }
        };
        let launch = Launch::new([grid as u32, 1, 1], (warps * WARP) as u32)
            .shared(self.cuts.launched_bytes(shape, output, cut))
            .cluster(cut.cluster as u32)
            .pdl(true);
        // SAFETY: the caller's promise; the arguments are those of `LINEAR` in kernels/linear.cu and of `LINEAR_INT4_FEW` in
        // kernels/linear_int4_few.cu.
        unsafe { self.gpu.launch(function, launch, args) }
    }
}
