//! A layer with experts beside an MLP in one launch, against a reference in `f64` that goes on from what the kernel found.

use half::bf16;
use plimsoll_device::cuda::{Gpu, GpuError, GpuSlab};
use plimsoll_kernels::cuda::{
    GpuChainEnd, GpuLinear, GpuNorm, GpuRouter, GpuSandwichChain, Linears, MoeKernels, SandwichLayers,
    SandwichNorms, has_hopper_kernels,
};
use plimsoll_kernels::{Activation, ExpertActivation, Route, Router, RouterSoftmax, route};
use rand::Rng;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;

use super::activate;
use super::weights::{Experts, Format, Table};
use crate::chain::{EPS, TOLERANCE, normalise, scaled};
use crate::common::{self, wide};

const GUARD: usize = 64;

#[derive(Clone, Copy, Debug)]
struct Size {
    attended: usize,
    width: usize,
    inner: usize,
    mlp: usize,
    /// Outputs of what follows; 0 for nothing.
    next: usize,
    experts: usize,
    top_k: usize,
    format: Format,
}

/// Of norms: those of [`SandwichNorms`] in their order, then of what follows.
const NORMS: usize = 8;

struct Case {
    size: Size,
    x: Vec<bf16>,
    hidden: Vec<bf16>,
    norms: [Vec<f32>; NORMS],
    scalar: f32,
    output: Experts,
    mlp_gate_up: Experts,
    mlp_down: Experts,
    router: Table,
    router_bias: Option<Vec<bf16>>,
    softmax: RouterSoftmax,
    expert_scale: Vec<f32>,
    gate_up: Experts,
    down: Experts,
    next: Option<Experts>,
    activation: Activation,
}

/// What the kernel left.
#[derive(Debug, PartialEq)]
struct Outputs {
    logits: Vec<f32>,
    loads: Vec<u32>,
    activated: Vec<bf16>,
    mlp_activated: Vec<bf16>,
    hidden: Vec<bf16>,
    out: Vec<bf16>,
}

/// What a launch takes and leaves.
struct Memory {
    x: GpuSlab,
    hidden: GpuSlab,
    norms: [GpuSlab; NORMS],
    scalar: GpuSlab,
    router_bias: GpuSlab,
    expert_scale: GpuSlab,
    logits: GpuSlab,
    loads: GpuSlab,
    activated: GpuSlab,
    mlp_activated: GpuSlab,
    out: GpuSlab,
}

impl Memory {
    fn new(gpu: &Gpu, case: &Case) -> Self {
        let size = case.size;
        let poisoned = |len: usize| common::poisoned::<bf16>(gpu, len + GUARD);
        Self {
            x: common::upload(gpu, &case.x),
            hidden: common::upload(gpu, &case.hidden),
            norms: case.norms.each_ref().map(|norm| common::upload(gpu, norm)),
            scalar: common::upload(gpu, &[case.scalar]),
            router_bias: common::upload(gpu, case.router_bias.as_deref().unwrap_or_default()),
            expert_scale: common::upload(gpu, &case.expert_scale),
            logits: common::poisoned::<f32>(gpu, size.experts + GUARD),
            loads: common::upload(gpu, &vec![0_u32; size.experts]),
            activated: poisoned(size.top_k * size.inner),
            mlp_activated: poisoned(size.mlp),
            out: poisoned(size.next),
        }
    }

    fn forward(&self, case: &Case, kernels: &MoeKernels, linears: &Linears) -> Result<(), GpuError> {
        let size = case.size;
        let weights = self
            .norms
            .each_ref()
            .map(|norm| norm.slice().range(0..size.width));
        let [
            mixer_sum,
            router,
            mlp,
            experts,
            mlp_sum,
            expert_sum,
            sum,
            next_norm,
        ] = weights;
        let bias = case.router_bias.as_ref().map(|_| self.router_bias.slice());
        kernels.forward_sandwich(
            linears,
            &GpuSandwichChain {
                layers: case.layers(),
                norms: SandwichNorms {
                    mixer_sum,
                    router,
                    mlp,
                    experts,
                    mlp_sum,
                    expert_sum,
                    sum,
                    eps: EPS,
                },
                x: self.x.slice().range(0..size.attended),
                hidden: self.hidden.slice().range(0..size.width),
                scalar: self.scalar.slice().range(0..1),
                router: GpuRouter {
                    scale: case.router_scale(),
                    expert_scale: Some(self.expert_scale.slice().range(0..size.experts)),
                    ..GpuRouter::plain(bias.map(|bias| bias.range(0..size.experts)), case.softmax)
                },
                logits: self.logits.slice().range(0..size.experts),
                loads: Some(self.loads.slice().range(0..size.experts)),
                activation: case.activation,
                activated: self.activated.slice().range(0..size.top_k * size.inner),
                mlp_activated: self.mlp_activated.slice().range(0..size.mlp),
                next: case.next().map(|linear| GpuChainEnd {
                    norm: GpuNorm {
                        weight: next_norm,
                        eps: EPS,
                    },
                    linear,
                    out: self.out.slice().range(0..size.next),
                }),
            },
        )
    }

    fn outputs(&self, gpu: &Gpu, case: &Case) -> Outputs {
        let size = case.size;
        let bf16s = |slab: &GpuSlab, len: usize| {
            let mut all: Vec<bf16> = common::download(gpu, slab, len + GUARD);
            let beyond = all.split_off(len);
            assert!(beyond.into_iter().all(bf16::is_nan), "written past the end");
            all
        };
        Outputs {
            logits: common::download(gpu, &self.logits, size.experts),
            loads: common::download(gpu, &self.loads, size.experts),
            activated: bf16s(&self.activated, size.top_k * size.inner),
            mlp_activated: bf16s(&self.mlp_activated, size.mlp),
            hidden: common::download(gpu, &self.hidden, size.width),
            out: bf16s(&self.out, size.next),
        }
    }
}

impl Case {
    fn random(gpu: &Gpu, rng: &mut StdRng, size: Size) -> Self {
        let Size {
            attended,
            width,
            inner,
            mlp,
            next,
            experts,
            ..
        } = size;
        let matrices = |rng: &mut StdRng, count: usize, rows: [usize; 2], bias: bool| {
            Experts::random(gpu, rng, size.format, count, rows, bias)
        };
        let may_be = |rng: &mut StdRng| rng.random_bool(0.5);
        let biased = [(); 2].map(|()| may_be(rng));
        Self {
            size,
            x: common::random(rng, attended),
            hidden: common::random(rng, width),
            norms: [(); NORMS].map(|()| (0..width).map(|_| rng.random_range(0.5..1.5)).collect()),
            scalar: rng.random_range(0.3..1.2),
            output: matrices(rng, 1, [width, attended], biased[0]),
            mlp_gate_up: matrices(rng, 1, [2 * mlp, width], false),
            mlp_down: matrices(rng, 1, [width, mlp], false),
            router: Table::random(gpu, rng, [experts, width], 2.0 * (width as f32).sqrt()),
            router_bias: may_be(rng).then(|| common::random(rng, experts)),
            softmax: *[RouterSoftmax::All, RouterSoftmax::Chosen].choose(rng).unwrap(),
            expert_scale: (0..experts).map(|_| rng.random_range(0.5..2.0)).collect(),
            gate_up: matrices(rng, experts, [2 * inner, width], false),
            down: matrices(rng, experts, [width, inner], false),
            next: (next > 0).then(|| matrices(rng, 1, [next, width], biased[1])),
            activation: *[Activation::Silu, Activation::GeluTanh].choose(rng).unwrap(),
        }
    }

    fn layers(&self) -> SandwichLayers<'_> {
        SandwichLayers {
            output: &self.output.linears[0],
            mlp_gate_up: &self.mlp_gate_up.linears[0],
            mlp_down: &self.mlp_down.linears[0],
            router: &self.router.device,
            gate_up: &self.gate_up.device,
            down: &self.down.device,
            top_k: self.size.top_k,
        }
    }

    fn next(&self) -> Option<&GpuLinear> {
        self.next.as_ref().map(|next| &next.linears[0])
    }

    /// As Gemma 4's.
    fn router_scale(&self) -> f32 {
        (self.size.width as f32).sqrt().recip()
    }

    fn run(&self, gpu: &Gpu, kernels: &MoeKernels, linears: &Linears) -> Outputs {
        let memory = Memory::new(gpu, self);
        memory.forward(self, kernels, linears).expect("a launch");
        memory.outputs(gpu, self)
    }

    /// Where the row goes by these logits, the expert with the largest first.
    fn routes(&self, logits: &[f32]) -> Vec<Route> {
        let mut keys: Vec<f32> = logits.iter().map(|logit| logit * self.router_scale()).collect();
        for (key, bias) in keys.iter_mut().zip(self.router_bias.iter().flatten()) {
            *key += bias.to_f32();
        }
        let none = Route {
            row: 0,
            expert: 0,
            weight: 0.0,
        };
        let mut routes = vec![none; self.size.top_k];
        let router = Router {
            expert_scale: Some(&self.expert_scale),
            ..Router::plain(self.softmax)
        };
        route(&mut keys.clone(), self.size.experts, router, &mut routes);
        routes.sort_by(|a, b| keys[b.expert as usize].total_cmp(&keys[a.expert as usize]));
        routes
    }

    fn activated(&self, gate_up: &[f64]) -> Vec<f64> {
        let (gate, up) = gate_up.split_at(gate_up.len() / 2);
        let both = gate.iter().zip(up);
        let activation = ExpertActivation::Glu(self.activation);
        both.map(|(gate, up)| activate(activation, *gate, *up)).collect()
    }

    fn close(&self, part: &str, found: &[f32], want: &[f64]) {
        let what = format!("{:?}: {part}", self.size);
        common::assert_close(&what, found, want, TOLERANCE);
    }

    /// Each part from what was found before it.
    fn check(&self, found: &Outputs) {
        let [
            mixer_sum,
            router,
            mlp,
            experts,
            mlp_sum,
            expert_sum,
            sum,
            next_norm,
        ] = &self.norms;
        let output = round(self.output.product(0, &wide(&self.x)));
        let hidden = add(&wide(&self.hidden), &scaled(&output, mixer_sum), 1.0);
        self.close(
            "logits",
            &found.logits,
            &self.router.product(&normalise(&hidden, router)),
        );
        let want = self.activated(&self.mlp_gate_up.product(0, &normalise(&hidden, mlp)));
        self.close(
            "activated of the MLP",
            &common::widen(&found.mlp_activated),
            &want,
        );
        let of_mlp = round(self.mlp_down.product(0, &wide(&found.mlp_activated)));
        let routes = self.routes(&found.logits);
        let is_chosen = |expert: usize| routes.iter().any(|route| route.expert as usize == expert);
        let loads: Vec<u32> = (0..self.size.experts).map(|at| is_chosen(at).into()).collect();
        assert_eq!(found.loads, loads, "{:?}: rows of experts", self.size);
        let inputs = normalise(&hidden, experts);
        let mut of_experts = vec![0.0; self.size.width];
        for (route, own) in routes.iter().zip(found.activated.chunks_exact(self.size.inner)) {
            let expert = route.expert as usize;
            let want = self.activated(&self.gate_up.product(expert, &inputs));
            self.close(
                &format!("activated of expert {expert}"),
                &common::widen(own),
                &want,
            );
            let parts = self.down.product(expert, &wide(own));
            let weight = f64::from(route.weight);
            of_experts
                .iter_mut()
                .zip(parts)
                .for_each(|(sum, x)| *sum += weight * x);
        }
        let parts = [scaled(&of_mlp, mlp_sum), scaled(&round(of_experts), expert_sum)];
        let both = add(&parts[0], &parts[1], 1.0);
        let hidden = add(&hidden, &scaled(&both, sum), self.scalar.into());
        self.close("residual stream", &common::widen(&found.hidden), &hidden);
        if let Some(next) = &self.next {
            let want = next.product(0, &normalise(&wide(&found.hidden), next_norm));
            self.close("what follows", &common::widen(&found.out), &want);
        }
    }
}

/// As `bf16` has them.
fn round(values: Vec<f64>) -> Vec<f64> {
    let rounded = values.into_iter().map(|x| bf16::from_f64(x).to_f64());
    rounded.collect()
}

/// A sum times `factor`, as `bf16` has it.
fn add(x: &[f64], y: &[f64], factor: f64) -> Vec<f64> {
    round(x.iter().zip(y).map(|(x, y)| (x + y) * factor).collect())
}

/// Gemma-4-26B-A4B, but for the number of experts and the width of what follows.
const GEMMA: Size = Size {
    attended: 4096,
    width: 2816,
    inner: 704,
    mlp: 2112,
    next: 640,
    experts: 12,
    top_k: 8,
    format: Format::Bf16,
};

const SMALL: Size = Size {
    attended: 128,
    width: 64,
    inner: 24,
    mlp: 72,
    next: 40,
    experts: 6,
    top_k: 2,
    ..GEMMA
};

#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn a_layer_with_experts_beside_an_mlp_in_one_launch() {
    let gpu = common::gpu();
    let mut rng = common::rng("a_layer_with_experts_beside_an_mlp_in_one_launch");
    let (linears, kernels) = (crate::linear::linears(&gpu), MoeKernels::load(&gpu).unwrap());
    let sizes = [
        GEMMA,
        Size {
            attended: 8192,
            next: 0,
            ..GEMMA
        },
        SMALL,
        // Parts of rows and of shares; an MLP narrower than an expert, and one expert alone.
        Size {
            attended: 80,
            width: 72,
            mlp: 8,
            experts: 3,
            top_k: 3,
            ..SMALL
        },
        Size {
            experts: 1,
            top_k: 1,
            next: 0,
            ..SMALL
        },
        Size {
            attended: 528,
            width: 4096,
            inner: 264,
            mlp: 1000,
            experts: 40,
            top_k: 32,
            ..GEMMA
        },
    ];
    for size in sizes {
        let case = Case::random(&gpu, &mut rng, size);
        let chains = kernels.can_sandwich(&case.layers(), case.next());
        assert_eq!(chains, has_hopper_kernels(&gpu), "{size:?}");
        if !chains {
            return;
        }
        let found = case.run(&gpu, &kernels, &linears);
        case.check(&found);
        for _ in 0..5 {
            assert!(
                case.run(&gpu, &kernels, &linears) == found,
                "{size:?}: other bits"
            );
        }
    }
}

/// Layers of two sizes take turns in the workspace, in graphs too, until the tags of launches begin anew (65,535 of them); a row of what is no number
/// leaves nothing behind.
#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn what_launches_beside_an_mlp_left_is_not_taken() {
    let Some(gpu) = common::hopper() else { return };
    let (linears, kernels) = (crate::linear::linears(&gpu), MoeKernels::load(&gpu).unwrap());
    let mut rng = common::rng("what_launches_beside_an_mlp_left_is_not_taken");
    let small = [SMALL, Size { next: 0, ..SMALL }].map(|size| Case::random(&gpu, &mut rng, size));
    let mut large = Case::random(&gpu, &mut rng, GEMMA);
    let run = |case: &Case| case.run(&gpu, &kernels, &linears);
    let want = [run(&small[0]), run(&small[1]), run(&large)];
    small
        .iter()
        .chain([&large])
        .zip(&want)
        .for_each(|(case, found)| case.check(found));
    let memory = small.each_ref().map(|case| Memory::new(&gpu, case));
    // With another launch of the large layer as many as there are tags.
    const LAUNCHES: usize = 434;
    const REPLAYS: usize = 65_534 / LAUNCHES;
    let graph = gpu
        .capture(|| {
            (0..LAUNCHES).try_for_each(|at| memory[at % 2].forward(&small[at % 2], &kernels, &linears))
        })
        .expect("a capture");
    let hidden = large.hidden.clone();
    large.hidden[7] = bf16::NAN;
    let lost = run(&large);
    let rest = [&lost.activated, &lost.mlp_activated, &lost.hidden, &lost.out];
    assert!(lost.logits.iter().all(|x| x.is_nan()), "logits");
    assert!(rest.into_iter().flatten().all(|x| x.is_nan()), "all that follows");
    large.hidden = hidden;
    for _ in 0..REPLAYS {
        graph.launch().expect("a replay");
    }
    assert!(run(&large) == want[2], "other bits");
    assert!(small.each_ref().map(run) == want[..2], "other bits");
}

#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn layers_that_do_not_fit_the_launch_go_one_by_one() {
    let gpu = common::gpu();
    let kernels = MoeKernels::load(&gpu).unwrap();
    let mut rng = common::rng("layers_that_do_not_fit_the_launch_go_one_by_one");
    let fp8 = Size {
        attended: 128,
        width: 128,
        inner: 128,
        mlp: 128,
        format: Format::Fp8,
        ..SMALL
    };
    let others = [
        (SMALL, has_hopper_kernels(&gpu)),
        (fp8, false),
        (Size { width: 4104, ..SMALL }, false),
        (
            Size {
                experts: 513,
                ..SMALL
            },
            false,
        ),
        // Rows of which three do not fit into shared memory.
        (Size { mlp: 45_056, ..SMALL }, false),
    ];
    for (size, fits) in others {
        let case = Case::random(&gpu, &mut rng, size);
        let layers = case.layers();
        assert_eq!(kernels.can_sandwich(&layers, case.next()), fits, "{size:?}");
    }
    let case = Case::random(&gpu, &mut rng, SMALL);
    let biased = Experts::random(&gpu, &mut rng, Format::Bf16, 6, [48, 64], true);
    let router = Table::random(&gpu, &mut rng, [5, 64], 1.0);
    let mlp = Table::random(&gpu, &mut rng, [64, 80], 1.0);
    let layers = case.layers();
    for layers in [
        SandwichLayers {
            gate_up: &biased.device,
            ..layers
        },
        SandwichLayers {
            router: &router.device,
            ..layers
        },
        SandwichLayers {
            mlp_down: &mlp.device,
            ..layers
        },
        SandwichLayers { top_k: 0, ..layers },
        SandwichLayers { top_k: 7, ..layers },
    ] {
        assert!(!kernels.can_sandwich(&layers, None));
    }
    let portable = MoeKernels::load_portable(&gpu).unwrap();
    assert!(!portable.can_sandwich(&layers, None));
}
