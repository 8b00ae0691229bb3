use plimsoll_core::TokenId;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::ToSchema;

use super::common::{Common, MaybeUsage, StopReason, Usage};
use super::error::FieldError;
use super::extra::{Extra, Reports};
use super::fields::{COMPLETION_UNSUPPORTED, UNSUPPORTED, Unsupported};
use super::request::{RequestBody, take};
use super::schema::body;
use super::structured::StructuredFields;

/// `POST /v1/completions`.
#[derive(Debug)]
pub(crate) struct CompletionRequest {
    pub(crate) common: Common,
    pub(crate) structured: StructuredFields,
    pub(crate) own: CompletionFields,
}

/// The fields that only completions have.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct CompletionFields {
    /// The prompt, or several.
    pub(crate) prompt: Prompts,
    /// What comes after the generated text (fill in the middle), for models that have tokens for that. Empty: nothing.
    pub(crate) suffix: Option<String>,
    /// Prepends the prompt to the text.
    #[serde(default)]
    pub(crate) echo: bool,
    /// Reports the log-probability of each token and this many of the likeliest.
    #[schema(maximum = 20)]
    pub(crate) logprobs: Option<u32>,
    /// Choices to generate per prompt, of which the best `n` are returned. Default: `n`.
    pub(crate) best_of: Option<usize>,
    /// Adds the tokenizer's special tokens. Default: true.
    pub(crate) add_special_tokens: Option<bool>,
}

impl RequestBody for CompletionRequest {
    const UNSUPPORTED: &[&[Unsupported]] = &[UNSUPPORTED, COMPLETION_UNSUPPORTED];

    fn take_from(object: &mut Map<String, Value>) -> Result<Self, FieldError> {
        Ok(Self {
            common: Common::take_with_reports(object)?,
            structured: take(object)?,
            own: take(object)?,
        })
    }
}

body!(
    CompletionRequest,
    "A prompt, and how to continue it.",
    Common,
    Extra,
    Reports,
    StructuredFields,
    CompletionFields
);

/// One prompt or several, as text or as tokens.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(
    untagged,
    expecting = "expected a string, a list of strings, a list of token ids or a list of lists of token ids"
)]
pub(crate) enum Prompts {
    Text(String),
    #[schema(value_type = Vec<u32>)]
    Tokens(Vec<TokenId>),
    Texts(Vec<String>),
    #[schema(value_type = Vec<Vec<u32>>)]
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
            // An empty list may be one of anything.
            Self::Tokens(tokens) if tokens.is_empty() => Vec::new(),
            Self::Tokens(tokens) => vec![Prompt::Tokens(tokens)],
            Self::Texts(texts) => texts.into_iter().map(Prompt::Text).collect(),
            Self::TokenLists(lists) => lists.into_iter().map(Prompt::Tokens).collect(),
        }
    }
}

/// The response, whole or one chunk of a stream.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Completion {
    pub(crate) id: String,
    pub(crate) object: &'static str,
    pub(crate) created: u64,
    pub(crate) model: String,
    pub(crate) choices: Vec<CompletionChoice>,
    /// In streams only with `stream_options.include_usage`: `null` except in the last chunk.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Usage>)]
    pub(crate) usage: MaybeUsage,
    pub(crate) system_fingerprint: &'static str,
}

/// One of the texts, or a part of it.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct CompletionChoice {
    pub(crate) index: usize,
    pub(crate) text: String,
    pub(crate) logprobs: Option<CompletionLogprobs>,
    pub(crate) finish_reason: Option<&'static str>,
    /// vLLM's, beside `finish_reason`: the stop string, or the token of `stop_token_ids`, that ended the text.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<StopReason>)]
    pub(crate) stop_reason: Option<Option<StopReason>>,
    /// One entry per token of the prompt, the first `null`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Vec<Option<std::collections::BTreeMap<String, super::extra::ScoredToken>>>>)]
    pub(crate) prompt_logprobs: Option<Vec<Option<Map<String, Value>>>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Vec<u32>>)]
    pub(crate) prompt_token_ids: Option<Vec<TokenId>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Vec<u32>>)]
    pub(crate) token_ids: Option<Vec<TokenId>>,
}

/// Log-probabilities of the text's tokens.
#[derive(Debug, Default, Serialize, ToSchema)]
pub(crate) struct CompletionLogprobs {
    /// Characters before each token, from the beginning of the choice's text.
    pub(crate) text_offset: Vec<usize>,
    /// Log-probability of each token (-9999: probability 0); `null` for the first token of an echoed prompt.
    pub(crate) token_logprobs: Vec<Option<f64>>,
    /// The tokens' texts; `bytes:\x..` if not valid UTF-8.
    pub(crate) tokens: Vec<String>,
    /// The likeliest tokens at each position and the token itself; `null` likewise.
    #[schema(value_type = Vec<Option<std::collections::BTreeMap<String, f64>>>)]
    pub(crate) top_logprobs: Vec<Option<Map<String, Value>>>,
}
