//! Shared by the generation endpoints: ids of responses, and streams of server-sent events.

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

/// `system_fingerprint` of responses.
pub(crate) const FINGERPRINT: &str = concat!("plimsoll-", env!("CARGO_PKG_VERSION"));

/// Events buffered between generation and the connection; more wait in the engine's channel, bounded by `max_tokens`.
const BUFFERED_EVENTS: usize = 64;

/// Fields shared by all chunks of a response.
#[derive(Clone, Debug)]
pub(crate) struct Identity {
    pub(crate) id: String,
    pub(crate) created: u64,
    pub(crate) model: String,
}

impl Identity {
    /// An id with `prefix`, followed by the client's request id if there is one.
    pub(crate) fn new(prefix: &str, state: &AppState, context: &Context) -> Self {
        // As in vLLM.
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

/// A random id, for responses and messages.
pub(crate) fn fresh_id(prefix: &str) -> String {
    format!("{prefix}_{:032x}", rand::random::<u128>())
}

/// An event; an error, which is a bug, if it cannot be serialized.
pub(crate) type SseEvent = Result<Event, axum::Error>;

/// An unnamed event: chat and completions.
pub(crate) fn data(value: &impl Serialize) -> SseEvent {
    Event::default().json_data(value)
}

/// A named event: responses and messages.
pub(crate) fn named(name: &'static str, value: &impl Serialize) -> SseEvent {
    Event::default().event(name).json_data(value)
}

/// Named events that were not sent yet; `None` without streaming.
pub(crate) struct Log(Option<Vec<SseEvent>>);

impl Log {
    pub(crate) fn new(streamed: bool) -> Self {
        Self(streamed.then(Vec::new))
    }

    pub(crate) fn push(&mut self, name: &'static str, value: &impl Serialize) {
        if let Some(events) = &mut self.0 {
            events.push(named(name, value));
        }
    }

    pub(crate) fn take(&mut self) -> Vec<SseEvent> {
        self.0.as_mut().map(std::mem::take).unwrap_or_default()
    }
}

/// OpenAI's end marker.
pub(crate) fn done() -> SseEvent {
    Ok(Event::default().data("[DONE]"))
}

/// Turns what is generated into the events of one endpoint.
pub(crate) trait EventFormat: Send + 'static {
    /// What is generated.
    type Item: Send + 'static;

    /// Events before the first item.
    fn begin(&mut self) -> Vec<SseEvent> {
        Vec::new()
    }

    /// The events of one item.
    fn item(&mut self, item: Self::Item) -> Vec<SseEvent>;

    /// Events after the last item.
    fn end(&mut self) -> Vec<SseEvent> {
        vec![done()]
    }

    /// Events after an error, instead of the rest.
    fn fail(&mut self, error: ApiError) -> Vec<SseEvent> {
        vec![data(&error.body()), done()]
    }
}

/// Streams what is generated as server-sent events. Generation runs in its own task, so that a client that reads nothing is
/// detected and disconnected after a timeout, and one that is gone at once. Both cancel the request.
pub(crate) fn stream<W: EventFormat>(
    state: &AppState,
    context: &Context,
    items: impl Stream<Item = Result<W::Item, ApiError>> + Send + 'static,
    mut format: W,
) -> Response {
    let (sender, receiver) = mpsc::channel(BUFFERED_EVENTS);
    let client = Client {
        sender,
        patience: state.options().slow_client_timeout,
        context: context.clone(),
    };
    let work = async move {
        // The client may be gone.
        let _ = client.send_all(items, &mut format).await;
    };
    tokio::spawn(work.in_current_span());
    let events = ReceiverStream::new(receiver).map(Ok::<_, Infallible>);
    Sse::new(events).keep_alive(KeepAlive::default()).into_response()
}

struct Client {
    sender: mpsc::Sender<Event>,
    patience: Duration,
    context: Context,
}

impl Client {
    /// Sends all events; `None` if the client did not read them to the end.
    async fn send_all<W: EventFormat>(
        &self,
        items: impl Stream<Item = Result<W::Item, ApiError>>,
        format: &mut W,
    ) -> Option<()> {
        let mut items = std::pin::pin!(items);
        self.send(format.begin()).await?;
        loop {
            let item = tokio::select! {
                item = items.next() => item,
                () = self.sender.closed() => return None,
            };
            match item {
                Some(Ok(item)) => self.send(format.item(item)).await?,
                Some(Err(error)) => {
                    self.context.failed(&error);
                    return self.send(format.fail(error)).await;
                }
                None => return self.send(format.end()).await,
            }
        }
    }

    /// `None` if the client is gone or too slow.
    async fn send(&self, events: Vec<SseEvent>) -> Option<()> {
        for event in events {
            let event = match event {
                Ok(event) => event,
                Err(error) => {
                    tracing::error!(%error, "cannot serialize an event");
                    return None;
                }
            };
            match self.sender.send_timeout(event, self.patience).await {
                Ok(()) => {}
                Err(mpsc::error::SendTimeoutError::Closed(_)) => return None,
                Err(mpsc::error::SendTimeoutError::Timeout(_)) => {
                    tracing::warn!(patience = ?self.patience, "the client does not read; cancelling its request");
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

    /// Name and data of serialized events.
    pub(crate) fn events(written: Vec<SseEvent>) -> Vec<(String, serde_json::Value)> {
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
