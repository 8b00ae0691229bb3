//! A layer of one row with experts, from its mixer's output on, in one launch: `kernels/moe_chain.cu`.

use half::bf16;
use plimsoll_device::cuda::{Arg, Function, Gpu, GpuError, GpuSlice, Launch};

use super::{GpuExperts, GpuRouter, MOST_ROUTES, MoeKernels, address_of, int, kind};
use crate::cuda::GpuNorm;
use crate::cuda::chain::{self, BYTES_IN_FLIGHT, GpuChainEnd, PIECE, Ring, VEC};
use crate::cuda::linear::{
    EXPERT_WINDOW, FP8_BLOCK, Fp8Scaling, GpuLinear, GpuMatrix, GpuValues, INT4_ROWS, Linears, mxfp4_pitch,
};
use crate::{ExpertActivation, RouterSoftmax};

/// Constants of the kernels: warps that multiply and all threads, most experts, width of the residual stream, outputs of a block that are
/// added to that, and outputs of the first projections of all experts of a row.
const CONSUMERS: usize = 16;
pub(super) const THREADS: usize = (CONSUMERS + 1) * super::WARP;
pub(super) const MOST_ROUTED: usize = CONSUMERS * super::WARP;
pub(super) const MOST_WIDTH: usize = CONSUMERS * super::WARP * VEC;
const MOST_RESIDUALS: usize = 32;
pub(super) const MOST_ACTIVATED: usize = (MOST_ROUTES + 1) * MOST_INNER;
/// Shared memory beside the stages and inputs: at least `sizeof(Shared)`.
pub(super) const STATIC_BYTES: usize = 10 << 10;
/// Inputs that share a factor: those of 16 bytes of e4m3 weights, `kFp8Piece` of `kernels/include/pieces.cuh`.
const FP8_PIECE: usize = 16;
/// Of an expert whose weights are whole rows. Lanes of a warp have the scales of the second projections' blocks, of which the outputs of a block
/// of the kernel touch two rows; with more inputs most warps would be idle, too.
const MOST_INNER: usize = 2048;
/// Of MXFP4 weights: inputs of a product, of which a warp has up to four windows, and groups of eight gated outputs of a block.
const MOST_MXFP4_INPUTS: usize = 4 * CONSUMERS * EXPERT_WINDOW;
const MOST_MXFP4_GROUPS: usize = 2 * CONSUMERS;

/// The products of a [`GpuMoeChain`]; those of experts in bf16 and e4m3 have no biases.
#[derive(Clone, Copy, Debug)]
pub struct MoeChainLayers<'a> {
    /// The mixer's last projection.
    pub output: &'a GpuLinear,
    /// `[experts, width]`, without a bias.
    pub router: &'a GpuLinear,
    /// Of each expert, gate, then up.
    pub gate_up: &'a GpuExperts,
    /// Of each expert.
    pub down: &'a GpuExperts,
    /// Experts of the row.
    pub top_k: usize,
    /// An expert that every row goes to, like the others.
    pub shared: Option<SharedExpertLayers<'a>>,
}

/// See [`MoeChainLayers::shared`].
#[derive(Clone, Copy, Debug)]
pub struct SharedExpertLayers<'a> {
    /// Gate, then up.
    pub gate_up: &'a GpuLinear,
    /// Back to the residual stream.
    pub down: &'a GpuLinear,
    /// To one logit, whose sigmoid multiplies the output.
    pub gate: &'a GpuLinear,
}

/// A layer with experts, from what its mixer gives to the projections that the next mixer begins with, for one row; the residual stream is
/// complete before and after.
#[derive(Clone, Copy, Debug)]
pub struct GpuMoeChain<'a> {
    /// Its products.
    pub layers: MoeChainLayers<'a>,
    /// What the mixer gives: `[output.inputs()]`.
    pub x: GpuSlice<'a, bf16>,
    /// The residual stream, to which the outputs of `output` and of the experts are added.
    pub hidden: GpuSlice<'a, bf16>,
    /// Of the residual stream, for the router and the experts.
    pub norm: GpuNorm<'a>,
    /// How logits become weights.
    pub router: GpuRouter<'a>,
    /// Takes the router's, `[experts]`.
    pub logits: GpuSlice<'a, f32>,
    /// Counts of rows that went to each expert, `[experts]`, if they are counted: see [`GpuExpertLoads`](super::GpuExpertLoads).
    pub loads: Option<GpuSlice<'a, u32>>,
    /// Of the gates of all experts.
    pub activation: ExpertActivation,
    /// Takes `activation(gate) * up` of the row's experts, those of the largest logits first: `[top_k, inner]`.
    pub activated: GpuSlice<'a, bf16>,
    /// The same of the expert that every row goes to, `[inner]`, and its logit, `[1]`.
    pub shared: Option<(GpuSlice<'a, bf16>, GpuSlice<'a, f32>)>,
    /// What follows, if it is to be computed too.
    pub next: Option<GpuChainEnd<'a>>,
}

/// Its blocks wait for each other.
#[derive(Debug)]
pub(super) struct MoeChainKernel {
    gpu: Gpu,
    /// By how experts' weights lie in memory.
    functions: [Function; 2],
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

    /// Whether the kernel can compute the products of experts of these widths, of so many experts of a row on so many multiprocessors.
    fn fits(self, [gate_up, down]: [&GpuExperts; 2], slots: usize, blocks: usize) -> bool {
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
                biases.iter().all(|bias| bias.is_multiple_of(PIECE as u64))
                    && [width, inner]
                        .iter()
                        .all(|inputs| inputs.is_multiple_of(EXPERT_WINDOW) && *inputs <= MOST_MXFP4_INPUTS)
                    && (slots * inner / INT4_ROWS).div_ceil(blocks) <= MOST_MXFP4_GROUPS
                    && slots * inner <= MOST_ACTIVATED
            }
        }
    }
}

/// Bytes of shared memory for the inputs of one product at a time: as `bf16` for weights in bf16, and as `f16` with a factor for each
/// [`FP8_PIECE`] for weights in e4m3. A product's inputs may be needed as both.
#[derive(Clone, Copy, Debug, Default)]
struct InputRoom {
    plain: usize,
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

    fn bytes(self) -> usize {
        self.plain + self.halves
    }
}

impl MoeChainKernel {
    /// `None` where its blocks do not all run at once.
    pub(super) fn load(gpu: &Gpu) -> Result<Option<Self>, GpuError> {
        let functions = chain::load(gpu, "moe_chain", &Stored::KERNELS, THREADS, STATIC_BYTES)?;
        let functions = <[Function; 2]>::try_from(functions);
        Ok(functions.ok().map(|functions| Self {
            gpu: gpu.clone(),
            functions,
        }))
    }

    /// The kernel for these layers, its stages and the inputs beside them, if it can compute them.
    fn plan(
        &self,
        layers: &MoeChainLayers<'_>,
        next: Option<&GpuLinear>,
    ) -> Option<(&Function, Ring, InputRoom)> {
        let &MoeChainLayers {
            output,
            router,
            gate_up,
            down,
            top_k,
            shared,
        } = layers;
        let (info, stored) = (self.gpu.info(), Stored::of(gate_up)?);
        let (width, inner, blocks) = (output.outputs(), down.inputs(), info.sm_count);
        let slots = top_k + usize::from(shared.is_some());
        let [first_gate_up, first_down] = [gate_up, down].map(GpuExperts::first);
        let to_logits = |linear: &GpuLinear, count: usize| {
            let is_bf16 = matches!(linear.matrix(), GpuMatrix::Bf16(_));
            is_bf16 && linear.bias().is_none() && (linear.outputs(), linear.inputs()) == (count, width)
        };
        let is_like_experts = |shared: SharedExpertLayers<'_>| {
            let all = [shared.gate_up, shared.down, shared.gate];
            shared.gate_up.is_like(first_gate_up)
                && shared.down.is_like(first_down)
                && to_logits(shared.gate, 1)
                && all.iter().all(|linear| chain::row_bytes(linear).is_some())
        };
        let together = stored.together();
        let fit = width <= MOST_WIDTH
            && (width / together).div_ceil(blocks) * together <= MOST_RESIDUALS
            && to_logits(router, gate_up.count())
            && gate_up.count() <= MOST_ROUTED
            && (1..=gate_up.count().min(MOST_ROUTES)).contains(&top_k)
            && (first_gate_up.outputs(), first_gate_up.inputs()) == (2 * inner, width)
            && (first_down.outputs(), down.count()) == (width, gate_up.count())
            && Stored::of(down) == Some(stored)
            && stored.fits([gate_up, down], slots, blocks)
            && shared.is_none_or(is_like_experts)
            && next.is_none_or(|next| next.inputs() == width);
        let stages = [
            chain::row_bytes(output),
            chain::row_bytes(router),
            stored.bytes(gate_up).map(|bytes| 2 * bytes),
            stored.bytes(down),
            next.map_or(Some(0), chain::longest_row),
        ];
        let inputs = InputRoom::default()
            .with(output, output.inputs())
            .with(router, width)
            .with(first_gate_up, width)
            .with(first_down, slots * inner)
            .with_sums(stored, [width, slots * inner], blocks);
        let projections = next.into_iter().flat_map(GpuLinear::products);
        let inputs = projections.fold(inputs, |inputs, projection| inputs.with(projection, width));
        let room = info.max_shared_bytes.checked_sub(STATIC_BYTES + inputs.bytes())?;
        let ring = Ring::new(stages, room)?;
        fit.then_some((&self.functions[stored as usize], ring, inputs))
    }
}

impl MoeKernels {
    /// Whether [`Self::forward_chain`] can compute these layers for one row, and these projections of what follows if they are to be a
    /// part of it. It was faster than the kernels one by one for all shapes that were measured (tests/bench/h200/kernels.md).
    pub fn can_chain(&self, layers: &MoeChainLayers<'_>, next: Option<&GpuLinear>) -> bool {
        let plan = self.chain.as_ref().and_then(|chain| chain.plan(layers, next));
        plan.is_some()
    }

    /// Computes a layer in one launch, for one row.
    ///
    /// # Errors
    /// [`GpuError`] of the launch.
    ///
    /// # Panics
    /// If a length does not fit, or it cannot be used: ask [`Self::can_chain`].
    pub fn forward_chain(&self, linears: &Linears, chain: &GpuMoeChain<'_>) -> Result<(), GpuError> {
        let &GpuMoeChain {
            layers,
            x,
            hidden,
            norm,
            router,
            logits,
            loads,
            activation,
            activated,
            shared,
            next,
        } = chain;
        let kernel = self.chain.as_ref().expect("ask `can_chain`");
        let plan = kernel.plan(&layers, next.map(|next| next.linear));
        let (function, ring, inputs) = plan.expect("ask `can_chain`");
        let (output, gate_up, down) = (layers.output, layers.gate_up, layers.down);
        let (width, inner, experts) = (output.outputs(), down.inputs(), gate_up.count());
        assert_eq!((x.len(), hidden.len()), (output.inputs(), width), "one row");
        assert_eq!(
            (norm.weight.len(), activated.len(), logits.len()),
            (width, layers.top_k * inner, experts),
            "one row"
        );
        router.check_experts(experts);
        assert!(
            loads.is_none_or(|loads| loads.len() == experts),
            "a count for each expert"
        );
        let shared = match (layers.shared, shared) {
            (None, None) => None,
            (Some(layers), Some((activated, logit))) => {
                assert_eq!((activated.len(), logit.len()), (inner, 1), "one row");
                Some((layers, activated, logit))
            }
            _ => panic!("room for the expert that every row goes to"),
        };
        if let Some(next) = &next {
            assert_eq!(
                (next.norm.weight.len(), next.out.len()),
                (width, next.linear.outputs()),
                "one row"
            );
        }
        let aligned = [
            x.ptr(),
            hidden.ptr(),
            activated.ptr(),
            norm.weight.ptr(),
            shared.map_or(0, |(_, activated, _)| activated.ptr()),
            next.map_or(0, |next| next.norm.weight.ptr()),
        ];
        assert!(
            aligned.iter().all(|at| at.is_multiple_of(PIECE as u64)),
            "rows at multiples of {PIECE} bytes"
        );
        let null = || Arg::from(0_u64);
        let of_shared = |linear: fn(SharedExpertLayers<'_>) -> &GpuLinear| match shared {
            Some((layers, ..)) => {
                let [weight, scales, _] = chain::matrix_args(linear(layers));
                [weight, scales]
            }
            None => [null(), null()],
        };
        let bias = |linear: &GpuLinear| linear.bias().map_or(0, |bias| bias.ptr()).into();
        let of_experts = |experts: &GpuExperts| -> [Arg; 5] {
            let address = experts.addresses();
            [
                address.weight.into(),
                address.scales.into(),
                int(address.scale_stride),
                address.bias.into(),
                (experts.stride() as u64).into(),
            ]
        };
        let args: Vec<Arg> = [
            &[x.into()][..],
            &chain::matrix_args(output),
            &[
                bias(output),
                hidden.into(),
                norm.weight.into(),
                norm.eps.into(),
                layers.router.weight().into(),
                router.bias.map_or(0, |bias| bias.ptr()).into(),
                i32::from(router.softmax == RouterSoftmax::All).into(),
                router.scale.into(),
                address_of(router.expert_scale),
                logits.into(),
                loads.map_or_else(null, Into::into),
            ],
            &of_experts(gate_up),
            &of_experts(down),
            &of_shared(|layers| layers.gate_up),
            &of_shared(|layers| layers.down),
            &[
                shared.map_or_else(null, |(layers, ..)| layers.gate.weight().into()),
                shared.map_or_else(null, |(.., logit)| logit.into()),
                activated.into(),
                shared.map_or_else(null, |(_, activated, _)| activated.into()),
                next.map_or_else(null, |next| next.norm.weight.into()),
                next.map_or(0.0, |next| next.norm.eps).into(),
            ],
            &chain::projection_args(next),
            &[
                linears.chain_room().into(),
                int(x.len()),
                int(width),
                int(experts),
                int(layers.top_k),
                int(inner),
                kind(activation).into(),
                int(ring.stage_bytes),
                int(ring.stages),
                int(BYTES_IN_FLIGHT),
                int(inputs.plain),
            ],
        ]
        .concat();
        let launch = Launch::new([kernel.gpu.info().sm_count as u32, 1, 1], THREADS as u32)
            .shared(ring.bytes() + inputs.bytes())
            .pdl(true);
        // SAFETY: the lengths were checked; the arguments are those of `MOE_CHAIN` in kernels/moe_chain.cu. For its blocks that wait for
        // each other holds what is said of `Linears::forward_chain`.
        unsafe { kernel.gpu.launch(function, launch, &args) }
    }
}

#[cfg(test)]
mod tests {
    use super::{INT4_ROWS, InputRoom, Ring, STATIC_BYTES, Stored, mxfp4_pitch};
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
}
