//! What came out: a table for people, one line of JSON for machines, and how the process ends.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::time::Duration;

use serde::Serialize;

use super::limits::Limits;
use super::pictures::Pictures;
use super::watch::{Peaks, Reading};
use crate::bytes::Bytes;
use crate::error::Error;
use crate::picture::Size;
use crate::terminal;

/// The three ways to end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Judgement {
    Passed,
    Failed,
    Inconclusive,
}

/// A limit, and how near the load came to it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Goal {
    pub(super) limit: &'static str,
    pub(super) wanted: f64,
    pub(super) reached: f64,
}

impl Goal {
    pub(super) fn is_reached(&self) -> bool {
        self.reached >= self.wanted
    }

    /// A time of the whole test in which it should be reached, after one of so many seconds; `filling` the KV cache takes so many.
    fn needs(&self, seconds: f64, filling: f64) -> f64 {
        match self.limit {
            PICTURES => seconds * (2.0 * self.wanted / self.reached.max(1.0)).clamp(2.0, 8.0),
            // Filling the cache has half of the time; at this rate that is enough, twice over.
            _ => (4.0 * filling).max(2.0 * seconds),
        }
    }
}

/// The goal of the load of pictures.
pub(super) const PICTURES: &str = "largest pictures";

/// How the requests ended.
#[derive(Clone, Debug, Default, Serialize)]
pub(super) struct Requests {
    /// Answered as they should be.
    pub(super) done: u64,
    /// Clients that went away, as planned.
    pub(super) left: u64,
    /// Answered otherwise, or not at all.
    pub(super) wrong: u64,
    /// Times the server said 429, or 503 for lack of memory for large requests.
    pub(super) busy: u64,
    /// Under way when the time was over.
    pub(super) cut_off: u64,
    /// Pictures of those that were answered.
    pub(super) pictures: u64,
    /// Those that were answered, and where a client's leaving is the point those that were left.
    pub(super) by_stage: BTreeMap<&'static str, u64>,
}

/// Where the test went.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Subject {
    pub(super) url: String,
    pub(super) model: String,
    pub(super) seed: u64,
    pub(super) limits: Limits,
    /// Absent where the model takes no images.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) pictures: Option<Pictures>,
}

/// What was measured.
#[derive(Clone, Debug)]
pub(super) struct Measurements {
    pub(super) seconds: Duration,
    /// Of these, those of each stage.
    pub(super) stage_seconds: BTreeMap<&'static str, f64>,
    /// Tokens computed in a second when that was fastest.
    pub(super) pace: f64,
    pub(super) before: Reading,
    pub(super) after: Reading,
    pub(super) peaks: Peaks,
}

/// All of it.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Verdict {
    selftest: Judgement,
    #[serde(flatten)]
    subject: Subject,
    seconds: f64,
    stage_seconds: BTreeMap<&'static str, f64>,
    findings: Vec<String>,
    goals: Vec<Goal>,
    requests: Requests,
    requests_per_second: f64,
    generated_tokens_per_second: f64,
    computed_tokens_per_second: f64,
    preemptions: u64,
    prefix_hit_tokens: u64,
    cancelled: u64,
    most_running: u64,
    most_waiting: u64,
    device_allocs_after_ready: u64,
    memory_high_bytes: u64,
    kv_blocks_at_end: u64,
    /// A time in which every limit should be within reach.
    #[serde(skip_serializing_if = "Option::is_none")]
    suggested_duration: Option<u64>,
}

impl Verdict {
    pub(super) fn new(
        subject: Subject,
        measured: &Measurements,
        requests: Requests,
        goals: Vec<Goal>,
        findings: Vec<String>,
    ) -> Self {
        let (before, after) = (&measured.before, &measured.after);
        let seconds = measured.seconds.as_secs_f64();
        let per_second = |count: u64| count as f64 / seconds.max(1e-9);
        let grown = |pick: fn(&Reading) -> u64| pick(after).saturating_sub(pick(before));
        let computed = grown(|reading| reading.computed_tokens);
        let reached = goals.iter().all(Goal::is_reached);
        let selftest = match (findings.is_empty(), reached) {
            (false, _) => Judgement::Failed,
            (true, true) => Judgement::Passed,
            (true, false) => Judgement::Inconclusive,
        };
        let filling = subject.limits.kv_tokens as f64 / measured.pace.max(per_second(computed)).max(1.0);
        let missed = goals.iter().filter(|goal| !goal.is_reached());
        let longest = missed
            .map(|goal| goal.needs(seconds, filling))
            .fold(0.0, f64::max);
        let suggested_duration = (selftest == Judgement::Inconclusive).then_some(longest.ceil() as u64);
        Self {
            selftest,
            subject,
            seconds,
            stage_seconds: measured.stage_seconds.clone(),
            requests_per_second: per_second(requests.done),
            generated_tokens_per_second: per_second(grown(|reading| reading.generated_tokens)),
            computed_tokens_per_second: per_second(computed),
            preemptions: grown(|reading| reading.preemptions),
            prefix_hit_tokens: grown(|reading| reading.prefix_hits),
            cancelled: grown(|reading| reading.cancelled),
            most_running: measured.peaks.running,
            most_waiting: measured.peaks.waiting,
            device_allocs_after_ready: after.allocations,
            memory_high_bytes: after.memory_high,
            kv_blocks_at_end: after.kv_used,
            findings,
            goals,
            requests,
            suggested_duration,
        }
    }

    /// For people, in as many columns as there are; the last line is the verdict.
    pub(super) fn table(&self, columns: Option<usize>) -> String {
        /// Columns before a value: two spaces, a label, a space.
        const BEFORE: usize = 19;
        let mut text = String::new();
        let fitted = |line: String, before: usize| match columns {
            Some(columns) => terminal::wrapped(&line, columns.saturating_sub(before)),
            None => vec![line],
        };
        let mut line = |label: &str, value: String| {
            let labels = std::iter::once(label).chain(std::iter::repeat(""));
            for (label, part) in labels.zip(fitted(value, BEFORE)) {
                // Writing to a string cannot fail.
                let _ = writeln!(text, "  {label:<16} {part}");
            }
        };
        for goal in &self.goals {
            let state = if goal.is_reached() { "" } else { ", NOT REACHED" };
            let (reached, wanted) = (number(goal.reached), number(goal.wanted));
            line(goal.limit, format!("{reached} (at least {wanted}){state}"));
        }
        let sent = &self.requests;
        line(
            "requests",
            format!(
                "{} answered, {} wrong, {} left by their clients, {} cut off at the end; {} times told to wait (429, 503)",
                sent.done, sent.wrong, sent.left, sent.cut_off, sent.busy
            ),
        );
        line(
            "rates",
            format!(
                "{:.1} requests, {:.0} tokens generated, {:.0} tokens computed a second",
                self.requests_per_second, self.generated_tokens_per_second, self.computed_tokens_per_second
            ),
        );
        if let Some(pictures) = self.subject.pictures {
            let Size { width, height } = pictures.largest;
            line(
                "pictures",
                format!(
                    "{} answered, {:.1} a second, up to {} of one request; the largest of {width} x {height} pixels, \
                     {} tokens",
                    sent.pictures,
                    sent.pictures as f64 / self.seconds.max(1e-9),
                    pictures.most,
                    pictures.tokens
                ),
            );
        }
        line(
            "scheduler",
            format!(
                "at most {} running and {} waiting, {} preemptions, {} cancelled, {} prompt tokens from the prefix cache",
                self.most_running,
                self.most_waiting,
                self.preemptions,
                self.cancelled,
                self.prefix_hit_tokens
            ),
        );
        line(
            "memory",
            format!(
                "high water {}, {} device allocations after ready, {} KV blocks in use at the end",
                Bytes(self.memory_high_bytes),
                self.device_allocs_after_ready,
                self.kv_blocks_at_end
            ),
        );
        for finding in &self.findings {
            line("FOUND", finding.clone());
        }
        let verdict = match self.selftest {
            Judgement::Passed => format!("selftest passed in {:.0} s", self.seconds),
            Judgement::Failed => format!("selftest FAILED: {} findings", self.findings.len()),
            Judgement::Inconclusive => {
                let longer = self.suggested_duration.unwrap_or_default();
                format!("selftest inconclusive: give it more time, such as --duration {longer}s")
            }
        };
        text + &fitted(verdict, 0).join("\n")
    }

    /// For machines, in one line.
    pub(super) fn json(&self) -> String {
        serde_json::to_string(self).expect("a verdict is JSON")
    }

    /// How the process ends.
    pub(super) fn into_result(self) -> Result<(), Error> {
        match self.selftest {
            Judgement::Passed => Ok(()),
            Judgement::Failed => {
                let first = self.findings.into_iter().next();
                Err(Error::SelftestFailed(first.unwrap_or_default()))
            }
            Judgement::Inconclusive => {
                let missing = self.goals.iter().filter(|goal| !goal.is_reached());
                let missing: Vec<_> = missing.map(|goal| goal.limit).collect();
                let missing = missing.join(", ");
                Err(Error::Inconclusive(format!("not reached: {missing}")))
            }
        }
    }
}

/// Counts as counts, parts with two places.
fn number(value: f64) -> String {
    if value.fract() == 0.0 {
        format!("{value}")
    } else {
        format!("{value:.2}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn verdict(reached: f64, findings: &[&str]) -> Verdict {
        let subject = Subject {
            url: "http://127.0.0.1:1".into(),
            model: "m".into(),
            seed: 0,
            limits: Limits {
                max_model_len: 64,
                max_num_seqs: 4,
                max_num_batched_tokens: 64,
                kv_tokens: 1000,
                block_size: 16,
                groups: Vec::new(),
            },
            pictures: Some(Pictures {
                most: 3,
                largest: Size {
                    width: 64,
                    height: 48,
                },
                tokens: 12,
                text: 10,
                ratio: 200,
            }),
        };
        let measured = Measurements {
            seconds: Duration::from_secs(10),
            stage_seconds: BTreeMap::new(),
            pace: 0.0,
            before: Reading::default(),
            after: Reading {
                computed_tokens: 200,
                ..Reading::default()
            },
            peaks: Peaks::default(),
        };
        let goal = Goal {
            limit: "rows",
            wanted: 4.0,
            reached,
        };
        let findings = findings.iter().map(|&finding| finding.to_owned()).collect();
        Verdict::new(subject, &measured, Requests::default(), vec![goal], findings)
    }

    #[test]
    fn what_was_not_reached_is_no_pass() {
        assert!(verdict(4.0, &[]).into_result().is_ok());
        let short = verdict(3.0, &[]);
        let table = short.table(None);
        let row = "rows             3 (at least 4), NOT REACHED";
        // 50 s to compute 1000 tokens at 20 a second, four times over.
        let advice = "--duration 200s";
        assert!(table.contains(row) && table.ends_with(advice), "{table}");
        assert!(table.contains("of 64 x 48 pixels, 12 tokens"), "{table}");
        assert!(matches!(short.into_result(), Err(Error::Inconclusive(what)) if what.contains("rows")));
        let narrow = verdict(4.0, &[]).table(Some(40));
        assert!(narrow.lines().all(|line| line.len() <= 40), "{narrow}");
        assert!(narrow.ends_with("selftest passed in 10 s"), "{narrow}");
        // As long as all that were missing would have taken, and as much again.
        let pictures = Goal {
            limit: PICTURES,
            wanted: 10.0,
            reached: 4.0,
        };
        assert_eq!(pictures.needs(3.0, 1e6), 15.0);
        let failed = verdict(3.0, &["a leak"]);
        let json = failed.json();
        assert!(json.starts_with(r#"{"selftest":"failed","#), "{json}");
        assert!(matches!(failed.into_result(), Err(Error::SelftestFailed(what)) if what == "a leak"));
    }
}
