//! config.json: what published ones mean, what is refused and how it is said.

use std::path::Path;

use crate::common::configs::{assert_refused, config_json, parse, with};
use crate::common::summary::summary;
use plimsoll_model::rope::{RopeScaling, RopeSpec};
use plimsoll_model::{Architecture, HfOverrides, ModelConfig, OutputHead};
use serde_json::{Value, json};

/// Files of every family as Hugging Face publishes them; those of Gemma 4 have the fields of text that public repositories quote
/// of them, and no towers.
#[test]
fn published_files_mean_what_they_say() {
    // Number and first of the layers of a kind: query/key heads x size, and what sets them apart.
    let expected = "
        Llama-2-7b-chat-hf => Llama, Own: 32 from 0: 32/32 x 128, theta 10000
        Llama-3.1-8B-Instruct => Llama, Own: 32 from 0: 32/8 x 128, theta 500000 llama3 8
        Llama-3.2-1B-Instruct => Llama, Tied: 16 from 0: 32/8 x 64, theta 500000 llama3 32
        SmolLM2-135M-Instruct => Llama, Tied: 30 from 0: 9/3 x 64, theta 100000
        Mistral-7B-v0.1 => Mistral, Own: 32 from 0: 32/8 x 128, window 4096, theta 10000
        Mistral-7B-Instruct-v0.3 => Mistral, Own: 32 from 0: 32/8 x 128, theta 1000000
        Mistral-Nemo-Instruct-2407 => Mistral, Own: 40 from 0: 32/8 x 128, theta 1000000
        Mistral-Small-3.1-24B-Instruct-2503 => Mistral, Own: 40 from 0: 32/8 x 128, theta 1000000000
        e5-mistral-7b-instruct => Mistral, Own: 32 from 0: 32/8 x 128, window 4096, theta 10000
        Qwen2.5-0.5B-Instruct => Qwen2, Tied: 24 from 0: 14/2 x 64, theta 1000000, qkv bias
        Qwen2.5-7B-Instruct => Qwen2, Own: 28 from 0: 28/4 x 128, theta 1000000, qkv bias
        Qwen2.5-VL-7B-Instruct => Qwen2_5VL, Own: 28 from 0: 28/4 x 128, theta 1000000, qkv bias
        Qwen3-8B => Qwen3, Own: 36 from 0: 32/8 x 128, theta 1000000, qk norm
        Qwen3-Embedding-0.6B => Qwen3, Tied: 28 from 0: 16/8 x 128, theta 1000000, qk norm
        Qwen3-VL-8B-Instruct => Qwen3VL, Own: 36 from 0: 32/8 x 128, theta 5000000, qk norm
        Qwen3.5-9B => Qwen3_5, Own: 24 from 0: delta net 16 x 128, 32 x 128, 4 taps, Separate; 8 from 3: 16/4 x 256, theta 10000000 of 64, qk norm, gated
        Qwen3.5-27B => Qwen3_5, Own: 48 from 0: delta net 16 x 128, 48 x 128, 4 taps, Separate; 16 from 3: 24/4 x 256, theta 10000000 of 64, qk norm, gated
        gemma-2-2b-it => Gemma2, Tied capped at 30: 13 from 0: 8/4 x 256, window 4096, theta 10000, soft cap 50; 13 from 1: 8/4 x 256, theta 10000, soft cap 50
        gemma-2-27b-it => Gemma2, Tied capped at 30: 23 from 0: 32/16 x 128, window 4096, theta 10000, scale 1/12.0000, soft cap 50; 23 from 1: 32/16 x 128, theta 10000, scale 1/12.0000, soft cap 50
        gemma-3-270m-it => Gemma3, Tied: 15 from 0: 4/1 x 256, window 512, theta 10000, qk norm; 3 from 5: 4/1 x 256, theta 1000000, qk norm
        gemma-3-1b-it => Gemma3, Tied: 22 from 0: 4/1 x 256, window 512, theta 10000, qk norm; 4 from 5: 4/1 x 256, theta 1000000, qk norm
        gemma-3-4b-it => Gemma3, Tied: 29 from 0: 8/4 x 256, window 1024, theta 10000, qk norm; 5 from 5: 8/4 x 256, theta 1000000 linear 8, qk norm
        gemma-3-27b-it => Gemma3, Tied: 52 from 0: 32/16 x 128, window 1024, theta 10000, scale 1/12.9615, qk norm; 10 from 5: 32/16 x 128, theta 1000000 linear 8, scale 1/12.9615, qk norm
        gemma-4-E2B-it => Gemma4, Tied capped at 30: 12 from 0: 8/1 x 256, window 512, theta 10000, scale 1/1.0000, v norm, qk norm; 3 from 4: 8/1 x 512, theta 1000000 proportional 64 pairs / 1, scale 1/1.0000, v norm, qk norm; 16 from 15: 8/1 x 256, window 512, theta 10000, scale 1/1.0000, v norm, kv of 13, qk norm; 4 from 19: 8/1 x 512, theta 1000000 proportional 64 pairs / 1, scale 1/1.0000, v norm, kv of 14, qk norm
        gemma-4-31B-it => Gemma4, Tied capped at 30: 50 from 0: 32/16 x 256, window 1024, theta 10000, scale 1/1.0000, v norm, qk norm; 10 from 5: 32/4 x 512, theta 1000000 proportional 64 pairs / 1, scale 1/1.0000, v = k norm, qk norm
        Ministral-3-3B-Instruct-2512-BF16 => Ministral3, Tied: 26 from 0: 32/8 x 128, theta 1000000 yarn 16 x 1.0000, queries 0.1 per 16384
        Devstral-2-123B-Instruct-2512 => Ministral3, Own: 88 from 0: 96/8 x 128, theta 1000000 yarn 64 x 1.4159
        Phi-3-mini-4k-instruct => Phi3, Own: 32 from 0: 32/32 x 96, window 2047, theta 10000, fused
        Phi-3-mini-128k-instruct => Phi3, Own: 32 from 0: 32/32 x 96, window 262144, theta 10000 longrope from 4096 x 1.1902, fused
        Phi-3.5-mini-instruct => Phi3, Own: 32 from 0: 32/32 x 96, window 262144, theta 10000 longrope from 4096 x 1.1902, fused
        Phi-4-mini-instruct => Phi3, Tied: 32 from 0: 24/8 x 128, window 262144, theta 10000 longrope from 4096 x 1.1902 of 96, fused
        phi-4 => Phi3, Own: 40 from 0: 40/10 x 128, theta 250000, fused
        SmolLM3-3B => SmolLM3, Tied: 27 from 0: 16/4 x 128, theta 5000000; 9 from 3: 16/4 x 128, no positions
    ";
    let cases: Vec<_> = expected
        .lines()
        .filter_map(|line| line.trim().split_once(" => "))
        .collect();
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/configs");
    assert_eq!(directory.read_dir().unwrap().count(), cases.len());
    for (name, expected) in cases {
        let path = directory.join(format!("{name}.json"));
        let text = std::fs::read_to_string(&path).unwrap();
        let config = ModelConfig::from_json(&path, &text, &HfOverrides::default())
            .unwrap_or_else(|error| panic!("{name}: {error}"));
        let layers = summary(&config.spec);
        let cap = config.spec.logit_soft_cap;
        let cap = cap.map_or(String::new(), |cap| format!(" capped at {cap}"));
        let found = format!("{:?}, {:?}{cap}: {layers}", config.architecture, config.spec.head);
        assert_eq!(found, expected, "{name}");
    }
}

/// As their cards say, less the towers for images and audio: of the 5.1 B of the E2B, these are half a billion.
#[test]
fn gemma_4_is_as_large_as_its_cards_say() {
    for (text, weights, kv) in [
        (
            include_str!("configs/gemma-4-E2B-it.json"),
            4628569379,
            12 * 2 * 256 + 3 * 2 * 512,
        ),
        (
            include_str!("configs/gemma-4-31B-it.json"),
            30697345340,
            50 * 2 * 16 * 256 + 10 * 2 * 4 * 512,
        ),
    ] {
        let config = ModelConfig::from_json(Path::new("config.json"), text, &HfOverrides::default()).unwrap();
        assert_eq!(config.spec.num_parameters(), weights);
        assert_eq!(config.spec.kv_bytes_per_token(1), kv);
    }
}

/// As its card says.
#[test]
fn llama_3_1_8b_has_8_030_261_248_weights() {
    let text = include_str!("configs/Llama-3.1-8B-Instruct.json");
    let config = ModelConfig::from_json(Path::new("config.json"), text, &HfOverrides::default()).unwrap();
    assert_eq!(config.spec.num_parameters(), 8_030_261_248);
}

/// In the file or by `--hf-overrides`, before weights are read.
#[test]
fn unsupported_fields_are_named() {
    let llama = |fields, message| ("llama", fields, message);
    let rope = |rope: Value, message| llama(json!({"rope_parameters": null, "rope_scaling": rope}), message);
    let cases = [
        llama(
            json!({"architectures": ["MambaForCausalLM"]}),
            "`MambaForCausalLM` is not supported",
        ),
        llama(
            json!({"architectures": ["MambaForCausalLM"]}),
            "LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM",
        ),
        llama(json!({"architectures": null, "model_type": "mamba"}), "`mamba`"),
        llama(json!({"architectures": null, "model_type": null}), "model_type"),
        llama(json!({"hidden_size": null}), "hidden_size"),
        llama(json!({"hidden_size": "large"}), "`hidden_size`: invalid type"),
        llama(json!({"num_key_value_heads": 3}), "num_key_value_heads"),
        llama(json!({"num_attention_heads": 0}), "num_attention_heads"),
        llama(json!({"head_dim": 15}), "head_dim"),
        llama(json!({"head_dim": 1024}), "head_dim"),
        llama(json!({"vocab_size": 1u64 << 40}), "vocab_size"),
        llama(json!({"rms_norm_eps": 0.0}), "rms_norm_eps"),
        llama(json!({"hidden_act": "gelu"}), "hidden_act"),
        (
            "mistral-window",
            json!({"attention_bias": true}),
            "attention_bias",
        ),
        llama(json!({"mlp_bias": true}), "mlp_bias"),
        llama(json!({"num_local_experts": 8}), "num_local_experts"),
        llama(json!({"num_experts": 8}), "`num_experts` is 8"),
        llama(
            json!({"attention_sinks": 4}),
            "LlamaForCausalLM has no such field here",
        ),
        llama(
            json!({"it's": 4, "magic": 1}),
            "LlamaForCausalLM has no such field here, nor 1 others",
        ),
        llama(
            json!({"attention_sinks": 4, "magic": 1, "use_cache": true}),
            "nor `magic`. Remove what has no effect with --hf-overrides '{\"attention_sinks\":null,\"magic\":null}'",
        ),
        llama(json!({"sliding_window": 64}), "sliding_window"),
        llama(json!({"partial_rotary_factor": 0.5}), "partial_rotary_factor"),
        llama(json!({"dtype": "float8_e4m3fn"}), "dtype"),
        llama(
            json!({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
            "`rope_scaling` is given beside",
        ),
        rope(
            json!({"type": "dynamic", "factor": 2.0}),
            "rope_scaling.rope_type",
        ),
        rope(
            json!({"rope_type": "yarn", "factor": 2.0}),
            "rope_scaling.original_max_position_embeddings",
        ),
        rope(
            json!({"rope_type": "default", "mrope_section": [1]}),
            "`rope_scaling.mrope_section` is given",
        ),
        rope(json!({"rope_type": "linear"}), "rope_scaling.factor"),
        rope(
            json!({"rope_type": "llama3", "factor": 8.0}),
            "rope_scaling.low_freq_factor",
        ),
        ("qwen2-window", json!({"max_window_layers": 0}), "layer_types[0]"),
        (
            "qwen2-window",
            json!({"layer_types": ["full_attention"]}),
            "`layer_types` is a list of 1",
        ),
        (
            "qwen2-window",
            json!({"dual_chunk_attention_config": {"chunk_size": 262_144}}),
            "`dual_chunk_attention_config`",
        ),
        (
            "mistral-window",
            json!({"sliding_window": 0}),
            "`sliding_window` is 0",
        ),
        (
            "gemma4",
            json!({"hidden_activation": "gelu"}),
            "`hidden_activation` is `gelu`",
        ),
        (
            "gemma4",
            json!({"use_bidirectional_attention": "all"}),
            "`use_bidirectional_attention` is `all`",
        ),
        (
            "gemma4",
            json!({"global_head_dim": 64}),
            "`global_head_dim` is 64, which is not supported; it, or `per_layer_config`, is",
        ),
        (
            "gemma4",
            json!({"per_layer_config": {"1": {"head_dim": 64, "sliding_window": 3}}}),
            "`per_layer_config`: unknown field `sliding_window`",
        ),
        (
            "gemma4",
            json!({"per_layer_config": {"4": {"head_dim": 64}}}),
            "`per_layer_config` is 4",
        ),
        (
            "gemma4",
            json!({"num_kv_shared_layers": 3}),
            "`num_kv_shared_layers` is 3, which is not supported; as many as leave a layer of full_attention",
        ),
        (
            "gemma4",
            json!({"num_experts_per_tok": 2}),
            "`num_experts_per_tok`",
        ),
        ("gemma4", json!({"altup_num_inputs": 4}), "has no such field here"),
        (
            "gemma4",
            json!({"layer_types": ["full_attention", "full_attention", "full_attention", "sliding_attention"]}),
            "`layer_types[3]` is `sliding_attention`",
        ),
        (
            "gemma4",
            json!({"rope_parameters": {"full_attention": {"rope_type": "dynamic"}}}),
            "rope_parameters.full_attention.rope_type",
        ),
        (
            "gemma4-moe",
            json!({"top_k_experts": 6}),
            "`top_k_experts` is 6, which is not supported; 1 to 5",
        ),
        ("gemma4-moe", json!({"num_experts": null}), "`num_experts"),
        (
            "gemma4-moe",
            json!({"moe_intermediate_size": 0}),
            "moe_intermediate_size",
        ),
        ("gemma2", json!({"hidden_act": "gelu"}), "`hidden_act` is `gelu`"),
        (
            "gemma2",
            json!({"attn_logit_softcapping": -1.0}),
            "`attn_logit_softcapping` is -1",
        ),
        (
            "gemma2",
            json!({"final_logit_softcapping": 0.0}),
            "`final_logit_softcapping` is 0",
        ),
        (
            "gemma2",
            json!({"sliding_window_pattern": 3}),
            "Gemma2ForCausalLM has no such field here",
        ),
        ("gemma3", json!({"sliding_window": 0}), "`sliding_window` is 0"),
        (
            "gemma3",
            json!({"final_logit_softcapping": 30.0}),
            "`final_logit_softcapping`",
        ),
        (
            "gemma3",
            json!({"use_bidirectional_attention": true}),
            "`use_bidirectional_attention`",
        ),
        (
            "gemma3",
            json!({"hidden_activation": "gelu"}),
            "`hidden_activation`",
        ),
        (
            "gemma3",
            json!({"layer_types": ["full_attention", "full_attention"]}),
            "`layer_types` is a list of 2",
        ),
        (
            "gemma3",
            json!({"layer_types": ["full_attention", "chunked_attention", "full_attention", "full_attention"]}),
            "`layer_types[1]` is `chunked_attention`",
        ),
        (
            "smollm3",
            json!({"no_rope_layers": [1, 1, 1, 0]}),
            "`no_rope_layers` is a list of 4",
        ),
        (
            "smollm3",
            json!({"use_sliding_window": true, "sliding_window": 64, "layer_types": null}),
            "`sliding_window` is 64",
        ),
        (
            "phi3-longrope",
            json!({"rope_parameters": null, "partial_rotary_factor": 1.5}),
            "`partial_rotary_factor`",
        ),
        (
            "phi3-longrope",
            json!({"rope_parameters": null, "rope_scaling": {"type": "su", "short_factor": [1.0]}}),
            "rope_scaling.short_factor",
        ),
        (
            "gemma3-vision",
            json!({"text_config": {"num_experts": 8}}),
            "`num_experts` is 8",
        ),
        (
            "gemma3-vision",
            json!({"text_config": {"layer_types": ["full_attention"]}}),
            "`layer_types` is a list of 1",
        ),
        (
            "ministral3",
            json!({"text_config": {"sliding_window": 0}}),
            "`sliding_window` is 0",
        ),
        (
            "ministral3",
            json!({"video_token_id": 7}),
            "Mistral3ForConditionalGeneration has no such field here",
        ),
        (
            "ministral3",
            json!({"text_config": null}),
            "`text_config` is missing",
        ),
    ];
    for (name, fields, message) in cases {
        assert_refused(name, &fields, message);
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
        rotary_dim: parsed.spec.layers[0].attention().unwrap().head_dim,
        scaling,
        query_scale: None,
        sections: None,
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

/// In families whose classes in transformers have the field, and honour it; those with norms or gates behind attention are left out.
#[test]
fn attention_has_biases_where_the_configuration_says_so() {
    let biases = |name: &str, fields: Value| {
        let config = parse(&with(config_json(name), fields)).unwrap();
        let attention = config.spec.attention();
        let biases = attention.map(|attention| (attention.qkv_bias, attention.output_bias));
        biases.collect::<Vec<_>>()
    };
    for name in ["llama", "qwen3-f16", "qwen3-moe", "smollm3"] {
        let with_bias = biases(name, json!({"attention_bias": true}));
        assert!(with_bias.iter().all(|&bias| bias == (true, true)), "{name}");
        for fields in [json!({}), json!({"attention_bias": null})] {
            let without = biases(name, fields);
            assert!(without.iter().all(|&bias| bias == (false, false)), "{name}");
        }
    }
    let of_text = biases("qwen3-vl", json!({"text_config": {"attention_bias": true}}));
    assert!(of_text.iter().all(|&bias| bias == (true, true)));
    for name in ["gemma2", "gemma3", "qwen3-next", "phi3-window"] {
        assert_refused(name, &json!({"attention_bias": true}), "attention_bias");
    }
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
    let attention = |name, fields| parsed(name, fields).spec.layers[0].attention().unwrap().clone();
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
