use serde::Deserialize;
use utoipa::ToSchema;

use super::error::FieldError;

/// Content of a chat message or of a response's item: text, or parts, which must be text.
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[serde(untagged, expecting = "expected a string or a list of parts")]
pub(crate) enum Content {
    Text(String),
    Parts(Vec<Part>),
}

/// One part: `text` (`input_text` and `output_text` in items), or `refusal`.
#[derive(Clone, Debug, Deserialize, ToSchema)]
pub(crate) struct Part {
    /// The part's type.
    #[schema(example = "text")]
    r#type: String,
    /// The text.
    text: Option<String>,
    /// The text of a `refusal` part.
    refusal: Option<String>,
}

impl Content {
    /// The texts of all parts; `field` is the content's path.
    pub(crate) fn texts(self, field: &str) -> Result<Vec<String>, FieldError> {
        let parts = match self {
            Self::Text(text) => return Ok(vec![text]),
            Self::Parts(parts) => parts,
        };
        let parts = parts.into_iter().enumerate();
        parts
            .map(|(i, part)| part.into_text(&format!("{field}[{i}]")))
            .collect()
    }

    /// All of it as one text. Parts are joined by newlines, as vLLM does for templates that take text.
    pub(crate) fn text(self, field: &str) -> Result<String, FieldError> {
        Ok(self.texts(field)?.join("\n"))
    }
}

impl Part {
    fn into_text(self, field: &str) -> Result<String, FieldError> {
        let (name, text) = match self.r#type.as_str() {
            "text" | "input_text" | "output_text" => ("text", self.text),
            // An assistant's refusal to answer.
            "refusal" => ("refusal", self.refusal),
            other => {
                return Err(FieldError::unsupported(
                    format!("{field}.type = {other}"),
                    "this model takes only text",
                ));
            }
        };
        let field = format!("{field}.{name}");
        text.ok_or_else(|| FieldError::invalid(&field, format!("`{field}` is missing")))
    }
}
