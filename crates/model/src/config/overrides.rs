use std::fmt;
use std::path::Path;

use plimsoll_core::Matryoshka;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::raw::{Fields, matryoshka};
use crate::ModelError;

/// Fields of config.json that take the place of those in the file (`--hf-overrides`). Null stands for none.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct HfOverrides(Map<String, Value>);

impl HfOverrides {
    /// There are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// What a model that is nothing but these fields says about cutting its vectors.
    ///
    /// # Errors
    /// [`ModelError::Config`] if there are other fields.
    pub fn matryoshka(&self) -> Result<Matryoshka, ModelError> {
        let path = Path::new("--hf-overrides");
        let known = ["is_matryoshka", "matryoshka_dimensions"];
        match self.0.keys().find(|field| !known.contains(&field.as_str())) {
            Some(field) => Err(ModelError::config(
                path,
                format!("`{field}` cannot be set: the simulated model has no config.json"),
            )),
            None => matryoshka(&Fields::new(path, &self.0)),
        }
    }

    /// Replaces and adds fields. As in vLLM, an object takes the place of the whole one before it (`rope_scaling`), but what
    /// belongs to the configuration of a part (`text_config`) is set field by field.
    pub(super) fn apply(&self, config: &mut Map<String, Value>) {
        for (field, value) in &self.0 {
            match (config.get_mut(field), value) {
                (Some(Value::Object(part)), Value::Object(fields)) if field.ends_with("_config") => {
                    merge(part, fields);
                }
                _ => drop(config.insert(field.clone(), value.clone())),
            }
        }
    }
}

/// As JSON.
impl fmt::Display for HfOverrides {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Value::Object(self.0.clone()).fmt(f)
    }
}

fn merge(config: &mut Map<String, Value>, fields: &Map<String, Value>) {
    for (field, value) in fields {
        match (config.get_mut(field), value) {
            (Some(Value::Object(part)), Value::Object(fields)) => merge(part, fields),
            _ => drop(config.insert(field.clone(), value.clone())),
        }
    }
}
