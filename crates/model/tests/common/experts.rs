//! Golden models with experts, changed.

use std::collections::HashMap;

use candle_core::{DType, Device, Tensor};
use serde_json::Value;
use tempfile::TempDir;

use super::golden_path;

/// The configuration of a golden model.
pub fn config_json(name: &str) -> Value {
    serde_json::from_str(&std::fs::read_to_string(golden_path(name).join("config.json")).unwrap()).unwrap()
}

/// A copy of a golden model, of whose tensors `change` makes others.
pub fn edited(name: &str, change: impl FnOnce(&mut HashMap<String, Tensor>)) -> TempDir {
    let directory = TempDir::new().unwrap();
    let copy = |file: &str| std::fs::copy(golden_path(name).join(file), directory.path().join(file)).unwrap();
    copy("config.json");
    let path = golden_path(name).join("model.safetensors");
    let mut tensors = candle_core::safetensors::load(&path, &Device::Cpu).unwrap();
    change(&mut tensors);
    candle_core::safetensors::save(&tensors, directory.path().join("model.safetensors")).unwrap();
    directory
}

/// A model whose routers send every token to the first experts, however many it goes to; all others are not numbers, so that
/// an answer in numbers shows that none of them was read. MXFP4 has no such experts that every device loads: there they are the
/// largest.
pub fn adversarial(name: &str) -> TempDir {
    adversarial_with(name, 192)
}

/// The same where others have this exponent in MXFP4.
pub fn adversarial_with(name: &str, exponent: u8) -> TempDir {
    const FAR: f32 = 20.0;
    let config = config_json(name);
    let size = |field: &str| config[field].as_u64().map(|size| size as usize);
    let (hidden, top_k) = (size("hidden_size").unwrap(), size("num_experts_per_tok").unwrap());
    let experts = size("num_experts").or(size("num_local_experts")).unwrap();
    let column = |rows: usize, of: &dyn Fn(usize) -> f32, rest: &[Vec<f32>]| -> Vec<f32> {
        (0..rows * hidden)
            .map(|i| {
                if i % hidden == 0 {
                    of(i / hidden)
                } else {
                    rest.get(i / hidden).map_or(0.0, |row| row[i % hidden])
                }
            })
            .collect()
    };
    edited(name, |tensors| {
        for (name, tensor) in tensors.iter_mut() {
            let (dtype, shape) = (tensor.dtype(), tensor.shape().clone());
            let floats = |values: Vec<f32>| {
                Tensor::from_vec(values, shape.clone(), &Device::Cpu)
                    .unwrap()
                    .to_dtype(dtype)
                    .unwrap()
            };
            let expert = || {
                name.split("experts.")
                    .nth(1)?
                    .split('.')
                    .next()?
                    .parse::<usize>()
                    .ok()
            };
            if name == "model.embed_tokens.weight" {
                // The first element of the residual stream is large, whatever the layers add.
                let rows: Vec<Vec<f32>> = tensor.to_dtype(DType::F32).unwrap().to_vec2().unwrap();
                *tensor = floats(column(rows.len(), &|_| FAR, &rows));
            } else if name.ends_with("post_attention_layernorm.weight") {
                *tensor = floats(vec![1.0; hidden]);
            } else if name.ends_with("mlp.gate.weight")
                || name.ends_with("moe.gate.weight")
                || name.ends_with("router.weight")
            {
                *tensor = floats(column(experts, &|expert| (experts - expert) as f32 * FAR, &[]));
            } else if name.ends_with("router.bias") {
                *tensor = floats(vec![0.0; experts]);
            } else if name.ends_with("_proj_scales") {
                let mut exponents: Vec<u8> = tensor.flatten_all().unwrap().to_vec1().unwrap();
                let unread = exponents.len() / experts * top_k;
                exponents[unread..].fill(exponent);
                *tensor = Tensor::from_vec(exponents, shape, &Device::Cpu).unwrap();
            } else if name.ends_with("experts.gate_up_proj") {
                let mut values: Vec<f32> = tensor
                    .to_dtype(DType::F32)
                    .unwrap()
                    .flatten_all()
                    .unwrap()
                    .to_vec1()
                    .unwrap();
                let unread = values.len() / experts * top_k;
                values[unread..].fill(f32::NAN);
                *tensor = floats(values);
            } else if expert().is_some_and(|expert| expert >= top_k) {
                *tensor = floats(vec![f32::NAN; shape.elem_count()]);
            }
        }
    })
}
