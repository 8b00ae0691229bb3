//! Mixtures of experts on the GPU: `kernels/moe_route.cu` and `moe_route_hopper.cu`, and the products of `kernels/moe_few.cu`,
//! `moe_few_4bit.cu`, `moe_stream.cu`, `moe_hopper.cu`, `moe_hopper_4bit.cu` and `moe.cu`, and the sums of `kernels/moe_combine.cu`.
//! `kernels/moe_chain.cu` is all of it for one row, with the products around it; `kernels/moe_chain_sandwich.cu` where an MLP is beside the experts.
//!
//! Where rows go is known in device memory only. What is launched, and the memory that it takes, depends on the numbers of rows
//! and experts. A row's result depends on that row, the size of tiles and on how many rows there are, as `moe_chain.cu` takes one and
//! `moe_stream.cu`, with MXFP4 weights, neither one nor many; but on no other row, to the bit.

mod chain;
mod fused_router;
mod operands;
mod products;
mod stream;
mod sums;

use half::bf16;
use plimsoll_device::cuda::{Arg, Function, Gpu, GpuError, GpuSlice, Launch};

use super::chain::Matrix;
use super::fused::{address as address_of, fp8_args, int};
use super::has_hopper_kernels;
use super::linear::{FP8_BLOCK, Fp8Scaling, GpuLinear, GpuRows, mxfp4_pitch};
use crate::{Activation, ExpertActivation, RouterSoftmax};

use chain::MoeChainKernels;
pub use chain::{DenseLayers, GpuMoeChain, MoeChainLayers, SandwichNorms};
use fused_router::FusedRouter;
use operands::Addresses;
pub use operands::{GpuExpertLoads, GpuExpertOutputs, GpuExperts, GpuRouter, GpuRoutes};
use products::{Format, Products};
use stream::StreamKernel;

/// Rows of a tile, of which the kernels have one each.
pub const EXPERT_TILES: [usize; 3] = [16, 64, 128];

/// Most experts, and most of them for a row.
pub const MOST_EXPERTS: usize = 1024;
/// See [`MOST_EXPERTS`].
pub const MOST_ROUTES: usize = 32;

/// Routes for each expert up to which tiles have 16 rows: reading the weights is what takes time.
const FEW_ROUTES_EACH: usize = 8;
/// The same of experts in integers of four bits: the kernel of few rows takes about half as long as that of many.
const FEW_INT4_ROUTES_EACH: usize = 16;

/// Constants of the kernels.
const WARP: usize = 32;
const VEC: usize = 8;
const ROUTE_WARPS: usize = 8;
const GROUP_THREADS: u32 = 1024;
const FEW_THREADS: u32 = 1024;
const FEW_ROUTES: usize = 128;

/// The kernels of experts, the twins of [`route`](crate::route()) and [`experts`](crate::experts()).
#[derive(Debug)]
pub struct MoeKernels {
    gpu: Gpu,
    route: Function,
    group: Function,
    route_few: Function,
    /// On GPUs of Hopper's generation.
    fused_router: Option<FusedRouter>,
    products: Products,
    /// On GPUs of Hopper's generation.
    stream: Option<StreamKernel>,
    /// On GPUs of Hopper's generation.
    chain: Option<MoeChainKernels>,
    combine: Function,
    /// Of rows of which a thread keeps one vector or two; then the same with quantised outputs.
    add_rms_norm: [[Function; 2]; 2],
    fill_mxfp4: Function,
}

/// What becomes of sums: `Kind` of `kernels/include/experts.cuh`.
fn kind(activation: ExpertActivation) -> i32 {
    match activation {
        ExpertActivation::Glu(Activation::Silu) => 1,
        ExpertActivation::Glu(Activation::GeluTanh) => 2,
        ExpertActivation::ClampedSwiglu => 3,
    }
}

impl MoeKernels {
    /// Loads the kernels.
    ///
    /// # Errors
    /// [`GpuError`] if this binary carries no code for this GPU.
    pub fn load(gpu: &Gpu) -> Result<Self, GpuError> {
        Self::load_with(gpu, has_hopper_kernels(gpu))
    }

    /// Loads the kernels that run on all GPUs.
    ///
    /// # Errors
    /// As [`Self::load`].
    pub fn load_portable(gpu: &Gpu) -> Result<Self, GpuError> {
        Self::load_with(gpu, false)
    }

    fn load_with(gpu: &Gpu, hopper: bool) -> Result<Self, GpuError> {
        let (routes, sums) = (super::load(gpu, "moe_route")?, super::load(gpu, "moe_combine")?);
        Ok(Self {
            gpu: gpu.clone(),
            route: routes.function("moe_route")?,
            group: routes.function("moe_group")?,
            route_few: routes.function("moe_route_few")?,
            fused_router: hopper.then(|| FusedRouter::load(gpu)).transpose()?,
            products: Products::load(gpu, hopper)?,
            stream: hopper.then(|| StreamKernel::load(gpu)).transpose()?,
            chain: hopper.then(|| MoeChainKernels::load(gpu)).transpose()?.flatten(),
            combine: sums.function("moe_combine")?,
            add_rms_norm: [
                [
                    sums.function("moe_add_rms_norm_1")?,
                    sums.function("moe_add_rms_norm_2")?,
                ],
                [
                    sums.function("moe_add_rms_norm_fp8_1")?,
                    sums.function("moe_add_rms_norm_fp8_2")?,
                ],
            ],
            fill_mxfp4: sums.function("moe_fill_mxfp4")?,
        })
    }

    /// Rows of a tile for so many routes, one of [`EXPERT_TILES`]: no wider than an expert's rows are likely to fill, as long as reading the
    /// weights is what takes time, and not wider than is fastest.
    pub fn tile(&self, experts: &GpuExperts, routes: usize) -> usize {
        let format = Format::of(experts.matrix());
        let few = match format {
            Format::Int4(_) => FEW_INT4_ROUTES_EACH,
            _ => FEW_ROUTES_EACH,
        };
        match routes / experts.count() {
            each if each <= few => 16,
            0..=48 => 64,
            _ if self.products.of(format, 64).input_scaling().is_some() => 64,
            _ => 128,
        }
    }

    /// Chooses the experts of each row and groups the rows by them: `logits` is `[rows, experts]`. Twin of [`route`](crate::route()).
    ///
    /// # Errors
    /// [`GpuError`] of the launches.
    ///
    /// # Panics
    /// If a length does not fit, or there are more experts or routes than [`MOST_EXPERTS`] and [`MOST_ROUTES`].
    pub fn route(
        &self,
        logits: GpuSlice<'_, f32>,
        router: GpuRouter<'_>,
        routes: &GpuRoutes<'_>,
    ) -> Result<(), GpuError> {
        routes.check();
        router.check(logits, routes);
        let GpuRoutes {
            rows, top_k, experts, ..
        } = *routes;
        if rows == 0 {
            return Ok(());
        }
        let [loads, loaded_rows] = routes.load_args();
        let mut args = vec![
            logits.into(),
            router.bias.map_or(0, |bias| bias.ptr()).into(),
            routes.chosen.into(),
            routes.weights.into(),
            routes.places.into(),
            routes.sources.into(),
            routes.tiles.into(),
            loads,
            loaded_rows,
            int(rows),
            int(experts),
            int(top_k),
            int(routes.tile),
            i32::from(router.softmax == RouterSoftmax::All).into(),
            router.scale.into(),
            address_of(router.expert_scale),
        ];
        if routes.len() <= FEW_ROUTES {
            return self.launch(&self.route_few, Launch::new([1, 1, 1], FEW_THREADS), &args);
        }
        let [counts, finished] = routes.counts();
        args.push(finished.into());
        let blocks = rows.div_ceil(ROUTE_WARPS) as u32;
        let launch = Launch::new([blocks, 1, 1], (ROUTE_WARPS * WARP) as u32);
        self.launch(&self.route, launch, &args)?;
        let args = [
            routes.chosen.into(),
            routes.places.into(),
            routes.sources.into(),
            routes.tiles.into(),
            loads,
            counts.into(),
            finished.into(),
            int(rows),
            int(experts),
            int(top_k),
            int(routes.tile),
        ];
        let launch = Launch::new([experts as u32, 1, 1], GROUP_THREADS);
        self.launch(&self.group, launch, &args)
    }

    /// Whether `kernels/moe_stream.cu`, whose sums have another order than those of the other kernels, computes these products.
    pub fn streams(&self, experts: &GpuExperts, routes: &GpuRoutes<'_>) -> bool {
        self.stream_launch(experts, routes).is_some()
    }

    fn stream_launch(&self, experts: &GpuExperts, routes: &GpuRoutes<'_>) -> Option<(&Function, Launch)> {
        self.stream.as_ref()?.launch_of(experts, routes)
    }

    /// Whether [`Self::route_inputs`] can, and should, be used; if not, the router's product, and then [`Self::route`].
    pub fn fuses_router(&self, linear: &GpuLinear, routes: &GpuRoutes<'_>) -> bool {
        let fused = self.fused_router.as_ref();
        fused.is_some_and(|fused| fused.launch_of(linear, routes).is_some())
    }

    /// Whether [`Self::route_inputs`] computes the gates of a shared expert with these weights.
    pub fn fuses_gate(&self, gate: &GpuLinear) -> bool {
        FusedRouter::takes_gate(gate)
    }

    /// Whether [`Self::gate_up`] and [`Self::down`] compute the shared expert too, for routes that say so.
    pub fn shares(&self, gate_up: &GpuExperts, down: &GpuExperts, routes: &GpuRoutes<'_>) -> bool {
        let shares = |experts: &GpuExperts| {
            let product = self.products.of(Format::of(experts.matrix()), routes.tile);
            experts.shared().is_some() && product.takes_shared()
        };
        routes.rows > 1 && shares(gate_up) && shares(down)
    }

    /// Rows of the largest step whose products can have the shared expert in them, by [`Self::tile`] and [`Self::shares`].
    pub fn most_shared_rows(experts: usize, top_k: usize) -> usize {
        // Only tiles of 16 rows have it, and none of weights of four bits.
        ((FEW_ROUTES_EACH + 1) * experts - 1) / top_k
    }

    /// [`Self::route`] by the product of `x` `[rows, k]` with the router's weights `linear` `[experts, k]`, in one kernel, where
    /// [`Self::fuses_router`]; and the product with the weights `[1, k]` of a shared expert's gate into `[rows]`, where
    /// [`Self::fuses_gate`]. It does not write `routes.chosen`.
    ///
    /// # Errors
    /// [`GpuError`] of the launch.
    ///
    /// # Panics
    /// If a length does not fit, or it cannot be used.
    pub fn route_inputs(
        &self,
        x: GpuSlice<'_, bf16>,
        linear: &GpuLinear,
        router: GpuRouter<'_>,
        routes: &GpuRoutes<'_>,
        gate: Option<(&GpuLinear, GpuSlice<'_, f32>)>,
    ) -> Result<(), GpuError> {
        routes.check();
        router.check_experts(routes.experts);
        if let Some((gate, gates)) = &gate {
            assert!(self.fuses_gate(gate), "ask `fuses_gate`");
            assert_eq!(
                (gate.inputs(), gates.len()),
                (linear.inputs(), routes.rows),
                "a gate for each row"
            );
            assert!(gate.weight().ptr().is_multiple_of(16), "weights at 16 bytes");
        }
        let fused = self.fused_router.as_ref().expect("ask `fuses_router`");
        let (kernel, launch) = fused.launch_of(linear, routes).expect("ask `fuses_router`");
        let weight = linear.weight();
        assert_eq!(x.len(), routes.rows * linear.inputs(), "x of [rows, k]");
        assert!(
            x.ptr().is_multiple_of(16) && weight.ptr().is_multiple_of(16),
            "rows at multiples of 16 bytes"
        );
        let [loads, loaded_rows] = routes.load_args();
        let args = [
            x.into(),
            weight.into(),
            router.bias.map_or(0, |bias| bias.ptr()).into(),
            routes.weights.into(),
            routes.places.into(),
            routes.sources.into(),
            routes.tiles.into(),
            loads,
            loaded_rows,
            int(routes.rows),
            int(routes.experts),
            int(routes.top_k),
            int(routes.tile),
            int(linear.inputs()),
            i32::from(router.softmax == RouterSoftmax::All).into(),
            router.scale.into(),
            address_of(router.expert_scale),
            gate.as_ref()
                .map_or_else(|| 0_u64.into(), |(gate, _)| gate.weight().into()),
            address_of(gate.map(|(_, gates)| gates)),
        ];
        self.launch(kernel, launch, &args)
    }

    /// How the inputs of a product of so many routes must be quantised; `None` for as they are.
    pub fn input_scaling(&self, experts: &GpuExperts, routes: &GpuRoutes<'_>) -> Option<Fp8Scaling> {
        let format = Format::of(experts.matrix());
        self.products.of(format, routes.tile).input_scaling()
    }

    /// How [`Self::gate_up`] can quantise what it gives out, if it can.
    pub fn output_scaling(&self, experts: &GpuExperts, routes: &GpuRoutes<'_>) -> Option<Fp8Scaling> {
        let format = Format::of(experts.matrix());
        self.products.of(format, routes.tile).output_scaling()
    }

    /// Gate and up of each expert for its rows of `x` `[rows, k]`, and the activation of both, into `out` `[rows * top_k, n / 2]`, in
    /// the order of places; with a shared expert among routes, `[rows * (top_k + 1), n / 2]`. `experts` are `[n, k]` each: gate, then up.
    ///
    /// # Errors
    /// [`GpuError`] of the launch.
    ///
    /// # Panics
    /// If a length does not fit, `x` is not as [`Self::input_scaling`] says, or `out` is quantised otherwise than [`Self::output_scaling`] says.
    pub fn gate_up<'a>(
        &self,
        x: impl Into<GpuRows<'a>>,
        experts: &GpuExperts,
        activation: ExpertActivation,
        routes: &GpuRoutes<'_>,
        out: impl Into<GpuRows<'a>>,
    ) -> Result<(), GpuError> {
        let (x, out) = (x.into(), out.into());
        assert_eq!(x.len(), routes.rows * experts.inputs(), "x of [rows, k]");
        self.product(x, experts, Some(activation), routes, None, out)
    }

    /// [`Self::route`], then [`Self::gate_up`]; for one row both in one kernel, which does not write `routes.chosen`.
    ///
    /// # Errors
    /// As theirs.
    ///
    /// # Panics
    /// As they do.
    pub fn route_gate_up<'a>(
        &self,
        x: impl Into<GpuRows<'a>>,
        (logits, router): (GpuSlice<'_, f32>, GpuRouter<'_>),
        experts: &GpuExperts,
        activation: ExpertActivation,
        routes: &GpuRoutes<'_>,
        out: impl Into<GpuRows<'a>>,
    ) -> Result<(), GpuError> {
        let (x, out) = (x.into(), out.into());
        if routes.rows != 1 || routes.tile != EXPERT_TILES[0] {
            self.route(logits, router, routes)?;
            return self.gate_up(x, experts, activation, routes, out);
        }
        assert_eq!(x.len(), experts.inputs(), "x of [1, k]");
        self.product(x, experts, Some(activation), routes, Some((logits, router)), out)
    }

    /// Each expert's product with its rows of `x` `[rows * top_k, k]` into `out` `[rows * top_k, n]`, both in the order of places, as
    /// [`Self::gate_up`] has given them. That comes first: blocks may look at tiles while the kernel ahead still runs.
    ///
    /// # Errors
    /// [`GpuError`] of the launch.
    ///
    /// # Panics
    /// As [`Self::gate_up`].
    pub fn down<'a>(
        &self,
        x: impl Into<GpuRows<'a>>,
        experts: &GpuExperts,
        routes: &GpuRoutes<'_>,
        out: GpuSlice<'_, bf16>,
    ) -> Result<(), GpuError> {
        let x = x.into();
        assert_eq!(x.len(), routes.places() * experts.inputs(), "x of [places, k]");
        self.product(x, experts, None, routes, None, out.into())
    }

    /// Of all rows with an activation, of places without. With `logits` there is one row, which the kernel sends to its experts by them.
    fn product(
        &self,
        x: GpuRows<'_>,
        experts: &GpuExperts,
        activation: Option<ExpertActivation>,
        routes: &GpuRoutes<'_>,
        logits: Option<(GpuSlice<'_, f32>, GpuRouter<'_>)>,
        out: GpuRows<'_>,
    ) -> Result<(), GpuError> {
        routes.check();
        let (format, k) = (Format::of(experts.matrix()), experts.inputs());
        let (stacked, gathered) = match activation {
            Some(_) => (2, routes.top_k),
            None => (1, 0),
        };
        let n = experts.outputs() / stacked;
        assert_eq!(experts.count(), routes.experts, "experts");
        assert_eq!(out.len(), routes.places() * n, "out of [places, {n}]");
        assert!(
            experts.outputs() == n * stacked
                && n.is_multiple_of(VEC)
                && (stacked == 1 || format != Format::Fp8Blocks || n.is_multiple_of(FP8_BLOCK))
                && k.is_multiple_of(format.inputs())
                && k > 0,
            "experts of [{n}, {k}]"
        );
        if routes.rows == 0 {
            return Ok(());
        }
        let product = self.products.of(format, routes.tile);
        let of_all = routes.shared.then(|| {
            let is_computed = product.takes_shared() && logits.is_none();
            experts.shared().filter(|_| is_computed).expect("ask `shares`")
        });
        let Addresses { matrix, bias } = experts.addresses();
        let scale_stride = matrix.scale_stride as usize;
        let shared_tiles = routes.shared_rows().div_ceil(routes.tile);
        // One row has a tile for each of its experts.
        let most_tiles = logits.map_or_else(|| shared_tiles + routes.most_tiles(), |_| routes.top_k);
        let is_first = activation.is_some();
        let launch = product.launch_of(n * stacked, k, scale_stride, most_tiles, is_first);
        let (shared, most) = (launch.shared as usize, self.gpu.info().max_shared_bytes);
        assert!(
            shared <= most,
            "{shared} bytes of shared memory, of which there are {most}"
        );
        let (scaling, rows) = match &x {
            GpuRows::Bf16(_) => (None, 0),
            GpuRows::Fp8(x) => (Some(x.scaling), x.values.len() / k),
        };
        assert_eq!(scaling, product.input_scaling(), "ask `input_scaling`");
        let (x, x_scales) = x.addresses();
        let (out, quantised) = match out {
            GpuRows::Bf16(out) => (out.ptr(), [0_u64.into(), 0_u64.into(), int(0)]),
            GpuRows::Fp8(out) => {
                assert_eq!(
                    Some(out.scaling),
                    product.output_scaling(),
                    "ask `output_scaling`"
                );
                (0, fp8_args(&out, routes.len(), n))
            }
        };
        let operands = [
            x.into(),
            matrix.weight.into(),
            bias.into(),
            matrix.scales.into(),
            out.into(),
        ];
        let sizes = [
            (experts.stride() as u64).into(),
            int(n),
            int(k),
            int(format.pitch(k)),
            int(gathered),
            activation.map_or(0, kind).into(),
            matrix.scale_stride.into(),
        ];
        if logits.is_none() && product.takes_shared() {
            let places = [routes.sources.into(), routes.tiles.into()];
            let shared = of_all.map(Matrix::of);
            let extra = [
                shared.map_or(0, |shared| shared.weight).into(),
                shared.map_or(0, |shared| shared.scales).into(),
                int(routes.shared_rows()),
                int(routes.len()),
                // One row's tiles are written by the kernel ahead.
                i32::from(activation.is_none() && routes.rows > 1).into(),
            ];
            let args = [&operands[..], &places, &sizes, &extra].concat();
            return self.launch(product.function_for(k, is_first), launch, &args);
        }
        if let Some((kernel, launch)) = self.stream_launch(experts, routes) {
            let places = [routes.sources.into(), routes.tiles.into()];
            return self.launch(kernel, launch, &[&operands[..], &places, &sizes].concat());
        }
        match (logits, &product.of_one) {
            (Some((logits, router)), Some(of_one)) => {
                router.check(logits, routes);
                let [loads, _] = routes.load_args();
                let route = [
                    logits.into(),
                    router.bias.map_or(0, |bias| bias.ptr()).into(),
                    i32::from(router.softmax == RouterSoftmax::All).into(),
                    router.scale.into(),
                    address_of(router.expert_scale),
                    int(routes.experts),
                    routes.weights.into(),
                    routes.places.into(),
                    routes.sources.into(),
                    routes.tiles.into(),
                    loads,
                ];
                self.launch(of_one, launch, &[&route[..], &operands, &sizes].concat())
            }
            (Some(_), None) => unreachable!("only the kernels of few rows send a row to its experts"),
            (None, _) => {
                let places = [routes.sources.into(), routes.tiles.into()];
                let args = [&operands[..], &places, &sizes].concat();
                if !product.takes_map() {
                    return self.launch(&product.function, launch, &args);
                }
                let map = experts
                    .map()
                    .expect("experts on a GPU with these kernels have a map");
                let stride = scaling.map_or(0, |scaling| scaling.input_stride(rows));
                let args = [&args[..], &[x_scales.into(), int(stride)], &quantised].concat();
                // SAFETY: as in `launch`; the map is of the experts, which live.
                unsafe {
                    self.gpu
                        .launch_with_maps(&product.function, launch.pdl(true), &[map], &args)
                }
            }
        }
    }

    /// Random MXFP4 rows of `k` inputs ([`mxfp4_pitch`]) of standard deviation `scale`, near enough, the same for the same seed.
    ///
    /// # Errors
    /// [`GpuError`] of the launch.
    pub fn fill_mxfp4(&self, out: GpuSlice<'_, u8>, k: usize, seed: u64, scale: f32) -> Result<(), GpuError> {
        let args = [
            out.into(),
            (out.len() as u64).into(),
            int(k),
            int(mxfp4_pitch(k)),
            seed.into(),
            scale.into(),
        ];
        let blocks = out.len().div_ceil(256 * 16).min(self.gpu.info().sm_count * 16);
        self.launch(&self.fill_mxfp4, Launch::new([blocks as u32, 1, 1], 256), &args)
    }

    fn launch(&self, kernel: &Function, launch: Launch, args: &[Arg]) -> Result<(), GpuError> {
        // SAFETY: the methods pass what the kernels declare and check the lengths.
        unsafe { self.gpu.launch(kernel, launch.pdl(true), args) }
    }
}
