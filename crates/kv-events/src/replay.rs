//! Batches that a subscriber missed, for the asking.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use zeromq::{RouterSocket, SocketRecv, SocketSend, ZmqMessage};

/// Bytes that are kept, at most.
const MAX_BYTES: usize = 256 << 20;

/// A subscriber that does not read for so long gets no more.
const PATIENCE: Duration = Duration::from_secs(5);

/// The sequence number of the message behind the last: -1.
const END: [u8; 8] = u64::MAX.to_be_bytes();

/// The batches published last; clones share them.
#[derive(Clone, Debug)]
pub(crate) struct Replay(Arc<Mutex<Kept>>);

#[derive(Debug)]
struct Kept {
    /// Sequence number and message.
    batches: VecDeque<(u64, ZmqMessage)>,
    bytes: usize,
    max_batches: usize,
    max_bytes: usize,
}

impl Replay {
    pub(crate) fn new(max_batches: usize) -> Self {
        Self::of(max_batches, MAX_BYTES)
    }

    fn of(max_batches: usize, max_bytes: usize) -> Self {
        Self(Arc::new(Mutex::new(Kept {
            batches: VecDeque::new(),
            bytes: 0,
            max_batches,
            max_bytes,
        })))
    }

    /// Keeps what was published, and gives up what is oldest for it.
    pub(crate) fn keep(&self, sequence: u64, message: ZmqMessage) {
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        kept.bytes += size(&message);
        kept.batches.push_back((sequence, message));
        while kept.batches.len() > kept.max_batches || kept.bytes > kept.max_bytes {
            let Some((_, oldest)) = kept.batches.pop_front() else {
                break;
            };
            kept.bytes -= size(&oldest);
        }
    }

    /// What is kept from `start` on.
    fn since(&self, start: u64) -> Vec<ZmqMessage> {
        let kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let first = kept.batches.partition_point(|&(sequence, _)| sequence < start);
        kept.batches
            .range(first..)
            .map(|(_, message)| message.clone())
            .collect()
    }

    /// Answers whoever asks, one after the other.
    pub(crate) async fn serve(self, mut socket: RouterSocket) {
        loop {
            match socket.recv().await {
                Ok(request) => self.answer(&mut socket, request).await,
                Err(error) => {
                    tracing::error!(%error, "KV events are replayed no more");
                    return;
                }
            }
        }
    }

    async fn answer(&self, socket: &mut RouterSocket, request: ZmqMessage) {
        let frames = request.into_vec();
        let [client, empty, start] = &frames[..] else {
            return tracing::debug!(frames = frames.len(), "a request for KV events has three frames");
        };
        let Ok(start) = <[u8; 8]>::try_from(&start[..]) else {
            return tracing::debug!(bytes = start.len(), "a sequence number has eight bytes");
        };
        let mut messages = self.since(u64::from_be_bytes(start));
        let mut end = ZmqMessage::from(Vec::new());
        end.push_back(END.to_vec().into());
        end.push_back(Vec::new().into());
        messages.push(end);
        for mut message in messages {
            message.push_front(empty.clone());
            message.push_front(client.clone());
            match tokio::time::timeout(PATIENCE, socket.send(message)).await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => return tracing::debug!(%error, "a subscriber went away during a replay"),
                Err(_) => return tracing::warn!("a subscriber does not read the replay that it asked for"),
            }
        }
    }
}

fn size(message: &ZmqMessage) -> usize {
    message.iter().map(|frame| frame.len()).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(bytes: usize) -> ZmqMessage {
        ZmqMessage::from(vec![0; bytes])
    }

    #[test]
    fn the_oldest_go_first_by_number_and_by_size() {
        let replay = Replay::of(3, 100);
        for (sequence, bytes) in [(0, 10), (1, 10), (2, 10), (5, 20)] {
            replay.keep(sequence, message(bytes));
        }
        let sizes = |start| replay.since(start).iter().map(size).collect::<Vec<_>>();
        assert_eq!(sizes(0), [10, 10, 20]);
        assert_eq!(sizes(3), [20]);
        assert_eq!(sizes(6), [0; 0]);
        replay.keep(6, message(75));
        assert_eq!(sizes(0), [20, 75]);
        replay.keep(7, message(101));
        assert_eq!(sizes(0), [0; 0], "it is never more than was agreed on");
        let nothing = Replay::of(0, 100);
        nothing.keep(0, message(1));
        assert!(nothing.since(0).is_empty());
    }
}
