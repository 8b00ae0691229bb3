use std::time::Instant;

use plimsoll_core::{Component, KvConfig, Meters, Oom, Scratch, StateConfig};

use crate::arithmetic::{MAX_ATTEMPTS, shrunk};
use crate::diagnostic::{Evidence, given};
use crate::report::{Findings, Memory};
use crate::scenario::{LeftOut, ScenarioKind};
use crate::stress::{Exhausted, Stopped, Stress};
use crate::{
    Arithmetic, Attempt, Bound, Cause, DRIFT_WARNING, DiscardReason, DiscardedPlan, KvSize, Measured,
    Observer, Origin, Outcome, Phase, PhaseRecord, Plan, Probed, ProfileError, ProfileSpec, Proved,
    ProvedParts, Report, ScenarioResult, Target,
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
    let started = Instant::now();
    spec.check()?;
    let mut profiler = Profiler {
        target,
        spec,
        observer,
    };
    let baseline = profiler.baseline();
    let found = match spec.size {
        KvSize::Auto => profiler.automatic(&baseline)?,
        KvSize::Tokens(tokens) => {
            profiler.pinned(spec.block_size.blocks_for(tokens), tokens, Bound::PinnedTokens)?
        }
        KvSize::Bytes(bytes) => {
            let blocks = usize::try_from(bytes / spec.block_bytes()).unwrap_or(usize::MAX);
            let tokens = blocks.saturating_mul(spec.block_size.tokens());
            profiler.pinned(blocks, tokens, Bound::PinnedBytes)?
        }
    };
    let Validated {
        state,
        scratch_bytes,
        left_out,
    } = found.validated;
    let findings = Findings {
        baseline: Memory::from(&baseline),
        ready: Memory::from(&profiler.target.meters()),
        probe: found.probe,
        attempts: found.attempts,
        left_out,
        kv_blocks: found.blocks,
        bound: found.bound,
        origin: found.origin,
        discarded_plan: found.discarded_plan,
        seconds: started.elapsed().as_secs_f64(),
    };
    let report = Report::new(spec, findings);
    let config = StateConfig {
        kv: spec.kv(found.blocks),
        scratch: Scratch::Fixed(scratch_bytes),
        canary_bytes: 0,
    };
    Ok(Proved {
        parts: ProvedParts {
            state,
            config,
            limits: spec.limits,
            report,
        },
        plan: found.plan,
    })
}

pub(crate) struct Profiler<'a, T> {
    pub(crate) target: &'a mut T,
    pub(crate) spec: &'a ProfileSpec,
    pub(crate) observer: &'a mut dyn Observer,
}

/// A state whose size passed; only [`Profiler::attempt`] makes it.
struct Validated<S> {
    state: S,
    scratch_bytes: u64,
    left_out: Vec<LeftOut>,
}

/// The end of a successful search.
struct Found<S> {
    validated: Validated<S>,
    blocks: usize,
    bound: Bound,
    origin: Origin,
    discarded_plan: Option<DiscardedPlan>,
    probe: Option<(Measured, Vec<ScenarioResult>, Arithmetic)>,
    plan: Option<Plan>,
    attempts: Vec<Attempt>,
}

impl<T: Target> Profiler<'_, T> {
    fn log(&mut self, phase: Phase, fields: Vec<(&'static str, String)>) {
        self.observer.phase(&PhaseRecord {
            phase,
            fields,
            warning: false,
        });
    }

    fn warn(&mut self, phase: Phase, fields: Vec<(&'static str, String)>) {
        self.observer.phase(&PhaseRecord {
            phase,
            fields,
            warning: true,
        });
    }

    fn baseline(&mut self) -> Meters {
        self.target.trim();
        self.target.reset_high_water();
        let meters = self.target.meters();
        let fields = vec![
            ("total", meters.total.to_string()),
            ("free", meters.free.to_string()),
            ("weights", meters.by_component.get(Component::Weights).to_string()),
            ("runtime", meters.by_component.get(Component::Runtime).to_string()),
            ("ours", meters.reserved.to_string()),
            ("peers", meters.peers().to_string()),
        ];
        self.log(Phase::Baseline, fields);
        meters
    }

    /// From the plan if there is one that holds, or else measured.
    fn automatic(&mut self, baseline: &Meters) -> Result<Found<T::State>, ProfileError> {
        let mut discarded_plan = None;
        if let Some(plan) = &self.spec.plan {
            match self.planned(plan, baseline)? {
                Ok(found) => return Ok(found),
                Err(discarded) => {
                    let fields = vec![
                        ("reason", "cached".to_owned()),
                        ("outcome", "discarded".to_owned()),
                        ("because", discarded.reason.to_string()),
                    ];
                    self.warn(Phase::Skip, fields);
                    discarded_plan = Some(discarded);
                }
            }
        }
        let found = self.measured()?;
        Ok(Found {
            discarded_plan,
            ..found
        })
    }

    /// An earlier probe and today's meters: no probe, no second build, but the same proof.
    fn planned(
        &mut self,
        plan: &Plan,
        baseline: &Meters,
    ) -> Result<Result<Found<T::State>, DiscardedPlan>, ProfileError> {
        let discarded = |reason| {
            Ok(Err(DiscardedPlan {
                reason,
                attempt: None,
            }))
        };
        if !plan.is_plausible(self.spec, baseline.total) {
            return discarded(DiscardReason::Implausible);
        }
        let measured = plan.probe.on_top_of(baseline);
        let arithmetic = Arithmetic::new(self.spec, &measured, baseline);
        let blocks = shrunk(arithmetic.blocks, plan.cuts);
        let drift = plan.drift(blocks);
        let fields = vec![
            ("reason", "cached".to_owned()),
            ("tokens", self.spec.kv(blocks).capacity_tokens().to_string()),
            ("drift", format!("{drift:.4}")),
        ];
        if drift.abs() > DRIFT_WARNING {
            self.warn(Phase::Skip, fields);
        } else {
            self.log(Phase::Skip, fields);
        }
        if blocks < self.spec.request_blocks() {
            return discarded(DiscardReason::TooSmall);
        }
        self.log_arithmetic(&arithmetic);
        let (attempt, outcome) = self.attempt(blocks, Scratch::Fixed(measured.scratch_bytes))?;
        Ok(match outcome {
            Ok(validated) => Ok(Found {
                validated,
                blocks,
                bound: arithmetic.bound,
                origin: Origin::Cached { drift },
                discarded_plan: None,
                probe: Some((measured, plan.probe.scenarios.clone(), arithmetic)),
                plan: Some(plan.clone()),
                attempts: vec![attempt],
            }),
            Err(exhausted) => Err(DiscardedPlan {
                reason: exhausted.discards(),
                attempt: Some(attempt),
            }),
        })
    }

    /// The whole search: probe, compute, then attempts until one is proved.
    fn measured(&mut self) -> Result<Found<T::State>, ProfileError> {
        let (probed, arithmetic) = self.probe_and_compute(self.spec)?;
        let scratch = Scratch::Fixed(probed.measured.scratch_bytes);
        let mut attempts = Vec::new();
        let mut last = None;
        for retry in 0..MAX_ATTEMPTS {
            let blocks = shrunk(arithmetic.blocks, retry);
            if blocks < self.spec.request_blocks() {
                break;
            }
            let (attempt, outcome) = self.attempt(blocks, scratch)?;
            attempts.push(attempt);
            match outcome {
                Ok(validated) => {
                    let (measured, scenarios) = (probed.measured.clone(), probed.scenarios.clone());
                    return Ok(Found {
                        validated,
                        blocks,
                        bound: arithmetic.bound,
                        origin: Origin::Measured,
                        discarded_plan: None,
                        probe: Some((measured, scenarios, arithmetic)),
                        plan: Some(Plan {
                            probe: probed,
                            kv_blocks: blocks,
                            cuts: retry,
                        }),
                        attempts,
                    });
                }
                Err(exhausted) => last = Some((blocks, exhausted)),
            }
        }
        let cause = match attempts.len() {
            0 => Cause::ContextDoesNotFit,
            attempts => Cause::Exhausted { attempts },
        };
        let evidence = Evidence {
            spec: self.spec,
            probe: Some((&probed.measured, &probed.scenarios, self.spec.limits)),
            arithmetic: Some(&arithmetic),
            oom: last.as_ref().map(|(_, exhausted)| &exhausted.oom),
            last_tokens: last
                .as_ref()
                .map(|(blocks, _)| self.spec.kv(*blocks).capacity_tokens()),
            meters: self.target.meters(),
        };
        Err(evidence.diagnose(cause))
    }

    /// A size somebody chose: no probe, no rebuild, but the same proof.
    fn pinned(
        &mut self,
        blocks: usize,
        asked_tokens: usize,
        bound: Bound,
    ) -> Result<Found<T::State>, ProfileError> {
        let fields = vec![
            ("reason", "pinned".to_owned()),
            ("bound", bound.name().to_owned()),
            ("tokens", asked_tokens.to_string()),
        ];
        self.log(Phase::Skip, fields);
        let too_small = blocks < self.spec.request_blocks();
        let bytes = u128::from(self.spec.block_bytes()) * blocks as u128;
        let conceivable = bytes <= u128::from(self.target.meters().total);
        let mut last = None;
        if !too_small && conceivable {
            let (attempt, outcome) = self.attempt(blocks, Scratch::Growable)?;
            match outcome {
                Ok(validated) => {
                    return Ok(Found {
                        validated,
                        blocks,
                        bound,
                        origin: Origin::Pinned,
                        discarded_plan: None,
                        probe: None,
                        plan: None,
                        attempts: vec![attempt],
                    });
                }
                Err(exhausted) => last = Some(exhausted.oom),
            }
        }
        // Refused: say what would fit, which only a measurement can.
        let (probed, arithmetic) = self.probe_and_compute(self.spec)?;
        let evidence = Evidence {
            spec: self.spec,
            probe: Some((&probed.measured, &probed.scenarios, self.spec.limits)),
            arithmetic: Some(&arithmetic),
            oom: last.as_ref(),
            last_tokens: None,
            meters: self.target.meters(),
        };
        let largest = match &last {
            // It should have fitted, so the device gives less than it promises.
            Some(oom) if arithmetic.full_blocks() >= blocks => arithmetic.blocks_within(given(oom)),
            _ => arithmetic.full_blocks(),
        };
        let largest_tokens = self.spec.kv(largest).capacity_tokens();
        Err(evidence.diagnose(match too_small {
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
        }))
    }

    fn probe_and_compute(&mut self, spec: &ProfileSpec) -> Result<(Probed, Arithmetic), ProfileError> {
        let probed = match self.probe(spec, spec.probe_kv())? {
            Ok(probed) => probed,
            Err(exhausted) => return Err(self.probe_failed(&exhausted)),
        };
        let arithmetic = Arithmetic::new(spec, &probed.measured, &self.target.meters());
        self.log_arithmetic(&arithmetic);
        Ok((probed, arithmetic))
    }

    fn log_arithmetic(&mut self, arithmetic: &Arithmetic) {
        let fields = vec![
            ("total", arithmetic.total.to_string()),
            ("non_kv", arithmetic.non_kv.to_string()),
            ("peers", arithmetic.peers.to_string()),
            ("canary", arithmetic.canary.to_string()),
            (
                "fragmentation_buffer",
                arithmetic.fragmentation_buffer.to_string(),
            ),
            ("room", arithmetic.room.to_string()),
            ("mem_fraction", arithmetic.mem_fraction.to_string()),
            ("bytes_per_block", arithmetic.block_bytes.to_string()),
            (
                "tokens",
                self.spec.kv(arithmetic.blocks).capacity_tokens().to_string(),
            ),
            ("bound", arithmetic.bound.name().to_owned()),
            ("clamped", arithmetic.clamped.to_string()),
        ];
        self.log(Phase::Compute, fields);
    }

    /// The worst steps of `spec` with a KV cache of `kv` and an arena that grows.
    fn probe(&mut self, spec: &ProfileSpec, kv: KvConfig) -> Result<Result<Probed, Exhausted>, ProfileError> {
        let started = Instant::now();
        let before = self.target.meters();
        self.target.reset_high_water();
        let config = StateConfig {
            kv,
            scratch: Scratch::Growable,
            canary_bytes: 0,
        };
        let mut state = match self.target.build(&config) {
            Ok(state) => state,
            Err(oom) => {
                self.check_nothing_left(Phase::Probe, &before)?;
                return Ok(Err(Exhausted {
                    phase: Phase::Probe,
                    scenario: None,
                    oom,
                }));
            }
        };
        let stress = self.stress(Phase::Probe, spec, kv, &mut state);
        let meters = self.target.meters();
        self.tear_down(Phase::Probe, state)?;
        let stress = match stress {
            Ok(stress) => stress,
            Err(Stopped::Exhausted(exhausted, _)) => return Ok(Err(exhausted)),
            Err(Stopped::Broken(error)) => return Err(error),
        };
        let measured = Measured {
            peak_reserved: meters.reserved_high,
            peak_used: meters.used_high,
            kv_bytes: meters.by_component.get(Component::Kv),
            kv_tokens: kv.capacity_tokens(),
            scratch_bytes: stress.scratch_bytes,
        };
        let fields = vec![
            ("kv_tokens", measured.kv_tokens.to_string()),
            ("kv_bytes", measured.kv_bytes.to_string()),
            ("peak_reserved", measured.peak_reserved.to_string()),
            ("peak_used", measured.peak_used.to_string()),
            ("scratch", measured.scratch_bytes.to_string()),
            ("scenarios", stress.results.len().to_string()),
            ("left_out", stress.left_out.len().to_string()),
            ("seconds", seconds(started)),
        ];
        self.log(Phase::Probe, fields);
        Ok(Ok(Probed {
            measured,
            scenarios: stress.results,
            weights: meters.by_component.get(Component::Weights),
            runtime: meters.by_component.get(Component::Runtime),
        }))
    }

    /// The probe did not fit: measures a part of the step, so that the diagnostic can compute what the whole needs.
    fn probe_failed(&mut self, exhausted: &Exhausted) -> ProfileError {
        let mut part = None;
        for divisor in PROBE_PARTS {
            let mut spec = self.spec.clone();
            spec.limits.max_num_batched_tokens = (spec.limits.max_num_batched_tokens / divisor).max(1);
            spec.limits.max_num_seqs = (spec.limits.max_num_seqs / divisor).max(1);
            let kv = spec.kv(spec.block_size.blocks_for(spec.written_tokens()));
            match self.probe(&spec, kv) {
                Ok(Ok(probed)) => {
                    part = Some((probed, spec.limits));
                    break;
                }
                Ok(Err(_)) => {}
                Err(error) => return error,
            }
        }
        let evidence = Evidence {
            spec: self.spec,
            probe: part
                .as_ref()
                .map(|(probed, limits)| (&probed.measured, &*probed.scenarios, *limits)),
            arithmetic: None,
            oom: Some(&exhausted.oom),
            last_tokens: None,
            meters: self.target.meters(),
        };
        evidence.diagnose(Cause::ProbeDoesNotFit)
    }

    /// Rebuild and validate at one size. The outer error is fatal, the inner one asks for a smaller size.
    #[allow(clippy::type_complexity, reason = "the two kinds of failure are the point")]
    fn attempt(
        &mut self,
        blocks: usize,
        scratch: Scratch,
    ) -> Result<(Attempt, Result<Validated<T::State>, Exhausted>), ProfileError> {
        let started = Instant::now();
        let kv = self.spec.kv(blocks);
        let mut attempt = Attempt {
            kv_tokens: kv.capacity_tokens(),
            outcome: Outcome::Proved,
            scenarios: Vec::new(),
            peak_reserved: 0,
            seconds: 0.0,
        };
        let outcome = self.rebuild_and_validate(kv, scratch, &mut attempt)?;
        attempt.peak_reserved = self.target.meters().reserved_high;
        attempt.seconds = started.elapsed().as_secs_f64();
        if let Err(Exhausted { phase, scenario, oom }) = &outcome {
            attempt.outcome = Outcome::out_of_memory(*phase, *scenario, oom);
        }
        Ok((attempt, outcome))
    }

    fn rebuild_and_validate(
        &mut self,
        kv: KvConfig,
        scratch: Scratch,
        attempt: &mut Attempt,
    ) -> Result<Result<Validated<T::State>, Exhausted>, ProfileError> {
        let before = self.target.meters();
        self.target.reset_high_water();
        let config = StateConfig {
            kv,
            scratch,
            canary_bytes: self.spec.margins.canary_bytes,
        };
        let started = Instant::now();
        let mut state = match self.target.build(&config) {
            Ok(state) => state,
            Err(oom) => {
                self.check_nothing_left(Phase::Rebuild, &before)?;
                self.failed(Phase::Rebuild, None, kv, &oom);
                return Ok(Err(Exhausted {
                    phase: Phase::Rebuild,
                    scenario: None,
                    oom,
                }));
            }
        };
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
        let started = Instant::now();
        let mut stress = self.stress(Phase::Validate, self.spec, kv, &mut state);
        if scratch == Scratch::Growable
            && let Ok(first) = &stress
        {
            // A growing arena settles in the first pass; the proof is a pass in which it no longer grows.
            let settled = first.scratch_bytes;
            stress = self.stress(Phase::Validate, self.spec, kv, &mut state);
            if let Ok(second) = &mut stress {
                second.scratch_bytes = second.scratch_bytes.max(settled);
            }
        }
        let stress = match stress {
            Ok(stress) => stress,
            Err(stopped) => {
                self.tear_down(Phase::Validate, state)?;
                return match stopped {
                    Stopped::Exhausted(exhausted, results) => {
                        attempt.scenarios = results;
                        self.failed(Phase::Validate, exhausted.scenario, kv, &exhausted.oom);
                        Ok(Err(exhausted))
                    }
                    Stopped::Broken(error) => Err(error),
                };
            }
        };
        let held = self.target.meters();
        self.target.release_canary(&mut state);
        let after = self.target.meters();
        let returned = i128::from(held.reserved) - i128::from(after.reserved);
        let expected = self.spec.margins.canary_bytes;
        if returned < i128::from(expected) {
            return Err(ProfileError::TeardownLeak {
                phase: Phase::Validate,
                expected,
                returned,
            });
        }
        let fields = vec![
            ("outcome", "proved".to_owned()),
            ("tokens", kv.capacity_tokens().to_string()),
            ("scenarios", stress.results.len().to_string()),
            ("peak_reserved", held.reserved_high.to_string()),
            ("free", after.free.to_string()),
            ("seconds", seconds(started)),
        ];
        self.log(Phase::Validate, fields);
        attempt.scenarios = stress.results;
        let Stress {
            scratch_bytes,
            left_out,
            ..
        } = stress;
        let scratch_bytes = match scratch {
            Scratch::Fixed(bytes) => bytes,
            Scratch::Growable => scratch_bytes,
        };
        Ok(Ok(Validated {
            state,
            scratch_bytes,
            left_out,
        }))
    }

    fn failed(&mut self, phase: Phase, scenario: Option<ScenarioKind>, kv: KvConfig, oom: &Oom) {
        let mut fields = vec![
            ("outcome", "out_of_memory".to_owned()),
            ("tokens", kv.capacity_tokens().to_string()),
            ("requested", oom.requested.to_string()),
            ("component", oom.component.to_string()),
            ("free", oom.meters.free.to_string()),
            ("peers", oom.meters.peers().to_string()),
        ];
        fields.extend(scenario.map(|kind| ("scenario", kind.to_string())));
        self.log(phase, fields);
    }
}

/// By what the limits are divided when the whole probe does not fit.
const PROBE_PARTS: [usize; 3] = [4, 16, 64];

fn seconds(since: Instant) -> String {
    format!("{:.3}", since.elapsed().as_secs_f64())
}
