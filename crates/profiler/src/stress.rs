//! What happens to one built state: the worst steps, then the leak guard.

use std::time::Instant;

use plimsoll_core::{Component, Executor, KvConfig, Meters, Oom, StepError};

use crate::phases::Profiler;
use crate::scenario::{LeftOut, ScenarioKind, scenarios};
use crate::{DiscardReason, Phase, ProfileError, ProfileSpec, Progress, ScenarioResult, Target};

/// Where memory ran out.
pub(crate) struct Exhausted {
    pub(crate) phase: Phase,
    pub(crate) scenario: Option<ScenarioKind>,
    pub(crate) oom: Oom,
}

impl Exhausted {
    /// What it says about the plan whose size was tried.
    pub(crate) fn discards(&self) -> DiscardReason {
        match (self.scenario, self.oom.component) {
            (Some(_), Component::Arena) => DiscardReason::ArenaTooSmall,
            _ => DiscardReason::OutOfMemory,
        }
    }
}

/// What every worst step left on the meters.
pub(crate) struct Stress {
    pub(crate) results: Vec<ScenarioResult>,
    pub(crate) left_out: Vec<LeftOut>,
    pub(crate) scratch_bytes: u64,
}

/// Why the stress stopped: the results so far come along.
pub(crate) enum Stopped {
    Exhausted(Exhausted, Vec<ScenarioResult>),
    Broken(ProfileError),
}

impl<T: Target> Profiler<'_, T> {
    /// Runs every worst step once.
    pub(crate) fn stress(
        &mut self,
        phase: Phase,
        spec: &ProfileSpec,
        kv: KvConfig,
        state: &mut T::State,
    ) -> Result<Stress, Stopped> {
        let (scenarios, left_out) = scenarios(&spec.limits, spec.vocab_size, kv);
        let of = scenarios.len();
        let mut results = Vec::with_capacity(of);
        for (done, scenario) in scenarios.into_iter().enumerate() {
            let kind = scenario.kind;
            self.observer.progress(Progress {
                phase,
                scenario: kind,
                done,
                of,
            });
            let started = Instant::now();
            match state.execute(&scenario.plan) {
                Ok(_) => {}
                Err(StepError::Oom(oom)) => {
                    return Err(Stopped::Exhausted(
                        Exhausted {
                            phase,
                            scenario: Some(kind),
                            oom,
                        },
                        results,
                    ));
                }
                Err(error) => {
                    return Err(Stopped::Broken(ProfileError::Step {
                        phase,
                        scenario: kind,
                        error,
                    }));
                }
            }
            results.push(ScenarioResult {
                kind,
                rows: scenario.plan.runs.len(),
                tokens: scenario.plan.num_tokens(),
                seconds: started.elapsed().as_secs_f64(),
                scratch_bytes: self.target.take_scratch_high_water(state),
                peak_reserved: self.target.meters().reserved_high,
            });
        }
        let scratch_bytes = results
            .iter()
            .map(|result| result.scratch_bytes)
            .max()
            .unwrap_or(0);
        Ok(Stress {
            results,
            left_out,
            scratch_bytes,
        })
    }

    /// Drops a state and checks that what it held came back.
    pub(crate) fn tear_down(&mut self, phase: Phase, state: T::State) -> Result<(), ProfileError> {
        let held = self.target.meters();
        drop(state);
        self.target.trim();
        let left = self.target.meters();
        let expected = held.by_component.get(Component::Kv) + held.by_component.get(Component::Canary);
        let returned = i128::from(held.reserved) - i128::from(left.reserved);
        if returned < i128::from(expected) {
            return Err(ProfileError::TeardownLeak {
                phase,
                expected,
                returned,
            });
        }
        Ok(())
    }

    /// Checks that a build which failed kept nothing. The runtime may have grown: it loads things when first used.
    pub(crate) fn check_nothing_left(&mut self, phase: Phase, before: &Meters) -> Result<(), ProfileError> {
        self.target.trim();
        let state_bytes = |meters: &Meters| meters.reserved - meters.by_component.get(Component::Runtime);
        let (before, after) = (state_bytes(before), state_bytes(&self.target.meters()));
        if after > before {
            let returned = i128::from(before) - i128::from(after);
            return Err(ProfileError::TeardownLeak {
                phase,
                expected: 0,
                returned,
            });
        }
        Ok(())
    }
}
