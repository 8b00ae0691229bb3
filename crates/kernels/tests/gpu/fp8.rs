//! e4m3 values: how rows are quantised, and products of them against `f64`.

use std::sync::Arc;

use half::bf16;
use plimsoll_core::Component;
use plimsoll_device::cuda::{Gpu, GpuError};
use plimsoll_kernels::Activation;
use plimsoll_kernels::cuda::{
    FP8_BLOCK, Fp8Scaling, FusedKernels, GpuFp8Rows, GpuLinear, GpuMatrix, GpuNorm, GpuRows, GpuWeight,
    LinearOutput, LinearPath, LinearRoom, LinearScratch, LinearUse, Linears,
};
use rand::Rng;
use rand::rngs::StdRng;
use rayon::iter::{IntoParallelIterator, ParallelIterator};

use crate::common::{self, wide};
use crate::fused::{ACTIVATIONS, activate};
use crate::linear::{check_norm, limited, paths};

const SCALINGS: [Fp8Scaling; 2] = [Fp8Scaling::Rows, Fp8Scaling::Blocks];
const LARGEST: f64 = 448.0;

/// What a byte stands for ([arXiv:2209.05433](https://arxiv.org/abs/2209.05433)): 4 bits of exponent, 3 of mantissa, no
/// infinities.
fn decode(byte: u8) -> f64 {
    let sign = if byte & 0x80 == 0 { 1.0 } else { -1.0 };
    let (exponent, mantissa) = (i32::from(byte >> 3 & 15), f64::from(byte & 7));
    match (exponent, byte & 7) {
        (15, 7) => f64::NAN,
        (0, _) => sign * mantissa * 2f64.powi(-9),
        _ => sign * (1.0 + mantissa / 8.0) * 2f64.powi(exponent - 7),
    }
}

/// A random value, NaN excepted.
fn random_byte(rng: &mut StdRng) -> u8 {
    let byte: u8 = rng.random();
    if byte & 0x7f == 0x7f { 0 } else { byte }
}

/// Where the factor of element `(row, col)` of inputs lies.
fn input_scale(scaling: Fp8Scaling, rows: usize, row: usize, col: usize) -> usize {
    match scaling {
        Fp8Scaling::Rows => row,
        Fp8Scaling::Blocks => col / FP8_BLOCK * scaling.input_stride(rows) + row,
    }
}

/// Where the factor of element `(row, col)` of `[n, k]` weights lies.
pub(crate) fn weight_scale(scaling: Fp8Scaling, k: usize, row: usize, col: usize) -> usize {
    match scaling {
        Fp8Scaling::Rows => row,
        Fp8Scaling::Blocks => row / FP8_BLOCK * scaling.stride(k) + col / FP8_BLOCK,
    }
}

/// Rows that something quantised.
pub(crate) struct Quantised {
    scaling: Fp8Scaling,
    n: usize,
    values: Vec<u8>,
    scales: Vec<f32>,
}

impl Quantised {
    /// Runs `run` on poisoned memory for `rows` rows.
    pub(crate) fn by(
        gpu: &Gpu,
        scaling: Fp8Scaling,
        rows: usize,
        n: usize,
        run: impl FnOnce(GpuFp8Rows<'_>) -> Result<(), GpuError>,
    ) -> Self {
        let scales_len = scaling.input_scales(rows, n);
        // Guards behind both, which must stay as they are.
        let values = common::poisoned::<u8>(gpu, rows * n + 256);
        let scales = common::poisoned::<f32>(gpu, scales_len + 64);
        run(GpuFp8Rows {
            values: values.slice().range(0..rows * n),
            scales: scales.slice().range(0..scales_len),
            scaling,
        })
        .expect("a launch");
        let mut values: Vec<u8> = common::download(gpu, &values, rows * n + 256);
        let mut scales: Vec<f32> = common::download(gpu, &scales, scales_len + 64);
        assert!(values.split_off(rows * n).iter().all(|byte| *byte == 0xff));
        assert!(
            scales
                .split_off(scales_len)
                .iter()
                .all(|scale| scale.to_bits() == u32::MAX)
        );
        Self {
            scaling,
            n,
            values,
            scales,
        }
    }

    /// Of values and of scales.
    pub(crate) fn bits(&self) -> (&[u8], Vec<u32>) {
        let scales = self.scales.iter().map(|scale| scale.to_bits());
        (&self.values, scales.collect())
    }

    /// What the rows stand for.
    pub(crate) fn wide(&self) -> Vec<f64> {
        let (rows, values) = (self.values.len() / self.n, self.values.iter().enumerate());
        values
            .map(|(at, &value)| {
                let scale = self.scales[input_scale(self.scaling, rows, at / self.n, at % self.n)];
                decode(value) * f64::from(scale)
            })
            .collect()
    }

    /// Each value is that of `reference` to the nearest, if `slack` is what the reference itself may be off, relatively.
    fn check(&self, what: &str, reference: &[f64], slack: f64) {
        let rows = reference.len() / self.n;
        for row in 0..rows {
            let of_row = &reference[row * self.n..(row + 1) * self.n];
            let shared = match self.scaling {
                Fp8Scaling::Rows => self.n,
                Fp8Scaling::Blocks => FP8_BLOCK,
            };
            for (at, together) in of_row.chunks(shared).enumerate() {
                let largest = together.iter().fold(0.0, |most: f64, x| most.max(x.abs()));
                let scale = f64::from(self.scales[input_scale(self.scaling, rows, row, at * shared)]);
                assert!(
                    (scale - largest / LARGEST).abs() <= (slack + 1e-6) * largest / LARGEST,
                    "{what}: scale {scale} for {largest}"
                );
                for (i, &x) in together.iter().enumerate() {
                    let value = decode(self.values[row * self.n + at * shared + i]) * scale;
                    // Half a step of the last bit, of subnormal values half of the least.
                    let bound = (x.abs() / 16.0).max(scale * 2f64.powi(-10)) * 1.01 + 2.0 * slack * x.abs();
                    assert!(
                        (value - x).abs() <= bound,
                        "{what}: row {row}, {}: {value} for {x}",
                        at * shared + i
                    );
                }
            }
        }
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn rows_are_quantised() {
    let gpu = common::gpu();
    let mut rng = common::rng("fp8, rows");
    let fused = FusedKernels::load(&gpu).expect("kernels");
    for scaling in SCALINGS {
        for (rows, n) in [
            (1, 128),
            (3, 4096),
            (5, 8192),
            (2, 14336),
            (700, 1024),
            (2, 28672),
        ] {
            let mut x = common::random(&mut rng, rows * n);
            // Rows of other sizes, and one of nothing.
            for (row, x) in x.chunks_exact_mut(n).enumerate() {
                let factor = bf16::from_f32([1.0, 1e-3, 300.0, 0.0][row % 4]);
                x.iter_mut().for_each(|x| *x *= factor);
            }
            let device = common::upload(&gpu, &x);
            let found = Quantised::by(&gpu, scaling, rows, n, |out| {
                fused.quantise(device.slice(), n, out)
            });
            found.check(&format!("{scaling:?} [{rows}, {n}]"), &wide(&x), 0.0);
        }
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn norms_and_gates_are_quantised() {
    const EPS: f32 = 1e-5;
    let gpu = common::gpu();
    let mut rng = common::rng("fp8, norms and gates");
    let fused = FusedKernels::load(&gpu).expect("kernels");
    for scaling in SCALINGS {
        for (rows, n) in [(1, 128), (2, 4096), (3, 8192), (9, 12288), (1100, 2048)] {
            let what = format!("{scaling:?} [{rows}, {n}]");
            let [hidden, delta] = [(); 2].map(|()| common::random(&mut rng, rows * n));
            let [weight, delta_weight] =
                [(); 2].map(|()| -> Vec<f32> { common::widen(&common::random(&mut rng, n)) });
            let normed = |x: &[f64], weight: &[f32]| -> Vec<f64> {
                let rows = x.chunks_exact(n);
                rows.flat_map(|x| {
                    let square = x.iter().map(|x| x * x).sum::<f64>() / n as f64;
                    let scale = 1.0 / (square + f64::from(EPS)).sqrt();
                    let scaled = x.iter().zip(weight);
                    scaled
                        .map(|(x, weight)| x * scale * f64::from(*weight))
                        .collect::<Vec<_>>()
                })
                .collect()
            };
            let added = |delta: &[f64]| -> Vec<f64> {
                let sums = wide(&hidden).into_iter().zip(delta);
                sums.map(|(x, delta)| bf16::from_f64(x + delta).to_f64())
                    .collect()
            };
            let weights = common::upload(&gpu, &weight);
            let delta_weights = common::upload(&gpu, &delta_weight);
            let norm = GpuNorm {
                weight: weights.slice().range(0..n),
                eps: EPS,
            };
            let deltas = common::upload(&gpu, &delta);
            let (len, slack) = (rows * n, 1e-4);
            let inputs = || common::upload(&gpu, &hidden);
            let x = inputs();
            let found = Quantised::by(&gpu, scaling, rows, n, |out| {
                fused.rms_norm(x.slice().range(0..len), norm, out)
            });
            found.check(&format!("{what} norm"), &normed(&wide(&hidden), &weight), slack);
            let x = inputs();
            let found = Quantised::by(&gpu, scaling, rows, n, |out| {
                fused.add_rms_norm(x.slice().range(0..len), deltas.slice().range(0..len), norm, out)
            });
            found.check(
                &format!("{what} add and norm"),
                &normed(&added(&wide(&delta)), &weight),
                slack,
            );
            let x = inputs();
            let found = Quantised::by(&gpu, scaling, rows, n, |out| {
                let (hidden, delta) = (x.slice().range(0..len), deltas.slice().range(0..len));
                fused.sandwich_norm(hidden, delta, delta_weights.slice().range(0..n), None, norm, out)
            });
            let sums = added(&normed(&wide(&delta), &delta_weight));
            // A sum may be rounded to bf16 the other way where it is near the middle.
            found.check(
                &format!("{what} norm, add and norm"),
                &normed(&sums, &weight),
                8e-3,
            );
            for activation in ACTIVATIONS {
                let gate_up = common::random(&mut rng, 2 * len);
                let reference: Vec<f64> = gate_up
                    .chunks_exact(2 * n)
                    .flat_map(|row| {
                        let (gate, up) = row.split_at(n);
                        let pairs = gate.iter().zip(up);
                        pairs
                            .map(|(gate, up)| activate(activation, gate.to_f64()) * up.to_f64())
                            .collect::<Vec<f64>>()
                    })
                    .collect();
                let device = common::upload(&gpu, &gate_up);
                let found = Quantised::by(&gpu, scaling, rows, n, |out| {
                    fused.glu(activation, device.slice().range(0..2 * len), n, out)
                });
                found.check(&format!("{what} {activation:?}"), &reference, 2e-3);
            }
        }
    }
}

pub(crate) struct Case {
    scaling: Fp8Scaling,
    m: usize,
    n: usize,
    k: usize,
    x: Vec<bf16>,
    weight: Vec<u8>,
    weight_scales: Vec<f32>,
    bias: Option<Vec<bf16>>,
}

impl Case {
    pub(crate) fn random(rng: &mut StdRng, scaling: Fp8Scaling, [m, n, k]: [usize; 3], bias: bool) -> Self {
        let scales = (0..scaling.weight_scales(n, k)).map(|_| rng.random_range(0.001..0.01));
        Self {
            scaling,
            m,
            n,
            k,
            weight_scales: scales.collect(),
            x: common::random(rng, m * k),
            weight: (0..n * k).map(|_| random_byte(rng)).collect(),
            bias: bias.then(|| common::random(rng, n)),
        }
    }

    /// The product of these inputs.
    fn reference(&self, x: &[f64]) -> Vec<f64> {
        let &Self { scaling, n, k, .. } = self;
        let table: Vec<f64> = (0..=255).map(decode).collect();
        let weight = (0..n * k).into_par_iter().map(|at| {
            let scale = self.weight_scales[weight_scale(scaling, k, at / k, at % k)];
            table[usize::from(self.weight[at])] * f64::from(scale)
        });
        let weight: Vec<f64> = weight.collect();
        common::product(x, &weight, k, self.bias.as_deref())
    }

    pub(crate) fn rows(&self) -> usize {
        self.m
    }

    pub(crate) fn layer(&self, gpu: &Gpu) -> GpuLinear {
        let slab = |bytes: &[u8]| Arc::new(common::upload(gpu, bytes));
        let matrix = GpuMatrix::Fp8 {
            values: GpuWeight::new(&slab(&self.weight), 0..self.weight.len()),
            scales: GpuWeight::new(
                &slab(bytemuck::cast_slice(&self.weight_scales)),
                0..self.weight_scales.len(),
            ),
            scaling: self.scaling,
        };
        let bias = self
            .bias
            .as_ref()
            .map(|bias| GpuWeight::new(&slab(bytemuck::cast_slice(bias)), 0..self.n));
        GpuLinear::new(matrix, bias, self.n, self.k)
    }

    /// The inputs that are multiplied, and the outputs, of which [`LinearOutput::Glu`] has half as many.
    fn forward(&self, ways: &Ways<'_>, output: LinearOutput) -> (Vec<f64>, Vec<bf16>) {
        let &Self { m, n, k, scaling, .. } = self;
        let Ways { gpu, linears, .. } = ways;
        let (layer, x) = (self.layer(gpu), common::upload(gpu, &self.x));
        let len = match output {
            LinearOutput::Glu(_) => m * n / 2,
            LinearOutput::Bf16 | LinearOutput::F32 => m * n,
        };
        let run = |rows: GpuRows<'_>| {
            crate::linear::written(gpu, len, |out| {
                let out = out.slice().range(0..len);
                match output {
                    LinearOutput::Glu(_) => {
                        linears.forward_in(LinearRoom::default(), rows, &layer, output, out)
                    }
                    LinearOutput::Bf16 | LinearOutput::F32 => linears.forward(rows, &layer, out),
                }
            })
        };
        let Some(given) = linears.input_scaling(m, &layer, output).expect("cuBLASLt") else {
            return (wide(&self.x), run(x.slice().into()));
        };
        assert!(!ways.widens, "inputs are multiplied as they are");
        assert_eq!(given, scaling);
        let mut out = Vec::new();
        let quantised = Quantised::by(gpu, scaling, m, k, |rows| {
            ways.fused.quantise(x.slice(), k, rows)?;
            out = run(rows.into());
            Ok(())
        });
        (quantised.wide(), out)
    }

    pub(crate) fn check(&self, ways: &Ways<'_>, way: &str) {
        let &Self { scaling, m, n, k, .. } = self;
        let (inputs, out) = self.forward(ways, LinearOutput::Bf16);
        let what = format!(
            "{way} {scaling:?} [{m}, {k}] x [{n}, {k}] bias {}",
            self.bias.is_some()
        );
        // Tensor cores add e4m3 products up with some 14 bits.
        common::assert_close(&what, &common::widen(&out), &self.reference(&inputs), 6e-3);
        if self.bias.is_some() || !n.is_multiple_of(2) {
            return;
        }
        let layer = self.layer(ways.gpu);
        for activation in ACTIVATIONS {
            if !ways.linears.fuses_glu(m, &layer, activation) {
                continue;
            }
            let (inputs, out) = self.forward(ways, LinearOutput::Glu(activation));
            let reference = self.reference(&inputs);
            let reference: Vec<f64> = reference
                .chunks_exact(n)
                .flat_map(|row| {
                    let (gate, up) = row.split_at(n / 2);
                    let pairs = gate.iter().zip(up);
                    pairs
                        .map(|(gate, up)| activate(activation, *gate) * up)
                        .collect::<Vec<f64>>()
                })
                .collect();
            common::assert_close(
                &format!("{what} {activation:?}"),
                &common::widen(&out),
                &reference,
                8e-3,
            );
        }
        self.check_norm(ways, &what);
    }

    /// Same bits of the first row in every run, whatever the other rows hold.
    pub(crate) fn check_rows(&mut self, ways: &Ways<'_>, way: &str) {
        let first_row = |case: &Self| -> Vec<u16> {
            let (_, out) = case.forward(ways, LinearOutput::Bf16);
            out[..case.n].iter().map(|x| x.to_bits()).collect()
        };
        let first = first_row(self);
        assert_eq!(first, first_row(self), "{way}, {} rows: two runs", self.m);
        self.x[self.k..].fill(bf16::NAN);
        assert_eq!(
            first,
            first_row(self),
            "{way}, {} rows: NaN in other rows",
            self.m
        );
    }

    /// The norm ahead of the product, where it is a part of it.
    fn check_norm(&self, ways: &Ways<'_>, what: &str) {
        let Ways { gpu, linears, .. } = ways;
        let (layer, reference) = (self.layer(gpu), |x: &[f64]| self.reference(x));
        check_norm(gpu, linears, &layer, &self.x, self.k, reference, what);
    }
}

/// How products are computed.
pub(crate) struct Ways<'a> {
    pub(crate) gpu: &'a Gpu,
    pub(crate) linears: Linears,
    fused: FusedKernels,
    /// As on GPUs whose tensor cores do not know e4m3 values: weights always become bf16.
    widens: bool,
}

impl<'a> Ways<'a> {
    pub(crate) fn new(gpu: &'a Gpu, widens: bool) -> Self {
        let workspace = gpu
            .alloc(Component::Arena, Linears::WORKSPACE_BYTES)
            .expect("room");
        let linears = match widens {
            true => Linears::without_fp8_products(gpu, workspace),
            false => Linears::load(gpu, workspace),
        };
        Self {
            gpu,
            linears: limited(linears.expect("cuBLASLt and kernels")),
            fused: FusedKernels::load(gpu).expect("kernels"),
            widens,
        }
    }
}

fn name(path: Option<LinearPath>) -> String {
    path.map_or("default".to_owned(), |path| format!("{path:?}"))
}

#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn products_match_the_reference() {
    let gpu = common::gpu();
    let mut rng = common::rng("fp8, products");
    for widens in [false, true] {
        let mut ways = Ways::new(&gpu, widens);
        for path in paths() {
            ways.linears.fix(path);
            let way = format!("{} widens {widens}", name(path));
            for scaling in SCALINGS {
                for (n, k) in [
                    (16, 128),
                    (96, 256),
                    (144, 640),
                    // Gate and up that begin within a block of weights.
                    (192, 256),
                    (320, 640),
                    (272, 1024),
                    (1024, 4096),
                    (160, 14336),
                ] {
                    let m = [1, 2, 3, 7, 8, 9, 16, 17, 31, 32, 33, 70][rng.random_range(0..12)];
                    let bias = rng.random();
                    Case::random(&mut rng, scaling, [m, n, k], bias).check(&ways, &way);
                    // The norm is a part of it.
                    let m = rng.random_range(1..=4);
                    Case::random(&mut rng, scaling, [m, n, k], false).check(&ways, &way);
                }
            }
        }
        ways.linears.fix(None);
        Case::random(&mut rng, Fp8Scaling::Rows, [11, 20_000, 128], false).check(&ways, "many outputs");
        Case::random(&mut rng, Fp8Scaling::Blocks, [3, 20_000, 128], false).check(&ways, "many outputs");
    }
    // Rows that are not whole lines are cuBLASLt's.
    let ways = Ways::new(&gpu, false);
    Case::random(&mut rng, Fp8Scaling::Rows, [5, 48, 192], true).check(&ways, "not whole lines");
}

/// Same bits in every run, whatever the other rows hold.
#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn rows_are_independent() {
    const SHAPE: [usize; 2] = [208, 1024];
    let gpu = common::gpu();
    let mut rng = common::rng("fp8, rows of products");
    for widens in [false, true] {
        let mut ways = Ways::new(&gpu, widens);
        for path in paths() {
            ways.linears.fix(path);
            let way = format!("{} widens {widens}", name(path));
            for (scaling, m) in SCALINGS
                .into_iter()
                .flat_map(|scaling| [2, 4, 8, 32, 40].map(|m| (scaling, m)))
            {
                let [n, k] = SHAPE;
                Case::random(&mut rng, scaling, [m, n, k], true).check_rows(&ways, &way);
            }
        }
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn measured_choices() {
    let gpu = common::gpu();
    let mut rng = common::rng("fp8, measured");
    let rows = [1, 8, 32, 64, 256];
    let (n, k) = (1040, 512);
    for (scaling, widens) in SCALINGS
        .into_iter()
        .flat_map(|scaling| [(scaling, false), (scaling, true)])
    {
        let mut ways = Ways::new(&gpu, widens);
        let x = common::poisoned::<bf16>(&gpu, 256 * k);
        let out = common::poisoned::<f32>(&gpu, 256 * n);
        let layer = Case::random(&mut rng, scaling, [1, n, k], false).layer(&gpu);
        let layers = [&layer];
        let outputs = [LinearOutput::Bf16, LinearOutput::Glu(Activation::Silu)];
        let uses = outputs.map(|output| LinearUse {
            layers: &layers,
            output,
            rows: &rows,
        });
        let scratch = LinearScratch {
            x: x.slice(),
            out: out.slice(),
            weights: x.slice().range(0..0),
        };
        ways.linears.measure(&uses, scratch).expect("measurements");
        for m in [1, 3, 5, 8, 30, 33, 100, 256, 300] {
            Case::random(&mut rng, scaling, [m, n, k], false).check(&ways, "measured");
        }
    }
}

#[test]
fn bytes_stand_for_what_the_format_says() {
    let largest = (0..=255).map(decode).filter(|x| !x.is_nan()).fold(0.0, f64::max);
    assert_eq!(largest, LARGEST);
    assert_eq!(
        [0x38, 0xb9, 0x01, 0x08].map(decode),
        [1.0, -1.125, 2f64.powi(-9), 2f64.powi(-6)]
    );
    assert!(decode(0x7f).is_nan() && decode(0xff).is_nan());
}
