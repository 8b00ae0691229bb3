//! Model directories: what is supported, what is wrong and how it is said.

mod common;

use std::collections::HashMap;
use std::path::Path;

use candle_core::{DType, Device, Tensor};
use common::*;
use plimsoll_core::Executor;
use plimsoll_device::Budget;
use plimsoll_model::rope::{RopeScaling, RopeSpec};
use plimsoll_model::{
    Architecture, HfOverrides, KvCacheDtype, LoadFormat, LoadOptions, Model, ModelConfig, ModelError,
    OutputHead,
};
use serde_json::{Value, json};
use tempfile::TempDir;

fn config_json(name: &str) -> Value {
    serde_json::from_str(&std::fs::read_to_string(golden_path(name).join("config.json")).unwrap()).unwrap()
}

fn parse(config: &Value) -> Result<ModelConfig, ModelError> {
    ModelConfig::from_json(
        Path::new("config.json"),
        &config.to_string(),
        &HfOverrides::default(),
    )
}

/// `config` with these fields set; null removes.
fn with(mut config: Value, fields: Value) -> Value {
    for (field, value) in fields.as_object().unwrap() {
        match value {
            Value::Null => config.as_object_mut().unwrap().remove(field),
            value => config
                .as_object_mut()
                .unwrap()
                .insert(field.clone(), value.clone()),
        };
    }
    config
}

/// A copy of a golden model to be damaged.
fn copy(name: &str) -> TempDir {
    let directory = TempDir::new().unwrap();
    for entry in std::fs::read_dir(golden_path(name)).unwrap() {
        let path = entry.unwrap().path();
        std::fs::copy(&path, directory.path().join(path.file_name().unwrap())).unwrap();
    }
    directory
}

fn load_error(directory: &Path) -> ModelError {
    let budget = budget();
    let error = Model::load(directory, LoadOptions::default(), &budget, &mut |_| ())
        .map(|_| ())
        .unwrap_err();
    assert_eq!(budget.meters().reserved, 0);
    error
}

#[test]
fn unsupported_fields_are_named() {
    let llama = |fields| with(config_json("llama"), fields);
    let qwen2 = |fields| with(config_json("qwen2-window"), fields);
    let mistral = |fields| with(config_json("mistral-window"), fields);
    let rope = |rope: Value| {
        with(
            config_json("llama"),
            json!({"rope_parameters": null, "rope_scaling": rope}),
        )
    };
    let cases = [
        (
            llama(json!({"architectures": ["MambaForCausalLM"]})),
            "`MambaForCausalLM` is not supported",
        ),
        (
            llama(json!({"architectures": ["MambaForCausalLM"]})),
            "LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM",
        ),
        (
            llama(json!({"architectures": null, "model_type": "mamba"})),
            "`mamba`",
        ),
        (
            llama(json!({"architectures": null, "model_type": null})),
            "model_type",
        ),
        (llama(json!({"hidden_size": null})), "hidden_size"),
        (
            llama(json!({"hidden_size": "large"})),
            "`hidden_size`: invalid type",
        ),
        (llama(json!({"num_key_value_heads": 3})), "num_key_value_heads"),
        (llama(json!({"num_attention_heads": 0})), "num_attention_heads"),
        (llama(json!({"head_dim": 15})), "head_dim"),
        (llama(json!({"head_dim": 512})), "head_dim"),
        (llama(json!({"vocab_size": 1u64 << 40})), "vocab_size"),
        (llama(json!({"rms_norm_eps": 0.0})), "rms_norm_eps"),
        (llama(json!({"hidden_act": "gelu"})), "hidden_act"),
        (llama(json!({"attention_bias": true})), "attention_bias"),
        (llama(json!({"mlp_bias": true})), "mlp_bias"),
        (
            llama(json!({"quantization_config": {"quant_method": "gptq"}})),
            "quantization_config",
        ),
        (llama(json!({"num_local_experts": 8})), "num_local_experts"),
        (llama(json!({"sliding_window": 64})), "sliding_window"),
        (
            llama(json!({"partial_rotary_factor": 0.5})),
            "partial_rotary_factor",
        ),
        (llama(json!({"dtype": "float8_e4m3fn"})), "dtype"),
        (
            rope(json!({"type": "dynamic", "factor": 2.0})),
            "rope_scaling.rope_type",
        ),
        (
            rope(json!({"rope_type": "yarn", "factor": 2.0})),
            "rope_scaling.original_max_position_embeddings",
        ),
        (
            rope(json!({"rope_type": "default", "mrope_section": [1]})),
            "`rope_scaling`: unknown field",
        ),
        (rope(json!({"rope_type": "linear"})), "rope_scaling.factor"),
        (
            rope(json!({"rope_type": "llama3", "factor": 8.0})),
            "rope_scaling.low_freq_factor",
        ),
        (qwen2(json!({"max_window_layers": 0})), "layer_types[0]"),
        (mistral(json!({"sliding_window": 0})), "sliding_window"),
    ];
    for (config, message) in cases {
        let error = parse(&config).unwrap_err().to_string();
        assert!(error.contains(message), "{error:?} does not say {message:?}");
    }
}

#[test]
fn both_generations_of_transformers_configs_mean_the_same() {
    let new = config_json("llama3-tied-bf16");
    let mut scaling = new["rope_parameters"].clone();
    let theta = scaling.as_object_mut().unwrap().remove("rope_theta").unwrap();
    let fields = json!({"rope_parameters": null, "rope_scaling": scaling, "rope_theta": theta, "dtype": null,
        "torch_dtype": "bfloat16"});
    let old = with(new.clone(), fields);
    let parsed = parse(&new).unwrap();
    assert_eq!(parse(&old).unwrap(), parsed);
    let scaling = RopeScaling::Llama3 {
        factor: 8.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_context: 32.0,
    };
    let rope = |theta, scaling| RopeSpec {
        theta,
        rotary_dim: parsed.spec.layers[0].attention().head_dim,
        scaling,
        query_scale: None,
    };
    assert_eq!(parsed.spec.ropes(), [&rope(1000.0, scaling)]);

    // Llama 2's and SmolLM2's own files.
    let plain = with(
        new,
        json!({"rope_parameters": null, "rope_interleaved": false, "is_llama_config": true}),
    );
    let plain = parse(&plain).unwrap().spec;
    assert_eq!(plain.ropes(), [&rope(10_000.0, RopeScaling::None)]);
}

#[test]
fn absent_fields_mean_what_they_mean_in_transformers() {
    let parsed = |name, fields| parse(&with(config_json(name), fields)).unwrap();
    let mistral = parsed("mistral-window", json!({"sliding_window": null}));
    let windows = |config: &ModelConfig| {
        config
            .spec
            .attention()
            .map(|attention| attention.window)
            .collect::<Vec<_>>()
    };
    assert!(windows(&mistral).iter().all(|&window| window == Some(4096)));
    let null = config_json("mistral-window")
        .to_string()
        .replace(r#""sliding_window":11"#, r#""sliding_window":null"#);
    let mistral = ModelConfig::from_json(Path::new("config.json"), &null, &HfOverrides::default()).unwrap();
    assert_eq!(mistral.architecture, Architecture::Mistral);
    assert!(windows(&mistral).iter().all(Option::is_none));
    let attention = |name, fields| parsed(name, fields).spec.layers[0].attention().clone();
    assert_eq!(attention("qwen3-f16", json!({"head_dim": null})).head_dim, 128);
    assert_eq!(attention("llama", json!({"head_dim": null})).head_dim, 16);
    assert_eq!(
        attention("llama", json!({"num_key_value_heads": null})).kv_heads,
        4
    );
    assert_eq!(
        parsed("qwen2", json!({"tie_word_embeddings": null})).spec.head,
        OutputHead::Own
    );
    let off = parsed(
        "qwen2-window",
        json!({"use_sliding_window": false, "layer_types": null}),
    );
    assert!(windows(&off).iter().all(Option::is_none));
}

/// Loads the model's tensors, lets `change` have them, and stores them again.
fn edit(directory: &Path, change: impl FnOnce(&mut HashMap<String, Tensor>)) {
    let path = directory.join("model.safetensors");
    let mut tensors = candle_core::safetensors::load(&path, &Device::Cpu).unwrap();
    change(&mut tensors);
    std::fs::remove_file(&path).unwrap();
    candle_core::safetensors::save(&tensors, path).unwrap();
}

#[test]
fn wrong_tensors_are_named() {
    let zeros = |shape: &[usize]| Tensor::zeros(shape, DType::F32, &Device::Cpu).unwrap();
    let name = "model.layers.1.mlp.down_proj.weight";

    let directory = copy("llama");
    edit(directory.path(), |tensors| drop(tensors.remove(name)));
    let error = load_error(directory.path());
    assert!(
        matches!(&error, ModelError::MissingTensor { name: missing, .. } if missing == name),
        "{error}"
    );

    let directory = copy("llama");
    edit(directory.path(), |tensors| {
        drop(tensors.insert(name.to_owned(), zeros(&[64, 95])))
    });
    let error = load_error(directory.path());
    let text = format!("tensor `{name}` has shape [64, 95], the configuration implies [64, 96]");
    assert_eq!(error.to_string(), text);

    let directory = copy("llama");
    let integers = Tensor::zeros(&[64, 96], DType::U8, &Device::Cpu).unwrap();
    edit(directory.path(), |tensors| {
        drop(tensors.insert(name.to_owned(), integers))
    });
    let error = load_error(directory.path());
    assert!(
        matches!(&error, ModelError::TensorType { name: wrong, .. } if wrong == name),
        "{error}"
    );

    let directory = copy("llama");
    let bias = "model.layers.0.self_attn.q_proj.bias";
    edit(directory.path(), |tensors| {
        drop(tensors.insert(bias.to_owned(), zeros(&[64])))
    });
    let error = load_error(directory.path());
    assert!(
        matches!(&error, ModelError::UnusedTensors { names } if names == bias),
        "{error}"
    );

    // What old checkpoints hold besides, and what plays no role.
    let directory = copy("llama");
    edit(directory.path(), |tensors| {
        tensors.insert(
            "model.layers.0.self_attn.rotary_emb.inv_freq".to_owned(),
            zeros(&[8]),
        );
        tensors.insert("value_head.weight".to_owned(), zeros(&[1, 64]));
    });
    Model::load(directory.path(), LoadOptions::default(), &budget(), &mut |_| ()).unwrap();
}

#[test]
fn broken_files_are_errors() {
    let missing = load_error(Path::new("/nonexistent/model.gguf")).to_string();
    assert!(missing.contains("/nonexistent/model.gguf"), "{missing}");

    let directory = copy("llama");
    let weights = directory.path().join("model.safetensors");
    let whole = std::fs::read(&weights).unwrap();
    for cut in [0, 7, 8, 100, 2000, whole.len() / 2, whole.len() - 1] {
        std::fs::write(&weights, &whole[..cut]).unwrap();
        let error = load_error(directory.path());
        assert!(
            matches!(error, ModelError::Corrupt { .. }),
            "cut at {cut}: {error}"
        );
    }
    std::fs::remove_file(&weights).unwrap();
    assert!(matches!(
        load_error(directory.path()),
        ModelError::NotAModel { .. }
    ));
    std::fs::write(directory.path().join("config.json"), "{").unwrap();
    assert!(matches!(load_error(directory.path()), ModelError::Config { .. }));
    std::fs::remove_file(directory.path().join("config.json")).unwrap();
    assert!(matches!(load_error(directory.path()), ModelError::Io { .. }));
}

#[test]
fn broken_indices_are_errors() {
    let directory = copy("qwen3-sharded");
    let path = directory.path().join("model.safetensors.index.json");
    let whole = std::fs::read_to_string(&path).unwrap();
    let shard = |number| format!("model-0000{number}-of-00003.safetensors");

    std::fs::write(&path, whole.replace(&shard(2), "../../etc/passwd")).unwrap();
    assert!(
        load_error(directory.path())
            .to_string()
            .contains("is not a file name")
    );
    std::fs::write(&path, whole.replace(&shard(2), &shard(1))).unwrap();
    assert!(
        load_error(directory.path())
            .to_string()
            .contains("of the index is missing")
    );
    std::fs::write(&path, &whole).unwrap();
    std::fs::remove_file(directory.path().join(shard(3))).unwrap();
    assert!(load_error(directory.path()).to_string().contains(&shard(3)));
}

#[test]
fn dummy_weights_need_a_configuration_alone() {
    let directory = TempDir::new().unwrap();
    std::fs::copy(
        golden_path("qwen2").join("config.json"),
        directory.path().join("config.json"),
    )
    .unwrap();
    let logits = |seed| {
        let options = LoadOptions {
            format: LoadFormat::Dummy { seed },
            ..Default::default()
        };
        let model = Model::load(directory.path(), options, &budget(), &mut |_| ()).unwrap();
        let mut runner = runner(&model, 16, 8);
        let mut step = run(1, 0, &[1, 2, 3], &blocks(0..1));
        step.sample = Some(greedy_spec(0));
        runner.execute(&plan(vec![step.clone()])).unwrap();
        runner.logits(&plan(vec![step]), &[2]).unwrap()
    };
    let first = logits(1);
    assert_eq!(logits(1), first);
    assert_ne!(logits(2), first);
    assert!(first.iter().all(|logit| logit.is_finite()));
}

/// The answer to a model too large is the component and the numbers, before anything is taken.
#[test]
fn weights_that_do_not_fit_are_a_typed_error() {
    let budget = Budget::new(100_000);
    let options = LoadOptions {
        kv_cache_dtype: KvCacheDtype::F16,
        ..Default::default()
    };
    let error = Model::load(&golden_path("llama"), options, &budget, &mut |_| ())
        .map(|_| ())
        .unwrap_err();
    let ModelError::Oom(oom) = error else {
        panic!("{error}")
    };
    assert_eq!(oom.component, plimsoll_core::Component::Weights);
    assert!(oom.meters.free < oom.requested);
    assert_eq!(budget.meters().reserved, 0);
}
