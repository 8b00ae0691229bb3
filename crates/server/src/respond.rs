//! What chat and completions share in answering: identity of the response, and the stream of events.

use std::convert::Infallible;
use std::time::Duration;

use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures::StreamExt;
use serde::Serialize;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

use crate::error::ApiError;
use crate::generate::{Choice, Piece, merge};
use crate::state::{AppState, unix_seconds};
use crate::wire::common::Usage;

/// What OpenAI calls the configuration that answers.
pub(crate) const FINGERPRINT: &str = concat!("plimsoll-", env!("CARGO_PKG_VERSION"));

/// Events between the generation and a client's connection; more wait in the engine's channel, where a request can have no
/// more than its `max_tokens`.
const BUFFERED_EVENTS: usize = 64;

/// What all parts of one response have in common.
#[derive(Clone, Debug)]
pub(crate) struct Identity {
    pub(crate) id: String,
    pub(crate) created: u64,
    pub(crate) model: String,
}

impl Identity {
    /// A fresh id that begins with `prefix`.
    pub(crate) fn new(prefix: &str, state: &AppState) -> Self {
        let id = format!("{prefix}-{:032x}", rand::random::<u128>());
        Self {
            id,
            created: unix_seconds(),
            model: state.model().id.clone(),
        }
    }
}

/// Turns pieces into the chunks of one endpoint.
pub(crate) trait Chunks: Send + 'static {
    /// The chunks of one piece.
    fn chunks(&mut self, piece: Piece) -> Vec<impl Serialize + Send>;

    /// The last chunk, which has no choices.
    fn usage(&self, usage: Usage) -> impl Serialize + Send;
}

/// Streams the choices as server-sent events: chunks, the usage if asked for, `[DONE]`. An error in the middle becomes an
/// event with an `error` object. A task of its own drives the generation, so that a client that reads nothing is noticed:
/// it is cut off after a while; one that is gone is noticed at once. Both cancel the request.
pub(crate) fn stream(
    state: &AppState,
    choices: Vec<Choice>,
    mut chunks: impl Chunks,
    include_usage: bool,
) -> Response {
    let (sender, receiver) = mpsc::channel(BUFFERED_EVENTS);
    let client = Client {
        sender,
        patience: state.options().slow_client_timeout,
    };
    tokio::spawn(async move {
        let mut usage = Usage::default();
        let mut pieces = merge(choices);
        loop {
            let piece = tokio::select! {
                piece = pieces.next() => piece,
                () = client.sender.closed() => return,
            };
            match piece {
                Some(Ok(piece)) => {
                    usage = usage.plus(&piece.usage);
                    for chunk in chunks.chunks(piece) {
                        if client.send(Event::default().json_data(chunk)).await.is_none() {
                            return;
                        }
                    }
                }
                Some(Err(error)) => {
                    let _ = client
                        .send(Event::default().json_data(ApiError::from(error).body()))
                        .await;
                    break;
                }
                None if include_usage => {
                    let _ = client.send(Event::default().json_data(chunks.usage(usage))).await;
                    break;
                }
                None => break,
            }
        }
        let _ = client.send(Ok(Event::default().data("[DONE]"))).await;
    });
    let events = ReceiverStream::new(receiver).map(Ok::<_, Infallible>);
    Sse::new(events).keep_alive(KeepAlive::default()).into_response()
}

struct Client {
    sender: mpsc::Sender<Event>,
    patience: Duration,
}

impl Client {
    /// `None` where there is no point in going on.
    async fn send(&self, event: Result<Event, axum::Error>) -> Option<()> {
        let event = match event {
            Ok(event) => event,
            Err(error) => {
                tracing::error!(%error, "a chunk cannot be serialized");
                return None;
            }
        };
        match self.sender.send_timeout(event, self.patience).await {
            Ok(()) => Some(()),
            Err(mpsc::error::SendTimeoutError::Closed(_)) => None,
            Err(mpsc::error::SendTimeoutError::Timeout(_)) => {
                tracing::warn!(patience = ?self.patience, "a client reads nothing; its request is cancelled");
                None
            }
        }
    }
}
