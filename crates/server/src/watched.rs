//! Bodies of requests and responses that count bytes and keep the request's context alive.

use std::pin::Pin;
use std::task::{Context as TaskContext, Poll, ready};

use axum::body::{Body, Bytes, HttpBody};
use http_body::{Frame, SizeHint};

use crate::activity::Untaken;
use crate::context::Context;

/// A request body that counts its bytes.
pub(crate) struct Received {
    body: Body,
    context: Context,
}

impl Received {
    pub(crate) fn new(body: Body, context: Context) -> Self {
        Self { body, context }
    }
}

impl HttpBody for Received {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        task: &mut TaskContext<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
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
pub(crate) struct Watched {
    body: Body,
    /// Data of `body` that was not yet handed to the connection.
    rest: Bytes,
    /// Set while data waits for the client.
    untaken: Option<Untaken>,
    context: Context,
}

/// Most bytes handed to the connection at once: what is in its buffers can no longer be tracked.
const PIECE: usize = 64 << 10;

impl Watched {
    pub(crate) fn new(body: Body, context: Context) -> Self {
        let untaken = (!body.is_end_stream()).then(|| context.untaken()).flatten();
        Self {
            body,
            rest: Bytes::new(),
            untaken,
            context,
        }
    }
}

impl HttpBody for Watched {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        task: &mut TaskContext<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        if let Some(untaken) = self.untaken.take() {
            untaken.taken();
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
            self.untaken = self.context.untaken();
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

impl Drop for Watched {
    fn drop(&mut self) {
        // Bodies of known length are not polled again after their end.
        if self.is_end_stream() {
            self.context.completed();
        }
    }
}
