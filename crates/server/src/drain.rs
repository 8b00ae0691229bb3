//! `POST /admin/drain`: shutdown by HTTP instead of a signal.

use axum::Json;
use axum::body::to_bytes;
use axum::extract::rejection::QueryRejection;
use axum::extract::{FromRequest, Query, Request, State};
use axum::http::StatusCode;
use axum::middleware::from_fn;
use axum::response::{IntoResponse, Response};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::error::ApiError;
use crate::origin::same_origin;
use crate::sleep::NoQuery;
use crate::state::AppState;
use crate::wire::about::DrainReport;
use crate::wire::error::ErrorBody;

/// The routes of `--enable-admin-api`.
pub(crate) fn routes() -> OpenApiRouter<AppState> {
    OpenApiRouter::default()
        .routes(routes!(drain))
        .route_layer(from_fn(same_origin))
}

/// Drain
///
/// Like SIGTERM: `/ready` fails, new requests get a 503, those in flight have `--drain-timeout` to finish, and the process
/// exits. It cannot be undone.
#[utoipa::path(
    post, path = "/admin/drain", tag = "Operation",
    responses(
        (status = 202, description = "The drain has begun, now or earlier.", body = DrainReport),
        (status = 400, description = "There are no parameters.", body = ErrorBody),
        (status = 401, description = "The key is missing or wrong.", body = ErrorBody),
        (status = 403, description = "A web page of another origin sent it.", body = ErrorBody),
    )
)]
async fn drain(
    State(state): State<AppState>,
    query: Result<Query<NoQuery>, QueryRejection>,
    _: NoBody,
) -> Result<Response, ApiError> {
    query?;
    tracing::info!("draining: POST /admin/drain");
    state.begin_drain();
    let stats = state.engine().stats();
    let report = DrainReport {
        status: "draining",
        requests_in_flight: stats.in_flight,
        requests_running: stats.scheduler.running,
        requests_waiting: stats.scheduler.waiting,
        timeout_seconds: state.options().drain_timeout.as_secs_f64(),
    };
    Ok((StatusCode::ACCEPTED, Json(report)).into_response())
}

/// An empty body.
struct NoBody;

impl<S: Sync> FromRequest<S> for NoBody {
    type Rejection = ApiError;

    async fn from_request(request: Request, _: &S) -> Result<Self, ApiError> {
        match to_bytes(request.into_body(), 64).await {
            Ok(body) if matches!(body.trim_ascii(), b"" | b"{}") => Ok(Self),
            _ => Err(ApiError::bad_request(
                "the body must be empty or {}: a drain has no parameters",
            )),
        }
    }
}
