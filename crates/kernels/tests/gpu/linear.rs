//! Linear layers: every way to compute them against `x Wᵀ + b` in `f64`.

mod measured;

use std::env;
use std::sync::Arc;

use half::bf16;
use plimsoll_core::{Component, Scratch};
use plimsoll_device::cuda::{Gpu, GpuError, GpuSlab};
use plimsoll_device::{Arena, Budget, Pod};
use plimsoll_kernels::cuda::{
    GpuLinear, GpuMatrix, GpuNorm, GpuResidual, GpuWeight, LinearCut, LinearOutput, LinearPath, LinearRoom,
    Linears, has_hopper_kernels,
};
use plimsoll_kernels::{Activation, Linear, Matrix, WeightType, glu};
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;

use crate::chain::{EPS, add, normalise};
use crate::common::{self, wide};
use crate::fused::{ACTIVATIONS, activate};

/// Sums of products are within this of the reference, rounded to bf16 once.
pub(crate) const TOLERANCE: f64 = 4e-3;

#[derive(Clone)]
pub(crate) struct Case {
    m: usize,
    n: usize,
    k: usize,
    pub(crate) x: Vec<bf16>,
    weight: Vec<bf16>,
    bias: Option<Vec<bf16>>,
}

impl Case {
    pub(crate) fn random(rng: &mut StdRng, m: usize, n: usize, k: usize, bias: bool) -> Self {
        Self {
            m,
            n,
            k,
            x: common::random(rng, m * k),
            weight: common::random(rng, n * k),
            bias: bias.then(|| common::random(rng, n)),
        }
    }

    pub(crate) fn rows(&self) -> usize {
        self.m
    }

    pub(crate) fn has_bias(&self) -> bool {
        self.bias.is_some()
    }

    pub(crate) fn reference(&self) -> Vec<f64> {
        let [x, weight] = [&self.x, &self.weight].map(|values| common::wide(values));
        common::product(&x, &weight, self.k, self.bias.as_deref())
    }

    /// `activation(gate) * up` of the reference.
    fn reference_glu(&self, activation: Activation) -> Vec<f64> {
        let rows = self.reference();
        let rows = rows.chunks_exact(self.n);
        rows.flat_map(|row| {
            let (gate, up) = row.split_at(self.n / 2);
            let pairs = gate
                .iter()
                .zip(up)
                .map(|(gate, up)| activate(activation, *gate) * up);
            pairs.collect::<Vec<f64>>()
        })
        .collect()
    }

    pub(crate) fn what(&self, way: &str) -> String {
        let Self { m, n, k, bias, .. } = self;
        format!("{way} [{m}, {k}] x [{n}, {k}] bias {}", bias.is_some())
    }

    pub(crate) fn layer(&self, gpu: &Gpu) -> GpuLinear {
        let mut elements = self.weight.clone();
        elements.extend(self.bias.iter().flatten());
        let slab = Arc::new(common::upload(gpu, &elements));
        let split = self.n * self.k;
        let bias = self
            .bias
            .as_ref()
            .map(|_| GpuWeight::new(&slab, split..split + self.n));
        GpuLinear::new(
            GpuMatrix::Bf16(GpuWeight::new(&slab, 0..split)),
            bias,
            self.n,
            self.k,
        )
    }
}

pub(crate) fn linears(gpu: &Gpu) -> Linears {
    let workspace = gpu
        .alloc(Component::Arena, Linears::WORKSPACE_BYTES)
        .expect("room");
    limited(Linears::load(gpu, workspace).expect("cuBLASLt and kernels"))
}

/// With no more shared memory than the environment asks for, as on a GPU that has 99 KiB.
pub(crate) fn limited(mut linears: Linears) -> Linears {
    if let Ok(kib) = env::var("PLIMSOLL_TEST_SHARED_KIB") {
        let kib: usize = kib.parse().expect("PLIMSOLL_TEST_SHARED_KIB: a number");
        linears.limit_shared(kib << 10);
    }
    linears
}

/// Runs `run` on poisoned memory of `len` elements and some more, which must stay as they are.
pub(crate) fn written<T: Pod>(
    gpu: &Gpu,
    len: usize,
    run: impl FnOnce(&GpuSlab) -> Result<(), GpuError>,
) -> Vec<T> {
    let guard = 512 / size_of::<T>();
    let slab = common::poisoned::<T>(gpu, len + guard);
    run(&slab).expect("a launch");
    let mut all: Vec<T> = common::download(gpu, &slab, len + guard);
    let beyond = all.split_off(len);
    assert!(
        bytemuck::cast_slice::<T, u8>(&beyond)
            .iter()
            .all(|byte| *byte == 0xff),
        "written past the end"
    );
    all
}

pub(crate) fn forward(gpu: &Gpu, linears: &Linears, case: &Case) -> Vec<bf16> {
    let (layer, x) = (case.layer(gpu), common::upload(gpu, &case.x));
    let len = case.m * case.n;
    written(gpu, len, |out| {
        linears.forward(x.slice(), &layer, out.slice().range(0..len))
    })
}

/// What a product writes that adds up and normalises its inputs first.
#[derive(PartialEq)]
pub(crate) struct Normed {
    pub(crate) out: Vec<bf16>,
    /// Of the inputs.
    pub(crate) sums: Vec<bf16>,
}

/// `hidden` and `delta` are `[m, k]`, `weight` is `[k]`.
pub(crate) fn forward_norm(
    gpu: &Gpu,
    linears: &Linears,
    layer: &GpuLinear,
    output: LinearOutput,
    [hidden, delta]: [&[bf16]; 2],
    weight: &[f32],
) -> Normed {
    let inputs = hidden.len();
    let parts = if let LinearOutput::Glu(_) = output { 2 } else { 1 };
    let outputs = inputs / weight.len() * layer.outputs() / parts;
    let [hidden, delta] = [hidden, delta].map(|values| common::upload(gpu, values));
    let weight = common::upload(gpu, weight);
    let mut sums = Vec::new();
    let out = written(gpu, outputs, |out| {
        sums = written(gpu, inputs, |sum| {
            let residual = GpuResidual {
                hidden: hidden.slice(),
                delta: delta.slice(),
                norm: GpuNorm {
                    weight: weight.slice(),
                    eps: EPS,
                },
                sum: sum.slice().range(0..inputs),
            };
            linears.forward_norm(&residual, layer, output, out.slice().range(0..outputs))
        });
        Ok(())
    });
    Normed { out, sums }
}

/// The norm ahead of the product, where it is a part of it; `reference` multiplies. `x` is `[m, k]`.
pub(crate) fn check_norm(
    gpu: &Gpu,
    linears: &Linears,
    layer: &GpuLinear,
    x: &[bf16],
    k: usize,
    reference: impl FnOnce(&[f64]) -> Vec<f64>,
    what: &str,
) {
    let output = LinearOutput::Bf16;
    if !linears.fuses_norm(x.len() / k, layer, output) {
        return;
    }
    let delta: Vec<bf16> = x.iter().rev().copied().collect();
    let weight: Vec<f32> = (0..k).map(|at| 0.5 + (at % 7) as f32 / 8.0).collect();
    let found = forward_norm(gpu, linears, layer, output, [x, &delta], &weight);
    let sums = add(&wide(x), &wide(&delta));
    assert_eq!(wide(&found.sums), sums, "{what}: the residual stream");
    let rows = sums.chunks_exact(k);
    let normed: Vec<f64> = rows.flat_map(|row| normalise(row, &weight)).collect();
    let (what, out) = (format!("{what} norm"), common::widen(&found.out));
    common::assert_close(&what, &out, &reference(&normed), 6e-3);
}

pub(crate) fn check(gpu: &Gpu, linears: &Linears, case: &Case, way: &str) {
    let reference = case.reference();
    let out = forward(gpu, linears, case);
    common::assert_close(&case.what(way), &common::widen(&out), &reference, TOLERANCE);
    if case.bias.is_some() {
        return;
    }
    let (layer, x) = (case.layer(gpu), common::upload(gpu, &case.x));
    let len = case.m * case.n;
    let out: Vec<f32> = written(gpu, len, |out| {
        linears.forward_f32(x.slice(), &layer, out.slice().range(0..len))
    });
    common::assert_close(&case.what(way), &out, &reference, 5e-5);
    for activation in ACTIVATIONS {
        if case.n.is_multiple_of(2) && linears.fuses_glu(case.m, &layer, activation) {
            let len = len / 2;
            let out: Vec<bf16> = written(gpu, len, |out| {
                let (room, output) = (LinearRoom::default(), LinearOutput::Glu(activation));
                linears.forward_in(room, x.slice(), &layer, output, out.slice().range(0..len))
            });
            let what = case.what(&format!("{way} {activation:?}"));
            common::assert_close(
                &what,
                &common::widen(&out),
                &case.reference_glu(activation),
                TOLERANCE,
            );
        }
    }
}

pub(crate) fn paths() -> Vec<Option<LinearPath>> {
    let sizes = [1, 2, 4, 8];
    let cuts = sizes.iter().flat_map(|&row_warps| {
        let clusters = sizes.into_iter().filter(move |cluster| *cluster <= row_warps);
        clusters.flat_map(move |cluster| {
            [1, 2].map(|blocks_per_sm| {
                Some(LinearPath::Stream(LinearCut {
                    row_warps,
                    cluster,
                    blocks_per_sm,
                }))
            })
        })
    });
    [None, Some(LinearPath::CublasLt), Some(LinearPath::Hopper)]
        .into_iter()
        .chain(cuts)
        .collect()
}

#[test]
fn cpu_matches_reference() {
    let mut rng = common::rng("linear on the CPU");
    for (m, n, k) in [(1, 48, 64), (5, 33, 96), (17, 130, 256)] {
        let case = Case::random(&mut rng, m, n, k, true);
        let bytes = bytemuck::cast_slice(&case.weight);
        let matrix = Matrix::new(WeightType::Bf16, n, k, bytes).expect("a matrix");
        let bias = case.bias.as_deref().map(common::widen);
        let budget = Budget::new(1 << 30);
        let linear = Linear::new(&[matrix], bias.as_deref(), &budget).expect("a layer");
        let arena = Arena::new(&budget, Scratch::Growable).expect("an arena");
        let mut out = vec![f32::NAN; m * n];
        linear
            .forward(&common::widen(&case.x), &mut out, &arena)
            .expect("room");
        common::assert_close(&case.what("CPU"), &out, &case.reference(), 1e-5);
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn gpu_matches_reference() {
    let gpu = common::gpu();
    let mut rng = common::rng("linear");
    let mut linears = linears(&gpu);
    for path in paths() {
        linears.fix(path);
        let way = path.map_or("default".to_owned(), |path| format!("{path:?}"));
        for (n, k) in [(16, 64), (96, 192), (130, 576), (257, 1024), (1000, 4096)] {
            let m = *[1, 2, 3, 7, 8, 9, 15, 16, 17, 24, 31, 32, 33, 70]
                .choose(&mut rng)
                .expect("one");
            for bias in [false, true] {
                let case = Case::random(&mut rng, m, n, k, bias);
                if path == Some(LinearPath::Hopper) && has_hopper_kernels(&gpu) {
                    let own = linears.is_own(m, &case.layer(&gpu), LinearOutput::F32);
                    assert_eq!(own, m <= 32, "{}", case.what(&way));
                }
                check(&gpu, &linears, &case, &way);
            }
        }
    }
}

/// Add and RMSNorm ahead of a product, in its own kernel.
#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn normalised_inputs() {
    let gpu = common::gpu();
    let mut rng = common::rng("linear, normalised");
    let mut linears = linears(&gpu);
    let mut fused = 0;
    for path in paths() {
        linears.fix(path);
        for (m, k) in [(1, 4096), (1, 576), (2, 2048), (3, 960), (4, 4096)] {
            let mut case = Case::random(&mut rng, m, 96, k, false);
            let (hidden, delta) = (common::random(&mut rng, m * k), common::random(&mut rng, m * k));
            let weight: Vec<f32> = common::widen(&common::random(&mut rng, k));
            let sum: Vec<bf16> = hidden
                .iter()
                .zip(&delta)
                .map(|(x, y)| bf16::from_f32(x.to_f32() + y.to_f32()))
                .collect();
            for (x, sum) in case.x.chunks_exact_mut(k).zip(sum.chunks_exact(k)) {
                let square: f64 = sum.iter().map(|x| x.to_f64().powi(2)).sum::<f64>() / k as f64;
                let scale = 1.0 / (square + f64::from(EPS)).sqrt();
                for ((x, sum), weight) in x.iter_mut().zip(sum).zip(&weight) {
                    *x = bf16::from_f64(sum.to_f64() * scale * f64::from(*weight));
                }
            }
            let layer = case.layer(&gpu);
            let gated = ACTIVATIONS.map(LinearOutput::Glu);
            for output in [LinearOutput::Bf16].into_iter().chain(gated) {
                if !linears.fuses_norm(m, &layer, output) {
                    continue;
                }
                fused += 1;
                let reference = match output {
                    LinearOutput::Glu(activation) => case.reference_glu(activation),
                    _ => case.reference(),
                };
                let found = forward_norm(&gpu, &linears, &layer, output, [&hidden, &delta], &weight);
                let what = case.what(&format!("{path:?} normalised {output:?}"));
                assert_eq!(found.sums, sum, "{what}: sums");
                // The inputs are rounded to bf16 here and there, perhaps differently.
                common::assert_close(&what, &common::widen(&found.out), &reference, 2.0 * TOLERANCE);
            }
        }
    }
    assert!(fused > 0, "no way to compute norms");
}

/// Inputs that do not fit in shared memory pass through it in phases.
#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn wide_inputs() {
    let gpu = common::gpu();
    let mut rng = common::rng("linear, wide inputs");
    let mut linears = linears(&gpu);
    for path in paths() {
        linears.fix(path);
        let way = path.map_or("default".to_owned(), |path| format!("{path:?}"));
        let m = *[1, 4, 8, 13, 16, 23, 32].choose(&mut rng).expect("one");
        let k = *[8960, 14336, 18944].choose(&mut rng).expect("one");
        check(&gpu, &linears, &Case::random(&mut rng, m, 150, k, false), &way);
    }
}

/// Rows that are no whole vectors of 16 bytes: patches, and what is inside some encoders' MLPs.
#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn inputs_that_are_no_whole_vectors() {
    let gpu = common::gpu();
    let mut rng = common::rng("linear, multiples of four inputs");
    let linears = linears(&gpu);
    for (m, n, k) in [(1, 64, 588), (70, 1152, 588), (260, 1280, 3420), (33, 48, 20)] {
        for bias in [false, true] {
            check(&gpu, &linears, &Case::random(&mut rng, m, n, k, bias), "default");
        }
    }
}

/// More features than one wave of thread blocks takes.
#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn many_outputs() {
    let gpu = common::gpu();
    let mut rng = common::rng("linear, many outputs");
    let mut linears = linears(&gpu);
    for path in paths() {
        linears.fix(path);
        let way = path.map_or("default".to_owned(), |path| format!("{path:?}"));
        for (m, n, k) in [(1, 49_152, 64), (11, 20_002, 128), (29, 9_999, 320)] {
            check(&gpu, &linears, &Case::random(&mut rng, m, n, k, false), &way);
        }
    }
}

/// Same bits in every run, whatever the other rows hold.
#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn rows_are_independent() {
    let gpu = common::gpu();
    let mut rng = common::rng("linear, rows");
    let mut linears = linears(&gpu);
    for path in paths() {
        linears.fix(path);
        for m in [2, 8, 16, 32, 40] {
            let mut case = Case::random(&mut rng, m, 200, 1024, true);
            let bits = |out: &[bf16]| -> Vec<u16> { out[..200].iter().map(|x| x.to_bits()).collect() };
            let first = forward(&gpu, &linears, &case);
            assert_eq!(
                bits(&first),
                bits(&forward(&gpu, &linears, &case)),
                "{path:?}: two runs"
            );
            case.x[1024..].fill(bf16::NAN);
            assert_eq!(
                bits(&first),
                bits(&forward(&gpu, &linears, &case)),
                "{path:?}: NaN in other rows"
            );
        }
    }
}

/// A chain in a graph, where kernels start before the ones ahead have ended: every layer sees the whole output of the one
/// before.
#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn chain_in_a_graph() {
    let gpu = common::gpu();
    let mut rng = common::rng("linear, chain");
    let mut linears = linears(&gpu);
    for path in [None, Some(LinearPath::Hopper)] {
        linears.fix(path);
        for m in [1, 8, 16, 32, 64] {
            check_chain(&gpu, &linears, &mut rng, m);
        }
    }
}

pub(crate) fn check_chain(gpu: &Gpu, linears: &Linears, rng: &mut StdRng, m: usize) {
    const WIDTH: usize = 1024;
    const LAYERS: usize = 24;
    let mut cases: Vec<Case> = (0..LAYERS)
        .map(|_| Case::random(rng, m, WIDTH, WIDTH, false))
        .collect();
    let layers: Vec<GpuLinear> = cases.iter().map(|case| case.layer(gpu)).collect();
    let x = common::upload(gpu, &cases[0].x);
    let outs: Vec<GpuSlab> = (0..LAYERS)
        .map(|_| common::poisoned::<bf16>(gpu, m * WIDTH))
        .collect();
    let out = |at: usize| outs[at].slice::<bf16>().range(0..m * WIDTH);
    let graph = gpu.capture(|| {
        (0..LAYERS).try_for_each(|at| {
            let x = if at == 0 { x.slice() } else { out(at - 1) };
            linears.forward(x.range(0..m * WIDTH), &layers[at], out(at))
        })
    });
    let graph = graph.expect("a capture");
    for _ in 0..20 {
        for slab in &outs {
            gpu.fill(slab.slice(), 0xff).expect("a fill");
        }
        graph.launch().expect("a launch");
    }
    for at in 0..LAYERS {
        let got: Vec<bf16> = common::download(gpu, &outs[at], m * WIDTH);
        common::assert_close(
            &cases[at].what(&format!("layer {at}")),
            &common::widen(&got),
            &cases[at].reference(),
            TOLERANCE,
        );
        // The next layer's input is this one's output as it was rounded; weights of 1 make it grow by about 18 a layer.
        if at + 1 < LAYERS {
            cases[at + 1].x = got;
        }
    }
}

#[test]
fn cpu_glu_is_the_twin_of_the_fused_one() {
    let mut rng = common::rng("linear, glu on the CPU");
    let case = Case::random(&mut rng, 3, 64, 64, false);
    let gate_up: Vec<f32> = case.reference().iter().map(|x| *x as f32).collect();
    for activation in ACTIVATIONS {
        let mut out = vec![f32::NAN; 3 * 32];
        glu(activation, &gate_up, 32, &mut out);
        common::assert_close("glu", &out, &case.reference_glu(activation), 1e-5);
    }
}
