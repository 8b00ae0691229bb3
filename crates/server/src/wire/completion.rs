use plimsoll_core::TokenId;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::common::{Common, MaybeUsage};
use crate::body::{Wire, take};
use crate::error::ApiError;
use crate::fields::{COMPLETION_UNSUPPORTED, UNSUPPORTED, Unsupported};

/// `POST /v1/completions`.
#[derive(Debug)]
pub(crate) struct CompletionRequest {
    pub(crate) common: Common,
    pub(crate) own: CompletionFields,
}

/// The fields that only completions have.
#[derive(Debug, Deserialize)]
pub(crate) struct CompletionFields {
    pub(crate) prompt: Prompts,
    #[serde(default)]
    pub(crate) echo: bool,
    pub(crate) logprobs: Option<u32>,
}

impl Wire for CompletionRequest {
    const UNSUPPORTED: &[&[Unsupported]] = &[UNSUPPORTED, COMPLETION_UNSUPPORTED];

    fn take_from(object: &mut Map<String, Value>) -> Result<Self, ApiError> {
        Ok(Self {
            common: take(object)?,
            own: take(object)?,
        })
    }
}

/// One prompt or several, as text or as tokens.
#[derive(Debug, Deserialize)]
#[serde(
    untagged,
    expecting = "expected a string, a list of strings, a list of token ids or a list of lists of token ids"
)]
pub(crate) enum Prompts {
    Text(String),
    Tokens(Vec<TokenId>),
    Texts(Vec<String>),
    TokenLists(Vec<Vec<TokenId>>),
}

/// One prompt.
#[derive(Clone, Debug)]
pub(crate) enum Prompt {
    Text(String),
    Tokens(Vec<TokenId>),
}

impl Prompts {
    pub(crate) fn into_vec(self) -> Vec<Prompt> {
        match self {
            Self::Text(text) => vec![Prompt::Text(text)],
            Self::Tokens(tokens) => vec![Prompt::Tokens(tokens)],
            Self::Texts(texts) => texts.into_iter().map(Prompt::Text).collect(),
            Self::TokenLists(lists) => lists.into_iter().map(Prompt::Tokens).collect(),
        }
    }
}

/// The response, whole or one chunk of a stream.
#[derive(Debug, Serialize)]
pub(crate) struct Completion {
    pub(crate) id: String,
    pub(crate) object: &'static str,
    pub(crate) created: u64,
    pub(crate) model: String,
    pub(crate) choices: Vec<CompletionChoice>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) usage: MaybeUsage,
    pub(crate) system_fingerprint: &'static str,
}

#[derive(Debug, Serialize)]
pub(crate) struct CompletionChoice {
    pub(crate) index: usize,
    pub(crate) text: String,
    pub(crate) logprobs: Option<CompletionLogprobs>,
    pub(crate) finish_reason: Option<&'static str>,
}

#[derive(Debug, Default, Serialize)]
pub(crate) struct CompletionLogprobs {
    /// Characters before each token, from the beginning of the choice's text.
    pub(crate) text_offset: Vec<usize>,
    pub(crate) token_logprobs: Vec<f32>,
    pub(crate) tokens: Vec<String>,
    pub(crate) top_logprobs: Vec<Map<String, Value>>,
}
