//! What all phases work with.

use std::time::Instant;

use crate::{Observer, Phase, PhaseRecord, ProfileSpec, Ranks};

pub(crate) struct Profiler<'a, T> {
    pub(crate) target: &'a mut T,
    pub(crate) spec: &'a ProfileSpec,
    pub(crate) ranks: &'a mut dyn Ranks,
    pub(crate) observer: &'a mut dyn Observer,
}

impl<T> Profiler<'_, T> {
    pub(crate) fn log(&mut self, phase: Phase, fields: Vec<(&'static str, String)>) {
        self.observer.phase(&PhaseRecord {
            phase,
            fields,
            warning: false,
        });
    }

    pub(crate) fn warn(&mut self, phase: Phase, fields: Vec<(&'static str, String)>) {
        self.observer.phase(&PhaseRecord {
            phase,
            fields,
            warning: true,
        });
    }
}

pub(crate) fn seconds(since: Instant) -> String {
    format!("{:.3}", since.elapsed().as_secs_f64())
}
