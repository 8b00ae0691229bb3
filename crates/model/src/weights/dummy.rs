//! Random weights for any shape: benchmarks and tests need a config.json alone.

use plimsoll_kernels::{WeightType, e4m3_from_f32};
use rayon::prelude::*;

use half::{bf16, f16};

use super::{Source, Tensor};
use crate::ModelError;
use crate::quantization::{Int4Format, Int4Packing, MXFP4_BLOCK, MatrixFormat, Quantization};

/// Makes each tensor up when it is asked for. The same seed gives the same weights.
#[derive(Clone, Debug)]
pub(crate) struct DummyWeights {
    pub(crate) seed: u64,
    pub(crate) dtype: WeightType,
    /// Which matrices are in eight bits or four.
    pub(crate) quantization: Quantization,
}

/// Every scale of matrices in eight bits. Elements of random matrices that keep the variance are then within the range in
/// which `e4m3` has all its digits, whatever the number of inputs.
pub(crate) const DUMMY_SCALE: f32 = 1.0 / 256.0;

impl DummyWeights {
    /// As what every tensor is made.
    pub(crate) fn stored_type(&self) -> WeightType {
        match self.dtype {
            dtype @ (WeightType::F16 | WeightType::Bf16) => dtype,
            _ => WeightType::F32,
        }
    }
}

impl Source for DummyWeights {
    fn has(&self, _: &str) -> bool {
        true
    }

    fn tensor(&self, name: &str, expected: &[usize]) -> Result<Option<Tensor<'_>>, ModelError> {
        let (dtype, data) = self.values(name, expected);
        Ok(Some(Tensor::plain(name, dtype, expected, data)))
    }

    fn names(&self) -> Vec<String> {
        Vec::new()
    }

    fn total_bytes(&self) -> u64 {
        0
    }
}

impl DummyWeights {
    /// Type and data of a tensor.
    fn values(&self, name: &str, expected: &[usize]) -> (WeightType, Vec<u8>) {
        let stream = name
            .bytes()
            .fold(self.seed, |hash, byte| mix(hash ^ u64::from(byte)));
        let len: usize = expected.iter().product();
        let is_factor = ["norm.weight", "layer_scalar", "router.scale", "per_expert_scale"]
            .iter()
            .any(|end| name.ends_with(end));
        // Norms scale by about 1; matrices keep the variance of what they are applied to.
        let (centre, spread) = match expected {
            [_] if is_factor => (1.0, 0.1),
            _ if is_scale(name) => (DUMMY_SCALE, 0.0),
            [_] => (0.0, 0.1),
            [.., inputs] => (0.0, (3.0 / *inputs as f32).sqrt()),
            [] => (0.0, 1.0),
        };
        let value = |index: usize| centre + spread * unit(stream, index);
        if let Some((module, part)) = name.rsplit_once('.')
            && let MatrixFormat::Int4(format) = self.quantization.format(module)
            && let Some(codes) = self.int4(format, part, expected, stream)
        {
            return codes;
        }
        let module = name.strip_suffix(".weight").filter(|_| expected.len() == 2);
        let format = module.map(|module| self.quantization.format(module));
        let dtype = match format {
            _ if name.ends_with("_blocks") || name.ends_with("_scales") => WeightType::U8,
            Some(MatrixFormat::Fp8 { .. }) => WeightType::F8E4M3,
            _ => self.stored_type(),
        };
        let data = match dtype {
            WeightType::F16 => bytes(len, |index| f16::from_f32(value(index)).to_le_bytes()),
            WeightType::Bf16 => bytes(len, |index| bf16::from_f32(value(index)).to_le_bytes()),
            WeightType::U8 if name.ends_with("_scales") => vec![mxfp4_exponent(expected); len],
            WeightType::U8 => bytes(len, |index| [(unit(stream, index) * 128.0) as i8 as u8]),
            WeightType::F8E4M3 => bytes(len, |index| [e4m3_from_f32(value(index) / DUMMY_SCALE)]),
            _ => bytes(len, |index| value(index).to_le_bytes()),
        };
        (dtype, data)
    }

    /// Type and data of a part of a matrix in four bits, if it is one: random codes, zeros in their middle, and the scale with which
    /// they keep the variance of as many inputs as there are. A scale for each output tells nothing of the inputs: there are
    /// taken to be as many as outputs.
    fn int4(
        &self,
        format: Int4Format,
        part: &str,
        shape: &[usize],
        stream: u64,
    ) -> Option<(WeightType, Vec<u8>)> {
        /// Of codes less their zero.
        const MEAN_SQUARE: f32 = 21.5;
        let len = shape.iter().product();
        Some(match part {
            "weight_packed" | "qweight" => {
                let word =
                    |index: usize| ((mix(stream.wrapping_add(index as u64)) >> 32) as u32).to_le_bytes();
                (WeightType::I32, bytes(len, word))
            }
            "weight_zero_point" | "qzeros" => (WeightType::I32, vec![0x88; 4 * len]),
            "weight_g_idx" | "g_idx" => {
                let size = format.groups.size(len);
                (
                    WeightType::I32,
                    bytes(len, |input| ((input / size) as u32).to_le_bytes()),
                )
            }
            "weight_scale" | "scales" => {
                let [outputs, groups] = match (format.packing, shape) {
                    (Int4Packing::Compressed { .. }, &[outputs, groups]) => [outputs, groups],
                    (_, &[groups, outputs]) => [outputs, groups],
                    _ => return None,
                };
                let inputs = groups * format.groups.size(outputs);
                let scale = 1.0 / (MEAN_SQUARE * inputs as f32).sqrt();
                (
                    WeightType::F16,
                    bytes(len, |_| f16::from_f32(scale).to_le_bytes()),
                )
            }
            _ => return None,
        })
    }
}

/// With it, random elements of MXFP4, of which each has the same chance, keep the variance, about. `scales` is the shape of a
/// matrix's exponents.
fn mxfp4_exponent(scales: &[usize]) -> u8 {
    /// Of all elements.
    const MEAN_SQUARE: f32 = 8.5625;
    let inputs = scales.last().map_or(1, |blocks| blocks * MXFP4_BLOCK).max(1);
    let exponent = -(MEAN_SQUARE * inputs as f32).log2() / 2.0;
    (127.0 + exponent.round()) as u8
}

/// Scales alone have names that end so.
fn is_scale(name: &str) -> bool {
    name.ends_with("_scale") || name.ends_with("_scale_inv")
}

fn bytes<const N: usize>(len: usize, value: impl Fn(usize) -> [u8; N] + Sync) -> Vec<u8> {
    let mut out = vec![0; len * N];
    out.par_chunks_exact_mut(N)
        .with_min_len(1 << 12)
        .enumerate()
        .for_each(|(i, out)| out.copy_from_slice(&value(i)));
    out
}

/// Uniform in [-1, 1).
fn unit(stream: u64, index: usize) -> f32 {
    let bits = mix(stream.wrapping_add(index as u64)) >> 40;
    bits as f32 / (1 << 23) as f32 - 1.0
}

/// One step of [SplitMix64](https://doi.org/10.1145/2714064.2660195).
pub(crate) fn mix(state: u64) -> u64 {
    let z = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
