//! The metadata of a GGUF file, as the fields that config.json would have.

use std::path::Path;

use plimsoll_core::{MetaValue, Metadata, TokenId};
use serde_json::{Map, Value, json};

use crate::ModelError;

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

    fn required<T>(&self, field: &str, value: Option<T>) -> Result<T, ModelError> {
        value.ok_or_else(|| ModelError::config(self.path, format!("`{}` is missing", self.key(field))))
    }

    fn required_size(&self, field: &str) -> Result<usize, ModelError> {
        self.required(field, self.size(field)?)
    }

    pub(super) fn config(&self, tied_embeddings: bool) -> Result<Map<String, Value>, ModelError> {
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
        let values = json!({
            "vocab_size": self.vocab_size()?,
            "hidden_size": hidden_size,
            "intermediate_size": self.required_size("feed_forward_length")?,
            "num_hidden_layers": self.required_size("block_count")?,
            "num_attention_heads": heads,
            "num_key_value_heads": self.size("attention.head_count_kv")?,
            "head_dim": head_dim,
            "rms_norm_eps": self.required(eps, self.get(eps, MetaValue::as_f64)?)?,
            "max_position_embeddings": self.required_size("context_length")?,
            "rope_theta": self.get("rope.freq_base", MetaValue::as_f64)?,
            "rope_scaling": self.rope_scaling()?,
            "tie_word_embeddings": tied_embeddings,
            "sliding_window": self.size("attention.sliding_window")?,
            "eos_token_id": self.end_of_generation(),
        });
        match values {
            Value::Object(values) => Ok(values),
            _ => unreachable!("it is written as an object"),
        }
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

    fn rope_scaling(&self) -> Result<Option<Value>, ModelError> {
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
        if let Some(other) = kind.as_deref().filter(|&kind| kind != "linear") {
            return Err(ModelError::unsupported(
                self.key("rope.scaling.type"),
                format!("`{other}`"),
                "none and linear are",
            ));
        }
        Ok(kind.map(|kind| json!({"rope_type": kind, "factor": factor})))
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
