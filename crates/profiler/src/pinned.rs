//! A size that somebody chose.

use plimsoll_core::{Oom, Scratch};

use crate::attempt::{Found, Search, Validated};
use crate::probe::{Baseline, Sized};
use crate::profiler::Profiler;
use crate::refusal::Evidence;
use crate::stress::or_exhausted;
use crate::{Attempt, Bound, Cause, DiscardedPlan, KvSize, Origin, Phase, ProfileError, Target};

/// What came of a pinned size so far.
struct Tried {
    attempts: Vec<Attempt>,
    discarded_plan: Option<DiscardedPlan>,
    /// The last allocation that failed here.
    oom: Option<Oom>,
}

impl<T: Target> Profiler<'_, T> {
    /// A size somebody chose: no probe, no rebuild, but the same proof.
    pub(crate) fn pinned(
        &mut self,
        baseline: &Baseline,
        bound: Bound,
    ) -> Result<Found<T::State>, ProfileError> {
        // Ranks may differ in the bytes of a page.
        let pages = self.ranks.min(self.spec.pinned_pages().unwrap_or(0))?;
        let asked_tokens = match self.spec.size {
            KvSize::Tokens(tokens) => tokens,
            _ => self.spec.kv(pages).capacity_tokens(),
        };
        let fields = vec![
            ("reason", "pinned".to_owned()),
            ("bound", bound.name().to_owned()),
            ("tokens", asked_tokens.to_string()),
        ];
        self.log(Phase::Skip, fields);
        let too_small = pages < self.spec.request_pages();
        let bytes = u128::from(self.spec.page_bytes()) * pages as u128;
        let conceivable = usize::from(bytes <= u128::from(baseline.0.total));
        let mut tried = None;
        if self.ranks.min(conceivable)? == 1 && !too_small {
            match self.pinned_attempts(baseline, pages, bound)? {
                Ok(found) => return Ok(found),
                Err(failed) => tried = Some(failed),
            }
        }
        // What would fit only a measurement can say.
        let (probed, Sized { arithmetic, .. }) = self.measure()?;
        let fits = self.ranks.min(arithmetic.full_pages())?;
        if let Some(failed) = &mut tried
            && pages <= fits
        {
            // An arena takes more while it grows than one of the final size.
            let fixed = Scratch::Fixed(probed.measured.scratch_bytes);
            match or_exhausted(self.attempt(pages, fixed, &mut failed.attempts))? {
                Ok(validated) => {
                    let attempts = std::mem::take(&mut failed.attempts);
                    return Ok(found(validated, bound, attempts, failed.discarded_plan.take()));
                }
                Err(exhausted) => failed.oom = Some(exhausted.oom()?.clone()),
            }
        }
        let evidence = Evidence {
            oom: tried.as_ref().and_then(|failed| failed.oom.as_ref()),
            ..Evidence::of(self.spec, &probed, &arithmetic)
        };
        let largest_tokens = self.spec.kv(fits).capacity_tokens();
        let cause = match too_small {
            true => Cause::PinnedTooSmall {
                bound,
                asked_tokens,
                largest_tokens,
            },
            false => Cause::PinnedTooLarge {
                bound,
                asked_tokens,
                largest_tokens,
            },
        };
        Err(self.refuse(cause, &evidence))
    }

    /// With the arena of the plan, if there is one; or else, or if that does not do, with one that grows and settles.
    fn pinned_attempts(
        &mut self,
        baseline: &Baseline,
        pages: usize,
        bound: Bound,
    ) -> Result<Result<Found<T::State>, Tried>, ProfileError> {
        let discarded_plan = match self.usable_plan(baseline)? {
            Ok(plan) => {
                let scratch = Scratch::Fixed(plan.probe.measured.scratch_bytes);
                let mut attempts = Vec::new();
                match or_exhausted(self.attempt(pages, scratch, &mut attempts))? {
                    Ok(validated) => return Ok(Ok(found(validated, bound, attempts, None))),
                    Err(exhausted) => Some(exhausted.discarded(attempts)),
                }
            }
            Err(reason) => reason.map(DiscardedPlan::from),
        };
        if let Some(discarded) = &discarded_plan {
            self.log_discarded(discarded);
        }
        let mut attempts = Vec::new();
        Ok(
            match or_exhausted(self.attempt(pages, Scratch::Growable, &mut attempts))? {
                Ok(validated) => Ok(found(validated, bound, attempts, discarded_plan)),
                Err(exhausted) => Err(Tried {
                    attempts,
                    discarded_plan,
                    oom: exhausted.oom().ok().cloned(),
                }),
            },
        )
    }
}

fn found<S>(
    validated: Validated<S>,
    bound: Bound,
    attempts: Vec<Attempt>,
    discarded_plan: Option<DiscardedPlan>,
) -> Found<S> {
    Found {
        validated,
        plan: None,
        search: Search {
            bound,
            origin: Origin::Pinned,
            discarded_plan,
            probe: None,
            plan_error: None,
            attempts,
        },
    }
}
