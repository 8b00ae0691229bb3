//! Products of weights in GGUF's block types against `x Wᵀ + b` in `f64`, and what they need besides.

use std::sync::Arc;

use half::{bf16, f16};
use plimsoll_device::cuda::Gpu;
use plimsoll_kernels::cuda::{
    GgufKernels, GpuLinear, GpuMatrix, GpuTokens, GpuVocabulary, GpuWeight, LinearOutput, LinearPath,
    LinearRoom, LinearScratch, LinearUse, Linears, dequantised_room,
};
use plimsoll_kernels::{Activation, GgufFormat};
use rand::Rng;
use rand::rngs::StdRng;

use crate::common::{self, wide};
use crate::fused::{ACTIVATIONS, activate};
use crate::linear::{check_norm, linears, paths, written};

/// Sums are rounded to bf16 once.
const TOLERANCE: f64 = 4e-3;

/// Rows as a file has them, of scales of either sign.
fn stored_rows(rng: &mut StdRng, format: GgufFormat, n: usize, k: usize) -> Vec<u8> {
    let dtype = format.dtype();
    let mut rows: Vec<u8> = (0..n * dtype.row_bytes(k).unwrap())
        .map(|_| rng.random())
        .collect();
    let floats: &[usize] = match format {
        GgufFormat::Q4_0 | GgufFormat::Q5_0 | GgufFormat::Q8_0 => &[0],
        GgufFormat::Q6K => &[208],
        _ => &[0, 2],
    };
    for block in rows.chunks_exact_mut(dtype.block_bytes()) {
        for &at in floats {
            let value = f16::from_f32(rng.random_range(-0.02..0.02));
            block[at..at + 2].copy_from_slice(&value.to_le_bytes());
        }
    }
    rows
}

/// Some outputs in one format, or in `bf16`.
#[derive(Clone)]
struct Part {
    format: Option<GgufFormat>,
    n: usize,
    /// As the kernels take them.
    packed: Vec<u8>,
    /// `[n, k]`.
    weight: Vec<f32>,
}

impl Part {
    fn random(rng: &mut StdRng, format: Option<GgufFormat>, [n, k]: [usize; 2]) -> Self {
        let Some(of) = format else {
            let values = common::random(rng, n * k);
            return Self {
                format,
                n,
                weight: common::widen(&values),
                packed: bytemuck::cast_slice(&values).to_vec(),
            };
        };
        let stored = stored_rows(rng, of, n, k);
        let mut packed = vec![0; n * of.pitch(k)];
        let mut weight = vec![0.0; n * k];
        let rows = stored.chunks_exact(stored.len() / n);
        let rows = rows.zip(packed.chunks_exact_mut(of.pitch(k)));
        for ((stored, packed), weight) in rows.zip(weight.chunks_exact_mut(k)) {
            of.pack_row(stored, packed);
            of.unpack_row(packed, weight);
        }
        Self {
            format,
            n,
            packed,
            weight,
        }
    }

    fn linear(&self, gpu: &Gpu, bias: Option<&[bf16]>, k: usize) -> GpuLinear {
        let slab = Arc::new(common::upload(gpu, &self.packed));
        let matrix = match self.format {
            Some(format) => GpuMatrix::Gguf {
                rows: GpuWeight::new(&slab, 0..self.packed.len()),
                format,
            },
            None => GpuMatrix::Bf16(GpuWeight::new(&slab, 0..self.n * k)),
        };
        let bias = bias.map(|bias| GpuWeight::new(&Arc::new(common::upload(gpu, bias)), 0..self.n));
        GpuLinear::new(matrix, bias, self.n, k)
    }
}

#[derive(Clone)]
struct Case {
    m: usize,
    k: usize,
    x: Vec<bf16>,
    parts: Vec<Part>,
    bias: Option<Vec<bf16>>,
}

impl Case {
    fn random(rng: &mut StdRng, format: GgufFormat, [m, n, k]: [usize; 3], bias: bool) -> Self {
        let part = Part::random(rng, Some(format), [n, k]);
        Self::of(rng, m, k, vec![part], bias)
    }

    fn of(rng: &mut StdRng, m: usize, k: usize, parts: Vec<Part>, bias: bool) -> Self {
        let n = parts.iter().map(|part| part.n).sum();
        Self {
            m,
            k,
            x: common::random(rng, m * k),
            parts,
            bias: bias.then(|| common::random(rng, n)),
        }
    }

    fn n(&self) -> usize {
        self.parts.iter().map(|part| part.n).sum()
    }

    /// The weights, as own kernels multiply them.
    fn weight(&self) -> Vec<f64> {
        let weights = self.parts.iter().flat_map(|part| &part.weight);
        weights.map(|w| f64::from(*w)).collect()
    }

    /// The weights that make outputs of this kind: cuBLASLt gets them rounded to bf16.
    fn weight_of(&self, gpu: &Gpu, linears: &Linears, output: LinearOutput) -> Vec<f64> {
        let parts = self.parts.iter().flat_map(|part| {
            let is_own = linears.is_own(self.m, &part.linear(gpu, None, self.k), output);
            let of_product = move |w: &f32| match is_own {
                true => f64::from(*w),
                false => bf16::from_f32(*w).to_f64(),
            };
            part.weight.iter().map(of_product)
        });
        parts.collect()
    }

    /// The product of these inputs.
    fn reference(&self, x: &[f64], weight: &[f64]) -> Vec<f64> {
        common::product(x, weight, self.k, self.bias.as_deref())
    }

    fn layer(&self, gpu: &Gpu) -> GpuLinear {
        let mut first = 0;
        let parts = self.parts.iter().map(|part| {
            let bias = self.bias.as_ref().map(|bias| &bias[first..first + part.n]);
            first += part.n;
            part.linear(gpu, bias, self.k)
        });
        let mut parts: Vec<GpuLinear> = parts.collect();
        match parts.len() {
            1 => parts.remove(0),
            _ => GpuLinear::new(GpuMatrix::Parts(parts), None, first, self.k),
        }
    }

    fn forward(&self, gpu: &Gpu, linears: &Linears, output: LinearOutput) -> Vec<bf16> {
        let (m, n) = (self.m, self.n());
        let (layer, x) = (self.layer(gpu), common::upload(gpu, &self.x));
        let weights = common::poisoned::<bf16>(gpu, dequantised_room(n, self.k));
        let room = LinearRoom {
            weights: Some(weights.slice()),
            inputs: None,
        };
        let len = m * n / if output == LinearOutput::Bf16 { 1 } else { 2 };
        written(gpu, len, |out| {
            linears.forward_in(room, x.slice(), &layer, output, out.slice().range(0..len))
        })
    }

    fn what(&self, way: &str) -> String {
        let formats: Vec<_> = self.parts.iter().map(|part| part.format).collect();
        let (m, n, k) = (self.m, self.n(), self.k);
        format!(
            "{way} {formats:?} [{m}, {k}] x [{n}, {k}] bias {}",
            self.bias.is_some()
        )
    }

    fn check(&self, gpu: &Gpu, linears: &Linears, way: &str) {
        let (m, n) = (self.m, self.n());
        let what = self.what(way);
        let x = wide(&self.x);
        let out = self.forward(gpu, linears, LinearOutput::Bf16);
        let weight = self.weight_of(gpu, linears, LinearOutput::Bf16);
        common::assert_close(
            &what,
            &common::widen(&out),
            &self.reference(&x, &weight),
            TOLERANCE,
        );
        if self.bias.is_some() {
            return;
        }
        self.check_logits(gpu, linears, &what);
        let reference = self.reference(&x, &self.weight());
        let layer = self.layer(gpu);
        for activation in ACTIVATIONS {
            if !n.is_multiple_of(2) || !linears.fuses_glu(m, &layer, activation) {
                continue;
            }
            let out = self.forward(gpu, linears, LinearOutput::Glu(activation));
            let gated = reference.chunks_exact(n).flat_map(|row| {
                let (gate, up) = row.split_at(n / 2);
                let pairs = gate.iter().zip(up);
                pairs.map(|(gate, up)| activate(activation, *gate) * up)
            });
            let gated: Vec<f64> = gated.collect();
            let what = format!("{what} {activation:?}");
            common::assert_close(&what, &common::widen(&out), &gated, TOLERANCE);
        }
        self.check_norm(gpu, linears, &what);
    }

    /// As a head.
    fn check_logits(&self, gpu: &Gpu, linears: &Linears, what: &str) {
        let (layer, x) = (self.layer(gpu), common::upload(gpu, &self.x));
        let weights = common::poisoned::<bf16>(gpu, dequantised_room(self.n(), self.k));
        let room = LinearRoom {
            weights: Some(weights.slice()),
            inputs: None,
        };
        let len = self.m * self.n();
        let out: Vec<f32> = written(gpu, len, |out| {
            linears.forward_f32_in(room, x.slice(), &layer, out.slice().range(0..len))
        });
        let weight = self.weight_of(gpu, linears, LinearOutput::F32);
        let reference = self.reference(&wide(&self.x), &weight);
        common::assert_close(&format!("{what} f32"), &out, &reference, TOLERANCE);
    }

    /// The norm ahead of the product, where it is a part of it.
    fn check_norm(&self, gpu: &Gpu, linears: &Linears, what: &str) {
        let (layer, reference) = (self.layer(gpu), |x: &[f64]| self.reference(x, &self.weight()));
        check_norm(gpu, linears, &layer, &self.x, self.k, reference, what);
    }
}

fn inputs_of(format: GgufFormat, blocks: usize) -> usize {
    blocks * format.dtype().block_len()
}

#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn products_match_the_reference() {
    let gpu = common::gpu();
    let mut rng = common::rng("gguf, products");
    let mut linears = linears(&gpu);
    for path in paths() {
        linears.fix(path);
        let way = path.map_or("default".to_owned(), |path| format!("{path:?}"));
        for format in GgufFormat::ALL {
            for (n, k) in [
                (16, 256),
                (96, 512),
                (130, 768),
                (257, 1024),
                (160, 4096),
                (48, 14336),
            ] {
                let m = [1, 2, 3, 7, 8, 9, 16, 33, 70][rng.random_range(0..9)];
                let bias = rng.random();
                Case::random(&mut rng, format, [m, n, k], bias).check(&gpu, &linears, &way);
                // The norm is a part of it.
                let m = rng.random_range(1..=4);
                Case::random(&mut rng, format, [m, n, k], false).check(&gpu, &linears, &way);
            }
            // The last window is filled up, but for types of blocks as long as windows.
            for blocks in [1, 9, 18, 31] {
                let (m, k) = (rng.random_range(1..40), inputs_of(format, blocks));
                Case::random(&mut rng, format, [m, 48, k], true).check(&gpu, &linears, &way);
            }
        }
    }
}

/// q, k and v of different types, as files of mixed ones have them, are products that leave no column out.
#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn parts_of_different_types_are_one_layer() {
    let gpu = common::gpu();
    let mut rng = common::rng("gguf, parts");
    let mut linears = linears(&gpu);
    for path in [None, Some(LinearPath::CublasLt)] {
        linears.fix(path);
        for m in [1, 4, 8, 9, 40] {
            let formats = [
                vec![Some(GgufFormat::Q4K), Some(GgufFormat::Q6K)],
                vec![Some(GgufFormat::Q5K), None, Some(GgufFormat::Q8_0)],
            ];
            for formats in formats {
                let k = 512;
                let parts = formats.iter().zip([160, 72, 64]);
                let parts = parts
                    .map(|(format, n)| Part::random(&mut rng, *format, [n, k]))
                    .collect();
                let bias = rng.random();
                let case = Case::of(&mut rng, m, k, parts, bias);
                assert!(!linears.fuses_glu(m, &case.layer(&gpu), Activation::Silu));
                case.check(&gpu, &linears, &format!("{path:?}"));
            }
        }
    }
}

/// A matrix whose weights do not all become `bf16` at once: the same as if they did, to the bit on the first ones.
#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn large_matrices_are_dequantised_some_outputs_at_a_time() {
    const SHAPE: [usize; 2] = [20_040, 4096];
    let gpu = common::gpu();
    let mut linears = linears(&gpu);
    linears.fix(Some(LinearPath::CublasLt));
    let kernels = GgufKernels::load(&gpu).expect("kernels");
    let mut rng = common::rng("gguf, slices");
    for format in [GgufFormat::Q4K, GgufFormat::Q8_0] {
        let ([n, k], m) = (SHAPE, 24);
        assert!(dequantised_room(n, k) < n * k);
        let len = n * format.pitch(k);
        let slab = Arc::new(common::poisoned::<u8>(&gpu, len));
        let rows = slab.slice::<u8>().range(0..len);
        kernels.fill(rows, k, format, 5, 0.05).expect("a launch");
        let packed: Vec<u8> = common::download(&gpu, &slab, len);
        let x = common::random(&mut rng, m * k);
        let input = common::upload(&gpu, &x);
        let matrix = GpuMatrix::Gguf {
            rows: GpuWeight::new(&slab, 0..len),
            format,
        };
        let layer = GpuLinear::new(matrix, None, n, k);
        let weights = common::poisoned::<bf16>(&gpu, dequantised_room(n, k));
        let room = LinearRoom {
            weights: Some(weights.slice()),
            inputs: None,
        };
        let out: Vec<f32> = written(&gpu, m * n, |out| {
            linears.forward_f32_in(room, input.slice(), &layer, out.slice().range(0..m * n))
        });
        // Some of each slice, and the last.
        let picked: Vec<usize> = (0..n).step_by(499).chain([n - 1]).collect();
        let (mut found, mut want) = (Vec::new(), Vec::new());
        for &output in &picked {
            let mut weight = vec![0.0; k];
            format.unpack_row(
                &packed[output * format.pitch(k)..][..format.pitch(k)],
                &mut weight,
            );
            for row in 0..m {
                let x = x[row * k..][..k].iter().map(|x| x.to_f64());
                want.push(x.zip(&weight).map(|(x, w)| x * f64::from(*w)).sum());
                found.push(out[row * n + output]);
            }
        }
        common::assert_close(&format!("{format:?} in slices"), &found, &want, TOLERANCE);
    }
}

/// Same bits in every run, whatever the other rows hold.
#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn rows_are_independent() {
    const SHAPE: [usize; 2] = [208, 1024];
    let gpu = common::gpu();
    let mut rng = common::rng("gguf, rows of products");
    let mut linears = linears(&gpu);
    for path in paths() {
        linears.fix(path);
        for (format, m) in GgufFormat::ALL
            .into_iter()
            .flat_map(|format| [2, 8, 16].map(|m| (format, m)))
        {
            let [n, k] = SHAPE;
            let mut case = Case::random(&mut rng, format, [m, n, k], true);
            let what = case.what(&format!("{path:?}"));
            let first_row = |case: &Case| -> Vec<u16> {
                let out = case.forward(&gpu, &linears, LinearOutput::Bf16);
                out[..n].iter().map(|x| x.to_bits()).collect()
            };
            let first = first_row(&case);
            assert_eq!(first, first_row(&case), "{what}: two runs");
            case.x[k..].fill(bf16::NAN);
            assert_eq!(first, first_row(&case), "{what}: NaN in other rows");
        }
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn measured_choices() {
    let gpu = common::gpu();
    let mut rng = common::rng("gguf, measured");
    let rows = [1, 8, 16, 64, 256];
    let (n, k) = (1040, 512);
    for format in GgufFormat::ALL {
        let mut linears = linears(&gpu);
        let x = common::poisoned::<bf16>(&gpu, 256 * k);
        let out = common::poisoned::<f32>(&gpu, 256 * n);
        let weights = common::poisoned::<bf16>(&gpu, dequantised_room(n, k));
        let layer = Case::random(&mut rng, format, [1, n, k], false).layer(&gpu);
        let layers = [&layer];
        let outputs = [
            LinearOutput::Bf16,
            LinearOutput::F32,
            LinearOutput::Glu(Activation::Silu),
        ];
        let uses = outputs.map(|output| LinearUse {
            layers: &layers,
            output,
            rows: &rows,
        });
        let scratch = LinearScratch {
            x: x.slice(),
            out: out.slice(),
            weights: weights.slice(),
        };
        linears.measure(&uses, scratch).expect("measurements");
        for m in [1, 3, 8, 20, 64, 100] {
            Case::random(&mut rng, format, [m, n, k], false).check(&gpu, &linears, "measured");
        }
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn rows_of_tables_are_dequantised() {
    let gpu = common::gpu();
    let mut rng = common::rng("gguf, tables");
    let kernels = GgufKernels::load(&gpu).expect("kernels");
    for format in GgufFormat::ALL {
        let (vocab, k) = (37, inputs_of(format, 9));
        let part = Part::random(&mut rng, Some(format), [vocab, k]);
        let table = part.linear(&gpu, None, k);
        // Those sampled before, and those of padding.
        let tokens = [3, 36, -2, 99, 0];
        let (given, sampled) = (common::upload(&gpu, &tokens), common::upload(&gpu, &[7, 9]));
        let resolved = common::poisoned::<i32>(&gpu, tokens.len());
        let len = tokens.len() * k;
        let out: Vec<bf16> = written(&gpu, len, |out| {
            let tokens = GpuTokens {
                tokens: given.slice::<i32>().range(0..tokens.len()),
                prev_sampled: sampled.slice::<i32>().range(0..2),
                resolved: resolved.slice::<i32>().range(0..tokens.len()),
            };
            let whole = GpuVocabulary::whole(vocab);
            kernels.embedding(&table, whole, tokens, 1.5, out.slice().range(0..len))
        });
        let found: Vec<i32> = common::download(&gpu, &resolved, tokens.len());
        assert_eq!(found, [3, 36, 9, 36, 0], "{format:?}");
        for (row, token) in out.chunks_exact(k).zip(found) {
            let want = &part.weight[token as usize * k..][..k];
            let want = want.iter().map(|x| bf16::from_f32(x * 1.5));
            assert!(want.eq(row.iter().copied()), "{format:?}, token {token}");
        }
        // The same table as the last tokens of a vocabulary, whose other rows are zeros.
        let first = 30;
        let shifted = common::upload(&gpu, &[3 + first, 36 + first, 5, 99, 0]);
        let part: Vec<bf16> = written(&gpu, len, |out_| {
            let tokens = GpuTokens {
                tokens: shifted.slice::<i32>().range(0..5),
                prev_sampled: sampled.slice::<i32>().range(0..2),
                resolved: resolved.slice::<i32>().range(0..5),
            };
            let vocabulary = GpuVocabulary {
                all: vocab + first as usize,
                first: first as usize,
                count: vocab,
            };
            kernels.embedding(&table, vocabulary, tokens, 1.5, out_.slice().range(0..len))
        });
        let found: Vec<i32> = common::download(&gpu, &resolved, 5);
        assert_eq!(found, [33, 66, 5, 66, 0], "{format:?}");
        for at in [0, 1, 3] {
            assert!(part[at * k..][..k] == out[at * k..][..k], "{format:?}, row {at}");
        }
        for at in [2, 4] {
            let row = &part[at * k..][..k];
            assert!(row.iter().all(|x| x.to_f32() == 0.0), "{format:?}, row {at}");
        }
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn made_up_rows_keep_the_deviation() {
    let gpu = common::gpu();
    let kernels = GgufKernels::load(&gpu).expect("kernels");
    for format in GgufFormat::ALL {
        let (n, k) = (64, 4096);
        let len = n * format.pitch(k);
        let packed: Vec<u8> = written(&gpu, len, |out| {
            kernels.fill(out.slice().range(0..len), k, format, 3, 0.02)
        });
        let mut weight = vec![0.0; n * k];
        let rows = packed.chunks_exact(format.pitch(k));
        rows.zip(weight.chunks_exact_mut(k))
            .for_each(|(packed, weight)| format.unpack_row(packed, weight));
        let square: f64 = weight.iter().map(|w| f64::from(*w).powi(2)).sum();
        let deviation = (square / weight.len() as f64).sqrt();
        assert!((deviation / 0.02 - 1.0).abs() < 0.02, "{format:?}: {deviation}");
    }
}
