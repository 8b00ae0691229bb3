//! `/v1/embeddings`.

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;

use crate::blocking::blocking;
use crate::body::Body;
use crate::context::Context;
use crate::error::ApiError;
use crate::openapi::Errors;
use crate::respond::Identity;
use crate::state::AppState;
use crate::vectors::{Cut, Source, Texts};
use crate::wire::chat::ChatPrompt;
use crate::wire::completion::Prompt;
use crate::wire::embedding::{
    Embedding, EmbeddingInput, EmbeddingList, EmbeddingRequest, EmbeddingUsage, EncodingFormat, Vector,
};

/// Embeddings
///
/// The vectors of one text or several, from a model that is served for embeddings.
#[utoipa::path(
    post, path = "/v1/embeddings", tag = "Embeddings", operation_id = "createEmbedding",
    request_body(content = EmbeddingRequest, example = json!({ "input": ["A load line", "A Plimsoll mark"] })),
    responses((status = 200, description = "A vector for each input, in order.", body = EmbeddingList), Errors)
)]
pub(crate) async fn handle(
    State(state): State<AppState>,
    Extension(context): Extension<Context>,
    Body(request): Body<EmbeddingRequest>,
) -> Result<Response, ApiError> {
    let EmbeddingRequest { own, input } = request;
    state.check_model(own.model.as_deref())?;
    let Some(embedding) = state.model().embedding.clone() else {
        let message = format!(
            "`{}` is served for text generation; serve an embedding model, or this one with --runner pooling",
            state.model().id
        );
        return Err(ApiError::invalid("model", message));
    };
    if embedding.scorer.is_some() {
        let message = format!(
            "`{}` is a cross-encoder, which makes scores and no vectors: use /v1/rerank or /v1/score",
            state.model().id
        );
        return Err(ApiError::invalid("model", message));
    }
    let size = embedding.cut(own.dimensions)?;
    let most = state.engine().limits().max_request_tokens();
    let (asked, side) = (own.truncate_prompt_tokens, own.truncation_side);
    let cut = Cut::new("truncate_prompt_tokens", asked, side, most)?;
    let source = match input {
        EmbeddingInput::Texts(prompts) => without_empty(Source {
            field: "input",
            prompts: prompts.into_vec(),
            is_list: true,
            cut,
        })?,
        EmbeddingInput::Chat(chat) => Source {
            field: "messages",
            prompts: vec![conversation(&state, &context, *chat, own.add_special_tokens).await?],
            is_list: false,
            cut,
        },
    };
    let special = own.add_special_tokens.unwrap_or(true);
    let texts = Texts::new(&state, &context, &embedding, vec![source], special).await?;
    let prompt_tokens = texts.count();
    let vectors = embedding.vectors(&state, &context, texts).await?;
    let Identity { id, created, model } = Identity::new("embd", &state, &context);
    blocking(move || {
        let data = vectors.into_iter().enumerate().map(|(index, vector)| {
            let vector = embedding.finish(vector, size)?;
            Ok(Embedding {
                object: "embedding",
                index,
                embedding: encode(vector, own.encoding_format),
            })
        });
        let list = EmbeddingList {
            id,
            object: "list",
            created,
            model,
            data: data.collect::<Result<_, ApiError>>()?,
            usage: EmbeddingUsage::of(prompt_tokens),
        };
        Ok(Json(list).into_response())
    })
    .await
}

/// Refuses empty texts as OpenAI does, also where special tokens would stand around them.
fn without_empty(source: Source) -> Result<Source, ApiError> {
    let is_empty = |prompt: &Prompt| matches!(prompt, Prompt::Text(text) if text.is_empty());
    match source.prompts.iter().position(is_empty) {
        Some(index) => Err(source.blame(index, ApiError::bad_request("the text is empty"))),
        None => Ok(source),
    }
}

/// The tokens of a conversation, which does not ask for an answer unless it says so.
async fn conversation(
    state: &AppState,
    context: &Context,
    mut chat: ChatPrompt,
    add_special_tokens: Option<bool>,
) -> Result<Prompt, ApiError> {
    chat.add_generation_prompt.get_or_insert(false);
    let (state, context) = (state.clone(), context.clone());
    blocking(move || {
        let mut prompt = chat.into_prompt(None, true, &context)?;
        prompt.add_special_tokens = add_special_tokens.unwrap_or(false);
        prompt.tokens(state.model()).map(Prompt::Tokens)
    })
    .await
}

fn encode(vector: Vec<f32>, format: EncodingFormat) -> Vector {
    match format {
        EncodingFormat::Float => Vector::Floats(vector),
        EncodingFormat::Base64 => {
            let bytes: Vec<u8> = vector.iter().flat_map(|x| x.to_le_bytes()).collect();
            Vector::Base64(STANDARD.encode(bytes))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base64_is_of_little_endian_floats() {
        match encode(vec![1.0, -2.5], EncodingFormat::Base64) {
            Vector::Base64(text) => assert_eq!(text, "AACAPwAAIMA="),
            other => panic!("{other:?}"),
        }
    }
}
