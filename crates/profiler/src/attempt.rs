//! One size: rebuild, then validate with the canary held.

use std::time::Instant;

use plimsoll_core::{Component, KvConfig, Meters, Scratch, StateConfig};

use crate::profiler::{Profiler, seconds};
use crate::stress::{Stop, WorstSteps};
use crate::{
    Arithmetic, Attempt, Bound, DiscardedPlan, LeftOut, Measured, Origin, Outcome, Phase, Plan, ProfileError,
    ScenarioResult, StepTimes, Target,
};

/// A state of the size to prove, with its canary, and what it has to compute.
struct Rebuilt<S> {
    state: S,
    config: StateConfig,
    steps: WorstSteps,
}

/// A state whose size passed; nothing but [`Profiler::validate`] makes one.
pub(crate) struct Validated<S> {
    state: S,
    config: StateConfig,
    left_out: Vec<LeftOut>,
    step_times: Option<StepTimes>,
}

impl<S> Validated<S> {
    /// With what to build the same state again, without a canary.
    pub(crate) fn config(&self) -> StateConfig {
        self.config
    }

    /// Worst cases that it cannot reach.
    pub(crate) fn left_out(&self) -> &[LeftOut] {
        &self.left_out
    }

    /// How long its steps take.
    pub(crate) fn step_times(&self) -> Option<&StepTimes> {
        self.step_times.as_ref()
    }

    pub(crate) fn into_state(self) -> S {
        self.state
    }
}

impl<T: Target> Profiler<'_, T> {
    /// Tries one size; what came of it is added to `attempts` unless it ends everything.
    pub(crate) fn attempt(
        &mut self,
        pages: usize,
        scratch: Scratch,
        attempts: &mut Vec<Attempt>,
    ) -> Result<Validated<T::State>, Stop> {
        let started = Instant::now();
        let kv = self.spec.kv(pages);
        let mut passed = Vec::new();
        let result = self
            .rebuild(kv, scratch)
            .and_then(|rebuilt| self.validate(rebuilt, &mut passed));
        let outcome = match &result {
            Ok(_) => Outcome::Proved,
            Err(Stop::Exhausted(exhausted)) => {
                let tokens = ("tokens", kv.capacity_tokens().to_string());
                let (phase, fields) = exhausted.record();
                self.log(phase, [tokens].into_iter().chain(fields).collect());
                exhausted.outcome()
            }
            Err(Stop::Failed(_)) => return result,
        };
        attempts.push(Attempt {
            kv_tokens: kv.capacity_tokens(),
            outcome,
            scenarios: passed,
            peak_reserved: self.target.meters().reserved_high,
            seconds: started.elapsed().as_secs_f64(),
        });
        result
    }

    fn rebuild(&mut self, kv: KvConfig, scratch: Scratch) -> Result<Rebuilt<T::State>, Stop> {
        let started = Instant::now();
        let config = StateConfig {
            kv,
            scratch,
            canary_bytes: self.spec.margins.canary_bytes,
        };
        let (state, steps) = self.build_with_steps(Phase::Rebuild, self.spec, &config)?;
        let meters = self.target.meters();
        let fields = vec![
            ("outcome", "built".to_owned()),
            ("tokens", kv.capacity_tokens().to_string()),
            ("kv", meters.by_component.get(Component::Kv).to_string()),
            ("arena", meters.by_component.get(Component::Arena).to_string()),
            ("canary", meters.by_component.get(Component::Canary).to_string()),
            ("free", meters.free.to_string()),
            ("seconds", seconds(started)),
        ];
        self.log(Phase::Rebuild, fields);
        Ok(Rebuilt { state, config, steps })
    }

    fn validate(
        &mut self,
        rebuilt: Rebuilt<T::State>,
        passed: &mut Vec<ScenarioResult>,
    ) -> Result<Validated<T::State>, Stop> {
        let started = Instant::now();
        let Rebuilt {
            mut state,
            config,
            steps,
        } = rebuilt;
        let scratch_bytes = match self.prove(&mut state, &config, &steps, passed) {
            Ok(bytes) => bytes,
            Err(stop) => return Err(self.give_up(Phase::Validate, Some(state), stop)),
        };
        let left_out = steps.into_left_out();
        let step_times = match self.time_steps(&mut state, config.kv, started.elapsed()) {
            Ok(times) => times,
            Err(stop) => return Err(self.give_up(Phase::Timing, Some(state), stop)),
        };
        let held = self.target.meters();
        let released = self.release_canary(&mut state, &held).map_err(Stop::Failed);
        if let Err(stop) = self.agree(Phase::Validate, None, released) {
            return Err(self.give_up(Phase::Validate, Some(state), stop));
        }
        let fields = vec![
            ("outcome", "proved".to_owned()),
            ("tokens", config.kv.capacity_tokens().to_string()),
            ("scenarios", passed.len().to_string()),
            ("peak_reserved", held.reserved_high.to_string()),
            ("free", self.target.meters().free.to_string()),
            ("seconds", seconds(started)),
        ];
        self.log(Phase::Validate, fields);
        let scratch = match config.scratch {
            Scratch::Fixed(bytes) => bytes,
            Scratch::Growable => scratch_bytes,
        };
        Ok(Validated {
            state,
            config: StateConfig {
                scratch: Scratch::Fixed(scratch),
                canary_bytes: 0,
                ..config
            },
            left_out,
            step_times,
        })
    }

    /// The worst steps. A growing arena settles in a first pass; the proof is a pass in which it no longer grows. Returns the most bytes of
    /// it that one took.
    fn prove(
        &mut self,
        state: &mut T::State,
        config: &StateConfig,
        steps: &WorstSteps,
        passed: &mut Vec<ScenarioResult>,
    ) -> Result<u64, Stop> {
        let mut settled = 0;
        if config.scratch == Scratch::Growable {
            settled = self.stress(Phase::Validate, steps, state, passed)?;
            passed.clear();
        }
        Ok(settled.max(self.stress(Phase::Validate, steps, state, passed)?))
    }

    fn release_canary(&mut self, state: &mut T::State, held: &Meters) -> Result<(), ProfileError> {
        self.target.release_canary(state);
        let returned = i128::from(held.reserved) - i128::from(self.target.meters().reserved);
        let expected = self.spec.margins.canary_bytes;
        if returned < i128::from(expected) {
            return Err(ProfileError::TeardownLeak {
                phase: Phase::Validate,
                expected,
                returned,
            });
        }
        Ok(())
    }
}

/// The end of a successful search.
pub(crate) struct Found<S> {
    pub(crate) validated: Validated<S>,
    pub(crate) plan: Option<Plan>,
    pub(crate) search: Search,
}

/// How a size was found; fields as in [`crate::Report`].
pub(crate) struct Search {
    pub(crate) bound: Bound,
    pub(crate) origin: Origin,
    pub(crate) discarded_plan: Option<DiscardedPlan>,
    pub(crate) probe: Option<(Measured, Vec<ScenarioResult>, Arithmetic)>,
    pub(crate) plan_error: Option<f64>,
    pub(crate) attempts: Vec<Attempt>,
}
