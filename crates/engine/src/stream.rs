use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Instant;

use futures::Stream;
use plimsoll_core::{Event, RequestId, StepError};
use tokio::sync::mpsc::UnboundedReceiver;

use crate::shared::{Command, Link, is_last};

/// The events of one request. The last one is a token or a scored prompt with `finish`, an embedding, or `Failed`.
/// Dropping the stream earlier cancels the request.
#[derive(Debug)]
pub struct RequestStream {
    id: RequestId,
    events: UnboundedReceiver<(Instant, Event)>,
    link: Link,
    /// When the last event read was sent.
    sent: Instant,
    ended: bool,
}

impl RequestStream {
    pub(crate) fn new(id: RequestId, events: UnboundedReceiver<(Instant, Event)>, link: Link) -> Self {
        Self {
            id,
            events,
            link,
            sent: Instant::now(),
            ended: false,
        }
    }

    /// When the engine sent the last event read, however late it was read; before the first event, when the stream was made.
    pub fn sent(&self) -> Instant {
        self.sent
    }
}

impl Stream for RequestStream {
    type Item = Event;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Event>> {
        if self.ended {
            return Poll::Ready(None);
        }
        self.events.poll_recv(context).map(|event| {
            let stopped = || Event::Failed(StepError::Failed("the engine stopped".into()));
            let (sent, event) = event.unwrap_or_else(|| (Instant::now(), stopped()));
            self.sent = sent;
            self.ended = is_last(&event);
            Some(event)
        })
    }
}

impl Drop for RequestStream {
    fn drop(&mut self) {
        if !self.ended {
            self.link.send(Command::Cancel(self.id));
        }
    }
}
