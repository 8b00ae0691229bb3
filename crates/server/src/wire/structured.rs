use serde::Deserialize;
use serde::de::Error as _;
use serde_json::Value;
use utoipa::ToSchema;

/// Structured output: OpenAI's `response_format` and vLLM's fields. At most one may be set.
#[derive(Clone, Debug, Default, Deserialize, ToSchema)]
pub(crate) struct StructuredFields {
    /// OpenAI's field: JSON.
    pub(crate) response_format: Option<ResponseFormat>,
    /// vLLM's field: any structure.
    pub(crate) structured_outputs: Option<StructuredOutputs>,
    /// A JSON schema for the text, as an object or a string with JSON.
    pub(crate) guided_json: Option<Value>,
    /// A regular expression for the whole text.
    pub(crate) guided_regex: Option<String>,
    /// The text is one of these.
    pub(crate) guided_choice: Option<Vec<String>>,
    /// A grammar for the text, in Lark or llama.cpp's GBNF (`root ::= ...`).
    pub(crate) guided_grammar: Option<String>,
    /// A regular expression for whitespace between JSON tokens.
    pub(crate) guided_whitespace_pattern: Option<String>,
    /// There is only one backend; all its names are accepted.
    #[serde(rename = "guided_decoding_backend")]
    pub(crate) _guided_decoding_backend: Option<Backend>,
}

/// vLLM's backend names that are accepted.
#[derive(Clone, Copy, Debug, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Backend {
    /// Any.
    Auto,
    /// llguidance.
    Guidance,
    /// llguidance.
    Llguidance,
}

/// OpenAI's `response_format`.
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
#[serde(try_from = "ResponseFormatFields")]
pub(crate) enum ResponseFormat {
    /// Any text.
    Text,
    /// Any JSON object. Unlike with OpenAI, the messages need not mention JSON.
    JsonObject,
    /// JSON that follows a schema.
    JsonSchema {
        /// The schema and its name.
        json_schema: JsonSchemaFormat,
    },
}

/// A [`ResponseFormat`] as it is read: of an enum with a tag, serde forgets where in the value an error is.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ResponseFormatFields {
    r#type: FormatType,
    json_schema: Option<JsonSchemaFormat>,
}

/// Types of formats.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum FormatType {
    Text,
    JsonObject,
    JsonSchema,
}

impl TryFrom<ResponseFormatFields> for ResponseFormat {
    type Error = serde::de::value::Error;

    fn try_from(fields: ResponseFormatFields) -> Result<Self, Self::Error> {
        Ok(match fields.r#type {
            FormatType::Text => Self::Text,
            FormatType::JsonObject => Self::JsonObject,
            FormatType::JsonSchema => Self::JsonSchema {
                json_schema: fields
                    .json_schema
                    .ok_or_else(|| Self::Error::missing_field("json_schema"))?,
            },
        })
    }
}

/// A named JSON schema.
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct JsonSchemaFormat {
    /// For the client's records.
    #[serde(rename = "name")]
    pub(crate) _name: Option<String>,
    /// For the client's records.
    #[serde(rename = "description")]
    pub(crate) _description: Option<String>,
    /// The schema.
    pub(crate) schema: Value,
    /// `false`: keywords that cannot be enforced are ignored; otherwise they are refused.
    pub(crate) strict: Option<bool>,
}

/// vLLM's `structured_outputs`: one of `json`, `regex`, `choice`, `grammar` and `json_object`.
#[derive(Clone, Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct StructuredOutputs {
    /// As `guided_json`.
    pub(crate) json: Option<Value>,
    /// As `guided_regex`.
    pub(crate) regex: Option<String>,
    /// As `guided_choice`.
    pub(crate) choice: Option<Vec<String>>,
    /// As `guided_grammar`.
    pub(crate) grammar: Option<String>,
    /// Any JSON object.
    #[serde(default)]
    pub(crate) json_object: bool,
    /// As `guided_whitespace_pattern`.
    pub(crate) whitespace_pattern: Option<String>,
    /// No whitespace between JSON tokens.
    #[serde(default)]
    pub(crate) disable_any_whitespace: bool,
    /// No effect: there is only one backend.
    #[serde(default, rename = "disable_fallback")]
    pub(crate) _disable_fallback: bool,
}
