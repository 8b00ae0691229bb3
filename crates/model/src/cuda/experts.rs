//! What layers with experts take on a GPU: their kernels, their weights as the kernels see them, and memory of a step.

use half::bf16;
use plimsoll_device::cuda::{Gpu, GpuError, GpuSlice};
use plimsoll_kernels::cuda::{
    FP8_BLOCK, Fp8Scaling, GpuExperts, GpuFp8Rows, GpuLinear, GpuRoutes, MOST_EXPERTS, MOST_ROUTES,
    MoeKernels,
};

use super::staging::{Layout, Section};
use super::weights::GpuLayer;
use crate::blocks::{DenseMlp, Moe, Widths};
use crate::spec::MoeSpec;
use crate::{DecoderSpec, ModelError};

/// Kernels, and the experts of each layer that has any.
#[derive(Debug)]
pub(super) struct Experts {
    pub(super) kernels: MoeKernels,
    layers: Vec<Option<LayerExperts>>,
}

/// Of one layer.
#[derive(Debug)]
pub(super) struct LayerExperts {
    /// Its bias, if there is one, is added where the logits are compared.
    pub(super) router: GpuLinear,
    pub(super) gate_up: GpuExperts,
    pub(super) down: GpuExperts,
}

impl Experts {
    /// `None` for a model without experts.
    pub(super) fn load(gpu: &Gpu, layers: &[GpuLayer]) -> Result<Option<Self>, GpuError> {
        let of_layer = |layer: &GpuLayer| layer.mlp.experts().map(|moe| LayerExperts::new(gpu, moe));
        let layers: Vec<_> = layers
            .iter()
            .map(|layer| of_layer(layer).transpose())
            .collect::<Result<_, GpuError>>()?;
        match layers.iter().any(Option::is_some) {
            false => Ok(None),
            true => Ok(Some(Self {
                kernels: MoeKernels::load(gpu)?,
                layers,
            })),
        }
    }

    /// Those of a layer that has some.
    pub(super) fn layer(&self, index: usize) -> &LayerExperts {
        let layer = self.layers[index].as_ref();
        layer.expect("a layer has what its specification says")
    }

    /// The routers of all layers that have one.
    pub(super) fn routers(&self) -> impl Iterator<Item = &GpuLinear> {
        self.layers.iter().flatten().map(|layer| &layer.router)
    }
}

impl LayerExperts {
    fn new(gpu: &Gpu, moe: &Moe<GpuLinear>) -> Result<Self, GpuError> {
        let experts = |routed: &[GpuLinear], of_shared: fn(&DenseMlp<GpuLinear>) -> &GpuLinear| {
            let experts = GpuExperts::new(gpu, routed)?;
            Ok(match &moe.shared {
                None => experts,
                Some(shared) => experts.with_shared(of_shared(&shared.mlp)),
            })
        };
        Ok(Self {
            router: moe.router.without_bias(),
            gate_up: experts(&moe.gate_up, |mlp| &mlp.gate_up)?,
            down: experts(&moe.down, |mlp| &mlp.down)?,
        })
    }
}

/// Where a step keeps what its experts take: room for each of its rows' routes, wherever they go.
#[derive(Clone, Copy, Debug)]
pub(super) struct ExpertLayout {
    /// Of the router; later of the gates of the shared expert.
    logits: Section<f32>,
    chosen: Section<u16>,
    weights: Section<f32>,
    places: Section<i32>,
    sources: Section<i32>,
    tiles: Section<i32>,
    activated: Section<bf16>,
    /// The same in eight bits, and its scales.
    quantised: Section<u8>,
    scales: Section<f32>,
    out: Section<bf16>,
}

impl ExpertLayout {
    /// Of so many rows; `None` if no memory could hold it. Nothing for models without experts.
    pub(super) fn new(layout: &mut Layout, spec: &DecoderSpec, widths: &Widths, rows: usize) -> Option<Self> {
        let routes = rows.checked_mul(widths.routes)?;
        let tiles = match routes {
            0 => 0,
            _ => GpuRoutes::tile_list(routes, widths.experts),
        };
        // Those of a shared expert among routes are behind them.
        let places = routes.checked_add(rows.min(most_shared_rows(spec)))?;
        let [quantised, scales] = match widths.quantised {
            0 => [0, 0],
            _ => [widths.expert_inner, widths.expert_inner.div_ceil(FP8_BLOCK)],
        };
        Some(Self {
            logits: layout.rows(rows, widths.experts)?,
            chosen: layout.rows(routes, 1)?,
            weights: layout.rows(routes, 1)?,
            places: layout.rows(routes, 1)?,
            sources: layout.rows(routes, 1)?,
            tiles: layout.rows(tiles, 1)?,
            activated: layout.rows(places, widths.expert_inner)?,
            quantised: layout.rows(routes, quantised)?,
            // Of blocks there are more than the rows have.
            scales: layout.rows(Fp8Scaling::Blocks.input_stride(routes), scales)?,
            out: layout.rows(places, if places > 0 { widths.hidden } else { 0 })?,
        })
    }

    /// In the step's memory.
    pub(super) fn within<'a>(&self, memory: GpuSlice<'a, u8>) -> ExpertSlices<'a> {
        ExpertSlices {
            logits: self.logits.within(memory),
            chosen: self.chosen.within(memory),
            weights: self.weights.within(memory),
            places: self.places.within(memory),
            sources: self.sources.within(memory),
            tiles: self.tiles.within(memory),
            activated: self.activated.within(memory),
            quantised: self.quantised.within(memory),
            scales: self.scales.within(memory),
            out: self.out.within(memory),
        }
    }
}

/// See [`ExpertLayout`].
#[derive(Clone, Copy)]
pub(super) struct ExpertSlices<'a> {
    pub(super) logits: GpuSlice<'a, f32>,
    chosen: GpuSlice<'a, u16>,
    pub(super) weights: GpuSlice<'a, f32>,
    places: GpuSlice<'a, i32>,
    sources: GpuSlice<'a, i32>,
    tiles: GpuSlice<'a, i32>,
    /// `[places, inner]`, in their order, as [`GpuRoutes`] has them; of a row whose layer is one launch, in the order of logits.
    pub(super) activated: GpuSlice<'a, bf16>,
    quantised: GpuSlice<'a, u8>,
    scales: GpuSlice<'a, f32>,
    /// `[places, hidden]`.
    pub(super) out: GpuSlice<'a, bf16>,
}

impl<'a> ExpertSlices<'a> {
    /// Room for the routes of so many rows, in tiles of that size.
    pub(super) fn routes(&self, spec: &MoeSpec, rows: usize, tile: usize) -> GpuRoutes<'a> {
        let routes = rows * spec.top_k;
        GpuRoutes {
            chosen: self.chosen.range(0..routes),
            weights: self.weights.range(0..routes),
            places: self.places.range(0..routes),
            sources: self.sources.range(0..routes),
            tiles: self.tiles.range(0..GpuRoutes::tile_list(routes, spec.experts)),
            rows,
            top_k: spec.top_k,
            experts: spec.experts,
            tile,
            loads: None,
            shared: false,
        }
    }

    /// Where so many activated rows go that are quantised.
    pub(super) fn quantised(&self, places: usize, inner: usize, scaling: Fp8Scaling) -> GpuFp8Rows<'a> {
        GpuFp8Rows {
            values: self.quantised.range(0..places * inner),
            scales: self.scales.range(0..scaling.input_scales(places, inner)),
            scaling,
        }
    }
}

/// Rows of the largest step in which products of routes have the shared expert in them, if it is as large as the others of its layer.
fn most_shared_rows(spec: &DecoderSpec) -> usize {
    let are_alike = |moe: &&MoeSpec| {
        let shared = moe.shared.as_ref();
        shared.is_some_and(|shared| shared.intermediate_size == moe.intermediate_size)
    };
    let rows = spec
        .mixtures()
        .filter(are_alike)
        .map(|moe| MoeKernels::most_shared_rows(moe.experts, moe.top_k));
    rows.max().unwrap_or(0)
}

/// What the kernels ask of experts.
///
/// # Errors
/// [`ModelError::Unsupported`], which names the field.
pub(super) fn check(spec: &DecoderSpec) -> Result<(), ModelError> {
    for moe in spec.mixtures() {
        let bounds = [
            ("num_experts", moe.experts, MOST_EXPERTS),
            ("num_experts_per_tok", moe.top_k, MOST_ROUTES),
        ];
        for (field, value, most) in bounds {
            if value > most {
                let supported = format!("on a GPU up to {most} are; --device cpu has no such bound");
                return Err(ModelError::unsupported(field, value, supported));
            }
        }
    }
    Ok(())
}
