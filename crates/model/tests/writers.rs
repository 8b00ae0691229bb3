//! What tools write into config.json beside what a network is: it changes nothing, or is refused with a way on.

use crate::common::configs::{assert_refused, config_json, parse, parse_with, with};
use crate::common::images::{IMAGE_LIMITS, IMAGE_MODELS};
use plimsoll_model::{MatrixFormat, ModelConfig, ServeAs};
use serde_json::{Value, json};

#[test]
fn what_tools_write_beside_a_network_changes_nothing() {
    let repeated = config_json("qwen2_5-vl")["text_config"].clone();
    let rope = ["rope_parameters", "rope_scaling"].map(|field| repeated[field].clone());
    let rope = rope.into_iter().find(Value::is_object).unwrap();
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
            "tools that write rope under its old and its new name",
            "qwen2_5-vl",
            json!({"text_config": {"rope_parameters": rope, "rope_scaling": rope}}),
        ),
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

/// Beside what each of them has to have.
#[test]
fn what_tools_write_of_quantisation_changes_nothing() {
    let four_bits = json!({"bits": 4, "group_size": 128});
    let scheme =
        json!({"num_bits": 4, "type": "int", "symmetric": true, "strategy": "group", "group_size": 128});
    let group = |weights: Value| json!({"targets": ["Linear"], "weights": weights});
    let compressed = json!({"quant_method": "compressed-tensors", "format": "pack-quantized",
        "config_groups": {"group_0": group(scheme.clone())}, "ignore": ["lm_head"]});
    let of = |method: &str, fields: Value| {
        let named = with(four_bits.clone(), json!({"quant_method": method}));
        with(named, fields)
    };
    let awq = of("awq", json!({"zero_point": true, "version": "gemm"}));
    let gptq = of("gptq", json!({"desc_act": false}));
    let auto_round = of(
        "auto-round",
        json!({"packing_format": "auto_round:auto_gptq", "sym": true}),
    );
    let cases = [
        (
            "AutoAWQ, before transformers' names",
            &awq,
            json!({"bits": null, "group_size": null, "w_bit": 4, "q_group_size": 128, "version": "GEMM"}),
        ),
        (
            "transformers 4.46",
            &awq,
            json!({"backend": "autoawq", "do_fuse": false}),
        ),
        (
            "transformers 5",
            &awq,
            json!({"damp_percent": 0.1, "desc_act": false, "act_group_aware": true, "sym": true, "true_sequential": true,
                "format": "gemm", "backend": "auto", "batch_size": 1, "cache_block_outputs": true}),
        ),
        (
            "GPTQModel 7",
            &awq,
            json!({"desc_act": false, "lm_head": false, "method": "awq", "format": "gemm", "checkpoint_format": "gemm",
                "pack_dtype": "int32", "meta": {"quantizer": ["gptqmodel:7.7.0"]}, "dynamic": {"lm_head": {}},
                "zero_point": false}),
        ),
        (
            "AutoRound",
            &awq,
            json!({"provider": "auto-round", "autoround_version": "0.16.1", "iters": 0, "data_type": "int", "sym": true,
                "zero_point": false, "static_kv_granularity": "tensor"}),
        ),
        (
            "GPTQModel 7",
            &gptq,
            json!({"sym": true, "lm_head": false, "method": "gptq", "format": "gptq", "checkpoint_format": "gptq",
                "pack_dtype": "int32", "meta": {"act_group_aware": true, "telemetry": {"device": false}}}),
        ),
        (
            "transformers 4.36",
            &gptq,
            json!({"damp_percent": 0.1, "use_cuda_fp16": false, "use_exllama": true, "exllama_config": {"version": 1},
                "batch_size": 1, "cache_block_outputs": true}),
        ),
        (
            "Qwen3.5's own",
            &gptq,
            json!({"dynamic": {"lm_head": {}, "model.language_model.embed_tokens": {}, "+:.*mlp.*": {"bits": 4, "mse": 2.0}}}),
        ),
        (
            "AutoRound",
            &gptq,
            json!({"provider": "auto-round", "autoround_version": "0.16.1", "enable_quanted_input": false, "iters": 200,
                "nsamples": 512, "data_type": "int", "true_sequential": false, "damp_percent": 0.01}),
        ),
        (
            "AutoRound, with layers that say the same once more",
            &auto_round,
            json!({"autoround_version": "0.14.2", "model_free": true, "extra_config": {"model.layers.0.mlp.up_proj":
                {"bits": 4, "data_type": "int", "act_bits": 16}}}),
        ),
        (
            "AutoRound",
            &compressed,
            json!({"provider": "auto-round", "quantization_status": "compressed"}),
        ),
        (
            "compressed-tensors up to 0.12",
            &compressed,
            json!({"global_compression_ratio": 1.7, "sparsity_config": {}, "transform_config": {}, "version": "0.12.2",
                "kv_cache_scheme": null, "config_groups": {"group_0": group(with(scheme.clone(), json!({"actorder": "static",
                "dynamic": false, "observer": "minmax", "observer_kwargs": {}})))}}),
        ),
        (
            "compressed-tensors, where the size of groups says the strategy",
            &compressed,
            json!({"config_groups": {"group_0": group(with(scheme.clone(), json!({"strategy": null})))}}),
        ),
    ];
    let parsed = |writer: &str, quantization: &Value| {
        let fields = json!({"quantization_config": quantization});
        let config = parse(&with(config_json("llama"), fields));
        let config = config.unwrap_or_else(|error| panic!("{writer}: {error}"));
        let modules = [
            "model.layers.0.mlp.up_proj",
            "model.layers.1.self_attn.q_proj",
            "lm_head",
        ];
        modules.map(|module| config.spec.quantization.format(module))
    };
    for (writer, base, fields) in cases {
        let found = parsed(writer, &with(base.clone(), fields));
        assert_eq!(found, parsed("none", base), "{writer}");
        assert!(
            matches!(
                found,
                [MatrixFormat::Int4(_), MatrixFormat::Int4(_), MatrixFormat::Plain]
            ),
            "{writer}"
        );
    }
}

/// What of it would change something is refused by name.
#[test]
fn what_tools_write_and_is_not_served_is_refused_with_a_way_on() {
    let quantization = |fields: Value| json!({"quantization_config": fields});
    let awq = |fields: Value| {
        quantization(with(
            json!({"quant_method": "awq", "bits": 4, "group_size": 128}),
            fields,
        ))
    };
    let auto_round = |layer: Value| {
        quantization(
            json!({"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "bits": 4, "group_size": 128,
            "extra_config": {"model.layers.0.mlp.up_proj": layer}}),
        )
    };
    let scheme = json!({"num_bits": 8, "type": "float", "strategy": "channel", "version": 1});
    let cases = [
        (
            "llama",
            json!({"quantization": {"group_size": 64, "bits": 4}}),
            "`quantization` is MLX's",
        ),
        (
            "llama",
            quantization(json!({"quant_method": "bitsandbytes"})),
            "before quantisation, or as a GGUF file",
        ),
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
            awq(json!({"ignore": ["lm_head"]})),
            "--hf-overrides '{\"quantization_config\":{\"ignore\":null}}'",
        ),
        (
            "llama",
            awq(json!({"backend": "llm-awq"})),
            "backend` is `llm-awq`",
        ),
        (
            "llama",
            awq(json!({"version": null, "format": "gemv"})),
            "format` is `gemv`",
        ),
        (
            "llama",
            awq(json!({"data_type": "mx_fp"})),
            "data_type` is \"mx_fp\"",
        ),
        (
            "llama",
            awq(json!({"dynamic": {"+:.*mlp.*": {"group_size": 32}}})),
            "dynamic` is `+:.*mlp.*`",
        ),
        (
            "llama",
            awq(json!({"dynamic": {".*mlp.*": false}})),
            "dynamic` is `.*mlp.*`",
        ),
        (
            "llama",
            auto_round(json!({"bits": 4, "data_type": "mx_fp"})),
            "up_proj.data_type` is \"mx_fp\"",
        ),
        (
            "llama",
            auto_round(json!({"act_bits": 8})),
            "up_proj.act_bits` is 8",
        ),
        (
            "llama",
            quantization(
                json!({"quant_method": "compressed-tensors", "format": "float-quantized", "version": "0.15",
                "config_groups": {"group_0": {"targets": ["Linear"], "weights": scheme}}}),
            ),
            "{\"config_groups\":{\"group_0\":{\"weights\":{\"version\":null}}}}",
        ),
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

/// Without which a field of a tool that is not known yet would leave no way to serve a model. The flag is the one that the error
/// prints, wherever the field stands.
#[test]
fn unknown_fields_can_be_removed() {
    let of_tool =
        json!({"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128, "ignore": []}});
    let in_text = json!({"text_config": of_tool});
    let unknown = json!({"made_up": 1});
    for (name, fields, flag) in [
        (
            "llama",
            of_tool.clone(),
            json!({"quantization_config": {"ignore": null}}),
        ),
        (
            "ministral3",
            in_text.clone(),
            json!({"text_config": {"quantization_config": {"ignore": null}}}),
        ),
        // transformers reads it there where the text part has none.
        (
            "ministral3",
            of_tool.clone(),
            json!({"quantization_config": {"ignore": null}}),
        ),
        ("llama", unknown.clone(), json!({"made_up": null})),
        (
            "ministral3",
            json!({"text_config": unknown}),
            json!({"text_config": {"made_up": null}}),
        ),
        ("ministral3", unknown.clone(), json!({"made_up": null})),
        ("qwen2_5-vl", unknown.clone(), json!({"made_up": null})),
    ] {
        let config = with(config_json(name), fields);
        let error = parse(&config).unwrap_err().to_string();
        let (_, printed) = error
            .split_once("--hf-overrides '")
            .unwrap_or_else(|| panic!("{error}"));
        let printed: Value = serde_json::from_str(printed.strip_suffix('\'').unwrap()).unwrap();
        assert_eq!(printed, flag, "{name}: {error}");
        let removed = parse_with(&config, &serde_json::from_value(printed).unwrap());
        assert!(removed.is_ok(), "{name}: {removed:?}");
    }
}
