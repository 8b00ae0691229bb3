//! The metadata of a GGUF file, as the fields that config.json would have.

mod gemma4;

use std::collections::BTreeSet;
use std::path::Path;

use plimsoll_core::{MetaValue, Metadata, TokenId};
use serde_json::{Map, Value, json};

use super::raw::object;
use crate::{Architecture, ModelError};

/// What the tensors of a GGUF file say about the network.
#[derive(Clone, Debug, Default)]
pub struct GgufTensors {
    /// There is no head beside the embedding.
    pub tied_embeddings: bool,
    /// [LongRoPE](https://arxiv.org/abs/2402.13753)'s divisors for short and for long contexts, one per pair.
    pub rope_factors: Option<(Vec<f32>, Vec<f32>)>,
    /// Divisors of the frequencies, one per pair.
    pub rope_divisors: Option<Vec<f32>>,
    /// Layers that have a projection to keys and none to values.
    pub without_values: BTreeSet<usize>,
}

/// GGUF metadata with the architecture's prefix.
pub(super) struct GgufFields<'a> {
    path: &'a Path,
    metadata: &'a Metadata,
    pub(super) architecture: &'a str,
}

impl<'a> GgufFields<'a> {
    pub(super) fn new(path: &'a Path, metadata: &'a Metadata) -> Result<Self, ModelError> {
        let architecture = metadata.get("general.architecture").and_then(MetaValue::as_str);
        let missing = || ModelError::config(path, "`general.architecture` is missing");
        Ok(Self {
            path,
            metadata,
            architecture: architecture.ok_or_else(missing)?,
        })
    }

    pub(super) fn key(&self, field: &str) -> String {
        format!("{}.{field}", self.architecture)
    }

    /// `Ok(None)` where absent, an error where `read` does not understand the value.
    pub(super) fn get<T>(
        &self,
        field: &str,
        read: fn(&MetaValue) -> Option<T>,
    ) -> Result<Option<T>, ModelError> {
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

    fn float(&self, field: &str) -> Result<Option<f64>, ModelError> {
        self.get(field, MetaValue::as_f64)
    }

    fn required<T>(&self, field: &str, value: Option<T>) -> Result<T, ModelError> {
        value.ok_or_else(|| ModelError::config(self.path, format!("`{}` is missing", self.key(field))))
    }

    fn required_size(&self, field: &str) -> Result<usize, ModelError> {
        self.required(field, self.size(field)?)
    }

    /// A value that has an effect unless it is one of these.
    fn only(&self, field: &str, neutral: &[f64]) -> Result<(), ModelError> {
        match self.float(field)?.filter(|value| !neutral.contains(value)) {
            None => Ok(()),
            Some(value) => {
                let supported = format!("only {} is", neutral[0]);
                Err(ModelError::unsupported(self.key(field), value, supported))
            }
        }
    }

    /// Tokens that layers with a window see.
    pub(super) fn window(&self) -> Result<Option<usize>, ModelError> {
        let window = self.size("attention.sliding_window")?;
        // Phi-4's files have 0 where Phi-3's have a window.
        Ok(window.filter(|&window| window > 0))
    }

    /// Whether layers are mixtures of experts.
    pub(super) fn has_experts(&self) -> Result<bool, ModelError> {
        Ok(self.size("expert_count")?.unwrap_or(0) > 0)
    }

    /// Fields of a family with experts. llama.cpp knows by the family whether the weights of a token's experts are normalised.
    fn experts(&self, architecture: Architecture) -> Result<Map<String, Value>, ModelError> {
        // 1 is a softmax.
        self.only("expert_gating_func", &[1.0, 0.0])?;
        self.only("expert_weights_scale", &[1.0, 0.0])?;
        for field in ["expert_group_count", "leading_dense_block_count"] {
            self.only(field, &[0.0])?;
        }
        let used = self.required_size("expert_used_count")?;
        let inner = match self.size("expert_feed_forward_length")? {
            Some(inner) => inner,
            None => self.required_size("feed_forward_length")? / used.max(1),
        };
        let shared = match self.size("expert_shared_feed_forward_length")? {
            Some(shared) => Some(shared),
            None => self.size("feed_forward_length")?,
        };
        let count = self.required_size("expert_count")?;
        Ok(object(json!({
            "num_experts": count,
            "num_local_experts": count,
            "num_experts_per_tok": used,
            "moe_intermediate_size": inner,
            "shared_expert_intermediate_size": shared,
            "norm_topk_prob": architecture != Architecture::Qwen2Moe,
        })))
    }

    /// Fields of a family with states.
    fn states(&self) -> Result<Map<String, Value>, ModelError> {
        let value_heads = self.required_size("ssm.time_step_rank")?;
        Ok(object(json!({
            "linear_num_key_heads": self.required_size("ssm.group_count")?,
            "linear_num_value_heads": value_heads,
            "linear_key_head_dim": self.required_size("ssm.state_size")?,
            "linear_value_head_dim": self.required_size("ssm.inner_size")? / value_heads.max(1),
            "linear_conv_kernel_dim": self.required_size("ssm.conv_kernel")?,
            "full_attention_interval": self.size("full_attention_interval")?,
        })))
    }

    /// The keys are those of llama.cpp's `gguf-py/gguf/constants.py`.
    pub(super) fn config(
        &self,
        architecture: Architecture,
        tensors: GgufTensors,
    ) -> Result<Map<String, Value>, ModelError> {
        if architecture == Architecture::Gemma4 {
            return gemma4::config(self, &tensors);
        }
        let own = architecture.fields();
        let experts = match own.contains_key("num_experts_per_tok") {
            true => self.experts(architecture)?,
            false => {
                self.only("expert_count", &[0.0])?;
                Map::new()
            }
        };
        let states = match own.contains_key("linear_num_key_heads") {
            true => self.states()?,
            false => Map::new(),
        };
        for field in ["nextn_predict_layers", "attention.kv_lora_rank"] {
            self.only(field, &[0.0])?;
        }
        for field in [
            "logit_scale",
            "residual_scale",
            "embedding_scale",
            "attention.scale",
        ] {
            self.only(field, &[1.0, 0.0])?;
        }
        let caps = ["attn_logit_softcapping", "final_logit_softcapping"];
        for field in caps.iter().filter(|&&field| !own.contains_key(field)) {
            self.only(field, &[0.0])?;
        }
        let hidden_size = self.required_size("embedding_length")?;
        let heads = self.required_size("attention.head_count")?;
        let layers = self.required_size("block_count")?;
        let head_dim = match self.size("attention.key_length")? {
            Some(key_length) => key_length,
            None => hidden_size / heads.max(1),
        };
        let rotated = self.size("rope.dimension_count")?.unwrap_or(head_dim);
        let is_partial = own.contains_key("partial_rotary_factor");
        for (field, value) in [
            ("attention.value_length", self.size("attention.value_length")?),
            ("rope.dimension_count", Some(rotated).filter(|_| !is_partial)),
        ] {
            if let Some(value) = value.filter(|&value| value != head_dim) {
                let supported = format!("only the head's size, {head_dim}, is");
                return Err(ModelError::unsupported(self.key(field), value, supported));
            }
        }
        let context = self.required_size("context_length")?;
        let original = self.size("rope.scaling.original_context_length")?;
        let eps = "attention.layer_norm_rms_epsilon";
        let window = self.window()?;
        let mut values = object(json!({
            "vocab_size": self.vocab_size()?,
            "hidden_size": hidden_size,
            "intermediate_size": match self.size("feed_forward_length")? {
                Some(size) => size.into(),
                // Not where all layers have experts.
                None => self.required("feed_forward_length", own.get("intermediate_size").cloned())?,
            },
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": self.size("attention.head_count_kv")?,
            "head_dim": head_dim,
            "rms_norm_eps": self.required(eps, self.float(eps)?)?,
            "max_position_embeddings": context,
            "rope_theta": self.float("rope.freq_base")?,
            "rope_parameters": self.rope(&own, original.unwrap_or(context), tensors.rope_factors)?,
            "tie_word_embeddings": tensors.tied_embeddings,
            "sliding_window": window,
            "eos_token_id": self.end_of_generation(),
        }));
        let layers_of_27b = match architecture {
            Architecture::Gemma2 => Some(46),
            Architecture::Gemma3 => Some(62),
            _ => None,
        };
        if let Some(layers_of_27b) = layers_of_27b {
            // llama.cpp too knows 27B, whose heads are smaller than its scale says, by its layers.
            let is_27b = layers == layers_of_27b;
            let scalar = if is_27b {
                hidden_size / heads.max(1)
            } else {
                head_dim
            };
            values.insert("query_pre_attn_scalar".to_owned(), scalar.into());
        }
        if architecture == Architecture::Gemma2 && window.is_none() {
            // Early files do not say; llama.cpp then takes the family's.
            values.remove("sliding_window");
        }
        if is_partial {
            let partial = rotated as f64 / head_dim.max(1) as f64;
            values.insert("partial_rotary_factor".to_owned(), partial.into());
        }
        let every = match window {
            Some(_) => self.window_pattern()?,
            None => Some(("sliding_window_pattern", json!(1))),
        };
        let optional = [
            every,
            original.map(|tokens| ("original_max_position_embeddings", json!(tokens))),
            (self.float("rope.freq_base_swa")?).map(|base| ("rope_local_base_freq", json!(base))),
        ];
        let caps = caps.map(|field| Ok((field, self.float(field)?)));
        let caps = caps.into_iter().collect::<Result<Vec<_>, ModelError>>()?;
        let caps = caps
            .into_iter()
            .filter_map(|(field, cap)| Some((field, json!(cap?))));
        let parts = experts.iter().chain(&states);
        let parts = parts.map(|(field, value)| (&field[..], value.clone()));
        for (field, value) in optional.into_iter().flatten().chain(caps).chain(parts) {
            if own.contains_key(field) {
                values.insert(field.to_owned(), value);
            }
        }
        Ok(values)
    }

    /// Which layers have the window: all but every n-th, or those that a list says.
    fn window_pattern(&self) -> Result<Option<(&'static str, Value)>, ModelError> {
        let field = "attention.sliding_window_pattern";
        if self.get(field, |value| Some(value.as_list().is_some()))? != Some(true) {
            let every = self.size(field)?;
            return Ok(every.map(|every| ("sliding_window_pattern", json!(every))));
        }
        let kind = |slides: &MetaValue| match slides.as_bool()? {
            true => Some("sliding_attention"),
            false => Some("full_attention"),
        };
        let kinds = self.required(field, self.metadata[&self.key(field)].as_list())?;
        let kinds: Option<Vec<_>> = kinds.iter().map(kind).collect();
        Ok(Some(("layer_types", json!(self.required(field, kinds)?))))
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

    /// `original` is the context of the training, in tokens. What files do not say is the family's `own`.
    fn rope(
        &self,
        own: &Map<String, Value>,
        original: usize,
        factors: Option<(Vec<f32>, Vec<f32>)>,
    ) -> Result<Option<Value>, ModelError> {
        let text = |value: &MetaValue| value.as_str().map(str::to_owned);
        let kind = self.get("rope.scaling.type", text)?.filter(|kind| kind != "none");
        // Older files give the factor alone.
        let factor = match self.float("rope.scaling.factor")? {
            Some(factor) => Some(factor),
            None => self.float("rope.scale_linear")?,
        };
        let scale = |scale: &str| format!("rope.scaling.{scale}");
        let mut rope = match (kind.as_deref(), factors) {
            // The type is not always given.
            (_, Some((short, long))) => json!({
                "rope_type": "longrope",
                "short_factor": short,
                "long_factor": long,
                "original_max_position_embeddings": original,
                "attention_factor": self.float(&scale("attn_factor"))?,
            }),
            (None, None) if factor.unwrap_or(1.0) == 1.0 => json!({}),
            (None | Some("linear"), None) => json!({"rope_type": "linear", "factor": factor}),
            (Some("yarn"), None) => {
                self.only(&scale("yarn_ext_factor"), &[1.0, -1.0])?;
                self.only(&scale("attn_factor"), &[1.0])?;
                let all_dim = self.float(&scale("yarn_log_multiplier"))?;
                json!({
                    "rope_type": "yarn",
                    "factor": factor,
                    "original_max_position_embeddings": original,
                    "beta_fast": self.float(&scale("yarn_beta_fast"))?,
                    "beta_slow": self.float(&scale("yarn_beta_slow"))?,
                    "attention_factor": self.float(&scale("yarn_attn_factor"))?,
                    // What llama.cpp assumes beside the other.
                    "mscale": all_dim.map(|_| 1.0),
                    "mscale_all_dim": all_dim,
                    "truncate": own.get("rope_parameters").and_then(|rope| rope.get("truncate")),
                })
            }
            (Some(other), None) => {
                return Err(ModelError::unsupported(
                    self.key("rope.scaling.type"),
                    format!("`{other}`"),
                    "none, linear, yarn and, with its tensors, longrope are",
                ));
            }
        };
        if let Some(beta) = self
            .float("attention.temperature_scale")?
            .filter(|&beta| beta != 0.0)
        {
            self.only("attention.temperature_length", &[original as f64])?;
            rope["llama_4_scaling_beta"] = json!(beta);
            rope["original_max_position_embeddings"] = json!(original);
        }
        Ok(rope
            .as_object()
            .is_some_and(|rope| !rope.is_empty())
            .then_some(rope))
    }

    /// Those that are named. `text` knows what else ends the turns of a chat, by the tokens' texts.
    fn end_of_generation(&self) -> Vec<TokenId> {
        let id = |field: &str| {
            let value = self.metadata.get(&format!("tokenizer.ggml.{field}"))?;
            TokenId::try_from(value.as_u64()?).ok()
        };
        let mut ids: Vec<TokenId> = ["eos_token_id", "eot_token_id", "eom_token_id"]
            .into_iter()
            .filter_map(id)
            .collect();
        ids.sort_unstable();
        ids.dedup();
        ids
    }
}
