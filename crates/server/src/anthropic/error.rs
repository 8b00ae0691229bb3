//! Errors in Anthropic's format.

use axum::Json;
use axum::extract::Request;
use axum::http::{HeaderName, StatusCode};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use crate::error::ApiError;
use crate::wire::anthropic::{ErrorBody, ErrorDetails, ErrorObject};
use crate::wire::error::FieldError;
use crate::wire::fields::THREAD;

/// Paths whose errors have Anthropic's format.
const PATHS: &str = "/v1/messages";
/// Anthropic's header with the request id.
pub(crate) const REQUEST_ID: HeaderName = HeaderName::from_static("request-id");
/// The usual header with the request id.
const X_REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// Middleware that rewrites errors of Anthropic's paths, including those raised by other middleware.
pub(crate) async fn reword(request: Request, next: Next) -> Response {
    let path = request.uri().path();
    let ours = path
        .strip_prefix(PATHS)
        .is_some_and(|rest| rest.is_empty() || rest.starts_with('/'));
    let mut response = next.run(request).await;
    if !ours {
        return response;
    }
    let id = response.headers().get(X_REQUEST_ID).cloned();
    if let Some(error) = response.extensions_mut().remove::<ApiError>() {
        let id = id.as_ref().and_then(|id| id.to_str().ok()).map(str::to_owned);
        let body = Json(body(&error, id)).into_response().into_body();
        *response.body_mut() = body;
        response.headers_mut().remove(axum::http::header::CONTENT_LENGTH);
    }
    if let Some(id) = id {
        response.headers_mut().insert(REQUEST_ID, id);
    }
    response
}

/// The body of a response, and of an event in the middle of a stream.
pub(super) fn body(error: &ApiError, request_id: Option<String>) -> ErrorBody {
    let r#type = match error.status() {
        StatusCode::UNAUTHORIZED => "authentication_error",
        StatusCode::FORBIDDEN => "permission_error",
        StatusCode::NOT_FOUND => "not_found_error",
        StatusCode::PAYLOAD_TOO_LARGE => "request_too_large",
        StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
        StatusCode::SERVICE_UNAVAILABLE => "overloaded_error",
        StatusCode::GATEWAY_TIMEOUT => "timeout_error",
        status if status.is_server_error() => "api_error",
        _ => "invalid_request_error",
    };
    let message = match error {
        // Agents match on this text to compact a conversation.
        ApiError::ContextLength { prompt, limit, .. } if prompt >= limit => {
            format!("prompt is too long: {prompt} tokens > {limit} maximum")
        }
        error => error.to_string(),
    };
    let details = matches!(error, ApiError::Field(FieldError::Unsupported { field, .. }) if field == THREAD);
    let details = details.then_some(ErrorDetails {
        error_code: "thread_unsupported_request",
        unsupported: [THREAD],
    });
    ErrorBody {
        r#type: "error",
        error: ErrorObject {
            r#type,
            message,
            details,
        },
        request_id,
    }
}
