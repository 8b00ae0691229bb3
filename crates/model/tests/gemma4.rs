//! Gemma 4: what its checkpoints have beside what is read, what its layers keep, and what a GPU asks of it.

use std::collections::HashMap;
use std::path::Path;

use candle_core::{DType, Device, Tensor};
use plimsoll_core::{BlockSize, CacheKind, Component};
use plimsoll_model::{Footprint, LoadFormat, LoadOptions, Model, ModelError};
use tempfile::TempDir;

use crate::common::configs::{config_json, parse};
use crate::common::{blocks, budget, golden_path, plan, run, runner, state_config};
use crate::experts::{bare, on_a_gpu};

const MODELS: [&str; 3] = ["gemma4", "gemma4-moe", "gemma4-shared"];

/// The model with what `change` makes of its tensors.
fn edited(name: &str, change: impl FnOnce(&mut HashMap<String, Tensor>)) -> TempDir {
    let directory = TempDir::new().unwrap();
    let from = golden_path(name);
    std::fs::copy(from.join("config.json"), directory.path().join("config.json")).unwrap();
    let mut tensors = candle_core::safetensors::load(from.join("model.safetensors"), &Device::Cpu).unwrap();
    change(&mut tensors);
    candle_core::safetensors::save(&tensors, directory.path().join("model.safetensors")).unwrap();
    directory
}

fn load(directory: &Path) -> Result<std::sync::Arc<Model>, ModelError> {
    Model::load(directory, LoadOptions::default(), &budget(), &mut |_| ())
}

fn zeros(shape: &[usize]) -> Tensor {
    Tensor::zeros(shape, DType::BF16, &Device::Cpu).unwrap()
}

/// Published checkpoints store projections of layers that share keys and values; transformers does not read them.
#[test]
fn projections_of_layers_that_share_are_not_read() {
    let of_layer =
        |layer: usize, part: &str| format!("model.language_model.layers.{layer}.self_attn.{part}.weight");
    let directory = edited("gemma4-shared", |tensors| {
        for part in ["k_proj", "v_proj"] {
            tensors.insert(of_layer(4, part), zeros(&[64, 64]));
        }
        tensors.insert(of_layer(4, "k_norm"), zeros(&[64]));
    });
    let step = plan(vec![run(1, 0, &[9, 8, 7], &blocks(0..1))]);
    let logits = |directory: &Path| {
        runner(&load(directory).unwrap(), 16, 8)
            .logits(&step, &[2])
            .unwrap()
    };
    assert_eq!(logits(directory.path()), logits(&golden_path("gemma4-shared")));
    for (layer, part) in [(1, "k_extra"), (4, "o_extra")] {
        let directory = edited("gemma4-shared", |tensors| {
            tensors.insert(of_layer(layer, part), zeros(&[64, 64]));
        });
        let error = load(directory.path()).unwrap_err().to_string();
        assert!(error.contains(&of_layer(layer, part)), "{error}");
    }
}

#[test]
fn wrong_tensors_are_named() {
    for (model, name, shape) in [
        ("gemma4", "model.layers.2.layer_scalar", None),
        (
            "gemma4",
            "model.layers.1.self_attn.k_norm.weight",
            Some(&[64][..]),
        ),
        ("gemma4", "model.layers.0.post_feedforward_layernorm.weight", None),
        ("gemma4-moe", "model.layers.1.router.proj.weight", Some(&[4, 64])),
        ("gemma4-moe", "model.layers.1.router.scale", None),
        ("gemma4-moe", "model.layers.1.router.per_expert_scale", Some(&[6])),
        (
            "gemma4-moe",
            "model.layers.2.experts.gate_up_proj",
            Some(&[4, 64, 64]),
        ),
        (
            "gemma4-moe",
            "model.layers.2.post_feedforward_layernorm_2.weight",
            None,
        ),
        (
            "gemma4-shared",
            "model.language_model.embed_tokens_per_layer.weight",
            Some(&[160, 40]),
        ),
        (
            "gemma4-shared",
            "model.language_model.layers.3.per_layer_projection.weight",
            None,
        ),
    ] {
        let directory = edited(model, |tensors| {
            tensors.remove(name).unwrap();
            if let Some(shape) = shape {
                tensors.insert(name.to_owned(), zeros(shape));
            }
        });
        let error = load(directory.path()).unwrap_err();
        let found = match &error {
            ModelError::MissingTensor { name, .. } => shape.is_none().then_some(name),
            ModelError::MisshapenTensor { name, .. } => shape.is_some().then_some(name),
            _ => None,
        };
        let parts: Vec<&str> = name.splitn(3, '.').collect();
        assert!(
            found.is_some_and(|found| found.contains(parts[2])),
            "{name}: {error}"
        );
    }
}

/// Three of six layers read what others keep, so they have no place in the cache: it takes what the others need.
#[test]
fn layers_that_share_keep_nothing() {
    let spec = parse(&config_json("gemma4-shared")).unwrap().spec;
    let groups = spec.cache_groups(BlockSize::default());
    let groups: Vec<_> = groups
        .iter()
        .map(|group| (group.kind, group.layers, group.columns, group.sharing_layers))
        .collect();
    assert_eq!(
        groups,
        [(CacheKind::Full, 1, 2, 1), (CacheKind::Window(11), 2, 2, 2)]
    );
    // Keys and values of two heads of 64, and of one of 128.
    assert_eq!(spec.kv_bytes_per_token(2), 2 * 2 * (64 + 64 + 128));
    let model = load(&golden_path("gemma4-shared")).unwrap();
    let budget = budget();
    let config = state_config(16, 8);
    let limits = crate::common::LIMITS;
    let _state = model.build_state(&config, &limits, &budget, &mut || {}).unwrap();
    let held = budget.meters().by_component.get(Component::Kv);
    assert_eq!(held, 8 * 16 * model.kv_bytes_per_token());
}

/// What its kernels do not do is named before weights are read.
#[test]
fn a_gpu_asks_for_sizes_of_its_kernels() {
    for name in MODELS {
        on_a_gpu(&bare(&config_json(name))).unwrap();
    }
    type Change = fn(&mut serde_json::Value);
    let cases: [(&str, Change, &str); 4] = [
        (
            "gemma4",
            |config| config["per_layer_config"]["1"]["head_dim"] = 80.into(),
            "`head_dim` is 80",
        ),
        (
            "gemma4",
            |config| {
                config["head_dim"] = 128.into();
                config["num_key_value_heads"] = 1.into();
                let full = serde_json::json!({"head_dim": 96, "num_key_value_heads": 1});
                config["per_layer_config"] = serde_json::json!({"1": full, "3": full});
            },
            "`num_key_value_heads x head_dim` is",
        ),
        (
            "gemma4-moe",
            |config| config["moe_intermediate_size"] = 36.into(),
            "`moe_intermediate_size` is 36",
        ),
        (
            "gemma4-shared",
            |config| config["text_config"]["hidden_size_per_layer_input"] = 12.into(),
            "`hidden_size_per_layer_input` is 12",
        ),
    ];
    for (name, change, said) in cases {
        let mut config = config_json(name);
        change(&mut config);
        let error = on_a_gpu(&bare(&config)).unwrap_err().to_string();
        assert!(
            error.contains(said) && error.contains("--device cpu"),
            "{name}: {error}"
        );
    }
}

#[test]
fn made_up_weights_compute() {
    for name in MODELS {
        let directory = bare(&config_json(name));
        let options = LoadOptions {
            format: LoadFormat::Dummy { seed: 1 },
            ..Default::default()
        };
        let told = Footprint::read(directory.path(), options.clone()).unwrap();
        let budget = budget();
        let model = Model::load(directory.path(), options, &budget, &mut |_| ()).unwrap();
        assert_eq!(budget.meters().reserved, told.weights_bytes(), "{name}");
        let step = plan(vec![run(1, 0, &[1, 2, 3], &blocks(0..1))]);
        let logits = runner(&model, 16, 8).logits(&step, &[2]).unwrap();
        let deviation = (logits.iter().map(|x| x * x).sum::<f32>() / logits.len() as f32).sqrt();
        assert!((0.3..6.0).contains(&deviation), "{name}: {deviation}");
    }
}
