use plimsoll_core::{StateConfig, StepCosts, StepLimits};

use crate::attempt::Validated;
use crate::{Plan, ProfileError, Report, StepTimes};

/// An engine state that has run the worst steps of its limits at its final size. [`profile`](crate::profile) makes it after
/// a passed validation and nothing else does, so holding one permits serving.
#[derive(Debug)]
#[must_use = "dropping the proof frees the state"]
pub struct Proved<S> {
    parts: ProvedParts<S>,
    plan: Option<Plan>,
}

/// What a [`Proved`] consists of.
#[derive(Debug)]
pub struct ProvedParts<S> {
    /// Ready to serve; its canary is free, its KV cache holds nothing of value.
    pub state: S,
    /// With what to build the same again: the arena fixed, no canary.
    pub config: StateConfig,
    /// The steps it was proved for; larger ones must not be planned.
    pub limits: StepLimits,
    /// How long its steps take, if that was measured.
    pub costs: Option<StepCosts>,
    /// How it came to this size.
    pub report: Report,
}

impl<S> Proved<S> {
    pub(crate) fn new(
        validated: Validated<S>,
        limits: StepLimits,
        report: Report,
        plan: Option<Plan>,
    ) -> Self {
        Self {
            plan,
            parts: ProvedParts {
                config: validated.config(),
                costs: validated.step_times().and_then(StepTimes::costs),
                state: validated.into_state(),
                limits,
                report,
            },
        }
    }

    /// With what to build the same state again; `config().kv` is the KV cache in use.
    pub fn config(&self) -> StateConfig {
        self.parts.config
    }

    /// The steps the state was proved for.
    pub fn limits(&self) -> StepLimits {
        self.parts.limits
    }

    /// How the state came to this size.
    pub fn report(&self) -> &Report {
        &self.parts.report
    }

    /// With what the next start can skip the probe; `None` where the size was pinned.
    pub fn plan(&self) -> Option<&Plan> {
        self.plan.as_ref()
    }

    /// The states that the ranks of one server proved together, in their order, as one state: `join` makes it of them.
    ///
    /// # Errors
    /// [`ProfileError::InvalidSpec`] where there is none, or they were proved for different sizes; or that of `join`.
    pub fn join<T>(
        ranks: Vec<Self>,
        join: impl FnOnce(Vec<S>) -> Result<T, ProfileError>,
    ) -> Result<Proved<T>, ProfileError> {
        let different = ProfileError::InvalidSpec("the ranks proved states of different sizes");
        let all = ranks.iter().map(|rank| (rank.config().kv, rank.limits()));
        if !all.clone().zip(all.skip(1)).all(|(one, next)| one == next) {
            return Err(different);
        }
        let mut states = Vec::new();
        let mut first = None;
        for Self { parts, plan } in ranks {
            let ProvedParts {
                state,
                config,
                limits,
                costs,
                report,
            } = parts;
            states.push(state);
            // The first rank reports.
            first.get_or_insert((config, limits, costs, report, plan));
        }
        let (config, limits, costs, report, plan) = first.ok_or(different)?;
        let state = join(states)?;
        let parts = ProvedParts {
            state,
            config,
            limits,
            costs,
            report,
        };
        Ok(Proved { parts, plan })
    }

    /// Takes the proof apart, to serve.
    pub fn into_parts(self) -> ProvedParts<S> {
        self.parts
    }
}
