//! Tokenizes prompts.

use plimsoll_core::TokenId;
use plimsoll_text::Fim;

use crate::error::ApiError;
use crate::model::ModelInfo;
use crate::wire::completion::Prompt;

/// Tokens of one prompt of a completion, at most `most` if that is set. May take long: for the blocking pool.
pub(crate) fn completion(
    model: &ModelInfo,
    prompt: &Prompt,
    add_special: bool,
    most: Option<usize>,
) -> Result<Vec<TokenId>, ApiError> {
    match prompt {
        Prompt::Tokens(tokens) => Ok(tokens.clone()),
        Prompt::Text(text) => encode(model, text, add_special, most, "prompt"),
    }
}

/// A request for the text between a prompt and a suffix.
#[derive(Clone, Debug)]
pub(crate) struct Middle {
    pub(crate) fim: Fim,
    pub(crate) suffix: String,
}

impl Middle {
    /// [`completion`] of a prompt that the suffix follows.
    pub(crate) fn completion(
        &self,
        model: &ModelInfo,
        prompt: &Prompt,
        add_special: bool,
        most: usize,
    ) -> Result<Vec<TokenId>, ApiError> {
        check_length(model, &self.suffix, Some(most), "suffix")?;
        let prefix = match prompt {
            Prompt::Tokens(tokens) => tokens.clone(),
            Prompt::Text(text) => {
                check_length(model, text, Some(most), "prompt")?;
                let tokens = model.tokenizer.encode_literal(text);
                tokens.map_err(|error| ApiError::from(error).in_field("prompt"))?
            }
        };
        let tokens = self
            .fim
            .prompt(&model.tokenizer, prefix, &self.suffix, add_special);
        tokens.map_err(|error| ApiError::from(error).in_field("suffix"))
    }
}

/// Tokens of a text in the request's `field`. A text too long to have at most `most` tokens is refused before it is tokenized,
/// which takes about a second for some megabytes; the result may still have more.
pub(crate) fn encode(
    model: &ModelInfo,
    text: &str,
    add_special: bool,
    most: Option<usize>,
    field: &'static str,
) -> Result<Vec<TokenId>, ApiError> {
    check_length(model, text, most, field)?;
    let tokens = model.tokenizer.encode(text, add_special);
    tokens.map_err(|error| ApiError::from(error).in_field(field))
}

/// An error if `text` has certainly more than `most` tokens.
pub(crate) fn check_length(
    model: &ModelInfo,
    text: &str,
    most: Option<usize>,
    field: &'static str,
) -> Result<(), ApiError> {
    let least = model.tokenizer.count_at_least(text);
    if let Some(limit) = most.filter(|&most| least > most) {
        return Err(ApiError::ContextLength {
            message: format!(
                "this server's maximum context length is {limit} tokens, but the prompt's {} bytes are at least {least}",
                text.len()
            ),
            param: field,
            prompt: least,
            limit,
        });
    }
    Ok(())
}
