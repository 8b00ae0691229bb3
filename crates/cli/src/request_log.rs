//! One line of the log per request at its end, for as many as the log shall hold.

use std::time::{Duration, Instant};

use parking_lot::Mutex;
use plimsoll_server::{RequestRecord, RequestSink};

/// Asked again and again by machines, and 503 for as long as a start or a drain takes.
const PROBES: [&str; 3] = ["/health", "/ready", "/metrics"];

/// Logs requests that generate something or fail; prompts and answers are never part of it.
#[derive(Debug)]
pub(crate) struct RequestLog {
    /// Lines in a second.
    rate: u32,
    window: Mutex<Option<Window>>,
}

/// What was logged lately.
#[derive(Debug)]
struct Window {
    begin: Instant,
    lines: u32,
    /// Requests without a line since the last that has one.
    skipped: u64,
}

impl RequestLog {
    /// At most `rate` lines in a second.
    pub(crate) fn new(rate: u32) -> Self {
        Self {
            rate,
            window: Mutex::new(None),
        }
    }

    /// Whether a request that ends `now` gets a line, and how many before it had none.
    fn turn(&self, now: Instant) -> Option<u64> {
        let mut window = self.window.lock();
        let window = window.get_or_insert(Window {
            begin: now,
            lines: 0,
            skipped: 0,
        });
        if now.saturating_duration_since(window.begin) >= Duration::from_secs(1) {
            window.begin = now;
            window.lines = 0;
        }
        if window.lines >= self.rate {
            window.skipped += 1;
            return None;
        }
        window.lines += 1;
        Some(std::mem::take(&mut window.skipped))
    }
}

impl RequestSink for RequestLog {
    fn ended(&self, record: &RequestRecord) {
        let failed = record.status.is_client_error() || record.status.is_server_error();
        // Probes, scrapes and pages are not what a server is for.
        if record.generation.is_none() && (!failed || PROBES.contains(&&*record.path)) {
            return;
        }
        let Some(skipped) = self.turn(Instant::now()) else {
            return;
        };
        let seconds = |time: Duration| (time.as_secs_f64() * 1e6).round() / 1e6;
        let generation = record.generation.as_ref();
        tracing::info!(
            target: "plimsoll::request",
            id = record.request_id,
            path = record.path,
            status = record.status.as_u16(),
            error = record.error,
            complete = record.complete,
            key = record.key,
            model = generation.map(|generation| &*generation.model),
            prompt_tokens = generation.map(|generation| generation.prompt_tokens),
            cached_tokens = generation.map(|generation| generation.cached_tokens),
            output_tokens = generation.map(|generation| generation.output_tokens),
            queue_seconds = generation.and_then(|generation| generation.queued).map(seconds),
            ttft_seconds = generation.and_then(|generation| generation.first_token).map(seconds),
            total_seconds = seconds(record.duration),
            finish_reason = generation.map(|generation| generation.finish_reasons.join(",")),
            skipped = (skipped > 0).then_some(skipped),
            "request"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_as_many_as_the_rate_and_say_what_is_missing() {
        let log = RequestLog::new(3);
        let begin = Instant::now();
        let at = |milliseconds| begin + Duration::from_millis(milliseconds);
        let turns: Vec<_> = (0..10).map(|i| log.turn(at(i * 10))).collect();
        assert_eq!(turns, [vec![Some(0); 3], vec![None; 7]].concat());
        assert_eq!(log.turn(at(999)), None);
        assert_eq!((log.turn(at(1000)), log.turn(at(1001))), (Some(8), Some(0)));
        assert_eq!((log.turn(at(1002)), log.turn(at(1003))), (Some(0), None));
        assert_eq!(log.turn(at(60_000)), Some(1));
        let silent = RequestLog::new(0);
        assert!((0..5000).all(|i| silent.turn(at(i)).is_none()));
    }
}
