//! `POST /admin/drain`: the end of the server, asked for by HTTP in place of a signal.

use axum::Json;
use axum::body::to_bytes;
use axum::extract::rejection::QueryRejection;
use axum::extract::{FromRequest, Query, Request, State};
use axum::http::request::Parts;
use axum::http::{StatusCode, header};
use axum::middleware::{Next, from_fn};
use axum::response::{IntoResponse, Response};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::error::ApiError;
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
/// As SIGTERM: `/ready` fails, new requests get a 503, those that are in may finish for `--drain-timeout`, and the process
/// ends. Nothing takes it back.
#[utoipa::path(
    post, path = "/admin/drain", tag = "Operation",
    responses(
        (status = 202, description = "The drain has begun, now or before.", body = DrainReport),
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
    tracing::info!("draining, as POST /admin/drain asks for");
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

/// A body that says nothing.
struct NoBody;

impl<S: Sync> FromRequest<S> for NoBody {
    type Rejection = ApiError;

    async fn from_request(request: Request, _: &S) -> Result<Self, ApiError> {
        match to_bytes(request.into_body(), 64).await {
            Ok(body) if matches!(body.trim_ascii(), b"" | b"{}") => Ok(Self),
            _ => Err(ApiError::Invalid {
                message: "the body must be empty or {}: a drain has no parameters".to_owned(),
                param: None,
            }),
        }
    }
}

/// Refuses what a browser sends for a page of another origin: such a request needs nobody's consent, and would reach a
/// server that only this machine can.
pub(crate) async fn same_origin(request: Request, next: Next) -> Response {
    let (parts, body) = request.into_parts();
    match is_cross_origin(&parts) {
        true => ApiError::CrossOrigin.into_response(),
        false => next.run(Request::from_parts(parts, body)).await,
    }
}

/// By the headers that browsers alone send: `Sec-Fetch-Site`, or with older ones `Origin`.
fn is_cross_origin(parts: &Parts) -> bool {
    let text = |name| {
        parts
            .headers
            .get(name)
            .map(|value| value.to_str().unwrap_or_default())
    };
    if let Some(site) = text(header::HeaderName::from_static("sec-fetch-site")) {
        return !matches!(site, "same-origin" | "none");
    }
    let Some(origin) = text(header::ORIGIN) else {
        return false;
    };
    let here = parts.uri.authority().map(|authority| authority.as_str());
    let there = origin.split_once("://").map(|(_, authority)| authority);
    there.is_none() || there != here.or_else(|| text(header::HOST))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cross_origin(uri: &str, headers: &[(&str, &str)]) -> bool {
        let mut request = Request::post(uri);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        is_cross_origin(&request.body(axum::body::Body::empty()).unwrap().into_parts().0)
    }

    #[test]
    fn pages_of_other_origins_are_told_by_what_browsers_send() {
        let host = ("host", "127.0.0.1:8000");
        assert!(!cross_origin("/", &[host]));
        assert!(!cross_origin("/", &[host, ("origin", "http://127.0.0.1:8000")]));
        assert!(!cross_origin("https://a:1/", &[("origin", "https://a:1")]));
        assert!(!cross_origin("/", &[host, ("sec-fetch-site", "same-origin")]));
        for origin in ["http://evil.example", "http://127.0.0.1:8001", "null", "", "ä"] {
            assert!(cross_origin("/", &[host, ("origin", origin)]), "{origin}");
        }
        for site in ["cross-site", "same-site", "?"] {
            assert!(cross_origin("/", &[host, ("sec-fetch-site", site)]), "{site}");
        }
    }
}
