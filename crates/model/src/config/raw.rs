//! The fields of config.json, as they are written.

use std::collections::BTreeMap;
use std::path::Path;

use plimsoll_core::{Matryoshka, TokenId};
use plimsoll_kernels::WeightType;
use serde::Deserialize;
use serde::de::{DeserializeOwned, Deserializer, Error as _};
use serde_json::{Map, Value};

use super::advice::Places;
use super::quantization;
use crate::ModelError;
use crate::generation::token_ids;
use crate::quantization::Quantization;

/// The fields of config.json that families interpret; GGUF metadata is brought into the same form.
#[derive(Clone, Debug, Deserialize)]
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
    /// transformers 4.56 and later write the field's value under the name of the attribute.
    #[serde(rename = "_sliding_window_pattern")]
    newer_sliding_window_pattern: Option<usize>,
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
    pub(crate) use_qk_norm: Option<bool>,
    pub(crate) decoder_sparse_step: Option<usize>,
    pub(crate) mlp_only_layers: Option<Vec<usize>>,
    /// The family's positions may have three dimensions.
    #[serde(skip)]
    pub(crate) has_mrope: bool,
    pub(crate) top_k_experts: Option<usize>,
    pub(crate) enable_moe_block: Option<bool>,
    pub(crate) use_double_wide_mlp: Option<bool>,
    pub(crate) global_head_dim: Option<usize>,
    pub(crate) num_global_key_value_heads: Option<usize>,
    /// From transformers 5.23 on, in place of the two before.
    #[serde(default, deserialize_with = "layers")]
    pub(crate) per_layer_config: Option<BTreeMap<usize, RawLayer>>,
    pub(crate) attention_k_eq_v: Option<bool>,
    pub(crate) num_kv_shared_layers: Option<usize>,
    pub(crate) hidden_size_per_layer_input: Option<usize>,
    pub(crate) vocab_size_per_layer_input: Option<usize>,
    #[serde(default, deserialize_with = "both_ways")]
    pub(crate) use_bidirectional_attention: Option<String>,
    #[serde(skip)]
    pub(crate) quantization: Quantization,
    #[serde(default, rename = "eos_token_id", deserialize_with = "token_ids")]
    pub(super) eos_token_ids: Vec<TokenId>,
    #[serde(skip)]
    pub(super) dtype: Option<WeightType>,
    #[serde(skip)]
    pub(super) matryoshka: Matryoshka,
}

impl RawConfig {
    /// Reads fields of which all are known to the family.
    pub(super) fn read(has_mrope: bool, places: &Places, fields: &Fields<'_>) -> Result<Self, ModelError> {
        let quantization = quantization::read(fields.path, places, fields.values)?;
        let raw: Self = fields.read()?;
        Ok(Self {
            has_mrope,
            quantization,
            sliding_window_pattern: raw.newer_sliding_window_pattern.or(raw.sliding_window_pattern),
            dtype: weight_type(fields)?,
            matryoshka: matryoshka(fields)?,
            ..raw
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

    /// All fields of a struct.
    fn read<T: DeserializeOwned>(&self) -> Result<T, ModelError> {
        let given = self.values.iter().filter(|(_, value)| !value.is_null());
        let given: Map<_, _> = given
            .map(|(field, value)| (field.clone(), value.clone()))
            .collect();
        serde_path_to_error::deserialize(Value::Object(given)).map_err(|error| {
            let message = match error.path().iter().next() {
                Some(field) => format!("`{field}`: {}", error.inner()),
                None => error.inner().to_string(),
            };
            match message.strip_prefix("missing field ") {
                Some(field) => self.missing(field),
                None => ModelError::config(self.path, message),
            }
        })
    }

    pub(super) fn required<T: DeserializeOwned>(&self, field: &str) -> Result<T, ModelError> {
        self.get(field)?
            .ok_or_else(|| self.missing(&format!("`{field}`")))
    }

    fn missing(&self, field: &str) -> ModelError {
        ModelError::config(
            self.path,
            format!("{field} is missing: --hf-overrides can set it"),
        )
    }
}

/// Other families have a flag of the same name, which says no where it is known.
fn both_ways<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<String>, D::Error> {
    match Value::deserialize(deserializer)? {
        Value::Bool(false) => Ok(None),
        value => String::deserialize(value).map(Some).map_err(D::Error::custom),
    }
}

/// transformers fills the numbers of layers up with zeros, to one length.
fn layers<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<BTreeMap<usize, RawLayer>>, D::Error> {
    let mut layers = BTreeMap::new();
    for (name, layer) in BTreeMap::<String, RawLayer>::deserialize(deserializer)? {
        let index: usize = name
            .parse()
            .map_err(|error| D::Error::custom(format!("`{name}`: {error}")))?;
        if layers.insert(index, layer).is_some() {
            return Err(D::Error::custom(format!("layer {index} is there twice")));
        }
    }
    Ok(Some(layers))
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
    /// Whether a model was trained with the scaling, in files of the first models with YaRN.
    #[serde(rename = "finetuned")]
    pub(crate) _finetuned: Option<bool>,
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
