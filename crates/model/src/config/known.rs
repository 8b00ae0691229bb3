//! Which fields of config.json are known. One that is not could change the network, so it is an error.

use std::path::Path;

use serde_json::{Map, Value, json};

use super::advice::{Part, Places, can_be_pasted, with_removal};
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
    "quantization",
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
    ("language_model_only", "false"),
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
    ("qkv_bias", "false"),
    ("residual_multiplier", "1"),
    ("rope_interleaved", "false"),
    ("shared_expert_intermediate_size", "0"),
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
    "_flash_attn_2_enabled",
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
    "gradient_checkpointing",
    "hidden_dropout",
    "id2label",
    "initializer_range",
    "is_decoder",
    "is_llama_config",
    "label2id",
    "length_penalty",
    "loss_type",
    "max_length",
    "max_sequence_length",
    "min_length",
    "model_max_length",
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
    "tokenizer_model_max_length",
    "tokenizer_padding_side",
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

/// A model of images and text whose text part is served.
struct AroundText {
    /// The name in `architectures`.
    name: &'static str,
    /// The `model_type`.
    model_type: &'static str,
    /// That of a text part which does not say.
    text_type: &'static str,
    /// The fields around the text part, which are read where images are served.
    fields: &'static [&'static str],
}

/// All of these.
const AROUND_TEXT: &[AroundText] = &[
    AroundText {
        name: "Gemma3ForConditionalGeneration",
        model_type: "gemma3",
        text_type: "gemma3_text",
        fields: &[
            "boi_token_index",
            "eoi_token_index",
            "image_token_index",
            "mm_tokens_per_image",
            "vision_config",
        ],
    },
    AroundText {
        name: "Gemma4ForConditionalGeneration",
        model_type: "gemma4",
        text_type: "gemma4_text",
        fields: AROUND_GEMMA4,
    },
    AroundText {
        name: "Gemma4UnifiedForConditionalGeneration",
        model_type: "gemma4_unified",
        text_type: "gemma4_unified_text",
        fields: AROUND_GEMMA4,
    },
    AroundText {
        name: "Qwen3_5ForConditionalGeneration",
        model_type: "qwen3_5",
        text_type: "qwen3_5_text",
        fields: AROUND_QWEN3,
    },
    AroundText {
        name: "Qwen3_5MoeForConditionalGeneration",
        model_type: "qwen3_5_moe",
        text_type: "qwen3_5_moe_text",
        fields: AROUND_QWEN3,
    },
    AroundText {
        name: QWEN2_5_VL,
        model_type: "qwen2_5_vl",
        text_type: "qwen2_5_vl_text",
        fields: &[
            "image_token_id",
            "video_token_id",
            "vision_config",
            "vision_end_token_id",
            "vision_start_token_id",
            "vision_token_id",
        ],
    },
    AroundText {
        name: "Qwen3VLForConditionalGeneration",
        model_type: "qwen3_vl",
        text_type: "qwen3_vl_text",
        fields: AROUND_QWEN3,
    },
    AroundText {
        name: "Mistral3ForConditionalGeneration",
        model_type: "mistral3",
        text_type: "mistral",
        fields: &[
            "image_token_index",
            "multimodal_projector_bias",
            "projector_hidden_act",
            "spatial_merge_size",
            "vision_config",
            "vision_feature_layer",
        ],
    },
];

/// What stood around a text part.
pub(super) struct Unwrapped {
    pub(super) around: Around,
    /// Fields beside the text part that it has too, or could have.
    pub(super) repeated: Map<String, Value>,
    pub(super) places: Places,
}

/// Puts the text part of a model of images and text in its place, and returns what stands around it.
///
/// # Errors
/// [`ModelError`], which names the field at fault.
pub(super) fn unwrap_text(
    path: &Path,
    fields: &mut Map<String, Value>,
) -> Result<Option<Unwrapped>, ModelError> {
    let text_of = |field: &str| fields.get(field).and_then(Value::as_str);
    let name = fields.get("architectures").and_then(|names| names[0].as_str());
    let is_it = |known: &&AroundText| match name {
        Some(name) => name == known.name,
        None => text_of("model_type") == Some(known.model_type),
    };
    let Some(known) = AROUND_TEXT.iter().find(is_it) else {
        return Ok(None);
    };
    const OF_ALL: [&str; 2] = ["architectures", "model_type"];
    let is_around = |field: &String| known.fields.contains(&field.as_str());
    let mut places = Places::default();
    let mut text = match fields.remove("text_config") {
        Some(Value::Object(text)) => {
            places.part = Part::Text;
            text
        }
        None if known.name == QWEN2_5_VL => {
            let is_of_text = |field: &String| !is_around(field) && !OF_ALL.contains(&field.as_str());
            let all = std::mem::take(fields);
            let (text, others) = all.into_iter().partition(|(field, _)| is_of_text(field));
            *fields = others;
            text
        }
        _ => return Err(ModelError::config(path, "`text_config` is missing")),
    };
    const SHARED: [&str; 7] = [
        "compression_config",
        "dtype",
        "eos_token_id",
        "quantization",
        "quantization_config",
        "tie_word_embeddings",
        "torch_dtype",
    ];
    // Text parts name no architecture, or the one without a head; some versions of transformers repeat what is around them.
    text.insert("architectures".to_owned(), Value::Null);
    text.retain(|field, _| !is_around(field));
    let text_type = text.entry("model_type").or_insert(Value::Null);
    if text_type.is_null() {
        *text_type = known.text_type.into();
    }
    let family = text_type.as_str().map(Architecture::from_model_type);
    let own = family.transpose()?.map(Architecture::fields).unwrap_or_default();
    check_heads(fields, &text)?;
    let (mut around_text, mut repeated, mut others) = (Map::new(), Map::new(), Map::new());
    let beside = std::mem::take(fields).into_iter();
    let is_given = |(field, value): &(String, Value)| !value.is_null() && !OF_ALL.contains(&field.as_str());
    for (field, value) in beside.filter(is_given) {
        if SHARED.contains(&field.as_str()) {
            // transformers takes the ends of texts from around the text part, and the rest from it.
            if field == "eos_token_id" || text.get(&field).is_none_or(Value::is_null) {
                places.around.push(field.clone());
                text.insert(field, value);
            }
        } else if is_around(&field) {
            around_text.insert(field, value);
        } else if COMMON.contains(&field.as_str()) || own.contains_key(&field) {
            repeated.insert(field, value);
        } else {
            others.insert(field, value);
        }
    }
    check_others(known.name, Part::Whole, others.iter())?;
    *fields = text;
    Ok(Some(Unwrapped {
        around: Around {
            name: known.name,
            fields: around_text,
        },
        repeated,
        places,
    }))
}

/// transformers up to 4 has the text part decide whether the head is the embedding, later ones what is around it. Where the two
/// disagree like this, only the weights tell.
fn check_heads(fields: &Map<String, Value>, text: &Map<String, Value>) -> Result<(), ModelError> {
    const FIELD: &str = "tie_word_embeddings";
    let is = |fields: &Map<_, _>, tied: bool| fields.get(FIELD) == Some(&Value::Bool(tied));
    match is(fields, false) && is(text, true) {
        false => Ok(()),
        true => Err(ModelError::unsupported(
            FIELD,
            "false, and true in `text_config`",
            "one of the two is; where the weights hold a head, such as `lm_head.weight`, say so with \
             --hf-overrides '{\"text_config\":{\"tie_word_embeddings\":false}}'",
        )),
    }
}

/// Most characters of a flag's value that a message offers.
const MOST_SHOWN: usize = 200;

/// An error about a field beside the text part that would change the model if transformers read it there.
pub(super) fn not_in_text(field: &str, value: &Value) -> ModelError {
    let in_text = json!({"text_config": {field: value}});
    let mut supported = "what `text_config` says is".to_owned();
    let shown = in_text.to_string();
    if shown.len() <= MOST_SHOWN && !shown.contains('\'') {
        supported += &format!("; set it there with --hf-overrides '{shown}'");
    }
    let supported = with_removal(supported, &[field], &json!({field: null}));
    ModelError::unsupported(field, value, supported)
}

/// Refuses fields that the family does not know, and such as ask for another network.
///
/// # Errors
/// [`ModelError::Unsupported`], which names the field.
pub(super) fn check(
    architecture: Architecture,
    places: &Places,
    fields: &Map<String, Value>,
) -> Result<(), ModelError> {
    let own = architecture.fields();
    let others = fields
        .iter()
        .filter(|(field, _)| !COMMON.contains(&field.as_str()) && !own.contains_key(*field));
    check_others(architecture.hf_name(), places.part, others)
}

/// Refuses fields that are not interpreted and may change something; all that the family does not know at once.
fn check_others<'a>(
    family: &str,
    part: Part,
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
    let names: Vec<&str> = unknown.iter().map(|(field, _)| field.as_str()).collect();
    match others.len() {
        0 => {}
        _ if can_be_pasted(&names) => {
            let others: Vec<_> = others.iter().map(|(field, _)| format!("`{field}`")).collect();
            supported += &format!(", nor {}", others.join(", "));
        }
        more => supported += &format!(", nor {more} others"),
    }
    let removed: Map<String, Value> = unknown
        .iter()
        .map(|(field, _)| ((*field).clone(), Value::Null))
        .collect();
    let supported = with_removal(supported, &names, &part.overrides(removed.into()));
    Err(ModelError::unsupported(field, value, supported))
}

/// Whether a field says nothing about how to run a network.
fn is_inert(field: &str) -> bool {
    INERT.contains(&field)
}

/// The same for the configuration of an image encoder, which has some fields that transformers writes for every kind of model.
pub(super) fn is_inert_in_tower(field: &str, value: &Value) -> bool {
    match field {
        // The tensors say in which type they are stored.
        "dtype" | "torch_dtype" | "tie_word_embeddings" => true,
        "add_cross_attention" | "is_encoder_decoder" | "tie_encoder_decoder" => *value == false,
        field => is_inert(field),
    }
}

fn is(value: &Value, neutral: &str) -> bool {
    match (value.as_f64(), neutral.parse::<f64>()) {
        (Some(value), Ok(neutral)) => value == neutral,
        _ => neutral.parse::<Value>().is_ok_and(|neutral| neutral == *value),
    }
}
