use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use plimsoll_core::{CacheEvent, CacheEventCounts, CacheListener};
use tokio::sync::Notify;

/// Tokens and names that may wait: 64 MiB. A batch alone may be larger, but never larger than the cache.
const MAX_WEIGHT: usize = 16 << 20;

/// Least time between two log lines about the same.
const QUIET: Duration = Duration::from_secs(10);

/// Batches on their way from the engine to the publisher; clones share it.
#[derive(Clone, Debug)]
pub struct Queue(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    waiting: Mutex<Waiting>,
    filled: Notify,
    max_batches: usize,
    published: AtomicU64,
}

#[derive(Debug, Default)]
struct Waiting {
    batches: VecDeque<Batch>,
    /// Total size of the batches.
    weight: usize,
    /// Sequence number of the next batch.
    next: u64,
    dropped: u64,
    /// When that was last logged.
    warned: Option<Instant>,
}

/// Events of one step.
#[derive(Debug)]
pub(crate) struct Batch {
    pub(crate) sequence: u64,
    /// Seconds since 1970.
    pub(crate) time: f64,
    pub(crate) events: Vec<CacheEvent>,
}

impl Queue {
    pub(crate) fn new(max_batches: usize) -> Self {
        Self(Arc::new(Inner {
            waiting: Mutex::default(),
            filled: Notify::new(),
            max_batches,
            published: AtomicU64::new(0),
        }))
    }

    /// Waits for the oldest batch.
    pub(crate) async fn next(&self) -> Batch {
        loop {
            let filled = self.0.filled.notified();
            if let Some(batch) = self.0.lock().pop() {
                return batch;
            }
            filled.await;
        }
    }

    /// Counts a published batch.
    pub(crate) fn count_published(&self) {
        self.0.published.fetch_add(1, Ordering::Relaxed);
    }
}

impl Inner {
    /// The state stays valid if another thread panics: no critical section leaves it incomplete.
    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Waiting {
    fn pop(&mut self) -> Option<Batch> {
        let batch = self.batches.pop_front()?;
        self.weight -= weight(&batch.events);
        Some(batch)
    }

    fn push(&mut self, events: Vec<CacheEvent>) {
        self.weight += weight(&events);
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        self.batches.push_back(Batch {
            sequence: self.next,
            time: now.map_or(0.0, |now| now.as_secs_f64()),
            events,
        });
        self.next += 1;
    }

    /// Drops the queued batches and one more; their numbers are not used again.
    fn drop_all(&mut self) {
        self.dropped += 1 + self.batches.len() as u64;
        self.next += 1;
        self.weight = 0;
        self.batches.clear();
    }
}

fn weight(events: &[CacheEvent]) -> usize {
    events.iter().map(CacheEvent::weight).sum()
}

impl CacheListener for Queue {
    fn changed(&self, mut changes: Vec<CacheEvent>, all: &dyn Fn() -> Vec<CacheEvent>) {
        {
            let mut waiting = self.0.lock();
            if waiting.next == 0 {
                // A subscriber may know blocks of an earlier process at this address.
                changes.insert(0, CacheEvent::Cleared);
            }
            let has_room = waiting.batches.len() < self.0.max_batches
                && waiting.weight.saturating_add(weight(&changes)) <= MAX_WEIGHT;
            if has_room || waiting.batches.is_empty() {
                waiting.push(changes);
                drop(waiting);
                return self.0.filled.notify_one();
            }
        }
        let mut events = vec![CacheEvent::Cleared];
        events.extend(all());
        let mut waiting = self.0.lock();
        waiting.drop_all();
        waiting.push(events);
        let dropped = waiting.dropped;
        let warns = waiting.warned.is_none_or(|warned| warned.elapsed() > QUIET);
        if warns {
            waiting.warned = Some(Instant::now());
        }
        drop(waiting);
        self.0.filled.notify_one();
        if warns {
            tracing::warn!(
                dropped,
                "KV events were dropped because publishing is too slow: a snapshot of the cache follows"
            );
        }
    }

    fn counts(&self) -> CacheEventCounts {
        CacheEventCounts {
            published: self.0.published.load(Ordering::Relaxed),
            dropped: self.0.lock().dropped,
        }
    }
}

#[cfg(test)]
mod tests {
    use plimsoll_core::{CacheContent, CacheKind};

    use super::*;

    fn removed(block: u64) -> Vec<CacheEvent> {
        let blocks = vec![block];
        vec![CacheEvent::Removed { group: 0, blocks }]
    }

    fn stored(block: u64, tokens: usize) -> Vec<CacheEvent> {
        vec![CacheEvent::Stored {
            group: 0,
            content: CacheContent::Kv(CacheKind::Full),
            blocks: vec![block],
            parent: None,
            tokens: vec![0; tokens],
            images: Vec::new(),
            salt: None,
        }]
    }

    fn drain(queue: &Queue) -> Vec<(u64, Vec<CacheEvent>)> {
        let mut waiting = queue.0.lock();
        std::iter::from_fn(|| waiting.pop())
            .map(|batch| (batch.sequence, batch.events))
            .collect()
    }

    #[test]
    fn a_life_begins_with_an_empty_cache() {
        let queue = Queue::new(10);
        queue.changed(removed(1), &|| unreachable!("there is room"));
        queue.changed(removed(2), &|| unreachable!("there is room"));
        let first = [vec![CacheEvent::Cleared], removed(1)].concat();
        assert_eq!(drain(&queue), [(0, first), (1, removed(2))]);
    }

    #[test]
    fn what_overflows_is_told_anew_behind_a_gap() {
        let queue = Queue::new(2);
        for block in 0..2 {
            queue.changed(removed(block), &Vec::new);
        }
        queue.changed(removed(2), &|| stored(7, 8));
        let anew = [vec![CacheEvent::Cleared], stored(7, 8)].concat();
        queue.changed(removed(3), &|| unreachable!("there is room again"));
        // 0 and 1 were queued, 2 did not fit.
        assert_eq!(drain(&queue), [(3, anew), (4, removed(3))]);
        assert_eq!(queue.counts().dropped, 3);
        queue.changed(removed(4), &|| unreachable!("there is room"));
        assert_eq!(drain(&queue), [(5, removed(4))]);
    }

    #[test]
    fn many_tokens_are_too_much_like_many_batches() {
        let queue = Queue::new(1000);
        queue.changed(stored(1, MAX_WEIGHT), &|| unreachable!("it is alone"));
        queue.changed(stored(2, 8), &|| stored(3, 8));
        let [(2, _)] = drain(&queue)[..] else {
            panic!("one batch is left, behind a gap");
        };
        assert_eq!(queue.0.lock().weight, 0);
    }

    #[tokio::test]
    async fn whoever_waits_is_woken() {
        let queue = Queue::new(10);
        let reader = tokio::spawn({
            let queue = queue.clone();
            async move { (queue.next().await.sequence, queue.next().await.sequence) }
        });
        for block in 0..2 {
            tokio::task::yield_now().await;
            queue.changed(removed(block), &Vec::new);
        }
        assert_eq!(reader.await.unwrap(), (0, 1));
    }
}
