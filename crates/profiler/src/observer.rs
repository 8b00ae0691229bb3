use std::fmt;

use serde::Serialize;
use strum::{Display, IntoStaticStr};

use crate::{BuildProgress, ScenarioKind};

/// A phase of the profile.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Display, IntoStaticStr)]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case")]
pub enum Phase {
    /// What is there before any state is built.
    Baseline,
    /// The worst steps with a small KV cache.
    Probe,
    /// From measurements to a size.
    Compute,
    /// A state of that size.
    Rebuild,
    /// The worst steps at that size.
    Validate,
    /// Smaller steps, and how long they take.
    Timing,
    /// The probe is skipped, or would have been: the size is pinned, or there is a plan.
    Skip,
    /// Nothing fits: other flags are tried, for the diagnostic.
    Advise,
}

impl Phase {
    /// Name in log lines.
    pub fn name(self) -> &'static str {
        self.into()
    }
}

/// What one phase found; its `Display` is the log line `auto-profile phase=... key=value ...`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PhaseRecord {
    /// Which phase.
    pub phase: Phase,
    /// Keys and values in a fixed order; bytes are plain numbers.
    pub fields: Vec<(&'static str, String)>,
    /// Worth somebody's attention.
    pub warning: bool,
}

impl PhaseRecord {
    /// The value of a key.
    pub fn field(&self, name: &str) -> Option<&str> {
        let field = self.fields.iter().find(|(key, _)| *key == name);
        field.map(|(_, value)| value.as_str())
    }
}

impl fmt::Display for PhaseRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "auto-profile phase={}", self.phase)?;
        self.fields
            .iter()
            .try_for_each(|(key, value)| write!(f, " {key}={value}"))
    }
}

/// Which worst step runs, for a progress display.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScenarioProgress {
    /// Probe or validate.
    pub phase: Phase,
    /// The worst step that starts now.
    pub scenario: ScenarioKind,
    /// Worst steps done in this phase.
    pub done: usize,
    /// Worst steps of this phase.
    pub of: usize,
}

/// A worst step that ran; its `Display` is the log line `auto-profile phase=... step=... key=value ...`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepRecord {
    /// Probe or validate.
    pub phase: Phase,
    /// Which worst case.
    pub scenario: ScenarioKind,
    /// Rows in the step.
    pub rows: usize,
    /// Tokens in the step.
    pub tokens: usize,
    /// Seconds until the host had launched it, waiting for grammar masks included.
    pub launched: f64,
    /// Its time in all.
    pub seconds: f64,
}

impl fmt::Display for StepRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            phase,
            scenario,
            rows,
            tokens,
            launched,
            seconds,
        } = self;
        write!(
            f,
            "auto-profile phase={phase} step={scenario} rows={rows} tokens={tokens} launched={launched:.3} seconds={seconds:.3}"
        )
    }
}

/// Is notified of what the profile does.
pub trait Observer {
    /// A phase ended.
    fn phase(&mut self, record: &PhaseRecord);

    /// The work of a phase is done; its record follows after that of the next.
    fn ended(&mut self, _phase: Phase) {}

    /// The build of a state has got this far.
    fn building(&mut self, _progress: BuildProgress) {}

    /// A worst step starts.
    fn progress(&mut self, _progress: ScenarioProgress) {}

    /// A worst step ran.
    fn passed(&mut self, _step: &StepRecord) {}
}

/// Ignores everything.
impl Observer for () {
    fn phase(&mut self, _record: &PhaseRecord) {}
}
