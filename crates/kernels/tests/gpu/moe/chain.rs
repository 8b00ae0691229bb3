//! A layer with experts in one launch, against a reference in `f64` that goes on from what the kernel found.

mod limits;
mod logits;
mod next;

use half::bf16;
use plimsoll_device::cuda::{Gpu, GpuError, GpuSlab};
use plimsoll_kernels::cuda::{
    GpuChainEnd, GpuLinear, GpuMoeChain, GpuNorm, GpuRouter, Linears, MoeChainLayers, MoeKernels,
    SharedExpertLayers, has_hopper_kernels,
};
use plimsoll_kernels::{ExpertActivation, Route, RouterSoftmax};
use rand::Rng;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;

use super::weights::{Experts, Format, Table};
use super::{ACTIVATIONS, activate};
use crate::chain::{EPS, TOLERANCE, add, normalise};
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
    shared: bool,
    format: Format,
    /// Of the products around the experts.
    dense: Format,
    /// So many of the last outputs of what follows are a product of their own, with weights in this format.
    other: Option<(usize, Format)>,
}

/// An expert that every row goes to.
struct Shared {
    gate_up: Experts,
    down: Experts,
    gate: Table,
}

struct Case {
    size: Size,
    x: Vec<bf16>,
    hidden: Vec<bf16>,
    norms: [Vec<f32>; 2],
    output: Experts,
    router: Table,
    router_bias: Option<Vec<bf16>>,
    softmax: RouterSoftmax,
    gate_up: Experts,
    down: Experts,
    shared: Option<Shared>,
    next: Option<Next>,
    activation: ExpertActivation,
}

/// What the kernel left.
#[derive(Debug, PartialEq)]
struct Outputs {
    logits: Vec<f32>,
    loads: Vec<u32>,
    shared_logit: Vec<f32>,
    activated: Vec<bf16>,
    shared_activated: Vec<bf16>,
    hidden: Vec<bf16>,
    out: Vec<bf16>,
}

/// What a launch takes and leaves.
struct Memory {
    x: GpuSlab,
    hidden: GpuSlab,
    norms: [GpuSlab; 2],
    router_bias: GpuSlab,
    logits: GpuSlab,
    loads: GpuSlab,
    shared_logit: GpuSlab,
    activated: GpuSlab,
    shared_activated: GpuSlab,
    out: GpuSlab,
}

impl Memory {
    fn new(gpu: &Gpu, case: &Case) -> Self {
        let Size {
            inner,
            next,
            experts,
            top_k,
            ..
        } = case.size;
        let floats = |len: usize| common::poisoned::<f32>(gpu, len + GUARD);
        let poisoned = |len: usize| common::poisoned::<bf16>(gpu, len + GUARD);
        Self {
            x: common::upload(gpu, &case.x),
            hidden: common::upload(gpu, &case.hidden),
            norms: case.norms.each_ref().map(|norm| common::upload(gpu, norm)),
            router_bias: common::upload(gpu, case.router_bias.as_deref().unwrap_or_default()),
            logits: floats(experts),
            loads: common::upload(gpu, &vec![0_u32; experts]),
            shared_logit: floats(1),
            activated: poisoned(top_k * inner),
            shared_activated: poisoned(inner),
            out: poisoned(next),
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
        let [norm, next_norm] = self.norms.each_ref().map(|norm| GpuNorm {
            weight: norm.slice().range(0..width),
            eps: EPS,
        });
        let bias = self.router_bias.slice();
        let router_bias = case.router_bias.as_ref().map(|_| bias.range(0..experts));
        let shared = case.shared.as_ref().map(|_| {
            (
                self.shared_activated.slice().range(0..inner),
                self.shared_logit.slice().range(0..1),
            )
        });
        kernels.forward_chain(
            linears,
            &GpuMoeChain {
                layers: case.layers(),
                x: self.x.slice().range(0..case.x.len()),
                hidden: self.hidden.slice().range(0..width),
                norm,
                router: GpuRouter::plain(router_bias, case.softmax),
                logits: self.logits.slice().range(0..experts),
                loads: Some(self.loads.slice().range(0..experts)),
                activation: case.activation,
                activated: self.activated.slice().range(0..top_k * inner),
                shared,
                next: case.next().map(|linear| GpuChainEnd {
                    norm: next_norm,
                    linear,
                    out: self.out.slice().range(0..next),
                }),
            },
        )
    }

    fn outputs(&self, gpu: &Gpu, case: &Case) -> Outputs {
        let Size {
            width,
            inner,
            next,
            experts,
            top_k,
            shared,
            ..
        } = case.size;
        let shared = usize::from(shared);
        Outputs {
            logits: unguarded(gpu, &self.logits, experts, f32::is_nan),
            loads: common::download(gpu, &self.loads, experts),
            shared_logit: unguarded(gpu, &self.shared_logit, shared, f32::is_nan),
            activated: unguarded(gpu, &self.activated, top_k * inner, bf16::is_nan),
            shared_activated: unguarded(gpu, &self.shared_activated, shared * inner, bf16::is_nan),
            hidden: common::download(gpu, &self.hidden, width),
            out: unguarded(gpu, &self.out, next, bf16::is_nan),
        }
    }
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
        let bias = |rng: &mut StdRng| rng.random_bool(0.5);
        let of = |rng: &mut StdRng, count: usize, rows: [usize; 2]| {
            let bias = size.format == Format::Mxfp4 && bias(rng);
            Experts::random(gpu, rng, size.format, count, rows, bias)
        };
        let around = |rng: &mut StdRng, rows: [usize; 2]| {
            let bias = bias(rng);
            Experts::random(gpu, rng, size.dense, 1, rows, bias)
        };
        Self {
            size,
            x: common::random(rng, attended),
            hidden: common::random(rng, width),
            norms,
            output: around(rng, [width, attended]),
            router: Table::random(gpu, rng, [experts, width], 2.0),
            router_bias: rng.random_bool(0.5).then(|| common::random(rng, experts)),
            softmax: *[RouterSoftmax::All, RouterSoftmax::Chosen].choose(rng).unwrap(),
            gate_up: of(rng, experts, [2 * inner, width]),
            down: of(rng, experts, [width, inner]),
            shared: size.shared.then(|| Shared {
                gate_up: of(rng, 1, [2 * inner, width]),
                down: of(rng, 1, [width, inner]),
                gate: Table::random(gpu, rng, [1, width], 2.0),
            }),
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
            shared: self.shared.as_ref().map(|shared| SharedExpertLayers {
                gate_up: &shared.gate_up.linears[0],
                down: &shared.down.linears[0],
                gate: &shared.gate.device,
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

    /// The residual stream behind the mixer, and the same normalised.
    fn inputs(&self) -> [Vec<f64>; 2] {
        let hidden = add(&wide(&self.hidden), &self.output.product(0, &wide(&self.x)));
        let normed = normalise(&hidden, &self.norms[0]);
        [hidden, normed]
    }

    /// Each part from what was found before it.
    fn check(&self, found: &Outputs) {
        let [hidden, normed] = self.inputs();
        // With the gate's, which alone may be next to nothing beside its error.
        let mut want = self.router.product(&normed);
        want.extend(self.shared.iter().flat_map(|shared| shared.gate.product(&normed)));
        let both = [&found.logits[..], &found.shared_logit].concat();
        self.close("logits", &both, &want);
        let delta = self.check_experts(found, &normed, &self.routes(&found.logits));
        let hidden = add(&hidden, &delta);
        self.close("residual stream", &common::widen(&found.hidden), &hidden);
        if let Some(next) = &self.next {
            let normed = normalise(&wide(&found.hidden), &self.norms[1]);
            self.check_next(next, &normed, &common::widen(&found.out));
        }
    }

    /// What experts make of the row, those of `routes` and that of all rows, and what they add to the residual stream.
    fn check_experts(&self, found: &Outputs, normed: &[f64], routes: &[Route]) -> Vec<f64> {
        let inner = self.size.inner;
        let experts = self.size.experts;
        let is_chosen = |expert: usize| routes.iter().any(|route| route.expert as usize == expert);
        let loads: Vec<u32> = (0..experts).map(|expert| is_chosen(expert).into()).collect();
        assert_eq!(found.loads, loads, "{:?}: rows of experts", self.size);
        let activated = |gate_up: Vec<f64>| {
            let (gate, up) = gate_up.split_at(inner);
            let both = gate.iter().zip(up);
            both.map(|(gate, up)| activate(self.activation, *gate, *up))
                .collect::<Vec<_>>()
        };
        let mut delta = vec![0.0; self.size.width];
        let mut add_scaled = |part: Vec<f64>, weight: f64| {
            delta.iter_mut().zip(part).for_each(|(sum, x)| *sum += weight * x);
        };
        for (route, own) in routes.iter().zip(found.activated.chunks_exact(inner)) {
            let expert = route.expert as usize;
            let want = activated(self.gate_up.product(expert, normed));
            let what = format!("activated of expert {expert}");
            self.close(&what, &common::widen(own), &want);
            add_scaled(self.down.product(expert, &wide(own)), f64::from(route.weight));
        }
        if let Some(shared) = &self.shared {
            let want = activated(shared.gate_up.product(0, normed));
            self.close(
                "activated of all rows' expert",
                &common::widen(&found.shared_activated),
                &want,
            );
            let weight = 1.0 / (1.0 + (-f64::from(found.shared_logit[0])).exp());
            add_scaled(shared.down.product(0, &wide(&found.shared_activated)), weight);
        }
        delta
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

const BF16: Size = Size {
    attended: 4096,
    width: 2048,
    inner: 768,
    next: 5120,
    experts: 16,
    top_k: 8,
    shared: false,
    format: Format::Bf16,
    dense: Format::Bf16,
    other: None,
};

#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn a_layer_with_experts_in_one_launch() {
    let gpu = common::gpu();
    let mut rng = common::rng("a_layer_with_experts_in_one_launch");
    let [blocks, rows] = [Format::Fp8Blocks, Format::Fp8].map(|format| Size {
        format,
        dense: format,
        ..BF16
    });
    let sizes = [
        // Qwen3-30B-A3B, Qwen3.5-35B-A3B, Qwen3-Next.
        BF16,
        blocks,
        rows,
        Size {
            inner: 512,
            shared: true,
            next: 0,
            ..BF16
        },
        Size {
            inner: 512,
            shared: true,
            next: 12_288,
            ..blocks
        },
        Size {
            inner: 512,
            shared: true,
            experts: 512,
            top_k: 10,
            width: 256,
            attended: 512,
            ..blocks
        },
        Size {
            attended: 8192,
            width: 4096,
            inner: 1536,
            experts: 9,
            ..blocks
        },
        Size {
            attended: 8192,
            width: 4096,
            inner: 384,
            experts: 9,
            ..rows
        },
        // Parts of pieces, of rows and of shares.
        Size {
            attended: 80,
            width: 72,
            inner: 24,
            next: 40,
            experts: 3,
            top_k: 2,
            ..BF16
        },
        Size {
            attended: 528,
            width: 1040,
            inner: 272,
            next: 1000,
            experts: 12,
            top_k: 12,
            shared: true,
            ..rows
        },
        Size {
            attended: 640,
            width: 3968,
            inner: 2048,
            next: 16,
            experts: 12,
            top_k: 1,
            ..blocks
        },
        Size {
            width: 2880,
            inner: 1000,
            experts: 40,
            top_k: 32,
            shared: true,
            ..BF16
        },
        // Other formats around the experts than theirs.
        Size {
            dense: Format::Bf16,
            ..blocks
        },
        // With one to four windows of a warp; an odd number of experts; parts of stages.
        MXFP4,
        Size {
            attended: 80,
            width: 64,
            inner: 64,
            next: 0,
            experts: 3,
            top_k: 1,
            ..MXFP4
        },
        Size {
            attended: 528,
            width: 1152,
            inner: 192,
            experts: 40,
            top_k: 32,
            ..MXFP4
        },
        Size {
            attended: 512,
            width: 320,
            inner: 3648,
            next: 0,
            top_k: 3,
            ..MXFP4
        },
        Size {
            width: 3968,
            inner: 448,
            experts: 12,
            top_k: 7,
            dense: Format::Fp8,
            ..MXFP4
        },
    ];
    check_all(&gpu, &mut rng, &sizes);
}

/// Random layers of these sizes, each in one launch where the GPU can, with the same bits every time.
fn check_all(gpu: &Gpu, rng: &mut StdRng, sizes: &[Size]) {
    let (linears, kernels) = (crate::linear::linears(gpu), MoeKernels::load(gpu).unwrap());
    for &size in sizes {
        let case = Case::random(gpu, rng, size);
        let chains = kernels.can_chain(&case.layers(), case.next());
        assert_eq!(chains, has_hopper_kernels(gpu), "{size:?}");
        if !chains {
            return;
        }
        let found = case.run(gpu, &kernels, &linears);
        case.check(&found);
        for _ in 0..5 {
            assert!(case.run(gpu, &kernels, &linears) == found, "{size:?}: other bits");
        }
    }
}

/// Layers of different sizes that take turns in the workspace, in graphs too, until the tags of launches begin anew (65,535 of them).
#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn what_launches_before_left_is_not_taken() {
    let Some(gpu) = common::hopper() else { return };
    let (linears, kernels) = (crate::linear::linears(&gpu), MoeKernels::load(&gpu).unwrap());
    let mut rng = common::rng("what_launches_before_left_is_not_taken");
    let small = Size {
        attended: 64,
        width: 64,
        inner: 16,
        next: 64,
        experts: 4,
        top_k: 2,
        ..BF16
    };
    let mxfp4 = Size {
        inner: 64,
        format: Format::Mxfp4,
        ..small
    };
    let small = [small, Size { next: 0, ..small }, mxfp4].map(|size| Case::random(&gpu, &mut rng, size));
    let mut large = Case::random(&gpu, &mut rng, BF16);
    let run = |case: &Case| case.run(&gpu, &kernels, &linears);
    let want = [run(&small[0]), run(&small[1]), run(&small[2]), run(&large)];
    let cases = small.iter().chain([&large]);
    cases.zip(&want).for_each(|(case, found)| case.check(found));
    let memory = small.each_ref().map(|case| Memory::new(&gpu, case));
    // With another launch of the large layer as many as there are tags.
    const LAUNCHES: usize = 434;
    const REPLAYS: usize = 65_534 / LAUNCHES;
    let graph = gpu
        .capture(|| {
            (0..LAUNCHES).try_for_each(|at| memory[at % 3].forward(&small[at % 3], &kernels, &linears))
        })
        .expect("a capture");
    for round in 0..2 {
        let inputs = (large.x.clone(), large.hidden.clone());
        large.x = common::random(&mut rng, large.x.len());
        large.hidden = common::random(&mut rng, large.hidden.len());
        run(&large);
        (large.x, large.hidden) = inputs;
        for _ in 0..REPLAYS {
            graph.launch().expect("a replay");
        }
        assert!(run(&large) == want[3], "round {round}: other bits");
    }
    assert!(small.each_ref().map(run) == want[..3], "other bits");
}
