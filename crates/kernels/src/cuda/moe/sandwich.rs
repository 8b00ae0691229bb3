//! A layer of one row with experts beside an MLP and norms around both, from its mixer's output on, in one launch:
//! `kernels/moe_chain_sandwich.cu`.

use half::bf16;
use plimsoll_device::cuda::{Arg, Function, Gpu, GpuError, GpuSlice, Launch};

use super::chain::{MOST_ACTIVATED, MOST_ROUTED, MOST_WIDTH, STATIC_BYTES, THREADS};
use super::{GpuExperts, GpuRouter, MOST_ROUTES, MoeKernels, address_of, int, kind};
use crate::cuda::chain::{self, BYTES_IN_FLIGHT, GpuChainEnd, PIECE, Ring, STAGE_BYTES};
use crate::cuda::linear::{GpuLinear, GpuMatrix, Linears};
use crate::{Activation, ExpertActivation, RouterSoftmax};

/// Norms of the residual stream that are inputs: the router's, the MLP's and the experts'.
const NORMED: usize = 3;

/// The products of a [`GpuSandwichChain`], all in bf16; only the mixer's last projection and what follows may have biases.
#[derive(Clone, Copy, Debug)]
pub struct SandwichLayers<'a> {
    /// The mixer's last projection.
    pub output: &'a GpuLinear,
    /// Of the MLP, gate, then up.
    pub mlp_gate_up: &'a GpuLinear,
    /// Of the MLP.
    pub mlp_down: &'a GpuLinear,
    /// `[experts, width]`.
    pub router: &'a GpuLinear,
    /// Of each expert, gate, then up.
    pub gate_up: &'a GpuExperts,
    /// Of each expert.
    pub down: &'a GpuExperts,
    /// Experts of the row.
    pub top_k: usize,
}

/// Weights of the norms of a [`GpuSandwichChain`], `[width]` each.
#[derive(Clone, Copy, Debug)]
pub struct SandwichNorms<'a> {
    /// Of what the mixer adds.
    pub mixer_sum: GpuSlice<'a, f32>,
    /// Of what the router sees.
    pub router: GpuSlice<'a, f32>,
    /// Of what the MLP sees.
    pub mlp: GpuSlice<'a, f32>,
    /// Of what experts see.
    pub experts: GpuSlice<'a, f32>,
    /// Of what the MLP gives.
    pub mlp_sum: GpuSlice<'a, f32>,
    /// Of what the experts give.
    pub expert_sum: GpuSlice<'a, f32>,
    /// Of the sum of these two.
    pub sum: GpuSlice<'a, f32>,
    /// Of all of them.
    pub eps: f32,
}

impl<'a> SandwichNorms<'a> {
    fn weights(&self) -> [GpuSlice<'a, f32>; 7] {
        [
            self.mixer_sum,
            self.router,
            self.mlp,
            self.experts,
            self.mlp_sum,
            self.expert_sum,
            self.sum,
        ]
    }
}

/// A layer with experts beside an MLP (Gemma 4), from what its mixer gives to the projections that the next mixer begins with, for one row; the
/// residual stream is complete before and after.
#[derive(Clone, Copy, Debug)]
pub struct GpuSandwichChain<'a> {
    /// Its products.
    pub layers: SandwichLayers<'a>,
    /// Its norms.
    pub norms: SandwichNorms<'a>,
    /// What the mixer gives: `[output.inputs()]`.
    pub x: GpuSlice<'a, bf16>,
    /// The residual stream: the norm of what the mixer adds is added to it, then that of what the MLP and the experts add together.
    pub hidden: GpuSlice<'a, bf16>,
    /// Multiplies the residual stream at the end, `[1]`.
    pub scalar: GpuSlice<'a, f32>,
    /// How logits become weights.
    pub router: GpuRouter<'a>,
    /// Takes the router's, `[experts]`.
    pub logits: GpuSlice<'a, f32>,
    /// Counts of rows that went to each expert, `[experts]`, if they are counted: see [`GpuExpertLoads`](super::GpuExpertLoads).
    pub loads: Option<GpuSlice<'a, u32>>,
    /// Of all gates.
    pub activation: Activation,
    /// Takes `activation(gate) * up` of the row's experts, those of the largest logits first: `[top_k, inner]`.
    pub activated: GpuSlice<'a, bf16>,
    /// The same of the MLP: `[mlp_down.inputs()]`.
    pub mlp_activated: GpuSlice<'a, bf16>,
    /// What follows, if it is to be computed too.
    pub next: Option<GpuChainEnd<'a>>,
}

/// Its blocks wait for each other.
#[derive(Debug)]
pub(super) struct SandwichKernel {
    gpu: Gpu,
    function: Function,
}

impl SandwichKernel {
    /// `None` where its blocks do not all run at once.
    pub(super) fn load(gpu: &Gpu) -> Result<Option<Self>, GpuError> {
        const NAME: &str = "moe_chain_sandwich";
        let mut functions = chain::load(gpu, NAME, &[NAME], THREADS, STATIC_BYTES)?;
        Ok(functions.pop().map(|function| Self {
            gpu: gpu.clone(),
            function,
        }))
    }

    /// Its stages, and bytes of inputs behind them, if the kernel can compute these layers.
    fn plan(&self, layers: &SandwichLayers<'_>, next: Option<&GpuLinear>) -> Option<(Ring, usize)> {
        let &SandwichLayers {
            output,
            mlp_gate_up,
            mlp_down,
            router,
            gate_up,
            down,
            top_k,
        } = layers;
        let (width, inner, mlp_inner) = (output.outputs(), down.inputs(), mlp_down.inputs());
        let [first_gate_up, first_down] = [gate_up, down].map(GpuExperts::first);
        let is_bf16 = |linear: &&GpuLinear| matches!(linear.matrix(), GpuMatrix::Bf16(_));
        let own = [mlp_gate_up, mlp_down, router, first_gate_up, first_down];
        let next_products = next.map_or(&[][..], GpuLinear::products);
        let shape = |linear: &GpuLinear| (linear.outputs(), linear.inputs());
        let activated = top_k * inner + mlp_inner;
        let fit = own.iter().chain([&output]).all(is_bf16)
            && next_products.iter().all(|next| is_bf16(&next))
            && own.iter().all(|linear| linear.bias().is_none())
            && width <= MOST_WIDTH
            && gate_up.count() <= MOST_ROUTED
            && (1..=gate_up.count().min(MOST_ROUTES)).contains(&top_k)
            && down.count() == gate_up.count()
            && shape(router) == (gate_up.count(), width)
            && shape(first_gate_up) == (2 * inner, width)
            && first_down.outputs() == width
            && shape(mlp_gate_up) == (2 * mlp_inner, width)
            && mlp_down.outputs() == width
            && activated <= MOST_ACTIVATED
            && next.is_none_or(|next| next.inputs() == width);
        let pair = 2 * chain::row_bytes(mlp_gate_up)?;
        let rows = [
            chain::row_bytes(output),
            chain::row_bytes(router),
            chain::row_bytes(mlp_down),
            chain::row_bytes(first_gate_up).map(|bytes| 2 * bytes),
            chain::row_bytes(first_down),
            next.map_or(Some(0), chain::longest_row),
        ];
        let inputs = size_of::<bf16>() * output.inputs().max(NORMED * width).max(activated);
        let room = self
            .gpu
            .info()
            .max_shared_bytes
            .checked_sub(STATIC_BYTES + inputs)?;
        let ring = ring_of(pair, rows, room)?;
        fit.then_some((ring, inputs))
    }
}

/// Stages in `room` bytes of shared memory, for rows of so many bytes. Most products have rows of the width of the residual stream: stages of whole pairs
/// of them, of `pair` bytes each, are faster, if there are as many.
fn ring_of(pair: usize, rows: [Option<usize>; 6], room: usize) -> Option<Ring> {
    let [a, b, c, d, e, f] = rows;
    let of = |least: usize| Ring::new([Some(least), Some(pair), a, b, c, d, e, f], room);
    let (ring, whole) = (of(0)?, of(STAGE_BYTES.next_multiple_of(pair)));
    Some(whole.filter(|whole| whole.stages == ring.stages).unwrap_or(ring))
}

impl MoeKernels {
    /// Whether [`Self::forward_sandwich`] can compute these layers for one row, and these projections of what follows if they are to be a
    /// part of it.
    pub fn can_sandwich(&self, layers: &SandwichLayers<'_>, next: Option<&GpuLinear>) -> bool {
        let plan = (self.sandwich.as_ref()).and_then(|kernel| kernel.plan(layers, next));
        plan.is_some()
    }

    /// Computes a layer in one launch, for one row.
    ///
    /// # Errors
    /// [`GpuError`] of the launch.
    ///
    /// # Panics
    /// If a length does not fit, or it cannot be used: ask [`Self::can_sandwich`].
    pub fn forward_sandwich(&self, linears: &Linears, chain: &GpuSandwichChain<'_>) -> Result<(), GpuError> {
        let &GpuSandwichChain {
            layers,
            norms,
            x,
            hidden,
            scalar,
            router,
            logits,
            loads,
            activation,
            activated,
            mlp_activated,
            next,
        } = chain;
        let kernel = self.sandwich.as_ref().expect("ask `can_sandwich`");
        let plan = kernel.plan(&layers, next.map(|next| next.linear));
        let (ring, inputs) = plan.expect("ask `can_sandwich`");
        let (output, gate_up, down) = (layers.output, layers.gate_up, layers.down);
        let (width, inner, experts) = (output.outputs(), down.inputs(), gate_up.count());
        assert_eq!(
            (x.len(), hidden.len(), scalar.len()),
            (output.inputs(), width, 1),
            "one row"
        );
        assert_eq!(
            (activated.len(), mlp_activated.len(), logits.len()),
            (layers.top_k * inner, layers.mlp_down.inputs(), experts),
            "one row"
        );
        router.check_experts(experts);
        assert!(
            loads.is_none_or(|loads| loads.len() == experts),
            "a count for each expert"
        );
        if let Some(next) = &next {
            assert_eq!(next.out.len(), next.linear.outputs(), "one row");
        }
        let next_norm = next.map(|next| next.norm.weight);
        let weights = || norms.weights().into_iter().chain(next_norm);
        assert!(weights().all(|weight| weight.len() == width), "norms of one row");
        let aligned = [x.ptr(), hidden.ptr()]
            .into_iter()
            .chain(weights().map(|weight| weight.ptr()));
        assert!(
            aligned.into_iter().all(|at| at.is_multiple_of(PIECE as u64)),
            "rows at multiples of {PIECE} bytes"
        );
        let null = || Arg::from(0_u64);
        let address = |experts: &GpuExperts| -> [Arg; 2] {
            [
                experts.addresses().weight.into(),
                (experts.stride() as u64).into(),
            ]
        };
        let args: Vec<Arg> = [
            &[
                x.into(),
                output.weight().into(),
                output.bias().map_or(0, |bias| bias.ptr()).into(),
                hidden.into(),
                norms.mixer_sum.into(),
                norms.eps.into(),
                norms.router.into(),
                layers.router.weight().into(),
                router.bias.map_or(0, |bias| bias.ptr()).into(),
                i32::from(router.softmax == RouterSoftmax::All).into(),
                router.scale.into(),
                address_of(router.expert_scale),
                logits.into(),
                loads.map_or_else(null, Into::into),
                norms.mlp.into(),
                layers.mlp_gate_up.weight().into(),
                layers.mlp_down.weight().into(),
                mlp_activated.into(),
                int(layers.mlp_down.inputs()),
                norms.mlp_sum.into(),
                norms.experts.into(),
            ][..],
            &address(gate_up),
            &address(down),
            &[
                activated.into(),
                norms.expert_sum.into(),
                norms.sum.into(),
                scalar.into(),
                next_norm.map_or_else(null, Into::into),
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
                kind(ExpertActivation::Glu(activation)).into(),
                int(ring.stage_bytes),
                int(ring.stages),
                int(BYTES_IN_FLIGHT),
            ],
        ]
        .concat();
        let launch = Launch::new([kernel.gpu.info().sm_count as u32, 1, 1], THREADS as u32)
            .shared(ring.bytes() + inputs)
            .pdl(true);
        // SAFETY: the lengths were checked; the arguments are those of kernels/moe_chain_sandwich.cu. For its blocks that wait for each other
        // holds what is said of `Linears::forward_chain`.
        unsafe { kernel.gpu.launch(&kernel.function, launch, &args) }
    }
}

#[cfg(test)]
mod tests {
    use super::{STATIC_BYTES, ring_of};
    use crate::cuda::AssumedGpu;

    /// Gemma-4-26B-A4B: rows of 2,816 inputs, 4,096 or 8,192 of attention, 2,112 and 704 inside.
    #[test]
    fn stages_are_whole_pairs_of_rows_where_that_costs_none() {
        let ring = |width: usize, attended: usize| {
            let row = |inputs: usize| Some(2 * inputs);
            let rows = [
                row(attended),
                row(width),
                row(2112),
                row(2 * width),
                row(704),
                row(width),
            ];
            let room = AssumedGpu::H200.most_shared() - STATIC_BYTES - 2 * 3 * width;
            let ring = ring_of(4 * width, rows, room).expect("room for a ring");
            (ring.stage_bytes, ring.stages)
        };
        assert_eq!(ring(2816, 4096), (3 * 11_264, 6));
        assert_eq!(ring(2816, 8192), (3 * 11_264, 6));
        assert_eq!(ring(2048, 4096), (32 << 10, 6));
        // Three pairs would leave room for four stages.
        assert_eq!(ring(3840, 4096), (32 << 10, 6));
    }
}
