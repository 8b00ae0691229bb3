//! The error of a profile that finds no size, with what would fit instead.

use plimsoll_core::{KvConfig, Oom, Scratch, StateConfig, StepLimits};

use crate::advice::{Advice, Basis, Source, advise};
use crate::profiler::Profiler;
use crate::stress::or_exhausted;
use crate::{
    Arithmetic, Cause, Diagnostic, Measured, Phase, Probed, ProfileError, ProfileSpec, ScenarioResult, Target,
};

/// What a failed profile knows.
pub(crate) struct Evidence<'a> {
    /// What was measured, and under which limits.
    pub(crate) probe: Option<(&'a Probed, StepLimits)>,
    pub(crate) arithmetic: Option<&'a Arithmetic>,
    pub(crate) oom: Option<&'a Oom>,
    pub(crate) last_tokens: Option<usize>,
}

impl<'a> Evidence<'a> {
    /// A whole probe, and nothing that failed.
    pub(crate) fn of(spec: &ProfileSpec, probed: &'a Probed, arithmetic: &'a Arithmetic) -> Self {
        Self {
            probe: Some((probed, spec.limits)),
            arithmetic: Some(arithmetic),
            oom: None,
            last_tokens: None,
        }
    }
}

impl<T: Target> Profiler<'_, T> {
    /// The error that ends this profile, with what would not end in one.
    pub(crate) fn refuse(&mut self, mut cause: Cause, evidence: &Evidence<'_>) -> ProfileError {
        let meters = self.target.meters();
        let advice = match evidence.probe.filter(|_| self.spec.gives_advice) {
            Some((probed, limits)) => self.advice(&mut cause, evidence, probed, limits),
            None => Ok(Advice::default()),
        };
        let Advice {
            knobs, out_of_reach, ..
        } = match advice {
            Ok(advice) => advice,
            Err(fatal) => return fatal,
        };
        let pages = evidence.arithmetic.map(|arithmetic| arithmetic.pages);
        ProfileError::DoesNotFit(Box::new(Diagnostic {
            initial_tokens: pages.map(|pages| self.spec.kv(pages).capacity_tokens()),
            last_tokens: evidence.last_tokens,
            measured_peak: evidence.probe.map(|(probed, _)| probed.measured.peak_reserved),
            total: meters.total,
            canary: self.spec.margins.canary_bytes,
            peers: meters.peers(),
            oom: evidence.oom.cloned(),
            cause,
            knobs,
            out_of_reach,
        }))
    }

    fn advice(
        &mut self,
        cause: &mut Cause,
        evidence: &Evidence<'_>,
        probed: &Probed,
        limits: StepLimits,
    ) -> Result<Advice, ProfileError> {
        let spec = self.spec;
        let pages = |tokens: usize| spec.kv_of_tokens(tokens).num_pages;
        let at_most = match *cause {
            Cause::PinnedTooLarge {
                asked_tokens,
                largest_tokens,
                ..
            } => pages(largest_tokens).min(pages(asked_tokens) - 1),
            Cause::PinnedTooSmall { largest_tokens, .. } => pages(largest_tokens),
            Cause::Exhausted { .. } => pages(evidence.last_tokens.unwrap_or(0)).saturating_sub(1),
            Cause::ProbeDoesNotFit | Cause::ContextDoesNotFit => usize::MAX,
        };
        let meters = self.target.meters();
        let left_behind = left_behind(&probed.scenarios);
        let unused = (meters.total - meters.peers()).saturating_sub(probed.measured.peak_reserved);
        let basis = Basis {
            limits,
            measured: probed.measured.clone(),
            given_back: if unused < left_behind { left_behind } else { 0 },
            meters,
            broke_promise: evidence.oom.is_some_and(gave_less_than_promised),
            at_most,
        };
        let advice = advise(self, spec, basis)?;
        if let Cause::PinnedTooLarge { largest_tokens, .. } = cause {
            *largest_tokens = spec.kv(advice.largest_pages).capacity_tokens();
        }
        Ok(advice)
    }
}

impl<T: Target> Source for Profiler<'_, T> {
    fn measure(&mut self, spec: &ProfileSpec) -> Result<Option<Measured>, ProfileError> {
        // A step is everyone's, and the other ranks do not know that this one tries something.
        if self.ranks.count() > 1 {
            return Ok(None);
        }
        let probed = or_exhausted(self.probe(Phase::Advise, spec, spec.measured_kv()))?;
        Ok(probed.ok().map(|probed| probed.measured))
    }

    fn gives(&mut self, kv: KvConfig, scratch_bytes: u64) -> Result<bool, ProfileError> {
        if self.ranks.count() > 1 {
            return Ok(true);
        }
        let config = StateConfig {
            kv,
            scratch: Scratch::Fixed(scratch_bytes),
            canary_bytes: self.spec.margins.canary_bytes,
        };
        match or_exhausted(self.build(Phase::Advise, &config))? {
            Ok(state) => self.tear_down(Phase::Advise, state).map(|()| true),
            Err(_) => Ok(false),
        }
    }
}

/// Sizes that an arena grew out of, in the order in which the steps ran: an allocator that keeps what is freed keeps them,
/// and gives them back where it must.
fn left_behind(scenarios: &[ScenarioResult]) -> u64 {
    let (mut largest, mut sizes) = (0, 0);
    for result in scenarios {
        if result.scratch_bytes > largest {
            largest = result.scratch_bytes;
            sizes += largest;
        }
    }
    sizes - largest
}

/// Whether an allocation failed although the sum said that there was room.
fn gave_less_than_promised(oom: &Oom) -> bool {
    let asked = oom.meters.reserved.saturating_add(oom.requested);
    asked.saturating_add(oom.meters.peers()) <= oom.meters.total
}
