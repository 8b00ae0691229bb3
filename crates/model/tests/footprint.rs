//! What is told of a model without its weights is what it takes, to the byte: every family, every stored type, any shape.

use std::path::Path;

use crate::common::convert::*;
use crate::common::*;
use candle_core::quantized::GgmlDType;
use plimsoll_core::{Component, Executor, Pooling, ScoreSpec, StepLimits};
use plimsoll_device::Budget;
use plimsoll_model::{
    Footprint, HfOverrides, KvCacheDtype, LoadFormat, LoadOptions, Model, ModelConfig, ServeAs, StepSize,
    Task,
};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use serde_json::json;
use tempfile::TempDir;

/// Loads the model, runs some steps, and compares all of it with the footprint.
fn check(path: &Path, options: LoadOptions, rng: &mut StdRng, context: &str) {
    let budget = Budget::new(1 << 30);
    let footprint = Footprint::read(path, options.clone()).unwrap();
    let model = Model::load(path, options, &budget, &mut |_| ()).unwrap();
    let weights = budget.meters().by_component.get(Component::Weights);
    assert_eq!(footprint.weights_bytes(), weights, "{context}: weights");
    assert_eq!(
        footprint.kv_bytes_per_token(),
        model.kv_bytes_per_token(),
        "{context}"
    );
    let limits = StepLimits {
        max_num_batched_tokens: 70,
        max_num_seqs: 70,
        max_model_len: model.spec().max_position_embeddings,
    };
    let mut config = state_config([8, 16, 32][rng.random_range(0..3)], 140);
    config.kv.state_slots = limits.max_num_seqs;
    let mut runner = model.build_state(&config, &limits, &budget, &mut || {}).unwrap();
    let bytes = |component| budget.meters().by_component.get(component);
    assert_eq!(
        footprint.staging_bytes(&limits),
        bytes(Component::Staging),
        "{context}"
    );
    assert_eq!(footprint.kv_bytes(config.kv), bytes(Component::Kv), "{context}");
    let states = footprint.state_bytes() * config.kv.state_slots as u64;
    assert_eq!(states, bytes(Component::States), "{context}");

    let idle = budget.meters().reserved;
    budget.reset_high_water();
    let mut sizes = Vec::new();
    let mut scratch = Vec::new();
    for _ in 0..4 {
        let (samples, longest) = (rng.random_range(1..40), rng.random_range(1..30));
        let scored: bool = rng.random();
        let runs = (0..samples as u32).map(|index| {
            // The last run fills the step.
            let len = if index + 1 == samples as u32 { longest } else { 1 };
            let blocks = blocks(3 * index..3 * index + 4);
            let mut run = run(u64::from(index), 0, &vec![index % 7; len], &blocks);
            run.state = Some(in_place(index, 0, len));
            match model.config().pooling() {
                None => {
                    run.sample = Some(greedy_spec(0));
                    run.score = (scored && len > 1).then(|| ScoreSpec {
                        first: 0,
                        targets: vec![index % 7; len - 1],
                        top: 3,
                    });
                }
                pooling => run.pool = pooling,
            }
            run
        });
        runner.execute(&plan(runs.collect())).unwrap();
        sizes.push(StepSize {
            tokens: samples - 1 + longest,
            samples,
            scored: if scored { longest - 1 } else { 0 },
        });
        scratch.push(runner.take_arena_high_water());
    }
    let counted = footprint.arena(&sizes);
    assert_eq!(counted.scratch, scratch, "{context}: {sizes:?}");
    assert_eq!(
        counted.peak,
        budget.meters().reserved_high - idle,
        "{context}: {sizes:?}"
    );
    assert_eq!(counted.held, bytes(Component::Arena), "{context}: {sizes:?}");
}

#[test]
fn every_family_takes_what_was_told() {
    let mut rng = StdRng::seed_from_u64(1);
    let directory = TempDir::new().unwrap();
    for name in MODELS {
        for kv_cache_dtype in [KvCacheDtype::Auto, KvCacheDtype::F16, KvCacheDtype::F32] {
            let options = LoadOptions {
                kv_cache_dtype,
                ..Default::default()
            };
            check(&golden_path(name), options, &mut rng, name);
        }
        // The configuration alone, as far as it says how the weights are stored.
        let bare = directory.path().join(name);
        std::fs::create_dir(&bare).unwrap();
        std::fs::copy(golden_path(name).join("config.json"), bare.join("config.json")).unwrap();
        let stored = Footprint::read(&golden_path(name), LoadOptions::default()).unwrap();
        let told = Footprint::read(&bare, LoadOptions::default()).unwrap();
        assert_eq!(told.weights_bytes(), stored.weights_bytes(), "{name}");
    }
    for name in GGUF_MODELS {
        let path = golden_gguf(directory.path(), name);
        check(
            &path,
            LoadOptions::default(),
            &mut rng,
            &format!("{name} as GGUF"),
        );
    }
}

#[test]
fn every_quantised_type_takes_what_was_told() {
    use GgmlDType::*;
    let mut rng = StdRng::seed_from_u64(2);
    let directory = TempDir::new().unwrap();
    let config =
        ModelConfig::from_json(Path::new("config.json"), LLAMA_256, &HfOverrides::default()).unwrap();
    let tensors = random_tensors(&config.spec);
    let meta = metadata("llama", &config.spec);
    for dtype in [
        F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2K, Q3K, Q4K, Q5K, Q6K,
    ] {
        let path = directory.path().join("model.gguf");
        write(&path, &meta, &converted(&config.spec, "llama", &tensors, dtype));
        check(
            &path,
            LoadOptions::default(),
            &mut rng,
            &format!("GGUF of {dtype:?}"),
        );
    }
}

#[test]
fn any_shape_takes_what_was_told() {
    for seed in (0..60).chain([rand::random()]) {
        let mut rng = StdRng::seed_from_u64(seed);
        let config = random_config(&mut rng);
        let directory = TempDir::new().unwrap();
        std::fs::write(directory.path().join("config.json"), config.to_string()).unwrap();
        let options = LoadOptions {
            format: LoadFormat::Dummy { seed },
            serve_as: serve_as(&mut rng),
            ..Default::default()
        };
        check(
            directory.path(),
            options,
            &mut rng,
            &format!("seed {seed}, {config}"),
        );
    }
}

/// Text as often as embeddings.
fn serve_as(rng: &mut StdRng) -> ServeAs {
    let pooling = [Pooling::Last, Pooling::Mean][rng.random_range(0..2)];
    match rng.random() {
        true => ServeAs::default(),
        false => ServeAs {
            task: Task::Embed,
            pooling: Some(pooling),
            normalize: None,
            ..ServeAs::default()
        },
    }
}

/// A small model of any family.
fn random_config(rng: &mut StdRng) -> serde_json::Value {
    let families = [
        "LlamaForCausalLM",
        "MistralForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
    ];
    let dtypes = ["float32", "float16", "bfloat16"];
    let kv_heads = rng.random_range(1..4);
    json!({
        "architectures": [families[rng.random_range(0..families.len())]],
        "dtype": dtypes[rng.random_range(0..dtypes.len())],
        "hidden_act": "silu",
        "hidden_size": rng.random_range(1..200),
        "intermediate_size": rng.random_range(1..300),
        "num_hidden_layers": rng.random_range(1..4),
        "num_attention_heads": kv_heads * rng.random_range(1..5),
        "num_key_value_heads": kv_heads,
        "head_dim": 2 * rng.random_range(1..40),
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "vocab_size": rng.random_range(7..2000),
        "max_position_embeddings": 64,
        "tie_word_embeddings": rng.random::<bool>(),
        "sliding_window": null,
    })
}
