//! What errors about unknown fields tell people to do.

use std::path::PathBuf;

use serde_json::{Value, json};

/// Most unknown fields of which an error names all.
const MOST_LISTED: usize = 8;

/// Whether an error can list these names in a command to paste: they are few, and a shell leaves them as they are.
pub(super) fn can_be_pasted(names: &[&str]) -> bool {
    let is_plain = |name: &&str| name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_');
    names.len() <= MOST_LISTED && names.iter().all(is_plain)
}

/// `message` about unknown fields, with the flag that removes them (`overrides`) if their names can be pasted.
pub(super) fn with_removal(message: String, names: &[&str], overrides: &Value) -> String {
    match can_be_pasted(names) {
        true => format!("{message}. Remove what has no effect with --hf-overrides '{overrides}'"),
        false => message,
    }
}

/// The part of config.json in which fields stand.
#[derive(Clone, Copy, Debug, Default)]
pub(super) enum Part {
    /// None: they stand at the top.
    #[default]
    Whole,
    /// `text_config`.
    Text,
}

impl Part {
    /// What sets these fields with `--hf-overrides`.
    pub(super) fn overrides(self, fields: Value) -> Value {
        match self {
            Self::Whole => fields,
            Self::Text => json!({ "text_config": fields }),
        }
    }
}

/// Where the fields of a network stand in config.json.
#[derive(Clone, Debug, Default)]
pub(super) struct Places {
    /// That of most.
    pub(super) part: Part,
    /// Those of a text part that stand around it.
    pub(super) around: Vec<String>,
    /// The file beside config.json that says how matrices are stored, where it does not.
    pub(super) quantization: Option<PathBuf>,
}

impl Places {
    pub(super) fn of(&self, field: &str) -> Part {
        match self.around.iter().any(|around| around == field) {
            true => Part::Whole,
            false => self.part,
        }
    }
}
