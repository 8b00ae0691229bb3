use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{Device, Tensor};
use half::{bf16, f16};
use rand::Rng;
use rand::rngs::StdRng;

use super::*;
use crate::Embedding;
use crate::panel::PANEL;
use crate::parallel::threads;
use crate::testing::{arena, assert_close, assert_same_bits, budget, normal, rng, seeds};

const QUANTIZED: [WeightType; 12] = [
    WeightType::Q4_0,
    WeightType::Q4_1,
    WeightType::Q5_0,
    WeightType::Q5_1,
    WeightType::Q8_0,
    WeightType::Q8_1,
    WeightType::Q2K,
    WeightType::Q3K,
    WeightType::Q4K,
    WeightType::Q5K,
    WeightType::Q6K,
    WeightType::Q8K,
];
const FLOATS: [WeightType; 3] = [WeightType::F32, WeightType::F16, WeightType::Bf16];

/// The type by candle's name.
fn oracle_type(dtype: WeightType) -> GgmlDType {
    match dtype {
        WeightType::F8E4M3 | WeightType::U8 | WeightType::I32 | WeightType::I64 => {
            unreachable!("GGUF files have no such type")
        }
        WeightType::Mxfp4 => unreachable!("candle has no such type"),
        WeightType::F32 => GgmlDType::F32,
        WeightType::F16 => GgmlDType::F16,
        WeightType::Bf16 => GgmlDType::BF16,
        WeightType::Q4_0 => GgmlDType::Q4_0,
        WeightType::Q4_1 => GgmlDType::Q4_1,
        WeightType::Q5_0 => GgmlDType::Q5_0,
        WeightType::Q5_1 => GgmlDType::Q5_1,
        WeightType::Q8_0 => GgmlDType::Q8_0,
        WeightType::Q8_1 => GgmlDType::Q8_1,
        WeightType::Q2K => GgmlDType::Q2K,
        WeightType::Q3K => GgmlDType::Q3K,
        WeightType::Q4K => GgmlDType::Q4K,
        WeightType::Q5K => GgmlDType::Q5K,
        WeightType::Q6K => GgmlDType::Q6K,
        WeightType::Q8K => GgmlDType::Q8K,
    }
}

#[test]
fn blocks_are_as_large_as_ggmls() {
    for dtype in QUANTIZED.into_iter().chain(FLOATS) {
        let oracle = oracle_type(dtype);
        let found = (dtype.block_len(), dtype.block_bytes());
        assert_eq!(found, (oracle.block_size(), oracle.type_size()), "{dtype:?}");
    }
}

/// A matrix as a checkpoint stores it, and what it means.
struct Weights {
    dtype: WeightType,
    rows: usize,
    cols: usize,
    data: Vec<u8>,
    values: Vec<f64>,
}

impl Weights {
    /// Random values through candle's quantisation; their meaning is candle's dequantisation.
    fn random(dtype: WeightType, rows: usize, cols: usize, seed: u64) -> Self {
        let mut rng = rng(seed);
        // An offset, so that minima and offsets matter.
        let values: Vec<f32> = normal(&mut rng, rows * cols).iter().map(|v| v + 0.3).collect();
        let (data, values): (Vec<u8>, Vec<f32>) = match dtype {
            WeightType::F32 => (values.iter().flat_map(|v| v.to_le_bytes()).collect(), values),
            WeightType::F16 => {
                let values: Vec<f16> = values.into_iter().map(f16::from_f32).collect();
                (
                    values.iter().flat_map(|v| v.to_le_bytes()).collect(),
                    values.iter().map(|v| v.to_f32()).collect(),
                )
            }
            WeightType::Bf16 => {
                let values: Vec<bf16> = values.into_iter().map(bf16::from_f32).collect();
                (
                    values.iter().flat_map(|v| v.to_le_bytes()).collect(),
                    values.iter().map(|v| v.to_f32()).collect(),
                )
            }
            _ => {
                let tensor = Tensor::from_vec(values, (rows, cols), &Device::Cpu).unwrap();
                let tensor = QTensor::quantize(&tensor, oracle_type(dtype)).unwrap();
                let meaning = tensor.dequantize(&Device::Cpu).unwrap().flatten_all().unwrap();
                (tensor.data().unwrap().into_owned(), meaning.to_vec1().unwrap())
            }
        };
        Self {
            dtype,
            rows,
            cols,
            data,
            values: values.into_iter().map(f64::from).collect(),
        }
    }

    fn matrix(&self) -> Matrix<'_> {
        Matrix::new(self.dtype, self.rows, self.cols, &self.data).unwrap()
    }

    /// Fails unless `got` is `x` times the weights within `tolerance` of the product of their norms.
    #[track_caller]
    fn assert_product(&self, got: &[f32], x: &[f64], tolerance: f64, context: &str) {
        let norm = |v: &[f64]| v.iter().map(|v| v * v).sum::<f64>().sqrt();
        let bounds = x.chunks_exact(self.cols).flat_map(|x| {
            self.values
                .chunks_exact(self.cols)
                .map(move |w| tolerance * norm(x) * norm(w))
        });
        for (i, ((got, want), bound)) in got.iter().zip(self.multiply(x)).zip(bounds).enumerate() {
            let error = (f64::from(*got) - want).abs();
            assert!(
                error <= bound,
                "{context}: output {i} is {got}, not {want}: error {error:e} > {bound:e}"
            );
        }
    }

    /// Naive product in f64.
    fn multiply(&self, x: &[f64]) -> Vec<f64> {
        let dot = |x: &[f64], w: &[f64]| x.iter().zip(w).map(|(x, w)| x * w).sum();
        x.chunks_exact(self.cols)
            .flat_map(|x| self.values.chunks_exact(self.cols).map(move |w| dot(x, w)))
            .collect()
    }
}

/// Values that activation codes represent exactly: multiples of a power of two with the largest code in each group.
fn representable(rng: &mut StdRng, len: usize) -> Vec<f32> {
    let mut x: Vec<f32> = (0..len)
        .map(|_| rng.random_range(-127i32..=127) as f32 / 64.0)
        .collect();
    x.iter_mut().step_by(32).for_each(|x| *x = 127.0 / 64.0);
    x
}

fn widen(x: &[f32]) -> Vec<f64> {
    x.iter().map(|&x| f64::from(x)).collect()
}

fn forward(linear: &Linear, level: Level, x: &[f32]) -> Vec<f32> {
    let mut out = vec![f32::NAN; x.len() / linear.inputs() * linear.outputs()];
    let room = x.len() / linear.inputs();
    linear.forward_at(level, room, x, &mut out, &arena()).unwrap();
    out
}

#[test]
fn no_rows_are_no_work() {
    for dtype in [WeightType::Q4K, WeightType::Q4_1, WeightType::Bf16] {
        let weights = Weights::random(dtype, 16, 256, 1);
        let linear = Linear::new(&[weights.matrix()], None, &budget()).unwrap();
        for level in Level::available() {
            assert!(forward(&linear, level, &[]).is_empty(), "{dtype:?}");
        }
    }
}

#[test]
fn every_type_multiplies_like_its_dequantised_self() {
    for (dtype, seed) in QUANTIZED
        .into_iter()
        .chain(FLOATS)
        .flat_map(|d| seeds(1).map(move |s| (d, s)))
    {
        let float = FLOATS.contains(&dtype);
        for (rows, cols, m) in [
            (1, 256, 1),
            (16, 512, 3),
            (37, 768, 8),
            (50, 256, 21),
            (50, 768, 51),
        ] {
            let context = format!("{dtype:?} {rows}x{cols} m {m} seed {seed}");
            let weights = Weights::random(dtype, rows, cols, seed);
            let linear = Linear::new(&[weights.matrix()], None, &budget()).unwrap();
            let mut values = rng(seed ^ 1);
            let check = |x: Vec<f32>, tolerance: f64| {
                let got = forward(&linear, Level::detect(), &x);
                assert_eq!(got.len(), m * rows);
                weights.assert_product(&got, &widen(&x), tolerance, &context);
            };
            check(representable(&mut values, m * cols), 1e-5);
            // Rounding to 15 bits costs up to 1/32512 of the largest of each group.
            check(normal(&mut values, m * cols), if float { 1e-5 } else { 1e-4 });
        }
    }
}

#[test]
fn float_weights_take_any_width() {
    for (dtype, seed) in FLOATS.into_iter().flat_map(|d| seeds(2).map(move |s| (d, s))) {
        let mut sizes = rng(seed);
        let (rows, cols) = (sizes.random_range(1..70), sizes.random_range(1..90));
        let weights = Weights::random(dtype, rows, cols, seed);
        let linear = Linear::new(&[weights.matrix()], None, &budget()).unwrap();
        let x = normal(&mut sizes, 5 * cols);
        let got = forward(&linear, Level::detect(), &x);
        assert_eq!(got.len(), 5 * rows);
        weights.assert_product(
            &got,
            &widen(&x),
            1e-5,
            &format!("{dtype:?} {rows}x{cols} seed {seed}"),
        );
    }
}

#[test]
fn instruction_sets_and_batches_agree_to_the_bit() {
    for dtype in QUANTIZED.into_iter().chain(FLOATS) {
        // More panels (of which a part of the work has two) and rows than are taken at a time, tiles that are not whole, and where blocks allow
        // it one step more than are unpacked at a time.
        let rows = (4 * threads() + 2) * PANEL + 11;
        let cols = 256 + if dtype.block_len() > 32 { 0 } else { 32 };
        let m = 151;
        let weights = Weights::random(dtype, rows, cols, 5);
        let linear = Linear::new(&[weights.matrix()], None, &budget()).unwrap();
        let x = normal(&mut rng(6), m * cols);
        let want = forward(&linear, Level::Scalar, &x);
        for level in Level::available() {
            for m in [15, 53, m] {
                assert_same_bits(
                    &forward(&linear, level, &x[..m * cols]),
                    &want[..m * rows],
                    &format!("{dtype:?} {level:?} m {m}"),
                );
            }
            for row in 0..m {
                let alone = forward(&linear, level, &x[row * cols..(row + 1) * cols]);
                assert_same_bits(
                    &alone,
                    &want[row * rows..(row + 1) * rows],
                    &format!("{dtype:?} {level:?} {row}"),
                );
            }
        }
    }
}

#[test]
fn parts_of_different_types_stack_and_take_a_bias() {
    let parts = [
        Weights::random(WeightType::Q4K, 20, 256, 1),
        Weights::random(WeightType::Q6K, 7, 256, 2),
        Weights::random(WeightType::F16, 33, 256, 3),
    ];
    let matrices: Vec<_> = parts.iter().map(Weights::matrix).collect();
    let bias = normal(&mut rng(4), 60);
    let linear = Linear::new(&matrices, Some(&bias), &budget()).unwrap();
    let x = normal(&mut rng(5), 2 * 256);
    let got = forward(&linear, Level::detect(), &x);
    let mut first = 0;
    for part in &parts {
        let alone = Linear::new(&[part.matrix()], None, &budget()).unwrap();
        let alone = forward(&alone, Level::detect(), &x);
        for row in 0..2 {
            let want: Vec<f32> = (0..part.rows)
                .map(|i| alone[row * part.rows + i] + bias[first + i])
                .collect();
            assert_same_bits(&got[row * 60 + first..][..part.rows], &want, "part");
        }
        first += part.rows;
    }
}

#[test]
fn embeddings_are_the_dequantised_rows_and_share_a_tied_head() {
    for dtype in QUANTIZED.into_iter().chain(FLOATS) {
        let weights = Weights::random(dtype, 35, 256, 9);
        let embedding = Embedding::new(weights.matrix(), &budget()).unwrap();
        let tokens = [34, 0, 17, 17];
        let mut out = vec![f32::NAN; 4 * 256];
        embedding.forward(&tokens, 3.0, &mut out);
        let scaled: Vec<f32> = out.iter().map(|x| x / 3.0).collect();
        embedding.forward(&tokens, 1.0, &mut out);
        let exact: Vec<f64> = out.iter().map(|&x| x.into()).collect();
        assert_close(&scaled, &exact, 1e-6, "times 3");
        let mut row = vec![f32::NAN; 256];
        weights.matrix().widen_row(17, &mut row);
        assert_same_bits(&row, &out[2 * 256..3 * 256], &format!("{dtype:?}"));
        let want: Vec<f64> = tokens
            .iter()
            .flat_map(|&t| weights.values[t as usize * 256..][..256].iter().copied())
            .collect();
        assert_close(&out, &want, 1e-6, &format!("{dtype:?}"));
        assert_eq!(
            (embedding.tied().outputs(), embedding.tied().bytes()),
            (35, embedding.tied().bytes())
        );
    }
}

#[test]
fn nan_and_infinity_come_through() {
    for dtype in [WeightType::Q4_1, WeightType::Q8_0, WeightType::F32] {
        let weights = Weights::random(dtype, 16, 64, 1);
        let linear = Linear::new(&[weights.matrix()], None, &budget()).unwrap();
        for bad in [f32::NAN, f32::INFINITY] {
            let mut x = normal(&mut rng(2), 2 * 64);
            x[3] = bad;
            let out = forward(&linear, Level::detect(), &x);
            assert!(out[..16].iter().all(|y| !y.is_finite()), "{dtype:?}");
            assert!(out[16..].iter().all(|y| y.is_finite()), "{dtype:?}");
        }
    }
}

#[test]
fn bytes_stay_near_the_files() {
    for dtype in [
        WeightType::Q4_0,
        WeightType::Q4_1,
        WeightType::Q8_0,
        WeightType::Q4K,
        WeightType::Q6K,
    ] {
        let weights = Weights::random(dtype, 64, 512, 1);
        let budget = budget();
        let linear = Linear::new(&[weights.matrix()], None, &budget).unwrap();
        assert!(
            linear.bytes() as f64 <= weights.data.len() as f64 * 1.06,
            "{dtype:?}: {}",
            linear.bytes()
        );
        assert!(budget.meters().reserved >= linear.bytes());
    }
}

#[test]
fn wrong_shapes_are_typed_errors() {
    let data = vec![0; 18];
    assert!(matches!(
        Matrix::new(WeightType::Q4_0, 1, 33, &data),
        Err(WeightError::Shape { cols: 33, .. })
    ));
    assert!(matches!(
        Matrix::new(WeightType::Q4_0, 2, 32, &data),
        Err(WeightError::Shape { rows: 2, .. })
    ));
    let matrix = Matrix::new(WeightType::Q4_0, 1, 32, &data).unwrap();
    let wider = vec![0; 36];
    let wider = Matrix::new(WeightType::Q4_0, 1, 64, &wider).unwrap();
    let error = |parts: &[Matrix<'_>], bias: Option<&[f32]>| Linear::new(parts, bias, &budget()).unwrap_err();
    assert_eq!(error(&[matrix, wider], None), WeightError::Parts(vec![32, 64]));
    assert_eq!(
        error(&[matrix], Some(&[0.0; 2])),
        WeightError::Bias { bias: 2, outputs: 1 }
    );
    let full = Linear::new(&[matrix], None, &Budget::new(100)).unwrap_err();
    assert!(matches!(full, WeightError::Oom(_)), "{full}");
}

/// Elements by the definition of the format: every code, and scales at which `f16` is normal, subnormal and too small.
#[test]
fn mxfp4_is_kept_exactly() {
    const E2M1: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
    let mut rng = rng(3);
    let (rows, cols) = (21, 96);
    for exponent in [1 - 16, 0, 15, -22] {
        let mut data = Vec::new();
        let mut want = vec![0f32; rows * cols];
        for block in want.chunks_exact_mut(32) {
            data.push((127 + exponent) as u8);
            let codes: [u8; 32] = std::array::from_fn(|_| rng.random_range(0..16));
            data.extend((0..16).map(|i| codes[i] | codes[i + 16] << 4));
            for (value, code) in block.iter_mut().zip(codes) {
                let magnitude = E2M1[usize::from(code & 7)] * 2f32.powi(exponent);
                *value = if code >= 8 { -magnitude } else { magnitude };
            }
        }
        let matrix = Matrix::new(WeightType::Mxfp4, rows, cols, &data).unwrap();
        let linear = Linear::new(&[matrix], None, &budget()).unwrap();
        let (mut row, mut widened) = (vec![0.0; cols], vec![0.0; cols]);
        for (index, want) in want.chunks_exact(cols).enumerate() {
            linear.weight_row(index, &mut row);
            matrix.widen_row(index, &mut widened);
            assert_eq!((&row[..], &widened[..]), (want, want), "2^{exponent}");
        }
    }
    // 2^-30 is less than half of the least `f16`.
    let data = [&[97_u8][..], &[0x77; 16]].concat();
    let matrix = Matrix::new(WeightType::Mxfp4, 1, 32, &data).unwrap();
    let linear = Linear::new(&[matrix], None, &budget()).unwrap();
    let mut row = vec![1.0; 32];
    linear.weight_row(0, &mut row);
    assert_eq!(row, [0.0; 32]);
}
