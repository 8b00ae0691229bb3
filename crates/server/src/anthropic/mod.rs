//! Anthropic's Messages API: `/v1/messages` and `/v1/messages/count_tokens`.

mod error;
mod request;
#[cfg(test)]
mod tests;
mod writer;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use futures::StreamExt;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::body::Body;
use crate::context::Context;
use crate::conversation::{self, Fit};
use crate::error::ApiError;
use crate::respond;
use crate::state::AppState;
use crate::wire::anthropic::{CountRequest, ErrorBody, Event, Message, MessageTokens, MessagesRequest};

pub(crate) use error::{REQUEST_ID, reword};
use writer::Writer;

/// The routes.
pub(crate) fn routes() -> OpenApiRouter<AppState> {
    OpenApiRouter::default()
        .routes(routes!(create))
        .routes(routes!(count_tokens))
}

/// Message
///
/// Anthropic's API: an answer to a conversation, whole or as server-sent events, each with the name that its `type` says.
#[utoipa::path(
    post, path = "/v1/messages", operation_id = "createMessage", tag = "Generation",
    request_body(content = MessagesRequest, examples(
        ("A question" = (value = json!({
            "max_tokens": 100, "messages": [{ "role": "user", "content": "What is a load line?" }],
        }))),
    )),
    responses(
        (status = 200, description = "The answer.",
            content((Message = "application/json"), (Event = "text/event-stream"))),
        (status = "4XX", description = "The request is wrong, or the server is busy.", body = ErrorBody),
        (status = "5XX", description = "The server cannot answer now.", body = ErrorBody),
    )
)]
async fn create(
    State(state): State<AppState>,
    Extension(context): Extension<Context>,
    Body(request): Body<MessagesRequest>,
) -> Result<Response, ApiError> {
    let streamed = request.common.stream;
    state.check_model(request.common.model.as_deref())?;
    let asked = request::parse(&state, request)?;
    let max_tokens = asked.max_tokens;
    let answers = conversation::open(&state, &context, asked.conversation).await?;
    let mut writer = Writer::new(
        state.model().id.clone(),
        answers.prompt_tokens(),
        asked.shown,
        max_tokens,
        streamed,
    )
    .answering(context.id());
    if streamed {
        return Ok(respond::stream(&state, &context, answers.updates(), writer));
    }
    let mut updates = std::pin::pin!(answers.updates());
    while let Some(update) = updates.next().await {
        writer.write(update?);
    }
    Ok(Json(writer.into_message()).into_response())
}

/// Tokens of a message
///
/// How many tokens of prompt a message would have.
#[utoipa::path(
    post, path = "/v1/messages/count_tokens", operation_id = "countMessageTokens", tag = "Tokens", request_body = CountRequest,
    responses(
        (status = 200, description = "The count.", body = MessageTokens),
        (status = "4XX", description = "The request is wrong.", body = ErrorBody),
        (status = "5XX", description = "The server cannot answer now.", body = ErrorBody),
    )
)]
async fn count_tokens(
    State(state): State<AppState>,
    Body(request): Body<CountRequest>,
) -> Result<Json<MessageTokens>, ApiError> {
    state.check_model(request.model.as_deref())?;
    let prompt = request::prompt(&state, request.prompt)?.prompt;
    let input_tokens = conversation::count(&state, prompt, Fit::CutAnswer, None).await?;
    Ok(Json(MessageTokens { input_tokens }))
}
