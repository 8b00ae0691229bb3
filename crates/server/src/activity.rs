//! What goes on on a connection, for those who end it where nothing does.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Shared by a connection and its requests.
#[derive(Debug)]
pub(crate) struct Activity(Mutex<State>);

#[derive(Debug)]
struct State {
    /// Requests that are not over.
    requests: usize,
    idle_since: Instant,
    /// Responses of which data is there and the client takes none.
    untaken: usize,
    /// When the client took data of any response, or there was none to take.
    taken_at: Instant,
}

impl Activity {
    /// Of a new connection.
    pub(crate) fn new() -> Self {
        let now = Instant::now();
        Self(Mutex::new(State {
            requests: 0,
            idle_since: now,
            untaken: 0,
            taken_at: now,
        }))
    }

    /// When the connection is to end if nothing changes: once there was no request for `idle`, or the client took nothing of
    /// any response for `slow`. `None` while requests are worked on, or where the time is too far away to be one.
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

    /// A panic elsewhere leaves it usable: every critical section is plain arithmetic.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A request that is not over.
#[derive(Debug)]
pub(crate) struct Ongoing(Arc<Activity>);

impl Ongoing {
    pub(crate) fn new(activity: &Arc<Activity>) -> Self {
        activity.lock().requests += 1;
        Self(Arc::clone(activity))
    }

    /// Data of its response is there.
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

/// Data of a response that waits for the client.
#[derive(Debug)]
pub(crate) struct Untaken(Arc<Activity>);

impl Untaken {
    /// The client takes it.
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
    fn a_connection_ends_idle_or_with_a_client_that_takes_nothing() {
        let activity = Arc::new(Activity::new());
        let begin = Instant::now();
        let ends_in = || {
            let at = activity.ends_at(IDLE, SLOW)?;
            Some(at.saturating_duration_since(begin).as_secs())
        };
        assert!(matches!(ends_in(), Some(59..=60)));
        let requests = [Ongoing::new(&activity), Ongoing::new(&activity)];
        assert_eq!(ends_in(), None, "requests are worked on");
        let untaken = requests.each_ref().map(Ongoing::untaken);
        assert!(matches!(ends_in(), Some(3..=59)));
        let before = activity.ends_at(IDLE, SLOW);
        let [first, second] = untaken;
        // One that is given up is not taken.
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
