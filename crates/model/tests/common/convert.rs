//! GGUF files as llama.cpp's converter writes them.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::BufWriter;
use std::path::{Path, PathBuf};

use candle_core::quantized::gguf_file::{self, Value};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{DType, Device, Tensor};
use plimsoll_model::{Architecture, DecoderSpec, KvCacheDtype, Model};

use super::{golden_path, load};

pub type Tensors = BTreeMap<String, Tensor>;

/// What convert_hf_to_gguf.py writes for this model.
pub fn metadata(architecture: &str, spec: &DecoderSpec) -> Vec<(String, Value)> {
    let size = |key: &str, value: usize| (format!("{architecture}.{key}"), Value::U32(value as u32));
    let (layer, attention) = (&spec.layers[0], spec.layers[0].attention());
    let rope = attention.rope.as_ref().unwrap();
    let mut out = vec![
        (
            "general.architecture".to_owned(),
            Value::String(architecture.to_owned()),
        ),
        size("block_count", spec.layers.len()),
        size("context_length", spec.max_position_embeddings),
        size("embedding_length", spec.hidden_size),
        size("feed_forward_length", layer.dense_mlp().intermediate_size),
        size("attention.head_count", attention.heads),
        size("attention.head_count_kv", attention.kv_heads),
        size("attention.key_length", attention.head_dim),
        size("attention.value_length", attention.head_dim),
        size("vocab_size", spec.vocab_size),
        (
            format!("{architecture}.attention.layer_norm_rms_epsilon"),
            Value::F32(layer.norm.eps),
        ),
        (
            format!("{architecture}.rope.freq_base"),
            Value::F32(rope.theta as f32),
        ),
        ("tokenizer.ggml.eos_token_id".to_owned(), Value::U32(2)),
    ];
    if let Some(window) = attention.window {
        out.push(size("attention.sliding_window", window));
    }
    if let plimsoll_model::rope::RopeScaling::Linear { factor } = rope.scaling {
        out.push((
            format!("{architecture}.rope.scaling.type"),
            Value::String("linear".to_owned()),
        ));
        out.push((
            format!("{architecture}.rope.scaling.factor"),
            Value::F32(factor as f32),
        ));
    }
    out
}

pub fn write(path: &Path, metadata: &[(String, Value)], tensors: &[(String, QTensor)]) {
    let metadata: Vec<_> = metadata
        .iter()
        .map(|(key, value)| (key.as_str(), value))
        .collect();
    let tensors: Vec<_> = tensors
        .iter()
        .map(|(name, tensor)| (name.as_str(), tensor))
        .collect();
    gguf_file::write(
        &mut BufWriter::new(File::create(path).unwrap()),
        &metadata,
        &tensors,
    )
    .unwrap();
}

/// The renaming of gguf-py's tensor_mapping.py for these families.
pub fn gguf_name(name: &str) -> String {
    name.replace("model.layers.", "blk.")
        .replace("model.embed_tokens", "token_embd")
        .replace("model.norm", "output_norm")
        .replace("lm_head", "output")
        .replace("input_layernorm", "attn_norm")
        .replace("post_attention_layernorm", "ffn_norm")
        .replace("self_attn.o_proj", "attn_output")
        .replace("self_attn.q_norm", "attn_q_norm")
        .replace("self_attn.k_norm", "attn_k_norm")
        .replace("self_attn.q_proj", "attn_q")
        .replace("self_attn.k_proj", "attn_k")
        .replace("self_attn.v_proj", "attn_v")
        .replace("mlp.gate_proj", "ffn_gate")
        .replace("mlp.up_proj", "ffn_up")
        .replace("mlp.down_proj", "ffn_down")
}

/// `LlamaModel.permute` of convert_hf_to_gguf.py.
pub fn permute(weight: &Tensor, heads: usize) -> Tensor {
    let (rows, cols) = weight.dims2().unwrap();
    let pairs = weight.reshape((heads, 2, rows / heads / 2, cols)).unwrap();
    pairs
        .transpose(1, 2)
        .unwrap()
        .contiguous()
        .unwrap()
        .reshape((rows, cols))
        .unwrap()
}

/// As the converter would write them, norms and biases in f32 and matrices as `dtype`.
pub fn converted(
    spec: &DecoderSpec,
    architecture: &str,
    tensors: &Tensors,
    dtype: GgmlDType,
) -> Vec<(String, QTensor)> {
    let convert = |(name, tensor): (&String, &Tensor)| {
        let tensor = tensor.to_dtype(DType::F32).unwrap();
        let heads = if name.contains("q_proj.weight") {
            spec.layers[0].attention().heads
        } else {
            spec.layers[0].attention().kv_heads
        };
        let rotated = name.contains("q_proj.weight") || name.contains("k_proj.weight");
        let tensor = if rotated && architecture == "llama" {
            permute(&tensor, heads)
        } else {
            tensor
        };
        let dtype = if tensor.rank() == 2 { dtype } else { GgmlDType::F32 };
        (gguf_name(name), QTensor::quantize(&tensor, dtype).unwrap())
    };
    tensors.iter().map(convert).collect()
}

pub fn golden_tensors(name: &str) -> Tensors {
    let files = std::fs::read_dir(golden_path(name))
        .unwrap()
        .map(|entry| entry.unwrap().path());
    let files = files.filter(|path| {
        path.extension()
            .is_some_and(|extension| extension == "safetensors")
    });
    files
        .flat_map(|path| candle_core::safetensors::load(path, &Device::Cpu).unwrap())
        .collect()
}

pub fn gguf_architecture(model: &Model) -> &'static str {
    match model.config().architecture {
        Architecture::Mistral => "llama",
        architecture => architecture.model_type(),
    }
}

pub fn golden_gguf(directory: &Path, name: &str) -> PathBuf {
    let model = load(name, KvCacheDtype::Auto);
    let architecture = gguf_architecture(&model);
    let mut tensors = converted(model.spec(), architecture, &golden_tensors(name), GgmlDType::F32);
    if name.starts_with("llama3") {
        // The converter spells Llama 3's scaling out as divisors of the unscaled frequencies.
        let rope = model.spec().ropes()[0].clone();
        let unscaled = plimsoll_model::rope::RopeSpec {
            scaling: plimsoll_model::rope::RopeScaling::None,
            ..rope.clone()
        };
        let frequencies = |rope: &plimsoll_model::rope::RopeSpec| rope.tables()[0].frequencies.clone();
        let factors: Vec<f32> = frequencies(&unscaled)
            .iter()
            .zip(frequencies(&rope))
            .map(|(plain, s)| plain / s)
            .collect();
        assert!(factors[0] == 1.0 && *factors.last().unwrap() > 7.9);
        let factors = Tensor::new(factors, &Device::Cpu).unwrap();
        tensors.push((
            "rope_freqs.weight".to_owned(),
            QTensor::quantize(&factors, GgmlDType::F32).unwrap(),
        ));
    }
    let path = directory.join(format!("{name}.gguf"));
    write(&path, &metadata(architecture, model.spec()), &tensors);
    path
}

pub const LLAMA_256: &str = r#"{"architectures": ["LlamaForCausalLM"], "vocab_size": 256, "hidden_size": 256,
    "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5, "max_position_embeddings": 256, "rope_theta": 10000.0}"#;

pub fn random_tensors(spec: &DecoderSpec) -> Tensors {
    let normal = |rows, cols: usize| {
        Tensor::randn(0f32, 1.0 / (cols as f32).sqrt(), (rows, cols), &Device::Cpu).unwrap()
    };
    let ones = || Tensor::ones(spec.hidden_size, DType::F32, &Device::Cpu).unwrap();
    let mut tensors = Tensors::new();
    tensors.insert(
        "model.embed_tokens.weight".to_owned(),
        normal(spec.vocab_size, spec.hidden_size),
    );
    tensors.insert(
        "lm_head.weight".to_owned(),
        normal(spec.vocab_size, spec.hidden_size),
    );
    tensors.insert("model.norm.weight".to_owned(), ones());
    for (layer, of) in spec.layers.iter().enumerate() {
        let (q, kv) = (of.attention().q_size(), of.attention().kv_size());
        let inner = of.dense_mlp().intermediate_size;
        let mut add =
            |name: &str, tensor| tensors.insert(format!("model.layers.{layer}.{name}.weight"), tensor);
        add("input_layernorm", ones());
        add("post_attention_layernorm", ones());
        add("self_attn.q_proj", normal(q, spec.hidden_size));
        add("self_attn.k_proj", normal(kv, spec.hidden_size));
        add("self_attn.v_proj", normal(kv, spec.hidden_size));
        add("self_attn.o_proj", normal(spec.hidden_size, q));
        add("mlp.gate_proj", normal(inner, spec.hidden_size));
        add("mlp.up_proj", normal(inner, spec.hidden_size));
        add("mlp.down_proj", normal(spec.hidden_size, inner));
    }
    tensors
}
