use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::ToSchema;

use super::chat::ChatPrompt;
use super::completion::Prompts;
use super::error::FieldError;
use super::extra::TruncationSide;
use super::fields::{EMBEDDING_UNSUPPORTED, Unsupported};
use super::request::{RequestBody, not_both, take};
use super::schema::either;

/// `POST /v1/embeddings`: texts or, as in vLLM, a conversation.
#[derive(Debug)]
pub(crate) struct EmbeddingRequest {
    pub(crate) own: EmbeddingFields,
    pub(crate) input: EmbeddingInput,
}

#[derive(Debug)]
pub(crate) enum EmbeddingInput {
    Texts(Prompts),
    Chat(Box<ChatPrompt>),
}

/// Texts.
#[derive(Debug, Deserialize, ToSchema)]
struct InputField {
    /// A text or several, as text or as token ids; each becomes a vector.
    input: Prompts,
}

/// Fields of both kinds of input.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct EmbeddingFields {
    /// A name of the served model.
    pub(crate) model: Option<String>,
    /// The encoding of vectors.
    #[serde(default)]
    pub(crate) encoding_format: EncodingFormat,
    /// Truncates vectors to this many dimensions, if the model was trained for that.
    pub(crate) dimensions: Option<usize>,
    /// Truncates inputs to this many tokens; -1: to the model's maximum. If absent, longer inputs are refused.
    #[schema(minimum = -1)]
    pub(crate) truncate_prompt_tokens: Option<i64>,
    /// Which end `truncate_prompt_tokens` cuts off. Default: right, the end.
    pub(crate) truncation_side: Option<TruncationSide>,
    /// Adds the tokenizer's special tokens. Default: true for texts, false for a conversation, whose template contains them.
    pub(crate) add_special_tokens: Option<bool>,
}

impl RequestBody for EmbeddingRequest {
    const UNSUPPORTED: &[&[Unsupported]] = &[EMBEDDING_UNSUPPORTED];

    fn take_from(object: &mut Map<String, Value>) -> Result<Self, FieldError> {
        let own = take(object)?;
        not_both(object, "input", "messages")?;
        let input = match object.contains_key("messages") {
            true => EmbeddingInput::Chat(Box::new(ChatPrompt::take_from(object)?)),
            false => EmbeddingInput::Texts(take::<InputField>(object)?.input),
        };
        Ok(Self { own, input })
    }
}

either!(
    EmbeddingRequest,
    EmbeddingFields,
    "Texts to turn into vectors.": InputField,
    "A conversation to turn into a vector.": ChatPrompt
);

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
    pub(crate) id: String,
    /// `list`.
    pub(crate) object: &'static str,
    /// Seconds since 1970.
    pub(crate) created: u64,
    pub(crate) model: String,
    pub(crate) data: Vec<Embedding>,
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
    prompt_tokens: usize,
    total_tokens: usize,
}

impl EmbeddingUsage {
    /// Of a request whose texts have `tokens` tokens.
    pub(crate) fn of(tokens: usize) -> Self {
        Self {
            prompt_tokens: tokens,
            total_tokens: tokens,
        }
    }
}
