//! `/v1/responses`: OpenAI's Responses API.

mod input;
mod request;
#[cfg(test)]
mod tests;
mod tools;
mod writer;

use std::sync::Arc;

use axum::extract::{Path, Query, RawQuery, State};
use axum::http::Uri;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use futures::StreamExt;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::blocking::blocking;
use crate::body::Body;
use crate::context::Context;
use crate::conversation;
use crate::error::ApiError;
use crate::openapi::Errors;
use crate::paging::{self, limit};
use crate::respond;
use crate::response_store::Turn;
use crate::state::AppState;
use crate::wire::error::ErrorBody;
use crate::wire::responses::{
    DeletedResponse, Event, InputTokens, Item, ItemList, ItemsQuery, Order, ResponseObject, ResponsesRequest,
};

use request::Asked;
use writer::{Keep, Writer};

/// Default number of items of a page.
const PAGE: usize = 20;
/// Maximum number of items of a page.
const MAX_PAGE: usize = 100;

/// The routes.
pub(crate) fn routes() -> OpenApiRouter<AppState> {
    OpenApiRouter::default()
        .routes(routes!(create))
        .routes(routes!(count))
        .routes(routes!(retrieve, delete))
        .routes(routes!(cancel))
        .routes(routes!(input_items))
}

/// Response
///
/// An answer to a conversation, whole or as server-sent events, each with the name that its `type` says.
#[utoipa::path(
    post, path = "/v1/responses", operation_id = "createResponse", tag = "Generation",
    request_body(content = ResponsesRequest, examples(
        ("A question" = (value = json!({ "input": "What is a load line?", "max_output_tokens": 200 }))),
        ("The next question" = (value = json!({
            "previous_response_id": "resp_..", "input": "And who was Plimsoll?", "max_output_tokens": 100, "stream": true,
        }))),
    )),
    responses(
        (status = 200, description = "The answer.",
            content((ResponseObject = "application/json"), (Event = "text/event-stream"))),
        Errors,
    )
)]
async fn create(
    State(state): State<AppState>,
    Extension(context): Extension<Context>,
    Body(request): Body<ResponsesRequest>,
) -> Result<Response, ApiError> {
    let streamed = request.common.stream;
    let asked = parse_request(&state, &context, request).await?;
    let answers = conversation::open(&state, &context, asked.conversation).await?;
    let keep = asked.response.store.then(|| Keep {
        state: state.clone(),
        owner: context.tenant(),
        previous: asked.previous,
        input: asked.input,
    });
    let tokenizer = state.model().tokenizer.clone();
    let mut writer =
        Writer::new(asked.response, asked.functions, tokenizer, asked.shown, streamed).keep(keep);
    if streamed {
        return Ok(respond::stream(&state, &context, answers.updates(), writer));
    }
    let mut updates = std::pin::pin!(answers.updates());
    while let Some(update) = updates.next().await {
        writer.write(update?);
    }
    Ok(Json(writer.into_response()).into_response())
}

/// Parses a request, with memory reserved for the text of the conversation that it continues.
async fn parse_request(
    state: &AppState,
    context: &Context,
    request: ResponsesRequest,
) -> Result<Asked, ApiError> {
    let previous = request::previous(state, context.tenant(), &request)?;
    if let Some(turn) = &previous {
        let bytes = turn.text_bytes().min(state.longest_text());
        context.hold(state.request_memory().reserve(bytes).await?);
    }
    let (state, context) = (state.clone(), context.clone());
    blocking(move || request::parse(&state, &context, previous, request)).await
}

/// Tokens of a response
///
/// How many tokens of prompt a response would have.
#[utoipa::path(
    post, path = "/v1/responses/input_tokens", operation_id = "countInputTokens", tag = "Tokens", request_body = ResponsesRequest,
    responses((status = 200, description = "The count.", body = InputTokens), Errors)
)]
async fn count(
    State(state): State<AppState>,
    Extension(context): Extension<Context>,
    Body(request): Body<ResponsesRequest>,
) -> Result<Json<InputTokens>, ApiError> {
    let asked = parse_request(&state, &context, request).await?.conversation;
    let input_tokens = conversation::count(&state, asked.prompt, asked.fit, asked.max_tokens).await?;
    Ok(Json(InputTokens {
        object: "response.input_tokens",
        input_tokens,
    }))
}

/// A stored response
#[utoipa::path(
    get, path = "/v1/responses/{id}", operation_id = "getResponse", tag = "Generation", params(("id" = String, Path, description = "The response's.")),
    responses(
        (status = 200, description = "The response.", body = ResponseObject),
        (status = 400, description = "A parameter is wrong.", body = ErrorBody),
        (status = 404, description = "It is not stored.", body = ErrorBody),
    )
)]
async fn retrieve(
    State(state): State<AppState>,
    Extension(context): Extension<Context>,
    Path(id): Path<String>,
    RawQuery(query): RawQuery,
) -> Result<Response, ApiError> {
    // `include` has no effect here; `stream` would replay past events.
    for parameter in ["stream", "starting_after"] {
        let asked = query.iter().flat_map(|query| query.split('&'));
        let mut pairs = asked.map(|pair| pair.split_once('=').unwrap_or((pair, "")));
        if pairs.any(|(name, value)| name == parameter && value != "false") {
            return Err(ApiError::unsupported(
                parameter,
                "only background responses can be streamed later, and there are none",
            ));
        }
    }
    let turn = turn(&state, &context, &id)?;
    blocking(move || Ok(Json(turn.response()).into_response())).await
}

/// Delete a response
#[utoipa::path(
    delete, path = "/v1/responses/{id}", operation_id = "deleteResponse", tag = "Generation", params(("id" = String, Path, description = "The response's.")),
    responses(
        (status = 200, description = "It is deleted.", body = DeletedResponse),
        (status = 404, description = "It is not stored.", body = ErrorBody),
    )
)]
async fn delete(
    State(state): State<AppState>,
    Extension(context): Extension<Context>,
    Path(id): Path<String>,
) -> Result<Json<DeletedResponse>, ApiError> {
    if !state.responses().delete(context.tenant(), &id) {
        return Err(not_stored(&state, format!("response `{id}`"), None));
    }
    Ok(Json(DeletedResponse {
        id,
        object: "response",
        deleted: true,
    }))
}

/// Cancel a response
///
/// Only background responses can be cancelled, and this server has none.
#[utoipa::path(
    post, path = "/v1/responses/{id}/cancel", operation_id = "cancelResponse", tag = "Generation",
    params(("id" = String, Path, description = "The response's.")),
    responses(
        (status = 400, description = "It is not a background response.", body = ErrorBody),
        (status = 404, description = "It is not stored.", body = ErrorBody),
    )
)]
async fn cancel(
    State(state): State<AppState>,
    Extension(context): Extension<Context>,
    Path(id): Path<String>,
) -> Result<Response, ApiError> {
    turn(&state, &context, &id)?;
    let message = "only background responses can be cancelled, and this server has none; close the connection to \
                   cancel a response that is being generated";
    Err(ApiError::bad_request(message))
}

/// Input items of a response
///
/// All items that the model read, including earlier turns of the conversation.
#[utoipa::path(
    get, path = "/v1/responses/{id}/input_items", operation_id = "listInputItems", tag = "Generation",
    params(("id" = String, Path, description = "The response's."), ItemsQuery),
    responses(
        (status = 200, description = "A page of items.", body = ItemList),
        (status = 400, description = "A parameter is wrong.", body = ErrorBody),
        (status = 404, description = "It is not stored.", body = ErrorBody),
    )
)]
async fn input_items(
    State(state): State<AppState>,
    Extension(context): Extension<Context>,
    Path(id): Path<String>,
    RawQuery(query): RawQuery,
) -> Result<Json<ItemList>, ApiError> {
    let query = items_query(query.as_deref().unwrap_or_default())?;
    let turn = turn(&state, &context, &id)?;
    page(turn.given(), &query).map(Json)
}

/// Parses a query without `include`, a repeated parameter that serde cannot parse and that has no effect here.
fn items_query(query: &str) -> Result<ItemsQuery, ApiError> {
    let is_include = |pair: &&str| {
        let name = pair.split('=').next().unwrap_or_default();
        ["include", "include[]", "include%5B%5D"]
            .iter()
            .any(|known| known.eq_ignore_ascii_case(name))
    };
    let rest: Vec<_> = query.split('&').filter(|pair| !is_include(pair)).collect();
    let invalid = |message| ApiError::bad_request(message);
    let uri = Uri::try_from(format!("/?{}", rest.join("&"))).map_err(|error| invalid(error.to_string()))?;
    let Query(query) = Query::try_from_uri(&uri)?;
    Ok(query)
}

/// A page of a list of items; `items` are oldest first.
fn page(mut items: Vec<&Item>, query: &ItemsQuery) -> Result<ItemList, ApiError> {
    let limit = limit(query.limit, PAGE, MAX_PAGE)?;
    if query.order.unwrap_or_default() == Order::Desc {
        items.reverse();
    }
    let page = paging::page(items, query.after.as_deref(), limit, |item| item.id())?;
    Ok(ItemList {
        object: page.object,
        data: page.data.into_iter().cloned().collect(),
        first_id: page.first_id,
        last_id: page.last_id,
        has_more: page.has_more,
    })
}

fn turn(state: &AppState, context: &Context, id: &str) -> Result<Arc<Turn>, ApiError> {
    let turn = state.responses().get(context.tenant(), id);
    turn.ok_or_else(|| not_stored(state, format!("response `{id}`"), None))
}

/// The error for something that is not stored, with the possible reasons.
fn not_stored(state: &AppState, what: String, param: Option<&'static str>) -> ApiError {
    let limits = state.responses().limits();
    let message = format!(
        "{what} is not stored: it does not exist, was created with store = false, was deleted or was evicted \
         (this server keeps the last {} responses, up to {} bytes, in memory)",
        limits.responses, limits.bytes
    );
    ApiError::NotStored { message, param }
}
