//! Builds and proves another state for a running engine, after device memory ran out or a sleep.

use std::sync::Arc;

use plimsoll_core::{Executor, Meters};
use plimsoll_engine::{RebuildError, StateSource};
use plimsoll_profiler::{
    BuildProgress, KvSize, Observer, PhaseRecord, ProfileError, ProfileSpec, Proved, ScenarioProgress,
};

use super::StateMemory;
use crate::backend::Targets;
use crate::error::Error;
use crate::lock::Relock;
use crate::progress::log_phase;

/// Proves the state of a running server again. Weights stay where they are.
pub(super) struct Rebuilder {
    pub(super) target: Targets,
    /// That of the start, with what its probe measured.
    pub(super) spec: ProfileSpec,
    pub(super) memory: Arc<StateMemory>,
    /// As at the start, nobody else measures the device meanwhile.
    pub(super) relock: Relock,
}

impl StateSource<Box<dyn Executor>> for Rebuilder {
    fn high_water(&self) -> u64 {
        self.memory.high_water()
    }

    fn proved_peak(&self) -> u64 {
        self.memory.proved_by_all()
    }

    fn meters(&self) -> Meters {
        self.memory.first_rank()
    }

    fn trim(&mut self) {
        self.target.trim();
    }

    fn rebuild(&mut self, meanwhile: &mut dyn FnMut()) -> Result<Proved<Box<dyn Executor>>, RebuildError> {
        let _lock = self.relock.try_take().map_err(|error| match error {
            Error::DeviceBusy { device, holder, .. } => {
                RebuildError::NotNow(format!("{holder} measures {device} at the moment"))
            }
            other => RebuildError::NotNow(other.to_string()),
        })?;
        self.memory.rebuild_begins();
        let mut log = Log { meanwhile };
        let mut proved = self.target.prove(&self.spec, &mut log);
        if let (Err(ProfileError::DoesNotFit(_)), Some(spec)) = (&proved, self.what_fits()) {
            proved = self.target.prove(&spec, &mut log);
        }
        self.memory.rebuild_ends(proved.as_ref().ok().map(Proved::report));
        Ok(proved?)
    }
}

impl Rebuilder {
    /// Where the start's size was pinned: a search for as much of it as there is room for.
    fn what_fits(&self) -> Option<ProfileSpec> {
        let pinned = match self.spec.size {
            KvSize::Auto => return None,
            KvSize::Tokens(tokens) => tokens,
            KvSize::Bytes(bytes) => {
                usize::try_from(bytes / self.spec.kv_bytes_per_token.max(1)).unwrap_or(usize::MAX)
            }
        };
        Some(ProfileSpec {
            size: KvSize::Auto,
            useful_tokens: Some(pinned),
            ..self.spec.clone()
        })
    }
}

/// A log line per phase, as at the start; those who wait are not forgotten.
struct Log<'a> {
    meanwhile: &'a mut dyn FnMut(),
}

impl Observer for Log<'_> {
    fn phase(&mut self, record: &PhaseRecord) {
        (self.meanwhile)();
        log_phase(record);
    }

    fn building(&mut self, _piece: BuildProgress) {
        (self.meanwhile)();
    }

    fn progress(&mut self, _progress: ScenarioProgress) {
        (self.meanwhile)();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A KV cache or graphs that take minutes are no hang.
    #[test]
    fn whoever_waits_hears_of_each_piece_of_a_state() {
        let mut moves = 0;
        let mut log = Log {
            meanwhile: &mut || moves += 1,
        };
        log.building(BuildProgress::Memory);
        log.building(BuildProgress::Graph { done: 0, of: 2 });
        log.building(BuildProgress::Graph { done: 1, of: 2 });
        assert_eq!(moves, 3);
    }
}
