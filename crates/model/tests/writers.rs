//! What tools write into config.json beside what a network is: it changes nothing, or is refused with a way on.

use crate::common::configs::{assert_refused, config_json, parse, with};
use crate::common::images::{IMAGE_LIMITS, IMAGE_MODELS};
use plimsoll_model::{MatrixFormat, ModelConfig, ServeAs};
use serde_json::{Value, json};

#[test]
fn what_tools_write_beside_a_network_changes_nothing() {
    let repeated = config_json("qwen2_5-vl")["text_config"].clone();
    let cases = [
        (
            "transformers 4.35 with FlashAttention",
            "llama",
            json!({"_flash_attn_2_enabled": true, "_attn_implementation": "flash_attention_2"}),
        ),
        (
            "the first Llama and Vicuna",
            "llama",
            json!({"max_sequence_length": 2048, "model_max_length": 4096, "gradient_checkpointing": false,
                "tokenizer_model_max_length": 4096, "tokenizer_padding_side": "right"}),
        ),
        (
            "transformers' trainers",
            "qwen2",
            json!({"loss_type": "ForCausalLM", "use_cache": false, "_name_or_path": "/tmp/checkpoint-500"}),
        ),
        (
            "unsloth",
            "llama3-tied-bf16",
            json!({"unsloth_fixed": true, "unsloth_version": "2026.4.7", "pad_token_id": 0, "torch_dtype": "bfloat16"}),
        ),
        (
            "Qwen3-Coder",
            "qwen3-moe",
            json!({"qkv_bias": false, "use_qk_norm": true, "shared_expert_intermediate_size": 0}),
        ),
        ("Qwen3.6", "qwen3_5-vision", json!({"language_model_only": false})),
        (
            "transformers 4.53 to 4.57, of which others read the text part beside `text_config`",
            "qwen2_5-vl",
            with(
                repeated.clone(),
                json!({"model_type": null, "sliding_window": 96, "layer_types": null, "text_config":
                    {"image_token_id": 5, "video_token_id": 8, "vision_start_token_id": 6, "vision_token_id": 9}}),
            ),
        ),
        (
            "a hand, which names no class",
            "qwen3-vl",
            json!({"architectures": null}),
        ),
        (
            "transformers 5.24, numbers of layers of one length",
            "gemma4",
            json!({"per_layer_config": {"1": null, "3": null, "01": {"head_dim": 512, "num_key_value_heads": 1},
                "03": {"head_dim": 512, "num_key_value_heads": 1}}}),
        ),
    ];
    for (writer, name, fields) in cases {
        let published = parse(&config_json(name)).unwrap();
        let written = parse(&with(config_json(name), fields));
        let written = written.unwrap_or_else(|error| panic!("{writer}: {error}"));
        assert_eq!(written.spec, published.spec, "{writer}");
        assert_eq!(written.eos_token_ids, published.eos_token_ids, "{writer}");
    }
}

/// transformers neither writes nor needs them where they are the family's.
#[test]
fn positions_of_images_are_divided_as_in_the_family_where_a_file_does_not_say() {
    for text in [
        include_str!("configs/Qwen2.5-VL-7B-Instruct.json"),
        include_str!("configs/Qwen3-VL-8B-Instruct.json"),
        include_str!("configs/Qwen3.5-9B.json"),
    ] {
        let published: Value = serde_json::from_str(text).unwrap();
        let mut silent = published.clone();
        let text = match silent.get("text_config") {
            Some(_) => &mut silent["text_config"],
            None => &mut silent,
        };
        let fields = ["rope_parameters", "rope_scaling"];
        let rope = fields.into_iter().find(|field| text[*field].is_object()).unwrap();
        let rope = text[rope].as_object_mut().unwrap();
        rope.remove("mrope_section").unwrap();
        rope.remove("mrope_interleaved");
        let expected = parse(&published).unwrap();
        assert!(expected.spec.ropes()[0].sections.is_some());
        assert_eq!(parse(&silent).unwrap(), expected);
    }
}

/// The first models with YaRN say whether they were trained with it.
#[test]
fn finetuned_yarn_is_yarn() {
    let yarn = |extra: Value| {
        let rope = json!({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64});
        let fields = json!({"rope_parameters": null, "rope_scaling": with(rope, extra)});
        parse(&with(config_json("llama"), fields)).unwrap()
    };
    assert_eq!(yarn(json!({"finetuned": true})), yarn(json!({})));
}

/// Null in the text part is as if the field were not there.
#[test]
fn null_in_a_text_part_hides_nothing_beside_it() {
    let name = "ministral3";
    let beside = json!({"quantization_config": {"quant_method": "fp8"}, "eos_token_id": 7, "tie_word_embeddings": true});
    let mut config = with(config_json(name), beside);
    let fields = ["quantization_config", "eos_token_id", "tie_word_embeddings"];
    for field in fields {
        config["text_config"].as_object_mut().unwrap().remove(field);
    }
    let expected = parse(&config).unwrap();
    assert_eq!(expected.eos_token_ids, [7]);
    assert_ne!(
        expected.spec.quantization.format("model.layers.0.mlp.up_proj"),
        MatrixFormat::Plain
    );
    for field in fields {
        config["text_config"][field] = Value::Null;
    }
    assert_eq!(parse(&config).unwrap(), expected);
}

/// transformers from 4.56 on and unsloth write the type, other versions what all configurations have.
#[test]
fn what_tools_write_into_the_configuration_of_a_tower_changes_nothing() {
    for name in IMAGE_MODELS {
        let read = |config: &Value| {
            let directory = tempfile::tempdir().unwrap();
            std::fs::write(directory.path().join("config.json"), config.to_string()).unwrap();
            let serve_as = ServeAs {
                images: Some(IMAGE_LIMITS),
                ..ServeAs::default()
            };
            let config = ModelConfig::read(directory.path(), &serve_as);
            config.unwrap_or_else(|error| panic!("{name}: {error}")).encoder
        };
        let config = config_json(name);
        let fields = json!({"vision_config": {"dtype": "bfloat16", "torch_dtype": "float16", "attention_dropout": 0.0,
            "_attn_implementation_autoset": true, "initializer_range": 0.02, "is_encoder_decoder": false, "add_cross_attention": false,
            "tie_word_embeddings": true}});
        assert_eq!(read(&with(config.clone(), fields)), read(&config), "{name}");
    }
}

/// What of it would change something is refused by name.
#[test]
fn what_tools_write_and_is_not_served_is_refused_with_a_way_on() {
    let cases = [
        (
            "qwen3-moe",
            json!({"use_qk_norm": false}),
            "`use_qk_norm` is false",
        ),
        (
            "qwen3-moe",
            json!({"shared_expert_intermediate_size": 64}),
            "`shared_expert_intermediate_size` is 64",
        ),
        ("llama", json!({"use_qk_norm": true}), "`use_qk_norm` is true"),
        (
            "llama",
            json!({"eos_token_id": "</s>"}),
            "`eos_token_id`: a token id or a list of them is expected",
        ),
        (
            "llama",
            json!({"rope_parameters": null, "rope_scaling": {"type": "dynamic", "factor": 2.0}}),
            "within `max_position_embeddings`",
        ),
        (
            "ministral3",
            json!({"sliding_window": 9}),
            "what `text_config` says is; set it there with --hf-overrides '{\"text_config\":{\"sliding_window\":9}}'",
        ),
        (
            "qwen2_5-vl",
            json!({"num_hidden_layers": 1}),
            "--hf-overrides '{\"num_hidden_layers\":null}'",
        ),
        (
            "ministral3",
            json!({"tie_word_embeddings": false, "text_config": {"tie_word_embeddings": true}}),
            "false, and true in `text_config`",
        ),
        (
            "gemma4",
            json!({"per_layer_config": {"01": {"head_dim": 64}}}),
            "layer 1 is there twice",
        ),
    ];
    for (name, fields, message) in cases {
        assert_refused(name, &fields, message);
    }
}
