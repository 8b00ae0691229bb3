//! From config.json or GGUF metadata to a [`ModelConfig`].

use std::path::Path;

use plimsoll_core::{Matryoshka, MetaValue, Metadata, TokenId};
use plimsoll_kernels::WeightType;
use serde::Deserialize;
use serde_json::{Map, Value};

use crate::arch::Architecture;
use crate::embedding::{self, EmbeddingConfig, ServeAs};
use crate::generation::token_ids;
use crate::model::Description;
use crate::spec::{AttentionSpec, NormSpec, OutputHead};
use crate::{DecoderSpec, ModelError};

/// What a model says about itself.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// The family.
    pub architecture: Architecture,
    /// The network.
    pub spec: DecoderSpec,
    /// Tokens that end a text, as far as the configuration knows.
    pub eos_token_ids: Vec<TokenId>,
    /// The type in which config.json says the weights are stored.
    pub dtype: Option<WeightType>,
    /// How it makes vectors, where it is one for embeddings.
    pub embedding: Option<EmbeddingConfig>,
    /// Sizes to which its vectors may be cut.
    pub matryoshka: Matryoshka,
}

impl ModelConfig {
    /// Reads the config.json of a model directory, or the header of a GGUF file, of a model that is served so.
    ///
    /// # Errors
    /// [`ModelError`], which names what is at fault.
    pub fn read(path: &Path, serve_as: ServeAs) -> Result<Self, ModelError> {
        Description::read(path, serve_as).map(|description| description.config)
    }

    /// The same model, served so: one for embeddings needs no head.
    pub(crate) fn served(mut self, serve_as: ServeAs) -> Result<Self, ModelError> {
        self.embedding = serve_as.resolve(self.embedding)?;
        if self.embedding.is_some() {
            self.spec.head = OutputHead::None;
        }
        Ok(self)
    }

    /// Reads a Hugging Face config.json.
    pub fn read_json(path: &Path) -> Result<Self, ModelError> {
        let text = std::fs::read_to_string(path).map_err(ModelError::io(path))?;
        Self::from_json(path, &text)
    }

    /// Parses the text of a Hugging Face config.json; `path` is for messages.
    pub fn from_json(path: &Path, text: &str) -> Result<Self, ModelError> {
        let raw: RawConfig = serde_json::from_str(text).map_err(|error| ModelError::config(path, error))?;
        let headless = |name: &str| Architecture::ALL.into_iter().find(|a| a.headless_name() == name);
        let mut embedding = None;
        let architecture = match (raw.architectures.as_slice(), &raw.model_type) {
            ([name], _) => match headless(name) {
                Some(architecture) => {
                    embedding = Some(EmbeddingConfig::default());
                    architecture
                }
                None => Architecture::from_hf_name(name)?,
            },
            ([], Some(model_type)) => Architecture::from_model_type(model_type)?,
            ([], None) => {
                return Err(ModelError::config(
                    path,
                    "neither `architectures` nor `model_type` is given",
                ));
            }
            (names, _) => {
                return Err(ModelError::unsupported(
                    "architectures",
                    format!("{names:?}"),
                    "one name is",
                ));
            }
        };
        reject_unsupported(&raw.rest)?;
        Ok(Self {
            embedding,
            ..Self::new(path, architecture, &raw)?
        })
    }

    /// Reads the metadata of a GGUF file; `path` is for messages.
    pub fn from_gguf(path: &Path, metadata: &Metadata, tied_embeddings: bool) -> Result<Self, ModelError> {
        let fields = GgufFields::new(path, metadata)?;
        // Before the fields: an unknown architecture has other ones.
        let architecture = Architecture::from_gguf_name(fields.architecture)?;
        let raw = fields.raw_config(tied_embeddings)?;
        let architecture = match architecture {
            // GGUF calls Mistral models llama too.
            Architecture::Llama if raw.sliding_window.flatten().is_some() => Architecture::Mistral,
            architecture => architecture,
        };
        let embedding = match fields.get("pooling_type", MetaValue::as_u64)? {
            Some(code) => embedding::from_gguf(fields.key("pooling_type"), code)?,
            None => None,
        };
        Ok(Self {
            embedding,
            ..Self::new(path, architecture, &raw)?
        })
    }

    fn new(path: &Path, architecture: Architecture, raw: &RawConfig) -> Result<Self, ModelError> {
        let spec = architecture.spec(raw)?;
        check(path, &spec)?;
        let eos_token_ids = raw.eos_token_ids.clone();
        Ok(Self {
            architecture,
            spec,
            eos_token_ids,
            dtype: raw.weight_type()?,
            embedding: None,
            matryoshka: Matryoshka::new(raw.is_matryoshka, raw.matryoshka_dimensions.clone()),
        })
    }
}

/// The fields of config.json that families interpret; GGUF metadata is brought into the same form.
#[derive(Clone, Debug, Default, Deserialize)]
pub(crate) struct RawConfig {
    #[serde(default)]
    architectures: Vec<String>,
    model_type: Option<String>,
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
    /// Outer `None`: absent, which for Mistral is not the same as null.
    #[serde(default, deserialize_with = "present")]
    pub(crate) sliding_window: Option<Option<usize>>,
    pub(crate) use_sliding_window: Option<bool>,
    pub(crate) max_window_layers: Option<usize>,
    #[serde(default)]
    pub(crate) layer_types: Option<Vec<String>>,
    #[serde(default, rename = "eos_token_id", deserialize_with = "token_ids")]
    eos_token_ids: Vec<TokenId>,
    dtype: Option<String>,
    /// `dtype` up to transformers 4.
    torch_dtype: Option<String>,
    is_matryoshka: Option<bool>,
    matryoshka_dimensions: Option<Vec<usize>>,
    #[serde(flatten)]
    rest: Map<String, Value>,
}

impl RawConfig {
    fn weight_type(&self) -> Result<Option<WeightType>, ModelError> {
        Ok(Some(
            match self.dtype.as_deref().or(self.torch_dtype.as_deref()) {
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
            },
        ))
    }
}

/// `rope_scaling` or `rope_parameters`.
#[derive(Clone, Debug, Default, Deserialize)]
pub(crate) struct RawRope {
    #[serde(alias = "type")]
    pub(crate) rope_type: Option<String>,
    pub(crate) rope_theta: Option<f64>,
    pub(crate) factor: Option<f64>,
    pub(crate) low_freq_factor: Option<f64>,
    pub(crate) high_freq_factor: Option<f64>,
    pub(crate) original_max_position_embeddings: Option<f64>,
    pub(crate) partial_rotary_factor: Option<f64>,
}

fn present<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<Option<Option<usize>>, D::Error> {
    Option::deserialize(deserializer).map(Some)
}

/// Fields that change the network in ways this decoder does not know. They may be absent, null, false, zero or empty.
const UNSUPPORTED: [&str; 28] = [
    "quantization_config",
    "compression_config",
    "attention_bias",
    "mlp_bias",
    "use_bias",
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "moe_intermediate_size",
    "num_nextn_predict_layers",
    "kv_lora_rank",
    "rope_interleaved",
    "no_rope_layers",
    "no_rope_layer_interval",
    "alibi",
    "attention_chunk_size",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "query_pre_attn_scalar",
    "logit_scale",
    "logits_scaling",
    "embedding_multiplier",
    "residual_multiplier",
    "attention_multiplier",
    "vision_config",
    "audio_config",
    "is_encoder_decoder",
    "use_bidirectional_attention",
];

/// Fields with one supported value that is not empty.
const ONLY: [(&str, &str); 3] = [
    ("hidden_act", "silu"),
    ("hidden_activation", "silu"),
    ("position_embedding_type", "rope"),
];

/// Fields that say nothing about how to run the network.
const INERT: [&str; 21] = [
    "_name_or_path",
    "attention_dropout",
    "bos_token_id",
    "decoder_start_token_id",
    "hidden_dropout",
    "id2label",
    "initializer_range",
    "is_causal",
    "is_decoder",
    "is_llama_config",
    "label2id",
    "pad_token_id",
    "pretraining_tp",
    "resid_pdrop",
    "sep_token_id",
    "transformers.js_config",
    "transformers_version",
    "unk_token_id",
    "unsloth_version",
    "use_cache",
    "use_mrope",
];

fn reject_unsupported(rest: &Map<String, Value>) -> Result<(), ModelError> {
    for (field, value) in rest {
        if field == "is_causal" && *value == Value::Bool(false) {
            return Err(ModelError::unsupported(
                field,
                value,
                "only true is: tokens see those before them",
            ));
        }
        if is_empty(value) || INERT.contains(&field.as_str()) {
            continue;
        }
        if let Some((_, only)) = ONLY.iter().find(|(name, _)| name == field) {
            if value != only {
                return Err(ModelError::unsupported(field, value, format!("only {only} is")));
            }
        } else if field == "partial_rotary_factor" {
            if value.as_f64() != Some(1.0) {
                return Err(ModelError::unsupported(field, value, "only 1 is"));
            }
        } else if UNSUPPORTED.contains(&field.as_str()) {
            return Err(ModelError::unsupported(field, value, "only null and false are"));
        } else {
            tracing::warn!(field, %value, "config.json has a field that plays no role here");
        }
    }
    Ok(())
}

fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::Bool(true) => false,
        Value::Number(number) => number.as_f64() == Some(0.0),
        Value::String(text) => text.is_empty(),
        Value::Array(list) => list.is_empty(),
        Value::Object(map) => map.is_empty(),
    }
}

/// Largest head the kernels keep in registers and on the stack; those of known models end at 256.
const MOST_HEAD_DIM: usize = 256;

/// What every family needs and the decoder relies on.
fn check(path: &Path, spec: &DecoderSpec) -> Result<(), ModelError> {
    // Far above any model, and low enough that products of two cannot overflow.
    const MOST: usize = 1 << 28;
    let sizes = |sizes: &[(&str, usize)]| match sizes.iter().find(|(_, size)| !(1..=MOST).contains(size)) {
        Some((field, size)) => Err(ModelError::config(
            path,
            format!("`{field}` is {size}, which no model has"),
        )),
        None => Ok(()),
    };
    sizes(&[
        ("vocab_size", spec.vocab_size),
        ("hidden_size", spec.hidden_size),
        ("num_hidden_layers", spec.layers.len()),
        ("max_position_embeddings", spec.max_position_embeddings),
    ])?;
    for layer in &spec.layers {
        let attention = layer.attention();
        sizes(&[
            ("intermediate_size", layer.dense_mlp().intermediate_size),
            ("num_attention_heads", attention.heads),
            ("num_key_value_heads", attention.kv_heads),
            ("head_dim", attention.head_dim),
        ])?;
        check_attention(path, attention)?;
        check_norm(path, layer.norm)?;
    }
    let [first, ..] = &spec.layers[..] else {
        return Ok(());
    };
    if spec
        .attention()
        .any(|attention| attention.kv_size() != first.attention().kv_size())
    {
        // The KV cache has pages of one size.
        return Err(ModelError::unsupported(
            "num_key_value_heads",
            "not the same in all layers",
            "equally large keys and values in all layers are",
        ));
    }
    spec.own_cache_layout()
        .map_err(|error| ModelError::config(path, format!("`sliding_window`: {error}")))?;
    check_norm(path, spec.final_norm)
}

fn check_attention(path: &Path, attention: &AttentionSpec) -> Result<(), ModelError> {
    let AttentionSpec {
        heads,
        kv_heads,
        head_dim,
        ..
    } = *attention;
    if !heads.is_multiple_of(kv_heads) {
        let message =
            format!("`num_attention_heads` ({heads}) is no multiple of `num_key_value_heads` ({kv_heads})");
        return Err(ModelError::config(path, message));
    }
    if head_dim > MOST_HEAD_DIM {
        return Err(ModelError::unsupported(
            "head_dim",
            head_dim,
            format!("up to {MOST_HEAD_DIM} are"),
        ));
    }
    if !head_dim.is_multiple_of(2) {
        return Err(ModelError::config(
            path,
            format!("`head_dim` is {head_dim}, which is odd"),
        ));
    }
    let Some(rope) = &attention.rope else {
        return Ok(());
    };
    if !(rope.theta > 0.0 && rope.theta.is_finite()) {
        return Err(ModelError::config(
            path,
            format!("`rope_theta` is {}", rope.theta),
        ));
    }
    if !rope.rotary_dim.is_multiple_of(2) || !(2..=head_dim).contains(&rope.rotary_dim) {
        let message = format!(
            "`partial_rotary_factor` means that {} of {head_dim} elements of a head are rotated",
            rope.rotary_dim
        );
        return Err(ModelError::config(path, message));
    }
    Ok(())
}

fn check_norm(path: &Path, norm: NormSpec) -> Result<(), ModelError> {
    match norm.eps > 0.0 && norm.eps < 1.0 {
        true => Ok(()),
        false => Err(ModelError::config(
            path,
            format!("`rms_norm_eps` is {}", norm.eps),
        )),
    }
}

/// GGUF metadata with the architecture's prefix.
struct GgufFields<'a> {
    path: &'a Path,
    metadata: &'a Metadata,
    architecture: &'a str,
}

impl<'a> GgufFields<'a> {
    fn new(path: &'a Path, metadata: &'a Metadata) -> Result<Self, ModelError> {
        let architecture = metadata.get("general.architecture").and_then(MetaValue::as_str);
        let missing = || ModelError::config(path, "`general.architecture` is missing");
        Ok(Self {
            path,
            metadata,
            architecture: architecture.ok_or_else(missing)?,
        })
    }

    fn key(&self, field: &str) -> String {
        format!("{}.{field}", self.architecture)
    }

    /// `Ok(None)` where absent, an error where `read` does not understand the value.
    fn get<T>(&self, field: &str, read: fn(&MetaValue) -> Option<T>) -> Result<Option<T>, ModelError> {
        let key = self.key(field);
        let wrong =
            |value| ModelError::config(self.path, format!("`{key}` has an unexpected value {value:?}"));
        self.metadata
            .get(&key)
            .map(|value| read(value).ok_or_else(|| wrong(value)))
            .transpose()
    }

    fn size(&self, field: &str) -> Result<Option<usize>, ModelError> {
        self.get(field, |value| {
            value.as_u64().and_then(|value| usize::try_from(value).ok())
        })
    }

    fn required<T>(&self, field: &str, value: Option<T>) -> Result<T, ModelError> {
        value.ok_or_else(|| ModelError::config(self.path, format!("`{}` is missing", self.key(field))))
    }

    fn required_size(&self, field: &str) -> Result<usize, ModelError> {
        self.required(field, self.size(field)?)
    }

    fn raw_config(&self, tied_embeddings: bool) -> Result<RawConfig, ModelError> {
        for field in ["expert_count", "nextn_predict_layers", "attention.kv_lora_rank"] {
            if let Some(value) = self.size(field)?.filter(|&value| value > 0) {
                return Err(ModelError::unsupported(self.key(field), value, "only 0 is"));
            }
        }
        for field in [
            "logit_scale",
            "residual_scale",
            "embedding_scale",
            "attention.scale",
        ] {
            if let Some(value) = self
                .get(field, MetaValue::as_f64)?
                .filter(|&value| value != 1.0 && value != 0.0)
            {
                return Err(ModelError::unsupported(self.key(field), value, "only 1 is"));
            }
        }
        let hidden_size = self.required_size("embedding_length")?;
        let heads = self.required_size("attention.head_count")?;
        let head_dim = match self.size("attention.key_length")? {
            Some(key_length) => key_length,
            None => hidden_size / heads.max(1),
        };
        for field in ["attention.value_length", "rope.dimension_count"] {
            if let Some(value) = self.size(field)?.filter(|&value| value != head_dim) {
                let supported = format!("only the head's size, {head_dim}, is");
                return Err(ModelError::unsupported(self.key(field), value, supported));
            }
        }
        let eps = "attention.layer_norm_rms_epsilon";
        Ok(RawConfig {
            vocab_size: self.vocab_size()?,
            hidden_size,
            intermediate_size: self.required_size("feed_forward_length")?,
            num_hidden_layers: self.required_size("block_count")?,
            num_attention_heads: heads,
            num_key_value_heads: self.size("attention.head_count_kv")?,
            head_dim: Some(head_dim),
            rms_norm_eps: self.required(eps, self.get(eps, MetaValue::as_f64)?)?,
            max_position_embeddings: self.required_size("context_length")?,
            rope_theta: self.get("rope.freq_base", MetaValue::as_f64)?,
            rope_scaling: self.rope_scaling()?,
            tie_word_embeddings: Some(tied_embeddings),
            sliding_window: Some(self.size("attention.sliding_window")?),
            eos_token_ids: self.end_of_generation(),
            ..Default::default()
        })
    }

    fn vocab_size(&self) -> Result<usize, ModelError> {
        let tokens = self
            .metadata
            .get("tokenizer.ggml.tokens")
            .and_then(MetaValue::as_list);
        match (self.size("vocab_size")?, tokens) {
            (Some(size), _) => Ok(size),
            (None, Some(tokens)) => Ok(tokens.len()),
            (None, None) => self.required("vocab_size", None),
        }
    }

    fn rope_scaling(&self) -> Result<Option<RawRope>, ModelError> {
        let text = |value: &MetaValue| value.as_str().map(str::to_owned);
        let kind = self.get("rope.scaling.type", text)?.filter(|kind| kind != "none");
        // Older files give the factor alone.
        let factor = match self.get("rope.scaling.factor", MetaValue::as_f64)? {
            Some(factor) => Some(factor),
            None => self.get("rope.scale_linear", MetaValue::as_f64)?,
        };
        let kind = kind.or_else(|| {
            factor
                .filter(|&factor| factor != 1.0)
                .map(|_| "linear".to_owned())
        });
        Ok(kind.map(|kind| RawRope {
            rope_type: Some(kind),
            factor,
            ..Default::default()
        }))
    }

    /// The tokenizer's own end tokens, and like llama.cpp those of well-known text, since many files name only one of a
    /// chat model's two.
    fn end_of_generation(&self) -> Vec<TokenId> {
        const TEXTS: [&str; 7] = [
            "<|eot_id|>",
            "<|eom_id|>",
            "<|im_end|>",
            "<|end_of_text|>",
            "<|endoftext|>",
            "<|end|>",
            "<end_of_turn>",
        ];
        const CONTROL: u64 = 3;
        let id = |field: &str| {
            self.metadata
                .get(&format!("tokenizer.ggml.{field}"))
                .and_then(MetaValue::as_u64)
        };
        let list = |field: &str| {
            self.metadata
                .get(&format!("tokenizer.ggml.{field}"))
                .and_then(MetaValue::as_list)
                .unwrap_or_default()
        };
        let named = ["eos_token_id", "eot_token_id", "eom_token_id"]
            .into_iter()
            .filter_map(id);
        let by_text = list("tokens")
            .iter()
            .zip(list("token_type"))
            .zip(0_u64..)
            .filter_map(|((text, kind), id)| {
                let known = text.as_str().is_some_and(|text| TEXTS.contains(&text));
                (known && kind.as_u64() == Some(CONTROL)).then_some(id)
            });
        let mut ids: Vec<TokenId> = named
            .chain(by_text)
            .filter_map(|id| TokenId::try_from(id).ok())
            .collect();
        ids.sort_unstable();
        ids.dedup();
        ids
    }
}
