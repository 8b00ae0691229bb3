//! Weights of model directories: what is wrong and how it is said.

use std::collections::HashMap;
use std::path::Path;

use crate::common::fp8::{is_fp8, partly_in_floats};
use crate::common::int4::{self, is_int4};
use crate::common::*;
use candle_core::{DType, Device, Tensor};
use plimsoll_core::Executor;
use plimsoll_device::Budget;
use plimsoll_model::{
    Footprint, KvCacheDtype, LoadFormat, LoadOptions, Model, ModelError, OnlineQuantization, ServeAs,
};
use serde_json::{Value, json};
use tempfile::TempDir;

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
        tensors.insert("model.layers.1.self_attn.k_scale".to_owned(), zeros(&[]));
        tensors.insert("model.layers.1.self_attn.v_scale".to_owned(), zeros(&[1]));
    });
    Model::load(directory.path(), LoadOptions::default(), &budget(), &mut |_| ()).unwrap();

    let options = LoadOptions {
        kv_cache_dtype: KvCacheDtype::Fp8,
        ..Default::default()
    };
    let error = Model::load(directory.path(), options, &budget(), &mut |_| ()).unwrap_err();
    assert!(error.to_string().contains("fp8 needs a GPU"), "{error}");
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

const UP: &str = "model.layers.0.mlp.up_proj";

/// What loading a model in eight bits says with one of its tensors changed; `None` removes it.
fn error_with(name: &str, tensor: &str, change: impl FnOnce(&Tensor) -> Option<Tensor>) -> String {
    let directory = copy(name);
    edit(directory.path(), |tensors| {
        let changed = tensors
            .get(tensor)
            .map(change)
            .unwrap_or_else(|| panic!("{name} has no {tensor}"));
        match changed {
            Some(changed) => drop(tensors.insert(tensor.to_owned(), changed)),
            None => drop(tensors.remove(tensor)),
        }
    });
    load_error(directory.path()).to_string()
}

#[test]
fn wrong_scales_are_named() {
    let f32s = |values: &[f32], shape: &[usize]| {
        Tensor::new(values, &Device::Cpu)
            .and_then(|tensor| tensor.reshape(shape))
            .ok()
    };
    let (scale, inverse) = (format!("{UP}.weight_scale"), format!("{UP}.weight_scale_inv"));
    let is_missing = format!("tensor `{scale}` or `{inverse}` is missing");
    for (name, scale) in [
        ("llama-fp8-channel", &scale),
        ("llama-fp8-block", &scale),
        ("qwen2-fp8-tensor", &scale),
        ("qwen3-fp8-block", &inverse),
    ] {
        let error = error_with(name, scale, |_| None);
        assert!(error.starts_with(&is_missing), "{name}: {error}");
        let error = error_with(name, scale, |_| f32s(&[0.5; 6], &[2, 3]));
        assert!(
            error.contains(&format!("`{scale}` has shape [2, 3]")),
            "{name}: {error}"
        );
        for wrong in [f32::NAN, f32::INFINITY, 0.0, -0.5] {
            let error = error_with(name, scale, |stored| {
                let mut values = vec![0.5; stored.elem_count()];
                *values.last_mut().unwrap() = wrong;
                f32s(&values, stored.dims())
            });
            let element = format!("tensor `{scale}`: element");
            assert!(
                error.starts_with(&element) && error.contains("positive"),
                "{name}: {error}"
            );
        }
    }
    // Those that nothing is computed with are looked at too.
    for unneeded in [
        "model.layers.1.self_attn.k_scale",
        "model.layers.1.mlp.up_proj.input_scale",
    ] {
        let error = error_with("qwen2-fp8-tensor", unneeded, |_| None);
        assert!(
            error.contains(unneeded) && error.contains("is missing"),
            "{error}"
        );
        let error = error_with("qwen2-fp8-tensor", unneeded, |_| f32s(&[1.0, 1.0], &[2]));
        assert!(error.contains(&format!("`{unneeded}` has shape [2]")), "{error}");
    }
}

#[test]
fn matrices_are_stored_as_the_configuration_says() {
    let weight = format!("{UP}.weight");
    let error = error_with("llama-fp8-channel", &weight, |stored| {
        stored.to_dtype(DType::BF16).ok()
    });
    assert!(
        error.contains(&format!("`{weight}` has type Bf16; supported are F8_E4M3")),
        "{error}"
    );
    // What the configuration leaves in floats, here and in a model that is not quantised at all.
    let plain = "lm_head.weight";
    let eight_bits = |stored: &Tensor| stored.to_dtype(DType::F8E4M3).ok();
    for name in ["llama-fp8-channel", "llama"] {
        let error = error_with(name, plain, eight_bits);
        assert!(
            error.contains(&format!("`{plain}` has type F8_E4M3")) && error.contains("quantization_config"),
            "{name}: {error}"
        );
    }
    let error = error_with("llama-fp8-channel", "model.norm.weight", eight_bits);
    assert!(error.contains("`model.norm.weight` has type F8_E4M3"), "{error}");
}

/// A scale beside a matrix that is stored in floats, of a layer and outside the layers.
#[test]
fn scales_of_what_is_not_quantised_are_errors() {
    for module in ["model.layers.1.self_attn.q_proj", "lm_head"] {
        let directory = copy("qwen3-fp8-block");
        let scale = format!("{module}.weight_scale_inv");
        let one = Tensor::ones((1, 1), DType::F32, &Device::Cpu).unwrap();
        edit(directory.path(), |tensors| {
            drop(tensors.insert(scale.clone(), one))
        });
        let error = load_error(directory.path());
        assert!(
            matches!(&error, ModelError::UnusedTensors { names } if *names == scale),
            "{error}"
        );
    }
}

/// Of a prompt, its first and last row.
fn logits(path: &Path) -> Vec<f32> {
    let step = plan(vec![run(1, 0, &[3, 14, 15, 92, 65], &blocks(0..1))]);
    let model = Model::load(path, LoadOptions::default(), &budget(), &mut |_| ()).unwrap();
    runner(&model, 16, 8).logits(&step, &[0, 4]).unwrap()
}

/// To the bit, as both are kept in bf16.
#[test]
fn some_of_the_matrices_of_an_input_may_be_in_floats() {
    for name in ["llama-fp8-block", "llama-fp8-channel"] {
        let mixed = partly_in_floats(name);
        assert_eq!(logits(mixed.path()), logits(&golden_path(name)), "{name}");
    }
}

/// The same checkpoints in the words of ModelOpt, whose scales have other shapes and those of keys and values other names.
#[test]
fn exports_of_modelopt_are_those_of_other_tools() {
    for (name, algorithm, excluded) in [
        (
            "qwen2-fp8-tensor",
            "FP8",
            &["lm_head", "model.layers.0.mlp.down_proj"][..],
        ),
        ("llama-fp8-channel", "FP8_PER_CHANNEL_PER_TOKEN", &["lm_head"]),
        ("llama-fp8-block", "fp8_pb_wo", &["lm_head"]),
    ] {
        let directory = copy(name);
        edit(directory.path(), |tensors| {
            let renamed = tensors.drain().map(|(name, tensor)| {
                let name = ["k", "v"].into_iter().fold(name, |name, part| {
                    name.replace(
                        &format!("attn.{part}_scale"),
                        &format!("attn.{part}_proj.{part}_scale"),
                    )
                });
                let tensor = match (tensor.dims(), name.ends_with("weight_scale")) {
                    (&[rows, 1], true) if algorithm != "fp8_pb_wo" => tensor.reshape(rows),
                    (&[rows, columns], true) => tensor.reshape((rows, 1, columns, 1)),
                    _ => Ok(tensor),
                };
                (name, tensor.unwrap())
            });
            *tensors = renamed.collect();
        });
        let path = directory.path().join("config.json");
        let mut config: Value = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
        config.as_object_mut().unwrap().remove("quantization_config");
        std::fs::write(&path, config.to_string()).unwrap();
        let file = json!({"producer": {"name": "modelopt"}, "quantization": {"quant_algo": algorithm,
            "kv_cache_quant_algo": "FP8", "exclude_modules": excluded}});
        std::fs::write(directory.path().join("hf_quant_config.json"), file.to_string()).unwrap();
        assert_eq!(logits(directory.path()), logits(&golden_path(name)), "{name}");
    }
}

/// To the bit, as both are kept in bf16.
#[test]
fn integers_of_four_bits_are_their_dequantised_weights() {
    for name in MODELS.into_iter().filter(|name| is_int4(name)) {
        let directory = copy(name);
        edit(directory.path(), |tensors| {
            let plain = int4::dequantised(name, &tensors.clone().into_iter().collect());
            let kept = plain
                .into_iter()
                .map(|(name, tensor)| match tensors.contains_key(&name) {
                    true => (name, tensor),
                    false => (name, tensor.to_dtype(DType::BF16).unwrap()),
                });
            *tensors = kept.collect();
        });
        let path = directory.path().join("config.json");
        let mut config: Value = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
        config.as_object_mut().unwrap().remove("quantization_config");
        std::fs::write(&path, config.to_string()).unwrap();
        assert_eq!(logits(&golden_path(name)), logits(directory.path()), "{name}");
    }
}

/// Codes that are not numbers are left to the first step, as in every format; nothing else becomes one.
#[test]
fn made_up_quantised_models_compute() {
    for name in MODELS.into_iter().filter(|name| is_fp8(name) || is_int4(name)) {
        let directory = TempDir::new().unwrap();
        std::fs::copy(
            golden_path(name).join("config.json"),
            directory.path().join("config.json"),
        )
        .unwrap();
        let options = LoadOptions {
            format: LoadFormat::Dummy { seed: 1 },
            ..Default::default()
        };
        let model = Model::load(directory.path(), options, &budget(), &mut |_| ()).unwrap();
        let step = plan(vec![run(1, 0, &[1, 2, 3], &blocks(0..1))]);
        let logits = runner(&model, 16, 8).logits(&step, &[2]).unwrap();
        assert!(logits.iter().all(|logit| logit.is_finite()), "{name}");
        let deviation = (logits.iter().map(|x| x * x).sum::<f32>() / logits.len() as f32).sqrt();
        assert!((0.3..3.0).contains(&deviation), "{name}: {deviation}");
    }
}

#[test]
fn a_cpu_quantises_nothing() {
    let quantise = |name: &str| {
        let options = LoadOptions {
            serve_as: ServeAs {
                quantization: Some(OnlineQuantization::Fp8),
                ..ServeAs::default()
            },
            ..Default::default()
        };
        let load = Model::load(&golden_path(name), options.clone(), &budget(), &mut |_| ()).map(|_| ());
        (load, Footprint::read(&golden_path(name), options).map(|_| ()))
    };
    let (load, footprint) = quantise("llama");
    for error in [load.unwrap_err(), footprint.unwrap_err()] {
        assert!(
            error
                .to_string()
                .contains("--quantization: quantising to fp8 needs a GPU"),
            "{error}"
        );
    }
    // What is stored so is kept as it is.
    let (load, footprint) = quantise("llama-fp8-channel");
    load.and(footprint).unwrap();
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
