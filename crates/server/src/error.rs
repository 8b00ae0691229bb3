use std::time::Duration;

use axum::Json;
use axum::extract::rejection::QueryRejection;
use axum::http::{HeaderName, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use plimsoll_core::untrusted::with_plain_types;
use plimsoll_core::{ParamError, RequestError, StepError};
use plimsoll_engine::{SleepError, SubmitError, WakeError};
use plimsoll_text::TextError;
use serde_json::{Value, json};

use crate::start::StartStatus;
use crate::wire::error::{ErrorBody, ErrorObject, FieldError};

/// Errors of requests. `ApiError::class` is the one place that maps them to HTTP statuses.
#[derive(Clone, Debug, thiserror::Error)]
pub enum ApiError {
    /// A field, or the whole body, is wrong, unknown or not supported.
    #[error(transparent)]
    Field(#[from] FieldError),
    /// The request can never fit the context.
    #[error("{message}")]
    ContextLength {
        /// Includes all the numbers.
        message: String,
        /// The field that is too large.
        param: &'static str,
        /// Tokens of the prompt.
        prompt: usize,
        /// Maximum tokens of prompt and output together.
        limit: usize,
    },
    /// Something that is not in the response store, or no longer.
    #[error("{message}")]
    NotStored {
        /// What is missing and the possible reasons.
        message: String,
        /// The field that refers to it.
        param: Option<&'static str>,
    },
    /// A web page of an origin that is not allowed.
    #[error("web pages of {0} may not use this server; --allowed-origins {0} would allow it")]
    ForeignOrigin(String),
    /// A model this server does not serve.
    #[error("the model `{0}` does not exist; this server serves `{1}`")]
    ModelNotFound(String, String),
    /// A path that only models for embeddings have.
    #[error(
        "{path} needs a model of embeddings or a cross-encoder, and `{model}` is served for text generation: serve one of these, or this one with --runner pooling"
    )]
    NoEmbeddings {
        /// The path.
        path: String,
        /// The served model.
        model: String,
    },
    /// No such path.
    #[error("no such path: {0}")]
    PathNotFound(String),
    /// A path that a flag turns on.
    #[error("{path} is turned off: start the server with {flag}")]
    TurnedOff {
        /// The path.
        path: String,
        /// The flag.
        flag: &'static str,
    },
    /// The path exists, the method does not.
    #[error("{method} is not allowed here; {allowed}")]
    MethodNotAllowed {
        /// The request's.
        method: String,
        /// Which methods the path knows.
        allowed: String,
    },
    /// The body is larger than allowed.
    #[error("the request body is larger than {0} bytes")]
    BodyTooLarge(usize),
    /// The body took too long to arrive.
    #[error("the request body did not arrive within {} s", .0.as_secs())]
    BodyTimeout(Duration),
    /// The memory for large requests is in use.
    #[error("the memory for {of} has been in use for {:.1} s; try again", .waited.as_secs_f64())]
    NoRequestMemory {
        /// What the memory is for.
        of: &'static str,
        /// How long the request waited.
        waited: Duration,
    },
    /// The body is of another type.
    #[error("the Content-Type `{given}` is not supported; send {wanted}")]
    MediaType {
        /// The Content-Type, or none.
        given: String,
        /// What the endpoint reads.
        wanted: &'static str,
    },
    /// The body is compressed.
    #[error("the Content-Encoding `{0}` is not supported; send the body as it is")]
    ContentEncoding(String),
    /// The request has no API key.
    #[error("this server needs an API key: send it as `Authorization: Bearer KEY`")]
    NoKey,
    /// The API key is not valid.
    #[error("the API key is not valid for this server")]
    WrongKey,
    /// A web page of another origin calls an operator's endpoint.
    #[error("web pages of other origins cannot call the operator's endpoints of this server")]
    CrossOrigin,
    /// The server is not ready to answer.
    #[error("the server is starting ({}, {:.1} %): GET /ready reports the progress", .0.phase.name(), .0.percent())]
    Starting(StartStatus),
    /// The key has reached a limit per minute.
    #[error("this API key may use {limit} {} per minute; try again in {:.1} s", counted.name(), retry_after.as_secs_f64())]
    RateLimited {
        /// What the limit counts.
        counted: Counted,
        /// The limit per minute.
        limit: usize,
        /// When to try again.
        retry_after: Duration,
    },
    /// The key has reached its limit of concurrent requests.
    #[error("this API key may have {0} concurrent requests; wait until one ends")]
    TooManyAtOnce(usize),
    /// The request waited in the queue for too long.
    #[error("the request waited in the queue for {:.1} s, the maximum on this server", .0.as_secs_f64())]
    QueueTimeout(Duration),
    /// The request's deadline has passed.
    #[error("the request did not finish within its timeout ({:.1} s after its arrival)", .0.as_secs_f64())]
    DeadlineExceeded(Duration),
    /// The engine did not admit the request.
    #[error(transparent)]
    Refused(#[from] SubmitError),
    /// The server cannot go to sleep now.
    #[error(transparent)]
    Sleep(#[from] SleepError),
    /// The server cannot wake up now.
    #[error(transparent)]
    Wake(#[from] WakeError),
    /// The request's step failed.
    #[error("{0}")]
    Step(#[from] StepError),
    /// A defect of the server.
    #[error("internal error: {0}")]
    Internal(String),
}

/// What a rate limit counts, by OpenAI's names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub enum Counted {
    /// Requests.
    Requests,
    /// Tokens.
    Tokens,
}

impl Counted {
    pub(crate) fn name(self) -> &'static str {
        self.into()
    }
}

impl ApiError {
    /// A wrong value of `param`.
    pub(crate) fn invalid(param: impl Into<String>, message: impl Into<String>) -> Self {
        FieldError::invalid(param, message).into()
    }

    /// A field that this server does not support, or, with ` = VALUE` appended, not with this value.
    pub(crate) fn unsupported(field: impl Into<String>, hint: impl Into<Option<&'static str>>) -> Self {
        FieldError::unsupported(field, hint).into()
    }

    /// A request that is wrong as a whole.
    pub(crate) fn bad_request(message: impl Into<String>) -> Self {
        Self::Field(FieldError::Invalid {
            message: message.into(),
            param: None,
        })
    }

    /// Names the field in an error that names none.
    pub(crate) fn in_field(self, field: &str) -> Self {
        match self {
            Self::Field(FieldError::Invalid { message, param: None }) => Self::invalid(field, message),
            error => error,
        }
    }

    /// Says which of the prompts in `field` is wrong, in an error about one of `count`.
    pub(crate) fn of_prompt(mut self, field: &str, index: usize, count: usize) -> Self {
        match &mut self {
            _ if count == 1 => {}
            Self::ContextLength { message, .. } => *message = format!("{field}[{index}]: {message}"),
            Self::Field(error) if error.param() == Some(field) => {
                return Self::invalid(field, format!("{field}[{index}]: {error}"));
            }
            _ => {}
        }
        self
    }

    /// A request that can never be served; `prompt` is the field that holds the prompt, `length` the one that limits the answer.
    pub(crate) fn from_request(error: RequestError, prompt: &'static str, length: &'static str) -> Self {
        match error {
            RequestError::EmptyPrompt
            | RequestError::UnknownToken { .. }
            | RequestError::NoImages
            | RequestError::Images(_) => Self::invalid(prompt, error.to_string()),
            RequestError::TooLong {
                prompt: tokens,
                output,
                limit,
            } => Self::ContextLength {
                message: error.to_string(),
                // A shorter answer would fit.
                param: if tokens < limit && output > 1 {
                    length
                } else {
                    prompt
                },
                prompt: tokens,
                limit,
            },
            // By the name that the endpoint gives it.
            RequestError::Param(error) if error.param == MAX_TOKENS => {
                Self::invalid(length, error.message.replacen(MAX_TOKENS, length, 1))
            }
            RequestError::Param(error) => error.into(),
        }
    }

    /// Status, OpenAI's `type` and OpenAI's `code`.
    fn class(&self) -> (StatusCode, &'static str, Option<&'static str>) {
        use StatusCode as Status;
        let invalid = |status, code| (status, "invalid_request_error", Some(code));
        let limited = |kind, code| (Status::TOO_MANY_REQUESTS, kind, Some(code));
        let failed = |status, code| (status, "server_error", Some(code));
        let unavailable = |code| failed(Status::SERVICE_UNAVAILABLE, code);
        match self {
            Self::Field(FieldError::Invalid { .. }) => (Status::BAD_REQUEST, "invalid_request_error", None),
            Self::Field(FieldError::Unknown(_)) => invalid(Status::BAD_REQUEST, "unknown_parameter"),
            Self::Field(FieldError::Unsupported { .. }) => {
                invalid(Status::BAD_REQUEST, "unsupported_parameter")
            }
            Self::ContextLength { .. } => invalid(Status::BAD_REQUEST, "context_length_exceeded"),
            Self::ModelNotFound(..) => invalid(Status::NOT_FOUND, "model_not_found"),
            Self::NotStored { .. } => invalid(Status::NOT_FOUND, "not_found"),
            Self::PathNotFound(_) | Self::TurnedOff { .. } | Self::NoEmbeddings { .. } => {
                invalid(Status::NOT_FOUND, "unknown_url")
            }
            Self::MethodNotAllowed { .. } => invalid(Status::METHOD_NOT_ALLOWED, "method_not_supported"),
            Self::ForeignOrigin(_) => invalid(Status::FORBIDDEN, "origin_not_allowed"),
            Self::NoRequestMemory { .. } => unavailable("too_many_large_requests"),
            Self::BodyTooLarge(_) => invalid(Status::PAYLOAD_TOO_LARGE, "request_too_large"),
            Self::BodyTimeout(_) => invalid(Status::REQUEST_TIMEOUT, "request_timeout"),
            Self::MediaType { .. } | Self::ContentEncoding(_) => {
                invalid(Status::UNSUPPORTED_MEDIA_TYPE, "unsupported_media_type")
            }
            Self::NoKey | Self::WrongKey => invalid(Status::UNAUTHORIZED, "invalid_api_key"),
            Self::CrossOrigin => invalid(Status::FORBIDDEN, "cross_origin"),
            Self::Starting(_) => unavailable("starting"),
            Self::RateLimited { counted, .. } => limited(counted.name(), "rate_limit_exceeded"),
            Self::TooManyAtOnce(_) => limited(Counted::Requests.name(), "rate_limit_exceeded"),
            Self::QueueTimeout(_) => limited("rate_limit_error", "queue_timeout"),
            Self::DeadlineExceeded(_) => (
                Status::GATEWAY_TIMEOUT,
                "timeout_error",
                Some("deadline_exceeded"),
            ),
            Self::Refused(SubmitError::QueueFull { .. } | SubmitError::ShareFull { .. }) => {
                limited("rate_limit_error", "queue_full")
            }
            Self::Refused(SubmitError::ShuttingDown) | Self::Step(StepError::ShutDown) => {
                unavailable("shutting_down")
            }
            Self::Refused(SubmitError::Dead(_)) => unavailable("engine_dead"),
            Self::Refused(SubmitError::Rebuilding { .. }) | Self::Wake(WakeError::NoMemory { .. }) => {
                unavailable("rebuilding")
            }
            Self::Refused(SubmitError::Asleep) => unavailable("sleeping"),
            Self::Sleep(_) | Self::Wake(_) => invalid(Status::CONFLICT, "not_now"),
            Self::Step(StepError::Oom(_) | StepError::NoState { .. }) => unavailable("out_of_memory"),
            Self::Step(StepError::KvTooSmall { .. }) => unavailable("kv_cache_too_small"),
            // The grammar is the client's.
            Self::Step(StepError::Constraint(_)) => invalid(Status::BAD_REQUEST, "constraint_failed"),
            Self::Step(_) => failed(Status::INTERNAL_SERVER_ERROR, "step_failed"),
            Self::Refused(SubmitError::DuplicateId(_)) | Self::Internal(_) => {
                failed(Status::INTERNAL_SERVER_ERROR, "internal_error")
            }
        }
    }

    /// OpenAI's `code`.
    pub(crate) fn code(&self) -> Option<&'static str> {
        self.class().2
    }

    /// When to try again, if known.
    fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Refused(
                SubmitError::QueueFull { retry_after, .. }
                | SubmitError::ShareFull { retry_after, .. }
                | SubmitError::Rebuilding { retry_after },
            )
            | Self::Wake(WakeError::NoMemory { retry_after, .. }) => Some(*retry_after),
            Self::Refused(SubmitError::Asleep) => Some(RETRY_ASLEEP),
            // Another replica may answer at once.
            Self::Refused(SubmitError::ShuttingDown) | Self::Step(StepError::ShutDown) => Some(RETRY_SOON),
            Self::Starting(status) => Some(status.retry_after()),
            Self::RateLimited { retry_after, .. } => Some(*retry_after),
            Self::TooManyAtOnce(_) => Some(RETRY_SOON),
            // The queue was full for this long.
            Self::QueueTimeout(waited) | Self::NoRequestMemory { waited, .. } => Some(*waited),
            _ => None,
        }
    }

    /// Not worth a log line per request: the client chose the timeout, or the cause was logged once (a failed step, a drain, a
    /// start). The access log has each request.
    fn is_known(&self) -> bool {
        match self {
            Self::Starting(_) | Self::DeadlineExceeded(_) | Self::NoRequestMemory { .. } | Self::Step(_) => {
                true
            }
            Self::Refused(error) => !matches!(error, SubmitError::DuplicateId(_)),
            _ => false,
        }
    }

    /// Retrying is pointless although clients retry this status by default.
    fn is_final(&self) -> bool {
        matches!(
            self,
            Self::DeadlineExceeded(_)
                | Self::Sleep(_)
                | Self::Wake(WakeError::NotNow(_))
                | Self::Step(StepError::KvTooSmall { .. })
        )
    }

    fn param(&self) -> Option<&str> {
        match self {
            Self::Field(error) => error.param(),
            Self::ContextLength { param, .. } => Some(param),
            Self::ModelNotFound(..) => Some("model"),
            Self::NotStored { param, .. } => *param,
            _ => None,
        }
    }

    /// The body of the response, and of an event in the middle of a stream.
    pub fn body(&self) -> Value {
        let (_, kind, code) = self.class();
        let error = ErrorObject {
            message: self.to_string(),
            r#type: kind,
            param: self.param(),
            code,
        };
        json!(ErrorBody { error })
    }

    /// The status of the response.
    pub fn status(&self) -> StatusCode {
        self.class().0
    }
}

impl From<ParamError> for ApiError {
    fn from(error: ParamError) -> Self {
        Self::invalid(error.param, error.message)
    }
}

impl From<TextError> for ApiError {
    fn from(error: TextError) -> Self {
        if error.is_client_error() {
            Self::bad_request(error.to_string())
        } else {
            Self::Internal(error.to_string())
        }
    }
}

impl From<QueryRejection> for ApiError {
    fn from(rejection: QueryRejection) -> Self {
        let text = with_plain_types(&rejection.body_text());
        let text = text
            .strip_prefix("Failed to deserialize query string: ")
            .unwrap_or(&text);
        // What names no parameter has no path.
        match text.split_once(": ") {
            Some((name, wrong)) if !name.contains(' ') => {
                let wrong = wrong.replace("unknown field", "unknown parameter");
                Self::invalid(name, format!("query string: {name}: {wrong}"))
            }
            _ => Self::bad_request(format!("query string: {text}")),
        }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let (status, _, code) = self.class();
        if status.is_server_error() && !self.is_known() {
            tracing::warn!(%status, error = %self, "request failed");
        }
        let mut response = (status, Json(self.body())).into_response();
        response.extensions_mut().insert(ErrorCode(code));
        // For middleware that rewrites errors in another API's format.
        response.extensions_mut().insert(self.clone());
        let headers = response.headers_mut();
        if status == StatusCode::UNAUTHORIZED {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        if self.is_final() {
            headers.insert(SHOULD_RETRY, HeaderValue::from_static("false"));
        }
        if let Some(after) = self.retry_after() {
            headers.insert(header::RETRY_AFTER, whole_seconds(after));
        }
        response
    }
}

/// The error's code, as an extension of the response, for the request's record.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ErrorCode(pub(crate) Option<&'static str>);

/// The value of a Retry-After header.
pub(crate) fn whole_seconds(duration: Duration) -> HeaderValue {
    HeaderValue::from(duration.as_secs_f64().ceil() as u64)
}

/// What the engine calls the limit of an answer.
const MAX_TOKENS: &str = "max_tokens";
/// Tells OpenAI's and Anthropic's clients whether to retry.
pub(crate) const SHOULD_RETRY: HeaderName = HeaderName::from_static("x-should-retry");
/// When to retry a sleeping server: it is unknown when it will be woken.
const RETRY_ASLEEP: Duration = Duration::from_secs(30);
/// When to retry while the key's other requests run, or on another replica.
const RETRY_SOON: Duration = Duration::from_secs(1);
