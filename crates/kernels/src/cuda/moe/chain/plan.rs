//! Which layers with experts are one launch, by which kernel, and what it keeps in shared memory.

use half::bf16;
use plimsoll_device::cuda::{Function, Gpu, GpuError};

use super::super::{GpuExperts, MOST_ROUTES, WARP};
use super::{DenseLayers, MoeChainLayers};
use crate::cuda::chain::{self, Ring, STAGE_BYTES, VEC};
use crate::cuda::linear::{
    EXPERT_WINDOW, FP8_BLOCK, Fp8Scaling, GpuLinear, GpuMatrix, GpuValues, INT4_ROWS, mxfp4_pitch,
};

/// Constants of the kernels: warps that multiply and all threads, most experts, width of the residual stream, outputs of a block that are
/// added to that, and outputs of the first projections of all experts of a row and what is beside them.
const CONSUMERS: usize = 16;
pub(super) const THREADS: usize = (CONSUMERS + 1) * WARP;
const MOST_ROUTED: usize = CONSUMERS * WARP;
const MOST_WIDTH: usize = CONSUMERS * WARP * VEC;
const MOST_RESIDUALS: usize = 32;
const MOST_ACTIVATED: usize = (MOST_ROUTES + 1) * MOST_INNER;
/// Shared memory beside the stages and inputs: at least `sizeof(Shared)`.
const STATIC_BYTES: usize = 10 << 10;
/// Inputs that share a factor: those of 16 bytes of e4m3 weights, `kFp8Piece` of `kernels/include/pieces.cuh`.
const FP8_PIECE: usize = 16;
/// Of an expert whose weights are whole rows. Lanes of a warp have the scales of the second projections' blocks, of which the outputs of a block
/// of the kernel touch two rows; with more inputs most warps would be idle, too.
const MOST_INNER: usize = 2048;
/// Of MXFP4 weights: inputs of a product, of which a warp has up to four windows, and groups of eight gated outputs of a block.
const MOST_MXFP4_INPUTS: usize = 4 * CONSUMERS * EXPERT_WINDOW;
const MOST_MXFP4_GROUPS: usize = 2 * CONSUMERS;
/// Norms of the residual stream in a sandwich that are inputs: the router's, the MLP's and the experts'.
const SANDWICH_INPUTS: usize = 3;

/// The kernels of [`GpuMoeChain`](super::GpuMoeChain), whose blocks wait for each other.
#[derive(Debug)]
pub(in crate::cuda::moe) struct MoeChainKernels {
    gpu: Gpu,
    /// By how experts' weights lie in memory.
    plain: [Function; 2],
    sandwich: Function,
}

/// How a layer is computed.
pub(super) struct Plan<'a> {
    pub(super) function: &'a Function,
    pub(super) ring: Ring,
    /// Behind the ring.
    pub(super) inputs: InputRoom,
}

/// How experts' weights lie in memory, and so which kernel takes them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stored {
    /// In bf16 or e4m3, one row behind the other.
    Rows,
    /// [`INT4_ROWS`] rows together.
    Mxfp4,
}

impl Stored {
    const KERNELS: [&str; 2] = ["moe_chain", "moe_chain_mxfp4"];

    fn of(experts: &GpuExperts) -> Option<Self> {
        match experts.matrix() {
            GpuMatrix::Bf16(_) | GpuMatrix::Fp8 { .. } => Some(Self::Rows),
            GpuMatrix::Mxfp4(_) => Some(Self::Mxfp4),
            _ => None,
        }
    }

    /// Rows of weights that lie together.
    fn together(self) -> usize {
        match self {
            Self::Rows => 1,
            Self::Mxfp4 => INT4_ROWS,
        }
    }

    /// Bytes of the weights that lie together, if the kernel can multiply them.
    fn bytes(self, experts: &GpuExperts) -> Option<usize> {
        match self {
            Self::Rows => chain::row_bytes(experts.first()),
            Self::Mxfp4 => Some(INT4_ROWS * mxfp4_pitch(experts.inputs())),
        }
    }

    /// Whether the kernel can compute the products of experts of these widths, with so many gated outputs on so many multiprocessors.
    fn fits(self, [gate_up, down]: [&GpuExperts; 2], activated: usize, blocks: usize) -> bool {
        let (width, inner) = (gate_up.inputs(), down.inputs());
        match self {
            Self::Rows => {
                let firsts = [gate_up, down].map(GpuExperts::first);
                let in_blocks = Some(GpuValues::Fp8(Fp8Scaling::Blocks));
                let are_in_blocks = firsts.iter().any(|of| of.matrix().values() == in_blocks);
                firsts.iter().all(|of| of.bias().is_none())
                    && (!are_in_blocks || inner.is_multiple_of(FP8_BLOCK))
                    && inner.is_multiple_of(VEC)
                    && inner <= MOST_INNER
            }
            Self::Mxfp4 => {
                let biases = [gate_up, down].map(|of| of.addresses().bias);
                biases.into_iter().all(chain::is_aligned)
                    && [width, inner]
                        .iter()
                        .all(|inputs| inputs.is_multiple_of(EXPERT_WINDOW) && *inputs <= MOST_MXFP4_INPUTS)
                    && (activated / INT4_ROWS).div_ceil(blocks) <= MOST_MXFP4_GROUPS
            }
        }
    }
}

/// Bytes of shared memory for the inputs of one product at a time: as `bf16` for weights in bf16, and as `f16` with a factor for each
/// [`FP8_PIECE`] for weights in e4m3. A product's inputs may be needed as both.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct InputRoom {
    pub(super) plain: usize,
    halves: usize,
}

impl InputRoom {
    /// Grown to hold `count` inputs of a layer.
    fn with(self, linear: &GpuLinear, count: usize) -> Self {
        let Self { plain, halves } = self;
        match linear.matrix().values() {
            Some(GpuValues::Fp8(_)) => Self {
                plain,
                halves: halves.max(2 * count + count / FP8_PIECE * size_of::<f32>()),
            },
            _ => Self {
                plain: plain.max(size_of::<bf16>() * count),
                halves,
            },
        }
    }

    /// Grown to hold, behind the inputs of experts' products, the sums that warps have of the outputs of a block.
    fn with_sums(self, stored: Stored, [width, activated]: [usize; 2], blocks: usize) -> Self {
        let behind = |inputs: usize, groups: usize, rows: usize| {
            let sums = groups.div_ceil(blocks) * INT4_ROWS * rows * CONSUMERS;
            size_of::<bf16>() * inputs + size_of::<f32>() * sums
        };
        match stored {
            Stored::Rows => self,
            // Of gates and up projections, and of the second projections.
            Stored::Mxfp4 => Self {
                plain: (self.plain)
                    .max(behind(width, activated / INT4_ROWS, 2))
                    .max(behind(activated, width / INT4_ROWS, 1)),
                ..self
            },
        }
    }

    pub(super) fn bytes(self) -> usize {
        self.plain + self.halves
    }
}

impl MoeChainKernels {
    /// `None` where their blocks do not all run at once.
    pub(in crate::cuda::moe) fn load(gpu: &Gpu) -> Result<Option<Self>, GpuError> {
        const SANDWICH: &str = "moe_chain_sandwich";
        let load = |file: &str, names: &[&str]| chain::load(gpu, file, names, THREADS, STATIC_BYTES);
        let plain = <[Function; 2]>::try_from(load("moe_chain", &Stored::KERNELS)?).ok();
        let sandwich = load(SANDWICH, &[SANDWICH])?.pop();
        Ok(plain.zip(sandwich).map(|(plain, sandwich)| Self {
            gpu: gpu.clone(),
            plain,
            sandwich,
        }))
    }

    /// How these layers, and these projections of what follows, are computed, if they can be.
    pub(super) fn plan(&self, layers: &MoeChainLayers<'_>, next: Option<&GpuLinear>) -> Option<Plan<'_>> {
        let &MoeChainLayers {
            output,
            router,
            gate_up,
            down,
            top_k,
            dense,
        } = layers;
        let (info, stored, sandwiched) = (self.gpu.info(), Stored::of(gate_up)?, layers.sandwiched());
        let (width, blocks) = (output.outputs(), info.sm_count);
        let activated = top_k * down.inputs() + dense.map_or(0, |dense| dense.down.inputs());
        let fit = fits(layers, next, activated)
            && match sandwiched {
                Some(mlp) => fits_beside(mlp, layers, next),
                None => fits_experts(layers, stored, activated, blocks),
            };
        let mut stages = vec![
            chain::row_bytes(output),
            chain::row_bytes(router),
            stored.bytes(gate_up).map(|bytes| 2 * bytes),
            stored.bytes(down),
            next.map_or(Some(0), chain::longest_row),
        ];
        if let Some(dense) = dense {
            let pair = chain::row_bytes(dense.gate_up).map(|bytes| 2 * bytes);
            stages.extend([pair, chain::row_bytes(dense.down)]);
            stages.extend(dense.gate.map(chain::row_bytes));
        }
        let mut stages = stages.into_iter();
        let longest = stages.try_fold(0, |longest: usize, bytes| Some(longest.max(bytes?)))?;
        let inputs = InputRoom::default()
            .with(output, output.inputs())
            .with(router, width * sandwiched.map_or(1, |_| SANDWICH_INPUTS))
            .with(gate_up.first(), width)
            .with(down.first(), activated)
            .with_sums(stored, [width, activated], blocks);
        let projections = next.into_iter().flat_map(GpuLinear::products);
        let inputs = projections.fold(inputs, |inputs, projection| inputs.with(projection, width));
        let room = info.max_shared_bytes.checked_sub(STATIC_BYTES + inputs.bytes())?;
        let ring = Ring::new([Some(longest)], room)?;
        let (function, ring) = match sandwiched {
            Some(_) => (&self.sandwich, of_pairs(ring, longest, width, room)),
            None => (&self.plain[stored as usize], ring),
        };
        fit.then_some(Plan {
            function,
            ring,
            inputs,
        })
    }
}

/// Whether any of the kernels can compute layers of these shapes, with so many gated outputs.
fn fits(layers: &MoeChainLayers<'_>, next: Option<&GpuLinear>, activated: usize) -> bool {
    let &MoeChainLayers {
        output,
        router,
        gate_up,
        down,
        top_k,
        ..
    } = layers;
    let (width, experts) = (output.outputs(), gate_up.count());
    width <= MOST_WIDTH
        && experts <= MOST_ROUTED
        && (1..=experts.min(MOST_ROUTES)).contains(&top_k)
        && gives_logits(router, [experts, width])
        && shape(gate_up.first()) == [2 * down.inputs(), width]
        && (down.outputs(), down.count()) == (width, experts)
        && Stored::of(down) == Stored::of(gate_up)
        && activated <= MOST_ACTIVATED
        && next.is_none_or(|next| next.inputs() == width)
}

/// Whether an MLP can be beside these experts: in bf16, as they are and all around them.
fn fits_beside(mlp: DenseLayers<'_>, layers: &MoeChainLayers<'_>, next: Option<&GpuLinear>) -> bool {
    let width = layers.output.outputs();
    let experts = [layers.gate_up, layers.down].map(GpuExperts::first);
    let around = next.map_or(&[][..], GpuLinear::products).iter();
    let mut own = [mlp.gate_up, mlp.down].into_iter().chain(experts);
    own.all(|linear| is_bf16(linear) && linear.bias().is_none())
        && around.chain([layers.output]).all(is_bf16)
        && shape(mlp.gate_up) == [2 * mlp.down.inputs(), width]
        && mlp.down.outputs() == width
}

/// Whether so many multiprocessors can compute the products of these experts, alone or with another one like them that every row goes to.
fn fits_experts(layers: &MoeChainLayers<'_>, stored: Stored, activated: usize, blocks: usize) -> bool {
    let (experts, width) = ([layers.gate_up, layers.down], layers.output.outputs());
    let is_like_others = |shared: DenseLayers<'_>| {
        let mut both = [shared.gate_up, shared.down].into_iter().zip(experts);
        both.all(|(shared, others)| shared.is_like(others.first()))
            && shared.gate.is_some_and(|gate| gives_logits(gate, [1, width]))
    };
    let together = stored.together();
    (width / together).div_ceil(blocks) * together <= MOST_RESIDUALS
        && stored.fits(experts, activated, blocks)
        && layers.dense.is_none_or(is_like_others)
}

/// Outputs, then inputs.
fn shape(linear: &GpuLinear) -> [usize; 2] {
    [linear.outputs(), linear.inputs()]
}

fn gives_logits(linear: &GpuLinear, of: [usize; 2]) -> bool {
    is_bf16(linear) && linear.bias().is_none() && shape(linear) == of
}

fn is_bf16(linear: &GpuLinear) -> bool {
    matches!(linear.matrix(), GpuMatrix::Bf16(_))
}

/// The ring in `room` bytes, of rows of up to `longest` bytes. Most products of a sandwich have rows of the width of the residual stream: stages of
/// whole pairs of them are faster, if there are as many.
fn of_pairs(ring: Ring, longest: usize, width: usize, room: usize) -> Ring {
    let pairs = STAGE_BYTES.next_multiple_of(2 * size_of::<bf16>() * width);
    let whole = Ring::new([Some(longest), Some(pairs)], room);
    whole.filter(|whole| whole.stages == ring.stages).unwrap_or(ring)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::AssumedGpu;

    /// gpt-oss: attention gives 4,096 values, the residual stream and each of a row's four experts have 2,880.
    #[test]
    fn layers_of_gpt_oss_have_room_for_their_sums_and_a_deep_ring() {
        let (width, activated, gpu) = (2880, 4 * 2880, AssumedGpu::H200);
        let inputs = InputRoom::default().with_sums(Stored::Mxfp4, [width, activated], gpu.sm_count);
        // A block has up to 11 groups of eight gates and up projections, and three of outputs; each of 16 warps has sums of all of them.
        let (gated, down) = (11 * 2 * 8 * 16, 3 * 8 * 16);
        assert_eq!(
            inputs.plain,
            (2 * width + 4 * gated).max(2 * activated + 4 * down)
        );
        assert_eq!(
            InputRoom::default()
                .with_sums(Stored::Rows, [width, activated], gpu.sm_count)
                .bytes(),
            0
        );
        let together = INT4_ROWS * mxfp4_pitch(width);
        let room = gpu.most_shared() - STATIC_BYTES - inputs.bytes();
        let ring = Ring::new(
            [
                Some(2 * 4096),
                Some(2 * width),
                Some(2 * together),
                Some(together),
            ],
            room,
        );
        let ring = ring.expect("room for a ring");
        assert_eq!((ring.stage_bytes, ring.stages), (32 << 10, 6));
    }

    /// Gemma-4-26B-A4B: rows of 2,816 inputs, 4,096 or 8,192 of attention, 2,112 and 704 inside.
    #[test]
    fn stages_are_whole_pairs_of_rows_where_that_costs_none() {
        let ring = |width: usize, attended: usize| {
            let longest = 2 * [attended, 2 * width, 2112, 704].into_iter().max().unwrap();
            let room = AssumedGpu::H200.most_shared() - STATIC_BYTES - 2 * SANDWICH_INPUTS * width;
            let ring = Ring::new([Some(longest)], room).expect("room for a ring");
            let ring = of_pairs(ring, longest, width, room);
            (ring.stage_bytes, ring.stages)
        };
        assert_eq!(ring(2816, 4096), (3 * 11_264, 6));
        assert_eq!(ring(2816, 8192), (3 * 11_264, 6));
        assert_eq!(ring(2048, 4096), (32 << 10, 6));
        // Three pairs would leave room for four stages.
        assert_eq!(ring(3840, 4096), (32 << 10, 6));
    }
}
