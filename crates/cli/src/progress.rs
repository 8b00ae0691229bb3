//! Progress for people, on stderr; nothing where stderr is not a terminal.

use std::time::Instant;

use indicatif::{ProgressBar, ProgressStyle};
use plimsoll_profiler::{BuildProgress, Observer, Phase, PhaseRecord};
use plimsoll_server::StartPhase;

use crate::start::StartTimes;

/// A bar over bytes.
pub(crate) fn bytes_bar(what: &str, total: u64) -> ProgressBar {
    let style = "{msg} [{bar:30}] {bytes}/{total_bytes} {bytes_per_sec} {eta}";
    bar(what, total, style)
}

/// A bar over things.
pub(crate) fn count_bar(what: &str, total: u64) -> ProgressBar {
    bar(what, total, "{msg} [{bar:30}] {pos}/{len} {per_sec} {eta}")
}

/// A bar over seconds; what happens stands behind it.
pub(crate) fn seconds_bar(total: u64) -> ProgressBar {
    bar("", total, "[{bar:30}] {pos}/{len} s {msg}")
}

fn bar(what: &str, total: u64, style: &str) -> ProgressBar {
    let style = ProgressStyle::with_template(style)
        .expect("the template is constant")
        .progress_chars("=> ");
    ProgressBar::new(total)
        .with_style(style)
        .with_message(what.to_owned())
}

/// The auto-profile: a log line per phase, a bar over its worst steps.
pub(crate) struct ProfileProgress {
    bar: ProgressBar,
    times: StartTimes,
    /// When the last phase ended.
    since: Instant,
}

impl ProfileProgress {
    /// Phases are stages of the start that `times` counts.
    pub(crate) fn new(times: StartTimes) -> Self {
        Self {
            bar: count_bar("auto-profile", 0),
            times,
            since: Instant::now(),
        }
    }

    pub(crate) fn finish(&self) {
        self.bar.finish_and_clear();
    }
}

/// The log line of a phase.
pub(crate) fn log_phase(record: &PhaseRecord) {
    match record.warning {
        true => tracing::warn!("{record}"),
        false => tracing::info!("{record}"),
    }
}

/// What follows a phase of the profile.
fn behind(record: &PhaseRecord) -> Option<StartPhase> {
    let is = |outcome: &str| {
        record
            .fields
            .iter()
            .any(|(key, value)| *key == "outcome" && value == outcome)
    };
    match record.phase {
        Phase::Compute => Some(StartPhase::Rebuild),
        Phase::Rebuild if is("built") => Some(StartPhase::Validate),
        Phase::Validate if is("proved") => Some(StartPhase::Engine),
        // A size that did not do is followed by a smaller one.
        Phase::Rebuild | Phase::Validate if is("out_of_memory") => Some(StartPhase::Rebuild),
        // A plan that does not do is followed by a measurement; a size that somebody chose needs none.
        Phase::Skip if is("discarded") => Some(StartPhase::Probe),
        Phase::Skip => Some(StartPhase::Rebuild),
        Phase::Baseline | Phase::Probe | Phase::Rebuild | Phase::Validate | Phase::Advise => None,
    }
}

impl Observer for ProfileProgress {
    fn phase(&mut self, record: &PhaseRecord) {
        let now = Instant::now();
        self.times.add(record.phase.name(), now - self.since);
        self.since = now;
        if let Some(next) = behind(record) {
            self.times.progress().enter(next);
        }
        self.bar.suspend(|| log_phase(record));
    }

    fn building(&mut self, progress: BuildProgress) {
        match progress {
            BuildProgress::Memory => {}
            BuildProgress::Graph { done, of } => self.times.progress().graphs(done, of),
        }
    }

    fn progress(&mut self, progress: plimsoll_profiler::ScenarioProgress) {
        self.bar
            .set_message(format!("auto-profile {} {}", progress.phase, progress.scenario));
        self.bar.set_length(progress.of as u64);
        self.bar.set_position(progress.done as u64);
        let start = self.times.progress();
        match progress.phase {
            Phase::Validate => start.enter(StartPhase::Validate),
            _ => start.enter(StartPhase::Probe),
        }
        start.steps(progress.done, progress.of, &progress.scenario.to_string());
    }
}
