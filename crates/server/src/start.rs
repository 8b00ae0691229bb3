//! The server before it serves: its port listens and says how far the start is. Every request to the API gets a 503: what
//! answers it does not exist yet.

use std::sync::Arc;
use std::time::Duration;

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
use crate::state::ServerOptions;
use crate::wire::about::{NotReady, StartReport};
use crate::{admin, anthropic};

/// What a start does, in this order; after an attempt that ran out of memory it rebuilds and validates again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum StartPhase {
    /// Finds the files of the model.
    Resolve,
    /// Downloads them.
    Download,
    /// Opens the device, once no other start measures it.
    Device,
    /// Loads the weights.
    Weights,
    /// Runs the worst steps with a small KV cache.
    Probe,
    /// Builds the engine's state at its final size.
    Rebuild,
    /// Records the steps of that state as CUDA graphs, batch size by batch size.
    Capture,
    /// Runs the worst steps at that size.
    Validate,
    /// Starts the engine over what was proved.
    Engine,
}

impl StartPhase {
    /// All of them in their order.
    pub const ALL: [Self; 9] = [
        Self::Resolve,
        Self::Download,
        Self::Device,
        Self::Weights,
        Self::Probe,
        Self::Rebuild,
        Self::Capture,
        Self::Validate,
        Self::Engine,
    ];

    /// Name in JSON, metrics and logs.
    pub fn name(self) -> &'static str {
        match self {
            Self::Resolve => "resolve",
            Self::Download => "download",
            Self::Device => "device",
            Self::Weights => "weights",
            Self::Probe => "probe",
            Self::Rebuild => "rebuild",
            Self::Capture => "capture",
            Self::Validate => "validate",
            Self::Engine => "engine",
        }
    }
}

/// How far a start is.
#[derive(Clone, Debug, PartialEq)]
pub struct StartStatus {
    /// What it does now.
    pub phase: StartPhase,
    /// How far that is, in words.
    pub detail: Option<String>,
    /// What part of the start is done, 0 to below 1; it never falls.
    pub done: f64,
    /// Since the start began.
    pub elapsed: Duration,
    /// How long it will still take, where that can be told.
    pub remaining: Option<Duration>,
}

impl StartStatus {
    /// When it is worth asking again.
    pub(crate) fn retry_after(&self) -> Duration {
        self.remaining.map_or(RETRY_UNKNOWN, |remaining| {
            remaining.clamp(Duration::from_secs(1), RETRY_LATEST)
        })
    }

    /// For people.
    pub(crate) fn percent(&self) -> f64 {
        // Rounded down: it is not done before it is done.
        (self.done * 1000.0).floor() / 10.0
    }
}

const RETRY_UNKNOWN: Duration = Duration::from_secs(5);
const RETRY_LATEST: Duration = Duration::from_secs(60);

/// A start, for those who want to know how far it is.
pub trait Start: Send + Sync + 'static {
    /// Now. Must not block.
    fn status(&self) -> StartStatus;
}

#[derive(Clone)]
struct Waiting(Arc<Inner>);

struct Inner {
    start: Arc<dyn Start>,
    model: String,
    options: ServerOptions,
}

/// What answers until there is an engine.
pub(crate) fn router(model: &str, options: &ServerOptions, start: Arc<dyn Start>) -> Router {
    let layers = tower::ServiceBuilder::new()
        .layer(from_fn(anthropic::reword))
        .option_layer(cors(options))
        .layer(from_fn(identify));
    Router::new()
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

/// A start is no reason to kill the process.
async fn health(State(Waiting(waiting)): State<Waiting>) -> Json<StartReport> {
    Json(report(&waiting.start.status()))
}

async fn ready(State(Waiting(waiting)): State<Waiting>) -> Response {
    let status = waiting.start.status();
    let retry = [(header::RETRY_AFTER, whole_seconds(status.retry_after()))];
    (
        StatusCode::SERVICE_UNAVAILABLE,
        retry,
        Json(NotReady::Starting(report(&status))),
    )
        .into_response()
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
    Ok(admin::metrics_page(start_page(
        &waiting.model,
        &waiting.start.status(),
    )))
}

async fn refuse(State(Waiting(waiting)): State<Waiting>) -> ApiError {
    ApiError::Starting(waiting.start.status())
}
