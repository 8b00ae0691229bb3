//! Mixtures of experts: routing (of few rows with the router's product too), both products in tiles of each size, and the sums, in the
//! shapes of Qwen3-30B-A3B and gpt-oss-20b; many rows also by the kernels for any GPU.

use std::sync::Arc;

use half::bf16;
use plimsoll_core::Component;
use plimsoll_device::cuda::{Gpu, GpuError, GpuSlab, GpuSlice};
use plimsoll_kernels::cuda::{
    EXPERT_TILES, Fp8Scaling, FusedKernels, GpuExpertLoads, GpuExpertOutputs, GpuExperts, GpuFp8Rows,
    GpuLinear, GpuMatrix, GpuRouter, GpuRoutes, GpuRows, GpuWeight, Int4Group, MoeKernels, expert_int4_pitch,
    mxfp4_pitch,
};
use plimsoll_kernels::{Activation, ExpertActivation, Route, Router, RouterSoftmax, route};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::common::{BF16_RATE, READ_BANDWIDTH, time_us};

const ROWS: [usize; 9] = [1, 4, 32, 128, 256, 512, 1024, 2048, 8192];
const FEW_ROWS: [usize; 3] = [2, 8, 32];
const MANY_ROWS: [usize; 3] = [512, 2048, 8192];
/// Steps whose rows go elsewhere, so that experts are not in the cache.
const STEPS: usize = 6;

/// How weights are stored.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stored {
    Bf16,
    Fp8Blocks,
    Mxfp4,
    /// With groups of 128.
    Int4,
}

#[derive(Clone, Copy)]
pub(crate) struct Model {
    pub(crate) name: &'static str,
    pub(crate) experts: usize,
    pub(crate) top_k: usize,
    pub(crate) hidden: usize,
    pub(crate) inner: usize,
    pub(crate) stored: Stored,
}

pub(crate) const MODELS: [Model; 4] = [
    Model {
        name: "Qwen3-30B-A3B, bf16",
        experts: 128,
        top_k: 8,
        hidden: 2048,
        inner: 768,
        stored: Stored::Bf16,
    },
    Model {
        name: "Qwen3-30B-A3B, FP8 in blocks",
        experts: 128,
        top_k: 8,
        hidden: 2048,
        inner: 768,
        stored: Stored::Fp8Blocks,
    },
    Model {
        name: "Qwen3-30B-A3B, int4 in groups of 128",
        experts: 128,
        top_k: 8,
        hidden: 2048,
        inner: 768,
        stored: Stored::Int4,
    },
    Model {
        name: "gpt-oss-20b, MXFP4",
        experts: 32,
        top_k: 4,
        hidden: 2880,
        inner: 2880,
        stored: Stored::Mxfp4,
    },
];

struct Layer<'a> {
    gpu: &'a Gpu,
    model: Model,
    kernels: MoeKernels,
    gate_up: GpuExperts,
    down: GpuExperts,
}

impl Model {
    pub(crate) fn row_bytes(&self, inputs: usize) -> usize {
        match self.stored {
            Stored::Bf16 => 2 * inputs,
            Stored::Fp8Blocks => inputs,
            Stored::Mxfp4 => mxfp4_pitch(inputs),
            Stored::Int4 => expert_int4_pitch(inputs) + 4 * Int4Group::Of128.stride(inputs),
        }
    }

    /// Of one expert.
    pub(crate) fn bytes(&self) -> usize {
        2 * self.inner * self.row_bytes(self.hidden) + self.hidden * self.row_bytes(self.inner)
    }
}

/// Random matrices `[n, k]`.
pub(crate) fn experts(
    gpu: &Gpu,
    kernels: &MoeKernels,
    fused: &FusedKernels,
    model: &Model,
    n: usize,
    k: usize,
) -> GpuExperts {
    GpuExperts::new(gpu, &matrices(gpu, kernels, fused, model, [n, k])).expect("a tensor map")
}

/// As many as there are experts.
pub(crate) fn matrices(
    gpu: &Gpu,
    kernels: &MoeKernels,
    fused: &FusedKernels,
    model: &Model,
    [n, k]: [usize; 2],
) -> Vec<GpuLinear> {
    let values = (n * model.row_bytes(k)).next_multiple_of(256);
    let blocks = Fp8Scaling::Blocks.weight_scales(n, k);
    let each = values + (size_of::<f32>() * blocks).next_multiple_of(256);
    let slab = Arc::new(alloc(gpu, each * model.experts));
    let scale = 1.0 / (k as f32).sqrt();
    let linear = |expert: usize| {
        let start = expert * each;
        let wide = |elements: usize| {
            let values = GpuWeight::new(&slab, start / 2..start / 2 + elements);
            fused
                .fill_random(values.slice(), expert as u64, scale)
                .expect("random weights");
            values
        };
        let matrix = match model.stored {
            Stored::Bf16 => GpuMatrix::Bf16(wide(n * k)),
            Stored::Fp8Blocks => {
                // Any bits will do, and scales are such too.
                wide(each / 2);
                let first = (start + values) / size_of::<f32>();
                GpuMatrix::Fp8 {
                    values: GpuWeight::new(&slab, start..start + n * k),
                    scales: GpuWeight::new(&slab, first..first + blocks),
                    scaling: Fp8Scaling::Blocks,
                }
            }
            Stored::Int4 => {
                // Any bits will do, and words of groups are such too.
                wide(each / 2);
                let (codes, words) = (n * expert_int4_pitch(k), n * Int4Group::Of128.stride(k));
                let first = start + codes;
                GpuMatrix::ExpertInt4 {
                    codes: GpuWeight::new(&slab, start..first),
                    groups: GpuWeight::new(&slab, first / 4..first / 4 + words),
                    group: Int4Group::Of128,
                }
            }
            Stored::Mxfp4 => {
                let rows = GpuWeight::new(&slab, start..start + n * mxfp4_pitch(k));
                kernels
                    .fill_mxfp4(rows.slice(), k, expert as u64, scale)
                    .expect("random weights");
                GpuMatrix::Mxfp4(rows)
            }
        };
        GpuLinear::new(matrix, None, n, k)
    };
    (0..model.experts).map(linear).collect()
}

pub(crate) fn alloc(gpu: &Gpu, bytes: usize) -> GpuSlab {
    gpu.alloc(Component::Arena, bytes).expect("room on the GPU")
}

/// Where the rows of one step go.
struct Step {
    logits: GpuSlab,
    room: GpuSlab,
    /// Rows counted by expert; then how many there are.
    loads: GpuSlab,
    /// Experts to which any row goes.
    hit: usize,
}

impl Step {
    fn new(gpu: &Gpu, model: &Model, rows: usize, seed: u64) -> Self {
        let mut rng = StdRng::seed_from_u64(seed);
        let mut logits: Vec<f32> = (0..rows * model.experts)
            .map(|_| rng.random_range(-1.0..1.0))
            .collect();
        let slab = alloc(gpu, 4 * logits.len());
        gpu.upload(&logits, slab.slice::<f32>().range(0..logits.len()))
            .expect("a copy");
        let none = Route {
            expert: 0,
            row: 0,
            weight: 0.0,
        };
        let mut routes = vec![none; rows * model.top_k];
        route(
            &mut logits,
            model.experts,
            Router::plain(RouterSoftmax::Chosen),
            &mut routes,
        );
        let tiles = GpuRoutes::tile_list(routes.len(), model.experts);
        let loads = alloc(gpu, 4 * (model.experts + 1));
        let real_rows = loads.slice().range(model.experts..model.experts + 1);
        gpu.upload(&[rows as i32], real_rows).expect("a copy");
        Self {
            loads,
            logits: slab,
            room: alloc(gpu, 16 * routes.len().next_multiple_of(64) + 4 * tiles),
            hit: routes.chunk_by(|a, b| a.expert == b.expert).count(),
        }
    }

    fn routes(&self, model: &Model, rows: usize, tile: usize) -> GpuRoutes<'_> {
        let routes = rows * model.top_k;
        let (all, each) = (self.room.slice::<u8>(), 4 * routes.next_multiple_of(64));
        let at = |part: usize, bytes: usize| all.range(part * each..part * each + bytes);
        GpuRoutes {
            weights: at(0, 4 * routes).cast(),
            places: at(1, 4 * routes).cast(),
            sources: at(2, 4 * routes).cast(),
            chosen: at(3, 2 * routes).cast(),
            tiles: at(4, 4 * GpuRoutes::tile_list(routes, model.experts)).cast(),
            rows,
            top_k: model.top_k,
            experts: model.experts,
            tile,
            loads: Some(GpuExpertLoads {
                counts: self.loads.slice().range(0..model.experts),
                rows: self.loads.slice().range(model.experts..model.experts + 1),
            }),
            shared: false,
        }
    }
}

/// Room for the rows that a product takes, in eight bits where it takes them so.
struct Taken<'a> {
    fused: &'a FusedKernels,
    plain: GpuSlice<'a, bf16>,
    width: usize,
    values: GpuSlab,
    scales: GpuSlab,
}

impl<'a> Taken<'a> {
    fn new(gpu: &Gpu, fused: &'a FusedKernels, plain: GpuSlice<'a, bf16>, width: usize) -> Self {
        let rows = plain.len() / width;
        Self {
            fused,
            plain,
            width,
            values: alloc(gpu, plain.len()),
            scales: alloc(
                gpu,
                size_of::<f32>() * Fp8Scaling::Blocks.input_scales(rows, width),
            ),
        }
    }

    /// Without the work of quantising.
    fn rows(&self, scaling: Option<Fp8Scaling>) -> GpuRows<'_> {
        let Some(scaling) = scaling else {
            return self.plain.into();
        };
        let scales = scaling.input_scales(self.plain.len() / self.width, self.width);
        GpuRows::Fp8(GpuFp8Rows {
            values: self.values.slice().range(0..self.plain.len()),
            scales: self.scales.slice().range(0..scales),
            scaling,
        })
    }

    fn quantised(&self, scaling: Option<Fp8Scaling>) -> Result<GpuRows<'_>, GpuError> {
        let rows = self.rows(scaling);
        if let GpuRows::Fp8(out) = rows {
            self.fused.quantise(self.plain, self.width, out)?;
        }
        Ok(rows)
    }
}

impl Layer<'_> {
    fn line(&self, what: &str, rows: usize, us: f64, bytes: f64, flops: f64) {
        let floor = (bytes / READ_BANDWIDTH).max(flops / BF16_RATE) * 1e6;
        println!(
            "{what:12} {rows:5} rows {us:9.2} us  {:7.1} GB/s  {:6.1} TFLOP/s  x{:.2} of the floor",
            bytes / us / 1e3,
            flops / us / 1e6,
            us / floor
        );
    }

    /// Routing from the router's product on.
    fn route_inputs(&self, fused: &FusedKernels, rows: usize) {
        let (gpu, model) = (self.gpu, self.model);
        let Model { experts, hidden, .. } = model;
        let random = |rows: usize, seed: u64| {
            let slab = alloc(gpu, 2 * rows * hidden);
            let values = slab.slice::<bf16>().range(0..rows * hidden);
            fused.fill_random(values, seed, 1.0).expect("random rows");
            slab
        };
        let x = random(rows, 0);
        let steps = (1..=STEPS as u64).map(|seed| {
            let weight = GpuWeight::new(&Arc::new(random(experts, seed)), 0..experts * hidden);
            let linear = GpuLinear::new(GpuMatrix::Bf16(weight), None, experts, hidden);
            (linear, Step::new(gpu, &model, rows, seed))
        });
        let steps: Vec<_> = steps.collect();
        let tile = self.kernels.tile(&self.gate_up, rows * model.top_k);
        let routes = |call: usize| steps[call % STEPS].1.routes(&model, rows, tile);
        if !self.kernels.fuses_router(&steps[0].0, &routes(0)) {
            return;
        }
        let us = time_us(gpu, 24, |call| {
            let x = x.slice().range(0..rows * hidden);
            let router = GpuRouter::plain(None, RouterSoftmax::Chosen);
            let linear = &steps[call % STEPS].0;
            self.kernels.route_inputs(x, linear, router, &routes(call), None)
        });
        println!("router, route {rows:4} rows {us:9.2} us");
    }

    fn rows(&mut self, fused: &FusedKernels, rows: usize) {
        let (gpu, model) = (self.gpu, self.model);
        let Model {
            top_k, hidden, inner, ..
        } = model;
        let steps: Vec<Step> = (0..STEPS as u64)
            .map(|seed| Step::new(gpu, &model, rows, seed))
            .collect();
        let places = rows * top_k;
        let [x, activated, projected, out] =
            [rows * hidden, places * inner, places * hidden, rows * hidden].map(|len| alloc(gpu, 2 * len));
        fused.fill_random(x.slice(), 1, 1.0).expect("random rows");
        let inputs = x.slice::<bf16>().range(0..rows * hidden);
        let inner_rows = activated.slice::<bf16>().range(0..places * inner);
        fused.fill_random(inner_rows, 2, 1.0).expect("random rows");
        let x_taken = Taken::new(gpu, fused, inputs, hidden);
        let inner_taken = Taken::new(gpu, fused, inner_rows, inner);
        let outputs = projected.slice::<bf16>().range(0..places * hidden);
        let sums = out.slice::<bf16>().range(0..rows * hidden);
        let expert_outputs = |routes| GpuExpertOutputs {
            x: outputs,
            routes,
            gates: None,
        };
        let hit = steps.iter().map(|step| step.hit).sum::<usize>() as f64 / STEPS as f64;
        println!("-- {}: {rows} rows, {hit:.1} experts hit", model.name);
        let gate_up_bytes = hit * (2 * inner * model.row_bytes(hidden)) as f64;
        let down_bytes = hit * (hidden * model.row_bytes(inner)) as f64;
        let flops = 2.0 * (places * hidden * inner) as f64;
        let activation = ExpertActivation::Glu(Activation::Silu);
        let kernels = &self.kernels;
        for fixed in EXPERT_TILES.map(Some).into_iter().chain([None]) {
            let tile = fixed.unwrap_or_else(|| kernels.tile(&self.gate_up, places));
            let route = |step: &Step| {
                let logits = step.logits.slice().range(0..rows * model.experts);
                kernels.route(
                    logits,
                    GpuRouter::plain(None, RouterSoftmax::Chosen),
                    &step.routes(&model, rows, tile),
                )
            };
            steps.iter().try_for_each(route).expect("routes");
            let routes = |call: usize| steps[call % STEPS].routes(&model, rows, tile);
            let scaling = kernels.input_scaling(&self.gate_up, &routes(0));
            for taken in [&x_taken, &inner_taken] {
                taken.quantised(scaling).expect("rows in eight bits");
            }
            if fixed.is_some() {
                let us = time_us(gpu, 24, |call| {
                    kernels.gate_up(
                        x_taken.rows(scaling),
                        &self.gate_up,
                        activation,
                        &routes(call),
                        inner_rows,
                    )
                });
                let what = format!("up tile {tile}");
                self.line(&what, rows, us, gate_up_bytes, 2.0 * flops);
                let us = time_us(gpu, 24, |call| {
                    kernels.down(inner_taken.rows(scaling), &self.down, &routes(call), outputs)
                });
                self.line(&format!("down tile {tile}"), rows, us, down_bytes, flops);
                continue;
            }
            let us = time_us(gpu, 24, |call| route(&steps[call % STEPS]));
            println!("route        {rows:5} rows {us:9.2} us");
            let us = time_us(gpu, 24, |call| {
                kernels.combine(&expert_outputs(routes(call)), sums)
            });
            println!("combine      {rows:5} rows {us:9.2} us");
            let us = time_us(gpu, 24, |call| {
                let routes = routes(call);
                let logits = steps[call % STEPS].logits.slice().range(0..rows * model.experts);
                let router = GpuRouter::plain(None, RouterSoftmax::Chosen);
                let is_quantised = kernels.output_scaling(&self.gate_up, &routes).is_some();
                let out = match is_quantised {
                    true => inner_taken.rows(scaling),
                    false => inner_rows.into(),
                };
                kernels.route_gate_up(
                    x_taken.quantised(scaling)?,
                    (logits, router),
                    &self.gate_up,
                    activation,
                    &routes,
                    out,
                )?;
                let taken = match is_quantised {
                    true => out,
                    false => inner_taken.quantised(scaling)?,
                };
                kernels.down(taken, &self.down, &routes, outputs)?;
                kernels.combine(&expert_outputs(routes), sums)
            });
            self.line("all", rows, us, gate_up_bytes + down_bytes, 3.0 * flops);
        }
    }
}

pub(crate) fn bench(gpu: &Gpu) {
    let fused = FusedKernels::load(gpu).expect("kernels");
    for model in MODELS {
        let kernels = MoeKernels::load(gpu).expect("kernels");
        let Model { hidden, inner, .. } = model;
        println!("{}: {:.1} MB an expert", model.name, model.bytes() as f64 / 1e6);
        let mut layer = Layer {
            gpu,
            model,
            gate_up: experts(gpu, &kernels, &fused, &model, 2 * inner, hidden),
            down: experts(gpu, &kernels, &fused, &model, hidden, inner),
            kernels,
        };
        for rows in FEW_ROWS {
            layer.route_inputs(&fused, rows);
        }
        for rows in ROWS {
            layer.rows(&fused, rows);
        }
        println!("By the kernels for any GPU:");
        layer.kernels = MoeKernels::load_portable(gpu).expect("kernels");
        for rows in MANY_ROWS {
            layer.rows(&fused, rows);
        }
    }
}
