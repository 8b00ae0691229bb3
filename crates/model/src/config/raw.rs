//! The fields of config.json, as they are written.

use std::collections::BTreeMap;
use std::path::Path;

use plimsoll_core::{Matryoshka, TokenId};
use plimsoll_kernels::WeightType;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use super::quantization;
use crate::ModelError;
use crate::generation::token_ids;
use crate::quantization::Quantization;

/// The fields of config.json that families interpret; GGUF metadata is brought into the same form.
#[derive(Clone, Debug)]
pub(crate) struct RawConfig {
    pub(crate) vocab_size: usize,
    pub(crate) hidden_size: usize,
    pub(crate) intermediate_size: usize,
    pub(crate) num_hidden_layers: usize,
    pub(crate) num_attention_heads: usize,
    pub(crate) num_key_value_heads: Option<usize>,
    pub(crate) head_dim: Option<usize>,
    pub(crate) rms_norm_eps: f64,
    pub(crate) max_position_embeddings: usize,
    pub(crate) rope_theta: Option<f64>,
    /// Up to transformers 4.
    pub(crate) rope_scaling: Option<RawRope>,
    /// From transformers 5 on; holds `rope_theta` too.
    pub(crate) rope_parameters: Option<RawRope>,
    pub(crate) tie_word_embeddings: Option<bool>,
    pub(crate) sliding_window: Option<usize>,
    pub(crate) use_sliding_window: Option<bool>,
    pub(crate) max_window_layers: Option<usize>,
    pub(crate) layer_types: Option<Vec<String>>,
    pub(crate) sliding_window_pattern: Option<usize>,
    pub(crate) query_pre_attn_scalar: Option<f64>,
    pub(crate) hidden_act: Option<String>,
    pub(crate) hidden_activation: Option<String>,
    pub(crate) attn_logit_softcapping: Option<f64>,
    pub(crate) final_logit_softcapping: Option<f64>,
    pub(crate) rope_local_base_freq: Option<f64>,
    pub(crate) partial_rotary_factor: Option<f64>,
    pub(crate) original_max_position_embeddings: Option<f64>,
    pub(crate) no_rope_layers: Option<Vec<u8>>,
    pub(crate) no_rope_layer_interval: Option<usize>,
    pub(crate) full_attention_interval: Option<usize>,
    pub(crate) attn_output_gate: Option<bool>,
    pub(crate) output_gate_type: Option<String>,
    pub(crate) mamba_ssm_dtype: Option<String>,
    pub(crate) linear_conv_kernel_dim: Option<usize>,
    pub(crate) linear_key_head_dim: Option<usize>,
    pub(crate) linear_value_head_dim: Option<usize>,
    pub(crate) linear_num_key_heads: Option<usize>,
    pub(crate) linear_num_value_heads: Option<usize>,
    pub(crate) qkv_bias: Option<bool>,
    pub(crate) attention_bias: Option<bool>,
    pub(crate) experts_per_token: Option<usize>,
    pub(crate) initial_context_length: Option<usize>,
    pub(crate) swiglu_alpha: Option<f64>,
    pub(crate) swiglu_limit: Option<f64>,
    pub(crate) num_experts: Option<usize>,
    pub(crate) num_local_experts: Option<usize>,
    pub(crate) num_experts_per_tok: Option<usize>,
    pub(crate) moe_intermediate_size: Option<usize>,
    pub(crate) shared_expert_intermediate_size: Option<usize>,
    pub(crate) norm_topk_prob: Option<bool>,
    pub(crate) decoder_sparse_step: Option<usize>,
    pub(crate) mlp_only_layers: Option<Vec<usize>>,
    /// The family's positions may have three dimensions.
    pub(crate) has_mrope: bool,
    pub(crate) top_k_experts: Option<usize>,
    pub(crate) enable_moe_block: Option<bool>,
    pub(crate) use_double_wide_mlp: Option<bool>,
    pub(crate) global_head_dim: Option<usize>,
    pub(crate) num_global_key_value_heads: Option<usize>,
    /// From transformers 5.23 on, in place of the two before.
    pub(crate) per_layer_config: Option<BTreeMap<usize, RawLayer>>,
    pub(crate) attention_k_eq_v: Option<bool>,
    pub(crate) num_kv_shared_layers: Option<usize>,
    pub(crate) hidden_size_per_layer_input: Option<usize>,
    pub(crate) vocab_size_per_layer_input: Option<usize>,
    pub(crate) use_bidirectional_attention: Option<String>,
    pub(crate) quantization: Quantization,
    pub(super) eos_token_ids: Vec<TokenId>,
    pub(super) dtype: Option<WeightType>,
    pub(super) matryoshka: Matryoshka,
}

impl RawConfig {
    /// Reads fields of which all are known to the family.
    pub(super) fn read(has_mrope: bool, fields: &Fields<'_>) -> Result<Self, ModelError> {
        Ok(Self {
            has_mrope,
            quantization: quantization::read(fields.path, fields.values)?,
            vocab_size: fields.required("vocab_size")?,
            hidden_size: fields.required("hidden_size")?,
            intermediate_size: fields.required("intermediate_size")?,
            num_hidden_layers: fields.required("num_hidden_layers")?,
            num_attention_heads: fields.required("num_attention_heads")?,
            num_key_value_heads: fields.get("num_key_value_heads")?,
            head_dim: fields.get("head_dim")?,
            rms_norm_eps: fields.required("rms_norm_eps")?,
            max_position_embeddings: fields.required("max_position_embeddings")?,
            rope_theta: fields.get("rope_theta")?,
            rope_scaling: fields.get("rope_scaling")?,
            rope_parameters: fields.get("rope_parameters")?,
            tie_word_embeddings: fields.get("tie_word_embeddings")?,
            sliding_window: fields.get("sliding_window")?,
            use_sliding_window: fields.get("use_sliding_window")?,
            max_window_layers: fields.get("max_window_layers")?,
            layer_types: fields.get("layer_types")?,
            // transformers 4.56 and later write the field's value under the name of the attribute.
            sliding_window_pattern: match fields.get("_sliding_window_pattern")? {
                Some(pattern) => Some(pattern),
                None => fields.get("sliding_window_pattern")?,
            },
            query_pre_attn_scalar: fields.get("query_pre_attn_scalar")?,
            hidden_act: fields.get("hidden_act")?,
            hidden_activation: fields.get("hidden_activation")?,
            attn_logit_softcapping: fields.get("attn_logit_softcapping")?,
            final_logit_softcapping: fields.get("final_logit_softcapping")?,
            rope_local_base_freq: fields.get("rope_local_base_freq")?,
            partial_rotary_factor: fields.get("partial_rotary_factor")?,
            original_max_position_embeddings: fields.get("original_max_position_embeddings")?,
            no_rope_layers: fields.get("no_rope_layers")?,
            no_rope_layer_interval: fields.get("no_rope_layer_interval")?,
            full_attention_interval: fields.get("full_attention_interval")?,
            attn_output_gate: fields.get("attn_output_gate")?,
            output_gate_type: fields.get("output_gate_type")?,
            mamba_ssm_dtype: fields.get("mamba_ssm_dtype")?,
            linear_conv_kernel_dim: fields.get("linear_conv_kernel_dim")?,
            linear_key_head_dim: fields.get("linear_key_head_dim")?,
            linear_value_head_dim: fields.get("linear_value_head_dim")?,
            linear_num_key_heads: fields.get("linear_num_key_heads")?,
            linear_num_value_heads: fields.get("linear_num_value_heads")?,
            qkv_bias: fields.get("qkv_bias")?,
            attention_bias: fields.get("attention_bias")?,
            experts_per_token: fields.get("experts_per_token")?,
            initial_context_length: fields.get("initial_context_length")?,
            swiglu_alpha: fields.get("swiglu_alpha")?,
            swiglu_limit: fields.get("swiglu_limit")?,
            num_experts: fields.get("num_experts")?,
            num_local_experts: fields.get("num_local_experts")?,
            num_experts_per_tok: fields.get("num_experts_per_tok")?,
            moe_intermediate_size: fields.get("moe_intermediate_size")?,
            shared_expert_intermediate_size: fields.get("shared_expert_intermediate_size")?,
            norm_topk_prob: fields.get("norm_topk_prob")?,
            decoder_sparse_step: fields.get("decoder_sparse_step")?,
            mlp_only_layers: fields.get("mlp_only_layers")?,
            top_k_experts: fields.get("top_k_experts")?,
            enable_moe_block: fields.get("enable_moe_block")?,
            use_double_wide_mlp: fields.get("use_double_wide_mlp")?,
            global_head_dim: fields.get("global_head_dim")?,
            num_global_key_value_heads: fields.get("num_global_key_value_heads")?,
            per_layer_config: fields.get("per_layer_config")?,
            attention_k_eq_v: fields.get("attention_k_eq_v")?,
            num_kv_shared_layers: fields.get("num_kv_shared_layers")?,
            hidden_size_per_layer_input: fields.get("hidden_size_per_layer_input")?,
            vocab_size_per_layer_input: fields.get("vocab_size_per_layer_input")?,
            use_bidirectional_attention: both_ways(fields)?,
            eos_token_ids: fields
                .get("eos_token_id")?
                .map_or_else(Vec::new, |EosTokenIds(ids)| ids),
            dtype: weight_type(fields)?,
            matryoshka: matryoshka(fields)?,
        })
    }

    /// Elements of a head.
    pub(crate) fn head_dim(&self) -> usize {
        self.head_dim
            .unwrap_or(self.hidden_size / self.num_attention_heads.max(1))
    }
}

/// An object's fields, with errors that name them.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fields<'a> {
    path: &'a Path,
    values: &'a Map<String, Value>,
}

impl<'a> Fields<'a> {
    /// `path` is for messages.
    pub(super) fn new(path: &'a Path, values: &'a Map<String, Value>) -> Self {
        Self { path, values }
    }

    /// `None` where absent or null.
    pub(super) fn get<T: DeserializeOwned>(&self, field: &str) -> Result<Option<T>, ModelError> {
        let value = self.values.get(field).filter(|value| !value.is_null());
        let wrong = |error| ModelError::config(self.path, format!("`{field}`: {error}"));
        value
            .map(|value| T::deserialize(value).map_err(wrong))
            .transpose()
    }

    pub(super) fn required<T: DeserializeOwned>(&self, field: &str) -> Result<T, ModelError> {
        let missing = || ModelError::config(self.path, format!("`{field}` is missing"));
        self.get(field)?.ok_or_else(missing)
    }
}

#[derive(Debug, Deserialize)]
struct EosTokenIds(#[serde(deserialize_with = "token_ids")] Vec<TokenId>);

/// Other families have a flag of the same name, which says no where it is known.
fn both_ways(fields: &Fields<'_>) -> Result<Option<String>, ModelError> {
    match fields.get::<Value>("use_bidirectional_attention")? {
        Some(Value::Bool(false)) => Ok(None),
        _ => fields.get("use_bidirectional_attention"),
    }
}

fn weight_type(fields: &Fields<'_>) -> Result<Option<WeightType>, ModelError> {
    // `torch_dtype` up to transformers 4.
    let name = match fields.get::<String>("dtype")? {
        Some(name) => Some(name),
        None => fields.get("torch_dtype")?,
    };
    let kind = match name.as_deref() {
        None => return Ok(None),
        Some("float32") => WeightType::F32,
        Some("float16") => WeightType::F16,
        Some("bfloat16") => WeightType::Bf16,
        Some(other) => {
            let value = format!("`{other}`");
            return Err(ModelError::unsupported(
                "dtype",
                value,
                "float32, float16 and bfloat16 are",
            ));
        }
    };
    Ok(Some(kind))
}

pub(super) fn matryoshka(fields: &Fields<'_>) -> Result<Matryoshka, ModelError> {
    let (is_matryoshka, sizes) = (fields.get("is_matryoshka")?, fields.get("matryoshka_dimensions")?);
    Ok(Matryoshka::new(is_matryoshka, sizes))
}

/// The fields of a value that is written as an object.
pub(crate) fn object(value: Value) -> Map<String, Value> {
    match value {
        Value::Object(fields) => fields,
        other => unreachable!("{other} is no object"),
    }
}

/// What one layer has in place of what all have.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct RawLayer {
    pub(crate) head_dim: Option<usize>,
    pub(crate) num_key_value_heads: Option<usize>,
}

/// `rope_scaling` or `rope_parameters`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct RawRope {
    pub(crate) rope_type: Option<String>,
    /// `rope_type` in older files; newer ones may have both.
    #[serde(rename = "type")]
    pub(crate) old_type: Option<String>,
    pub(crate) rope_theta: Option<f64>,
    pub(crate) factor: Option<f64>,
    pub(crate) low_freq_factor: Option<f64>,
    pub(crate) high_freq_factor: Option<f64>,
    pub(crate) original_max_position_embeddings: Option<f64>,
    pub(crate) partial_rotary_factor: Option<f64>,
    pub(crate) attention_factor: Option<f64>,
    pub(crate) beta_fast: Option<f64>,
    pub(crate) beta_slow: Option<f64>,
    pub(crate) mscale: Option<f64>,
    pub(crate) mscale_all_dim: Option<f64>,
    pub(crate) truncate: Option<bool>,
    pub(crate) short_factor: Option<Vec<f64>>,
    pub(crate) long_factor: Option<Vec<f64>>,
    pub(crate) llama_4_scaling_beta: Option<f64>,
    /// Repeats the field beside it; transformers ignores it.
    #[serde(rename = "max_position_embeddings")]
    pub(crate) _max_position_embeddings: Option<f64>,
    /// How the dimensions of a position share the pairs of a head.
    pub(crate) mrope_section: Option<Vec<usize>>,
    pub(crate) mrope_interleaved: Option<bool>,
    /// Of layers of one kind, where kinds differ; there is nothing beside these then.
    pub(crate) full_attention: Option<Box<RawRope>>,
    pub(crate) sliding_attention: Option<Box<RawRope>>,
}

impl RawRope {
    pub(crate) fn kind(&self) -> Option<&str> {
        self.rope_type.as_deref().or(self.old_type.as_deref())
    }
}
