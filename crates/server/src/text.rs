//! `/tokenize` and `/detokenize`, in vLLM's shapes.

use std::sync::Arc;

use axum::extract::State;
use axum::{Extension, Json};

use crate::blocking::blocking;
use crate::body::Body;
use crate::context::Context;
use crate::error::ApiError;
use crate::images::Depth;
use crate::openapi::Errors;
use crate::state::AppState;
use crate::wire::tokenize::{DetokenizeRequest, Detokenized, TokenizeInput, TokenizeRequest, Tokenized};

/// Tokenize
///
/// The tokens of a prompt, or of a conversation rendered by the model's chat template.
#[utoipa::path(
    post, path = "/tokenize", tag = "Tokens",
    request_body(content = TokenizeRequest, examples(
        ("A prompt" = (value = json!({ "prompt": "A load line", "return_token_strs": true }))),
        ("A conversation" = (value = json!({ "messages": [{ "role": "user", "content": "Ahoy!" }] }))),
    )),
    responses((status = 200, description = "The tokens.", body = Tokenized), Errors)
)]
pub(crate) async fn tokenize(
    State(state): State<AppState>,
    Extension(context): Extension<Context>,
    Body(request): Body<TokenizeRequest>,
) -> Result<Json<Tokenized>, ApiError> {
    let TokenizeRequest { own, input } = request;
    state.check_model(own.model.as_deref())?;
    let input = match input {
        TokenizeInput::Prompt(text) => Ok(text),
        TokenizeInput::Chat(chat) => {
            let mut prompt = chat.into_prompt(None, true, &context)?;
            prompt.add_special_tokens = own.add_special_tokens.unwrap_or(false);
            prompt.load_images(&state, Depth::Sizes).await?;
            Err(prompt)
        }
    };
    blocking(move || {
        let model = state.model();
        let tokens = match input {
            Ok(text) => model
                .tokenizer
                .encode(&text, own.add_special_tokens.unwrap_or(true))?,
            Err(prompt) => prompt.tokens(model)?,
        };
        let strs = tokens.iter().map(|&token| model.tokenizer.token_str(token));
        let token_strs = own.return_token_strs.then(|| strs.collect());
        Ok(Json(Tokenized {
            count: tokens.len(),
            max_model_len: state.engine().limits().max_model_len,
            tokens,
            token_strs,
        }))
    })
    .await
}

/// Detokenize
///
/// The text of tokens, special ones included.
#[utoipa::path(
    post, path = "/detokenize", tag = "Tokens",
    request_body(content = DetokenizeRequest, example = json!({ "tokens": [65, 32, 108, 111, 97, 100] })),
    responses((status = 200, description = "The text.", body = Detokenized), Errors)
)]
pub(crate) async fn detokenize(
    State(state): State<AppState>,
    Body(DetokenizeRequest(request)): Body<DetokenizeRequest>,
) -> Result<Json<Detokenized>, ApiError> {
    state.check_model(request.model.as_deref())?;
    let model = Arc::clone(state.model());
    let vocab_size = state.engine().limits().vocab_size;
    blocking(move || {
        if let Some(token) = request.tokens.iter().find(|&&token| token as usize >= vocab_size) {
            let message = format!("token id {token} is outside the vocabulary of {vocab_size} tokens");
            return Err(ApiError::invalid("tokens", message));
        }
        Ok(Json(Detokenized {
            prompt: model.tokenizer.decode(&request.tokens, false),
        }))
    })
    .await
}
