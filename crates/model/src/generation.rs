//! Defaults for requests that a model brings along.

use std::path::Path;

use plimsoll_core::TokenId;
use plimsoll_core::untrusted::{self, MAX_SETTINGS_BYTES};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::ModelError;

/// What generation_config.json says about sampling; `None` where it says nothing.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
pub struct GenerationConfig {
    /// Tokens that end a text; empty if the file does not say.
    #[serde(default, rename = "eos_token_id", deserialize_with = "token_ids")]
    pub eos_token_ids: Vec<TokenId>,
    /// False is greedy, whatever the temperature.
    #[serde(default)]
    pub do_sample: Option<bool>,
    /// Default temperature.
    #[serde(default)]
    pub temperature: Option<f64>,
    /// Default nucleus mass.
    #[serde(default)]
    pub top_p: Option<f64>,
    /// Default number of candidates.
    #[serde(default)]
    pub top_k: Option<i64>,
    /// Default least relative probability.
    #[serde(default)]
    pub min_p: Option<f64>,
    /// Default repetition penalty.
    #[serde(default)]
    pub repetition_penalty: Option<f64>,
}

impl GenerationConfig {
    /// Reads generation_config.json from the directory of a model of so many tokens; one without it gives the default.
    pub(crate) fn read(directory: &Path, vocab_size: usize) -> Result<Self, ModelError> {
        let path = directory.join("generation_config.json");
        let text = match untrusted::read_text(&path, MAX_SETTINGS_BYTES) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Self::default()),
            Err(error) => return Err(ModelError::io(&path)(error)),
        };
        let config: Self = serde_json::from_str(&text).map_err(|error| ModelError::config(&path, error))?;
        check_token_ids(&path, "eos_token_id", &json!(config.eos_token_ids), vocab_size)?;
        Ok(config)
    }
}

/// Refuses ids of tokens that are not in the vocabulary; -1 stands for none.
pub(crate) fn check_token_ids(
    path: &Path,
    field: &str,
    ids: &Value,
    vocab_size: usize,
) -> Result<(), ModelError> {
    let one = std::slice::from_ref(ids);
    let numbers = ids.as_array().map_or(one, Vec::as_slice).iter();
    // Anything else is found where the field is read.
    let beyond = numbers
        .filter_map(Value::as_u64)
        .find(|&id| id >= vocab_size as u64);
    match beyond {
        None => Ok(()),
        Some(id) => Err(ModelError::config(
            path,
            format!("`{field}` is {id}, beyond the vocabulary of {vocab_size} tokens (`vocab_size`)"),
        )),
    }
}

/// One id, a list of them, or null.
pub(crate) fn token_ids<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<Vec<TokenId>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum TokenIds {
        One(TokenId),
        Many(Vec<TokenId>),
    }
    Ok(match Option::<TokenIds>::deserialize(deserializer)? {
        None => Vec::new(),
        Some(TokenIds::One(id)) => vec![id],
        Some(TokenIds::Many(ids)) => ids,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_or_many_or_no_end_tokens() {
        let parse = |text: &str| serde_json::from_str::<GenerationConfig>(text).unwrap();
        assert_eq!(
            parse(r#"{"eos_token_id": 2, "temperature": 0.6}"#).eos_token_ids,
            [2]
        );
        assert_eq!(
            parse(r#"{"eos_token_id": [2, 7], "top_k": 20}"#).eos_token_ids,
            [2, 7]
        );
        assert_eq!(parse(r#"{"eos_token_id": null}"#), GenerationConfig::default());
        assert!(serde_json::from_str::<GenerationConfig>(r#"{"eos_token_id": -1}"#).is_err());
    }
}
