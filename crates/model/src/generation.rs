//! Defaults for requests that a model brings along.

use std::path::Path;

use plimsoll_core::TokenId;
use plimsoll_core::untrusted::{self, MAX_SETTINGS_BYTES};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::ModelError;

/// What generation_config.json says about sampling; `None` where it says nothing.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GenerationConfig {
    /// Tokens that end a text; empty if the file does not say.
    pub eos_token_ids: Vec<TokenId>,
    /// False is greedy, whatever the temperature.
    pub do_sample: Option<bool>,
    /// Default temperature.
    pub temperature: Option<f64>,
    /// Default nucleus mass.
    pub top_p: Option<f64>,
    /// Default number of candidates.
    pub top_k: Option<i64>,
    /// Default least relative probability.
    pub min_p: Option<f64>,
    /// Default repetition penalty.
    pub repetition_penalty: Option<f64>,
}

impl GenerationConfig {
    /// Reads generation_config.json from the directory of a model of so many tokens; one without it gives the default.
    pub(crate) fn read(directory: &Path, vocab_size: usize) -> Result<Self, ModelError> {
        let path = directory.join("generation_config.json");
        let text = untrusted::if_there(untrusted::read_text(&path, MAX_SETTINGS_BYTES));
        let Some(text) = text.map_err(ModelError::io(&path))? else {
            return Ok(Self::default());
        };
        let config = Self::from_json(&path, &text)?;
        check_token_ids(&path, "eos_token_id", &json!(config.eos_token_ids), vocab_size)?;
        Ok(config)
    }

    /// From the text of the file at `path`, which messages name. Fields that say nothing about sampling are left alone.
    ///
    /// # Errors
    /// [`ModelError::Config`], which names the field that is not what it should be.
    pub fn from_json(path: &Path, text: &str) -> Result<Self, ModelError> {
        let values: Map<String, Value> = serde_json::from_str(text)
            .map_err(|error| ModelError::config(path, format!("not an object of JSON: {error}")))?;
        let fields = Fields {
            path,
            values: &values,
        };
        Ok(Self {
            eos_token_ids: fields
                .get("eos_token_id", "a token id or a list of them", |value| {
                    token_ids(value).ok()
                })?
                .unwrap_or_default(),
            do_sample: fields.get("do_sample", "true or false", Value::as_bool)?,
            temperature: fields.number("temperature")?,
            top_p: fields.number("top_p")?,
            top_k: fields.get("top_k", "a whole number", Value::as_i64)?,
            min_p: fields.number("min_p")?,
            repetition_penalty: fields.number("repetition_penalty")?,
        })
    }
}

struct Fields<'a> {
    path: &'a Path,
    values: &'a Map<String, Value>,
}

impl Fields<'_> {
    fn number(&self, field: &str) -> Result<Option<f64>, ModelError> {
        self.get(field, "a number", Value::as_f64)
    }

    /// `None` where absent or null.
    fn get<T>(
        &self,
        field: &str,
        expected: &str,
        read: impl FnOnce(&Value) -> Option<T>,
    ) -> Result<Option<T>, ModelError> {
        let Some(value) = self.values.get(field).filter(|value| !value.is_null()) else {
            return Ok(None);
        };
        let wrong = || ModelError::config(self.path, format!("`{field}` is {value}, not {expected}"));
        read(value).map(Some).ok_or_else(wrong)
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
    #[serde(untagged, expecting = "a token id or a list of them is expected")]
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
        let parse =
            |text: &str| GenerationConfig::from_json(Path::new("generation_config.json"), text).unwrap();
        assert_eq!(
            parse(r#"{"eos_token_id": 2, "temperature": 0.6}"#).eos_token_ids,
            [2]
        );
        assert_eq!(
            parse(r#"{"eos_token_id": [2, 7], "top_k": 20}"#).eos_token_ids,
            [2, 7]
        );
        assert_eq!(parse(r#"{"eos_token_id": null}"#), GenerationConfig::default());
    }

    #[test]
    fn a_field_of_another_type_is_named() {
        for (text, problem) in [
            (
                r#"{"temperature": "hot"}"#,
                "`temperature` is \"hot\", not a number",
            ),
            (r#"{"top_k": 2.5}"#, "`top_k` is 2.5, not a whole number"),
            (r#"{"do_sample": 1}"#, "`do_sample` is 1, not true or false"),
            (
                r#"{"eos_token_id": -1}"#,
                "`eos_token_id` is -1, not a token id or a list of them",
            ),
            ("[]", "not an object of JSON"),
        ] {
            let error = GenerationConfig::from_json(Path::new("generation_config.json"), text).unwrap_err();
            let error = error.to_string();
            assert!(
                error.contains(&format!("generation_config.json: {problem}")),
                "{error}"
            );
        }
    }
}
