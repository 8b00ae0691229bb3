use plimsoll_core::TokenId;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::ToSchema;

use super::chat::ChatPrompt;
use super::error::FieldError;
use super::fields::{TOKENIZE_UNSUPPORTED, Unsupported};
use super::request::{RequestBody, not_both, take};
use super::schema::{body, either};

/// `POST /tokenize`: a prompt or a conversation, as in vLLM.
#[derive(Debug)]
pub(crate) struct TokenizeRequest {
    pub(crate) own: TokenizeFields,
    pub(crate) input: TokenizeInput,
}

#[derive(Debug)]
pub(crate) enum TokenizeInput {
    Prompt(String),
    Chat(ChatPrompt),
}

/// Fields of both kinds of input.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct TokenizeFields {
    /// A name from `/v1/models`; the served model if absent.
    pub(crate) model: Option<String>,
    /// Default: true for a prompt, false for a conversation, whose template contains them.
    pub(crate) add_special_tokens: Option<bool>,
    /// Also returns the tokens' texts.
    #[serde(default)]
    pub(crate) return_token_strs: bool,
}

/// A prompt.
#[derive(Debug, Deserialize, ToSchema)]
struct PromptField {
    /// The text.
    prompt: String,
}

impl RequestBody for TokenizeRequest {
    const UNSUPPORTED: &[&[Unsupported]] = &[TOKENIZE_UNSUPPORTED];

    fn take_from(object: &mut Map<String, Value>) -> Result<Self, FieldError> {
        let own = take(object)?;
        not_both(object, "prompt", "messages")?;
        let input = if object.contains_key("messages") {
            TokenizeInput::Chat(ChatPrompt::take_from(object)?)
        } else {
            TokenizeInput::Prompt(take::<PromptField>(object)?.prompt)
        };
        Ok(Self { own, input })
    }
}

either!(TokenizeRequest, TokenizeFields, "A prompt.": PromptField, "A conversation.": ChatPrompt);

/// The tokens of a text.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Tokenized {
    /// How many tokens there are.
    pub(crate) count: usize,
    /// Maximum tokens of prompt and answer together.
    pub(crate) max_model_len: usize,
    /// The tokens' ids.
    #[schema(value_type = Vec<u32>)]
    pub(crate) tokens: Vec<TokenId>,
    /// The tokens' texts, with `return_token_strs`.
    pub(crate) token_strs: Option<Vec<String>>,
}

/// `POST /detokenize`.
#[derive(Debug)]
pub(crate) struct DetokenizeRequest(pub(crate) DetokenizeFields);

/// The fields of the endpoint.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct DetokenizeFields {
    /// A name from `/v1/models`; the served model if absent.
    pub(crate) model: Option<String>,
    /// Token ids.
    #[schema(value_type = Vec<u32>)]
    pub(crate) tokens: Vec<TokenId>,
}

impl RequestBody for DetokenizeRequest {
    const UNSUPPORTED: &[&[Unsupported]] = &[];

    fn take_from(object: &mut Map<String, Value>) -> Result<Self, FieldError> {
        take(object).map(Self)
    }
}

body!(DetokenizeRequest, "Tokens to turn into text.", DetokenizeFields);

/// The text of tokens.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Detokenized {
    /// The text.
    pub(crate) prompt: String,
}

/// The tokenizer's configuration: `tokenizer_class`, `chat_template`, and what else its file has.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct TokenizerInfo {
    #[serde(flatten)]
    #[schema(value_type = Object)]
    pub(crate) config: Map<String, Value>,
}
