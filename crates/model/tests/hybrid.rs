//! Models of which some layers keep a state of fixed size: what of config.json is refused, and what plans are.

use std::path::Path;

use crate::common::*;
use plimsoll_core::{BlockSize, Component, Executor, Run, RunState, StateSlot};
use plimsoll_model::{HfOverrides, KvCacheDtype, ModelConfig};
use serde_json::{Value, json};

const HYBRID_MODELS: [&str; 4] = ["qwen3-next", "qwen3-next-moe", "qwen3_5-moe", "qwen3_5-vision"];

/// The configuration of a golden model with these fields of its text part set; null removes.
fn parse(name: &str, fields: &Value) -> Result<ModelConfig, String> {
    let path = golden_path(name).join("config.json");
    let mut config: Value = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
    let text = match config.get_mut("text_config") {
        Some(text) => text,
        None => &mut config,
    };
    for (field, value) in fields.as_object().unwrap() {
        match value {
            Value::Null => drop(text.as_object_mut().unwrap().remove(field)),
            value => text[field] = value.clone(),
        }
    }
    let parsed = ModelConfig::from_json(
        Path::new("config.json"),
        &config.to_string(),
        &HfOverrides::default(),
    );
    parsed.map_err(|error| error.to_string())
}

#[test]
fn what_is_not_served_is_named() {
    for (fields, message) in [
        (
            json!({"layer_types": ["linear_attention", "full_attention"]}),
            "`layer_types` is a list of 2",
        ),
        (
            json!({"linear_num_value_heads": 5, "linear_num_key_heads": 2}),
            "`linear_num_value_heads` (5) is no multiple",
        ),
        (json!({"linear_num_key_heads": 0}), "`linear_num_key_heads` is 0"),
        (
            json!({"linear_num_value_heads": 0}),
            "`linear_num_value_heads` is 0",
        ),
        (
            json!({"linear_key_head_dim": 512}),
            "`linear_key_head_dim` is 512",
        ),
        (
            json!({"linear_value_head_dim": 257}),
            "`linear_value_head_dim` is 257",
        ),
        (
            json!({"linear_conv_kernel_dim": 1}),
            "`linear_conv_kernel_dim` is 1",
        ),
        (
            json!({"linear_conv_kernel_dim": 9}),
            "`linear_conv_kernel_dim` is 9",
        ),
        (json!({"linear_conv_kernel_dim": "4"}), "`linear_conv_kernel_dim`"),
        (json!({"attn_output_gate": false}), "`attn_output_gate` is false"),
        (
            json!({"output_gate_type": "sigmoid"}),
            "`output_gate_type` is `sigmoid`",
        ),
        (
            json!({"mamba_ssm_dtype": "bfloat16"}),
            "`mamba_ssm_dtype` is `bfloat16`",
        ),
        (
            json!({"layer_types": null, "full_attention_interval": 0}),
            "`full_attention_interval` is 0",
        ),
        (
            json!({"layer_types": null, "full_attention_interval": 9}),
            "at least one layer with attention",
        ),
        (
            json!({"num_key_value_heads": 3, "num_attention_heads": 4}),
            "`num_attention_heads` (4) is no multiple",
        ),
        (json!({"linear_something": 1}), "`linear_something`"),
    ] {
        for name in HYBRID_MODELS {
            let error = parse(name, &fields).map(drop).unwrap_err();
            assert!(
                error.contains(message),
                "{name}, {fields}: {error:?} does not say {message:?}"
            );
        }
    }
    for kind in ["sliding_attention", "mamba"] {
        let kinds = json!({"layer_types": [kind, "full_attention", "full_attention"]});
        let error = parse("qwen3_5-vision", &kinds).map(drop).unwrap_err();
        assert!(
            error.contains("layer_types[0]") && error.contains(kind),
            "{error}"
        );
    }
    for (name, fields, message) in [
        (
            "qwen3-next",
            json!({"num_experts": 8}),
            "`num_experts_per_tok` is 10",
        ),
        (
            "qwen3_5-moe",
            json!({"num_experts_per_tok": 6}),
            "`num_experts_per_tok` is 6",
        ),
        ("qwen3_5-moe", json!({"num_experts": 0}), "`num_experts` is 0"),
        (
            "qwen3_5-moe",
            json!({"norm_topk_prob": false}),
            "`norm_topk_prob` is false",
        ),
        (
            "qwen3_5-moe",
            json!({"mlp_only_layers": [1]}),
            "`intermediate_size` is 0",
        ),
        (
            "qwen3-next-moe",
            json!({"shared_expert_intermediate_size": 0}),
            "`shared_expert_intermediate_size` is 0",
        ),
    ] {
        let error = parse(name, &fields).map(drop).unwrap_err();
        assert!(error.contains(message), "{name}, {fields}: {error}");
    }
}

#[test]
fn kinds_of_layers_follow_the_interval_where_they_are_not_listed() {
    let fields = json!({"layer_types": null, "full_attention_interval": 3, "num_hidden_layers": 7});
    let spec = parse("qwen3_5-vision", &fields).unwrap().spec;
    let linear: Vec<bool> = spec
        .layers
        .iter()
        .map(|layer| layer.attention().is_none())
        .collect();
    assert_eq!(linear, [true, true, false, true, true, false, true]);
    let groups = spec.cache_groups(BlockSize::default());
    assert_eq!((groups.state_layers(), groups.as_slice()[0].layers), (5, 2));
}

/// The configuration of the published 27B: 48 layers, each with 48 states of 128 x 128 and the last 3 inputs of a convolution of
/// 10240 channels, in f32.
#[test]
fn a_request_of_qwen3_5_27b_has_states_of_157_megabytes() {
    let text = include_str!("configs/Qwen3.5-27B.json");
    let config = ModelConfig::from_json(Path::new("config.json"), text, &HfOverrides::default()).unwrap();
    assert_eq!(
        config.spec.state_elements() * 4,
        48 * (48 * 128 * 128 + 3 * 10240) * 4
    );
    assert_eq!(config.spec.kv_bytes_per_token(2), 64 << 10);
}

#[test]
fn plans_without_slots_of_their_own_are_refused() {
    for name in HYBRID_MODELS {
        let model = load(name, KvCacheDtype::Auto);
        let mut runner = runner(&model, 16, 8);
        let with = |request: u64, state: Option<(Option<u32>, u32)>| Run {
            state: state.map(|(before, after)| RunState {
                before: before.map(StateSlot),
                after: StateSlot(after),
                in_chunks: true,
            }),
            ..run(request, 0, &[5, 6], &blocks(request as u32..request as u32 + 1))
        };
        for (states, message) in [
            ([None, Some((None, 1))], "no slot"),
            (
                [Some((None, 1)), Some((None, 1))],
                "another run writes state slot 1",
            ),
            ([Some((None, 0)), Some((None, 16))], "slot 16 of 16"),
            (
                [Some((None, 0)), Some((Some(1), 2))],
                "begins at 0 with the state in",
            ),
        ] {
            let runs = vec![with(1, states[0]), with(2, states[1])];
            let error = runner.execute(&plan(runs)).unwrap_err().to_string();
            assert!(
                error.contains(message),
                "{name}: {error:?} does not say {message:?}"
            );
        }
    }
}

/// A state is charged, and given back; what it holds of an earlier request is nothing to the next.
#[test]
fn slots_are_charged_and_used_again() {
    for name in HYBRID_MODELS {
        let model = load(name, KvCacheDtype::F32);
        let budget = budget();
        let mut runner = model
            .build_state(&state_config(16, 16), &LIMITS, &budget, &mut || {})
            .unwrap();
        let held = budget.meters().by_component.get(Component::States);
        assert_eq!(held, model.state_bytes() * LIMITS.max_num_seqs as u64, "{name}");
        assert!(held > 0, "{name}");
        for case in golden(name).cases {
            // Every request in the slot of the one before.
            let found = greedy_alone(&mut runner, &case.prompt, &blocks(0..8), case.greedy.len());
            assert_eq!(found, case.greedy, "{name}, prompt {:?}", case.prompt);
        }
        drop(runner);
        assert_eq!(budget.meters().reserved, 0, "{name}");
    }
}

/// Requests that begin with a snapshot, with the KV of the blocks before it, compute the same to the bit as one that computes all:
/// beside the one that leaves it behind, beside each other, and later.
#[test]
fn a_prefix_with_a_snapshot_is_as_good_as_computed() {
    const BLOCK: usize = 8;
    for name in HYBRID_MODELS {
        let model = load(name, KvCacheDtype::Auto);
        let vocab = model.spec().vocab_size as u32;
        let prompt: Vec<u32> = (0..50).map(|at| (at * at + 3) % vocab).collect();
        let alone = blocks(0..8);
        let whole = plan(vec![run(9, 0, &prompt, &alone)]);
        let expected = runner(&model, BLOCK, 64).logits(&whole, &[48, 49]).unwrap();
        for cut in [8, 24, 48] {
            let mut runner = runner(&model, BLOCK, 64);
            let with = |request: u64, before, after: u32, own: u32| {
                let shared = blocks(0..(cut / BLOCK) as u32);
                let table = [shared, blocks(own..own + 8)].concat();
                let start = if before { cut } else { 0 };
                let end = if before { prompt.len() } else { cut };
                Run {
                    state: Some(RunState {
                        before: before.then_some(StateSlot(5)),
                        after: StateSlot(after),
                        in_chunks: true,
                    }),
                    ..run(request, start, &prompt[start..end], &table)
                }
            };
            runner.logits(&plan(vec![with(1, false, 5, 8)]), &[]).unwrap();
            let rest = prompt.len() - cut;
            let rows: Vec<usize> = (1..=3).flat_map(|run| [run * rest - 2, run * rest - 1]).collect();
            let together = plan(vec![
                with(1, true, 0, 8),
                with(2, true, 1, 20),
                with(3, true, 2, 30),
            ]);
            let found = runner.logits(&together, &rows).unwrap();
            let later = runner
                .logits(&plan(vec![with(4, true, 0, 40)]), &rows[..2])
                .unwrap();
            let found = [found, later].concat();
            assert!(
                found.chunks(expected.len()).all(|found| found == expected),
                "{name}, a snapshot behind {cut} tokens"
            );
            assert_eq!(found.len(), 4 * expected.len());
            let [in_place, from_snapshot] =
                [false, true].map(|snapshot| continued(&mut runner, &prompt, (cut, BLOCK), snapshot));
            assert_eq!(from_snapshot, in_place, "{name}, a snapshot behind {cut} tokens");
            assert!(in_place.1.is_some());
        }
    }
}
