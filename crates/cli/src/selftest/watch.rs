//! What the server says about itself while it is under load.

use std::collections::BTreeMap;
use std::time::Duration;

use parking_lot::Mutex;
use plimsoll_server::metric_names as names;
use tokio::time::Instant;

use super::page::Page;
use super::server::Server;

/// Between two looks at `/metrics`: short against the time for which a full load stays full.
const EVERY: Duration = Duration::from_millis(100);
/// `/ready` is asked once in so many looks.
const READY_EVERY: u32 = 10;

/// What `/metrics` said at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Reading {
    pub(super) running: u64,
    pub(super) waiting: u64,
    pub(super) in_flight: u64,
    pub(super) kv_used: u64,
    pub(super) kv_total: u64,
    pub(super) preemptions: u64,
    pub(super) prefix_hits: u64,
    pub(super) generated_tokens: u64,
    pub(super) computed_tokens: u64,
    pub(super) cancelled: u64,
    pub(super) failed_requests: u64,
    pub(super) steps: u64,
    pub(super) failed_steps: u64,
    pub(super) memory_high: u64,
    pub(super) allocations: u64,
    pub(super) above_proof: u64,
    pub(super) rebuilds: u64,
}

impl Reading {
    /// The error names the metric that is missing.
    pub(super) fn of(page: &Page) -> Result<Self, String> {
        // Counts and bytes: exact in a double.
        let get = |name| page.get(name).map(|value| value as u64);
        let blocks = |state| page.labelled(names::KV_BLOCKS, "state", state);
        let blocks = |state| blocks(state).map(|value| value as u64);
        Ok(Self {
            running: get(names::RUNNING)?,
            waiting: get(names::WAITING)?,
            in_flight: get(names::IN_FLIGHT)?,
            kv_used: blocks("used")?,
            kv_total: blocks("total")?,
            preemptions: get(names::PREEMPTIONS)?,
            prefix_hits: get(names::PREFIX_HITS)?,
            generated_tokens: get(names::GENERATED_TOKENS)?,
            computed_tokens: get(names::COMPUTED_TOKENS)?,
            cancelled: get(names::CANCELLED)?,
            failed_requests: get(names::FAILED)?,
            steps: get(names::STEPS)?,
            failed_steps: get(names::FAILED_STEPS)?,
            memory_high: get(names::MEMORY_HIGH)?,
            allocations: get(names::ALLOCATIONS)?,
            above_proof: get(names::ABOVE_PROOF)?,
            rebuilds: get(names::REBUILDS)?,
        })
    }

    /// Nobody has anything: no request is in, no block is held.
    pub(super) fn is_idle(&self) -> bool {
        self.in_flight + self.running + self.waiting + self.kv_used == 0
    }

    /// What must not have happened since `before`, in words.
    pub(super) fn complaints(&self, before: &Self) -> Vec<String> {
        let mut complaints = Vec::new();
        if self.steps < before.steps {
            complaints.push("the server was restarted meanwhile".to_owned());
        }
        type Counter = (&'static str, fn(&Reading) -> u64);
        let counters: [Counter; 6] = [
            ("device allocations after ready", |r| r.allocations),
            ("steps above the proved memory", |r| r.above_proof),
            ("states built again", |r| r.rebuilds),
            ("failed steps", |r| r.failed_steps),
            ("requests whose step failed", |r| r.failed_requests),
            ("bytes of device memory at the high-water mark", |r| r.memory_high),
        ];
        let counters = counters
            .into_iter()
            .map(|(what, of)| (what, of(before), of(self)));
        let rose = counters.filter(|(_, before, after)| after > before);
        complaints.extend(rose.map(|(what, before, after)| format!("{what} rose from {before} to {after}")));
        complaints
    }

    /// What is left behind, in words.
    pub(super) fn leak(&self) -> Option<String> {
        (!self.is_idle()).then(|| {
            format!(
                "with no client left, {} KV blocks are in use and {} requests are in ({} run, {} wait)",
                self.kv_used, self.in_flight, self.running, self.waiting
            )
        })
    }
}

/// Highest values that were seen.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Peaks {
    pub(super) running: u64,
    pub(super) waiting: u64,
    /// Part of the KV blocks in use.
    pub(super) kv_usage: f64,
}

/// Steps after which the tokens of a time are compared with it: a step more or less at its ends hardly counts.
const STEPS: u64 = 8;
/// Shortest time for which that is done: a look takes a part of it.
const SHORTEST: Duration = Duration::from_millis(400);

/// How fast the server computes tokens.
#[derive(Debug, Default)]
pub(super) struct Pace {
    /// Where the present time begins.
    since: Option<(Instant, Reading)>,
    /// Tokens a second in the best of all times.
    pub(super) best: f64,
}

impl Pace {
    /// Takes a reading of this moment.
    pub(super) fn read(&mut self, now: Instant, reading: &Reading) {
        let (begin, before) = *self.since.get_or_insert((now, *reading));
        let seconds = (now - begin).as_secs_f64();
        if reading.steps < before.steps + STEPS || seconds < SHORTEST.as_secs_f64() {
            return;
        }
        let tokens = reading.computed_tokens.saturating_sub(before.computed_tokens);
        self.best = self.best.max(tokens as f64 / seconds);
        self.since = Some((now, *reading));
    }
}

/// Findings that are listed.
const SHOWN: usize = 20;

/// Things that went wrong, each with how often.
#[derive(Clone, Debug, Default)]
pub(super) struct Findings(BTreeMap<String, u64>);

impl Findings {
    pub(super) fn add(&mut self, what: String) {
        *self.0.entry(what).or_default() += 1;
    }

    pub(super) fn lines(&self) -> Vec<String> {
        let line = |(what, count): (&String, &u64)| match count {
            1 => what.clone(),
            count => format!("{what} ({count} times)"),
        };
        let more = self.0.len().saturating_sub(SHOWN);
        let more = (more > 0).then(|| format!("and {more} more kinds"));
        self.0.iter().take(SHOWN).map(line).chain(more).collect()
    }
}

/// What was seen so far, shared by all who look.
#[derive(Debug, Default)]
pub(super) struct Watch(Mutex<Seen>);

#[derive(Debug, Default)]
struct Seen {
    peaks: Peaks,
    last: Reading,
    pace: Pace,
    findings: Findings,
}

impl Watch {
    /// Looks at the server for as long as it is polled.
    pub(super) async fn run(&self, server: &Server) {
        let mut every = tokio::time::interval(EVERY);
        // A server that answers late is not to be asked twice as often afterwards.
        every.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        for look in 0_u32.. {
            every.tick().await;
            let mut problem = self.look(server).await.err();
            if problem.is_none() && look.is_multiple_of(READY_EVERY) {
                problem = server.ready().await.err();
            }
            if let Some(problem) = problem {
                self.found(problem);
            }
        }
    }

    /// One look at `/metrics`.
    pub(super) async fn look(&self, server: &Server) -> Result<Reading, String> {
        let reading = Reading::of(&server.page().await?)?;
        self.with(|seen| {
            seen.last = reading;
            seen.pace.read(Instant::now(), &reading);
            let peaks = &mut seen.peaks;
            peaks.running = peaks.running.max(reading.running);
            peaks.waiting = peaks.waiting.max(reading.waiting);
            let usage = reading.kv_used as f64 / reading.kv_total.max(1) as f64;
            peaks.kv_usage = peaks.kv_usage.max(usage);
        });
        Ok(reading)
    }

    /// Looks until nobody has anything, or the time is over; the last reading.
    pub(super) async fn until_idle(&self, server: &Server, patience: Duration) -> Result<Reading, String> {
        let end = Instant::now() + patience;
        loop {
            let reading = self.look(server).await?;
            if reading.is_idle() || Instant::now() >= end {
                return Ok(reading);
            }
            tokio::time::sleep(EVERY).await;
        }
    }

    pub(super) fn found(&self, what: String) {
        self.with(|seen| seen.findings.add(what));
    }

    pub(super) fn peaks(&self) -> Peaks {
        self.with(|seen| seen.peaks)
    }

    /// Tokens that the server computes in a second when it is fastest; 0 where that is not yet known.
    pub(super) fn pace(&self) -> f64 {
        self.with(|seen| seen.pace.best)
    }

    pub(super) fn last(&self) -> Reading {
        self.with(|seen| seen.last)
    }

    pub(super) fn findings(&self) -> Vec<String> {
        self.with(|seen| seen.findings.lines())
    }

    fn with<T>(&self, act: impl FnOnce(&mut Seen) -> T) -> T {
        act(&mut self.0.lock())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn complaints_name_what_rose() {
        let before = Reading {
            steps: 5,
            allocations: 1,
            memory_high: 100,
            ..Reading::default()
        };
        assert_eq!(before.complaints(&before), Vec::<String>::new());
        let after = Reading {
            allocations: 3,
            failed_steps: 1,
            steps: 9,
            ..before
        };
        assert_eq!(
            after.complaints(&before),
            [
                "device allocations after ready rose from 1 to 3",
                "failed steps rose from 0 to 1"
            ]
        );
        let restarted = Reading { steps: 1, ..before };
        assert_eq!(restarted.complaints(&before).len(), 1);
    }

    #[test]
    fn the_pace_is_that_of_the_best_of_times_with_enough_steps() {
        let begin = Instant::now();
        let mut pace = Pace::default();
        let mut read = |millis, steps, computed_tokens| {
            let reading = Reading {
                steps,
                computed_tokens,
                ..Reading::default()
            };
            pace.read(begin + Duration::from_millis(millis), &reading);
            pace.best
        };
        assert_eq!(read(0, 5, 100), 0.0);
        // A step of many tokens has just ended.
        assert_eq!(read(100, 6, 8100), 0.0);
        assert_eq!(read(300, 20, 8400), 0.0);
        assert_eq!(read(1000, 21, 10_100), 10_000.0);
        assert_eq!(read(11_000, 22, 10_101), 10_000.0, "too few steps");
        assert_eq!(read(12_000, 40, 21_101), 10_000.0);
        assert_eq!(read(12_500, 50, 31_101), 20_000.0);
    }

    #[test]
    fn what_is_left_behind_is_a_leak() {
        let mut reading = Reading::default();
        assert_eq!(reading.leak(), None);
        reading.kv_used = 2;
        assert!(reading.leak().unwrap().contains("2 KV blocks"));
    }

    #[test]
    fn the_same_finding_stands_once() {
        let mut findings = Findings::default();
        for what in ["b", "a", "b"] {
            findings.add(what.to_owned());
        }
        assert_eq!(findings.lines(), ["a", "b (2 times)"]);
    }
}
