//! The second step of a start: the auto-profile measures what fits, and proves it.

use plimsoll_core::Executor;
use plimsoll_profiler::{Disabled, KvSize, ProfileSpec, Proved, Report};
use plimsoll_server::StartPhase;

use super::{Loaded, plans};
use crate::backend::Targets;
use crate::command_line::CommandLine;
use crate::error::Error;
use crate::progress::ProfileProgress;

/// A state that ran the worst steps, and how another is built in its place.
#[allow(missing_debug_implementations, reason = "states that serve have none")]
pub struct Proof {
    pub(super) proved: Proved<Box<dyn Executor>>,
    pub(super) target: Targets,
    /// With what its probe measured.
    pub(super) spec: ProfileSpec,
}

impl Proof {
    /// What was measured.
    pub fn report(&self) -> &Report {
        self.proved.report()
    }
}

impl Loaded {
    /// Measures and proves, without an engine.
    ///
    /// # Errors
    /// Where nothing fits, or the device fails.
    pub fn prove(&self) -> Result<Proof, Error> {
        let (kept, progress) = (&self.settings.plans, self.times.progress());
        let mut spec = self.spec();
        for Disabled { path, reason } in &spec.disabled {
            tracing::info!("{path}: off ({reason})");
        }
        // A pinned size needs no measurement.
        let model_key = self.model_key.clone().filter(|_| spec.size == KvSize::Auto);
        let key = model_key.map(|model| {
            let (settings, facts) = (&self.settings, &self.model.facts);
            plans::key(model, &*self.backend, settings, &spec, facts)
        });
        spec.plan = key.as_ref().and_then(|key| plans::find(kept, key));
        match &spec.plan {
            Some(plan) => {
                let steps = plan.probe.scenarios.iter();
                progress.expect_validation(steps.map(|step| step.seconds).sum());
            }
            None if spec.size == KvSize::Auto => progress.enter(StartPhase::Probe),
            None => {}
        }
        let vocab_size = self.model.facts.vocab_size;
        let mut target = Targets::new(&self.backend, &self.model.weights, self.limits.step, vocab_size);
        let mut observer = ProfileProgress::new(self.times.clone());
        let proved = target.prove(&spec, &mut observer)?;
        match (&key, proved.plan()) {
            (Some(key), Some(plan)) => plans::keep(kept, key, plan, proved.report(), &progress.taken()),
            (Some(key), None) => plans::forget(kept, key),
            (None, _) => {}
        }
        log(proved.report());
        spec.plan = proved.plan().cloned();
        Ok(Proof { proved, target, spec })
    }
}

/// Where every byte is, and the commands that make the next start skip the search or use more of the device.
fn log(report: &Report) {
    tracing::info!("{}", memory_line(report));
    let line = CommandLine::of_process();
    for suggestion in &report.suggestions {
        tracing::info!(
            "next start, {}: {}",
            suggestion.effect,
            line.with(&[suggestion.flag])
        );
    }
}

/// Bytes as plain numbers, `key=value`.
fn memory_line(report: &Report) -> String {
    let ready = &report.ready;
    let device = [
        ("total", ready.total),
        ("free", ready.free),
        ("peers", ready.peers),
    ];
    let components = ready.components.iter().map(|line| (line.name, line.bytes));
    let slack = [("unattributed", ready.unattributed)];
    let fields = device.into_iter().chain(components).chain(slack);
    let fields: Vec<_> = fields.map(|(name, bytes)| format!("{name}={bytes}")).collect();
    format!("auto-profile ready {}", fields.join(" "))
}
