//! Models with experts: what configurations mean, how experts are stored, and that memory does not depend on where tokens go.

use std::collections::HashMap;
use std::path::Path;

use crate::common::convert::*;
use crate::common::experts::{adversarial, adversarial_with, config_json, edited, misrouted};
use crate::common::*;
use candle_core::quantized::{GgmlDType, gguf_file};
use candle_core::{DType, Device, Tensor};
use plimsoll_core::{BlockSize, Executor, Scratch, StepLimits};
use plimsoll_model::cuda::{GpuFootprint, GpuOptions, GpuStateShape};
use plimsoll_model::{
    Footprint, HfOverrides, KvCacheDtype, LoadFormat, LoadOptions, Mlp, Model, ModelConfig, ModelError,
    ServeAs, StepSize,
};
use serde_json::{Value, json};
use tempfile::TempDir;

fn parse(config: &Value) -> Result<ModelConfig, ModelError> {
    ModelConfig::from_json(
        Path::new("config.json"),
        &config.to_string(),
        &HfOverrides::default(),
    )
}

/// Files as Hugging Face publishes them; counts of weights are those of the models' cards. Gemma 4's is put together from the shapes
/// that public repositories quote.
#[test]
fn published_files_mean_what_they_say() {
    let expected = "
        Qwen3-30B-A3B => Qwen3Moe: 48 of 48 layers 8 of 128 x 768, Chosen; 30532122624 weights, 3353032704 for a token
        Qwen3.6-35B-A3B => Qwen3_5Moe: 40 of 40 layers 8 of 256 x 512, Chosen, shared 512; 34660610688 weights, 3454988928 for a token
        Qwen1.5-MoE-A2.7B => Qwen2Moe: 24 of 24 layers 4 of 60 x 1408, All, shared 5632; 14315784192 weights, 2689173504 for a token
        Mixtral-8x7B-Instruct-v0.1 => Mixtral: 32 of 32 layers 2 of 8 x 14336, Chosen; 46702792704 weights, 12879925248 for a token
        gemma-4-26B-A4B-it => Gemma4: 30 of 30 layers 8 of 128 x 704, Chosen; 25233141790 weights, 3822530590 for a token
        gpt-oss-20b => GptOss, mxfp4: 24 of 24 layers 4 of 32 x 2880, Chosen; 20914757184 weights, 4187440704 for a token
    ";
    let cases: Vec<_> = expected
        .lines()
        .filter_map(|line| line.trim().split_once(" => "))
        .collect();
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/configs-moe");
    assert_eq!(directory.read_dir().unwrap().count(), cases.len());
    for (name, expected) in cases {
        let path = directory.join(format!("{name}.json"));
        let text = std::fs::read_to_string(&path).unwrap();
        let config = ModelConfig::from_json(&path, &text, &HfOverrides::default())
            .unwrap_or_else(|error| panic!("{name}: {error}"));
        let spec = &config.spec;
        let moe = |mlp: &Mlp| match mlp {
            Mlp::Dense(_) => None,
            Mlp::Moe(moe) | Mlp::Both(_, moe) => Some(moe.clone()),
        };
        let all: Vec<_> = spec.layers.iter().filter_map(|layer| moe(&layer.mlp)).collect();
        let first = &all[0];
        assert!(all.iter().all(|moe| moe == first), "{name}");
        let quantization = spec
            .quantization
            .name()
            .map_or(String::new(), |name| format!(", {name}"));
        let shared = &first.shared;
        let shared = shared.map_or(String::new(), |shared| {
            format!(", shared {}", shared.intermediate_size)
        });
        let found = format!(
            "{:?}{quantization}: {} of {} layers {} of {} x {}, {:?}{shared}; {} weights, {} for a token",
            config.architecture,
            all.len(),
            spec.layers.len(),
            first.top_k,
            first.experts,
            first.intermediate_size,
            first.softmax,
            spec.num_parameters(),
            spec.num_active_parameters(),
        );
        assert_eq!(found, expected, "{name}");
    }
}

/// Before weights are read.
#[test]
fn wrong_configurations_are_named() {
    for (name, fields, message) in [
        (
            "mixtral",
            json!({"num_experts_per_tok": 6}),
            "`num_experts_per_tok` is 6, which is not supported; 1 to 5",
        ),
        (
            "mixtral",
            json!({"num_experts_per_tok": 0}),
            "`num_experts_per_tok` is 0",
        ),
        (
            "mixtral",
            json!({"num_local_experts": 0}),
            "`num_local_experts` is 0, which is not supported; 1 to 1024",
        ),
        (
            "mixtral",
            json!({"num_local_experts": 5000}),
            "`num_local_experts` is 5000",
        ),
        (
            "mixtral",
            json!({"num_experts": 4}),
            "`num_experts` is 4, and `num_local_experts` 5",
        ),
        (
            "mixtral",
            json!({"hidden_act": "gelu"}),
            "`hidden_act` is \"gelu\"",
        ),
        (
            "mixtral",
            json!({"scoring_func": "sigmoid"}),
            "`scoring_func` is \"sigmoid\"",
        ),
        (
            "qwen3-moe",
            json!({"moe_intermediate_size": 0}),
            "`moe_intermediate_size` is 0",
        ),
        (
            "qwen3-moe",
            json!({"moe_intermediate_size": null}),
            "`moe_intermediate_size` is 0",
        ),
        (
            "qwen3-moe",
            json!({"decoder_sparse_step": 0}),
            "`decoder_sparse_step` is 0",
        ),
        ("qwen3-moe", json!({"n_group": 4}), "`n_group` is 4"),
        (
            "qwen3-moe",
            json!({"use_sliding_window": true, "sliding_window": 8}),
            "`sliding_window` is 8",
        ),
        (
            "qwen2-moe",
            json!({"shared_expert_intermediate_size": 0}),
            "`shared_expert_intermediate_size` is 0",
        ),
        ("gpt-oss", json!({"swiglu_limit": 5.0}), "`swiglu_limit` is 5"),
        ("gpt-oss", json!({"swiglu_alpha": 1.0}), "`swiglu_alpha` is 1"),
        (
            "gpt-oss",
            json!({"experts_per_token": 4}),
            "`experts_per_token` is 4",
        ),
        (
            "gpt-oss",
            json!({"initial_context_length": 64}),
            "`initial_context_length` is 64",
        ),
        (
            "gpt-oss-mxfp4",
            json!({"intermediate_size": 100}),
            "MXFP4 for 100 inputs",
        ),
        (
            "gpt-oss",
            json!({"quantization_config": {"quant_method": "mxfp4", "bits": 4}}),
            "unknown field `bits`",
        ),
    ] {
        let mut config = config_json(name);
        for (field, value) in fields.as_object().unwrap() {
            config[field] = value.clone();
        }
        let error = parse(&config).unwrap_err().to_string();
        assert!(error.contains(message), "{name} {fields}: {error}");
    }
}

/// A directory with a configuration alone.
pub(crate) fn bare(config: &Value) -> TempDir {
    let directory = TempDir::new().unwrap();
    std::fs::write(directory.path().join("config.json"), config.to_string()).unwrap();
    directory
}

pub(crate) fn on_a_gpu(directory: &TempDir) -> Result<GpuFootprint, ModelError> {
    let shape = GpuStateShape {
        limits: LIMITS,
        block_size: BlockSize::new(16).unwrap(),
        kv_cache_dtype: KvCacheDtype::Auto,
        options: GpuOptions { enforce_eager: true },
        serve_as: ServeAs::default(),
        shard: plimsoll_model::Shard::WHOLE,
    };
    GpuFootprint::assumed(directory.path(), shape)
}

/// Without weights: each row has room for what all of its experts take, wherever it goes.
#[test]
fn a_gpu_has_room_for_every_route() {
    for name in EXPERT_MODELS {
        let config = config_json(name);
        let (directory, spec) = (bare(&config), parse(&config).unwrap().spec);
        let footprint = on_a_gpu(&directory).unwrap();
        let step = |tokens| StepSize {
            tokens,
            samples: 1,
            scored: 0,
        };
        let [few, many] = [64, 256].map(|tokens| footprint.arena(&[(step(tokens), false)]).scratch[0]);
        let moe = spec.layers.iter().find_map(|layer| match &layer.mlp {
            Mlp::Moe(moe) | Mlp::Both(_, moe) => Some(moe),
            Mlp::Dense(_) => None,
        });
        let moe = moe.unwrap();
        let route = 2 * (moe.intermediate_size + spec.hidden_size);
        let least = (256 - 64) * moe.top_k * route;
        assert!(many - few > least as u64, "{name}: {few} {many}");
    }
}

/// As a start on one and `plan` for one say it, before weights are read.
#[test]
fn a_gpu_refuses_experts_that_its_kernels_do_not_know() {
    for (fields, message) in [
        (
            json!({"num_local_experts": 64, "num_experts_per_tok": 33}),
            "`num_experts_per_tok` is 33",
        ),
        (
            json!({"moe_intermediate_size": 44}),
            "`moe_intermediate_size` is 44",
        ),
        (
            json!({"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 32,
                "modules_to_not_convert": ["mlp.gate", "experts.2.down_proj"]}}),
            "for `model.layers.3.mlp.experts.2.down_proj`",
        ),
    ] {
        let mut config = config_json("qwen3-moe");
        for (field, value) in fields.as_object().unwrap() {
            config[field] = value.clone();
        }
        let error = on_a_gpu(&bare(&config)).unwrap_err();
        assert!(matches!(error, ModelError::Unsupported { .. }), "{error:?}");
        let error = error.to_string();
        assert!(
            error.contains(message) && error.contains("--device cpu"),
            "{fields}: {error}"
        );
    }
}

fn load_from(directory: &Path) -> Result<std::sync::Arc<Model>, ModelError> {
    Model::load(directory, LoadOptions::default(), &budget(), &mut |_| ())
}

/// The experts of each layer become one tensor of gate and up and one of down.
fn stack(tensors: &mut HashMap<String, Tensor>, experts: usize) {
    let layers: Vec<String> = tensors
        .keys()
        .filter_map(|name| name.strip_suffix("mlp.experts.0.down_proj.weight"))
        .map(str::to_owned)
        .collect();
    assert!(!layers.is_empty());
    for layer in layers {
        let mut take = |expert: usize, part: &str| {
            let name = format!("{layer}mlp.experts.{expert}.{part}.weight");
            tensors.remove(&name).unwrap()
        };
        let gate_up: Vec<Tensor> = (0..experts)
            .map(|expert| Tensor::cat(&["gate_proj", "up_proj"].map(|part| take(expert, part)), 0).unwrap())
            .collect();
        let down: Vec<Tensor> = (0..experts).map(|expert| take(expert, "down_proj")).collect();
        for (name, parts) in [("gate_up_proj", gate_up), ("down_proj", down)] {
            let stacked = Tensor::stack(&parts, 0).unwrap();
            tensors.insert(format!("{layer}mlp.experts.{name}"), stacked);
        }
    }
}

#[test]
fn stacked_experts_are_those_stored_one_by_one() {
    let logits = |directory: &Path| {
        let model = load_from(directory).unwrap();
        let step = plan(vec![run(1, 0, &[5, 9, 40, 77, 12], &blocks(0..1))]);
        runner(&model, 16, 8).logits(&step, &[0, 1, 2, 3, 4]).unwrap()
    };
    for (name, experts) in [("qwen3-moe", 6), ("qwen2-moe", 6)] {
        let stacked = edited(name, |tensors| stack(tensors, experts));
        assert_eq!(logits(stacked.path()), logits(&golden_path(name)), "{name}");
        let footprint = |path: &Path| {
            Footprint::read(path, LoadOptions::default())
                .unwrap()
                .weights_bytes()
        };
        assert_eq!(footprint(stacked.path()), footprint(&golden_path(name)), "{name}");
    }
}

#[test]
fn wrong_experts_are_named() {
    let error = |name: &str, change: &dyn Fn(&mut HashMap<String, Tensor>)| {
        let directory = edited(name, |tensors| change(tensors));
        let told = Footprint::read(directory.path(), LoadOptions::default())
            .map(|_| ())
            .unwrap_err();
        let error = load_from(directory.path()).map(|_| ()).unwrap_err();
        assert_eq!(told.to_string(), error.to_string());
        error.to_string()
    };
    let zeros = |shape: &[usize], dtype| Tensor::zeros(shape, dtype, &Device::Cpu).unwrap();
    let w2 = "model.layers.1.block_sparse_moe.experts.4.w2.weight";
    let found = error("mixtral", &|tensors| drop(tensors.remove(w2)));
    let stacked = "model.layers.1.block_sparse_moe.experts.down_proj";
    assert!(
        found.contains(&format!("`{w2}` or `{stacked}` is missing")),
        "{found}"
    );

    let more = "model.layers.0.block_sparse_moe.experts.5.w1.weight";
    let found = error("mixtral", &|tensors| {
        drop(tensors.insert(more.to_owned(), zeros(&[96, 64], DType::BF16)))
    });
    assert!(found.contains("does not use") && found.contains(more), "{found}");

    let gate = "model.layers.0.block_sparse_moe.gate.weight";
    let found = error("mixtral", &|tensors| {
        drop(tensors.insert(gate.to_owned(), zeros(&[6, 64], DType::BF16)))
    });
    assert!(found.contains(&format!("`{gate}` has shape [6, 64]")), "{found}");

    // One expert more than the configuration says.
    let down = "model.layers.2.mlp.experts.down_proj";
    let found = error("gpt-oss", &|tensors| {
        drop(tensors.insert(down.to_owned(), zeros(&[6, 96, 64], DType::BF16)))
    });
    assert!(
        found.contains(&format!("`{down}` has shape [6, 96, 64]")),
        "{found}"
    );
    let bias = "model.layers.0.mlp.experts.gate_up_proj_bias";
    let found = error("gpt-oss", &|tensors| drop(tensors.remove(bias)));
    assert!(found.contains(bias) && found.contains("missing"), "{found}");

    let scales = "model.layers.0.mlp.experts.gate_up_proj_scales";
    let found = error("gpt-oss-mxfp4", &|tensors| drop(tensors.remove(scales)));
    assert!(found.contains(&format!("`{scales}` is missing")), "{found}");
    let found = error("gpt-oss-mxfp4", &|tensors| {
        drop(tensors.insert(scales.to_owned(), zeros(&[5, 192, 2], DType::BF16)));
    });
    assert!(
        found.contains(scales) && found.contains("U8, as `quantization_config` says"),
        "{found}"
    );

    let scale = "model.layers.0.mlp.experts.2.up_proj.weight_scale_inv";
    let path = golden_path("qwen3-moe-fp8-block");
    let directory = TempDir::new().unwrap();
    std::fs::copy(path.join("config.json"), directory.path().join("config.json")).unwrap();
    let mut file = std::fs::read(path.join("model.safetensors")).unwrap();
    // A name of the same length, as candle knows no tensors of eight bits.
    let at = file
        .windows(scale.len())
        .position(|name| name == scale.as_bytes())
        .unwrap();
    file[at + scale.len() - 1] = b'x';
    std::fs::write(directory.path().join("model.safetensors"), file).unwrap();
    let found = load_from(directory.path()).map(|_| ()).unwrap_err().to_string();
    assert!(found.contains(scale) && found.contains("is missing"), "{found}");
}

/// A step takes the same memory wherever its tokens go: as much as was told before the weights were read, which is proved with
/// tokens that go anywhere.
#[test]
fn memory_does_not_depend_on_where_tokens_go() {
    for name in EXPERT_MODELS {
        let adversarial = adversarial(name);
        let footprint = Footprint::read(&golden_path(name), LoadOptions::default()).unwrap();
        let StepLimits {
            max_num_batched_tokens,
            max_num_seqs,
            ..
        } = LIMITS;
        let len = max_num_batched_tokens / max_num_seqs;
        // The most tokens that a step can have, and the fewest.
        for (seqs, len) in [(max_num_seqs, len), (1, 1), (max_num_seqs, 1)] {
            let size = StepSize {
                tokens: seqs * len,
                samples: seqs,
                scored: 0,
            };
            let told = footprint.arena(&[size]).scratch[0];
            let runs = |seed: u32| {
                (0..seqs as u32).map(move |index| {
                    let tokens: Vec<u32> = (0..len as u32)
                        .map(|i| (seed + 31 * index + 7 * i) % 160)
                        .collect();
                    let mut run = run(u64::from(index), 0, &tokens, &blocks(2 * index..2 * index + 2));
                    run.sample = Some(greedy_spec(0));
                    run
                })
            };
            for directory in [golden_path(name), adversarial.path().to_owned()] {
                let model = load_from(&directory).unwrap();
                let budget = budget();
                let mut config = state_config(16, 40);
                config.scratch = Scratch::Fixed(told);
                let mut runner = model.build_state(&config, &LIMITS, &budget, &mut || {}).unwrap();
                let before = budget.meters().allocations;
                for seed in 0..5 {
                    let output = runner.execute(&plan(runs(seed).collect()));
                    output.unwrap_or_else(|error| panic!("{name}, {seqs} x {len}: {error}"));
                    assert_eq!(runner.take_arena_high_water(), told, "{name}, {seqs} x {len}");
                }
                assert_eq!(budget.meters().allocations, before, "{name}: a step allocated");
            }
        }
    }
}

/// Without the poison, the test above would prove nothing: experts that are hit are seen, and others are not.
#[test]
fn an_expert_that_is_hit_is_read() {
    let logits = |directory: TempDir| {
        let model = load_from(directory.path()).unwrap();
        let step = plan(vec![run(1, 0, &[5, 9, 40], &blocks(0..1))]);
        runner(&model, 16, 8).logits(&step, &[2]).unwrap()
    };
    for name in EXPERT_MODELS {
        let found = logits(adversarial(name));
        assert!(found.iter().all(|logit| logit.is_finite()), "{name}: {found:?}");
        let read = logits(misrouted(name, 192));
        match name {
            "gpt-oss-mxfp4" | "qwen3-moe-awq" => {
                assert_eq!(found, logits(adversarial_with(name, 100)), "{name}");
                assert_ne!(read, logits(misrouted(name, 1)), "{name}");
            }
            _ => assert!(read.iter().all(|logit| logit.is_nan()), "{name}: {read:?}"),
        }
    }
}

/// As llama.cpp writes Qwen3-MoE. In quantised types, inputs of the experts are quantised too: in room for all rows, wherever
/// they go.
#[test]
fn gguf_files_hold_experts() {
    let config = |top_k: usize| {
        json!({"architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 256, "hidden_size": 256,
            "intermediate_size": 256, "moe_intermediate_size": 256, "num_experts": 5, "num_experts_per_tok": top_k,
            "norm_topk_prob": true, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
            "head_dim": 64, "rms_norm_eps": 1e-5, "max_position_embeddings": 256, "rope_theta": 10000.0})
    };
    let spec = parse(&config(2)).unwrap().spec;
    let tensors = random_tensors(&spec);
    let directory = TempDir::new().unwrap();
    let all: HashMap<String, Tensor> = tensors.clone().into_iter().collect();
    candle_core::safetensors::save(&all, directory.path().join("model.safetensors")).unwrap();
    let logits = |path: &Path| {
        let model = load_from(path).unwrap();
        let tokens: Vec<u32> = (0..40).map(|i| i * 37 % 256).collect();
        let mut step = run(1, 0, &tokens, &blocks(0..3));
        let mut runner = runner(&model, 16, 8);
        let logits = runner.logits(&plan(vec![step.clone()]), &[20, 39]).unwrap();
        step.sample = Some(greedy_spec(0));
        runner.take_arena_high_water();
        runner.execute(&plan(vec![step])).unwrap();
        (logits, runner.take_arena_high_water())
    };
    let path = directory.path().join("model.gguf");
    // Rounding may send a token to another expert, unless it goes to all of them.
    for (dtype, tolerance, top_k) in [
        (GgmlDType::F32, 0.0, 2),
        (GgmlDType::Q8_0, 0.01, 5),
        (GgmlDType::Q4K, 0.01, 5),
    ] {
        let config = config(top_k);
        std::fs::write(directory.path().join("config.json"), config.to_string()).unwrap();
        let spec = parse(&config).unwrap().spec;
        let metadata = metadata("qwen3moe", &spec);
        let tensors = converted(&spec, "qwen3moe", &tensors, dtype);
        let (expected, _) = match dtype {
            GgmlDType::F32 => logits(directory.path()),
            _ => {
                write(&path, &metadata, &dequantised(&tensors));
                logits(&path)
            }
        };
        write(&path, &metadata, &tensors);
        let (found, high_water) = logits(&path);
        let error = relative_error(&found, &expected);
        assert!(error <= tolerance, "{dtype:?}: {error}");
        let footprint = Footprint::read(&path, LoadOptions::default()).unwrap();
        let size = StepSize {
            tokens: 40,
            samples: 1,
            scored: 0,
        };
        assert_eq!(footprint.arena(&[size]).scratch, [high_water], "{dtype:?}");
    }
    // One expert more than the metadata say.
    let mut metadata = metadata("qwen3moe", &spec);
    let count = metadata
        .iter_mut()
        .find(|(key, _)| key == "qwen3moe.expert_count")
        .unwrap();
    count.1 = gguf_file::Value::U32(4);
    write(
        &path,
        &metadata,
        &converted(&spec, "qwen3moe", &tensors, GgmlDType::F32),
    );
    let error = load_from(&path).map(|_| ()).unwrap_err().to_string();
    assert!(
        error.contains("`blk.0.ffn_gate_inp.weight` has shape [5, 256]"),
        "{error}"
    );
}

#[test]
fn made_up_experts_compute() {
    for name in EXPERT_MODELS {
        let directory = TempDir::new().unwrap();
        let config = golden_path(name).join("config.json");
        std::fs::copy(config, directory.path().join("config.json")).unwrap();
        let options = LoadOptions {
            format: LoadFormat::Dummy { seed: 1 },
            ..Default::default()
        };
        let told = Footprint::read(directory.path(), options.clone())
            .unwrap()
            .weights_bytes();
        let budget = budget();
        let model = Model::load(directory.path(), options, &budget, &mut |_| ()).unwrap();
        assert_eq!(budget.meters().reserved, told, "{name}");
        let step = plan(vec![run(1, 0, &[1, 2, 3], &blocks(0..1))]);
        let logits = runner(&model, 16, 8).logits(&step, &[2]).unwrap();
        let deviation = (logits.iter().map(|x| x * x).sum::<f32>() / logits.len() as f32).sqrt();
        assert!((0.3..3.0).contains(&deviation), "{name}: {deviation}");
    }
}
