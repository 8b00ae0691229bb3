//! Tracks whether a connection is idle, and whether its client reads, so that it can be closed after a timeout.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// Shared by a connection and its requests.
#[derive(Debug)]
pub(crate) struct Activity(Mutex<State>);

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
    /// A new connection.
    pub(crate) fn new() -> Self {
        let now = Instant::now();
        Self(Mutex::new(State {
            requests: 0,
            idle_since: now,
            unread: 0,
            last_read: now,
        }))
    }

    /// When to close the connection if nothing changes: after `idle` without a request, or `slow` without the client reading
    /// any response. `None` while requests are in progress, or where the time would overflow.
    pub(crate) fn ends_at(&self, idle: Duration, slow: Duration) -> Option<Instant> {
        let state = self.0.lock();
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
        activity.0.lock().requests += 1;
        Self(Arc::clone(activity))
    }

    /// Its response has data for the client.
    pub(crate) fn unread(&self) -> UnreadData {
        let mut state = self.0.0.lock();
        if state.unread == 0 {
            state.last_read = Instant::now();
        }
        state.unread += 1;
        UnreadData(Arc::clone(&self.0))
    }
}

impl Drop for Ongoing {
    fn drop(&mut self) {
        let mut state = self.0.0.lock();
        state.requests -= 1;
        state.idle_since = Instant::now();
    }
}

/// Response data that the client has not read.
#[derive(Debug)]
pub(crate) struct UnreadData(Arc<Activity>);

impl UnreadData {
    /// The client read it.
    pub(crate) fn read(self) {
        self.0.0.lock().last_read = Instant::now();
    }
}

impl Drop for UnreadData {
    fn drop(&mut self) {
        self.0.0.lock().unread -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const IDLE: Duration = Duration::from_secs(60);
    const SLOW: Duration = Duration::from_secs(3);

    #[test]
    fn idle_and_unread_connections_expire() {
        let activity = Arc::new(Activity::new());
        let begin = Instant::now();
        let ends_in = || {
            let at = activity.ends_at(IDLE, SLOW)?;
            Some(at.saturating_duration_since(begin).as_secs())
        };
        assert!(matches!(ends_in(), Some(59..=60)));
        let requests = [Ongoing::new(&activity), Ongoing::new(&activity)];
        assert_eq!(ends_in(), None, "requests are in progress");
        let unread = requests.each_ref().map(Ongoing::unread);
        assert!(matches!(ends_in(), Some(3..=59)));
        let before = activity.ends_at(IDLE, SLOW);
        let [first, second] = unread;
        // Dropped data counts as unread.
        drop(first);
        assert_eq!(activity.ends_at(IDLE, SLOW), before);
        let more = requests[0].unread();
        assert_eq!(activity.ends_at(IDLE, SLOW), before);
        second.read();
        assert!(activity.ends_at(IDLE, SLOW) > before);
        drop(more);
        assert_eq!(ends_in(), None);
        drop(requests);
        assert!(matches!(ends_in(), Some(60..)));
        assert_eq!(activity.ends_at(Duration::MAX, SLOW), None);
    }
}
