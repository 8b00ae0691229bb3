//! Sleep mode, with vLLM's paths (U37): the memory of everything but the weights is given back until the server is woken.

use std::time::Duration;

use axum::Json;
use axum::Router;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use plimsoll_engine::Phase;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::error::ApiError;
use crate::state::AppState;

/// The routes of `--enable-sleep-mode`.
pub(crate) fn routes() -> Router<AppState> {
    Router::new()
        .route("/sleep", post(sleep))
        .route("/wake_up", post(wake_up))
        .route("/is_sleeping", get(is_sleeping))
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct SleepQuery {
    level: Option<u32>,
    /// Seconds that running requests are waited for.
    timeout: Option<f64>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct NoQuery {}

async fn sleep(
    State(state): State<AppState>,
    query: Result<Query<SleepQuery>, QueryRejection>,
) -> Result<Response, ApiError> {
    let Query(SleepQuery { level, timeout }) = query.map_err(wrong_query)?;
    if level.is_some_and(|level| level != 1) {
        return Err(ApiError::invalid(
            "level",
            "level must be 1: KV cache and step memory are given back, weights stay on the device",
        ));
    }
    let timeout = match timeout.map(Duration::try_from_secs_f64) {
        None => state.options().drain_timeout,
        Some(Ok(timeout)) => timeout,
        Some(Err(_)) => {
            return Err(ApiError::invalid(
                "timeout",
                "timeout must be a number of seconds",
            ));
        }
    };
    // A client that goes away meanwhile takes nothing back.
    let engine = state.engine().clone();
    tokio::spawn(async move { engine.sleep(timeout).await })
        .await
        .map_err(|panic| ApiError::Internal(panic.to_string()))??;
    Ok(sleeping(&state).into_response())
}

async fn wake_up(
    State(state): State<AppState>,
    query: Result<Query<NoQuery>, QueryRejection>,
) -> Result<Response, ApiError> {
    query.map_err(wrong_query)?;
    state.engine().wake().await?;
    Ok(sleeping(&state).into_response())
}

async fn is_sleeping(State(state): State<AppState>) -> Json<Value> {
    sleeping(&state)
}

fn sleeping(state: &AppState) -> Json<Value> {
    let asleep = state.engine().health().phase == Phase::Asleep;
    Json(json!({ "is_sleeping": asleep }))
}

fn wrong_query(rejection: QueryRejection) -> ApiError {
    ApiError::Invalid {
        message: rejection.body_text(),
        param: None,
    }
}
