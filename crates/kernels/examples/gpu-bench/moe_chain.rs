//! Layers with experts of one row, each in one launch, in the shapes of Qwen3-30B-A3B and gpt-oss-20b.

use half::bf16;
use plimsoll_core::Component;
use plimsoll_device::cuda::Gpu;
use plimsoll_kernels::cuda::{
    FusedKernels, GpuChainEnd, GpuExperts, GpuLinear, GpuMoeChain, GpuNorm, GpuRouter, Linears,
    MoeChainLayers, MoeKernels,
};
use plimsoll_kernels::{Activation, ExpertActivation, RouterSoftmax};

use crate::common::{READ_BANDWIDTH, time_us};
use crate::moe::{MODELS, Model, Stored, alloc, experts, matrices};

/// What attention gives, and what the projections of the next one make.
const ATTENDED: usize = 4096;
const NEXT: usize = 5120;
/// In turn, so that weights are not in the cache.
const LAYERS: usize = 6;

struct Layer {
    output: GpuLinear,
    router: GpuLinear,
    gate_up: GpuExperts,
    down: GpuExperts,
    next: GpuLinear,
}

impl Layer {
    fn new(gpu: &Gpu, kernels: &MoeKernels, fused: &FusedKernels, model: &Model) -> Self {
        let one = |stored: Stored, shape: [usize; 2]| {
            let model = Model {
                experts: 1,
                stored,
                ..*model
            };
            matrices(gpu, kernels, fused, &model, shape).remove(0)
        };
        let &Model {
            experts: count,
            hidden,
            inner,
            stored,
            ..
        } = model;
        let around = around(stored);
        Self {
            output: one(around, [hidden, ATTENDED]),
            router: one(Stored::Bf16, [count, hidden]),
            gate_up: experts(gpu, kernels, fused, model, 2 * inner, hidden),
            down: experts(gpu, kernels, fused, model, hidden, inner),
            next: one(around, [NEXT, hidden]),
        }
    }

    fn layers(&self, top_k: usize) -> MoeChainLayers<'_> {
        MoeChainLayers {
            output: &self.output,
            router: &self.router,
            gate_up: &self.gate_up,
            down: &self.down,
            top_k,
            dense: None,
        }
    }
}

/// How the products around experts are stored: experts alone are MXFP4.
fn around(experts: Stored) -> Stored {
    match experts {
        Stored::Mxfp4 => Stored::Bf16,
        others => others,
    }
}

pub(crate) fn bench(gpu: &Gpu) {
    let fused = FusedKernels::load(gpu).expect("kernels");
    let kernels = MoeKernels::load(gpu).expect("kernels");
    let workspace = gpu.alloc(Component::Runtime, Linears::WORKSPACE_BYTES);
    let linears = Linears::load(gpu, workspace.expect("room")).expect("cuBLASLt and kernels");
    let chained = |model: &Model| model.stored != Stored::Int4;
    for model in MODELS.into_iter().filter(chained) {
        let layers: Vec<Layer> = (0..LAYERS)
            .map(|_| Layer::new(gpu, &kernels, &fused, &model))
            .collect();
        let Model {
            experts,
            top_k,
            hidden,
            inner,
            ..
        } = model;
        if !kernels.can_chain(&layers[0].layers(top_k), Some(&layers[0].next)) {
            println!("{}: not on this GPU", model.name);
            continue;
        }
        let rows = |len: usize, seed: u64| {
            let slab = alloc(gpu, size_of::<bf16>() * len);
            fused
                .fill_random(slab.slice::<bf16>().range(0..len), seed, 1.0)
                .expect("random rows");
            slab
        };
        let (x, stream, activated, out) = (
            rows(ATTENDED, 1),
            rows(hidden, 2),
            rows(top_k * inner, 3),
            rows(NEXT, 4),
        );
        let [ones, logits, loads] = [hidden, experts, experts].map(|len| alloc(gpu, 4 * len));
        gpu.upload(&vec![1.0_f32; hidden], ones.slice::<f32>().range(0..hidden))
            .expect("a copy");
        let norm = GpuNorm {
            weight: ones.slice().range(0..hidden),
            eps: 1e-6,
        };
        let us = time_us(gpu, 8 * LAYERS, |call| {
            let layer = &layers[call % LAYERS];
            kernels.forward_chain(
                &linears,
                &GpuMoeChain {
                    layers: layer.layers(top_k),
                    x: x.slice().range(0..ATTENDED),
                    hidden: stream.slice().range(0..hidden),
                    norm,
                    router: GpuRouter::plain(None, RouterSoftmax::Chosen),
                    logits: logits.slice().range(0..experts),
                    loads: Some(loads.slice().range(0..experts)),
                    activation: ExpertActivation::Glu(Activation::Silu),
                    activated: activated.slice().range(0..top_k * inner),
                    dense_activated: None,
                    gate_logit: None,
                    sandwich: None,
                    next: Some(GpuChainEnd {
                        norm,
                        linear: &layer.next,
                        out: out.slice().range(0..NEXT),
                    }),
                },
            )
        });
        let of_around = Model {
            stored: around(model.stored),
            ..model
        };
        let around = hidden * of_around.row_bytes(ATTENDED)
            + NEXT * of_around.row_bytes(hidden)
            + 2 * experts * hidden;
        let bytes = (top_k * model.bytes() + around) as f64;
        println!(
            "{}: {us:.2} us a layer, {:.1} GB/s, x{:.2} of the floor",
            model.name,
            bytes / us / 1e3,
            us / (bytes / READ_BANDWIDTH * 1e6)
        );
    }
}
