//! What the endpoints that generate share in answering: identity of the response, and the stream of events.

use std::convert::Infallible;
use std::time::Duration;

use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures::{Stream, StreamExt};
use serde::Serialize;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tracing::Instrument;

use crate::context::Context;
use crate::error::ApiError;
use crate::state::AppState;
use crate::time::unix_seconds;

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
    /// An id that begins with `prefix`, and ends with the client's own if there is one.
    pub(crate) fn new(prefix: &str, state: &AppState, context: &Context) -> Self {
        // As vLLM does: a client that names its request finds the name again.
        let id = match context.given_id() {
            Some(id) => format!("{prefix}-{id}"),
            None => format!("{prefix}-{:032x}", rand::random::<u128>()),
        };
        Self {
            id,
            created: unix_seconds(),
            model: state.model().id.clone(),
        }
    }
}

/// A fresh id, as responses and messages have them.
pub(crate) fn fresh_id(prefix: &str) -> String {
    format!("{prefix}_{:032x}", rand::random::<u128>())
}

/// An event, unless it cannot be serialized, which is a defect.
pub(crate) type Written = Result<Event, axum::Error>;

/// An event without a name, as OpenAI's chat and completions have them.
pub(crate) fn data(value: &impl Serialize) -> Written {
    Event::default().json_data(value)
}

/// An event with a name, as responses and messages have them.
pub(crate) fn named(name: &'static str, value: &impl Serialize) -> Written {
    Event::default().event(name).json_data(value)
}

/// OpenAI's mark of the end.
pub(crate) fn done() -> Written {
    Ok(Event::default().data("[DONE]"))
}

/// Words what is generated as the events of one endpoint.
pub(crate) trait Wording: Send + 'static {
    /// What is generated.
    type Item: Send + 'static;

    /// Events before there is anything to tell.
    fn begin(&mut self) -> Vec<Written> {
        Vec::new()
    }

    /// The events of one item.
    fn word(&mut self, item: Self::Item) -> Vec<Written>;

    /// Events after the last item.
    fn end(&mut self) -> Vec<Written> {
        vec![done()]
    }

    /// Events in place of the rest, which an error took away.
    fn fail(&mut self, error: ApiError) -> Vec<Written> {
        vec![data(&error.body()), done()]
    }
}

/// Streams what is generated as server-sent events. A task of its own drives the generation, so that a client that reads
/// nothing is noticed: it is cut off after a while; one that is gone is noticed at once. Both cancel the request.
pub(crate) fn stream<W: Wording>(
    state: &AppState,
    items: impl Stream<Item = Result<W::Item, ApiError>> + Send + 'static,
    mut wording: W,
) -> Response {
    let (sender, receiver) = mpsc::channel(BUFFERED_EVENTS);
    let client = Client {
        sender,
        patience: state.options().slow_client_timeout,
    };
    let work = async move {
        // A client that is gone needs no more.
        let _ = client.tell(items, &mut wording).await;
    };
    tokio::spawn(work.in_current_span());
    let events = ReceiverStream::new(receiver).map(Ok::<_, Infallible>);
    Sse::new(events).keep_alive(KeepAlive::default()).into_response()
}

struct Client {
    sender: mpsc::Sender<Event>,
    patience: Duration,
}

impl Client {
    /// `None` where the client did not hear the end.
    async fn tell<W: Wording>(
        &self,
        items: impl Stream<Item = Result<W::Item, ApiError>>,
        wording: &mut W,
    ) -> Option<()> {
        let mut items = std::pin::pin!(items);
        self.send(wording.begin()).await?;
        loop {
            let item = tokio::select! {
                item = items.next() => item,
                () = self.sender.closed() => return None,
            };
            match item {
                Some(Ok(item)) => self.send(wording.word(item)).await?,
                Some(Err(error)) => return self.send(wording.fail(error)).await,
                None => return self.send(wording.end()).await,
            }
        }
    }

    /// `None` where there is no point in going on.
    async fn send(&self, events: Vec<Written>) -> Option<()> {
        for event in events {
            let event = match event {
                Ok(event) => event,
                Err(error) => {
                    tracing::error!(%error, "an event cannot be serialized");
                    return None;
                }
            };
            match self.sender.send_timeout(event, self.patience).await {
                Ok(()) => {}
                Err(mpsc::error::SendTimeoutError::Closed(_)) => return None,
                Err(mpsc::error::SendTimeoutError::Timeout(_)) => {
                    tracing::warn!(patience = ?self.patience, "a client reads nothing; its request is cancelled");
                    return None;
                }
            }
        }
        Some(())
    }
}

#[cfg(test)]
pub(crate) mod testing {
    use super::*;

    /// Name and data of events as they go over the wire.
    pub(crate) fn events(written: Vec<Written>) -> Vec<(String, serde_json::Value)> {
        let body = Sse::new(futures::stream::iter(written))
            .into_response()
            .into_body();
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let bytes = runtime.block_on(axum::body::to_bytes(body, usize::MAX)).unwrap();
        let text = String::from_utf8(bytes.to_vec()).unwrap();
        let events = text.split_terminator("\n\n").map(|event| {
            let (name, data) = event.split_once('\n').unwrap();
            let data = data.strip_prefix("data: ").unwrap();
            let name = name.strip_prefix("event: ").unwrap();
            (name.to_owned(), serde_json::from_str(data).unwrap())
        });
        events.collect()
    }
}
