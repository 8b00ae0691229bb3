//! Middleware around every request: id, API key, limits, record.

use std::time::Duration;

use axum::body::{Body, HttpBody};
use axum::extract::{Request, State};
use axum::http::{HeaderName, HeaderValue, Method, StatusCode, Version, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use tracing::Instrument;

use crate::bodies::{RequestBody, ResponseBody};
use crate::context::{Context, header_timeout};
use crate::error::{ApiError, ErrorCode};
use crate::options::ServerOptions;
use crate::origin::is_foreign;
use crate::quota::Left;
use crate::request_memory::SMALL;
use crate::state::AppState;

pub(crate) const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
/// Names the fields of the request that were ignored.
pub(crate) const IGNORED_FIELDS: HeaderName = HeaderName::from_static("x-ignored-fields");

/// Paths that never require a key: probes and static pages.
const OPEN: &[&str] = &["/health", "/ready", "/ping", "/", "/docs", "/openapi.json"];

pub(crate) async fn observe(State(state): State<AppState>, request: Request, next: Next) -> Response {
    let timeout = header_timeout(request.headers());
    let context = Context::new(&state, &request, timeout.as_ref().ok().copied().flatten());
    // At error level so that it is always on: it adds the request id to every log line.
    let span = tracing::error_span!("request", id = context.id());
    let version = request.version();
    let answer = async {
        let (left, admitted) = match timeout {
            Ok(_) => admit(&state, &context, &request),
            Err(error) => (Vec::new(), Err(error)),
        };
        let mut response = match admitted {
            Ok(()) => {
                let mut request = request.map(|body| Body::new(RequestBody::new(body, context.clone())));
                request.extensions_mut().insert(context.clone());
                next.run(request).await
            }
            Err(error) => {
                take_body(request.into_body()).await;
                error.into_response()
            }
        };
        left.iter().for_each(|left| left.write(response.headers_mut()));
        response
    };
    let mut response = answer.instrument(span).await;
    if let Ok(id) = HeaderValue::from_str(context.id()) {
        response.headers_mut().insert(REQUEST_ID, id);
    }
    if let Some(fields) = context.ignored() {
        response.headers_mut().insert(IGNORED_FIELDS, fields);
    }
    // Tells clients to reconnect elsewhere, or that the connection ends with a body of which the rest is not read. HTTP/2 needs
    // neither.
    let ends = state.is_draining() || response.status() == StatusCode::PAYLOAD_TOO_LARGE;
    if ends && version < Version::HTTP_2 {
        response
            .headers_mut()
            .insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    let code = response.extensions().get::<ErrorCode>().and_then(|code| code.0);
    context.answered(response.status(), code);
    response.map(|body| Body::new(ResponseBody::new(body, context)))
}

/// Reads the small body of a refused request. A connection with an unread body would be closed, and the client's retry on it
/// would fail.
async fn take_body(body: Body) {
    let is_small = body
        .size_hint()
        .upper()
        .is_some_and(|bytes| bytes <= SMALL as u64);
    if is_small {
        // The client gets its response even if the body never arrives.
        let _ = tokio::time::timeout(SOON, axum::body::to_bytes(body, SMALL)).await;
    }
}

/// How long to wait for such a body; it was sent along with its head.
const SOON: Duration = Duration::from_secs(1);

/// Whether the request is admitted, and what remains of its key's limits.
fn admit(state: &AppState, context: &Context, request: &Request) -> (Vec<Left>, Result<(), ApiError>) {
    match identify(state, context, request) {
        // Only POST requests generate tokens.
        Ok(true) => context.enter(request.method() == Method::POST),
        Ok(false) => (Vec::new(), Ok(())),
        Err(error) => (Vec::new(), Err(error)),
    }
}

/// Finds the tenant. Returns whether limits apply.
fn identify(state: &AppState, context: &Context, request: &Request) -> Result<bool, ApiError> {
    let path = request.uri().path();
    let options = state.options();
    // With keys, a foreign page would need one.
    if !options.keys.required() {
        check_origin(options, request)?;
    }
    let open = OPEN.contains(&path)
        || path.starts_with("/assets/")
        || path == "/metrics" && !options.metrics_require_key;
    if open {
        return Ok(false);
    }
    let Some(tenant) = options.keys.tenant(request.headers())? else {
        return Ok(false);
    };
    context.belongs_to(tenant);
    Ok(true)
}

/// Refuses requests with side effects from web pages of other origins, unless those are allowed.
fn check_origin(options: &ServerOptions, request: &Request) -> Result<(), ApiError> {
    let reads = matches!(*request.method(), Method::GET | Method::HEAD | Method::OPTIONS);
    let origin = request.headers().get(header::ORIGIN);
    let mut allowed = options.allowed_origins.iter();
    if reads
        || !is_foreign(request.uri(), request.headers())
        || allowed.any(|allowed| allowed == "*" || Some(allowed) == origin)
    {
        return Ok(());
    }
    let text = origin.and_then(|origin| origin.to_str().ok()).unwrap_or_default();
    Err(ApiError::ForeignOrigin(text.escape_default().to_string()))
}
