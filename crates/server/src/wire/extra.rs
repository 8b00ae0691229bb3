use plimsoll_core::TokenId;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// vLLM's sampling parameters beyond OpenAI's.
#[derive(Clone, Debug, Default, Deserialize, ToSchema)]
pub(crate) struct Extra {
    /// Minimum number of output tokens before end of sequence, stop tokens or stop strings end the answer.
    pub(crate) min_tokens: Option<usize>,
    /// Only these tokens may be generated.
    #[schema(value_type = Option<Vec<u32>>, min_items = 1)]
    pub(crate) allowed_token_ids: Option<Vec<TokenId>>,
    /// Words that are not generated, as usually tokenized.
    #[schema(max_items = 256)]
    pub(crate) bad_words: Option<Vec<String>>,
    /// Omits special tokens from the text. Default: true.
    pub(crate) skip_special_tokens: Option<bool>,
    /// Keeps the stop string, or the text of the stop token, in the answer.
    #[serde(default)]
    pub(crate) include_stop_str_in_output: bool,
    /// Truncates the prompt to this many tokens; -1: as many as fit.
    #[schema(minimum = -1)]
    pub(crate) truncate_prompt_tokens: Option<i64>,
    /// Which end `truncate_prompt_tokens` cuts off. Default: left, the beginning.
    pub(crate) truncation_side: Option<TruncationSide>,
    /// Shares the prefix cache only with requests with the same salt.
    #[schema(min_length = 1)]
    pub(crate) cache_salt: Option<String>,
}

/// The end of a text that is cut off.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub(crate) enum TruncationSide {
    /// The beginning.
    Left,
    /// The end.
    Right,
}

/// vLLM's reporting options beyond OpenAI's, in chat and completions.
#[derive(Clone, Debug, Default, Deserialize, ToSchema)]
pub(crate) struct Reports {
    /// Reports log-probabilities of the prompt's tokens, with this many of the likeliest. Not with `stream`.
    #[schema(maximum = 20)]
    pub(crate) prompt_logprobs: Option<u32>,
    /// Names tokens in log-probabilities by id, like `token_id:17`.
    #[serde(default)]
    pub(crate) return_tokens_as_token_ids: bool,
    /// Returns the token ids of prompt and answer.
    #[serde(default)]
    pub(crate) return_token_ids: bool,
}

/// A token at one position of the prompt.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct ScoredToken {
    /// -9999: probability 0.
    pub(crate) logprob: f64,
    /// 1 for the likeliest.
    pub(crate) rank: u32,
    pub(crate) decoded_token: String,
}
