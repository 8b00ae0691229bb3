//! Layers of one row that follow each other in one launch: what `kernels/linear_chain.cu`, `kernels/moe_chain.cu` and
//! `kernels/moe_chain_sandwich.cu` share (`kernels/include/chain.cuh`), and partly `kernels/layer_chain.cu`.

use bytemuck::{Pod, Zeroable};
use half::bf16;
use plimsoll_device::cuda::{Arg, Function, Gpu, GpuError, GpuSlice};

use super::linear::{GpuLinear, GpuMatrix};
use super::{GpuNorm, has_hopper_kernels};

/// Constants of the kernels: inputs of a vector, and most stages.
pub(super) const VEC: usize = 8;
const MOST_STAGES: usize = 8;
/// Most products of the projections that end a chain: those with weights of several types are as many.
pub(super) const PROJECTIONS: usize = 2;
/// Copies in bulk are multiples of this.
pub(super) const PIECE: usize = 16;
/// Of a stage, unless a row is longer: copies of 32 KiB read as fast as longer ones.
pub(super) const STAGE_BYTES: usize = 32 << 10;
/// With fewer, the copies under way would be too few between two waits.
const LEAST_STAGES: usize = 3;
/// Under way at once: enough to read as fast as the memory can. Inputs of the next layer queue behind what is more.
pub(super) const BYTES_IN_FLIGHT: usize = 64 << 10;

/// Kernels of a file whose blocks wait for each other; none where they do not all run at once, and on GPUs that are not of Hopper's
/// generation. A block has so many threads, and `beside` bytes of shared memory that are no stages.
pub(super) fn load(
    gpu: &Gpu,
    file: &str,
    names: &[&str],
    threads: usize,
    beside: usize,
) -> Result<Vec<Function>, GpuError> {
    let mut functions = Vec::new();
    if has_hopper_kernels(gpu) {
        let (info, module) = (gpu.info(), super::load(gpu, file)?);
        let shared = info.max_shared_bytes - beside;
        for name in names {
            let function = module.function(name)?;
            function.allow_shared(shared)?;
            if function.clusters_at_once(1, threads, shared)? < info.sm_count {
                return Ok(Vec::new());
            }
            functions.push(function);
        }
    }
    Ok(functions)
}

/// Whether copies in bulk can begin there.
pub(super) fn is_aligned(address: u64) -> bool {
    address.is_multiple_of(PIECE as u64)
}

/// Bytes of a row of weights in bf16 or e4m3, if the kernels can multiply it.
pub(super) fn row_bytes(linear: &GpuLinear) -> Option<usize> {
    let (weight, element) = match linear.matrix() {
        GpuMatrix::Bf16(weight) => (weight.slice().ptr(), size_of::<bf16>()),
        GpuMatrix::Fp8 { values, .. } => (values.slice().ptr(), 1),
        _ => return None,
    };
    let bytes = linear.inputs() * element;
    (bytes.is_multiple_of(PIECE) && is_aligned(weight)).then_some(bytes)
}

/// Where a matrix is in device memory, as `Matrix` of `kernels/include/pieces.cuh` has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Matrix {
    pub(super) weight: u64,
    /// Or words of groups; 0 for none.
    pub(super) scales: u64,
    /// Scales from one row of blocks to the next, or words of groups of a row.
    pub(super) scale_stride: i32,
    pub(super) padding: i32,
}

impl Matrix {
    /// Of a chain or of an expert.
    ///
    /// # Panics
    /// If there are no such products in its format.
    pub(super) fn of(linear: &GpuLinear) -> Self {
        let (weight, scales, stride) = match linear.matrix() {
            GpuMatrix::Bf16(weight) => (weight.slice().ptr(), 0, 0),
            GpuMatrix::Fp8 {
                values,
                scales,
                scaling,
            } => (
                values.slice().ptr(),
                scales.slice().ptr(),
                scaling.stride(linear.inputs()),
            ),
            GpuMatrix::Mxfp4(rows) => (rows.slice().ptr(), 0, 0),
            GpuMatrix::ExpertInt4 { codes, groups, group } => (
                codes.slice().ptr(),
                groups.slice().ptr(),
                group.stride(linear.inputs()),
            ),
            GpuMatrix::Int4 { .. } | GpuMatrix::Gguf { .. } | GpuMatrix::Parts(_) => {
                panic!("there are no products of chains or of experts in this format")
            }
        };
        Self {
            weight,
            scales,
            scale_stride: stride as i32,
            padding: 0,
        }
    }

    pub(super) fn args(self) -> [Arg; 3] {
        [self.weight.into(), self.scales.into(), self.scale_stride.into()]
    }
}

/// The most bytes of a row of weights of the projections that end a chain, if the kernels can multiply all of them.
pub(super) fn longest_row(next: &GpuLinear) -> Option<usize> {
    let products = next.products();
    let rows = products.iter().map(row_bytes).collect::<Option<Vec<_>>>()?;
    rows.into_iter().max().filter(|_| products.len() <= PROJECTIONS)
}

/// `Projection` of `kernels/include/moe_chain.cuh`: a product of the projections that end a chain; zeroes where there is none.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Projection {
    matrix: Matrix,
    /// 0 for none.
    bias: u64,
    out: u64,
    outputs: i32,
    padding: i32,
}

impl Projection {
    /// Of the end of a chain.
    ///
    /// # Panics
    /// If [`longest_row`] is `None`, or `out` has no room for the outputs.
    pub(super) fn all(next: Option<GpuChainEnd<'_>>) -> [Self; PROJECTIONS] {
        let mut all = [Self::zeroed(); PROJECTIONS];
        let Some(next) = next else { return all };
        let mut first = 0;
        for (to, product) in all.iter_mut().zip(next.linear.products()) {
            let outputs = first..first + product.outputs();
            first = outputs.end;
            *to = Self {
                matrix: Matrix::of(product),
                bias: product.bias().map_or(0, |bias| bias.ptr()),
                out: next.out.range(outputs).ptr(),
                outputs: product.outputs() as i32,
                padding: 0,
            };
        }
        all
    }

    pub(super) fn args(self) -> [Arg; 6] {
        let [weight, scales, stride] = self.matrix.args();
        let (bias, out, outputs) = (self.bias.into(), self.out.into(), self.outputs.into());
        [weight, scales, stride, bias, out, outputs]
    }
}

/// The last layer of a [`GpuChain`](crate::cuda::GpuChain) or a [`GpuMoeChain`](crate::cuda::GpuMoeChain).
#[derive(Clone, Copy, Debug)]
pub struct GpuChainEnd<'a> {
    /// Of the residual stream.
    pub norm: GpuNorm<'a>,
    /// The projections, of one product or several.
    pub linear: &'a GpuLinear,
    /// Takes their outputs.
    pub out: GpuSlice<'a, bf16>,
}

/// How the weights of a chain go through shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Ring {
    pub(super) stage_bytes: usize,
    pub(super) stages: usize,
}

impl Ring {
    /// For products whose rows need stages of at least so many bytes, in so many bytes of shared memory; `None` if the kernel cannot compute
    /// one of them, or there would be too few stages.
    pub(super) fn new<const N: usize>(least: [Option<usize>; N], shared: usize) -> Option<Self> {
        let mut stage_bytes = STAGE_BYTES;
        for bytes in least {
            stage_bytes = stage_bytes.max(bytes?);
        }
        let stages = (shared / stage_bytes).min(MOST_STAGES);
        (stages >= LEAST_STAGES).then_some(Self { stage_bytes, stages })
    }

    /// Of all stages.
    pub(super) fn bytes(self) -> usize {
        self.stages * self.stage_bytes
    }
}

#[cfg(test)]
mod tests {
    use super::Ring;

    #[test]
    fn rings_have_room_for_a_row_and_three_stages() {
        let shared = 222 << 10;
        let stages = |least: usize| Ring::new([Some(least)], shared).map(|ring| ring.stages);
        // Rows of 4,096, 14,336 and 28,672 weights in bf16, and rows of which three do not fit.
        assert_eq!(stages(2 * 4096), Some(6));
        assert_eq!(stages(2 * 14336), Some(6));
        assert_eq!(stages(2 * 28672), Some(3));
        assert_eq!(stages(80 << 10), None);
        assert_eq!(Ring::new([Some(1), None], shared), None);
    }
}
