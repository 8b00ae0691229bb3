//! A layer of one row with experts, from its mixer's output on, in one launch: `kernels/moe_chain.cu`.

use half::bf16;
use plimsoll_device::cuda::{Arg, Function, Gpu, GpuError, GpuSlice, Launch};

use super::{GpuExperts, GpuRouter, MOST_ROUTES, MoeKernels, address_of, int, kind};
use crate::cuda::GpuNorm;
use crate::cuda::chain::{self, BYTES_IN_FLIGHT, PIECE, Ring, VEC};
use crate::cuda::linear::{FP8_BLOCK, Fp8Scaling, GpuChainEnd, GpuLinear, GpuMatrix, GpuValues, Linears};
use crate::{ExpertActivation, RouterSoftmax};

/// Constants of the kernel: all threads, most experts, width of the residual stream, and outputs of a block that are added to that.
const THREADS: usize = 17 * super::WARP;
const MOST_ROUTED: usize = 16 * super::WARP;
const MOST_WIDTH: usize = 16 * super::WARP * VEC;
const MOST_RESIDUALS: usize = 32;
/// Shared memory beside the stages and inputs: at least `sizeof(Shared)`.
const STATIC_BYTES: usize = 9 << 10;
/// Inputs that share a factor: those of 16 bytes of e4m3 weights, `kFp8Piece` of `kernels/include/pieces.cuh`.
const FP8_PIECE: usize = 16;
/// Of an expert. Lanes of a warp have the scales of the second projections' blocks, of which the outputs of a block of the kernel touch two
/// rows; with more inputs most warps would be idle, too.
const MOST_INNER: usize = 2048;

/// The products of a [`GpuMoeChain`]; those of the experts have no biases.
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
    function: Function,
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

    fn bytes(self) -> usize {
        self.plain + self.halves
    }
}

impl MoeChainKernel {
    /// `None` where its blocks do not all run at once.
    pub(super) fn load(gpu: &Gpu) -> Result<Option<Self>, GpuError> {
        let function = chain::load(gpu, "moe_chain", &["moe_chain"], THREADS, STATIC_BYTES)?.pop();
        Ok(function.map(|function| Self {
            gpu: gpu.clone(),
            function,
        }))
    }

    /// The stages of these layers and the inputs beside them, if the kernel can compute them.
    fn ring(&self, layers: &MoeChainLayers<'_>, next: Option<&GpuLinear>) -> Option<(Ring, InputRoom)> {
        let &MoeChainLayers {
            output,
            router,
            gate_up,
            down,
            top_k,
            shared,
        } = layers;
        let info = self.gpu.info();
        let (width, inner) = (output.outputs(), down.inputs());
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
        let blocks = Some(GpuValues::Fp8(Fp8Scaling::Blocks));
        let are_in_blocks = [first_gate_up, first_down]
            .iter()
            .any(|of| of.matrix().values() == blocks);
        let fit = width <= MOST_WIDTH
            && width.div_ceil(info.sm_count) <= MOST_RESIDUALS
            && to_logits(router, gate_up.count())
            && gate_up.count() <= MOST_ROUTED
            && (1..=gate_up.count().min(MOST_ROUTES)).contains(&top_k)
            && (first_gate_up.outputs(), first_gate_up.inputs()) == (2 * inner, width)
            && (first_down.outputs(), down.count()) == (width, gate_up.count())
            && [first_gate_up, first_down].iter().all(|of| of.bias().is_none())
            && (!are_in_blocks || inner.is_multiple_of(FP8_BLOCK))
            && inner.is_multiple_of(VEC)
            && inner <= MOST_INNER
            && shared.is_none_or(is_like_experts)
            && next.is_none_or(|next| next.inputs() == width);
        let stages = [
            chain::row_bytes(output),
            chain::row_bytes(router),
            chain::row_bytes(first_gate_up).map(|bytes| 2 * bytes),
            chain::row_bytes(first_down),
            next.map_or(Some(0), chain::row_bytes),
        ];
        let slots = top_k + usize::from(shared.is_some());
        let inputs = InputRoom::default()
            .with(output, output.inputs())
            .with(router, width)
            .with(first_gate_up, width)
            .with(first_down, slots * inner);
        let inputs = next.map_or(inputs, |next| inputs.with(next, width));
        let room = info.max_shared_bytes.checked_sub(STATIC_BYTES + inputs.bytes())?;
        let ring = Ring::new(stages, room)?;
        fit.then_some((ring, inputs))
    }
}

impl MoeKernels {
    /// Whether [`Self::forward_chain`] can compute these layers for one row, and these projections of what follows if they are to be a
    /// part of it. It was faster than the kernels one by one for all shapes that were measured (tests/bench/h200/kernels.md).
    pub fn can_chain(&self, layers: &MoeChainLayers<'_>, next: Option<&GpuLinear>) -> bool {
        let ring = self.chain.as_ref().and_then(|chain| chain.ring(layers, next));
        ring.is_some()
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
        let ring = kernel.ring(&layers, next.map(|next| next.linear));
        let (ring, inputs) = ring.expect("ask `can_chain`");
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
            &chain::matrix_args(gate_up.first()),
            &[(gate_up.stride() as u64).into()],
            &chain::matrix_args(down.first()),
            &[(down.stride() as u64).into()],
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
            &next.map_or_else(
                || [null(), null(), int(0)],
                |next| chain::matrix_args(next.linear),
            ),
            &[
                next.map_or_else(null, |next| bias(next.linear)),
                next.map_or_else(null, |next| next.out.into()),
                linears.chain_room().into(),
                int(x.len()),
                int(width),
                int(experts),
                int(layers.top_k),
                int(inner),
                int(next.map_or(0, |next| next.linear.outputs())),
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
        // SAFETY: the lengths were checked; the arguments are those of `moe_chain` in kernels/moe_chain.cu. For its blocks that wait for
        // each other holds what is said of `Linears::forward_chain`.
        unsafe { kernel.gpu.launch(&kernel.function, launch, &args) }
    }
}
