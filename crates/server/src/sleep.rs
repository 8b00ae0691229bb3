//! Sleep mode, with vLLM's paths: all memory but the weights is released until the server is woken.

use std::time::Duration;

use axum::Json;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use axum::middleware::from_fn;
use axum::response::{IntoResponse, Response};
use plimsoll_engine::Phase;
use serde::Deserialize;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::error::ApiError;
use crate::origin::same_origin;
use crate::state::AppState;
use crate::wire::about::{SleepQuery, SleepState};
use crate::wire::error::ErrorBody;

/// The routes of `--enable-sleep-mode`.
pub(crate) fn routes() -> OpenApiRouter<AppState> {
    OpenApiRouter::default()
        .routes(routes!(sleep))
        .routes(routes!(wake_up))
        .routes(routes!(is_sleeping))
        .route_layer(from_fn(same_origin))
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct NoQuery {}

/// Sleep
///
/// Releases all memory but the weights, after running requests have ended.
#[utoipa::path(
    post, path = "/sleep", tag = "Operation", params(SleepQuery),
    responses(
        (status = 200, description = "The server sleeps.", body = SleepState),
        (status = 400, description = "A parameter is wrong.", body = ErrorBody),
        (status = 409, description = "Not now.", body = ErrorBody),
    )
)]
async fn sleep(
    State(state): State<AppState>,
    query: Result<Query<SleepQuery>, QueryRejection>,
) -> Result<Response, ApiError> {
    let Query(SleepQuery { level, timeout }) = query?;
    if level.is_some_and(|level| level != 1) {
        let message = "level must be 1: KV cache and activations are released, weights stay on the device";
        return Err(ApiError::invalid("level", message));
    }
    let timeout = match timeout.map(Duration::try_from_secs_f64) {
        None => state.options().drain_timeout,
        Some(Ok(timeout)) => timeout,
        Some(Err(_)) => {
            let message = "timeout must be a number of seconds";
            return Err(ApiError::invalid("timeout", message));
        }
    };
    // Continues if the client disconnects.
    let engine = state.engine().clone();
    tokio::spawn(async move { engine.sleep(timeout).await })
        .await
        .map_err(|panic| ApiError::Internal(panic.to_string()))??;
    Ok(sleeping(&state).into_response())
}

/// Wake up
///
/// Allocates the memory again and validates it.
#[utoipa::path(
    post, path = "/wake_up", tag = "Operation",
    responses(
        (status = 200, description = "Requests are accepted.", body = SleepState),
        (status = 400, description = "There are no parameters.", body = ErrorBody),
        (status = 409, description = "Not now.", body = ErrorBody),
        (status = 503, description = "There is not enough memory; the server keeps trying.", body = ErrorBody),
    )
)]
async fn wake_up(
    State(state): State<AppState>,
    query: Result<Query<NoQuery>, QueryRejection>,
) -> Result<Response, ApiError> {
    query?;
    state.engine().wake().await?;
    Ok(sleeping(&state).into_response())
}

/// Is the server asleep
#[utoipa::path(
    get, path = "/is_sleeping", tag = "Operation",
    responses((status = 200, description = "Whether the server sleeps.", body = SleepState))
)]
async fn is_sleeping(State(state): State<AppState>) -> Json<SleepState> {
    sleeping(&state)
}

fn sleeping(state: &AppState) -> Json<SleepState> {
    let is_sleeping = state.engine().health().phase == Phase::Asleep;
    Json(SleepState { is_sleeping })
}
