//! What became of the requests, and what that reaches.

use std::collections::BTreeMap;

use tokio::time::Instant;

use super::job::Job;
use super::load::{Load, first_of_turn};
use super::pictures::Kind;
use super::stage::Stage;
use super::verdict::{Goal, PICTURES, Requests};
use super::watch::Peaks;

/// What became of the requests so far.
#[derive(Debug, Default)]
pub(super) struct Tally {
    pub(super) started: u64,
    pub(super) requests: Requests,
    /// Answered requests whose prompt and output together were as long as can be.
    longest: u64,
    /// Answered requests about one of the largest pictures, of the stage that is for pictures.
    largest_pictures: u64,
    /// Beginnings of turns.
    turns: Vec<(Stage, Instant)>,
}

impl Tally {
    /// `longest` is the most that a request may have.
    pub(super) fn answered(&mut self, job: &Job, longest: usize) {
        self.requests.done += 1;
        self.requests.pictures += job.pictures as u64;
        *self.requests.by_stage.entry(job.stage.name()).or_default() += 1;
        let is_largest = job.stage == Stage::Pictures && job.label == Kind::Largest.label();
        self.largest_pictures += u64::from(is_largest);
        let length = job.expected.prompt_tokens.unwrap_or(0) + job.expected.max_tokens;
        self.longest += u64::from(length == longest && !job.expected.may_stop);
    }

    /// The client went away, as planned.
    pub(super) fn left(&mut self, job: &Job) {
        self.requests.left += 1;
        *self.requests.by_stage.entry(job.stage.name()).or_default() += 1;
    }

    /// How all that were started ended; those that have not are cut off.
    pub(super) fn ended(&self) -> Requests {
        let mut requests = self.requests.clone();
        let ended = requests.done + requests.left + requests.wrong;
        requests.cut_off = self.started.saturating_sub(ended);
        requests
    }

    /// Notes that a stage has a turn from now on; its first request.
    pub(super) fn begin(&mut self, stage: Stage, now: Instant) -> u64 {
        let turns = self.turns.iter().filter(|(other, _)| *other == stage);
        let first = first_of_turn(turns.count() as u64);
        self.turns.push((stage, now));
        first
    }

    /// Seconds of all turns of each stage, the last until now.
    pub(super) fn stage_seconds(&self, now: Instant) -> BTreeMap<&'static str, f64> {
        let ends = self.turns.iter().skip(1).map(|&(_, begin)| begin);
        let mut seconds = BTreeMap::new();
        for ((stage, begin), end) in self.turns.iter().zip(ends.chain([now])) {
            *seconds.entry(stage.name()).or_default() += (end - *begin).as_secs_f64();
        }
        seconds
    }

    /// What a stage is there to reach, and what was reached; the mix has no goal.
    pub(super) fn goal(&self, stage: Stage, load: &Load, peaks: &Peaks) -> Option<Goal> {
        let limits = &load.limits;
        let by_stage = &self.requests.by_stage;
        let answered = by_stage.get(stage.name()).copied().unwrap_or(0) as f64;
        let (limit, wanted, reached) = match stage {
            Stage::Features => ("features", load.feature_count() as f64, answered),
            Stage::Longest => ("full length", 1.0, self.longest as f64),
            Stage::Mixed => ("mixed", 1.0, answered),
            Stage::Prefixes => ("shared prefixes", 1.0, answered),
            Stage::Disconnects => ("disconnects", 1.0, self.requests.left as f64),
            // Each client begins with one of the largest.
            Stage::Pictures => {
                let clients = stage.concurrency(limits);
                (PICTURES, clients as f64, self.largest_pictures as f64)
            }
            Stage::Full => ("KV cache in use", limits.filling().usage, peaks.kv_usage),
            Stage::Rows => ("rows at once", limits.rows() as f64, peaks.running as f64),
            Stage::Mix => return None,
        };
        Some(Goal {
            limit,
            wanted,
            reached,
        })
    }
}
