//! Progress for people, on stderr: bars, and lines for the phases of a start.

use std::fmt::Display;
use std::time::Instant;

use indicatif::{HumanCount, ProgressBar, ProgressStyle};
use plimsoll_profiler::{BuildProgress, Observer, Phase, PhaseRecord, ScenarioProgress, StepRecord};
use plimsoll_server::StartPhase;

use crate::bytes::Bytes;
use crate::start::StartTimes;
use crate::terminal;

/// Narrower terminals get a bar without details.
const DETAILED: usize = 80;

/// Columns of `1023.99 MiB/1023.99 MiB 999.99 MiB/s 59m`.
const LONGEST_DETAILS: usize = 40;

/// Cells of a bar.
const CELLS: std::ops::RangeInclusive<usize> = 5..=30;

/// A bar over bytes.
pub(crate) fn bytes_bar(what: &str, total: u64) -> ProgressBar {
    bar(what, total, "{bytes}/{total_bytes} {bytes_per_sec} {eta}")
}

/// A bar over things.
pub(crate) fn count_bar(what: &str, total: u64) -> ProgressBar {
    bar(what, total, "{pos}/{len} {per_sec} {eta}")
}

/// A bar over steps; the present one stands behind it.
fn steps_bar(what: &str, total: u64) -> ProgressBar {
    bar(what, total, "{pos}/{len} {wide_msg}")
}

/// A bar over seconds; what happens stands behind it.
pub(crate) fn seconds_bar(what: &str, total: u64) -> ProgressBar {
    bar(what, total, "{pos}/{len} s {wide_msg}")
}

fn bar(what: &str, total: u64, details: &str) -> ProgressBar {
    let style = ProgressStyle::with_template(&template(terminal::width(), details))
        .expect("the template is constant")
        .progress_chars("=> ");
    let bar = ProgressBar::new(total)
        .with_style(style)
        .with_prefix(what.to_owned());
    terminal::shown(bar)
}

/// A bar on one line of `columns`, the last of which some terminals do not write to.
fn template(columns: usize, details: &str) -> String {
    let (details, room) = match columns < DETAILED {
        true => ("{percent:>3} %", "100 %".len()),
        false => (details, LONGEST_DETAILS),
    };
    let around = terminal::NAME + "[] ".len() + room + 1;
    let cells = columns.saturating_sub(around).clamp(*CELLS.start(), *CELLS.end());
    format!("{{prefix:{}}}[{{bar:{cells}}}] {details}", terminal::NAME)
}

/// The auto-profile: a line per phase, a bar over its worst steps and its CUDA graphs.
pub(crate) struct ProfileProgress {
    /// What is under way, and its bar.
    bar: Option<(&'static str, ProgressBar)>,
    times: StartTimes,
    /// When the last phase ended.
    since: Instant,
}

impl ProfileProgress {
    /// Phases are stages of the start that `times` counts.
    pub(crate) fn new(times: StartTimes) -> Self {
        Self {
            bar: None,
            times,
            since: Instant::now(),
        }
    }

    fn show(&mut self, what: &'static str, done: usize, of: usize, detail: impl Display) {
        if self.bar.as_ref().is_none_or(|(shown, _)| *shown != what) {
            self.hide();
            self.bar = Some((what, steps_bar(what, of as u64)));
        }
        if let Some((_, bar)) = &self.bar {
            bar.set_length(of as u64);
            bar.set_message(detail.to_string());
            bar.set_position(done as u64);
        }
    }

    fn hide(&mut self) {
        if let Some((_, bar)) = self.bar.take() {
            bar.finish_and_clear();
        }
    }
}

impl Drop for ProfileProgress {
    fn drop(&mut self) {
        self.hide();
    }
}

/// The log line of a phase.
pub(crate) fn log_phase(record: &PhaseRecord) {
    match record.warning {
        true => tracing::warn!("{record}"),
        false => tracing::info!("{record}"),
    }
}

/// A phase in short: its name for people, and what came of it. Some are of no interest, and warnings are in the log.
fn in_short(record: &PhaseRecord) -> Option<(&'static str, String)> {
    let field = |name| record.field(name);
    let count = |name| HumanCount(field(name).and_then(|value| value.parse().ok()).unwrap_or(0));
    let seconds = || {
        field("seconds")
            .and_then(|value| value.parse().ok())
            .unwrap_or(0.0_f64)
    };
    let tokens = || format!("{} tokens", count("tokens"));
    Some(match (record.phase, field("outcome")) {
        _ if record.warning => return None,
        (Phase::Probe, None) => {
            let steps = format!(
                "{} worst-case steps measured in {:.1} s",
                count("scenarios"),
                seconds()
            );
            ("probe", steps)
        }
        (Phase::Skip, None) if field("reason") == Some("cached") => {
            ("probe", "measured by an earlier start".to_owned())
        }
        (Phase::Skip, None) => (
            "probe",
            format!(
                "not needed: --{} sets the size",
                field("bound").unwrap_or_default()
            ),
        ),
        (Phase::Rebuild, Some("built")) => {
            let bytes = Bytes(count("kv").0);
            (
                "KV cache",
                format!("{} in {bytes}, allocated in {:.1} s", tokens(), seconds()),
            )
        }
        (Phase::Validate, Some("proved")) => {
            let steps = format!(
                "{} worst-case steps ran in {:.1} s",
                count("scenarios"),
                seconds()
            );
            ("proof", steps)
        }
        (Phase::Rebuild | Phase::Validate, Some("out_of_memory")) => {
            ("KV cache", format!("{} do not fit", tokens()))
        }
        _ => return None,
    })
}

/// What follows a phase of the profile.
fn behind(record: &PhaseRecord) -> Option<StartPhase> {
    match (record.phase, record.field("outcome")) {
        (Phase::Compute, _) => Some(StartPhase::Rebuild),
        (Phase::Rebuild, Some("built")) => Some(StartPhase::Validate),
        (Phase::Validate, Some("proved")) => Some(StartPhase::Engine),
        // A size that did not do is followed by a smaller one.
        (Phase::Rebuild | Phase::Validate, Some("out_of_memory")) => Some(StartPhase::Rebuild),
        // A plan that does not do is followed by a measurement; a size that somebody chose needs none.
        (Phase::Skip, Some("discarded")) => Some(StartPhase::Probe),
        (Phase::Skip, _) => Some(StartPhase::Rebuild),
        _ => None,
    }
}

impl Observer for ProfileProgress {
    fn phase(&mut self, record: &PhaseRecord) {
        self.ended(record.phase);
        if let Some(next) = behind(record) {
            self.times.progress().enter(next);
        }
        self.hide();
        log_phase(record);
        if let Some((name, text)) = in_short(record) {
            terminal::phase(name, text);
        }
    }

    fn ended(&mut self, phase: Phase) {
        let now = Instant::now();
        self.times.add(phase.name(), now - self.since);
        self.since = now;
    }

    fn building(&mut self, progress: BuildProgress) {
        match progress {
            BuildProgress::Memory => {}
            BuildProgress::Graph { done, of } => {
                self.show("graphs", done, of, "");
                self.times.progress().graphs(done, of);
            }
        }
    }

    fn progress(&mut self, progress: ScenarioProgress) {
        let ScenarioProgress {
            phase,
            scenario,
            done,
            of,
        } = progress;
        let name = match phase {
            Phase::Validate => "proof",
            phase => phase.name(),
        };
        self.show(name, done, of, scenario);
        let start = self.times.progress();
        match phase {
            Phase::Validate => start.enter(StartPhase::Validate),
            _ => start.enter(StartPhase::Probe),
        }
        start.steps(done, of, &scenario.to_string());
    }

    fn passed(&mut self, step: &StepRecord) {
        tracing::debug!("{step}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn short(phase: Phase, fields: &[(&'static str, &str)]) -> Option<(&'static str, String)> {
        in_short(&PhaseRecord {
            phase,
            fields: fields
                .iter()
                .map(|&(name, value)| (name, value.to_owned()))
                .collect(),
            warning: false,
        })
    }

    #[test]
    fn phases_in_short() {
        let probe = [("scenarios", "6"), ("seconds", "4.435")];
        assert_eq!(
            short(Phase::Probe, &probe).unwrap().1,
            "6 worst-case steps measured in 4.4 s"
        );
        let built = [
            ("outcome", "built"),
            ("tokens", "131072"),
            ("kv", "3019898880"),
            ("seconds", "4.65"),
        ];
        assert_eq!(
            short(Phase::Rebuild, &built),
            Some((
                "KV cache",
                "131,072 tokens in 2.81 GiB, allocated in 4.7 s".to_owned()
            ))
        );
        let pinned = [
            ("reason", "pinned"),
            ("bound", "max-total-token-num"),
            ("tokens", "64"),
        ];
        assert_eq!(
            short(Phase::Skip, &pinned).unwrap().1,
            "not needed: --max-total-token-num sets the size"
        );
        assert_eq!(
            short(Phase::Skip, &[("reason", "cached"), ("tokens", "64")])
                .unwrap()
                .0,
            "probe"
        );
        let failed = [("tokens", "64"), ("outcome", "out_of_memory")];
        assert_eq!(short(Phase::Rebuild, &failed).unwrap().1, "64 tokens do not fit");
        assert_eq!(short(Phase::Baseline, &[("total", "1")]), None);
    }

    #[test]
    fn bars_fit_their_terminal() {
        let longest = "1023.99 MiB/1023.99 MiB 999.99 MiB/s 59m";
        for columns in 30..200 {
            let template = template(columns, longest);
            let cells: usize = template
                .split("{bar:")
                .nth(1)
                .unwrap()
                .split('}')
                .next()
                .unwrap()
                .parse()
                .unwrap();
            let details = if template.ends_with(longest) {
                longest
            } else {
                "100 %"
            };
            let drawn = terminal::NAME + 2 + cells + 1 + details.len();
            assert!(drawn < columns && cells >= 5, "{columns}: {template}");
        }
    }
}
