//! GGUF files: the tiny golden models converted as llama.cpp converts them, every quantised type, broken files.

use std::collections::HashMap;
use std::path::Path;

use crate::common::convert::*;
use crate::common::experts::config_json;
use crate::common::*;
use candle_core::quantized::gguf_file::Value;
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{DType, Device, Tensor};
use plimsoll_core::{MetaValue, Metadata};
use plimsoll_model::{
    Architecture, GgufFile, GgufTensors, HfOverrides, KvCacheDtype, LoadOptions, Model, ModelConfig,
    ModelError, OutputHead,
};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use serde_json::json;
use tempfile::TempDir;

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
    for name in GGUF_MODELS {
        let model = load_gguf(&golden_gguf(directory.path(), name)).unwrap();
        for case in golden(name).cases {
            let mut runner = runner(&model, 16, 8);
            let rows: Vec<usize> = (case.prompt.len() - case.last_logits.len()..case.prompt.len()).collect();
            let found = runner
                .logits(&plan(vec![run(1, 0, &case.prompt, &blocks(0..8))]), &rows)
                .unwrap();
            let error = relative_error(&found, &case.last_logits.concat());
            assert!(error < tolerance(name), "{name}: relative error {error:e}");
            let found = greedy_alone(&mut runner, &case.prompt, &blocks(0..8), case.greedy.len());
            assert_eq!(found, case.greedy, "{name}");
        }
    }
}

/// Heads of v are stored in another order than in safetensors, which no quantised type minds: those of q and k take turns.
#[test]
fn heads_of_states_are_found_in_the_converters_order() {
    let config = json!({"architectures": ["Qwen3_5ForCausalLM"], "vocab_size": 64, "hidden_size": 256,
        "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 1,
        "head_dim": 32, "rms_norm_eps": 1e-6, "max_position_embeddings": 256, "full_attention_interval": 2,
        "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 16,
        "linear_value_head_dim": 128, "tie_word_embeddings": true});
    let directory = TempDir::new().unwrap();
    std::fs::write(directory.path().join("config.json"), config.to_string()).unwrap();
    let config = ModelConfig::from_json(
        Path::new("config.json"),
        &config.to_string(),
        &HfOverrides::default(),
    );
    let spec = config.unwrap().spec;
    let mut tensors = Tensors::new();
    let mut add = |name: &str, shape: &[usize], mean: f32| {
        let deviation = (*shape.last().unwrap() as f32).sqrt().recip();
        let tensor = Tensor::randn(mean, deviation, shape, &Device::Cpu).unwrap();
        tensors.insert(format!("model.{name}"), tensor);
    };
    add("embed_tokens.weight", &[64, 256], 0.0);
    add("norm.weight", &[256], 0.0);
    for layer in 0..2 {
        let mut add = |name: &str, shape: &[usize]| add(&format!("layers.{layer}.{name}"), shape, 0.0);
        add("input_layernorm.weight", &[256]);
        add("post_attention_layernorm.weight", &[256]);
        add("mlp.gate_proj.weight", &[256, 256]);
        add("mlp.up_proj.weight", &[256, 256]);
        add("mlp.down_proj.weight", &[256, 256]);
    }
    add("layers.0.linear_attn.in_proj_qkv.weight", &[64 + 768, 256], 0.0);
    add("layers.0.linear_attn.in_proj_z.weight", &[768, 256], 0.0);
    add("layers.0.linear_attn.in_proj_a.weight", &[6, 256], 0.0);
    add("layers.0.linear_attn.in_proj_b.weight", &[6, 256], 0.0);
    add("layers.0.linear_attn.conv1d.weight", &[64 + 768, 1, 4], 0.0);
    add("layers.0.linear_attn.A_log", &[6], 0.0);
    add("layers.0.linear_attn.dt_bias", &[6], 0.0);
    add("layers.0.linear_attn.norm.weight", &[128], 1.0);
    add("layers.0.linear_attn.out_proj.weight", &[256, 768], 0.0);
    add("layers.1.self_attn.q_proj.weight", &[512, 256], 0.0);
    add("layers.1.self_attn.k_proj.weight", &[32, 256], 0.0);
    add("layers.1.self_attn.v_proj.weight", &[32, 256], 0.0);
    add("layers.1.self_attn.o_proj.weight", &[256, 256], 0.0);
    add("layers.1.self_attn.q_norm.weight", &[32], 0.0);
    add("layers.1.self_attn.k_norm.weight", &[32], 0.0);
    let all: HashMap<String, Tensor> = tensors.clone().into_iter().collect();
    candle_core::safetensors::save(&all, directory.path().join("model.safetensors")).unwrap();
    let logits = |path: &Path| {
        let step = plan(vec![run(1, 0, &[5, 7, 11, 13, 2, 60], &blocks(0..1))]);
        runner(&load_gguf(path).unwrap(), 16, 8)
            .logits(&step, &[0, 3, 5])
            .unwrap()
    };
    let path = directory.path().join("model.gguf");
    // A block of a k-quant has elements of two heads. Another order is off by 1 and more.
    for (dtype, tolerance) in [
        (GgmlDType::F32, 1e-5),
        (GgmlDType::Q8_0, 0.02),
        (GgmlDType::Q6K, 0.02),
    ] {
        let mut tensors = converted(&spec, "qwen35", &tensors, dtype);
        let metadata = metadata("qwen35", &spec);
        let expected = match dtype {
            GgmlDType::F32 => logits(directory.path()),
            _ => {
                write(&path, &metadata, &dequantised(&tensors));
                logits(&path)
            }
        };
        write(&path, &metadata, &tensors);
        let error = relative_error(&logits(&path), &expected);
        assert!(error < tolerance, "{dtype:?}: {error:e}");
        let rates = tensors
            .iter_mut()
            .find(|(name, _)| name == "blk.0.ssm_a")
            .unwrap();
        let zeros = Tensor::zeros(6, DType::F32, &Device::Cpu).unwrap();
        rates.1 = QTensor::quantize(&zeros, GgmlDType::F32).unwrap();
        write(&path, &metadata, &tensors);
        let error = load_gguf(&path).unwrap_err().to_string();
        assert!(error.contains("`blk.0.ssm_a`"), "{error}");
    }
}

/// GGUF files of Qwen3-Next have experts in every layer, which the golden model has not: it is cut behind the second.
#[test]
fn qwen3_next_is_read_as_the_converter_takes_it_apart() {
    let name = "qwen3-next-moe";
    let mut config = config_json(name);
    for (field, value) in [
        ("num_hidden_layers", json!(2)),
        ("layer_types", json!(["linear_attention", "full_attention"])),
        ("mlp_only_layers", json!([])),
    ] {
        config[field] = value;
    }
    let directory = TempDir::new().unwrap();
    std::fs::write(directory.path().join("config.json"), config.to_string()).unwrap();
    let mut tensors = golden_tensors(name);
    tensors.retain(|name, _| !name.starts_with("model.layers.2."));
    let all: HashMap<String, Tensor> = tensors.clone().into_iter().collect();
    candle_core::safetensors::save(&all, directory.path().join("model.safetensors")).unwrap();
    let whole = load_gguf(directory.path()).unwrap();
    let prompt: Vec<u32> = (0..40).map(|i| i * 7 % 160).collect();
    let step = plan(vec![run(1, 0, &prompt, &blocks(0..3))]);
    let expected = runner(&whole, 16, 8).logits(&step, &[0, 20, 39]).unwrap();
    let path = directory.path().join("model.gguf");
    let tensors = converted(whole.spec(), "qwen3next", &tensors, GgmlDType::F32);
    let mut fields = metadata("qwen3next", whole.spec());
    write(&path, &fields, &tensors);
    let model = load_gguf(&path).unwrap();
    assert_eq!(model.config().architecture, Architecture::Qwen3Next);
    let found = runner(&model, 16, 8).logits(&step, &[0, 20, 39]).unwrap();
    let error = relative_error(&found, &expected);
    assert!(error < 1e-5, "relative error {error:e}");
    // Early files do not say which layers attend to all tokens: every fourth, as llama.cpp takes it. Here that is none.
    fields.retain(|(key, _)| key != "qwen3next.full_attention_interval");
    write(&path, &fields, &tensors);
    let error = load_gguf(&path).unwrap_err().to_string();
    assert!(error.contains("linear_attention in all layers"), "{error}");
}

/// Each type against the same file dequantised to f32; what remains is the rounding of the activations to 15 bits.
#[test]
fn every_quantised_type_loads_and_computes() {
    use GgmlDType::*;
    let directory = TempDir::new().unwrap();
    let config =
        plimsoll_model::ModelConfig::from_json(Path::new("config.json"), LLAMA_256, &HfOverrides::default())
            .unwrap();
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

#[test]
fn metadata_is_handed_out_as_it_is() {
    let directory = TempDir::new().unwrap();
    let file = GgufFile::open(&golden_gguf(directory.path(), "qwen2")).unwrap();
    assert_eq!(
        file.metadata()["general.architecture"],
        MetaValue::Str("qwen2".to_owned())
    );
    assert_eq!(file.metadata()["qwen2.block_count"].as_u64(), Some(2));
    let config = file.config(&HfOverrides::default()).unwrap();
    assert_eq!(
        (config.architecture, config.eos_token_ids),
        (Architecture::Qwen2, vec![2])
    );
    assert!(config.spec.head == OutputHead::Tied && config.spec.layers[0].attention().unwrap().qkv_bias);
}

/// What files of Gemma 2 and 3 do not say, as llama.cpp takes it.
#[test]
fn absent_metadata_means_what_it_means_in_llama_cpp() {
    let gemma = |name: &str, layers: u64, more: &[(&str, MetaValue)]| {
        let sizes = [
            ("block_count", layers),
            ("context_length", 131_072),
            ("embedding_length", 5376),
            ("feed_forward_length", 21_504),
            ("attention.head_count", 32),
            ("attention.head_count_kv", 16),
            ("attention.key_length", 128),
            ("attention.value_length", 128),
            ("vocab_size", 262_144),
        ];
        let eps = ("attention.layer_norm_rms_epsilon", MetaValue::Float(1e-6));
        let sizes = sizes.map(|(key, size)| (key, MetaValue::UInt(size)));
        let all = sizes.iter().chain([&eps]).chain(more);
        let mut metadata: Metadata = all
            .map(|(key, value)| (format!("{name}.{key}"), value.clone()))
            .collect();
        let name = MetaValue::Str(name.to_owned());
        metadata.insert("general.architecture".to_owned(), name);
        let path = Path::new("model.gguf");
        ModelConfig::from_gguf(path, &metadata, GgufTensors::default(), &HfOverrides::default()).unwrap()
    };
    let window = ("attention.sliding_window", MetaValue::UInt(1024));
    let base = ("rope.freq_base", MetaValue::Float(1e6));
    let big = gemma("gemma3", 62, &[window.clone(), base.clone()]).spec;
    for (index, attention) in big.attention().enumerate() {
        let slides = (index + 1) % 6 != 0;
        assert_eq!(attention.window, slides.then_some(1024), "layer {index}");
        let theta = if slides { 1e4 } else { 1e6 };
        assert_eq!(attention.rope.as_ref().unwrap().theta, theta, "layer {index}");
        // 27B's heads have 128 elements, but 5376 / 32 count.
        assert_eq!(attention.scale, 168_f32.sqrt().recip());
    }
    let small = gemma("gemma3", 18, &[window, base.clone()]).spec;
    assert_eq!(small.layers[0].attention().unwrap().scale, 128_f32.sqrt().recip());
    let full = gemma("gemma3", 18, &[base]).spec;
    assert_eq!(full.ropes().len(), 1);
    assert!(full.attention().all(|attention| attention.window.is_none()));

    let second = gemma("gemma2", 46, &[]).spec;
    assert_eq!(second.logit_soft_cap, Some(30.0));
    for (index, attention) in second.attention().enumerate() {
        let slides = index % 2 == 0;
        assert_eq!(attention.window, slides.then_some(4096), "layer {index}");
        assert_eq!(attention.soft_cap, Some(50.0));
        assert_eq!(attention.rope.as_ref().unwrap().theta, 1e4);
        assert_eq!(attention.scale, 168_f32.sqrt().recip());
    }
    let cap = ("attn_logit_softcapping", MetaValue::Float(7.0));
    let small = gemma("gemma2", 26, &[cap]).spec;
    let attention = small.layers[1].attention().unwrap();
    assert_eq!(
        (attention.soft_cap, attention.scale),
        (Some(7.0), 128_f32.sqrt().recip())
    );
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
        (
            "llama.expert_count",
            Value::U32(8),
            "`llama.expert_used_count` is missing",
        ),
        (
            "llama.final_logit_softcapping",
            Value::F32(30.0),
            "llama.final_logit_softcapping",
        ),
        ("llama.rope.scaling.type", text("dynamic"), "`dynamic`"),
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

/// What a header may hold is bounded, and the message names what holds too much.
#[test]
fn headers_out_of_bounds_are_errors_that_name_the_field() {
    let directory = TempDir::new().unwrap();
    let path = directory.path().join("bounds.gguf");
    let text = |text: &str| [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat();
    let start = |version: u32, tensors: u64, fields: u64| {
        let counts = [tensors.to_le_bytes(), fields.to_le_bytes()].concat();
        [b"GGUF".as_slice(), &version.to_le_bytes(), &counts].concat()
    };
    let field = |kind: u32, value: &[u8]| [&text("a.field"), &kind.to_le_bytes()[..], value].concat();
    let array = |kind: u32, len: u64| [&kind.to_le_bytes()[..], &len.to_le_bytes()].concat();
    let tensor = |dimensions: &[u64], kind: u32, offset: u64| {
        let count = (dimensions.len() as u32).to_le_bytes();
        let sizes: Vec<u8> = dimensions.iter().flat_map(|size| size.to_le_bytes()).collect();
        [
            &text("a.tensor"),
            &count[..],
            &sizes,
            &kind.to_le_bytes(),
            &offset.to_le_bytes(),
        ]
        .concat()
    };
    let nested: Vec<u8> = (0..9).flat_map(|_| array(9, 1)).collect();
    let one = field(0, &[1]);
    let cases = [
        (start(1, 0, 0), "GGUF version 1 is not supported"),
        (start(3, 0, u64::MAX), "fields, more than the 131072"),
        (start(3, 1 << 40, 0), "tensors, more than the 131072"),
        (
            [start(3, 0, 1), field(99, &[])].concat(),
            "`a.field` has the unknown type 99",
        ),
        (
            [start(3, 0, 1), field(7, &[2])].concat(),
            "`a.field` is a flag of value 2",
        ),
        (
            [start(3, 0, 1), field(8, &u64::MAX.to_le_bytes())].concat(),
            "ends within the field `a.field`",
        ),
        (
            [start(3, 0, 1), field(9, &array(0, 1 << 23))].concat(),
            "`a.field` has 8388608 elements",
        ),
        (
            [start(3, 0, 1), field(9, &nested)].concat(),
            "`a.field` is an array of arrays",
        ),
        (
            [start(3, 0, 2), one.clone(), one].concat(),
            "the field `a.field` is there twice",
        ),
        (
            [start(3, 1, 0), tensor(&[], 0, 0)].concat(),
            "`a.tensor` has 0 dimensions",
        ),
        (
            [start(3, 1, 0), tensor(&[1; 5], 0, 0)].concat(),
            "`a.tensor` has 5 dimensions",
        ),
        (
            [start(3, 1, 0), tensor(&[1], 4, 0)].concat(),
            "tensor `a.tensor` has type ggml type 4",
        ),
        (
            [start(3, 1, 0), tensor(&[u64::MAX, 2], 1, 0)].concat(),
            "`a.tensor` cannot have shape",
        ),
        (
            [start(3, 1, 0), tensor(&[16], 2, 0)].concat(),
            "`a.tensor` cannot have shape [16] as Q4_0",
        ),
        (
            [start(3, 1, 0), tensor(&[1], 0, u64::MAX)].concat(),
            "`a.tensor` lies beyond the end",
        ),
        (
            [start(3, 2, 0), tensor(&[1], 0, 0), tensor(&[1], 0, 0)].concat(),
            "the tensor `a.tensor` is there twice",
        ),
    ];
    for (bytes, message) in cases {
        std::fs::write(&path, &bytes).unwrap();
        let error = GgufFile::open(&path).unwrap_err().to_string();
        assert!(error.contains(message), "{error:?} does not say {message:?}");
        assert!(error.contains("bounds.gguf"), "{error}");
    }
}
