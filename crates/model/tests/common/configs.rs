//! Configurations with other fields.

use std::path::Path;

use plimsoll_model::{HfOverrides, ModelConfig, ModelError};
use serde_json::Value;

use super::golden_path;

pub fn config_json(name: &str) -> Value {
    serde_json::from_str(&std::fs::read_to_string(golden_path(name).join("config.json")).unwrap()).unwrap()
}

pub fn parse_with(config: &Value, overrides: &HfOverrides) -> Result<ModelConfig, ModelError> {
    ModelConfig::from_json(Path::new("config.json"), &config.to_string(), overrides)
}

pub fn parse(config: &Value) -> Result<ModelConfig, ModelError> {
    parse_with(config, &HfOverrides::default())
}

/// `config` with these fields set, those of a part one by one; null removes.
pub fn with(mut config: Value, fields: Value) -> Value {
    for (field, value) in fields.as_object().unwrap() {
        let is_part = field.ends_with("_config") && value.is_object();
        match value {
            Value::Null => drop(config.as_object_mut().unwrap().remove(field)),
            value if is_part => config[field] = with(config[field].take(), value.clone()),
            value => config[field] = value.clone(),
        }
    }
    config
}

/// Set in the file, and by `--hf-overrides`.
#[track_caller]
pub fn assert_refused(name: &str, fields: &Value, message: &str) {
    let config = config_json(name);
    let overrides: HfOverrides = serde_json::from_value(fields.clone()).unwrap();
    let edited = parse(&with(config.clone(), fields.clone()));
    for result in [edited, parse_with(&config, &overrides)] {
        let error = result.map(|_| ()).unwrap_err().to_string();
        assert!(
            error.contains(message),
            "{name}, {fields}: {error:?} does not say {message:?}"
        );
    }
}
