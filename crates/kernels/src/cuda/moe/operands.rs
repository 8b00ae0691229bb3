//! What the kernels of experts take.

use half::bf16;
use plimsoll_device::cuda::{Arg, Gpu, GpuError, GpuSlice, Matrices, TensorMap};

use super::products::Format;
use super::{EXPERT_TILES, MOST_EXPERTS, MOST_ROUTES, VEC};
use crate::RouterSoftmax;
use crate::cuda::chain::Matrix;
use crate::cuda::has_hopper_kernels;
use crate::cuda::linear::{GpuLinear, GpuMatrix};

/// How logits of experts become weights: [`Router`](crate::Router), with a bias.
#[derive(Clone, Copy, Debug)]
pub struct GpuRouter<'a> {
    /// `[experts]`: added to the logits, which `scale` has multiplied.
    pub bias: Option<GpuSlice<'a, bf16>>,
    /// Over which experts weights sum to 1.
    pub softmax: RouterSoftmax,
    /// Multiplies the logits first.
    pub scale: f32,
    /// `[experts]`: multiplies the weights of each expert.
    pub expert_scale: Option<GpuSlice<'a, f32>>,
}

impl<'a> GpuRouter<'a> {
    /// Without scales.
    pub fn plain(bias: Option<GpuSlice<'a, bf16>>, softmax: RouterSoftmax) -> Self {
        Self {
            bias,
            softmax,
            scale: 1.0,
            expert_scale: None,
        }
    }

    pub(super) fn check(&self, logits: GpuSlice<'_, f32>, routes: &GpuRoutes<'_>) {
        let GpuRoutes { rows, experts, .. } = *routes;
        assert_eq!(logits.len(), rows * experts, "logits of [{rows}, {experts}]");
        self.check_experts(experts);
    }

    pub(super) fn check_experts(&self, experts: usize) {
        assert!(
            self.bias.is_none_or(|bias| bias.len() == experts)
                && self.expert_scale.is_none_or(|scales| scales.len() == experts),
            "a bias and a scale for each expert"
        );
    }
}

/// The matrices of all experts of a layer, in one format, `[n, k]` each, at equal distances in one piece of memory.
#[derive(Clone, Debug)]
pub struct GpuExperts {
    first: GpuLinear,
    count: usize,
    /// Bytes from anything of one expert to that of the next.
    stride: usize,
    /// Of the matrices, for the kernels of Hopper's generation that take one.
    map: Option<TensorMap>,
    /// One more that every row goes to, wherever it lies.
    shared: Option<GpuLinear>,
}

/// Of the first expert, in device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Addresses {
    pub(super) matrix: Matrix,
    /// 0 for none.
    pub(super) bias: u64,
}

impl Addresses {
    pub(super) fn of(linear: &GpuLinear) -> Self {
        Self {
            matrix: Matrix::of(linear),
            bias: linear.bias().map_or(0, |bias| bias.ptr()),
        }
    }

    /// The same so many bytes further.
    fn behind(self, bytes: u64) -> Self {
        let add = |address| if address == 0 { 0 } else { address + bytes };
        Self {
            matrix: Matrix {
                weight: add(self.matrix.weight),
                scales: add(self.matrix.scales),
                ..self.matrix
            },
            bias: add(self.bias),
        }
    }
}

impl GpuExperts {
    /// Of each expert, in order.
    ///
    /// # Errors
    /// [`GpuError`] of a tensor map.
    ///
    /// # Panics
    /// If there are none, or they differ, or do not lie at equal distances.
    pub fn new(gpu: &Gpu, experts: &[GpuLinear]) -> Result<Self, GpuError> {
        let first = &experts[0];
        let start = Addresses::of(first);
        let stride = match experts.get(1) {
            None => 0,
            Some(second) => Addresses::of(second).matrix.weight - start.matrix.weight,
        };
        for (index, expert) in (0_u64..).zip(experts) {
            assert!(expert.is_like(first), "experts of one shape and format");
            assert_eq!(
                Addresses::of(expert),
                start.behind(index * stride),
                "experts at equal distances"
            );
        }
        assert!(
            stride.is_multiple_of(16) && start.matrix.weight.is_multiple_of(16),
            "experts at multiples of 16 bytes"
        );
        let (count, stride) = (experts.len(), stride as usize);
        let format = Format::of(first.matrix());
        let map = match has_hopper_kernels(gpu) && !format.has_four_bits() {
            false => None,
            true => Some(gpu.tensor_map(&Matrices {
                first: start.matrix.weight,
                rows: first.outputs(),
                row_bytes: format.pitch(first.inputs()),
                pitch: format.pitch(first.inputs()),
                count,
                stride,
            })?),
        };
        Ok(Self {
            first: first.clone(),
            count,
            stride,
            map,
            shared: None,
        })
    }

    /// With the matrix of the expert that all rows go to, if it is like the others, has no bias and lies at a multiple of 16 bytes:
    /// [`MoeKernels::shares`](super::MoeKernels::shares).
    #[must_use]
    pub fn with_shared(mut self, shared: &GpuLinear) -> Self {
        let is_alike = shared.bias().is_none() && shared.is_like(&self.first);
        let is_aligned = || Addresses::of(shared).matrix.weight.is_multiple_of(16);
        self.shared = (is_alike && is_aligned()).then(|| shared.clone());
        self
    }

    /// Experts.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Output features of each.
    pub fn outputs(&self) -> usize {
        self.first.outputs()
    }

    /// Input features of each.
    pub fn inputs(&self) -> usize {
        self.first.inputs()
    }

    pub(super) fn stride(&self) -> usize {
        self.stride
    }

    pub(super) fn map(&self) -> Option<&TensorMap> {
        self.map.as_ref()
    }

    pub(super) fn shared(&self) -> Option<&GpuLinear> {
        self.shared.as_ref()
    }

    pub(super) fn first(&self) -> &GpuLinear {
        &self.first
    }

    pub(super) fn matrix(&self) -> &GpuMatrix {
        self.first.matrix()
    }

    pub(super) fn addresses(&self) -> Addresses {
        Addresses::of(&self.first)
    }
}

/// Which rows of a step go to which experts: filled by [`MoeKernels::route`](super::MoeKernels::route),
/// [`route_inputs`](super::MoeKernels::route_inputs) or [`route_gate_up`](super::MoeKernels::route_gate_up). Places are routes grouped
/// by expert, and those of an expert in the order of rows.
#[derive(Clone, Copy, Debug)]
pub struct GpuRoutes<'a> {
    /// `[rows, top_k]`: experts, ascending, where there are many rows.
    pub chosen: GpuSlice<'a, u16>,
    /// `[rows, top_k]`: what each expert's output is multiplied by.
    pub weights: GpuSlice<'a, f32>,
    /// `[rows, top_k]`: the place of each route.
    pub places: GpuSlice<'a, i32>,
    /// `[rows * top_k]`: the route at each place.
    pub sources: GpuSlice<'a, i32>,
    /// As many as [`Self::tile_list`] says: how many tiles there are, those, and room to count routes.
    pub tiles: GpuSlice<'a, i32>,
    /// Rows of the step.
    pub rows: usize,
    /// Experts of each.
    pub top_k: usize,
    /// Experts of the layer.
    pub experts: usize,
    /// Rows of a tile, as [`MoeKernels::tile`](super::MoeKernels::tile) says, or another one of [`EXPERT_TILES`].
    pub tile: usize,
    /// Where it is counted how many rows go to each expert, if it is.
    pub loads: Option<GpuExpertLoads<'a>>,
    /// The products have the shared expert in them too, where [`MoeKernels::shares`](super::MoeKernels::shares): its places, one for each row in
    /// order, are behind those of routes.
    pub shared: bool,
}

/// How many rows went to each expert of a layer, counted by the kernels that send them there.
#[derive(Clone, Copy, Debug)]
pub struct GpuExpertLoads<'a> {
    /// `[experts]`: what a step adds to, modulo 2^32.
    pub counts: GpuSlice<'a, u32>,
    /// `[1]`: how many rows count. Those behind them are padding, which a step of one row never is.
    pub rows: GpuSlice<'a, i32>,
}

impl GpuRoutes<'_> {
    /// Elements of the list of tiles of so many routes, and of the counts of routes that lie behind it.
    pub fn tile_list(routes: usize, experts: usize) -> usize {
        4 * (1 + most_tiles(routes, experts, EXPERT_TILES[0])) + experts + 1
    }

    /// `[experts]` and `[1]`: where many routes are counted, those of each expert, and experts that have been counted.
    pub(super) fn counts(&self) -> [GpuSlice<'_, i32>; 2] {
        let end = self.tiles.len();
        [
            self.tiles.range(end - 1 - self.experts..end - 1),
            self.tiles.range(end - 1..end),
        ]
    }

    /// `Loads` of `kernels/include/route.cuh`.
    pub(super) fn load_args(&self) -> [Arg; 2] {
        match &self.loads {
            None => [0_u64.into(), 0_u64.into()],
            Some(loads) => [loads.counts.into(), loads.rows.into()],
        }
    }

    /// Tiles that there may be.
    pub(super) fn most_tiles(&self) -> usize {
        self.most_tiles_of(self.tile)
    }

    /// Tiles of so many rows that there may be.
    pub(super) fn most_tiles_of(&self, rows: usize) -> usize {
        most_tiles(self.len(), self.experts, rows)
    }

    /// Routes of all rows.
    pub(super) fn len(&self) -> usize {
        self.rows * self.top_k
    }

    /// Places, with those of the shared expert.
    pub(super) fn places(&self) -> usize {
        self.len() + self.shared_rows()
    }

    /// Rows that the products of routes compute for the shared expert.
    pub(super) fn shared_rows(&self) -> usize {
        if self.shared { self.rows } else { 0 }
    }

    pub(super) fn check(&self) {
        let Self {
            top_k, experts, tile, ..
        } = *self;
        assert!(
            EXPERT_TILES.contains(&tile),
            "there is no kernel for tiles of {tile}"
        );
        assert!(
            (1..=experts.min(MOST_ROUTES)).contains(&top_k) && experts <= MOST_EXPERTS,
            "{top_k} of {experts} experts"
        );
        let routes = self.len();
        assert!(
            self.chosen.len() == routes
                && self.weights.len() == routes
                && self.places.len() == routes
                && self.sources.len() == routes
                && self.tiles.len() == Self::tile_list(routes, experts),
            "{routes} routes"
        );
        assert!(
            (self.loads.as_ref()).is_none_or(|loads| (loads.counts.len(), loads.rows.len()) == (experts, 1)),
            "a count for each expert"
        );
        assert!(
            self.chosen.ptr().is_multiple_of(16) && self.tiles.ptr().is_multiple_of(16),
            "routes begin at multiples of 16 bytes"
        );
    }
}

/// What rows' experts made of them, before it is summed.
#[derive(Clone, Copy, Debug)]
pub struct GpuExpertOutputs<'a> {
    /// `[rows * top_k, n]`, in the order of places; those of the shared expert behind them, if routes have it.
    pub x: GpuSlice<'a, bf16>,
    /// Which place is whose.
    pub routes: GpuRoutes<'a>,
    /// `[rows]`: the sigmoid of each multiplies the shared expert's output for the row. There are some if routes have that expert.
    pub gates: Option<GpuSlice<'a, f32>>,
}

impl<'a> GpuExpertOutputs<'a> {
    /// Elements of a row of the sums, `[rows, n]`.
    pub(super) fn width(&self, sums: GpuSlice<'_, bf16>) -> usize {
        self.routes.check();
        let rows = self.routes.rows;
        let n = sums.len() / rows.max(1);
        assert_eq!(sums.len(), rows * n, "sums of [rows, n]");
        assert_eq!(self.x.len(), self.routes.places() * n, "x of [places, {n}]");
        assert!(
            self.gates
                .map_or(!self.routes.shared, |gates| gates.len() == rows),
            "a gate for each row"
        );
        assert!(n.is_multiple_of(VEC), "rows of {n} are not a multiple of {VEC}");
        n
    }

    /// The shared expert's outputs, `[rows, n]`: among all, or else `apart`.
    pub(super) fn of_shared<'b>(&self, apart: GpuSlice<'b, bf16>) -> GpuSlice<'b, bf16>
    where
        'a: 'b,
    {
        match self.routes.shared {
            true => self.x.range(self.x.len() - apart.len()..self.x.len()),
            false => apart,
        }
    }
}

/// Each expert may have one tile that is not full.
fn most_tiles(routes: usize, experts: usize, tile: usize) -> usize {
    routes / tile + experts.min(routes)
}

#[cfg(test)]
mod tests {
    use super::most_tiles;

    #[test]
    fn no_routing_has_more_tiles() {
        for (routes, experts, tile) in [(1, 8, 16), (40, 5, 16), (1000, 128, 64), (129, 1, 128)] {
            let tiles = |counts: &[usize]| counts.iter().map(|count| count.div_ceil(tile)).sum::<usize>();
            let most = most_tiles(routes, experts, tile);
            // One row for each expert but the first, and all others to that one.
            let others = (experts - 1).min(routes - 1);
            let mut counts = vec![1; others];
            counts.push(routes - others);
            assert!(tiles(&counts) <= most && tiles(&[routes]) <= most);
            let even = vec![routes.div_ceil(experts); experts.min(routes)];
            assert!(tiles(&even) <= most + 1, "{routes} {experts} {tile}");
        }
    }
}
