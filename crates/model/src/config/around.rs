use serde_json::{Map, Value};

/// What a configuration says around its text part.
#[derive(Clone, Debug, PartialEq)]
pub struct Around {
    /// The model's name in `architectures`.
    pub name: &'static str,
    /// Fields beside `text_config`.
    pub(super) fields: Map<String, Value>,
}
