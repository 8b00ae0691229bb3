//! A layer with experts in one launch, against a reference in `f64` that goes on from what the kernel found.

mod limits;
mod logits;
mod next;
mod sizes;

use half::bf16;
use plimsoll_device::cuda::{Gpu, GpuError, GpuSlab, GpuSlice};
use plimsoll_kernels::cuda::{
    DenseLayers, GpuChainEnd, GpuLinear, GpuMoeChain, GpuNorm, GpuRouter, Linears, MoeChainLayers,
    MoeKernels, SandwichNorms,
};
use plimsoll_kernels::{ExpertActivation, Route, RouterSoftmax};
use rand::Rng;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;

use super::weights::{Experts, Format, Table};
use super::{ACTIVATIONS, activate};
use crate::chain::{EPS, TOLERANCE, add, normalise, round, scaled};
use crate::common::{self, wide};
use next::Next;

const GUARD: usize = 64;

/// How large a layer is, and how its weights are stored.
#[derive(Clone, Copy, Debug)]
struct Size {
    attended: usize,
    width: usize,
    inner: usize,
    /// Outputs of what follows; 0 for nothing.
    next: usize,
    experts: usize,
    top_k: usize,
    /// With an expert that every row goes to.
    shared: bool,
    /// Inner width of an MLP beside the experts, with norms around both; 0 for none.
    mlp: usize,
    format: Format,
    /// Of the products around the experts.
    dense: Format,
    /// So many of the last outputs of what follows are a product of their own, with weights in this format.
    other: Option<(usize, Format)>,
}

impl Size {
    /// Inner width of what every row goes to.
    fn dense_inner(&self) -> Option<usize> {
        match self.shared {
            true => Some(self.inner),
            false => Some(self.mlp).filter(|inner| *inner > 0),
        }
    }
}

/// What every row goes to: an expert with a gate, or an MLP.
struct Dense {
    gate_up: Experts,
    down: Experts,
    gate: Option<Table>,
}

/// Of a layer with an MLP beside its experts.
struct Sandwich {
    /// In the order of [`SandwichNorms`].
    norms: [Vec<f32>; 6],
    scalar: f32,
}

struct Case {
    size: Size,
    x: Vec<bf16>,
    hidden: Vec<bf16>,
    norms: [Vec<f32>; 2],
    output: Experts,
    router: Table,
    router_bias: Option<Vec<bf16>>,
    router_scale: f32,
    expert_scale: Option<Vec<f32>>,
    softmax: RouterSoftmax,
    gate_up: Experts,
    down: Experts,
    dense: Option<Dense>,
    sandwich: Option<Sandwich>,
    next: Option<Next>,
    activation: ExpertActivation,
}

/// What the kernel left.
#[derive(Debug, PartialEq)]
struct Outputs {
    logits: Vec<f32>,
    loads: Vec<u32>,
    gate_logit: Vec<f32>,
    activated: Vec<bf16>,
    dense_activated: Vec<bf16>,
    hidden: Vec<bf16>,
    out: Vec<bf16>,
}

/// What a launch takes and leaves.
struct Memory {
    x: GpuSlab,
    hidden: GpuSlab,
    norms: [GpuSlab; 2],
    router_bias: GpuSlab,
    expert_scale: GpuSlab,
    /// Its norms and scalar.
    sandwich: Option<([GpuSlab; 6], GpuSlab)>,
    logits: GpuSlab,
    loads: GpuSlab,
    gate_logit: GpuSlab,
    activated: GpuSlab,
    dense_activated: GpuSlab,
    out: GpuSlab,
}

impl Memory {
    fn new(gpu: &Gpu, case: &Case) -> Self {
        let size = case.size;
        let floats = |len: usize| common::poisoned::<f32>(gpu, len + GUARD);
        let poisoned = |len: usize| common::poisoned::<bf16>(gpu, len + GUARD);
        let upload = |values: &Vec<f32>| common::upload(gpu, values);
        Self {
            x: common::upload(gpu, &case.x),
            hidden: common::upload(gpu, &case.hidden),
            norms: case.norms.each_ref().map(upload),
            router_bias: common::upload(gpu, case.router_bias.as_deref().unwrap_or_default()),
            expert_scale: common::upload(gpu, case.expert_scale.as_deref().unwrap_or_default()),
            sandwich: case.sandwich.as_ref().map(|of| {
                let scalar = common::upload(gpu, &[of.scalar]);
                (of.norms.each_ref().map(upload), scalar)
            }),
            logits: floats(size.experts),
            loads: common::upload(gpu, &vec![0_u32; size.experts]),
            gate_logit: floats(1),
            activated: poisoned(size.top_k * size.inner),
            dense_activated: poisoned(size.dense_inner().unwrap_or(0)),
            out: poisoned(size.next),
        }
    }

    fn forward(&self, case: &Case, kernels: &MoeKernels, linears: &Linears) -> Result<(), GpuError> {
        let Size {
            width,
            inner,
            next,
            experts,
            top_k,
            ..
        } = case.size;
        fn of_width(norm: &GpuSlab, width: usize) -> GpuSlice<'_, f32> {
            norm.slice().range(0..width)
        }
        let [norm, next_norm] = self.norms.each_ref().map(|norm| GpuNorm {
            weight: of_width(norm, width),
            eps: EPS,
        });
        let sandwich = self.sandwich.as_ref().map(|(norms, scalar)| {
            let norms = norms.each_ref().map(|norm| of_width(norm, width));
            let [mixer_sum, router, experts, mlp_sum, expert_sum, sum] = norms;
            SandwichNorms {
                mixer_sum,
                router,
                experts,
                mlp_sum,
                expert_sum,
                sum,
                scalar: scalar.slice().range(0..1),
            }
        });
        let (bias, scales) = (self.router_bias.slice(), self.expert_scale.slice());
        let bias = case.router_bias.as_ref().map(|_| bias.range(0..experts));
        let gate = case.dense.as_ref().and_then(|dense| dense.gate.as_ref());
        let dense_inner = case.size.dense_inner();
        kernels.forward_chain(
            linears,
            &GpuMoeChain {
                layers: case.layers(),
                x: self.x.slice().range(0..case.x.len()),
                hidden: self.hidden.slice().range(0..width),
                norm,
                router: GpuRouter {
                    scale: case.router_scale,
                    expert_scale: case.expert_scale.as_ref().map(|_| scales.range(0..experts)),
                    ..GpuRouter::plain(bias, case.softmax)
                },
                logits: self.logits.slice().range(0..experts),
                loads: Some(self.loads.slice().range(0..experts)),
                activation: case.activation,
                activated: self.activated.slice().range(0..top_k * inner),
                dense_activated: dense_inner.map(|inner| self.dense_activated.slice().range(0..inner)),
                gate_logit: gate.map(|_| self.gate_logit.slice().range(0..1)),
                sandwich,
                next: case.next().map(|linear| GpuChainEnd {
                    norm: next_norm,
                    linear,
                    out: self.out.slice().range(0..next),
                }),
            },
        )
    }

    fn outputs(&self, gpu: &Gpu, case: &Case) -> Outputs {
        let size = case.size;
        let bf16s = |slab: &GpuSlab, len: usize| unguarded(gpu, slab, len, bf16::is_nan);
        let floats = |slab: &GpuSlab, len: usize| unguarded(gpu, slab, len, f32::is_nan);
        Outputs {
            logits: floats(&self.logits, size.experts),
            loads: common::download(gpu, &self.loads, size.experts),
            gate_logit: floats(&self.gate_logit, usize::from(size.shared)),
            activated: bf16s(&self.activated, size.top_k * size.inner),
            dense_activated: bf16s(&self.dense_activated, size.dense_inner().unwrap_or(0)),
            hidden: common::download(gpu, &self.hidden, size.width),
            out: bf16s(&self.out, size.next),
        }
    }
}

/// The residual stream behind the mixer, and the same normalised for what takes it.
struct Inputs {
    hidden: Vec<f64>,
    router: Vec<f64>,
    experts: Vec<f64>,
    dense: Vec<f64>,
}

impl Case {
    fn random(gpu: &Gpu, rng: &mut StdRng, size: Size) -> Self {
        let Size {
            attended,
            width,
            inner,
            experts,
            ..
        } = size;
        let mut norm = |most: f32| (0..width).map(|_| rng.random_range(most / 3.0..most)).collect();
        // Sums with MXFP4 weights are large, and a clamped activation would leave little more than their errors.
        let most = match size.format {
            Format::Mxfp4 => 0.15,
            _ => 1.5,
        };
        let norms = [norm(most), norm(1.5)];
        let sum_norms = (size.mlp > 0).then(|| [(); 6].map(|()| norm(1.5)));
        let sandwich = sum_norms.map(|norms| Sandwich {
            norms,
            scalar: rng.random_range(0.3..1.2),
        });
        let bias = |rng: &mut StdRng| rng.random_bool(0.5);
        let of = |rng: &mut StdRng, count: usize, rows: [usize; 2]| {
            let bias = size.format == Format::Mxfp4 && bias(rng);
            Experts::random(gpu, rng, size.format, count, rows, bias)
        };
        let around = |rng: &mut StdRng, rows: [usize; 2]| {
            let bias = bias(rng);
            Experts::random(gpu, rng, size.dense, 1, rows, bias)
        };
        // As Gemma 4's.
        let router_scale = match &sandwich {
            Some(_) => (width as f32).sqrt().recip(),
            None => 1.0,
        };
        let expert_scale = |rng: &mut StdRng| (0..experts).map(|_| rng.random_range(0.5..2.0)).collect();
        Self {
            size,
            x: common::random(rng, attended),
            hidden: common::random(rng, width),
            norms,
            output: around(rng, [width, attended]),
            router: Table::random(gpu, rng, [experts, width], 2.0 / router_scale),
            router_bias: rng.random_bool(0.5).then(|| common::random(rng, experts)),
            router_scale,
            expert_scale: sandwich.as_ref().map(|_| expert_scale(rng)),
            softmax: *[RouterSoftmax::All, RouterSoftmax::Chosen].choose(rng).unwrap(),
            gate_up: of(rng, experts, [2 * inner, width]),
            down: of(rng, experts, [width, inner]),
            dense: size.dense_inner().map(|inner| Dense {
                gate_up: of(rng, 1, [2 * inner, width]),
                down: of(rng, 1, [width, inner]),
                gate: size.shared.then(|| Table::random(gpu, rng, [1, width], 2.0)),
            }),
            sandwich,
            next: (size.next > 0).then(|| Next::random(gpu, rng, size)),
            activation: *ACTIVATIONS.choose(rng).unwrap(),
        }
    }

    fn layers(&self) -> MoeChainLayers<'_> {
        MoeChainLayers {
            output: &self.output.linears[0],
            router: &self.router.device,
            gate_up: &self.gate_up.device,
            down: &self.down.device,
            top_k: self.size.top_k,
            dense: self.dense.as_ref().map(|dense| DenseLayers {
                gate_up: &dense.gate_up.linears[0],
                down: &dense.down.linears[0],
                gate: dense.gate.as_ref().map(|gate| &gate.device),
            }),
        }
    }

    fn next(&self) -> Option<&GpuLinear> {
        self.next.as_ref().map(|next| &next.linear)
    }

    fn run(&self, gpu: &Gpu, kernels: &MoeKernels, linears: &Linears) -> Outputs {
        let memory = Memory::new(gpu, self);
        memory.forward(self, kernels, linears).expect("a launch");
        memory.outputs(gpu, self)
    }

    fn close(&self, part: &str, found: &[f32], want: &[f64]) {
        let what = format!("{:?}: {part}", self.size);
        common::assert_close(&what, found, want, TOLERANCE);
    }

    fn inputs(&self) -> Inputs {
        let (stream, output) = (wide(&self.hidden), self.output.product(0, &wide(&self.x)));
        let Some(Sandwich { norms, .. }) = &self.sandwich else {
            let hidden = add(&stream, &output);
            let normed = normalise(&hidden, &self.norms[0]);
            return Inputs {
                hidden,
                router: normed.clone(),
                experts: normed.clone(),
                dense: normed,
            };
        };
        let [mixer_sum, router, experts, ..] = norms;
        let hidden = sum_times(&stream, &scaled(&rounded(output), mixer_sum), 1.0);
        Inputs {
            router: normalise(&hidden, router),
            experts: normalise(&hidden, experts),
            dense: normalise(&hidden, &self.norms[0]),
            hidden,
        }
    }

    /// Each part from what was found before it.
    fn check(&self, found: &Outputs) {
        let inputs = self.inputs();
        // With the gate's, which alone may be next to nothing beside its error.
        let mut want = self.router.product(&inputs.router);
        let gate = self.dense.as_ref().and_then(|dense| dense.gate.as_ref());
        want.extend(gate.iter().flat_map(|gate| gate.product(&inputs.dense)));
        let both = [&found.logits[..], &found.gate_logit].concat();
        self.close("logits", &both, &want);
        let [experts, dense] = self.check_experts(found, &inputs, &self.routes(&found.logits));
        let hidden = match &self.sandwich {
            None => {
                let delta: Vec<f64> = experts.iter().zip(dense).map(|(x, y)| x + y).collect();
                add(&inputs.hidden, &delta)
            }
            Some(Sandwich { norms, scalar }) => {
                let [.., mlp_sum, expert_sum, sum] = norms;
                let [experts, dense] = [experts, dense].map(rounded);
                let both = sum_times(&scaled(&dense, mlp_sum), &scaled(&experts, expert_sum), 1.0);
                sum_times(&inputs.hidden, &scaled(&both, sum), f64::from(*scalar))
            }
        };
        self.close("residual stream", &common::widen(&found.hidden), &hidden);
        if let Some(next) = &self.next {
            let normed = normalise(&wide(&found.hidden), &self.norms[1]);
            self.check_next(next, &normed, &common::widen(&found.out));
        }
    }

    /// What experts make of the row, those of `routes`, and what every row goes to. Returns what they give.
    fn check_experts(&self, found: &Outputs, inputs: &Inputs, routes: &[Route]) -> [Vec<f64>; 2] {
        let Size {
            width,
            inner,
            experts,
            ..
        } = self.size;
        let is_chosen = |expert: usize| routes.iter().any(|route| route.expert as usize == expert);
        let loads: Vec<u32> = (0..experts).map(|expert| is_chosen(expert).into()).collect();
        assert_eq!(found.loads, loads, "{:?}: rows of experts", self.size);
        let activated = |gate_up: Vec<f64>| {
            let (gate, up) = gate_up.split_at(gate_up.len() / 2);
            let both = gate.iter().zip(up);
            both.map(|(gate, up)| activate(self.activation, *gate, *up))
                .collect::<Vec<_>>()
        };
        let mut of_experts = vec![0.0; width];
        for (route, own) in routes.iter().zip(found.activated.chunks_exact(inner)) {
            let (expert, weight) = (route.expert as usize, f64::from(route.weight));
            let want = activated(self.gate_up.product(expert, &inputs.experts));
            let what = format!("activated of expert {expert}");
            self.close(&what, &common::widen(own), &want);
            let parts = self.down.product(expert, &wide(own));
            let sums = of_experts.iter_mut().zip(parts);
            sums.for_each(|(sum, x)| *sum += weight * x);
        }
        let Some(dense) = &self.dense else {
            return [of_experts, vec![0.0; width]];
        };
        let (own, want) = (
            &found.dense_activated,
            activated(dense.gate_up.product(0, &inputs.dense)),
        );
        self.close("activated of all rows", &common::widen(own), &want);
        let gate = found.gate_logit.first();
        let weight = gate.map_or(1.0, |logit| 1.0 / (1.0 + (-f64::from(*logit)).exp()));
        let parts = dense.down.product(0, &wide(own));
        [of_experts, parts.iter().map(|x| weight * x).collect()]
    }
}

/// What was written, and nothing behind it.
fn unguarded<T: plimsoll_device::Pod + Copy>(
    gpu: &Gpu,
    slab: &GpuSlab,
    len: usize,
    is_nan: fn(T) -> bool,
) -> Vec<T> {
    let mut all: Vec<T> = common::download(gpu, slab, len + GUARD);
    let beyond = all.split_off(len);
    assert!(beyond.into_iter().all(is_nan), "written past the end");
    all
}

/// As `bf16` has them.
fn rounded(values: Vec<f64>) -> Vec<f64> {
    values.into_iter().map(round).collect()
}

/// A sum times `factor`, as `bf16` has it.
fn sum_times(x: &[f64], y: &[f64], factor: f64) -> Vec<f64> {
    rounded(x.iter().zip(y).map(|(x, y)| (x + y) * factor).collect())
}

const BF16: Size = Size {
    attended: 4096,
    width: 2048,
    inner: 768,
    next: 5120,
    experts: 16,
    top_k: 8,
    shared: false,
    mlp: 0,
    format: Format::Bf16,
    dense: Format::Bf16,
    other: None,
};

/// gpt-oss, but for the numbers of experts and of what follows.
const MXFP4: Size = Size {
    width: 2880,
    inner: 2880,
    next: 640,
    experts: 4,
    top_k: 4,
    format: Format::Mxfp4,
    ..BF16
};

/// Gemma-4-26B-A4B, but for the number of experts and the width of what follows.
const GEMMA: Size = Size {
    width: 2816,
    inner: 704,
    mlp: 2112,
    next: 640,
    experts: 12,
    ..BF16
};

const SMALL_GEMMA: Size = Size {
    attended: 128,
    width: 64,
    inner: 24,
    mlp: 72,
    next: 40,
    experts: 6,
    top_k: 2,
    ..BF16
};
