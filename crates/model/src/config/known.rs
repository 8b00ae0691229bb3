//! Which fields of config.json are known. One that is not could change the network, so it is an error.

use std::path::Path;

use serde_json::{Map, Value};

use super::around::Around;
use crate::{Architecture, ModelError};

/// What every family interprets.
const COMMON: &[&str] = &[
    "architectures",
    "compression_config",
    "dtype",
    "eos_token_id",
    "head_dim",
    "hidden_size",
    "intermediate_size",
    "is_matryoshka",
    "matryoshka_dimensions",
    "max_position_embeddings",
    "model_type",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "quantization_config",
    "rms_norm_eps",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "sbert_ce_default_activation_function",
    "sentence_transformers",
    "tie_word_embeddings",
    "torch_dtype",
    "vocab_size",
];

/// Fields of other networks, with the value, as JSON, at which they change nothing.
const NEUTRAL: &[(&str, &str)] = &[
    ("add_cross_attention", "false"),
    ("alibi", "false"),
    ("attention_bias", "false"),
    ("attention_multiplier", "1"),
    ("embedding_multiplier", "1"),
    ("full_attn_mod", "1"),
    ("hidden_act", "\"silu\""),
    ("hidden_activation", "\"silu\""),
    ("interpolate_factor", "1"),
    ("is_causal", "true"),
    ("is_encoder_decoder", "false"),
    ("lm_head_bias", "false"),
    ("logit_scale", "1"),
    ("logits_scaling", "1"),
    ("mlp_bias", "false"),
    ("mlp_only_layers", "[]"),
    ("num_experts", "0"),
    ("num_local_experts", "0"),
    ("num_nextn_predict_layers", "0"),
    ("partial_rotary_factor", "1"),
    ("position_embedding_type", "\"rope\""),
    ("residual_multiplier", "1"),
    ("rope_interleaved", "false"),
    ("tie_encoder_decoder", "false"),
    ("use_bias", "false"),
    ("use_bidirectional_attention", "false"),
    ("use_mrope", "false"),
];

/// Fields that say nothing about how to run the network: those of training and of transformers itself, and defaults of
/// generation, which older versions wrote here.
const INERT: &[&str] = &[
    "_attn_implementation",
    "_attn_implementation_autoset",
    "_commit_hash",
    "_name_or_path",
    "attention_dropout",
    "attn_implementation",
    "attn_pdrop",
    "auto_map",
    "bad_words_ids",
    "begin_suppress_tokens",
    "bos_token_id",
    "cache_implementation",
    "chunk_size_feed_forward",
    "cross_attention_hidden_size",
    "decoder_start_token_id",
    "diversity_penalty",
    "do_sample",
    "early_stopping",
    "embd_pdrop",
    "encoder_no_repeat_ngram_size",
    "exponential_decay_length_penalty",
    "ffn_pdrop",
    "finetuning_task",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "hidden_dropout",
    "id2label",
    "initializer_range",
    "is_decoder",
    "is_llama_config",
    "label2id",
    "length_penalty",
    "max_length",
    "min_length",
    "no_repeat_ngram_size",
    "num_beam_groups",
    "num_beams",
    "num_labels",
    "num_return_sequences",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "output_scores",
    "pad_token_id",
    "prefix",
    "pretraining_tp",
    "problem_type",
    "pruned_heads",
    "remove_invalid_values",
    "repetition_penalty",
    "resid_pdrop",
    "return_dict",
    "return_dict_in_generate",
    "router_aux_loss_coef",
    "router_jitter_noise",
    "sep_token_id",
    "suppress_tokens",
    "task_specific_params",
    "temperature",
    "tf_legacy_loss",
    "tokenizer_class",
    "top_k",
    "top_p",
    "torchscript",
    "transformers.js_config",
    "transformers_version",
    "typical_p",
    "unk_token_id",
    "unsloth_fixed",
    "unsloth_version",
    "use_bfloat16",
    "use_cache",
];

/// Fields around Gemma 4's text part.
const AROUND_GEMMA4: &[&str] = &[
    "audio_config",
    "audio_token_id",
    "boa_token_id",
    "boi_token_id",
    "eoa_token_id",
    "eoa_token_index",
    "eoi_token_id",
    "image_token_id",
    "video_token_id",
    "vision_config",
    "vision_soft_tokens_per_image",
];

/// Fields around the text parts of Qwen3-VL and later ones.
const AROUND_QWEN3: &[&str] = &[
    "image_token_id",
    "video_token_id",
    "vision_config",
    "vision_end_token_id",
    "vision_start_token_id",
];

/// Published files have the fields of its text part beside those of the encoder.
const QWEN2_5_VL: &str = "Qwen2_5_VLForConditionalGeneration";

/// Models of images and text whose text part is served: the name in `architectures`, the `model_type` of a text part that
/// does not say, and the fields around it, which are read where images are served.
const AROUND_TEXT: &[(&str, &str, &[&str])] = &[
    (
        "Gemma3ForConditionalGeneration",
        "gemma3_text",
        &[
            "boi_token_index",
            "eoi_token_index",
            "image_token_index",
            "mm_tokens_per_image",
            "vision_config",
        ],
    ),
    ("Gemma4ForConditionalGeneration", "gemma4_text", AROUND_GEMMA4),
    (
        "Gemma4UnifiedForConditionalGeneration",
        "gemma4_unified_text",
        AROUND_GEMMA4,
    ),
    ("Qwen3_5ForConditionalGeneration", "qwen3_5_text", AROUND_QWEN3),
    (
        "Qwen3_5MoeForConditionalGeneration",
        "qwen3_5_moe_text",
        AROUND_QWEN3,
    ),
    (
        QWEN2_5_VL,
        "qwen2_5_vl_text",
        &[
            "image_token_id",
            "video_token_id",
            "vision_config",
            "vision_end_token_id",
            "vision_start_token_id",
            "vision_token_id",
        ],
    ),
    ("Qwen3VLForConditionalGeneration", "qwen3_vl_text", AROUND_QWEN3),
    (
        "Mistral3ForConditionalGeneration",
        "mistral",
        &[
            "image_token_index",
            "multimodal_projector_bias",
            "projector_hidden_act",
            "spatial_merge_size",
            "vision_config",
            "vision_feature_layer",
        ],
    ),
];

/// Puts the text part of a model of images and text in its place, and returns what stands around it.
///
/// # Errors
/// [`ModelError`], which names the field at fault.
pub(super) fn unwrap_text(
    path: &Path,
    fields: &mut Map<String, Value>,
) -> Result<Option<Around>, ModelError> {
    let name = fields.get("architectures").and_then(|names| names[0].as_str());
    let Some((name, text_type, around)) = AROUND_TEXT.iter().find(|(known, ..)| Some(*known) == name) else {
        return Ok(None);
    };
    const OF_ALL: [&str; 2] = ["architectures", "model_type"];
    let mut text = match fields.remove("text_config") {
        Some(Value::Object(text)) => text,
        None if *name == QWEN2_5_VL => {
            let is_of_text = |field: &str| !around.contains(&field) && !OF_ALL.contains(&field);
            let all = std::mem::take(fields);
            let (text, others) = all.into_iter().partition(|(field, _)| is_of_text(field));
            *fields = others;
            text
        }
        _ => return Err(ModelError::config(path, "`text_config` is missing")),
    };
    const SHARED: [&str; 6] = [
        "compression_config",
        "dtype",
        "eos_token_id",
        "quantization_config",
        "tie_word_embeddings",
        "torch_dtype",
    ];
    let (mut around_text, mut others) = (Map::new(), Map::new());
    for (field, value) in std::mem::take(fields) {
        if SHARED.contains(&field.as_str()) {
            text.entry(field).or_insert(value);
        } else if around.contains(&field.as_str()) {
            around_text.insert(field, value);
        } else if !OF_ALL.contains(&field.as_str()) {
            others.insert(field, value);
        }
    }
    check_others(name, others.iter())?;
    // Text parts name no architecture, or the one without a head.
    text.insert("architectures".to_owned(), Value::Null);
    text.entry("model_type")
        .or_insert_with(|| Value::from(*text_type));
    *fields = text;
    Ok(Some(Around {
        name,
        fields: around_text,
    }))
}

/// Refuses fields that the family does not know, and such as ask for another network.
///
/// # Errors
/// [`ModelError::Unsupported`], which names the field.
pub(super) fn check(architecture: Architecture, fields: &Map<String, Value>) -> Result<(), ModelError> {
    let own = architecture.fields();
    let others = fields
        .iter()
        .filter(|(field, _)| !COMMON.contains(&field.as_str()) && !own.contains_key(*field));
    check_others(architecture.hf_name(), others)
}

/// Most unknown fields of which an error names all.
const MOST_LISTED: usize = 8;

/// Refuses fields that are not interpreted and may change something; all that the family does not know at once.
fn check_others<'a>(
    family: &str,
    others: impl Iterator<Item = (&'a String, &'a Value)>,
) -> Result<(), ModelError> {
    let mut unknown = Vec::new();
    for (field, value) in others.filter(|(field, value)| !value.is_null() && !is_inert(field)) {
        match NEUTRAL.iter().find(|(neutral, _)| *neutral == field) {
            Some((_, neutral)) if is(value, neutral) => {}
            Some((_, neutral)) => {
                return Err(ModelError::unsupported(
                    field,
                    value,
                    format!("only {neutral} is"),
                ));
            }
            None => unknown.push((field, value)),
        }
    }
    let Some((&(field, value), others)) = unknown.split_first() else {
        return Ok(());
    };
    let mut supported = format!("{family} has no such field here");
    // Names of any length, or that a shell would read, are not for a message that people paste.
    let is_plain = |name: &str| name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_');
    let are_named = unknown.len() <= MOST_LISTED && unknown.iter().all(|(field, _)| is_plain(field));
    match others.len() {
        0 => {}
        _ if are_named => {
            let others: Vec<_> = others.iter().map(|(field, _)| format!("`{field}`")).collect();
            supported += &format!(", nor {}", others.join(", "));
        }
        more => supported += &format!(", nor {more} others"),
    }
    if are_named {
        let removed: Map<String, Value> = unknown
            .iter()
            .map(|(field, _)| ((*field).clone(), Value::Null))
            .collect();
        supported += &format!(
            ". Remove what has no effect with --hf-overrides '{}'",
            Value::from(removed)
        );
    }
    Err(ModelError::unsupported(field, value, supported))
}

/// Whether a field says nothing about how to run a network.
pub(super) fn is_inert(field: &str) -> bool {
    INERT.contains(&field)
}

fn is(value: &Value, neutral: &str) -> bool {
    match (value.as_f64(), neutral.parse::<f64>()) {
        (Some(value), Ok(neutral)) => value == neutral,
        _ => neutral.parse::<Value>().is_ok_and(|neutral| neutral == *value),
    }
}
