//! What every built state goes through, on all ranks or on none: the worst steps, then the leak guard.

use std::panic::resume_unwind;
use std::thread::{Builder, scope};
use std::time::Instant;

use plimsoll_core::{
    BuildError, Component, Executor, KvConfig, Meters, Oom, StateConfig, StepError, StepOutput, allow_all,
};

use crate::profiler::Profiler;
use crate::scenario::{Contexts, LeftOut, Scenario, ScenarioKind, scenarios};
use crate::{
    Attempt, DiscardReason, DiscardedPlan, Outcome, Phase, ProfileError, ProfileSpec, RankLost,
    ScenarioProgress, ScenarioResult, StepRecord, Target, Verdict,
};

/// Why a phase has no result.
pub(crate) enum Stop {
    /// Memory ran out: a smaller size may do.
    Exhausted(Exhausted),
    /// No size helps.
    Failed(ProfileError),
}

/// Where memory ran out.
pub(crate) struct Exhausted {
    phase: Phase,
    scenario: Option<ScenarioKind>,
    shortage: Shortage,
}

/// Whose memory ran out.
pub(crate) enum Shortage {
    /// This rank's.
    Here(Oom),
    /// Another rank's.
    Rank(usize),
}

impl From<ProfileError> for Stop {
    fn from(error: ProfileError) -> Self {
        Self::Failed(error)
    }
}

impl From<RankLost> for Stop {
    fn from(lost: RankLost) -> Self {
        Self::Failed(lost.into())
    }
}

impl Stop {
    pub(crate) fn of_step(phase: Phase, scenario: ScenarioKind, error: StepError) -> Self {
        match error {
            StepError::Oom(oom) => Self::exhausted(phase, Some(scenario), Shortage::Here(oom)),
            StepError::Device(error) => Self::Failed(ProfileError::Device {
                phase,
                error: format!("{error}, in the worst step {scenario}"),
            }),
            // Its verdict is the one that counts.
            StepError::OtherRank(rank) => Self::exhausted(phase, Some(scenario), Shortage::Rank(rank)),
            StepError::RankLost(why) => Self::Failed(RankLost(why).into()),
            error => Self::Failed(ProfileError::Step {
                phase,
                scenario,
                error,
            }),
        }
    }

    fn exhausted(phase: Phase, scenario: Option<ScenarioKind>, shortage: Shortage) -> Self {
        Self::Exhausted(Exhausted {
            phase,
            scenario,
            shortage,
        })
    }

    fn verdict(&self) -> Verdict {
        match self {
            Self::Exhausted(_) => Verdict::OutOfMemory,
            Self::Failed(_) => Verdict::Failed,
        }
    }
}

/// Separates running out of memory, which a smaller size may avoid, from errors that end the profile.
pub(crate) fn or_exhausted<X>(result: Result<X, Stop>) -> Result<Result<X, Exhausted>, ProfileError> {
    match result {
        Ok(value) => Ok(Ok(value)),
        Err(Stop::Exhausted(exhausted)) => Ok(Err(exhausted)),
        Err(Stop::Failed(error)) => Err(error),
    }
}

impl Exhausted {
    /// The allocation that failed; or, if none did on this rank, why it ends nevertheless.
    pub(crate) fn oom(&self) -> Result<&Oom, ProfileError> {
        match &self.shortage {
            Shortage::Here(oom) => Ok(oom),
            &Shortage::Rank(rank) => Err(ProfileError::OtherRank {
                rank,
                phase: self.phase,
            }),
        }
    }

    /// The plan whose numbers were tried in these attempts is of no use.
    pub(crate) fn discarded(&self, mut attempts: Vec<Attempt>) -> DiscardedPlan {
        let reason = match &self.shortage {
            Shortage::Rank(_) => DiscardReason::OtherRank,
            Shortage::Here(oom) if self.scenario.is_some() && oom.component == Component::Arena => {
                DiscardReason::ArenaTooSmall
            }
            Shortage::Here(_) => DiscardReason::OutOfMemory,
        };
        DiscardedPlan {
            reason,
            attempt: attempts.pop(),
        }
    }

    /// The log record of the phase.
    pub(crate) fn record(&self) -> (Phase, Vec<(&'static str, String)>) {
        let mut fields = match &self.shortage {
            Shortage::Here(oom) => vec![
                ("outcome", "out_of_memory".to_owned()),
                ("requested", oom.requested.to_string()),
                ("component", oom.component.to_string()),
                ("free", oom.meters.free.to_string()),
                ("peers", oom.meters.peers().to_string()),
            ],
            Shortage::Rank(rank) => vec![
                ("outcome", "out_of_memory".to_owned()),
                ("rank", rank.to_string()),
            ],
        };
        fields.extend(self.scenario.map(|kind| ("scenario", kind.to_string())));
        (self.phase, fields)
    }

    pub(crate) fn outcome(&self) -> Outcome {
        match &self.shortage {
            Shortage::Here(oom) => Outcome::out_of_memory(self.phase, self.scenario, oom),
            &Shortage::Rank(rank) => Outcome::OtherRank { rank },
        }
    }
}

/// The worst steps of a state.
pub(crate) struct WorstSteps {
    scenarios: Vec<Scenario>,
    pub(crate) left_out: Vec<LeftOut>,
}

impl WorstSteps {
    /// For a KV cache of `kv`.
    fn new(phase: Phase, spec: &ProfileSpec, kv: KvConfig) -> Self {
        let contexts = match phase {
            Phase::Probe | Phase::Advise if spec.contexts_take_memory => Contexts::Held,
            Phase::Probe | Phase::Advise => Contexts::Short,
            _ => Contexts::All,
        };
        let (scenarios, left_out) = scenarios(contexts, &spec.limits, spec.vocab_size, kv, spec.pooling);
        Self { scenarios, left_out }
    }

    /// Frees the steps: with histories of 1024 rows of 131,072 tokens they take 0.5 GiB of host memory.
    pub(crate) fn into_left_out(self) -> Vec<LeftOut> {
        self.left_out
    }
}

impl<T: Target> Profiler<'_, T> {
    /// Exchanges the outcome with all ranks; the worst one holds for all.
    pub(crate) fn agree(
        &mut self,
        phase: Phase,
        scenario: Option<ScenarioKind>,
        here: Result<(), Stop>,
    ) -> Result<(), Stop> {
        let verdict = here.as_ref().err().map_or(Verdict::Passed, Stop::verdict);
        let (worst, rank) = match (self.ranks.worst(verdict), &here) {
            (Ok(worst), _) => worst,
            // This rank's own error says more than that the others cannot be reached.
            (Err(_), Err(Stop::Failed(_))) => return here,
            (Err(lost), _) => return Err(lost.into()),
        };
        if worst >= verdict {
            return here;
        }
        Err(match worst {
            Verdict::OutOfMemory => Stop::exhausted(phase, scenario, Shortage::Rank(rank)),
            _ => Stop::Failed(ProfileError::OtherRank { rank, phase }),
        })
    }

    /// Builds a state on every rank, and makes its worst steps meanwhile: together the rows at the longest context have millions of tokens.
    pub(crate) fn build_with_steps(
        &mut self,
        phase: Phase,
        spec: &ProfileSpec,
        config: &StateConfig,
    ) -> Result<(T::State, WorstSteps), Stop> {
        let make = || WorstSteps::new(phase, spec, config.kv);
        let (built, steps) = scope(|scope| {
            let maker = Builder::new().name("worst-steps".to_owned());
            let made = maker.spawn_scoped(scope, make);
            let built = self.build(phase, config);
            // If no thread can be started, they are made now.
            let steps = made.map_or_else(
                |_| make(),
                |thread| thread.join().unwrap_or_else(|panic| resume_unwind(panic)),
            );
            (built, steps)
        });
        Ok((built?, steps))
    }

    /// Builds a state on every rank.
    pub(crate) fn build(&mut self, phase: Phase, config: &StateConfig) -> Result<T::State, Stop> {
        let before = self.target.meters();
        self.target.reset_high_water();
        let observer = &mut *self.observer;
        let built = self
            .target
            .build(config, &mut |progress| observer.building(progress));
        let built = built.map_err(|error| match error {
            BuildError::Oom(oom) => {
                let nothing_left = self.check_nothing_left(phase, &before);
                let oom = Stop::exhausted(phase, None, Shortage::Here(oom));
                nothing_left.err().map_or(oom, Stop::Failed)
            }
            BuildError::Device(error) => Stop::Failed(ProfileError::Device { phase, error }),
            // Its verdict is the one that counts.
            BuildError::OtherRank(rank) => {
                let nothing_left = self.check_nothing_left(phase, &before);
                let other = Stop::exhausted(phase, None, Shortage::Rank(rank));
                nothing_left.err().map_or(other, Stop::Failed)
            }
            BuildError::RankLost(why) => Stop::Failed(RankLost(why).into()),
        });
        let (state, here) = match built {
            Ok(state) => (Some(state), Ok(())),
            Err(stop) => (None, Err(stop)),
        };
        match (self.agree(phase, None, here), state) {
            (Ok(()), Some(state)) => Ok(state),
            (Err(stop), state) => Err(self.give_up(phase, state, stop)),
            (Ok(()), None) => unreachable!("without a state there is no agreement"),
        }
    }

    /// Runs every worst step once; what passes is added to `passed`. Returns the most bytes of the arena that one took.
    pub(crate) fn stress(
        &mut self,
        phase: Phase,
        steps: &WorstSteps,
        state: &mut T::State,
        passed: &mut Vec<ScenarioResult>,
    ) -> Result<u64, Stop> {
        let of = steps.scenarios.len();
        let mut scratch_bytes = 0;
        for (done, &Scenario { kind, ref plan }) in steps.scenarios.iter().enumerate() {
            self.observer.progress(ScenarioProgress {
                phase,
                scenario: kind,
                done,
                of,
            });
            let started = Instant::now();
            let stop = |error| Stop::of_step(phase, kind, error);
            // A rank that finished a step that is not launched everywhere would wait for ever.
            let launched = state.launch(plan).and_then(|()| match plan.awaits_masks() {
                true => state.sample(&mut allow_all),
                false => Ok(()),
            });
            let until_launched = started.elapsed().as_secs_f64();
            self.agree(phase, Some(kind), launched.map_err(stop))?;
            let finished = state.finish().map_err(stop);
            let finished = finished.and_then(|output| check_finite(phase, kind, &output));
            self.agree(phase, Some(kind), finished)?;
            let seconds = started.elapsed().as_secs_f64();
            let scratch = self.target.take_scratch_high_water(state);
            scratch_bytes = scratch.max(scratch_bytes);
            let (rows, tokens) = (plan.runs.len(), plan.num_tokens());
            self.observer.passed(&StepRecord {
                phase,
                scenario: kind,
                rows,
                tokens,
                launched: until_launched,
                seconds,
            });
            passed.push(ScenarioResult {
                kind,
                rows,
                tokens,
                seconds,
                scratch_bytes: scratch,
                peak_reserved: self.target.meters().reserved_high,
            });
        }
        Ok(scratch_bytes)
    }

    /// Drops the states of all ranks that have one; a leak on any rank replaces the error of all. A device that failed may
    /// give nothing back, which is no leak.
    pub(crate) fn give_up(&mut self, phase: Phase, state: Option<T::State>, stop: Stop) -> Stop {
        let torn = match (&stop, state) {
            (Stop::Failed(ProfileError::Device { .. }), _) | (_, None) => Ok(()),
            (_, Some(state)) => self.tear_down(phase, state),
        };
        let agreed = self.agree(phase, None, torn.map_err(Stop::Failed));
        agreed.err().unwrap_or(stop)
    }

    /// Drops a state and checks that what it held came back.
    pub(crate) fn tear_down(&mut self, phase: Phase, state: T::State) -> Result<(), ProfileError> {
        let held = self.target.meters();
        drop(state);
        self.target.trim();
        let left = self.target.meters();
        let kept = |meters: &Meters| {
            let bytes = |component| meters.by_component.get(component);
            bytes(Component::Kv) + bytes(Component::States) + bytes(Component::Canary)
        };
        let expected = kept(&held);
        let dropped = |before: u64, after: u64| i128::from(before) - i128::from(after);
        // An arena that comes back must not hide a KV cache that does not.
        let returned = dropped(held.reserved, left.reserved).min(dropped(kept(&held), kept(&left)));
        if returned < i128::from(expected) {
            return Err(ProfileError::TeardownLeak {
                phase,
                expected,
                returned,
            });
        }
        Ok(())
    }

    /// Checks that a build which failed kept nothing. The runtime may have grown: it loads things when first used. Likewise
    /// the driver keeps the memory of graphs for the next ones.
    fn check_nothing_left(&mut self, phase: Phase, before: &Meters) -> Result<(), ProfileError> {
        self.target.trim();
        let state_bytes = |meters: &Meters| {
            let bytes = |component| meters.by_component.get(component);
            meters.reserved - bytes(Component::Runtime) - bytes(Component::Graphs)
        };
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

/// The tokens of these steps are nobody's, so what is not finite says that the weights are at fault.
pub(crate) fn check_finite(phase: Phase, scenario: ScenarioKind, output: &StepOutput) -> Result<(), Stop> {
    match output.not_finite.is_empty() {
        true => Ok(()),
        false => Err(ProfileError::NotFinite { phase, scenario }.into()),
    }
}
