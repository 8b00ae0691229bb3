//! Checkpoints of integers of four bits, dequantised by candle: a twin of the loader's.

use candle_core::{DType, Device, Tensor};
use serde_json::Value;

use super::convert::Tensors;
use super::golden_path;

/// Whether a golden model has layers in integers of four bits.
pub fn is_int4(name: &str) -> bool {
    ["int4", "awq", "gptq", "auto-round"]
        .iter()
        .any(|format| name.contains(format))
}

/// The weights that a golden checkpoint means: codes less zeros, times scales, in `f32`, and the others.
pub fn dequantised(name: &str, stored: &Tensors) -> Tensors {
    let text = std::fs::read_to_string(golden_path(name).join("config.json")).unwrap();
    let config: Value = serde_json::from_str(&text).unwrap();
    let config = &config["quantization_config"];
    let is_awq = config["quant_method"] == "awq" || config["packing_format"] == "auto_round:auto_awq";
    // Of an output, and of an input: which eighth of a word is its.
    let in_order = |at: usize| at % 8;
    let of_awq = |at: usize| [0, 4, 1, 5, 2, 6, 3, 7][at % 8];
    let mut plain = Tensors::new();
    for (name, tensor) in stored {
        let (module, part) = name.rsplit_once('.').unwrap();
        let other = |part: &str| stored.get(&format!("{module}.{part}"));
        let code = |words: &[Vec<i64>], row: usize, col: usize, eighth: usize| -> i64 {
            words[row][col] >> (4 * eighth) & 15
        };
        let (codes, scales) = match part {
            "weight_packed" => (whole(tensor), floats(other("weight_scale").unwrap())),
            "qweight" => (whole(tensor), floats(&other("scales").unwrap().t().unwrap())),
            part if ["weight", "bias"].contains(&part) => {
                plain.insert(name.clone(), tensor.clone());
                continue;
            }
            _ => continue,
        };
        let zeros = other("weight_zero_point").or(other("qzeros")).map(whole);
        let less_one = config["quant_method"] == "auto-round" || config["checkpoint_format"] == "gptq";
        let order = other("g_idx").map(|order| order.to_dtype(DType::I64).unwrap().to_vec1::<i64>().unwrap());
        let inputs = match part {
            "weight_packed" => 8 * codes[0].len(),
            _ if is_awq => codes.len(),
            _ => 8 * codes.len(),
        };
        let size = inputs / scales[0].len();
        let mut weight = Vec::new();
        for (output, scales) in scales.iter().enumerate() {
            for input in 0..inputs {
                let group = order.as_ref().map_or(input / size, |order| order[input] as usize);
                let found = match part {
                    "weight_packed" => code(&codes, output, input / 8, in_order(input)),
                    _ if is_awq => code(&codes, input, output / 8, of_awq(output)),
                    _ => code(&codes, input / 8, output, in_order(input)),
                };
                let zero = match (&zeros, part) {
                    (None, _) => 8,
                    (Some(zeros), "weight_packed") => code(zeros, output / 8, group, in_order(output)),
                    (Some(zeros), _) if is_awq => code(zeros, group, output / 8, of_awq(output)),
                    // None of the golden zeros is 0, which stored less one would reach into the next.
                    (Some(zeros), _) => {
                        code(zeros, group, output / 8, in_order(output)) + i64::from(less_one)
                    }
                };
                weight.push((found - zero) as f32 * scales[group]);
            }
        }
        let weight = Tensor::from_vec(weight, (scales.len(), inputs), &Device::Cpu).unwrap();
        plain.insert(format!("{module}.weight"), weight);
    }
    plain
}

/// Words of a matrix, as they are without a sign.
fn whole(tensor: &Tensor) -> Vec<Vec<i64>> {
    let rows: Vec<Vec<i64>> = tensor.to_dtype(DType::I64).unwrap().to_vec2().unwrap();
    let word = |word: i64| word & 0xffff_ffff;
    rows.into_iter()
        .map(|row| row.into_iter().map(word).collect())
        .collect()
}

fn floats(tensor: &Tensor) -> Vec<Vec<f32>> {
    tensor.to_dtype(DType::F32).unwrap().to_vec2().unwrap()
}
