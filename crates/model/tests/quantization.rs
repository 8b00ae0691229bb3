//! `quantization_config`: what is refused and how it is said, and which format each matrix has.

use crate::common::configs::{assert_refused, config_json, parse, with};
use plimsoll_model::{Fp8Scales, Int4Format, Int4Groups, Int4Packing, MatrixFormat, ModelConfig, ServeAs};
use serde_json::{Value, json};

/// A `quantization_config` of `fp8` or compressed-tensors, with these fields in place of such as are served.
fn fp8(fields: Value) -> Value {
    json!({"quantization_config": with(json!({"quant_method": "fp8"}), fields)})
}

fn compressed(fields: Value) -> Value {
    let weights =
        json!({"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": true, "dynamic": false});
    let inputs =
        json!({"num_bits": 8, "type": "float", "strategy": "token", "symmetric": true, "dynamic": true});
    let group = json!({"targets": ["Linear"], "weights": weights, "input_activations": inputs});
    let config = json!({
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
    });
    json!({"quantization_config": with(config, fields)})
}

/// The same with another scheme of its weights.
fn weights(fields: Value) -> Value {
    let mut config = compressed(json!({}));
    let weights = &mut config["quantization_config"]["config_groups"]["group_0"]["weights"];
    *weights = with(weights.take(), fields);
    config
}

#[test]
fn unsupported_quantisation_is_named() {
    let cases = [
        (fp8(json!({"quant_method": "quark"})), "quant_method` is `quark`"),
        (
            fp8(json!({"quant_method": null, "bits": 4})),
            "quantization_config.quant_method` is missing",
        ),
        (
            fp8(json!({"quant_method": "fp8", "group_size": 64})),
            "unknown field `group_size`",
        ),
        (
            fp8(json!({"quant_method": "fp8", "expert_dtype": "fp4"})),
            "expert_dtype",
        ),
        (
            fp8(json!({"quant_method": "fp8", "fmt": "e5m2"})),
            "quantization_config.fmt",
        ),
        (
            fp8(json!({"quant_method": "fp8", "activation_scheme": "block"})),
            "activation_scheme",
        ),
        (
            fp8(json!({"quant_method": "fp8", "weight_block_size": [64, 128]})),
            "weight_block_size` is [64, 128]",
        ),
        (
            fp8(json!({"quant_method": "fp8", "modules_to_not_convert": ["("]})),
            "modules_to_not_convert",
        ),
        (
            fp8(json!({"quant_method": "fp8", "modules_to_convert": ["model.embed_tokens"]})),
            "modules_to_convert",
        ),
        (
            compressed(json!({"format": "marlin-24"})),
            "quantization_config.format` is `marlin-24`",
        ),
        (
            compressed(json!({"format": "nvfp4-pack-quantized"})),
            "nvfp4-pack-quantized",
        ),
        (
            compressed(json!({"quantization_status": "calibration"})),
            "quantization_status",
        ),
        (
            compressed(json!({"sparsity_config": {"format": "sparse-24-bitmask"}})),
            "sparsity_config.format",
        ),
        (
            compressed(json!({"ignore": ["re:(?!a)"]})),
            "quantization_config.ignore",
        ),
        (
            compressed(json!({"kv_cache_scheme": {"num_bits": 8, "type": "int"}})),
            "kv_cache_scheme` is 8-bit int",
        ),
        (weights(json!({"num_bits": 4})), "group_0.weights` is 4-bit float"),
        (weights(json!({"type": "int"})), "group_0.weights` is 8-bit int"),
        (weights(json!({"symmetric": false})), "weights.symmetric"),
        (weights(json!({"dynamic": true})), "weights.dynamic"),
        (
            weights(json!({"strategy": "group", "group_size": 32})),
            "weights.group_size",
        ),
        (
            weights(json!({"strategy": "group", "group_size": 128})),
            "weights.strategy",
        ),
        (
            weights(json!({"strategy": "block", "block_structure": [64, 64]})),
            "block_structure` is [64,64]",
        ),
        (weights(json!({"zero": 1})), "unknown field `zero`"),
    ];
    for (fields, message) in cases {
        assert_refused("llama", &fields, message);
    }
}

/// A `quantization_config` of integers of four bits, with these fields in place of such as are served.
fn gptq(fields: Value) -> Value {
    let config =
        json!({"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": true, "desc_act": false});
    json!({"quantization_config": with(config, fields)})
}

fn awq(fields: Value) -> Value {
    let config =
        json!({"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": true, "version": "gemm"});
    json!({"quantization_config": with(config, fields)})
}

fn auto_round(fields: Value) -> Value {
    let config = json!({
        "quant_method": "auto-round",
        "packing_format": "auto_round:auto_gptq",
        "bits": 4,
        "group_size": 128,
        "sym": true,
        "data_type": "int",
        "autoround_version": "0.9.0",
    });
    json!({"quantization_config": with(config, fields)})
}

fn packed(fields: Value) -> Value {
    let mut config = compressed(json!({"format": "pack-quantized"}));
    let group = &mut config["quantization_config"]["config_groups"]["group_0"];
    let weights =
        json!({"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": true});
    group["weights"] = with(weights, fields);
    group["input_activations"] = Value::Null;
    config
}

#[test]
fn four_bits_that_are_not_served_are_named() {
    let mut of_inputs = packed(json!({}));
    of_inputs["quantization_config"]["config_groups"]["group_0"]["input_activations"] =
        json!({"num_bits": 8});
    let cases = [
        (gptq(json!({"bits": 8})), "quantization_config.bits` is 8 bits"),
        (
            gptq(json!({"bits": null})),
            "quantization_config.bits` is missing bits",
        ),
        (
            gptq(json!({"group_size": 16})),
            "quantization_config.group_size` is 16",
        ),
        (
            gptq(json!({"checkpoint_format": "marlin"})),
            "checkpoint_format` is `marlin`",
        ),
        (
            gptq(json!({"is_marlin_format": true})),
            "is_marlin_format` is true",
        ),
        (gptq(json!({"lm_head": true})), "lm_head` is true"),
        (gptq(json!({"pack_dtype": "int8"})), "pack_dtype"),
        (
            gptq(json!({"dynamic": {"+:.*up_proj": {"bits": 8}}})),
            "dynamic` is `+:.*up_proj`",
        ),
        (
            gptq(json!({"modules_in_block_to_quantize": [["mlp.up_proj"]]})),
            "modules_in_block_to_quantize",
        ),
        (gptq(json!({"codebook": 1})), "unknown field `codebook`"),
        (
            awq(json!({"version": "gemv"})),
            "quantization_config.version` is `gemv`",
        ),
        (awq(json!({"version": "GEMV_fast"})), "version` is `gemv_fast`"),
        (awq(json!({"bits": 3})), "quantization_config.bits` is 3 bits"),
        (
            awq(json!({"group_size": 100})),
            "quantization_config.group_size` is 100",
        ),
        (awq(json!({"desc_act": true})), "desc_act` is true"),
        (
            auto_round(json!({"packing_format": null})),
            "packing_format` is missing",
        ),
        (
            auto_round(json!({"packing_format": "auto_round:exllamav2"})),
            "packing_format` is `auto_round:exllamav2`",
        ),
        (
            auto_round(json!({"bits": 2})),
            "quantization_config.bits` is 2 bits",
        ),
        (auto_round(json!({"data_type": "mx_fp"})), "data_type"),
        (auto_round(json!({"act_bits": 8})), "act_bits` is 8"),
        (
            auto_round(json!({"extra_config": {"model.layers.0.mlp.up_proj": {"bits": 8}}})),
            "extra_config.model.layers.0.mlp.up_proj` is 8 bits",
        ),
        (auto_round(json!({"codebook": 1})), "unknown field `codebook`"),
        (
            packed(json!({"num_bits": 8})),
            "group_0.weights.num_bits` is 8 bits",
        ),
        (
            packed(json!({"type": "float"})),
            "group_0.weights` is 4-bit float",
        ),
        (
            packed(json!({"group_size": 48})),
            "group_0.weights.group_size` is 48",
        ),
        (
            packed(json!({"group_size": null})),
            "group_0.weights.group_size` is missing",
        ),
        (
            packed(json!({"strategy": "tensor"})),
            "group_0.weights.strategy` is `tensor`",
        ),
        (
            packed(json!({"actorder": "other"})),
            "group_0.weights.actorder` is `other`",
        ),
        (of_inputs, "group_0.input_activations"),
        // Eight inputs are a word.
        (
            with(gptq(json!({})), json!({"intermediate_size": 100})),
            "for 100 inputs of `model.layers.0.mlp.down_proj`",
        ),
    ];
    for (fields, message) in cases {
        assert_refused("llama", &fields, message);
    }
}

#[test]
fn four_bits_are_where_the_configuration_says() {
    let format = |fields: &Value, module: &str| {
        let config =
            parse(&with(config_json("llama"), fields.clone())).unwrap_or_else(|error| panic!("{error}"));
        config.spec.quantization.format(module)
    };
    let stored = |packing, groups, ordered| {
        MatrixFormat::Int4(Int4Format {
            packing,
            groups,
            ordered,
        })
    };
    let first = Int4Packing::Gptq { zeros_less_one: true };
    let attention = ["q", "k", "v", "o"].map(|part| format!("model.layers.1.self_attn.{part}_proj"));
    let left: serde_json::Map<String, Value> = attention
        .iter()
        .map(|name| (name.clone(), json!({"bits": 16})))
        .collect();
    for (fields, of_up, is_query_left) in [
        (
            gptq(json!({"static_groups": false, "meta": {}})),
            stored(first, Int4Groups::Of128, false),
            false,
        ),
        (
            gptq(json!({"desc_act": true, "checkpoint_format": "gptq_v2", "dynamic": {"-:.*self_attn": {}}})),
            stored(
                Int4Packing::Gptq {
                    zeros_less_one: false,
                },
                Int4Groups::Of128,
                true,
            ),
            true,
        ),
        (
            gptq(json!({"dynamic": {"-:.*self_attn": null}})),
            stored(first, Int4Groups::Of128, false),
            true,
        ),
        (
            awq(json!({"group_size": -1})),
            stored(Int4Packing::Awq, Int4Groups::Channel, false),
            false,
        ),
        (
            awq(json!({"version": "GEMM", "modules_to_not_convert": ["self_attn"]})),
            stored(Int4Packing::Awq, Int4Groups::Of128, false),
            true,
        ),
        (
            auto_round(json!({"group_size": 32})),
            stored(first, Int4Groups::Of32, false),
            false,
        ),
        (
            auto_round(json!({"packing_format": "auto_round:auto_awq", "extra_config": left})),
            stored(Int4Packing::Awq, Int4Groups::Of128, false),
            true,
        ),
        (
            packed(json!({"symmetric": false, "group_size": 64, "actorder": "group"})),
            stored(
                Int4Packing::Compressed { symmetric: false },
                Int4Groups::Of64,
                true,
            ),
            false,
        ),
        (
            packed(json!({"strategy": "channel", "group_size": null, "actorder": "static"})),
            stored(
                Int4Packing::Compressed { symmetric: true },
                Int4Groups::Channel,
                false,
            ),
            false,
        ),
    ] {
        let of_query = if is_query_left { MatrixFormat::Plain } else { of_up };
        for (module, want) in [
            ("model.layers.0.mlp.up_proj", of_up),
            ("model.layers.1.self_attn.q_proj", of_query),
            ("lm_head", MatrixFormat::Plain),
            ("model.embed_tokens", MatrixFormat::Plain),
        ] {
            assert_eq!(format(&fields, module), want, "{fields}: {module}");
        }
        if fields["quantization_config"]["quant_method"] != "compressed-tensors" {
            assert_eq!(
                format(&fields, "model.layers.0.mlp.gate"),
                MatrixFormat::Plain,
                "{fields}"
            );
        }
    }
}

#[test]
fn matrices_have_the_format_that_the_configuration_says() {
    let format = |fields: &Value, module: &str| {
        let config =
            parse(&with(config_json("llama"), fields.clone())).unwrap_or_else(|error| panic!("{error}"));
        config.spec.quantization.format(module)
    };
    let (query, up) = ("model.layers.1.self_attn.q_proj", "model.layers.0.mlp.up_proj");
    let stored = |scales, input_scale| MatrixFormat::Fp8 { scales, input_scale };
    let block = json!([128, 128]);
    let layers = ["q", "k", "v"].map(|part| format!("model.layers.1.self_attn.{part}_proj"));
    for (fields, of_up, of_query) in [
        (
            fp8(
                json!({"activation_scheme": "dynamic", "weight_block_size": block, "modules_to_not_convert": layers}),
            ),
            stored(Fp8Scales::Block, false),
            MatrixFormat::Plain,
        ),
        (
            fp8(
                json!({"activation_scheme": "static", "weight_block_size": null, "ignored_layers": ["lm_head"]}),
            ),
            stored(Fp8Scales::Tensor, true),
            stored(Fp8Scales::Tensor, true),
        ),
        (
            compressed(json!({"ignore": ["lm_head", "re:.*self_attn.*"]})),
            stored(Fp8Scales::Channel, false),
            MatrixFormat::Plain,
        ),
        (
            weights(json!({"strategy": "block", "block_structure": "128x128"})),
            stored(Fp8Scales::Block, false),
            stored(Fp8Scales::Block, false),
        ),
        (json!({}), MatrixFormat::Plain, MatrixFormat::Plain),
    ] {
        assert_eq!(format(&fields, up), of_up, "{fields}");
        assert_eq!(format(&fields, query), of_query, "{fields}");
        assert_eq!(format(&fields, "lm_head"), MatrixFormat::Plain, "{fields}");
        assert_eq!(
            format(&fields, "model.embed_tokens"),
            MatrixFormat::Plain,
            "{fields}"
        );
    }
}

/// Beside the configuration of the text, as it is published, or in it.
#[test]
fn quantisation_of_models_of_images_is_that_of_their_text() {
    let quantization =
        fp8(json!({"modules_to_not_convert": ["model.language_model.layers.0.mlp", "lm_head"]}));
    for fields in [quantization.clone(), json!({"text_config": quantization})] {
        let config = parse(&with(config_json("ministral3"), fields)).unwrap();
        let format = |module: &str| config.spec.quantization.format(module);
        assert_eq!(format("model.layers.0.mlp.up_proj"), MatrixFormat::Plain);
        assert_ne!(format("model.layers.1.mlp.up_proj"), MatrixFormat::Plain);
    }
}

/// What ModelOpt writes, with these fields in place of such as are served.
fn modelopt(fields: Value) -> Value {
    let config = json!({"quant_algo": "FP8", "kv_cache_quant_algo": "FP8",
        "exclude_modules": ["lm_head", "model.layers.0.self_attn*"]});
    with(config, fields)
}

/// A Llama whose config.json has these fields, with this beside it.
fn beside(config: &Value, file: &Value) -> Result<ModelConfig, String> {
    let directory = tempfile::tempdir().unwrap();
    let write =
        |name: &str, text: &Value| std::fs::write(directory.path().join(name), text.to_string()).unwrap();
    write("config.json", &with(config_json("llama"), config.clone()));
    write("hf_quant_config.json", file);
    ModelConfig::read(directory.path(), &ServeAs::default()).map_err(|error| error.to_string())
}

/// In the file of its own, and in config.json, where newer exports have it too.
#[test]
fn what_modelopt_writes_is_read_wherever_it_stands() {
    let producer = json!({"name": "modelopt", "version": "0.29.0"});
    for (algorithm, scales, input_scale) in [
        ("FP8", Fp8Scales::Tensor, true),
        ("FP8_PER_CHANNEL_PER_TOKEN", Fp8Scales::Channel, false),
        ("fp8_pb_wo", Fp8Scales::Block, false),
    ] {
        let fields = modelopt(json!({"quant_algo": algorithm}));
        let file = json!({"producer": producer, "quantization": fields});
        let newer = json!({"quantization_config": {"quant_method": "modelopt", "quant_algo": algorithm, "producer": producer,
            "ignore": fields["exclude_modules"], "config_groups": {},
            "kv_cache_scheme": {"dynamic": false, "num_bits": 8, "type": "float"}}});
        let older = with(
            newer.clone(),
            json!({"quantization_config": {"kv_cache_scheme": "FP8"}}),
        );
        let alone = parse(&with(config_json("llama"), newer.clone())).unwrap();
        let quantization = &alone.spec.quantization;
        let eight_bits = MatrixFormat::Fp8 { scales, input_scale };
        for (module, format) in [
            ("model.layers.0.self_attn.q_proj", MatrixFormat::Plain),
            ("model.layers.0.mlp.up_proj", eight_bits),
            ("model.layers.1.self_attn.q_proj", eight_bits),
            ("model.layers.1.mlp.gate", MatrixFormat::Plain),
            ("lm_head", MatrixFormat::Plain),
        ] {
            assert_eq!(quantization.format(module), format, "{algorithm}: {module}");
        }
        assert_eq!(beside(&json!({}), &file).unwrap(), alone);
        assert_eq!(beside(&newer, &file).unwrap(), alone);
        assert_eq!(
            beside(&older, &json!({"quantization": {"quant_algo": "NVFP4"}})).unwrap(),
            alone
        );
    }
    // The KV cache alone.
    let plain = beside(
        &json!({}),
        &json!({"quantization": modelopt(json!({"quant_algo": null}))}),
    );
    assert!(!plain.unwrap().spec.quantization.is_some());
}

#[test]
fn what_modelopt_writes_and_is_not_served_is_named() {
    let file = |fields: Value| json!({"quantization": modelopt(fields)});
    for (file, message) in [
        (
            file(json!({"quant_algo": "NVFP4", "group_size": 16})),
            "configuration field `hf_quant_config.json: quantization.quant_algo` is `NVFP4`, which is not supported; `FP8`, ",
        ),
        (
            file(json!({"quant_algo": "W4A8_AWQ"})),
            "quant_algo` is `W4A8_AWQ`",
        ),
        (
            file(json!({"quant_algo": "MIXED_PRECISION", "quantized_layers": {}})),
            "quant_algo` is `MIXED_PRECISION`",
        ),
        (
            file(json!({"kv_cache_quant_algo": "NVFP4"})),
            "quantization.kv_cache_quant_algo` is \"NVFP4\"",
        ),
        (
            file(json!({"quantized_layers": {"lm_head": {"quant_algo": "NVFP4"}}})),
            "quantization.quantized_layers`",
        ),
        (
            file(json!({"pre_quant_scale": true})),
            "quantization.pre_quant_scale` is true",
        ),
        (
            file(json!({"lora_rank": 32})),
            "unknown field `lora_rank`. Remove what has no effect with --hf-overrides '{\"quantization_config\":{\"lora_rank\":null}}'",
        ),
        (
            json!({"producer": {"name": "modelopt"}}),
            "hf_quant_config.json: `quantization` is missing",
        ),
        (
            json!({"quantization": modelopt(json!({})), "more": 1}),
            "hf_quant_config.json: unknown field `more`",
        ),
        (json!([]), "hf_quant_config.json: "),
    ] {
        let error = beside(&json!({}), &file).unwrap_err();
        assert!(error.contains(message), "{file}: {error}");
    }
    for (fields, message) in [
        (
            json!({"quant_algo": "NVFP4"}),
            "quantization_config.quant_algo` is `NVFP4`",
        ),
        (
            json!({"kv_cache_scheme": {"dynamic": false, "num_bits": 4, "type": "float"}}),
            "quantization_config.kv_cache_scheme",
        ),
    ] {
        let config = with(json!({"quant_method": "modelopt", "quant_algo": "FP8"}), fields);
        assert_refused("llama", &json!({"quantization_config": config}), message);
    }
}
