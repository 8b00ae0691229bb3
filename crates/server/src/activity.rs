//! Tracks whether a connection is idle, and whether its client reads, so that it can be closed after a timeout.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Shared by a connection and its requests.
#[derive(Debug)]
pub(crate) struct Activity(Mutex<State>);

#[derive(Debug)]
struct State {
    /// Requests in progress.
    requests: usize,
    idle_since: Instant,
    /// Responses with data that the client has not read.
    untaken: usize,
    /// When the client last read data of any response, or had none left to read.
    taken_at: Instant,
}

impl Activity {
    /// A new connection.
    pub(crate) fn new() -> Self {
        let now = Instant::now();
        Self(Mutex::new(State {
            requests: 0,
            idle_since: now,
            untaken: 0,
            taken_at: now,
        }))
    }

    /// When to close the connection if nothing changes: after `idle` without a request, or `slow` without the client reading
    /// any response. `None` while requests are in progress, or where the time would overflow.
    pub(crate) fn ends_at(&self, idle: Duration, slow: Duration) -> Option<Instant> {
        let state = self.lock();
        if state.untaken > 0 {
            state.taken_at.checked_add(slow)
        } else if state.requests == 0 {
            state.idle_since.checked_add(idle)
        } else {
            None
        }
    }

    /// Poisoning is ignored: every critical section is plain arithmetic.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A request in progress; dropping it ends it.
#[derive(Debug)]
pub(crate) struct Ongoing(Arc<Activity>);

impl Ongoing {
    pub(crate) fn new(activity: &Arc<Activity>) -> Self {
        activity.lock().requests += 1;
        Self(Arc::clone(activity))
    }

    /// Its response has data for the client.
    pub(crate) fn untaken(&self) -> Untaken {
        let mut state = self.0.lock();
        if state.untaken == 0 {
            state.taken_at = Instant::now();
        }
        state.untaken += 1;
        Untaken(Arc::clone(&self.0))
    }
}

impl Drop for Ongoing {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        state.requests -= 1;
        state.idle_since = Instant::now();
    }
}

/// Response data that the client has not read.
#[derive(Debug)]
pub(crate) struct Untaken(Arc<Activity>);

impl Untaken {
    /// The client read it.
    pub(crate) fn taken(self) {
        self.0.lock().taken_at = Instant::now();
    }
}

impl Drop for Untaken {
    fn drop(&mut self) {
        self.0.lock().untaken -= 1;
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
        let untaken = requests.each_ref().map(Ongoing::untaken);
        assert!(matches!(ends_in(), Some(3..=59)));
        let before = activity.ends_at(IDLE, SLOW);
        let [first, second] = untaken;
        // Dropped data counts as unread.
        drop(first);
        assert_eq!(activity.ends_at(IDLE, SLOW), before);
        let more = requests[0].untaken();
        assert_eq!(activity.ends_at(IDLE, SLOW), before);
        second.taken();
        assert!(activity.ends_at(IDLE, SLOW) > before);
        drop(more);
        assert_eq!(ends_in(), None);
        drop(requests);
        assert!(matches!(ends_in(), Some(60..)));
        assert_eq!(activity.ends_at(Duration::MAX, SLOW), None);
    }
}
