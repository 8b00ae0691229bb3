//! GGUF files: the tiny golden models converted as llama.cpp converts them, every quantised type, broken files.

mod common;

use std::collections::BTreeMap;
use std::fs::File;
use std::io::BufWriter;
use std::path::{Path, PathBuf};

use candle_core::quantized::gguf_file::{self, Value};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{DType, Device, Tensor};
use common::*;
use plimsoll_core::MetaValue;
use plimsoll_model::{Architecture, DecoderSpec, GgufFile, KvCacheDtype, LoadOptions, Model, ModelError};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use tempfile::TempDir;

type Tensors = BTreeMap<String, Tensor>;

/// What convert_hf_to_gguf.py writes for this model.
fn metadata(architecture: &str, spec: &DecoderSpec) -> Vec<(String, Value)> {
    let size = |key: &str, value: usize| (format!("{architecture}.{key}"), Value::U32(value as u32));
    let mut out = vec![
        (
            "general.architecture".to_owned(),
            Value::String(architecture.to_owned()),
        ),
        size("block_count", spec.num_layers),
        size("context_length", spec.max_position_embeddings),
        size("embedding_length", spec.hidden_size),
        size("feed_forward_length", spec.intermediate_size),
        size("attention.head_count", spec.num_heads),
        size("attention.head_count_kv", spec.num_kv_heads),
        size("attention.key_length", spec.head_dim),
        size("attention.value_length", spec.head_dim),
        size("vocab_size", spec.vocab_size),
        (
            format!("{architecture}.attention.layer_norm_rms_epsilon"),
            Value::F32(spec.rms_norm_eps),
        ),
        (
            format!("{architecture}.rope.freq_base"),
            Value::F32(spec.rope.theta as f32),
        ),
        ("tokenizer.ggml.eos_token_id".to_owned(), Value::U32(2)),
    ];
    if let Some(window) = spec.sliding_window {
        out.push(size("attention.sliding_window", window.size));
    }
    if let plimsoll_model::rope::RopeScaling::Linear { factor } = spec.rope.scaling {
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

fn write(path: &Path, metadata: &[(String, Value)], tensors: &[(String, QTensor)]) {
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
fn gguf_name(name: &str) -> String {
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
fn permute(weight: &Tensor, heads: usize) -> Tensor {
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
fn converted(
    spec: &DecoderSpec,
    architecture: &str,
    tensors: &Tensors,
    dtype: GgmlDType,
) -> Vec<(String, QTensor)> {
    let convert = |(name, tensor): (&String, &Tensor)| {
        let tensor = tensor.to_dtype(DType::F32).unwrap();
        let heads = if name.contains("q_proj.weight") {
            spec.num_heads
        } else {
            spec.num_kv_heads
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

fn golden_tensors(name: &str) -> Tensors {
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

fn gguf_architecture(model: &Model) -> &'static str {
    match model.config().architecture {
        Architecture::Mistral => "llama",
        architecture => architecture.model_type(),
    }
}

fn golden_gguf(directory: &Path, name: &str) -> PathBuf {
    let model = load(name, KvCacheDtype::Auto);
    let architecture = gguf_architecture(&model);
    let mut tensors = converted(model.spec(), architecture, &golden_tensors(name), GgmlDType::F32);
    if name.starts_with("llama3") {
        // The converter spells Llama 3's scaling out as divisors of the unscaled frequencies.
        let unscaled = plimsoll_model::rope::RopeSpec {
            scaling: plimsoll_model::rope::RopeScaling::None,
            ..model.spec().rope.clone()
        };
        let dim = model.spec().head_dim;
        let scaled = model.spec().rope.frequencies(dim);
        let factors: Vec<f32> = unscaled
            .frequencies(dim)
            .iter()
            .zip(scaled)
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

fn load_gguf(path: &Path) -> Result<std::sync::Arc<Model>, ModelError> {
    let options = LoadOptions {
        kv_cache_dtype: KvCacheDtype::F32,
        ..Default::default()
    };
    Model::load(path, options, &budget(), &mut |_| ())
}

#[test]
fn converted_models_equal_transformers() {
    let directory = TempDir::new().unwrap();
    // llama.cpp has no window for qwen2.
    for name in MODELS.into_iter().filter(|&name| name != "qwen2-window") {
        let model = load_gguf(&golden_gguf(directory.path(), name)).unwrap();
        for case in golden(name).cases {
            let mut runner = runner(&model, 16, 8);
            let rows: Vec<usize> = (case.prompt.len() - case.last_logits.len()..case.prompt.len()).collect();
            let found = runner
                .logits(&plan(vec![run(1, 0, &case.prompt, &blocks(0..8))]), &rows)
                .unwrap();
            let error = relative_error(&found, &case.last_logits.concat());
            assert!(error < 1e-5, "{name}: relative error {error:e}");
            let found = greedy_alone(&mut runner, &case.prompt, &blocks(0..8), case.greedy.len());
            assert_eq!(found, case.greedy, "{name}");
        }
    }
}

const LLAMA_256: &str = r#"{"architectures": ["LlamaForCausalLM"], "vocab_size": 256, "hidden_size": 256,
    "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5, "max_position_embeddings": 256, "rope_theta": 10000.0}"#;

/// Each type against the same file dequantised to f32; what remains is the rounding of the activations to 15 bits.
#[test]
fn every_quantised_type_loads_and_computes() {
    use GgmlDType::*;
    let directory = TempDir::new().unwrap();
    let config = plimsoll_model::ModelConfig::from_json(Path::new("config.json"), LLAMA_256).unwrap();
    let tensors = random_tensors(&config.spec);
    let meta = metadata("llama", &config.spec);
    for dtype in [
        F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2K, Q3K, Q4K, Q5K, Q6K,
    ] {
        let stored = converted(&config.spec, "llama", &tensors, dtype);
        let widened: Vec<_> = stored
            .iter()
            .map(|(name, tensor)| {
                let tensor = tensor.dequantize(&Device::Cpu).unwrap();
                (name.clone(), QTensor::quantize(&tensor, F32).unwrap())
            })
            .collect();
        let logits = |file: &str, tensors: &[(String, QTensor)]| {
            let path = directory.path().join(file);
            write(&path, &meta, tensors);
            let model = load_gguf(&path).unwrap();
            let prompt: Vec<u32> = (0..40).map(|i| i * 6 % 256).collect();
            let step = plan(vec![run(1, 0, &prompt, &blocks(0..8))]);
            runner(&model, 16, 8).logits(&step, &[0, 20, 39]).unwrap()
        };
        let error = relative_error(&logits("stored.gguf", &stored), &logits("widened.gguf", &widened));
        let tolerance = if matches!(dtype, F32 | F16 | BF16) {
            1e-5
        } else {
            5e-4
        };
        assert!(error < tolerance, "{dtype:?}: relative error {error:e}");
    }
}

fn random_tensors(spec: &DecoderSpec) -> Tensors {
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
    for layer in 0..spec.num_layers {
        let mut add =
            |name: &str, tensor| tensors.insert(format!("model.layers.{layer}.{name}.weight"), tensor);
        add("input_layernorm", ones());
        add("post_attention_layernorm", ones());
        add("self_attn.q_proj", normal(spec.q_size(), spec.hidden_size));
        add("self_attn.k_proj", normal(spec.kv_size(), spec.hidden_size));
        add("self_attn.v_proj", normal(spec.kv_size(), spec.hidden_size));
        add("self_attn.o_proj", normal(spec.hidden_size, spec.q_size()));
        add("mlp.gate_proj", normal(spec.intermediate_size, spec.hidden_size));
        add("mlp.up_proj", normal(spec.intermediate_size, spec.hidden_size));
        add("mlp.down_proj", normal(spec.hidden_size, spec.intermediate_size));
    }
    tensors
}

#[test]
fn metadata_is_handed_out_as_it_is() {
    let directory = TempDir::new().unwrap();
    let file = GgufFile::open(&golden_gguf(directory.path(), "qwen2")).unwrap();
    assert_eq!(
        file.metadata()["general.architecture"],
        MetaValue::Str("qwen2".to_owned())
    );
    assert_eq!(file.metadata()["qwen2.block_count"].as_u64(), Some(2));
    let config = file.config().unwrap();
    assert_eq!(
        (config.architecture, config.eos_token_ids),
        (Architecture::Qwen2, vec![2])
    );
    assert!(config.spec.tied_embeddings && config.spec.qkv_bias);
}

#[test]
fn unsupported_metadata_is_named() {
    let directory = TempDir::new().unwrap();
    let model = load("llama", KvCacheDtype::Auto);
    let tensors = converted(model.spec(), "llama", &golden_tensors("llama"), GgmlDType::F32);
    let text = |text: &str| Value::String(text.to_owned());
    let cases = [
        (
            "general.architecture",
            text("mamba"),
            "`mamba` is not supported; supported are llama, qwen2, qwen3",
        ),
        ("llama.expert_count", Value::U32(8), "llama.expert_count"),
        ("llama.rope.scaling.type", text("yarn"), "yarn"),
        (
            "llama.rope.dimension_count",
            Value::U32(8),
            "llama.rope.dimension_count",
        ),
        (
            "llama.attention.value_length",
            Value::U32(8),
            "llama.attention.value_length",
        ),
        (
            "llama.attention.head_count_kv",
            Value::Array(vec![Value::U32(2)]),
            "llama.attention.head_count_kv",
        ),
        ("llama.attention.head_count_kv", Value::U32(3), "no multiple"),
        ("llama.block_count", Value::U32(0), "num_hidden_layers"),
        ("llama.block_count", Value::U32(1), "blk.1."),
        (
            "llama.block_count",
            Value::U32(3),
            "`blk.2.attn_norm.weight` is missing",
        ),
        (
            "llama.feed_forward_length",
            Value::U32(100),
            "`blk.0.ffn_gate.weight` has shape [96, 64]",
        ),
    ];
    for (key, value, message) in cases {
        let mut metadata = metadata("llama", model.spec());
        metadata.retain(|(existing, _)| existing != key);
        metadata.push((key.to_owned(), value));
        let path = directory.path().join("wrong.gguf");
        write(&path, &metadata, &tensors);
        let error = load_gguf(&path).unwrap_err().to_string();
        assert!(
            error.contains(message),
            "{key}: {error:?} does not say {message:?}"
        );
    }
}

#[test]
fn truncated_files_are_errors() {
    let directory = TempDir::new().unwrap();
    let whole = std::fs::read(golden_gguf(directory.path(), "qwen2")).unwrap();
    let path = directory.path().join("cut.gguf");
    let mut rng = StdRng::seed_from_u64(1);
    // The file may end with padding, so the last cut is a little before the end.
    let cuts = (0..40).chain((0..300).map(|_| rng.random_range(40..whole.len() - 32)));
    for cut in cuts {
        std::fs::write(&path, &whole[..cut]).unwrap();
        let error = load_gguf(&path).map(|_| ()).unwrap_err();
        assert!(error.to_string().contains("cut.gguf"), "cut at {cut}: {error}");
    }
}

/// Damage in the header is found or harmless; it never panics or takes memory that the file could not fill.
#[test]
fn damaged_headers_never_panic() {
    let directory = TempDir::new().unwrap();
    let whole = std::fs::read(golden_gguf(directory.path(), "qwen2")).unwrap();
    let path = directory.path().join("damaged.gguf");
    for seed in 0..400 {
        let mut rng = StdRng::seed_from_u64(seed);
        let mut bytes = whole.clone();
        for _ in 0..rng.random_range(1..4) {
            let at = rng.random_range(0..2500);
            bytes[at] = rng.random();
        }
        std::fs::write(&path, &bytes).unwrap();
        let result = std::panic::catch_unwind(|| load_gguf(&path).map(|_| ()));
        assert!(result.is_ok(), "seed {seed}");
    }
}

#[test]
fn an_alignment_of_zero_is_an_error() {
    let directory = TempDir::new().unwrap();
    let path = directory.path().join("alignment.gguf");
    write(&path, &[("general.alignment".to_owned(), Value::U32(0))], &[]);
    assert!(matches!(GgufFile::open(&path), Err(ModelError::Corrupt { .. })));
}
