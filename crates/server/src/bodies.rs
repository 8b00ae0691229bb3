//! Bodies of requests and responses that count bytes and keep the request's context alive.

use std::pin::Pin;
use std::task::{Context as TaskContext, Poll, ready};

use axum::body::{Body, Bytes, HttpBody};
use http_body::{Frame, SizeHint};

use crate::activity::UnreadData;
use crate::context::Context;

type Polled = Poll<Option<Result<Frame<Bytes>, axum::Error>>>;

/// A request body that counts its bytes.
pub(crate) struct RequestBody {
    body: Body,
    context: Context,
}

impl RequestBody {
    pub(crate) fn new(body: Body, context: Context) -> Self {
        Self { body, context }
    }
}

impl HttpBody for RequestBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(mut self: Pin<&mut Self>, task: &mut TaskContext<'_>) -> Polled {
        let frame = ready!(Pin::new(&mut self.body).poll_frame(task));
        if let Some(Ok(frame)) = &frame {
            self.context.received(frame.data_ref().map_or(0, Bytes::len));
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// A response body that counts its bytes, tracks whether the client reads, and holds the request's context until it is sent
/// or dropped.
pub(crate) struct ResponseBody {
    body: Body,
    /// Data of `body` that was not yet handed to the connection.
    rest: Bytes,
    /// Set while data waits for the client.
    unread: Option<UnreadData>,
    context: Context,
}

/// Most bytes handed to the connection at once: what is in its buffers can no longer be tracked.
const PIECE: usize = 64 << 10;

impl ResponseBody {
    pub(crate) fn new(body: Body, context: Context) -> Self {
        let unread = (!body.is_end_stream()).then(|| context.unread()).flatten();
        Self {
            body,
            rest: Bytes::new(),
            unread,
            context,
        }
    }
}

impl HttpBody for ResponseBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(mut self: Pin<&mut Self>, task: &mut TaskContext<'_>) -> Polled {
        if let Some(unread) = self.unread.take() {
            unread.read();
        }
        if self.rest.is_empty() {
            match ready!(Pin::new(&mut self.body).poll_frame(task)) {
                None => {
                    self.context.completed();
                    return Poll::Ready(None);
                }
                Some(Err(error)) => return Poll::Ready(Some(Err(error))),
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(data) => self.rest = data,
                    Err(trailers) => return Poll::Ready(Some(Ok(trailers))),
                },
            }
        }
        let len = self.rest.len().min(PIECE);
        let piece = self.rest.split_to(len);
        self.context.sent(len);
        if !self.is_end_stream() {
            self.unread = self.context.unread();
        }
        Poll::Ready(Some(Ok(Frame::data(piece))))
    }

    fn is_end_stream(&self) -> bool {
        self.rest.is_empty() && self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        let (rest, body) = (self.rest.len() as u64, self.body.size_hint());
        let mut hint = SizeHint::new();
        hint.set_lower(body.lower() + rest);
        if let Some(upper) = body.upper() {
            hint.set_upper(upper + rest);
        }
        hint
    }
}

impl Drop for ResponseBody {
    fn drop(&mut self) {
        // Bodies of known length are not polled again after their end.
        if self.is_end_stream() {
            self.context.completed();
        }
    }
}
