//! The default model's weights as compressed-tensors quantises them: checkpoints too large for git, written from the GGUF file byte
//! by byte as the library writes them, which their SHA-256 shows.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::BufReader;
use std::path::Path;

use candle_core::Device;
use candle_core::quantized::gguf_file::Content;
use half::bf16;
use plimsoll_kernels::{E4M3_MAX, e4m3_from_f32};
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde::Deserialize;
use serde_json::Value;
use sha2::{Digest, Sha256};

use super::golden_path;
use super::smollm2::{SmolCase, file};

#[derive(Deserialize)]
struct Golden {
    checkpoints: Vec<Checkpoint>,
}

/// What `scripts/golden_smollm2.py` found in one that the library wrote.
#[derive(Deserialize)]
pub struct Checkpoint {
    pub name: String,
    sha256: String,
    config: Value,
    pub cases: Vec<SmolCase>,
}

/// That in bfloat16, then those quantised from it.
pub fn checkpoints() -> Vec<Checkpoint> {
    let text = std::fs::read_to_string(golden_path("smollm2/quantised.json")).unwrap();
    serde_json::from_str::<Golden>(&text).unwrap().checkpoints
}

/// A tensor as it is stored.
struct Stored {
    dtype: Dtype,
    shape: Vec<usize>,
    data: Vec<u8>,
}

type Weights = BTreeMap<String, (Vec<usize>, Vec<bf16>)>;

impl Checkpoint {
    /// Writes it into a directory.
    ///
    /// # Panics
    ///
    /// If it is not to the byte what the library wrote.
    pub fn write(&self, weights: &Weights, directory: &Path) {
        let scheme = &self.config["quantization_config"]["config_groups"]["group_0"]["weights"];
        let mut tensors = BTreeMap::new();
        for (name, (shape, values)) in weights {
            let is_linear = name.ends_with("_proj.weight");
            match scheme["type"].as_str().filter(|_| is_linear) {
                None => {
                    tensors.insert(name.clone(), floats(shape, values));
                }
                Some("float") => {
                    let (stored, scales) = in_eight_bits(shape, values);
                    tensors.insert(name.clone(), stored);
                    tensors.insert(format!("{name}_scale"), scales);
                }
                Some("int") => {
                    let size = scheme["group_size"].as_u64().unwrap() as usize;
                    let (packed, scales) = in_four_bits(shape, values, size);
                    tensors.insert(format!("{name}_packed"), packed);
                    tensors.insert(format!("{name}_scale"), scales);
                    tensors.insert(format!("{name}_shape"), shape_of(shape));
                }
                Some(other) => panic!("{other}"),
            }
        }
        assert_eq!(sha256(&tensors), self.sha256, "{}", self.name);
        let views = tensors.iter().map(|(name, tensor)| {
            let view = TensorView::new(tensor.dtype, tensor.shape.clone(), &tensor.data);
            (name, view.unwrap())
        });
        safetensors::serialize_to_file(views, None, &directory.join("model.safetensors")).unwrap();
        std::fs::write(directory.join("config.json"), self.config.to_string()).unwrap();
    }
}

/// Those of the GGUF file, dequantised by candle and rounded to bfloat16, as transformers names and orders them.
pub fn weights() -> Weights {
    let mut file = BufReader::new(File::open(file()).unwrap());
    let content = Content::read(&mut file).unwrap();
    let number = |key: &str| {
        let value = &content.metadata[&format!("llama.attention.{key}")];
        value.to_u32().unwrap() as usize
    };
    let (heads, kv_heads) = (number("head_count"), number("head_count_kv"));
    let mut out = Weights::new();
    for name in content.tensor_infos.keys() {
        let tensor = content.tensor(&mut file, name, &Device::Cpu).unwrap();
        let tensor = tensor.dequantize(&Device::Cpu).unwrap();
        let shape = tensor.dims().to_vec();
        let values: Vec<f32> = tensor.flatten_all().unwrap().to_vec1().unwrap();
        let values: Vec<bf16> = values.into_iter().map(bf16::from_f32).collect();
        let values = match name.split('.').nth(2) {
            Some("attn_q") => in_halves(&values, shape[1], shape[0] / heads),
            Some("attn_k") => in_halves(&values, shape[1], shape[0] / kv_heads),
            _ => values,
        };
        out.insert(in_transformers(name), (shape, values));
    }
    out
}

fn in_transformers(name: &str) -> String {
    let parts: Vec<&str> = name.split('.').collect();
    match parts[..] {
        ["token_embd", _] => "model.embed_tokens.weight".to_owned(),
        ["output_norm", _] => "model.norm.weight".to_owned(),
        ["blk", layer, part, _] => {
            let part = match part {
                "attn_norm" => "input_layernorm",
                "attn_q" => "self_attn.q_proj",
                "attn_k" => "self_attn.k_proj",
                "attn_v" => "self_attn.v_proj",
                "attn_output" => "self_attn.o_proj",
                "ffn_norm" => "post_attention_layernorm",
                "ffn_gate" => "mlp.gate_proj",
                "ffn_up" => "mlp.up_proj",
                "ffn_down" => "mlp.down_proj",
                other => panic!("{other}"),
            };
            format!("model.layers.{layer}.{part}.weight")
        }
        _ => panic!("{name}"),
    }
}

/// Rows of each head, of which GGUF files have those that turn together next to each other.
fn in_halves(values: &[bf16], cols: usize, head_dim: usize) -> Vec<bf16> {
    let rows = values.len() / cols;
    let from = |row: usize| {
        let (head, at) = (row / head_dim, row % head_dim);
        head * head_dim + 2 * (at % (head_dim / 2)) + at / (head_dim / 2)
    };
    (0..rows)
        .flat_map(|row| &values[from(row) * cols..][..cols])
        .copied()
        .collect()
}

fn floats(shape: &[usize], values: &[bf16]) -> Stored {
    Stored {
        dtype: Dtype::BF16,
        shape: shape.to_vec(),
        data: values.iter().flat_map(|value| value.to_le_bytes()).collect(),
    }
}

fn shape_of(shape: &[usize]) -> Stored {
    let sizes = shape.iter().flat_map(|&size| (size as i64).to_le_bytes());
    Stored {
        dtype: Dtype::I64,
        shape: vec![shape.len()],
        data: sizes.collect(),
    }
}

/// What torch's operations in bfloat16 give: computed in float32, rounded once.
fn quotient(value: bf16, by: f32) -> bf16 {
    bf16::from_f32(value.to_f32() / by)
}

fn largest(values: &[bf16]) -> bf16 {
    let magnitudes = values.iter().map(|value| value.to_f32().abs());
    bf16::from_f32(magnitudes.fold(0.0, f32::max))
}

/// A scale for each output.
fn in_eight_bits(shape: &[usize], values: &[bf16]) -> (Stored, Stored) {
    let (mut scales, mut data) = (Vec::new(), Vec::new());
    for row in values.chunks(shape[1]) {
        let scale = quotient(largest(row), E4M3_MAX);
        scales.push(scale);
        data.extend(row.iter().map(|&value| {
            let scaled = quotient(value, scale.to_f32()).to_f32();
            e4m3_from_f32(scaled.clamp(-E4M3_MAX, E4M3_MAX))
        }));
    }
    let stored = Stored {
        dtype: Dtype::F8_E4M3,
        shape: shape.to_vec(),
        data,
    };
    (stored, floats(&[shape[0], 1], &scales))
}

/// A scale for each `size` inputs of an output, eight codes in a word.
fn in_four_bits(shape: &[usize], values: &[bf16], size: usize) -> (Stored, Stored) {
    let (mut scales, mut data) = (Vec::new(), Vec::new());
    for group in values.chunks(size) {
        let scale = quotient(largest(group), 7.5);
        scales.push(scale);
        for word in group.chunks(8) {
            let code = |value: bf16| {
                let scaled = quotient(value, scale.to_f32()).to_f32();
                (scaled.clamp(-8.0, 7.0).round_ties_even() + 8.0) as u32
            };
            let word = word.iter().rev().fold(0, |word, &value| word << 4 | code(value));
            data.extend(word.to_le_bytes());
        }
    }
    let packed = Stored {
        dtype: Dtype::I32,
        shape: vec![shape[0], shape[1] / 8],
        data,
    };
    (packed, floats(&[shape[0], shape[1] / size], &scales))
}

/// As `sha256` of `scripts/golden_smollm2.py`.
fn sha256(tensors: &BTreeMap<String, Stored>) -> String {
    let mut digest = Sha256::new();
    for (name, tensor) in tensors {
        digest.update(format!("{name} {:?} {:?}\n", tensor.dtype, tensor.shape));
        digest.update(&tensor.data);
    }
    let digest = digest.finalize();
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}
