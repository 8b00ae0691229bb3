//! Checkpoints in eight bits, dequantised by candle: a twin of the loader's.

use candle_core::{DType, Device, Tensor};
use serde_json::{Value, json};
use tempfile::TempDir;

use super::convert::Tensors;
use super::experts::edited;

/// Whether a golden model has layers in eight bits.
pub fn is_fp8(name: &str) -> bool {
    name.contains("fp8")
}

/// The weights that a checkpoint means: those in eight bits times their scales, in `f32`, and the others.
pub fn dequantised(stored: &Tensors) -> Tensors {
    let scale_of = |name: &String| {
        let module = name
            .strip_suffix("weight")
            .unwrap_or_else(|| panic!("{name} in eight bits"));
        let names = ["weight_scale", "weight_scale_inv"].map(|scale| format!("{module}{scale}"));
        let found = names.iter().find_map(|name| stored.get(name));
        found.unwrap_or_else(|| panic!("{name} has no scale"))
    };
    let weights = stored.iter().filter(|(name, _)| !name.contains("_scale"));
    weights
        .map(|(name, tensor)| match tensor.dtype() {
            DType::F8E4M3 => (name.clone(), scaled(tensor, scale_of(name))),
            _ => (name.clone(), tensor.clone()),
        })
        .collect()
}

/// A golden model in FP8 with one matrix in floats: the k projection of a layer.
pub fn partly_in_floats(name: &str) -> TempDir {
    let module = "model.layers.1.self_attn.k_proj";
    let weight = format!("{module}.weight");
    let directory = edited(name, |tensors| {
        let plain = dequantised(&tensors.clone().into_iter().collect())[&weight].to_dtype(DType::BF16);
        tensors.retain(|name, _| !name.starts_with(&format!("{weight}_scale")));
        tensors.insert(weight.clone(), plain.unwrap());
    });
    let path = directory.path().join("config.json");
    let mut config: Value = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
    let ignored = config["quantization_config"]["ignore"].as_array_mut().unwrap();
    ignored.push(json!(module));
    std::fs::write(&path, config.to_string()).unwrap();
    directory
}

/// Blocks are of 128 by 128, or as large as the matrix.
fn scaled(tensor: &Tensor, scale: &Tensor) -> Tensor {
    let (rows, cols) = tensor.dims2().unwrap();
    let scale = scale.to_dtype(DType::F32).unwrap();
    let scale = match scale.rank() {
        2 => scale,
        _ => scale.reshape((1, 1)).unwrap(),
    };
    let scales: Vec<Vec<f32>> = scale.to_vec2().unwrap();
    let block = |size: usize, scales: usize| match scales {
        1 => size,
        _ if scales == size => 1,
        _ => 128,
    };
    let (height, width) = (block(rows, scales.len()), block(cols, scales[0].len()));
    let mut values: Vec<Vec<f32>> = tensor.to_dtype(DType::F32).unwrap().to_vec2().unwrap();
    for (row, values) in values.iter_mut().enumerate() {
        for (col, value) in values.iter_mut().enumerate() {
            *value *= scales[row / height][col / width];
        }
    }
    Tensor::new(values.concat(), &Device::Cpu)
        .unwrap()
        .reshape((rows, cols))
        .unwrap()
}
