use axum::body::HttpBody;
use axum::extract::{FromRequest, Request};
use axum::http::header;
use futures::StreamExt;

use crate::blocking::blocking;
use crate::context::Context;
use crate::error::ApiError;
use crate::request_memory::SMALL;
use crate::state::AppState;
use crate::wire::request::{RequestBody, parse};

/// A request body that was read and parsed; otherwise a 4xx that says what is wrong with it.
#[derive(Debug)]
pub(crate) struct Body<T>(pub(crate) T);

impl<T: RequestBody + Send + 'static> FromRequest<AppState> for Body<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, state: &AppState) -> Result<Self, ApiError> {
        check_media_type(&request)?;
        let options = state.options();
        let Some(context) = request.extensions().get::<Context>().cloned() else {
            return Err(ApiError::Internal("the request has no context".into()));
        };
        let body = tokio::time::timeout(options.body_timeout, read(request, state, &context))
            .await
            .map_err(|_| ApiError::BodyTimeout(options.body_timeout))??;
        let policy = options.unknown_fields;
        if body.len() < LARGE {
            let (parsed, unknown) = parse(&body, policy)?;
            context.ignores(unknown.into_names());
            return Ok(Self(parsed));
        }
        // One at a time: parsed JSON takes many times its size.
        let turn = state.large_body().await;
        let most = MAX_VALUES + 4 * state.engine().limits().max_model_len;
        let parsed = blocking(move || {
            let _turn = turn;
            check_values(&body, most)?;
            Ok(parse(&body, policy)?)
        });
        let (parsed, unknown) = parsed.await?;
        context.ignores(unknown.into_names());
        Ok(Self(parsed))
    }
}

/// Reads a whole body. Reserves memory for a large one: before reading where its length is known, else as it grows.
async fn read(request: Request, state: &AppState, context: &Context) -> Result<Vec<u8>, ApiError> {
    let most = state.options().max_body_bytes;
    let body = request.into_body();
    let mut placed = usize::try_from(body.size_hint().lower())
        .unwrap_or(most)
        .min(most);
    context.hold(state.request_memory().reserve(placed).await?);
    let mut whole = Vec::with_capacity(placed);
    let mut pieces = body.into_data_stream();
    while let Some(piece) = pieces.next().await {
        let piece =
            piece.map_err(|error| ApiError::bad_request(format!("the body could not be read: {error}")))?;
        if whole.len() + piece.len() > most {
            return Err(ApiError::BodyTooLarge(most));
        }
        whole.extend_from_slice(&piece);
        if whole.len() > placed.max(SMALL) {
            // The buffer may have grown by more than the body.
            let grown = whole.capacity().min(most).saturating_sub(placed);
            context.hold(state.request_memory().reserve(grown).await?);
            placed += grown;
        }
    }
    Ok(whole)
}

/// From this size on, in bytes, parsing would block the async runtime's thread for too long.
const LARGE: usize = 256 << 10;

/// Maximum number of JSON values in a body, in addition to a few whole prompts as token ids. Each takes hundreds of bytes in
/// memory, so a limit on the body's size alone would let one body take gigabytes.
const MAX_VALUES: usize = 512 << 10;

/// An error if `body` has more than `most` JSON values and keys.
fn check_values(body: &[u8], most: usize) -> Result<(), ApiError> {
    match count_values(body) {
        count if count <= most => Ok(()),
        count => Err(ApiError::bad_request(format!(
            "the body holds {count} JSON values, but this server takes at most {most}: split the request"
        ))),
    }
}

/// Number of values and keys of a JSON text, including arrays and objects; empty ones count twice. For text that is not JSON,
/// any number.
fn count_values(body: &[u8]) -> usize {
    let (mut count, mut rest) = (1, body);
    while let Some((&byte, after)) = rest.split_first() {
        rest = after;
        match byte {
            b',' | b':' | b'[' | b'{' => count += 1,
            b'"' => {
                let end = string_end(rest);
                rest = &rest[end..];
            }
            _ => {}
        }
    }
    count
}

/// Bytes up to and including the closing quote of a string, from after its opening quote.
fn string_end(text: &[u8]) -> usize {
    let mut at = 0;
    while let Some(&byte) = text.get(at) {
        match byte {
            b'"' => return at + 1,
            b'\\' => at += 2,
            _ => at += 1,
        }
    }
    text.len()
}

fn check_media_type(request: &Request) -> Result<(), ApiError> {
    if let Some(coding) = request.headers().get(header::CONTENT_ENCODING) {
        let coding = String::from_utf8_lossy(coding.as_bytes());
        if !coding.eq_ignore_ascii_case("identity") {
            return Err(ApiError::ContentEncoding(coding.into_owned()));
        }
    }
    let Some(value) = request.headers().get(header::CONTENT_TYPE) else {
        return Ok(());
    };
    let value = String::from_utf8_lossy(value.as_bytes());
    let essence = value.split(';').next().unwrap_or_default();
    let essence = essence.trim().to_ascii_lowercase();
    if essence == "application/json" || essence.ends_with("+json") {
        return Ok(());
    }
    Err(ApiError::MediaType {
        given: essence,
        wanted: "application/json",
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::*;

    fn values() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<f64>().prop_map(Value::from),
            "[a\"\\\\,:\\[\\]{}é]{0,6}".prop_map(Value::from),
        ];
        leaf.prop_recursive(4, 40, 5, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..5).prop_map(Value::from),
                prop::collection::vec(("[a\",:{]{0,4}", inner), 0..5)
                    .prop_map(|fields| Value::Object(fields.into_iter().collect())),
            ]
        })
    }

    /// Counts a parsed value.
    fn naive(value: &Value) -> usize {
        let inside = match value {
            Value::Array(items) => items.iter().map(naive).sum::<usize>().max(1),
            Value::Object(fields) => fields.values().map(|v| 1 + naive(v)).sum::<usize>().max(1),
            _ => 0,
        };
        1 + inside
    }

    proptest! {
        #[test]
        fn counts_match_the_parsed_values(value in values()) {
            prop_assert_eq!(count_values(value.to_string().as_bytes()), naive(&value));
        }
    }

    #[test]
    fn a_body_with_too_many_values_is_refused() {
        let body = json!({ "prompt": vec![0; 100] }).to_string();
        assert!(check_values(body.as_bytes(), 103).is_ok());
        let error = check_values(body.as_bytes(), 102).unwrap_err().to_string();
        assert!(
            error.contains("103 JSON values") && error.contains("at most 102"),
            "{error}"
        );
        // Invalid JSON is left to the parser.
        assert_eq!(count_values(b"\"abc"), 1);
        assert_eq!(count_values(b"\"\\"), 1);
    }
}
