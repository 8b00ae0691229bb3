//! Mixtures of experts on the GPU: `kernels/moe_route.cu`, and the products of `kernels/moe_few.cu`, `moe_hopper.cu` and `moe.cu`.
//!
//! Where rows go is known in device memory only. What is launched, and the memory that it takes, depends on the numbers of rows
//! and experts. A row's result depends on that row and the size of tiles alone, to the bit, whatever rows are beside it.

mod operands;
mod products;

use half::bf16;
use plimsoll_device::cuda::{Arg, Function, Gpu, GpuError, GpuSlice, Launch};

use super::fused::int;
use super::has_hopper_kernels;
use super::linear::mxfp4_pitch;
use crate::{Activation, ExpertActivation, RouterSoftmax};

pub use operands::{GpuExperts, GpuRouter, GpuRoutes};
use products::{Format, Products};

/// Rows of a tile, of which the kernels have one each.
pub const EXPERT_TILES: [usize; 3] = [16, 64, 128];

/// Most experts, and most of them for a row.
pub const MOST_EXPERTS: usize = 1024;
/// See [`MOST_EXPERTS`].
pub const MOST_ROUTES: usize = 32;

/// Constants of the kernels.
const WARP: usize = 32;
const VEC: usize = 8;
const ROUTE_WARPS: usize = 8;
const GROUP_THREADS: u32 = 512;
const FEW_THREADS: u32 = 1024;
const FEW_ROUTES: usize = 128;
const COMBINE_THREADS: usize = 128;

/// The kernels of experts, the twins of [`route`](crate::route()) and [`experts`](crate::experts()).
#[derive(Debug)]
pub struct MoeKernels {
    gpu: Gpu,
    route: Function,
    group: Function,
    route_few: Function,
    products: Products,
    combine: Function,
    fill_mxfp4: Function,
    /// Of each list of tiles, where it is not chosen by the numbers of rows and experts.
    tile: Option<usize>,
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
            products: Products::load(gpu, hopper)?,
            combine: sums.function("moe_combine")?,
            fill_mxfp4: sums.function("moe_fill_mxfp4")?,
            tile: None,
        })
    }

    /// Cuts all lists into tiles of that many rows from now on, one of [`EXPERT_TILES`], for tests and benchmarks.
    pub fn fix_tile(&mut self, tile: Option<usize>) {
        assert!(
            tile.is_none_or(|tile| EXPERT_TILES.contains(&tile)),
            "no kernel for such tiles"
        );
        self.tile = tile;
    }

    /// Rows of a tile: no wider than an expert's rows are likely to fill, as long as reading the weights is what takes time.
    fn tile(&self, routes: &GpuRoutes<'_>) -> usize {
        let each = routes.len() / routes.experts;
        self.tile.unwrap_or(match each {
            0..=8 => 16,
            9..=48 => 64,
            _ => 128,
        })
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
        let GpuRoutes {
            rows, top_k, experts, ..
        } = *routes;
        assert_eq!(logits.len(), rows * experts, "logits of [{rows}, {experts}]");
        let GpuRouter {
            bias,
            softmax,
            scale,
            expert_scale,
        } = router;
        assert!(
            bias.is_none_or(|bias| bias.len() == experts)
                && expert_scale.is_none_or(|scales| scales.len() == experts),
            "a bias and a scale for each expert"
        );
        if rows == 0 {
            return Ok(());
        }
        let tile = self.tile(routes);
        let args = [
            logits.into(),
            bias.map_or(0, |bias| bias.ptr()).into(),
            routes.chosen.into(),
            routes.weights.into(),
            routes.places.into(),
            routes.sources.into(),
            routes.tiles.into(),
            int(rows),
            int(experts),
            int(top_k),
            int(tile),
            i32::from(softmax == RouterSoftmax::All).into(),
            scale.into(),
            expert_scale.map_or(0, |scales| scales.ptr()).into(),
        ];
        if routes.len() <= FEW_ROUTES {
            return self.launch(&self.route_few, Launch::new([1, 1, 1], FEW_THREADS), &args);
        }
        let blocks = rows.div_ceil(ROUTE_WARPS) as u32;
        let launch = Launch::new([blocks, 1, 1], (ROUTE_WARPS * WARP) as u32);
        self.launch(&self.route, launch, &args)?;
        let args = [
            routes.chosen.into(),
            routes.places.into(),
            routes.sources.into(),
            routes.tiles.into(),
            int(rows),
            int(experts),
            int(top_k),
            int(tile),
        ];
        let launch = Launch::new([experts as u32, 1, 1], GROUP_THREADS);
        self.launch(&self.group, launch, &args)
    }

    /// Gate and up of each expert for its rows of `x` `[rows, k]`, and the activation of both, into `out` `[rows * top_k, n / 2]`, in
    /// the order of places. `experts` are `[n, k]` each: gate, then up.
    ///
    /// # Errors
    /// [`GpuError`] of the launch.
    ///
    /// # Panics
    /// If a length does not fit.
    pub fn gate_up(
        &self,
        x: GpuSlice<'_, bf16>,
        experts: &GpuExperts,
        activation: ExpertActivation,
        routes: &GpuRoutes<'_>,
        out: GpuSlice<'_, bf16>,
    ) -> Result<(), GpuError> {
        assert_eq!(x.len(), routes.rows * experts.inputs(), "x of [rows, k]");
        self.product(x, experts, Some(activation), routes, out)
    }

    /// Each expert's product with its rows of `x` `[rows * top_k, k]` into `out` `[rows * top_k, n]`, both in the order of places.
    ///
    /// # Errors
    /// [`GpuError`] of the launch.
    ///
    /// # Panics
    /// If a length does not fit.
    pub fn down(
        &self,
        x: GpuSlice<'_, bf16>,
        experts: &GpuExperts,
        routes: &GpuRoutes<'_>,
        out: GpuSlice<'_, bf16>,
    ) -> Result<(), GpuError> {
        assert_eq!(x.len(), routes.len() * experts.inputs(), "x of [places, k]");
        self.product(x, experts, None, routes, out)
    }

    /// Of all rows with an activation, of places without.
    fn product(
        &self,
        x: GpuSlice<'_, bf16>,
        experts: &GpuExperts,
        activation: Option<ExpertActivation>,
        routes: &GpuRoutes<'_>,
        out: GpuSlice<'_, bf16>,
    ) -> Result<(), GpuError> {
        routes.check();
        let (format, k) = (Format::of(experts.matrix()), experts.inputs());
        let (stacked, gathered) = match activation {
            Some(_) => (2, routes.top_k),
            None => (1, 0),
        };
        let n = experts.outputs() / stacked;
        assert_eq!(experts.count(), routes.experts, "experts");
        assert_eq!(out.len(), routes.len() * n, "out of [places, {n}]");
        assert!(
            experts.outputs() == n * stacked
                && n.is_multiple_of(VEC)
                && k.is_multiple_of(format.inputs())
                && k > 0,
            "experts of [{n}, {k}]"
        );
        if routes.rows == 0 {
            return Ok(());
        }
        let tile = self.tile(routes);
        let product = self.products.of(format, tile);
        let address = experts.addresses();
        let launch = product.launch_of(n * stacked, k, address.scale_stride, routes.most_tiles(tile));
        let (shared, most) = (launch.shared as usize, self.gpu.info().max_shared_bytes);
        assert!(
            shared <= most,
            "{shared} bytes of shared memory, of which there are {most}"
        );
        let args = [
            x.into(),
            address.weight.into(),
            address.bias.into(),
            address.scales.into(),
            out.into(),
            routes.sources.into(),
            routes.tiles.into(),
            (experts.stride() as u64).into(),
            int(n),
            int(k),
            int(format.pitch(k)),
            int(gathered),
            activation.map_or(0, kind).into(),
            int(address.scale_stride),
        ];
        self.launch(&product.function, launch, &args)
    }

    /// The sums of each row's experts: `x` is `[rows * top_k, n]` in the order of places, `out` `[rows, n]`. With `gates`, `[rows]`,
    /// the sigmoid of each times what is in `out` is added, as [`add_gated`](crate::add_gated) does.
    ///
    /// # Errors
    /// [`GpuError`] of the launch.
    ///
    /// # Panics
    /// If a length does not fit.
    pub fn combine(
        &self,
        x: GpuSlice<'_, bf16>,
        routes: &GpuRoutes<'_>,
        gates: Option<GpuSlice<'_, f32>>,
        out: GpuSlice<'_, bf16>,
    ) -> Result<(), GpuError> {
        routes.check();
        if routes.rows == 0 {
            return Ok(());
        }
        let n = out.len() / routes.rows;
        assert_eq!(out.len(), routes.rows * n, "out of [rows, n]");
        assert_eq!(x.len(), routes.len() * n, "x of [places, {n}]");
        assert!(
            gates.is_none_or(|gates| gates.len() == routes.rows),
            "a gate for each row"
        );
        assert!(n.is_multiple_of(VEC), "rows of {n} are not a multiple of {VEC}");
        let args = [
            x.into(),
            routes.places.into(),
            routes.weights.into(),
            gates.map_or(0, |gates| gates.ptr()).into(),
            out.into(),
            int(n),
            int(routes.top_k),
        ];
        let blocks = (n / VEC).div_ceil(COMBINE_THREADS) as u32;
        let launch = Launch::new([routes.rows as u32, blocks, 1], COMBINE_THREADS as u32);
        self.launch(&self.combine, launch, &args)
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
