//! From a completion's prompts to tokens.

use plimsoll_core::TokenId;

use crate::conversation::in_field;
use crate::error::ApiError;
use crate::state::ModelInfo;
use crate::wire::completion::Prompt;

/// Tokens of one prompt of a completion. May take long: for the blocking pool.
pub(crate) fn completion(
    model: &ModelInfo,
    prompt: &Prompt,
    add_special: bool,
) -> Result<Vec<TokenId>, ApiError> {
    match prompt {
        Prompt::Tokens(tokens) => Ok(tokens.clone()),
        Prompt::Text(text) => model
            .tokenizer
            .encode(text, add_special)
            .map_err(|error| in_field("prompt", error.into())),
    }
}
