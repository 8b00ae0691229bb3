//! Tracks whether a connection is idle, and whether its client reads, so that it can be closed after a timeout.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// Shared by a connection and its requests.
#[derive(Debug)]
pub(crate) struct Activity {
    clock: fn() -> Instant,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// Requests in progress.
    requests: usize,
    idle_since: Instant,
    /// Responses with data that the client has not read.
    unread: usize,
    /// When the client last read data of any response, or had none left to read.
    last_read: Instant,
}

impl Activity {
    /// A new connection, with a clock that its requests use too.
    pub(crate) fn new(clock: fn() -> Instant) -> Self {
        let now = clock();
        let state = State {
            requests: 0,
            idle_since: now,
            unread: 0,
            last_read: now,
        };
        Self {
            clock,
            state: Mutex::new(state),
        }
    }

    /// When to close the connection if nothing changes: after `idle` without a request, or `slow` without the client reading
    /// any response. `None` while requests are in progress, or where the time would overflow.
    pub(crate) fn ends_at(&self, idle: Duration, slow: Duration) -> Option<Instant> {
        let state = self.state.lock();
        if state.unread > 0 {
            state.last_read.checked_add(slow)
        } else if state.requests == 0 {
            state.idle_since.checked_add(idle)
        } else {
            None
        }
    }
}

/// A request in progress; dropping it ends it.
#[derive(Debug)]
pub(crate) struct Ongoing(Arc<Activity>);

impl Ongoing {
    pub(crate) fn new(activity: &Arc<Activity>) -> Self {
        activity.state.lock().requests += 1;
        Self(Arc::clone(activity))
    }

    /// Its response has data for the client.
    pub(crate) fn unread(&self) -> UnreadData {
        let mut state = self.0.state.lock();
        if state.unread == 0 {
            state.last_read = (self.0.clock)();
        }
        state.unread += 1;
        UnreadData(Arc::clone(&self.0))
    }
}

impl Drop for Ongoing {
    fn drop(&mut self) {
        let mut state = self.0.state.lock();
        state.requests -= 1;
        state.idle_since = (self.0.clock)();
    }
}

/// Response data that the client has not read.
#[derive(Debug)]
pub(crate) struct UnreadData(Arc<Activity>);

impl UnreadData {
    /// The client read it.
    pub(crate) fn read(self) {
        self.0.state.lock().last_read = (self.0.clock)();
    }
}

impl Drop for UnreadData {
    fn drop(&mut self) {
        self.0.state.lock().unread -= 1;
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    const IDLE: Duration = Duration::from_secs(60);
    const SLOW: Duration = Duration::from_secs(3);

    thread_local! {
        static NOW: Cell<Instant> = Cell::new(Instant::now());
    }

    #[test]
    fn idle_and_unread_connections_expire() {
        let begin = NOW.get();
        let pass = |seconds| NOW.set(NOW.get() + Duration::from_secs(seconds));
        let activity = Arc::new(Activity::new(|| NOW.get()));
        // In seconds from the beginning.
        let ends_at = || Some((activity.ends_at(IDLE, SLOW)? - begin).as_secs());
        pass(10);
        assert_eq!(ends_at(), Some(60));
        let requests = [Ongoing::new(&activity), Ongoing::new(&activity)];
        assert_eq!(ends_at(), None, "requests are in progress");
        let first = requests[0].unread();
        assert_eq!(ends_at(), Some(13));
        pass(1);
        let second = requests[1].unread();
        assert_eq!(ends_at(), Some(13), "the first is not read yet");
        // Dropped data counts as unread.
        drop(first);
        assert_eq!(ends_at(), Some(13));
        let more = requests[0].unread();
        assert_eq!(ends_at(), Some(13));
        second.read();
        assert_eq!(ends_at(), Some(14));
        drop(more);
        assert_eq!(ends_at(), None);
        pass(1);
        let [first, second] = requests;
        drop(first);
        assert_eq!(ends_at(), None, "one is in progress");
        pass(1);
        drop(second);
        assert_eq!(ends_at(), Some(73));
        assert_eq!(activity.ends_at(Duration::MAX, SLOW), None);
    }
}
