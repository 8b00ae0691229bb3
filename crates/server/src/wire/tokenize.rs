use plimsoll_core::TokenId;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::chat::ChatPrompt;
use crate::body::{Wire, take};
use crate::error::ApiError;
use crate::fields::{TOKENIZE_UNSUPPORTED, Unsupported};

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

#[derive(Debug, Deserialize)]
pub(crate) struct TokenizeFields {
    pub(crate) model: Option<String>,
    /// Default: true for a prompt, false for a conversation, whose template has them.
    pub(crate) add_special_tokens: Option<bool>,
    #[serde(default)]
    pub(crate) return_token_strs: bool,
}

#[derive(Debug, Deserialize)]
struct PromptField {
    prompt: String,
}

impl Wire for TokenizeRequest {
    const UNSUPPORTED: &[&[Unsupported]] = &[TOKENIZE_UNSUPPORTED];

    fn take_from(object: &mut Map<String, Value>) -> Result<Self, ApiError> {
        let own = take(object)?;
        let input = if object.contains_key("messages") {
            TokenizeInput::Chat(take(object)?)
        } else {
            TokenizeInput::Prompt(take::<PromptField>(object)?.prompt)
        };
        Ok(Self { own, input })
    }
}

#[derive(Debug, Serialize)]
pub(crate) struct Tokenized {
    pub(crate) count: usize,
    pub(crate) max_model_len: usize,
    pub(crate) tokens: Vec<TokenId>,
    pub(crate) token_strs: Option<Vec<String>>,
}

/// `POST /detokenize`.
#[derive(Debug, Deserialize)]
pub(crate) struct DetokenizeRequest {
    pub(crate) model: Option<String>,
    pub(crate) tokens: Vec<TokenId>,
}

impl Wire for DetokenizeRequest {
    const UNSUPPORTED: &[&[Unsupported]] = &[];

    fn take_from(object: &mut Map<String, Value>) -> Result<Self, ApiError> {
        take(object)
    }
}

#[derive(Debug, Serialize)]
pub(crate) struct Detokenized {
    pub(crate) prompt: String,
}
