//! Layers of one row in one launch, against a reference in `f64` that rounds where the kernel does.

use std::sync::Arc;

use half::bf16;
use plimsoll_device::cuda::{Gpu, GpuSlab};
use plimsoll_kernels::cuda::{
    Fp8Scaling, GpuChain, GpuChainEnd, GpuLinear, GpuMatrix, GpuNorm, GpuWeight, Linears, SumNorms,
    has_hopper_kernels,
};
use plimsoll_kernels::{Activation, e4m3_from_f32, e4m3_to_f32};
use rand::Rng;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;

use crate::common::{self, wide};
use crate::fp8::weight_scale;
use crate::fused::{ACTIVATIONS, activate};

pub(crate) const EPS: f32 = 1e-5;
/// Rounded inputs may differ where the sums before them were next to a tie.
pub(crate) const TOLERANCE: f64 = 8e-3;

/// A layer of which the weights keep the size of their inputs, near enough.
pub(crate) struct Layer {
    /// `[n, k]`.
    weight: Vec<f64>,
    bias: Option<Vec<bf16>>,
    k: usize,
    pub(crate) device: GpuLinear,
}

impl Layer {
    /// In bf16, or in e4m3 with such scales.
    pub(crate) fn random(
        gpu: &Gpu,
        rng: &mut StdRng,
        fp8: Option<Fp8Scaling>,
        [n, k]: [usize; 2],
        bias: bool,
    ) -> Self {
        if let Some(scaling) = fp8 {
            let codes = (0..n * k).map(|_| e4m3_from_f32(rng.random_range(-448.0..448.0)));
            let codes: Vec<u8> = codes.collect();
            return Self::fp8(gpu, rng, scaling, &codes, k, bias);
        }
        let scale = typical(k);
        let values = (0..n * k).map(|_| bf16::from_f32(rng.random_range(-1.0..1.0) * scale));
        let values: Vec<bf16> = values.collect();
        let slab = Arc::new(common::upload(gpu, &values));
        let matrix = GpuMatrix::Bf16(GpuWeight::new(&slab, 0..n * k));
        Self::new(gpu, rng, (wide(&values), matrix), k, bias)
    }

    /// Of these codes `[n, k]`, with random scales.
    fn fp8(gpu: &Gpu, rng: &mut StdRng, scaling: Fp8Scaling, codes: &[u8], k: usize, bias: bool) -> Self {
        let count = scaling.weight_scales(codes.len() / k, k);
        let scale = typical(k) / 448.0;
        let scales = (0..count).map(|_| rng.random_range(0.5..2.0) * scale);
        let scales: Vec<f32> = scales.collect();
        let weight = codes.iter().enumerate().map(|(at, &code)| {
            let scale = scales[weight_scale(scaling, k, at / k, at % k)];
            f64::from(e4m3_to_f32(code)) * f64::from(scale)
        });
        let matrix = GpuMatrix::Fp8 {
            values: GpuWeight::new(&Arc::new(common::upload(gpu, codes)), 0..codes.len()),
            scales: GpuWeight::new(&Arc::new(common::upload(gpu, &scales)), 0..count),
            scaling,
        };
        Self::new(gpu, rng, (weight.collect(), matrix), k, bias)
    }

    fn new(
        gpu: &Gpu,
        rng: &mut StdRng,
        (weight, matrix): (Vec<f64>, GpuMatrix),
        k: usize,
        bias: bool,
    ) -> Self {
        let n = weight.len() / k;
        let bias = bias.then(|| common::random(rng, n));
        let device_bias = bias
            .as_ref()
            .map(|bias| GpuWeight::new(&Arc::new(common::upload(gpu, bias)), 0..n));
        Self {
            weight,
            bias,
            k,
            device: GpuLinear::new(matrix, device_bias, n, k),
        }
    }

    pub(crate) fn forward(&self, x: &[f64]) -> Vec<f64> {
        common::product(x, &self.weight, self.k, self.bias.as_deref())
    }
}

/// The largest of `k` weights that keep the size of their inputs.
fn typical(k: usize) -> f32 {
    (3.0 / k as f32).sqrt()
}

pub(crate) fn round(x: f64) -> f64 {
    bf16::from_f64(x).to_f64()
}

pub(crate) fn normalise(x: &[f64], weight: &[f32]) -> Vec<f64> {
    scaled(x, weight).into_iter().map(round).collect()
}

/// The same, not rounded.
pub(crate) fn scaled(x: &[f64], weight: &[f32]) -> Vec<f64> {
    let square = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
    let scale = 1.0 / (square + f64::from(EPS)).sqrt();
    let both = x.iter().zip(weight);
    both.map(|(x, weight)| x * scale * f64::from(*weight)).collect()
}

/// What was added to `x`, rounded as it is.
pub(crate) fn add(x: &[f64], delta: &[f64]) -> Vec<f64> {
    x.iter().zip(delta).map(|(x, y)| round(x + round(*y))).collect()
}

struct Case {
    what: String,
    x: Vec<bf16>,
    hidden: Vec<bf16>,
    norms: [Vec<f32>; 2],
    output: Layer,
    gate_up: Layer,
    down: Layer,
    /// Products of what follows, and that as a whole.
    next: Vec<Layer>,
    projections: Option<GpuLinear>,
    activation: Activation,
    sums: Option<Sums>,
}

/// Norms of what the mixer and the MLP add.
struct Sums {
    norms: [Vec<f32>; 2],
    scalar: Option<f32>,
}

/// The residual stream, what was activated, and the outputs of the last layer.
#[derive(Debug, PartialEq)]
struct Outputs {
    hidden: Vec<bf16>,
    activated: Vec<bf16>,
    out: Vec<bf16>,
}

impl Case {
    fn random(
        gpu: &Gpu,
        rng: &mut StdRng,
        fp8: Option<Fp8Scaling>,
        [attended, width, inner, next]: [usize; 4],
    ) -> Self {
        let mut norm = || (0..width).map(|_| rng.random_range(0.5..1.5)).collect();
        let norms = [norm(), norm()];
        let activation = *ACTIVATIONS.choose(rng).unwrap();
        let biases = [(); 3].map(|()| rng.random_bool(0.5));
        // With e4m3 weights, inputs are scaled to fit halves.
        let size = 2f32.powi(rng.random_range(-20..20));
        let mut inputs = |len: usize| -> Vec<bf16> {
            let values = common::random(rng, len);
            values.iter().map(|x| bf16::from_f32(x.to_f32() * size)).collect()
        };
        let (x, hidden) = (inputs(attended), inputs(width));
        Self {
            what: format!(
                "{fp8:?}, {attended} to {width}, {inner} inside, then {next}, size {size}, biases {biases:?}, {activation:?}"
            ),
            x,
            hidden,
            norms,
            output: Layer::random(gpu, rng, fp8, [width, attended], biases[0]),
            gate_up: Layer::random(gpu, rng, fp8, [2 * inner, width], false),
            down: Layer::random(gpu, rng, fp8, [width, inner], biases[1]),
            next: Vec::new(),
            projections: None,
            activation,
            sums: None,
        }
        .followed_by((next > 0).then(|| Layer::random(gpu, rng, fp8, [next, width], biases[2])))
    }

    /// With one product more of what follows.
    fn followed_by(mut self, next: Option<Layer>) -> Self {
        self.next.extend(next);
        self.projections = match &self.next[..] {
            [] => None,
            [one] => Some(one.device.clone()),
            all => {
                let parts: Vec<GpuLinear> = all.iter().map(|layer| layer.device.clone()).collect();
                let outputs = parts.iter().map(GpuLinear::outputs).sum();
                Some(GpuLinear::new(GpuMatrix::Parts(parts), None, outputs, all[0].k))
            }
        };
        self
    }

    /// With norms of what is added, to a residual stream of about that size.
    fn with_norms_of_sums(mut self, rng: &mut StdRng) -> Self {
        let width = self.hidden.len();
        let mut norm = || (0..width).map(|_| rng.random_range(0.5..1.5)).collect();
        let norms = [norm(), norm()];
        let scalar = rng.random_bool(0.5).then(|| rng.random_range(0.3..1.2));
        self.what += &format!(", norms of sums, scalar {scalar:?}");
        self.sums = Some(Sums { norms, scalar });
        self.hidden = common::random(rng, width);
        self
    }

    /// The residual stream with what the mixer (0) or the MLP (1) adds, and times the scalar behind the latter.
    fn sum(&self, hidden: &[f64], delta: &[f64], at: usize) -> Vec<f64> {
        let Some(sums) = &self.sums else {
            return add(hidden, delta);
        };
        let delta: Vec<f64> = delta.iter().map(|x| round(*x)).collect();
        let added = scaled(&delta, &sums.norms[at]);
        let factor = f64::from(sums.scalar.filter(|_| at == 1).unwrap_or(1.0));
        let both = hidden.iter().zip(added);
        both.map(|(x, y)| round((x + y) * factor)).collect()
    }

    fn layers(&self) -> [&GpuLinear; 3] {
        [&self.output.device, &self.gate_up.device, &self.down.device]
    }

    fn next(&self) -> Option<&GpuLinear> {
        self.projections.as_ref()
    }

    fn run(&self, gpu: &Gpu, linears: &Linears) -> Outputs {
        let (width, inner) = (self.hidden.len(), self.down.k);
        let (x, hidden) = (common::upload(gpu, &self.x), common::upload(gpu, &self.hidden));
        let norms = self.norms.each_ref().map(|norm| common::upload(gpu, norm));
        let [norm, next_norm] = norms.each_ref().map(|norm| GpuNorm {
            weight: norm.slice().range(0..width),
            eps: EPS,
        });
        let outputs = self.next().map_or(0, GpuLinear::outputs);
        let guard = 64;
        let poisoned = |len: usize| common::poisoned::<bf16>(gpu, len + guard);
        let (activated, out, delta) = (poisoned(inner), poisoned(outputs), poisoned(width));
        let sums = self.sums.as_ref().map(|sums| {
            let norms = sums.norms.each_ref().map(|norm| common::upload(gpu, norm));
            (norms, sums.scalar.map(|scalar| common::upload(gpu, &[scalar])))
        });
        linears
            .forward_chain(&GpuChain {
                x: x.slice().range(0..self.x.len()),
                output: &self.output.device,
                hidden: hidden.slice().range(0..width),
                norm,
                gate_up: &self.gate_up.device,
                activation: self.activation,
                activated: activated.slice().range(0..inner),
                down: &self.down.device,
                sum_norms: sums.as_ref().map(|([mixer, mlp], scalar)| SumNorms {
                    mixer: mixer.slice().range(0..width),
                    mlp: mlp.slice().range(0..width),
                    scalar: scalar.as_ref().map(|scalar| scalar.slice().range(0..1)),
                    delta: delta.slice().range(0..width),
                }),
                next: self.next().map(|linear| GpuChainEnd {
                    norm: next_norm,
                    linear,
                    out: out.slice().range(0..outputs),
                }),
            })
            .expect("a launch");
        let unguarded = |slab: &GpuSlab, len: usize| {
            let mut all: Vec<bf16> = common::download(gpu, slab, len + guard);
            let beyond = all.split_off(len);
            assert!(
                beyond.iter().all(|x| x.is_nan()),
                "{}: written past the end",
                self.what
            );
            all
        };
        if sums.is_some() {
            unguarded(&delta, width);
        }
        Outputs {
            hidden: common::download(gpu, &hidden, width),
            activated: unguarded(&activated, inner),
            out: unguarded(&out, outputs),
        }
    }

    /// Each part from what was found before it.
    fn check(&self, found: &Outputs) {
        let close = |part: &str, found: &[bf16], want: &[f64]| {
            let what = format!("{}: {part}", self.what);
            common::assert_close(&what, &common::widen(found), want, TOLERANCE);
        };
        let hidden = self.sum(&wide(&self.hidden), &self.output.forward(&wide(&self.x)), 0);
        let gate_up = self.gate_up.forward(&normalise(&hidden, &self.norms[0]));
        let (gate, up) = gate_up.split_at(self.down.k);
        let activated = gate
            .iter()
            .zip(up)
            .map(|(x, up)| activate(self.activation, *x) * up);
        close("activated", &found.activated, &activated.collect::<Vec<_>>());
        let hidden = self.sum(&hidden, &self.down.forward(&wide(&found.activated)), 1);
        close("residual stream", &found.hidden, &hidden);
        let (normed, mut first) = (normalise(&wide(&found.hidden), &self.norms[1]), 0);
        for next in &self.next {
            let out = next.forward(&normed);
            close("what follows", &found.out[first..first + out.len()], &out);
            first += out.len();
        }
        assert_eq!(first, found.out.len(), "{}: all that follows", self.what);
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn layers_of_one_row_in_one_launch() {
    let gpu = common::gpu();
    let linears = crate::linear::linears(&gpu);
    let mut rng = common::rng("layers_of_one_row_in_one_launch");
    let any = [
        [64, 64, 96, 32],
        [896, 896, 4864, 1152],
        [512, 1024, 3072, 1000],
        [4096, 4096, 512, 6144],
        [2048, 256, 14336, 64],
        [128, 64, 28672, 0],
        [512, 5120, 640, 80],
        [256, 8192, 272, 16],
        [80, 2064, 6160, 2000],
    ];
    let blocks = [
        [128, 128, 128, 32],
        [896, 896, 4864, 1152],
        [4096, 4096, 14336, 6144],
        [128, 256, 28672, 0],
        [512, 5120, 640, 80],
        [8192, 2048, 384, 1000],
    ];
    for (fp8, sizes) in [
        (None, &any[..]),
        (Some(Fp8Scaling::Rows), &any),
        (Some(Fp8Scaling::Blocks), &blocks),
    ] {
        for (size, has_norms) in sizes
            .iter()
            .flat_map(|size| [(size, false), (size, false), (size, true)])
        {
            let mut case = Case::random(&gpu, &mut rng, fp8, *size);
            if has_norms {
                case = case.with_norms_of_sums(&mut rng);
            }
            let chains = linears.can_chain(case.layers(), case.next());
            assert_eq!(chains, has_hopper_kernels(&gpu), "{}", case.what);
            if !chains {
                return;
            }
            let found = case.run(&gpu, &linears);
            case.check(&found);
            for _ in 0..5 {
                assert!(case.run(&gpu, &linears) == found, "{}: other bits", case.what);
            }
        }
    }
}

/// Projections that follow with weights in bf16 beside others, as delta layers have them of quantised checkpoints.
#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn two_products_follow() {
    let gpu = common::gpu();
    let linears = crate::linear::linears(&gpu);
    let mut rng = common::rng("two_products_follow");
    for (fp8, size, others) in [
        // Of Qwen3.5-9B's delta layers the projections; more outputs than sums have room for; the widest row.
        (Some(Fp8Scaling::Blocks), [4096, 4096, 1024, 12_288], 64),
        (Some(Fp8Scaling::Blocks), [128, 5120, 640, 80], 96),
        (Some(Fp8Scaling::Blocks), [128, 128, 256, 16], 20_000),
        (Some(Fp8Scaling::Rows), [896, 896, 4864, 1152], 9),
        (Some(Fp8Scaling::Rows), [256, 8192, 272, 16], 300),
        (Some(Fp8Scaling::Rows), [80, 2064, 6160, 2000], 1000),
        (None, [80, 2064, 6160, 2000], 1000),
        (None, [512, 1024, 3072, 1000], 16),
    ] {
        for of_bf16 in [true, false] {
            let case = Case::random(&gpu, &mut rng, fp8, size);
            let format = fp8.filter(|_| !of_bf16);
            let other = Layer::random(&gpu, &mut rng, format, [others, size[1]], of_bf16);
            let case = case.followed_by(Some(other));
            let chains = linears.can_chain(case.layers(), case.next());
            assert_eq!(chains, has_hopper_kernels(&gpu), "{}", case.what);
            if !chains {
                return;
            }
            let found = case.run(&gpu, &linears);
            case.check(&found);
            for _ in 0..5 {
                assert!(case.run(&gpu, &linears) == found, "{}: other bits", case.what);
            }
        }
    }
}

/// Sizes of the chains of [`extreme_inputs`]: attended, width, inner, next.
const EXTREME_SIZES: [[usize; 4]; 3] = [
    [128, 128, 128, 32],
    [896, 896, 4864, 1152],
    [8192, 2048, 384, 1000],
];

/// With e4m3 weights, products are summed eight at a time in halves: the largest sums there can be, and inputs of very different sizes. With
/// weights of all formats, inputs that are all zero.
#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn extreme_inputs() {
    let Some(gpu) = common::hopper() else { return };
    let linears = crate::linear::linears(&gpu);
    let mut rng = common::rng("extreme_inputs");
    let check = |case: &Case| {
        assert!(linears.can_chain(case.layers(), case.next()), "{}", case.what);
        let found = case.run(&gpu, &linears);
        case.check(&found);
        found
    };
    for (scaling, size) in [Fp8Scaling::Rows, Fp8Scaling::Blocks]
        .into_iter()
        .flat_map(|scaling| EXTREME_SIZES.map(|size| (scaling, size)))
    {
        let [attended, width, ..] = size;
        let mut case = Case::random(&gpu, &mut rng, Some(scaling), size);
        case.hidden = common::random(&mut rng, width);
        // As halves they are just below 16, and outputs are near 1.
        for (weight, input) in [(448.0, 15.9375), (448.0, -15.9375), (-448.0, 15.9375)] {
            case.what = format!("{scaling:?}, {size:?}, weights {weight}, inputs {input}");
            case.x = vec![bf16::from_f32(input * 2f32.powi(-10)); attended];
            let codes = vec![e4m3_from_f32(weight); width * attended];
            case.output = Layer::fp8(&gpu, &mut rng, scaling, &codes, attended, false);
            check(&case);
        }
        // With weights of 0 for the large input, the others decide the outputs.
        for weighs in [true, false] {
            let at = rng.random_range(0..attended);
            case.what = format!("{scaling:?}, {size:?}, input {at} is large, weighs {weighs}");
            case.x = common::random(&mut rng, attended);
            case.x[at] = bf16::from_f32(2f32.powi(15));
            let code = |index: usize| match index % attended == at && !weighs {
                true => 0,
                false => e4m3_from_f32(rng.random_range(-448.0..448.0)),
            };
            let codes: Vec<u8> = (0..width * attended).map(code).collect();
            case.output = Layer::fp8(&gpu, &mut rng, scaling, &codes, attended, false);
            check(&case);
        }
    }
    for (fp8, size) in [None, Some(Fp8Scaling::Rows), Some(Fp8Scaling::Blocks)]
        .into_iter()
        .flat_map(|fp8| EXTREME_SIZES.map(|size| (fp8, size)))
    {
        let [attended, width, inner, _] = size;
        let mut case = Case::random(&gpu, &mut rng, fp8, size);
        case.what = format!("{fp8:?}, {size:?}, zeros");
        case.x.fill(bf16::ZERO);
        case.hidden.fill(bf16::ZERO);
        case.output = Layer::random(&gpu, &mut rng, fp8, [width, attended], false);
        case.down = Layer::random(&gpu, &mut rng, fp8, [width, inner], false);
        let found = check(&case);
        for zeros in [&found.activated, &found.hidden] {
            assert!(zeros.iter().all(|x| x.to_f32() == 0.0), "{}", case.what);
        }
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn layers_that_do_not_fit_together_are_not_chained() {
    let gpu = common::gpu();
    let linears = crate::linear::linears(&gpu);
    let mut rng = common::rng("layers_that_do_not_fit_together_are_not_chained");
    let mut layer_of = |fp8: Option<Fp8Scaling>, n: usize, k: usize, bias: bool| {
        Layer::random(&gpu, &mut rng, fp8, [n, k], bias).device
    };
    let mut fp8 = |scaling: Fp8Scaling, n: usize, k: usize| layer_of(Some(scaling), n, k, false);
    let rows = [fp8(Fp8Scaling::Rows, 64, 128), fp8(Fp8Scaling::Rows, 256, 64)];
    let [rows_down, rows_next] = [fp8(Fp8Scaling::Rows, 64, 128), fp8(Fp8Scaling::Rows, 32, 64)];
    let part_of_a_piece = fp8(Fp8Scaling::Rows, 64, 72);
    let blocks = fp8(Fp8Scaling::Blocks, 64, 128);
    let mut layer = |n: usize, k: usize, bias: bool| layer_of(None, n, k, bias);
    let [output, gate_up, down] = [layer(64, 64, false), layer(192, 64, false), layer(64, 96, false)];
    let next = layer(32, 64, false);
    let fits = linears.can_chain([&output, &gate_up, &down], Some(&next));
    assert_eq!(fits, has_hopper_kernels(&gpu));
    let fits = linears.can_chain([&rows[0], &rows[1], &rows_down], Some(&rows_next));
    assert_eq!(fits, has_hopper_kernels(&gpu));
    // Of products that follow, some may be in bf16 beside others, and there may be two.
    let products = |products: &[&GpuLinear]| {
        let outputs = products.iter().map(|product| product.outputs()).sum();
        let products = products.iter().map(|product| (*product).clone()).collect();
        GpuLinear::new(GpuMatrix::Parts(products), None, outputs, 64)
    };
    for (following, fits) in [
        (products(&[&rows_next, &next]), true),
        (products(&[&next, &rows_next]), true),
        (products(&[&next, &next]), false),
        (products(&[&rows_next, &next, &rows_next]), false),
    ] {
        let can_chain = linears.can_chain([&rows[0], &rows[1], &rows_down], Some(&following));
        assert_eq!(can_chain, fits && has_hopper_kernels(&gpu), "{following:?}");
    }
    let both = products(&[&next, &rows_next]);
    assert!(!linears.can_chain([&output, &gate_up, &down], Some(&both)));
    // A bias of gates, inputs that are no whole pieces, a row that is too long, other widths, and several formats.
    let others = [
        (
            [layer(64, 64, false), layer(192, 64, true), layer(64, 96, false)],
            None,
        ),
        (
            [layer(64, 68, false), layer(192, 64, false), layer(64, 96, false)],
            None,
        ),
        (
            [
                layer(64, 64, false),
                layer(60_000, 64, false),
                layer(64, 30_000, false),
            ],
            None,
        ),
        (
            [layer(64, 64, false), layer(192, 64, false), layer(64, 104, false)],
            None,
        ),
        (
            [rows[0].clone(), gate_up.clone(), down.clone()],
            Some(next.clone()),
        ),
        ([part_of_a_piece, rows[1].clone(), rows_down.clone()], None),
        ([rows[0].clone(), rows[1].clone(), rows_down], Some(next.clone())),
        ([output.clone(), gate_up.clone(), down.clone()], Some(rows_next)),
        ([rows[0].clone(), rows[1].clone(), blocks], None),
        ([output, gate_up, down], Some(layer(32, 72, false))),
    ];
    for (layers, next) in &others {
        assert!(!linears.can_chain(layers.each_ref(), next.as_ref()));
    }
}
