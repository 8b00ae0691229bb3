//! A layer of one row with experts, from its mixer's output on, in one launch: `kernels/moe_chain.cu`, and `kernels/moe_chain_sandwich.cu` for
//! layers with an MLP beside the experts and norms around both (Gemma 4).

mod plan;

use bytemuck::{Pod, Zeroable};
use half::bf16;
use plimsoll_device::cuda::{GpuError, GpuSlice, Launch};

use super::{Addresses, GpuExperts, GpuRouter, MoeKernels, kind};
use crate::cuda::GpuNorm;
use crate::cuda::chain::{self, BYTES_IN_FLIGHT, GpuChainEnd, Matrix, PIECE, PROJECTIONS, Projection};
use crate::cuda::linear::{GpuLinear, Linears};
use crate::{ExpertActivation, RouterSoftmax};

pub(super) use plan::MoeChainKernels;
use plan::{Plan, THREADS};

/// The products of a [`GpuMoeChain`]. Those of experts in bf16 and e4m3 have no biases; beside an MLP all are in bf16, and only the mixer's last
/// projection and what follows the layer may have biases.
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
    /// What every row goes to beside its experts.
    pub dense: Option<DenseLayers<'a>>,
}

impl<'a> MoeChainLayers<'a> {
    /// The MLP beside the experts that has norms around it and them.
    fn sandwiched(&self) -> Option<DenseLayers<'a>> {
        self.dense.filter(|dense| dense.gate.is_none())
    }
}

/// See [`MoeChainLayers::dense`].
#[derive(Clone, Copy, Debug)]
pub struct DenseLayers<'a> {
    /// Gate, then up.
    pub gate_up: &'a GpuLinear,
    /// Back to the residual stream.
    pub down: &'a GpuLinear,
    /// Of an expert like the others: to one logit, whose sigmoid multiplies the output. An MLP that has none has norms instead:
    /// [`GpuMoeChain::sandwich`].
    pub gate: Option<&'a GpuLinear>,
}

/// Norms of a layer with an MLP beside the experts, `[width]` each, with the `eps` of [`GpuMoeChain::norm`].
#[derive(Clone, Copy, Debug)]
pub struct SandwichNorms<'a> {
    /// Of what the mixer adds.
    pub mixer_sum: GpuSlice<'a, f32>,
    /// Of what the router sees.
    pub router: GpuSlice<'a, f32>,
    /// Of what experts see.
    pub experts: GpuSlice<'a, f32>,
    /// Of what the MLP gives.
    pub mlp_sum: GpuSlice<'a, f32>,
    /// Of what the experts give.
    pub expert_sum: GpuSlice<'a, f32>,
    /// Of the sum of these two.
    pub sum: GpuSlice<'a, f32>,
    /// Multiplies the residual stream at the end, `[1]`.
    pub scalar: GpuSlice<'a, f32>,
}

impl<'a> SandwichNorms<'a> {
    fn weights(&self) -> [GpuSlice<'a, f32>; 6] {
        [
            self.mixer_sum,
            self.router,
            self.experts,
            self.mlp_sum,
            self.expert_sum,
            self.sum,
        ]
    }
}

/// A layer with experts, from what its mixer gives to the projections that the next mixer begins with, for one row; the residual stream is
/// complete before and after.
#[derive(Clone, Copy, Debug)]
pub struct GpuMoeChain<'a> {
    /// Its products.
    pub layers: MoeChainLayers<'a>,
    /// What the mixer gives: `[output.inputs()]`.
    pub x: GpuSlice<'a, bf16>,
    /// The residual stream, to which the outputs of `output`, of the experts and of what is beside them are added; norms of them in a sandwich.
    pub hidden: GpuSlice<'a, bf16>,
    /// Of the residual stream, for the router, the experts and what is beside them; in a sandwich for that alone.
    pub norm: GpuNorm<'a>,
    /// How logits become weights.
    pub router: GpuRouter<'a>,
    /// Takes the router's, `[experts]`.
    pub logits: GpuSlice<'a, f32>,
    /// Counts of rows that went to each expert, `[experts]`, if they are counted: see [`GpuExpertLoads`](super::GpuExpertLoads).
    pub loads: Option<GpuSlice<'a, u32>>,
    /// Of all gates.
    pub activation: ExpertActivation,
    /// Takes `activation(gate) * up` of the row's experts, those of the largest logits first: `[top_k, inner]`.
    pub activated: GpuSlice<'a, bf16>,
    /// Takes the same of what every row goes to, `[inner]` of it, if there is that.
    pub dense_activated: Option<GpuSlice<'a, bf16>>,
    /// Takes the logit of its gate, `[1]`, if it has one.
    pub gate_logit: Option<GpuSlice<'a, f32>>,
    /// Of a layer with an MLP beside the experts.
    pub sandwich: Option<SandwichNorms<'a>>,
    /// What follows, if it is to be computed too.
    pub next: Option<GpuChainEnd<'a>>,
}

/// `Matrices` of `kernels/include/moe_chain.cuh`.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
struct Matrices {
    first: Matrix,
    bias: u64,
    stride: u64,
}

impl Matrices {
    fn of(experts: &GpuExperts) -> Self {
        let Addresses { matrix, bias } = experts.addresses();
        Self {
            first: matrix,
            bias,
            stride: experts.stride() as u64,
        }
    }
}

/// `RowNorm` of `kernels/include/moe_chain.cuh`.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
struct RowNorm {
    weight: u64,
    eps: f32,
    padding: u32,
}

impl RowNorm {
    fn of(norm: GpuNorm<'_>) -> Self {
        Self {
            weight: norm.weight.ptr(),
            eps: norm.eps,
            padding: 0,
        }
    }
}

/// `Router` of `kernels/include/route.cuh`.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
struct Router {
    bias: u64,
    /// The kernels have a `bool`, which is the lowest byte.
    of_all: u32,
    scale: f32,
    scales: u64,
}

/// `MoeChain` of `kernels/include/moe_chain.cuh`. What there is none of is 0.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
struct Args {
    x: u64,
    output: Matrix,
    output_bias: u64,
    hidden: u64,
    norm: RowNorm,
    router_weight: u64,
    router: Router,
    logits: u64,
    loads: u64,
    gate_up: Matrices,
    down: Matrices,
    dense_gate_up: Matrix,
    dense_down: Matrix,
    shared_gate: u64,
    shared_logit: u64,
    activated: u64,
    dense_activated: u64,
    next_norm: RowNorm,
    next: [Projection; PROJECTIONS],
    exchange: u64,
    attended: i32,
    width: i32,
    experts: i32,
    top_k: i32,
    inner: i32,
    kind: i32,
    stage_bytes: i32,
    stages: i32,
    in_flight: i32,
    plain_bytes: i32,
}

/// `SandwichChain` of `kernels/moe_chain_sandwich.cu`.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
struct SandwichArgs {
    moe: Args,
    mixer_norm: u64,
    router_norm: u64,
    expert_norm: u64,
    mlp_sum_norm: u64,
    expert_sum_norm: u64,
    sum_norm: u64,
    scalar: u64,
    /// Of the MLP.
    inner: i32,
    padding: i32,
}

/// The kernels assert the same.
const _: () = assert!(size_of::<Args>() == 432 && size_of::<SandwichArgs>() == size_of::<Args>() + 64);

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
            dense_activated,
            gate_logit,
            sandwich,
            next,
        } = chain;
        let kernels = self.chain.as_ref().expect("ask `can_chain`");
        let plan = kernels.plan(&layers, next.map(|next| next.linear));
        let Plan {
            function,
            ring,
            inputs,
        } = plan.expect("ask `can_chain`");
        let (output, gate_up, down) = (layers.output, layers.gate_up, layers.down);
        let (width, inner, experts) = (output.outputs(), down.inputs(), gate_up.count());
        let (dense, gate) = (layers.dense, layers.dense.and_then(|dense| dense.gate));
        let dense_inner = dense.map(|dense| dense.down.inputs());
        assert_eq!((x.len(), hidden.len()), (output.inputs(), width), "one row");
        assert_eq!(
            (activated.len(), logits.len()),
            (layers.top_k * inner, experts),
            "one row"
        );
        router.check_experts(experts);
        assert!(
            loads.is_none_or(|loads| loads.len() == experts),
            "a count for each expert"
        );
        assert_eq!(
            (
                dense_activated.map(|activated| activated.len()),
                gate_logit.map(|logit| logit.len()),
                sandwich.map(|norms| norms.scalar.len()),
            ),
            (dense_inner, gate.map(|_| 1), layers.sandwiched().map(|_| 1)),
            "room and norms for what every row goes to"
        );
        if let Some(next) = &next {
            assert_eq!(next.out.len(), next.linear.outputs(), "one row");
        }
        let ends = next.map(|next| next.norm.weight);
        let norms = sandwich.iter().flat_map(SandwichNorms::weights);
        let norms: Vec<_> = norms.chain(ends).chain([norm.weight]).collect();
        assert!(norms.iter().all(|norm| norm.len() == width), "norms of one row");
        let rows = [x, hidden, activated].into_iter().chain(dense_activated);
        let mut aligned = rows
            .map(|row| row.ptr())
            .chain(norms.iter().map(|norm| norm.ptr()));
        assert!(
            aligned.all(chain::is_aligned),
            "rows at multiples of {PIECE} bytes"
        );
        let int = |value: usize| value as i32;
        let none = Matrix::zeroed();
        let args = Args {
            x: x.ptr(),
            output: Matrix::of(output),
            output_bias: output.bias().map_or(0, |bias| bias.ptr()),
            hidden: hidden.ptr(),
            norm: RowNorm::of(norm),
            router_weight: layers.router.weight().ptr(),
            router: Router {
                bias: router.bias.map_or(0, |bias| bias.ptr()),
                of_all: u32::from(router.softmax == RouterSoftmax::All),
                scale: router.scale,
                scales: router.expert_scale.map_or(0, |scales| scales.ptr()),
            },
            logits: logits.ptr(),
            loads: loads.map_or(0, |loads| loads.ptr()),
            gate_up: Matrices::of(gate_up),
            down: Matrices::of(down),
            dense_gate_up: dense.map_or(none, |dense| Matrix::of(dense.gate_up)),
            dense_down: dense.map_or(none, |dense| Matrix::of(dense.down)),
            shared_gate: gate.map_or(0, |gate| gate.weight().ptr()),
            shared_logit: gate_logit.map_or(0, |logit| logit.ptr()),
            activated: activated.ptr(),
            dense_activated: dense_activated.map_or(0, |activated| activated.ptr()),
            next_norm: next.map_or(RowNorm::zeroed(), |next| RowNorm::of(next.norm)),
            next: Projection::all(next),
            exchange: linears.chain_room().ptr(),
            attended: int(x.len()),
            width: int(width),
            experts: int(experts),
            top_k: int(layers.top_k),
            inner: int(inner),
            kind: kind(activation),
            stage_bytes: int(ring.stage_bytes),
            stages: int(ring.stages),
            in_flight: int(BYTES_IN_FLIGHT),
            plain_bytes: int(inputs.plain),
        };
        let launch = Launch::new([self.gpu.info().sm_count as u32, 1, 1], THREADS as u32)
            .shared(ring.bytes() + inputs.bytes())
            .pdl(true);
        let Some(norms) = sandwich else {
            // SAFETY: the lengths were checked; the argument is that of kernels/moe_chain.cu. For its blocks that wait for each other holds what
            // is said of `Linears::forward_chain`.
            return unsafe { self.gpu.launch_with_struct(function, launch, &args) };
        };
        let args = SandwichArgs {
            moe: args,
            mixer_norm: norms.mixer_sum.ptr(),
            router_norm: norms.router.ptr(),
            expert_norm: norms.experts.ptr(),
            mlp_sum_norm: norms.mlp_sum.ptr(),
            expert_sum_norm: norms.expert_sum.ptr(),
            sum_norm: norms.sum.ptr(),
            scalar: norms.scalar.ptr(),
            inner: dense_inner.map_or(0, int),
            padding: 0,
        };
        // SAFETY: as above, of kernels/moe_chain_sandwich.cu.
        unsafe { self.gpu.launch_with_struct(function, launch, &args) }
    }
}
