//! Gemma 4's keys, which differ by kind of layer (`Gemma4Model` of llama.cpp's converter).

use serde_json::{Map, Value, json};

use super::{GgufFields, GgufTensors};
use crate::ModelError;
use crate::config::raw::object;

/// A divisor of a frequency from which on a pair does not turn.
const STILL: f32 = 1e29;

/// As the fields of config.json.
pub(super) fn config(
    fields: &GgufFields<'_>,
    tensors: &GgufTensors,
) -> Result<Map<String, Value>, ModelError> {
    for field in ["rope.scaling.factor", "attention.scale", "nextn_predict_layers"] {
        fields.only(field, &[1.0, 0.0])?;
    }
    let layers = fields.required_size("block_count")?;
    let field = "attention.sliding_window_pattern";
    let Some((_, kinds)) = fields.window_pattern()? else {
        return fields.required(field, None);
    };
    let slides = |layer: usize| kinds[layer] == "sliding_attention";
    let head_dims = ["attention.key_length", "attention.key_length_swa"];
    let [full, sliding] = head_dims.map(|field| fields.required_size(field));
    let (full, sliding) = (full?, sliding?);
    for (field, size) in [
        ("attention.value_length", full),
        ("attention.value_length_swa", sliding),
        ("rope.dimension_count", full),
        ("rope.dimension_count_swa", sliding),
    ] {
        fields.only(field, &[size as f64])?;
    }
    let kv_heads = of_layers(fields, "attention.head_count_kv", layers)?;
    let own_heads = |layer: usize| {
        let head_dim = if slides(layer) { sliding } else { full };
        (
            layer.to_string(),
            json!({"head_dim": head_dim, "num_key_value_heads": kv_heads[layer]}),
        )
    };
    let per_layer: Map<String, Value> = (0..layers).map(own_heads).collect();
    let shared = fields.size("attention.shared_kv_layers")?.unwrap_or(0);
    let inner = of_layers(fields, "feed_forward_length", layers)?;
    let is_double_wide = inner.first() != inner.last();
    let first_shared = layers.saturating_sub(shared);
    for (layer, &found) in inner.iter().enumerate() {
        let expected = inner[0]
            * if is_double_wide && layer >= first_shared {
                2
            } else {
                1
            };
        if found != expected {
            return Err(ModelError::unsupported(
                format!("{}[{layer}]", fields.key("feed_forward_length")),
                found,
                format!(
                    "only {expected} is: as wide as the first layer's, or twice that where keys and values are shared"
                ),
            ));
        }
    }
    let eps = "attention.layer_norm_rms_epsilon";
    let vocab_size = fields.vocab_size()?;
    let experts = fields.size("expert_count")?.unwrap_or(0);
    let of_experts = |field: &str| match experts {
        0 => Ok(None),
        _ => fields.required_size(field).map(Some),
    };
    let has_no_values = |layer: &usize| tensors.without_values.contains(layer);
    let mut values = object(json!({
        "vocab_size": vocab_size,
        "hidden_size": fields.required_size("embedding_length")?,
        "intermediate_size": inner[0],
        "num_hidden_layers": layers,
        "num_attention_heads": fields.required_size("attention.head_count")?,
        "num_key_value_heads": kv_heads[0],
        "head_dim": sliding,
        "per_layer_config": per_layer,
        "attention_k_eq_v": (0..layers).filter(|&layer| !slides(layer)).any(|layer| has_no_values(&layer)),
        "num_kv_shared_layers": shared,
        "use_double_wide_mlp": is_double_wide,
        "rms_norm_eps": fields.required(eps, fields.float(eps)?)?,
        "max_position_embeddings": fields.required_size("context_length")?,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": fields.float("rope.freq_base_swa")?.unwrap_or(1e4)},
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": fields.float("rope.freq_base")?.unwrap_or(1e6),
                "partial_rotary_factor": turning(fields, tensors, full / 2)?,
            },
        },
        "tie_word_embeddings": tensors.tied_embeddings,
        "layer_types": kinds,
        "final_logit_softcapping": fields.float("final_logit_softcapping")?.filter(|&cap| cap != 0.0),
        "hidden_size_per_layer_input": fields.size("embedding_length_per_layer_input")?.unwrap_or(0),
        "vocab_size_per_layer_input": vocab_size,
        "enable_moe_block": experts > 0,
        "num_experts": of_experts("expert_count")?,
        "top_k_experts": of_experts("expert_used_count")?,
        "moe_intermediate_size": of_experts("expert_feed_forward_length")?,
        "eos_token_id": fields.end_of_generation(),
    }));
    if let Some(window) = fields.window()? {
        values.insert("sliding_window".to_owned(), json!(window));
    }
    Ok(values)
}

/// A size that all layers have, or a list with that of each.
fn of_layers(fields: &GgufFields<'_>, field: &str, layers: usize) -> Result<Vec<usize>, ModelError> {
    let sizes = fields.get(field, |value| match value.as_list() {
        None => Some(vec![value.as_u64()?]),
        Some(list) => list.iter().map(plimsoll_core::MetaValue::as_u64).collect(),
    })?;
    let mut sizes: Vec<usize> = fields
        .required(field, sizes)?
        .into_iter()
        .map(|size| usize::try_from(size).unwrap_or(usize::MAX))
        .collect();
    if let [size] = sizes[..] {
        sizes = vec![size; layers];
    }
    if sizes.len() != layers || layers == 0 {
        return Err(ModelError::unsupported(
            fields.key(field),
            format!("a list of {}", sizes.len()),
            format!("a size, or one for each of {layers} layers is"),
        ));
    }
    Ok(sizes)
}

/// Which part of the pairs of a head turns: the others are divided by so much that they do not.
fn turning(fields: &GgufFields<'_>, tensors: &GgufTensors, pairs: usize) -> Result<f64, ModelError> {
    let name = "rope_freqs.weight";
    let missing = || ModelError::config(fields.path, format!("the tensor `{name}` is missing"));
    let divisors = tensors.rope_divisors.as_deref().ok_or_else(missing)?;
    let turn = divisors.iter().take_while(|&&divisor| divisor == 1.0).count();
    let is_known = divisors.len() == pairs && divisors[turn..].iter().all(|&divisor| divisor >= STILL);
    match is_known {
        true => Ok(turn as f64 / pairs.max(1) as f64),
        false => Err(ModelError::unsupported(
            name,
            format!("{} divisors, of which the first {turn} are 1", divisors.len()),
            format!("{pairs} are, 1 for pairs that turn and behind them {STILL:e} and more for others"),
        )),
    }
}
