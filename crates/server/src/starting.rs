//! The API while the engine is starting: probes and metrics report the progress, the web pages show it, every other request
//! gets a 503.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::middleware::{Next, from_fn};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};

use crate::app::cors;
use crate::context::{fresh_id, request_id};
use crate::error::{ApiError, whole_seconds};
use crate::metrics::start_page;
use crate::observe::REQUEST_ID;
use crate::options::ServerOptions;
use crate::start::{Start, StartStatus};
use crate::wire::about::{NotReady, StartReport};
use crate::{admin, anthropic, pages};

#[derive(Clone)]
struct Waiting(Arc<Inner>);

struct Inner {
    start: Arc<dyn Start>,
    model: String,
    options: ServerOptions,
}

/// Routes until there is an engine.
pub(crate) fn router(model: &str, options: &ServerOptions, start: Arc<dyn Start>) -> Router {
    let layers = tower::ServiceBuilder::new()
        .layer(from_fn(anthropic::reword))
        .option_layer(cors(options))
        .layer(from_fn(identify));
    let (pages, _) = match options.pages {
        true => pages::routes().split_for_parts(),
        false => Default::default(),
    };
    pages
        .route("/health", get(health))
        .route("/ready", get(ready))
        .route("/metrics", get(metrics))
        .fallback(refuse)
        .layer(layers)
        .with_state(Waiting(Arc::new(Inner {
            start,
            model: model.to_owned(),
            options: options.clone(),
        })))
}

async fn identify(request: Request, next: Next) -> Response {
    let id = request_id(request.headers()).unwrap_or_else(fresh_id);
    let mut response = next.run(request).await;
    if let Ok(id) = HeaderValue::from_str(&id) {
        response.headers_mut().insert(REQUEST_ID, id);
    }
    response
}

/// Liveness: a process that is starting is alive.
async fn health(State(Waiting(waiting)): State<Waiting>) -> Json<StartReport> {
    Json(report(&waiting.start.status()))
}

async fn ready(State(Waiting(waiting)): State<Waiting>) -> Response {
    let status = waiting.start.status();
    let retry = [(header::RETRY_AFTER, whole_seconds(status.retry_after()))];
    let body = Json(NotReady::Starting(report(&status)));
    (StatusCode::SERVICE_UNAVAILABLE, retry, body).into_response()
}

fn report(status: &StartStatus) -> StartReport {
    StartReport {
        status: "starting",
        phase: status.phase.name(),
        detail: status.detail.clone(),
        percent: status.percent(),
        elapsed_seconds: status.elapsed.as_secs_f64(),
        estimated_seconds: status.remaining.map(|remaining| remaining.as_secs_f64()),
    }
}

async fn metrics(State(Waiting(waiting)): State<Waiting>, headers: HeaderMap) -> Result<Response, ApiError> {
    if waiting.options.metrics_require_key {
        waiting.options.keys.tenant(&headers)?;
    }
    let page = start_page(&waiting.model, &waiting.start.status());
    Ok(admin::metrics_page(page))
}

async fn refuse(State(Waiting(waiting)): State<Waiting>) -> ApiError {
    ApiError::Starting(waiting.start.status())
}
