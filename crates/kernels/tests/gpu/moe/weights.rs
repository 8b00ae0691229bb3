//! Random experts, as a device keeps them and in `f64`.

use std::sync::Arc;

use half::{bf16, f16};
use plimsoll_device::cuda::Gpu;
use plimsoll_kernels::cuda::{
    FP8_BLOCK, Fp8Scaling, GpuExperts, GpuLinear, GpuMatrix, GpuWeight, Int4Group, expert_int4_pitch,
    mxfp4_pitch,
};
use plimsoll_kernels::{e4m3_from_f32, e4m3_to_f32};
use rand::Rng;
use rand::rngs::StdRng;

use crate::common;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Format {
    Bf16,
    Fp8,
    Fp8Blocks,
    Mxfp4,
    Int4(Int4Group),
}

impl Format {
    pub(super) const ALL: [Self; 7] = [
        Self::Bf16,
        Self::Fp8,
        Self::Fp8Blocks,
        Self::Mxfp4,
        Self::Int4(Int4Group::Of32),
        Self::Int4(Int4Group::Of64),
        Self::Int4(Int4Group::Of128),
    ];

    /// Outer and inner width: with parts of tiles and of stages, where the format has such.
    pub(super) fn random_sizes(self, rng: &mut StdRng) -> (usize, usize) {
        let unit = match self {
            Self::Bf16 | Self::Int4(_) => 8,
            Self::Fp8 => 16,
            Self::Fp8Blocks => 128,
            Self::Mxfp4 => 32,
        };
        let mut size = |most: usize| unit * rng.random_range(1..=most.div_ceil(unit));
        (size(400), size(300))
    }
}

/// Rows of weights in bf16, without a bias.
pub(super) struct Table {
    pub(super) device: GpuLinear,
    wide: Vec<f64>,
}

impl Table {
    /// Of which the outputs of normal inputs are of this size.
    pub(super) fn random(gpu: &Gpu, rng: &mut StdRng, [n, k]: [usize; 2], size: f32) -> Self {
        let scale = size * (3.0 / k as f32).sqrt();
        let values: Vec<bf16> = (0..n * k)
            .map(|_| bf16::from_f32(rng.random_range(-1.0..1.0) * scale))
            .collect();
        Self::new(gpu, &values, k)
    }

    /// Of rows of `k` values.
    pub(super) fn new(gpu: &Gpu, values: &[bf16], k: usize) -> Self {
        let slab = Arc::new(common::upload(gpu, values));
        let matrix = GpuMatrix::Bf16(GpuWeight::new(&slab, 0..values.len()));
        Self {
            device: GpuLinear::new(matrix, None, values.len() / k, k),
            wide: common::wide(values),
        }
    }

    pub(super) fn product(&self, x: &[f64]) -> Vec<f64> {
        common::product(x, &self.wide, x.len(), None)
    }
}

/// Matrices of experts, `[n, k]` each.
#[derive(Clone)]
pub(super) struct Experts {
    pub(super) format: Format,
    pub(super) device: GpuExperts,
    /// The same one by one.
    pub(super) linears: Vec<GpuLinear>,
    /// Of each expert, as products take it.
    pub(super) wide: Vec<Vec<f64>>,
    pub(super) biases: Option<Vec<Vec<bf16>>>,
    k: usize,
}

/// One matrix as a device keeps it.
struct Stored {
    bytes: Vec<u8>,
    /// Or words of groups.
    scales: Vec<u32>,
    wide: Vec<f64>,
}

impl Experts {
    pub(super) fn random(
        gpu: &Gpu,
        rng: &mut StdRng,
        format: Format,
        count: usize,
        [n, k]: [usize; 2],
        bias: bool,
    ) -> Self {
        let mut bytes: Vec<u8> = Vec::new();
        let (mut wide, mut biases, mut starts) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..count {
            let stored = Stored::random(rng, format, n, k);
            let bias = if bias { common::random(rng, n) } else { Vec::new() };
            let parts = [
                &stored.bytes,
                bytemuck::cast_slice(&stored.scales),
                bytemuck::cast_slice::<bf16, u8>(&bias),
            ];
            starts.push(parts.map(|part| {
                let start = bytes.len();
                bytes.extend_from_slice(part);
                bytes.resize(bytes.len().next_multiple_of(256), 0xff);
                start..start + part.len()
            }));
            wide.push(stored.wide);
            biases.push(bias);
        }
        let slab = Arc::new(common::upload(gpu, &bytes));
        let linears: Vec<GpuLinear> = starts
            .into_iter()
            .map(|[weight, scales, own_bias]| {
                let scales = scales.start / 4..scales.end / 4;
                let values = |scaling| GpuMatrix::Fp8 {
                    values: GpuWeight::new(&slab, weight.clone()),
                    scales: GpuWeight::new(&slab, scales.clone()),
                    scaling,
                };
                let matrix = match format {
                    Format::Bf16 => GpuMatrix::Bf16(GpuWeight::new(&slab, weight.start / 2..weight.end / 2)),
                    Format::Fp8 => values(Fp8Scaling::Rows),
                    Format::Fp8Blocks => values(Fp8Scaling::Blocks),
                    Format::Mxfp4 => GpuMatrix::Mxfp4(GpuWeight::new(&slab, weight)),
                    Format::Int4(group) => GpuMatrix::ExpertInt4 {
                        codes: GpuWeight::new(&slab, weight),
                        groups: GpuWeight::new(&slab, scales.clone()),
                        group,
                    },
                };
                let bias = bias.then(|| GpuWeight::new(&slab, own_bias.start / 2..own_bias.end / 2));
                GpuLinear::new(matrix, bias, n, k)
            })
            .collect();
        Self {
            format,
            device: GpuExperts::new(gpu, &linears).expect("a tensor map"),
            linears,
            wide,
            biases: bias.then_some(biases),
            k,
        }
    }

    /// An expert's outputs of one row.
    pub(super) fn product(&self, expert: usize, x: &[f64]) -> Vec<f64> {
        let bias = self.biases.as_ref().map(|biases| &*biases[expert]);
        common::product(x, &self.wide[expert], self.k, bias)
    }
}

impl Stored {
    fn random(rng: &mut StdRng, format: Format, n: usize, k: usize) -> Self {
        match format {
            Format::Bf16 => {
                let values = common::random(rng, n * k);
                Self {
                    bytes: bytemuck::cast_slice(&values).to_vec(),
                    scales: Vec::new(),
                    wide: values.iter().map(|x| x.to_f64()).collect(),
                }
            }
            Format::Fp8 => Self::fp8(rng, Fp8Scaling::Rows, n, k),
            Format::Fp8Blocks => Self::fp8(rng, Fp8Scaling::Blocks, n, k),
            Format::Mxfp4 => Self::mxfp4(rng, n, k),
            Format::Int4(group) => Self::int4(rng, group, n, k),
        }
    }

    fn fp8(rng: &mut StdRng, scaling: Fp8Scaling, n: usize, k: usize) -> Self {
        let bytes: Vec<u8> = (0..n * k)
            .map(|_| e4m3_from_f32(rng.random_range(-448.0..448.0)))
            .collect();
        let scales: Vec<f32> = (0..scaling.weight_scales(n, k))
            .map(|_| rng.random_range(0.5..2.0) / 448.0)
            .collect();
        let wide = bytes.iter().enumerate().map(|(at, &code)| {
            let (row, column) = (at / k, at % k);
            match scaling {
                Fp8Scaling::Rows => f64::from(e4m3_to_f32(code)) * f64::from(scales[row]),
                Fp8Scaling::Blocks => {
                    let scale = scales[row / FP8_BLOCK * scaling.stride(k) + column / FP8_BLOCK];
                    f64::from(e4m3_to_f32(code)) * f64::from(scale)
                }
            }
        });
        Self {
            wide: wide.collect(),
            bytes,
            scales: scales.iter().map(|scale| scale.to_bits()).collect(),
        }
    }

    /// As [`GpuMatrix::Mxfp4`] says. Blocks of all sizes, and some whose exponents are far off.
    fn mxfp4(rng: &mut StdRng, n: usize, k: usize) -> Self {
        const VALUES: [f64; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
        /// Of the even code of each pair, from the sign down. Those of the odd one are half a word away.
        const BITS: [[usize; 4]; 4] = [[15, 8, 7, 6], [18, 11, 10, 9], [21, 14, 13, 12], [3, 1, 0, 4]];
        let (pitch, exponent_bytes) = (mxfp4_pitch(k), (k / 32).next_multiple_of(16));
        let mut bytes = vec![0; n * pitch];
        let mut wide = Vec::new();
        for row in 0..n {
            let exponents: Vec<u8> = (0..k / 32)
                .map(|_| match rng.random_range(0..20) {
                    0 => rng.random_range(0..60),
                    _ => rng.random_range(121..128),
                })
                .collect();
            // Behind the windows of eight rows.
            let first = row / 8 * 8 * pitch + k.div_ceil(64) * 256 + row % 8 * exponent_bytes;
            bytes[first..first + k / 32].copy_from_slice(&exponents);
            // Past the end there may be any codes.
            for input in 0..k.next_multiple_of(64) {
                let code: u8 = rng.random_range(0..16);
                let sign = if code & 8 == 0 { 1.0 } else { -1.0 };
                if let Some(&exponent) = exponents.get(input / 32) {
                    let power = (f64::from(exponent) - 127.0).exp2();
                    wide.push(sign * VALUES[usize::from(code & 7)] * power);
                }
                let (word, pair, odd) = place(pitch, row, input);
                for (bit, to) in (0..4).rev().zip(BITS[pair]) {
                    let to = (to + 16 * odd) % 32;
                    bytes[word + to / 8] |= (code >> bit & 1) << (to % 8);
                }
            }
        }
        Self {
            bytes,
            scales: Vec::new(),
            wide,
        }
    }

    /// As [`GpuMatrix::ExpertInt4`] says.
    fn int4(rng: &mut StdRng, group: Int4Group, n: usize, k: usize) -> Self {
        let (pitch, stride) = (expert_int4_pitch(k), group.stride(k));
        let mut bytes = vec![0; n * pitch];
        let (mut words, mut wide) = (Vec::new(), Vec::new());
        for row in 0..n {
            let mut shared: Vec<(f32, u8)> = (0..stride)
                .map(|_| {
                    let scale = f16::from_f32(rng.random_range(0.01..0.3));
                    (scale.to_f32(), rng.random_range(0..16))
                })
                .collect();
            let (used, last) = (k.div_ceil(group.inputs()), shared[(k - 1) / group.inputs()]);
            shared[used..].fill(last);
            words.extend(shared.iter().map(|&(scale, zero)| Int4Group::word(scale, zero)));
            for input in 0..pitch * 2 {
                let code: u8 = rng.random_range(0..16);
                if input < k {
                    let (scale, zero) = shared[input / group.inputs()];
                    wide.push((f64::from(code) - f64::from(zero)) * f64::from(scale));
                }
                let (word, pair, odd) = place(pitch, row, input);
                let bit = 16 * odd + 4 * pair;
                bytes[word + bit / 8] |= code << (bit % 8);
            }
        }
        Self {
            bytes,
            scales: words,
            wide,
        }
    }
}

/// Where the word with a code of four bits begins, of rows of so many bytes; which of its pairs has the code, and which of the pair that is.
fn place(pitch: usize, row: usize, input: usize) -> (usize, usize, usize) {
    let (window, part, quad) = (input / 64, input % 64 / 32, input % 8 / 2);
    let of_window = row / 8 * 8 * pitch + window * 256 + row % 8 * 32;
    (of_window + (2 * quad + part) * 4, input % 32 / 8, input % 2)
}
