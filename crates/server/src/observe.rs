//! What every request passes first and last: its id, its key, its limits, its record.

use std::pin::Pin;
use std::task::{Context as TaskContext, Poll};
use std::time::Duration;

use axum::body::{Body, Bytes, HttpBody};
use axum::extract::{Request, State};
use axum::http::{HeaderName, HeaderValue, Method, Version, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use http_body::{Frame, SizeHint};
use tracing::Instrument;

use crate::context::{Context, header_timeout};
use crate::error::{ApiError, ErrorCode};
use crate::quota::Left;
use crate::state::AppState;

pub(crate) const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// Open to all, with keys too: probes, and pages that hold nothing but themselves.
const OPEN: &[&str] = &["/health", "/ready", "/", "/docs", "/openapi.json"];

pub(crate) async fn observe(State(state): State<AppState>, request: Request, next: Next) -> Response {
    let timeout = header_timeout(request.headers());
    let context = Context::new(&state, &request, timeout.as_ref().ok().copied().flatten());
    // On at every level: it names the request in each line of the log.
    let span = tracing::error_span!("request", id = context.id());
    let version = request.version();
    let answer = async {
        let admitted = timeout.and_then(|_| admit(&state, &context, &request));
        match admitted {
            Ok(left) => {
                let request = request.map(|body| {
                    let context = context.clone();
                    Body::new(Counted { body, context })
                });
                let mut response = next.run(request).await;
                left.iter().for_each(|left| left.write(response.headers_mut()));
                response
            }
            Err(error) => {
                take_body(request.into_body()).await;
                error.into_response()
            }
        }
    };
    let mut response = context.clone().scope(answer).instrument(span).await;
    if let Ok(id) = HeaderValue::from_str(context.id()) {
        response.headers_mut().insert(REQUEST_ID, id);
    }
    // Clients go elsewhere in place of finding their connection closed. HTTP/2 says so by itself.
    if state.is_draining() && version < Version::HTTP_2 {
        response
            .headers_mut()
            .insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    let code = response.extensions().get::<ErrorCode>().and_then(|code| code.0);
    context.answered(response.status(), code);
    response.map(|body| Body::new(Watched { body, context }))
}

/// Reads the small body of a request that is refused. A connection with an unread body is closed, and a client that tries
/// again on it as it was told would find it gone.
async fn take_body(body: Body) {
    let is_small = body.size_hint().upper().is_some_and(|bytes| bytes <= SMALL);
    if is_small {
        // Who sends no body gets his answer nevertheless.
        let _ = tokio::time::timeout(SOON, axum::body::to_bytes(body, SMALL as usize)).await;
    }
}

/// Bytes of a body that are read for nothing.
const SMALL: u64 = 64 << 10;
/// When it must have come: it was sent along with its head.
const SOON: Duration = Duration::from_secs(1);

/// Whether this request may be answered now.
fn admit(state: &AppState, context: &Context, request: &Request) -> Result<Vec<Left>, ApiError> {
    let path = request.uri().path();
    let options = state.options();
    let open = OPEN.contains(&path)
        || path.starts_with("/assets/")
        || path == "/metrics" && !options.metrics_require_key;
    if open {
        return Ok(Vec::new());
    }
    let Some(tenant) = options.keys.tenant(request.headers())? else {
        return Ok(Vec::new());
    };
    context.belongs_to(tenant);
    // Looking is free.
    if request.method() == Method::POST {
        return context.enter();
    }
    Ok(Vec::new())
}

/// Counts what is read of the request's body.
struct Counted {
    body: Body,
    context: Context,
}

impl HttpBody for Counted {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        task: &mut TaskContext<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let frame = Pin::new(&mut self.body).poll_frame(task);
        self.context.received(data_len(&frame));
        frame
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// Bytes of data in what a body gave.
fn data_len(frame: &Poll<Option<Result<Frame<Bytes>, axum::Error>>>) -> usize {
    match frame {
        Poll::Ready(Some(Ok(frame))) => frame.data_ref().map_or(0, Bytes::len),
        _ => 0,
    }
}

/// Keeps the request's context until the response is read or dropped.
struct Watched {
    body: Body,
    context: Context,
}

impl HttpBody for Watched {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        task: &mut TaskContext<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let frame = Pin::new(&mut self.body).poll_frame(task);
        self.context.sent(data_len(&frame));
        if matches!(frame, Poll::Ready(None)) {
            self.context.completed();
        }
        frame
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        // Bodies of known length are not asked once more when they are through.
        if self.body.is_end_stream() {
            self.context.completed();
        }
    }
}
