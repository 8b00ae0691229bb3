//! The order of things: a plan if one holds, or else the search; or a pinned size.

use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};
use std::time::Instant;

use plimsoll_core::{Component, Scratch};

use crate::arithmetic::{MAX_ATTEMPTS, shrunk};
use crate::attempt::{Found, Search};
use crate::probe::Baseline;
use crate::profiler::Profiler;
use crate::refusal::Evidence;
use crate::report::{Memory, Start};
use crate::stress::{Stop, or_exhausted};
use crate::{
    Attempt, Bound, Cause, DRIFT_WARNING, DiscardReason, DiscardedPlan, KvSize, Measured, Observer, Origin,
    Phase, Plan, ProfileError, ProfileSpec, Proved, Ranks, Report, Solo, Target, Verdict,
};

/// Finds the size of the KV cache, or checks a pinned one, and proves it.
///
/// # Errors
/// [`ProfileError`]; whatever was built is freed by then.
pub fn profile<T: Target>(
    target: &mut T,
    spec: &ProfileSpec,
    observer: &mut dyn Observer,
) -> Result<Proved<T::State>, ProfileError> {
    profile_rank(target, spec, &mut Solo, observer)
}

/// [`profile`] as one rank of several, which all call this with the same limits and sizes. Each computes what its own device
/// can hold, all serve the least of it; if one runs out of memory all try the next smaller size, and if one fails all do.
///
/// # Errors
/// [`ProfileError`], on every rank or on none.
pub fn profile_rank<T: Target>(
    target: &mut T,
    spec: &ProfileSpec,
    ranks: &mut dyn Ranks,
    observer: &mut dyn Observer,
) -> Result<Proved<T::State>, ProfileError> {
    let started = Instant::now();
    let mut profiler = Profiler {
        target,
        spec,
        ranks,
        observer,
    };
    profiler.check()?;
    let baseline = profiler.baseline();
    let found = match spec.size {
        KvSize::Auto => profiler.automatic(&baseline)?,
        KvSize::Tokens(_) => profiler.pinned(&baseline, Bound::PinnedTokens)?,
        KvSize::Bytes(_) => profiler.pinned(&baseline, Bound::PinnedBytes)?,
    };
    let report = Report::new(
        spec,
        Start {
            baseline: Memory::from(&baseline.0),
            ready: Memory::from(&profiler.target.meters()),
            rank: profiler.ranks.rank(),
            ranks: profiler.ranks.count(),
            left_out: found.validated.left_out().to_vec(),
            step_times: found.validated.step_times().cloned(),
            kv_pages: found.validated.config().kv.num_pages,
            seconds: started.elapsed().as_secs_f64(),
        },
        found.search,
    );
    Ok(Proved::new(found.validated, spec.limits, report, found.plan))
}

impl<'a, T: Target> Profiler<'a, T> {
    /// The spec makes sense, and every rank has the same: they would run different steps, and wait for each other for ever.
    fn check(&mut self) -> Result<(), ProfileError> {
        let sensible = self.spec.check().map_err(Stop::Failed);
        if let Err(Stop::Failed(error)) = self.agree(Phase::Baseline, None, sensible) {
            return Err(error);
        }
        let mut hasher = DefaultHasher::new();
        self.spec.shape().hash(&mut hasher);
        let shape = hasher.finish() as usize;
        let (least, most) = (self.ranks.min(shape)?, !self.ranks.min(!shape)?);
        match least == most {
            true => Ok(()),
            false => Err(ProfileError::InvalidSpec(
                "the ranks were started with different limits or sizes: give all of them the same flags",
            )),
        }
    }

    /// From the plan if there is one that holds, or else measured.
    fn automatic(&mut self, baseline: &Baseline) -> Result<Found<T::State>, ProfileError> {
        let discarded_plan = match self.usable_plan(baseline)? {
            Ok(plan) => match self.planned(plan, baseline)? {
                Ok(found) => return Ok(found),
                Err(discarded) => Some(discarded),
            },
            Err(reason) => reason.map(DiscardedPlan::from),
        };
        if let Some(discarded) = &discarded_plan {
            self.log_discarded(discarded);
        }
        let mut found = self.search()?;
        found.search.discarded_plan = discarded_plan;
        Ok(found)
    }

    /// The plan, if every rank has one to use; or why this one's is of no use.
    pub(crate) fn usable_plan(
        &mut self,
        baseline: &Baseline,
    ) -> Result<Result<&'a Plan, Option<DiscardReason>>, ProfileError> {
        let given = self.spec.plan.as_ref();
        let here = given.filter(|plan| plan.is_plausible(self.spec, baseline.0.total));
        let everywhere = self.ranks.min(usize::from(here.is_some()))? == 1;
        Ok(match (here, given) {
            (Some(plan), _) if everywhere => Ok(plan),
            (Some(_), _) => Err(Some(DiscardReason::OtherRank)),
            (None, Some(_)) => Err(Some(DiscardReason::Implausible)),
            (None, None) => Err(None),
        })
    }

    pub(crate) fn log_discarded(&mut self, discarded: &DiscardedPlan) {
        let fields = vec![
            ("reason", "cached".to_owned()),
            ("outcome", "discarded".to_owned()),
            ("because", discarded.reason.to_string()),
        ];
        self.warn(Phase::Skip, fields);
    }

    /// An earlier probe and today's meters: no probe, no second build, but the same proof.
    fn planned(
        &mut self,
        plan: &Plan,
        baseline: &Baseline,
    ) -> Result<Result<Found<T::State>, DiscardedPlan>, ProfileError> {
        let measured = plan.probe.on_top_of(&baseline.0);
        let sized = self.size(&measured, &baseline.0, plan.cuts)?;
        if sized.pages < self.spec.request_pages() {
            let reason = match sized.bound {
                Bound::OtherRank => DiscardReason::OtherRank,
                _ => DiscardReason::TooSmall,
            };
            return Ok(Err(reason.into()));
        }
        let drift = plan.drift(sized.pages);
        let fields = vec![
            ("reason", "cached".to_owned()),
            ("tokens", self.spec.kv(sized.pages).capacity_tokens().to_string()),
            ("drift", format!("{drift:.4}")),
        ];
        match drift.abs() > DRIFT_WARNING {
            true => self.warn(Phase::Skip, fields),
            false => self.log(Phase::Skip, fields),
        }
        self.log_size(&sized);
        let scratch = Scratch::Fixed(measured.scratch_bytes);
        let mut attempts = Vec::new();
        let outcome = or_exhausted(self.attempt(sized.pages, scratch, &mut attempts))?;
        Ok(match outcome {
            Ok(validated) => {
                let error = self.plan_error(&measured, &attempts);
                let step_times = validated.step_times().cloned();
                Ok(Found {
                    validated,
                    // One that promised too much memory is not handed on: the next start measures.
                    plan: (error <= DRIFT_WARNING).then(|| Plan {
                        step_times,
                        ..plan.clone()
                    }),
                    search: Search {
                        bound: sized.bound,
                        origin: Origin::Cached { drift },
                        discarded_plan: None,
                        probe: Some((measured, plan.probe.scenarios.clone(), sized.arithmetic)),
                        plan_error: Some(error),
                        attempts,
                    },
                })
            }
            Err(exhausted) => Err(exhausted.discarded(attempts)),
        })
    }

    /// Relative difference of the peak that was just measured to the one the plan predicts: the size itself comes from the
    /// plan, and cannot tell whether that is right.
    fn plan_error(&mut self, measured: &Measured, attempts: &[Attempt]) -> f64 {
        let kv = self.target.meters().by_component.get(Component::Kv);
        let predicted = [
            measured.peak_reserved.saturating_sub(measured.kv_bytes),
            kv,
            self.spec.margins.canary_bytes,
        ];
        let predicted = predicted
            .iter()
            .fold(0_u64, |sum, &bytes| sum.saturating_add(bytes));
        let peak = attempts.last().map_or(0, |attempt| attempt.peak_reserved);
        let error = (peak as f64 - predicted as f64) / predicted.max(1) as f64;
        if error.abs() > DRIFT_WARNING {
            let fields = vec![
                ("reason", "cached".to_owned()),
                ("outcome", "inexact".to_owned()),
                ("planned_peak", predicted.to_string()),
                ("peak_reserved", peak.to_string()),
                ("error", format!("{error:.4}")),
            ];
            self.warn(Phase::Validate, fields);
        }
        error
    }

    /// The whole search: probe, compute, then attempts until one is proved.
    fn search(&mut self) -> Result<Found<T::State>, ProfileError> {
        let (probed, mut sized) = self.measure()?;
        let scratch = Scratch::Fixed(probed.measured.scratch_bytes);
        let mut attempts = Vec::new();
        let mut last = None;
        let mut cuts = 0;
        // The device itself gave less than it promises: so it will at the next start.
        let mut lasting = true;
        while attempts.len() < MAX_ATTEMPTS as usize {
            let pages = shrunk(sized.pages, cuts);
            if pages < self.spec.request_pages() {
                break;
            }
            match or_exhausted(self.attempt(pages, scratch, &mut attempts))? {
                Ok(validated) => {
                    let (measured, scenarios) = (probed.measured.clone(), probed.scenarios.clone());
                    let step_times = validated.step_times().cloned();
                    return Ok(Found {
                        validated,
                        plan: Some(Plan {
                            probe: probed,
                            kv_pages: pages,
                            cuts: if lasting { cuts } else { 0 },
                            step_times,
                        }),
                        search: Search {
                            bound: sized.bound,
                            origin: Origin::Measured,
                            discarded_plan: None,
                            probe: Some((measured, scenarios, sized.arithmetic)),
                            plan_error: None,
                            attempts,
                        },
                    });
                }
                Err(exhausted) => {
                    cuts += 1;
                    let planned_peers = sized.arithmetic.peers;
                    // So says the rank that ran out, and all cut the same size.
                    let own = (exhausted.oom().ok()).is_none_or(|oom| oom.meters.peers() <= planned_peers);
                    lasting &= self.ranks.min(usize::from(own))? == 1;
                    let again = self.size_again(&probed.measured, exhausted.oom().ok())?;
                    if again.pages < shrunk(sized.pages, cuts) {
                        self.log_size(&again);
                        (sized, cuts, lasting) = (again, 0, true);
                    }
                    last = Some((pages, exhausted));
                }
            }
        }
        let Some((pages, exhausted)) = last else {
            self.own_shortage(sized.arithmetic.pages)?;
            let evidence = Evidence::of(self.spec, &probed, &sized.arithmetic);
            return Err(self.refuse(Cause::ContextDoesNotFit, &evidence));
        };
        let evidence = Evidence {
            oom: Some(exhausted.oom()?),
            last_tokens: Some(self.spec.kv(pages).capacity_tokens()),
            ..Evidence::of(self.spec, &probed, &sized.arithmetic)
        };
        let attempts = attempts.len();
        Err(self.refuse(Cause::Exhausted { attempts }, &evidence))
    }

    /// One request of full length fits no more on some rank: the error of the others names it.
    fn own_shortage(&mut self, own_pages: usize) -> Result<(), ProfileError> {
        let short = own_pages < self.spec.request_pages();
        let verdict = match short {
            true => Verdict::OutOfMemory,
            false => Verdict::Passed,
        };
        let (_, rank) = self.ranks.worst(verdict)?;
        match short {
            true => Ok(()),
            false => Err(ProfileError::OtherRank {
                rank,
                phase: Phase::Compute,
            }),
        }
    }
}
