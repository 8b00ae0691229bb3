//! Our own kernels for few rows, which are bound by reading the weights: `kernels/linear.cu`, and `kernels/linear_int4_few.cu` for weights of
//! four bits where all of x fits in shared memory.

use std::fmt;

use half::bf16;
use plimsoll_device::cuda::{Arg, Function, Gpu, GpuError, Launch};

use super::cublas_lt::{Operands, Shape};
use super::matrix::{INT4_ROWS, INT4_WINDOW};
use super::{Fp8Scaling, GpuValues, Int4Group};
use crate::{Activation, GgufFormat};

/// Most elements of which every block computes the norm for itself: more than that is slower than a kernel of its own (one row
/// of 5120 on an H200: 18.9 ms a token instead of 17.1; tests/bench/h200/norms.json).
const MAX_NORM_ELEMENTS: usize = 4096;
/// The kernel for up to 8 rows alone computes norms.
const MAX_NORM_ROWS: usize = 4;

/// Most rows the kernels take. Of e4m3 weights a kernel for 32 rows took as long as two launches for 16, as weights become bf16 on the
/// way (H200); so do those of four bits, and with many groups, as GGUF's types have them, there are no registers for more than 8.
pub(super) fn most_rows(values: GpuValues) -> usize {
    match values {
        GpuValues::Bf16 => 32,
        GpuValues::Fp8(_) | GpuValues::Int4(Int4Group::Of64 | Int4Group::Of128) => 16,
        GpuValues::Int4(Int4Group::Of32) | GpuValues::Gguf(_) => 8,
    }
}

/// Constants of `kernels/linear.cu`.
const WARPS: usize = 8;
const WARP: usize = 32;
const TILE: usize = 16;
const CHUNK_BYTES: usize = 128;
const RING_PIECES: usize = 34;
const PIECE: usize = 16;
const INPUT_BYTES: usize = 32 << 10;
const BUFFERS: usize = 4;
const PAD: usize = 4;
const MOST_PARTS: usize = 8;

/// Constants of `kernels/linear_int4_few.cu`; a warp's ring has as many stages as fit in its bytes.
const FEW_ROWS: usize = 8;
const FEW_INPUT_PAD: usize = 16;
const FEW_RING_BYTES: usize = 8192;

/// Of a multiprocessor's shared memory, what the system takes for each thread block.
const SYSTEM_SHARED_BYTES: usize = 1 << 10;

/// What becomes of the sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LinearOutput {
    /// Rounded.
    Bf16,
    /// As they are.
    F32,
    /// `activation(gate) * up` of stacked weights.
    Glu(Activation),
}

impl LinearOutput {
    /// `Mode` of `kernels/include/activation.cuh`.
    pub(super) fn mode(self) -> i32 {
        match self {
            Self::Bf16 => 0,
            Self::F32 => 1,
            Self::Glu(_) => 2,
        }
    }

    /// `Activation` of `kernels/include/activation.cuh`; the first one where there is none.
    pub(super) fn activation(self) -> i32 {
        match self {
            Self::Glu(Activation::GeluTanh) => 1,
            Self::Glu(Activation::Silu) | Self::Bf16 | Self::F32 => 0,
        }
    }

    /// Of an output.
    pub(super) fn bytes(self) -> usize {
        match self {
            Self::Bf16 | Self::Glu(_) => 2,
            Self::F32 => 4,
        }
    }

    /// Rows of weights for each output.
    pub fn stacked(self) -> usize {
        match self {
            Self::Bf16 | Self::F32 => 1,
            Self::Glu(_) => 2,
        }
    }
}

/// The add and RMSNorm ahead of a product; `Norm` of `kernels/linear.cu`. Device addresses.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct NormOperands {
    pub(super) delta: u64,
    /// 0 for none of this.
    pub(super) weight: u64,
    pub(super) sum: u64,
    pub(super) eps: f32,
}

/// How our own kernels cut a product into thread blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LinearCut {
    /// Warps of a block side by side along the features, each with 16; the rest of its 8 warps share k. A power of two.
    pub row_warps: usize,
    /// Blocks that share k. A power of two; more than 1 needs compute capability 9.0.
    pub cluster: usize,
    /// Blocks per multiprocessor: 1, which has it to itself, or 2, of which one reads while the other adds up its sums.
    pub blocks_per_sm: usize,
}

impl LinearCut {
    /// `row_warps` and `cluster` of those that are worth a measurement, the likeliest first. The last ones are for wide chunks of x, of
    /// which there is room for few.
    pub const SIZES: [(usize, usize); 9] = [
        (1, 1),
        (2, 1),
        (4, 1),
        (2, 2),
        (4, 2),
        (4, 4),
        (8, 4),
        (8, 2),
        (8, 1),
    ];
}

impl fmt::Display for LinearCut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            row_warps,
            cluster,
            blocks_per_sm,
        } = self;
        write!(f, "{row_warps}x{cluster}x{blocks_per_sm}")
    }
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
    /// Clusters of 1, 2, 4 and 8 blocks that run at once with a multiprocessor for each block; 0 if there are none.
    clusters: [usize; 4],
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
            clusters,
        })
    }

    /// The cuts that can compute a product, the likeliest first.
    pub(super) fn cuts(&self, shape: &Shape, output: LinearOutput) -> Vec<LinearCut> {
        let cuts = LinearCut::SIZES.into_iter().flat_map(|(row_warps, cluster)| {
            [1, 2].map(|blocks_per_sm| LinearCut {
                row_warps,
                cluster,
                blocks_per_sm,
            })
        });
        let mut cuts: Vec<_> = cuts.filter(|cut| self.can(shape, output, *cut)).collect();
        // A block's part of x should fit, and no multiprocessor should be without a block.
        if cuts.iter().any(|cut| self.fills(shape, output, *cut)) {
            cuts.retain(|cut| self.fills(shape, output, *cut));
        }
        cuts.sort_by_key(|cut| (self.few_bytes(shape, *cut).is_none(), !self.fits(shape, *cut)));
        cuts
    }

    /// The cut to use where nothing was measured, if these kernels should be.
    pub(super) fn default_cut(&self, shape: &Shape, output: LinearOutput) -> Option<LinearCut> {
        let first = self.cuts(shape, output).first().copied();
        first.filter(|cut| self.fits(shape, *cut))
    }

    /// Whether a cut can compute a product.
    pub(super) fn can(&self, shape: &Shape, output: LinearOutput, cut: LinearCut) -> bool {
        if self.few_bytes(shape, cut).is_some() {
            return true;
        }
        let parts = WARPS / cut.row_warps;
        // The tile of a warp has one factor.
        let whole_blocks = shape.scaling() != Some(Fp8Scaling::Blocks)
            || output.stacked() == 1
            || shape.n.is_multiple_of(TILE);
        whole_blocks
            && shape.m <= most_rows(shape.values)
            && chunks(shape).is_some()
            && cut.row_warps >= output.stacked()
            && self.clusters(cut) > 0
            && parts * cut.cluster <= MOST_PARTS
            && BUFFERS * shape.m * parts * chunk_bytes(shape) <= INPUT_BYTES
            && shared_bytes(shape, cut) <= self.most_shared_bytes(cut)
    }

    /// Shared memory of a block, if `kernels/linear_int4_few.cu` computes the product.
    fn few_bytes(&self, shape: &Shape, cut: LinearCut) -> Option<usize> {
        let GpuValues::Int4(group) = shape.values else {
            return None;
        };
        let &Shape { m, n, k, .. } = shape;
        let whole_pieces = n.is_multiple_of(INT4_ROWS) && (k * size_of::<bf16>()).is_multiple_of(PIECE);
        if m > FEW_ROWS || cut.cluster > 1 || !whole_pieces {
            return None;
        }
        // Of a window: two eights of rows, and for each lane the words of two rows.
        let stage = INT4_ROWS * INT4_WINDOW + 2 * WARP * group.stride(INT4_WINDOW) * size_of::<u32>();
        let ring = WARPS * (FEW_RING_BYTES / stage) * stage;
        let inputs = m * (k.next_multiple_of(INT4_WINDOW) * size_of::<bf16>() + FEW_INPUT_PAD);
        let parts = WARPS / cut.row_warps;
        let sums = 2 * parts * FEW_ROWS * (cut.row_warps * TILE + PAD) * size_of::<f32>();
        let bytes = ring + inputs + sums;
        (bytes <= self.most_shared_bytes(cut)).then_some(bytes)
    }

    /// Shared memory that a block may have.
    fn most_shared_bytes(&self, cut: LinearCut) -> usize {
        (self.gpu.info().max_shared_bytes + SYSTEM_SHARED_BYTES) / cut.blocks_per_sm - SYSTEM_SHARED_BYTES
    }

    /// Whether a block's part of x stays in shared memory.
    fn fits(&self, shape: &Shape, cut: LinearCut) -> bool {
        let fit = |chunks: usize| shape.m * chunks.div_ceil(cut.cluster) * chunk_bytes(shape) <= INPUT_BYTES;
        chunks(shape).is_some_and(fit) || self.few_bytes(shape, cut).is_some()
    }

    /// Whether a cut that can compute a product can compute a norm ahead of it.
    pub(super) fn can_norm(&self, shape: &Shape, cut: LinearCut) -> bool {
        shape.m <= MAX_NORM_ROWS
            && shape.m * shape.k <= MAX_NORM_ELEMENTS
            && shape.k.is_multiple_of(chunk_inputs(shape))
            && self.fits(shape, cut)
    }

    fn clusters(&self, cut: LinearCut) -> usize {
        self.clusters[cut.cluster.trailing_zeros() as usize]
    }

    /// Clusters that compute `n` outputs: not more than run at once, with as many blocks on each multiprocessor as the cut says.
    fn clusters_of(&self, n: usize, output: LinearOutput, cut: LinearCut) -> usize {
        let features = cut.row_warps * TILE / output.stacked();
        (self.clusters(cut) * cut.blocks_per_sm).min(n.div_ceil(features))
    }

    /// Whether there is a block for nearly every multiprocessor.
    fn fills(&self, shape: &Shape, output: LinearOutput, cut: LinearCut) -> bool {
        let blocks = cut.cluster * self.clusters_of(shape.n, output, cut);
        16 * blocks >= 15 * self.gpu.info().sm_count
    }

    /// Shared memory to launch a block with. Products start before the kernel ahead has ended, and some multiprocessors are still full then.
    /// With one block per multiprocessor, a block asks for so much that two do not fit: otherwise some multiprocessors would get two blocks
    /// and decide how long the product takes (a token of Llama-3.1-8B's shape at batch 1 on an H200: 5.5 ms instead of 4.3;
    /// tests/bench/h200/tiles.json). Grids that leave multiprocessors idle anyway are not padded.
    fn launched_bytes(&self, shape: &Shape, output: LinearOutput, cut: LinearCut) -> usize {
        let bytes = self
            .few_bytes(shape, cut)
            .unwrap_or_else(|| shared_bytes(shape, cut));
        match cut.blocks_per_sm == 1 && self.fills(shape, output, cut) {
            true => bytes.max((self.gpu.info().max_shared_bytes + SYSTEM_SHARED_BYTES) / 2),
            false => bytes,
        }
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
    /// As [`CublasLt::run`](super::cublas_lt::CublasLt::run); the cut must be one that [`Self::can`] compute the product, and
    /// [`Self::can_norm`] if there is one.
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
        let args: [Arg; 16] = [
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
        ];
        let grid = self.clusters_of(shape.n, output, cut) * cut.cluster;
        let (function, warps) = match shape.values {
            GpuValues::Int4(group) if self.few_bytes(shape, cut).is_some() => {
                let of_group = self.few.iter().find(|(of, _)| *of == group);
                let (_, of_group) = of_group.expect("there are kernels for all groups");
                // One warp adds what the others multiply.
                (&of_group.of(output)[0], WARPS + 1)
            }
            values => {
                let of_type = self.functions.iter().find(|(of, _)| *of == values);
                let (_, of_type) = of_type.expect("there are kernels for all weights");
                (
                    &of_type.of(output)[tiles(shape.m).trailing_zeros() as usize],
                    WARPS,
                )
            }
        };
        let launch = Launch::new([grid as u32, 1, 1], (warps * WARP) as u32)
            .shared(self.launched_bytes(shape, output, cut))
            .cluster(cut.cluster as u32)
            .pdl(true);
        // SAFETY: the caller's promise; the arguments are those of `LINEAR` in kernels/linear.cu and of `LINEAR_INT4_FEW` in
        // kernels/linear_int4_few.cu.
        unsafe { self.gpu.launch(function, launch, &args) }
    }
}

/// Of a chunk of a row of x.
fn chunk_bytes(shape: &Shape) -> usize {
    chunk_inputs(shape) * size_of::<bf16>()
}

/// Inputs of a chunk.
fn chunk_inputs(shape: &Shape) -> usize {
    match shape.values {
        GpuValues::Bf16 => CHUNK_BYTES / size_of::<bf16>(),
        GpuValues::Fp8(_) => CHUNK_BYTES,
        GpuValues::Int4(_) => 2 * CHUNK_BYTES,
        GpuValues::Gguf(_) => GgufFormat::WINDOW,
    }
}

/// Chunks of a row of weights; `None` if they are not whole. GGUF's windows are filled up.
fn chunks(shape: &Shape) -> Option<usize> {
    let inputs = chunk_inputs(shape);
    let is_whole = shape.k.is_multiple_of(inputs) || matches!(shape.values, GpuValues::Gguf(_));
    is_whole.then_some(shape.k.div_ceil(inputs))
}

/// Tiles of 8 rows of the kernel for `m` rows.
fn tiles(m: usize) -> usize {
    m.div_ceil(8).next_power_of_two()
}

fn shared_bytes(shape: &Shape, cut: LinearCut) -> usize {
    let row = match shape.values {
        GpuValues::Gguf(format) => format.pieces() * PIECE,
        GpuValues::Int4(group) => CHUNK_BYTES + group.stride(chunk_inputs(shape)) * size_of::<u32>(),
        GpuValues::Bf16 | GpuValues::Fp8(_) => CHUNK_BYTES,
    };
    let ring = WARPS * (RING_PIECES * PIECE / row) * TILE * row;
    let parts = WARPS / cut.row_warps;
    ring + INPUT_BYTES + 2 * parts * tiles(shape.m) * 8 * (cut.row_warps * TILE + PAD) * 4
}
