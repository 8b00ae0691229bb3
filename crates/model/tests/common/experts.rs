//! Golden models with experts, changed.

use std::collections::HashMap;

use candle_core::{Device, Tensor};
use half::{bf16, f16};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
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
/// an answer in numbers shows that none of them was read. MXFP4 has no such experts that every device loads, nor have integers of
/// four bits: there they are far larger than the others.
pub fn adversarial(name: &str) -> TempDir {
    adversarial_with(name, 192)
}

/// The same where others are of this size, if they are numbers: an exponent in MXFP4, and a scale of integers of four bits.
pub fn adversarial_with(name: &str, size: u8) -> TempDir {
    routed(name, size, &|experts, expert| experts - expert)
}

/// The same experts as [`adversarial_with`], where routers send every token to the last of them.
pub fn misrouted(name: &str, size: u8) -> TempDir {
    routed(name, size, &|_, expert| expert + 1)
}

/// The logit of an expert is a multiple of what `rank` makes of how many there are and of which one it is.
fn routed(name: &str, size: u8, rank: &dyn Fn(usize, usize) -> usize) -> TempDir {
    let directory = TempDir::new().unwrap();
    std::fs::copy(
        golden_path(name).join("config.json"),
        directory.path().join("config.json"),
    )
    .unwrap();
    let file = std::fs::read(golden_path(name).join("model.safetensors")).unwrap();
    let config = config_json(name);
    let field = |names: [&str; 2]| {
        let found = names.iter().find_map(|name| config[name].as_u64());
        found.unwrap() as usize
    };
    let (experts, top_k) = (
        field(["num_experts", "num_local_experts"]),
        field(["num_experts_per_tok", "top_k_experts"]),
    );
    let changed: Vec<_> = SafeTensors::deserialize(&file)
        .unwrap()
        .tensors()
        .into_iter()
        .map(|(name, tensor)| {
            let change = Change {
                experts,
                top_k,
                size,
                rank,
                dtype: tensor.dtype(),
                shape: tensor.shape(),
            };
            let mut data = tensor.data().to_vec();
            change.apply(&name, &mut data);
            (name, tensor.dtype(), tensor.shape().to_vec(), data)
        })
        .collect();
    let views = changed.iter().map(|(name, dtype, shape, data)| {
        let view = TensorView::new(*dtype, shape.clone(), data).unwrap();
        (name, view)
    });
    safetensors::serialize_to_file(views, None, &directory.path().join("model.safetensors")).unwrap();
    directory
}

/// What becomes of a tensor.
struct Change<'a> {
    experts: usize,
    top_k: usize,
    size: u8,
    rank: &'a dyn Fn(usize, usize) -> usize,
    dtype: Dtype,
    shape: &'a [usize],
}

impl Change<'_> {
    fn apply(&self, name: &str, data: &mut [u8]) {
        const FAR: f32 = 20.0;
        let element = data.len() / self.shape.iter().product::<usize>();
        let whole = |data: &mut [u8], value: f32| self.fill(data, value);
        let is = |ends: &[&str]| ends.iter().any(|end| name.ends_with(end));
        let of_expert = || {
            name.split_once("experts.")?
                .1
                .split('.')
                .next()?
                .parse::<usize>()
                .ok()
        };
        // Experts in one tensor: those that no token goes to.
        let unread = data.len() / self.experts * self.top_k;
        if name == "model.embed_tokens.weight" {
            // The first element of the residual stream is large, whatever the layers add.
            let row = data.len() / self.shape[0];
            data.chunks_exact_mut(row)
                .for_each(|row| whole(&mut row[..element], FAR));
        } else if is(&["post_attention_layernorm.weight", "router.scale", "layer_scalar"]) {
            whole(data, 1.0);
        } else if is(&[
            "mlp.gate.weight",
            "moe.gate.weight",
            "router.weight",
            "router.proj.weight",
        ]) {
            whole(data, 0.0);
            let row = data.len() / self.experts;
            for (expert, row) in data.chunks_exact_mut(row).enumerate() {
                let rank = (self.rank)(self.experts, expert);
                whole(&mut row[..element], rank as f32 * FAR);
            }
        } else if is(&["router.bias"]) {
            whole(data, 0.0);
        } else if is(&["_proj_scales"]) {
            data[unread..].fill(self.size);
        } else if is(&["experts.gate_up_proj"]) {
            whole(&mut data[unread..], f32::NAN);
        } else if of_expert().is_some_and(|expert| expert >= self.top_k) {
            match self.dtype {
                // Integers of four bits are as large as their scales, and these are finite, as those of FP8.
                Dtype::F16 => whole(data, f32::from(self.size)),
                Dtype::F8_E4M3 => data.fill(0x7F),
                Dtype::BF16 => whole(data, f32::NAN),
                _ => {}
            }
        }
    }

    /// Makes all elements this one.
    fn fill(&self, data: &mut [u8], value: f32) {
        let element = match self.dtype {
            Dtype::BF16 => bf16::from_f32(value).to_le_bytes().to_vec(),
            Dtype::F16 => f16::from_f32(value).to_le_bytes().to_vec(),
            Dtype::F32 => value.to_le_bytes().to_vec(),
            dtype => panic!("{dtype:?} is no type of floats"),
        };
        data.chunks_exact_mut(element.len())
            .for_each(|place| place.copy_from_slice(&element));
    }
}
