use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Instant;

use futures::Stream;
use plimsoll_core::{Event, RequestId, StepError};
use tokio::sync::mpsc::UnboundedReceiver;

use crate::shared::{Command, Link, is_last};

/// The events of one request. It always ends: with a token or a scored prompt that has `finish`, with a vector, or with
/// `Failed`. Dropping it before cancels the request.
#[derive(Debug)]
pub struct RequestStream {
    id: RequestId,
    events: UnboundedReceiver<(Instant, Event)>,
    link: Link,
    /// When the event that was read last was sent.
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

    /// The request's name.
    pub fn id(&self) -> RequestId {
        self.id
    }

    /// When the engine sent the event that was read last, however late that was; before the first, when the request was made.
    pub fn sent(&self) -> Instant {
        self.sent
    }

    /// Events that the engine has sent and nobody has read.
    pub fn unread(&self) -> usize {
        self.events.len()
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
