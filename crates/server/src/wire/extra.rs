use plimsoll_core::TokenId;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// vLLM's sampling parameters beyond OpenAI's.
#[derive(Clone, Debug, Default, Deserialize, ToSchema)]
pub(crate) struct Extra {
    /// Tokens before the end of the text, a stop token or a stop string may end the answer.
    pub(crate) min_tokens: Option<usize>,
    /// Only these tokens may be generated.
    #[schema(value_type = Option<Vec<u32>>, min_items = 1)]
    pub(crate) allowed_token_ids: Option<Vec<TokenId>>,
    /// Words that are not generated, in the tokens in which they are usually written.
    #[schema(max_items = 256)]
    pub(crate) bad_words: Option<Vec<String>>,
    /// Whether special tokens are left out of the text. Default: true.
    pub(crate) skip_special_tokens: Option<bool>,
    /// Whether the stop string, or the text of the stop token, stays in the answer.
    #[serde(default)]
    pub(crate) include_stop_str_in_output: bool,
    /// Keep only so many of the prompt's last tokens; -1: as many as fit.
    #[schema(minimum = -1)]
    pub(crate) truncate_prompt_tokens: Option<i64>,
    /// The prefix cache is shared only with requests that bring the same.
    #[schema(min_length = 1)]
    pub(crate) cache_salt: Option<String>,
}

/// What vLLM's answers tell beyond OpenAI's, in chat and completions.
#[derive(Clone, Debug, Default, Deserialize, ToSchema)]
pub(crate) struct Reports {
    /// Log-probabilities of the prompt's tokens, with so many of the likeliest at each place. Not with `stream`.
    #[schema(maximum = 20)]
    pub(crate) prompt_logprobs: Option<u32>,
    /// Name tokens in log-probabilities by their id, as `token_id:17`.
    #[serde(default)]
    pub(crate) return_tokens_as_token_ids: bool,
    /// Give the ids of the tokens of prompt and answer.
    #[serde(default)]
    pub(crate) return_token_ids: bool,
}

/// A token at a place of the prompt.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct ScoredToken {
    /// -9999: never.
    pub(crate) logprob: f64,
    /// 1 for the likeliest.
    pub(crate) rank: u32,
    pub(crate) decoded_token: String,
}
