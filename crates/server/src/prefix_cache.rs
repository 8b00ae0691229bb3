//! `POST /reset_prefix_cache`, with vLLM's path and response.

use axum::Json;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use axum::middleware::from_fn;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::error::ApiError;
use crate::origin::same_origin;
use crate::state::AppState;
use crate::wire::about::{ResetQuery, ResetReport};
use crate::wire::error::ErrorBody;

/// The route, of `--enable-admin-api`.
pub(crate) fn routes() -> OpenApiRouter<AppState> {
    OpenApiRouter::default()
        .routes(routes!(reset))
        .route_layer(from_fn(same_origin))
}

/// Reset the prefix cache
///
/// No later request shares what was computed so far. Running requests go on with the blocks that they have.
#[utoipa::path(
    post, path = "/reset_prefix_cache", tag = "Operation", operation_id = "resetPrefixCache", params(ResetQuery),
    responses(
        (status = 200, description = "Whether the cache was emptied; false only while the server ends.", body = ResetReport),
        (status = 400, description = "A parameter is wrong.", body = ErrorBody),
        (status = 401, description = "The key is missing or wrong.", body = ErrorBody),
        (status = 403, description = "A web page of another origin sent it.", body = ErrorBody),
    )
)]
async fn reset(
    State(state): State<AppState>,
    query: Result<Query<ResetQuery>, QueryRejection>,
) -> Result<Json<ResetReport>, ApiError> {
    let Query(ResetQuery {
        reset_running_requests,
        reset_external,
    }) = query?;
    let given = [
        (
            "reset_running_requests",
            reset_running_requests,
            "running requests keep their blocks, which no other request shares",
        ),
        (
            "reset_external",
            reset_external,
            "there is no other cache than the server's own",
        ),
    ];
    if let Some((name, _, why)) = given.into_iter().find(|(_, value, _)| value.unwrap_or(false)) {
        return Err(ApiError::invalid(name, format!("{name} must be false: {why}")));
    }
    let success = state.engine().forget_cached().await;
    tracing::info!(success, "POST /reset_prefix_cache");
    Ok(Json(ResetReport { success }))
}
