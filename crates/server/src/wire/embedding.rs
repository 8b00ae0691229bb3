use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::ToSchema;

use super::completion::Prompts;
use super::error::FieldError;
use super::fields::{EMBEDDING_UNSUPPORTED, Unsupported};
use super::request::{RequestBody, take};
use super::schema::body;

/// `POST /v1/embeddings`.
#[derive(Debug)]
pub(crate) struct EmbeddingRequest(pub(crate) EmbeddingFields);

/// The fields of the endpoint.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct EmbeddingFields {
    /// A name of the served model.
    pub(crate) model: Option<String>,
    /// A text or several, as text or as token ids; each becomes a vector.
    pub(crate) input: Prompts,
    /// The encoding of vectors.
    #[serde(default)]
    pub(crate) encoding_format: EncodingFormat,
    /// Truncates vectors to this many dimensions, if the model was trained for that.
    pub(crate) dimensions: Option<usize>,
    /// Truncates inputs to this many tokens; -1: to the model's maximum. If absent, longer inputs are refused.
    pub(crate) truncate_prompt_tokens: Option<i64>,
    /// Adds the tokenizer's special tokens. Default: true.
    pub(crate) add_special_tokens: Option<bool>,
}

impl RequestBody for EmbeddingRequest {
    const UNSUPPORTED: &[&[Unsupported]] = &[EMBEDDING_UNSUPPORTED];

    fn take_from(object: &mut Map<String, Value>) -> Result<Self, FieldError> {
        take(object).map(Self)
    }
}

body!(EmbeddingRequest, "Texts to turn into vectors.", EmbeddingFields);

/// The encoding of vectors.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub(crate) enum EncodingFormat {
    /// A list of numbers.
    #[default]
    Float,
    /// The bytes of little-endian 32-bit floats, in base64.
    Base64,
}

/// The vectors of all inputs.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct EmbeddingList {
    pub(crate) object: &'static str,
    pub(crate) data: Vec<Embedding>,
    pub(crate) model: String,
    pub(crate) usage: EmbeddingUsage,
}

/// The vector of one input.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Embedding {
    pub(crate) object: &'static str,
    /// Which input.
    pub(crate) index: usize,
    pub(crate) embedding: Vector,
}

/// A vector in the requested encoding.
#[derive(Debug, Serialize, ToSchema)]
#[serde(untagged)]
pub(crate) enum Vector {
    Floats(Vec<f32>),
    Base64(String),
}

/// Token counts.
#[derive(Clone, Copy, Debug, Serialize, ToSchema)]
pub(crate) struct EmbeddingUsage {
    pub(crate) prompt_tokens: usize,
    pub(crate) total_tokens: usize,
}
