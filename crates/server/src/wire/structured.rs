use serde::Deserialize;
use serde_json::Value;
use utoipa::ToSchema;

/// The fields that say what the text must be: OpenAI's `response_format`, and vLLM's. At most one may ask for something.
#[derive(Clone, Debug, Default, Deserialize, ToSchema)]
pub(crate) struct StructuredFields {
    /// OpenAI's way to ask for JSON.
    pub(crate) response_format: Option<ResponseFormat>,
    /// vLLM's way to ask for any structure.
    pub(crate) structured_outputs: Option<StructuredOutputs>,
    /// A JSON schema that the text follows, as an object or as a string that holds one.
    pub(crate) guided_json: Option<Value>,
    /// A regular expression that the whole text matches.
    pub(crate) guided_regex: Option<String>,
    /// Texts of which one is said.
    pub(crate) guided_choice: Option<Vec<String>>,
    /// A grammar, in Lark's or llama.cpp's notation (GBNF: `root ::= ...`), that the text follows.
    pub(crate) guided_grammar: Option<String>,
    /// A regular expression of what may stand between the tokens of JSON.
    pub(crate) guided_whitespace_pattern: Option<String>,
    /// There is one backend, by whatever name.
    #[serde(rename = "guided_decoding_backend")]
    pub(crate) _guided_decoding_backend: Option<Backend>,
}

/// vLLM's names of the one backend.
#[derive(Clone, Copy, Debug, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Backend {
    /// Whatever there is.
    Auto,
    /// llguidance.
    Guidance,
    /// llguidance.
    Llguidance,
}

/// OpenAI's `response_format`.
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
pub(crate) enum ResponseFormat {
    /// Any text.
    Text,
    /// Any JSON object. Unlike OpenAI's, the messages need not say so.
    JsonObject,
    /// JSON that a schema describes.
    JsonSchema {
        /// The schema and its name.
        json_schema: JsonSchemaFormat,
    },
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
    /// With `false`, keywords that cannot be enforced are let through and not enforced; otherwise they are refused.
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
    /// Nothing may stand between the tokens of JSON.
    #[serde(default)]
    pub(crate) disable_any_whitespace: bool,
    /// There is no other backend to fall back to, so this changes nothing.
    #[serde(default, rename = "disable_fallback")]
    pub(crate) _disable_fallback: bool,
}
