use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::watch;

/// Bytes that are kept, at most.
const MAX_BYTES: usize = 64 << 20;

/// The last published batches, for slow subscribers and for replay.
#[derive(Debug)]
pub(crate) struct Log {
    kept: Mutex<Kept>,
    /// The next sequence number.
    end: watch::Sender<u64>,
}

#[derive(Debug)]
struct Kept {
    batches: VecDeque<Published>,
    bytes: usize,
    max_batches: usize,
    max_bytes: usize,
}

/// A message, as it goes over the wire.
#[derive(Clone, Debug)]
pub(crate) struct Published {
    pub(crate) sequence: u64,
    pub(crate) message: Arc<[u8]>,
}

impl Log {
    pub(crate) fn new(max_batches: usize) -> Self {
        Self::of(max_batches, MAX_BYTES)
    }

    fn of(max_batches: usize, max_bytes: usize) -> Self {
        Self {
            kept: Mutex::new(Kept {
                batches: VecDeque::new(),
                bytes: 0,
                max_batches,
                max_bytes,
            }),
            end: watch::Sender::new(0),
        }
    }

    /// Publishes `message`; drops the oldest ones to make room.
    pub(crate) fn push(&self, sequence: u64, message: Vec<u8>) {
        {
            let mut kept = self.lock();
            kept.bytes += message.len();
            kept.batches.push_back(Published {
                sequence,
                message: message.into(),
            });
            // The newest one stays, whatever its size: otherwise nobody would ever get it.
            while kept.batches.len() > 1
                && (kept.batches.len() > kept.max_batches || kept.bytes > kept.max_bytes)
            {
                if let Some(oldest) = kept.batches.pop_front() {
                    kept.bytes -= oldest.message.len();
                }
            }
        }
        self.end.send_replace(sequence + 1);
    }

    /// The first kept batch from number `from` on, at most `most` batches back.
    pub(crate) fn next(&self, from: u64, most: usize) -> Option<Published> {
        let kept = self.lock();
        let first = kept.batches.partition_point(|batch| batch.sequence < from);
        let first = first.max(kept.batches.len().saturating_sub(most));
        kept.batches.get(first).cloned()
    }

    /// Watches the next sequence number.
    pub(crate) fn end(&self) -> watch::Receiver<u64> {
        self.end.subscribe()
    }

    /// The state stays valid if another thread panics: no critical section leaves it incomplete.
    fn lock(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Numbers and sizes of what there is from `from` on.
    fn all(log: &Log, mut from: u64, most: usize) -> Vec<(u64, usize)> {
        let mut found = Vec::new();
        while let Some(batch) = log.next(from, most) {
            from = batch.sequence + 1;
            found.push((batch.sequence, batch.message.len()));
        }
        found
    }

    #[test]
    fn the_oldest_go_first_by_number_and_by_size() {
        let log = Log::of(3, 100);
        assert!(all(&log, 0, 9).is_empty());
        for (sequence, bytes) in [(0, 10), (1, 10), (2, 10), (5, 20)] {
            log.push(sequence, vec![0; bytes]);
        }
        assert_eq!(all(&log, 0, 9), [(1, 10), (2, 10), (5, 20)]);
        assert_eq!(all(&log, 3, 9), [(5, 20)]);
        assert!(all(&log, 6, 9).is_empty());
        assert_eq!(
            all(&log, 1, 2),
            [(2, 10), (5, 20)],
            "who is too far behind misses some"
        );
        assert_eq!(*log.end().borrow(), 6);
        log.push(6, vec![0; 75]);
        assert_eq!(all(&log, 0, 9), [(5, 20), (6, 75)]);
        log.push(7, vec![0; 101]);
        assert_eq!(
            all(&log, 0, 9),
            [(7, 101)],
            "a batch of its own size gets through"
        );
    }
}
