//! What would fit where something does not: computed from what was measured, then tried on the device itself.

use std::ops::Range;

use plimsoll_core::{Oom, Scratch, StateConfig, StepLimits};

use crate::arithmetic::Predictor;
use crate::diagnostic::Knob;
use crate::profiler::Profiler;
use crate::setting::readable;
use crate::stress::or_exhausted;
use crate::{
    Arithmetic, Cause, Diagnostic, KvSize, Measured, MemFraction, Observer, Phase, PhaseRecord, Probed,
    ProfileError, ProfileSpec, Progress, Setting, Target,
};

/// Tries of one flag at most; each runs the worst steps.
const TRIES: usize = 4;

/// Sizes of the KV cache that are tried at most, each an eighth smaller than the one before until one fits: down to a 200th.
const SIZES: usize = 40;

/// By what the limits are divided where the probe does not fit: first the whole step, with no more KV than it writes; the
/// last leaves one token of one row.
pub(crate) const PARTS: [usize; 6] = [1, 4, 16, 64, 256, usize::MAX];

/// What a failed profile knows.
pub(crate) struct Evidence<'a> {
    /// What was measured, and under which spec.
    pub(crate) probe: Option<(&'a Probed, &'a ProfileSpec)>,
    pub(crate) arithmetic: Option<&'a Arithmetic>,
    pub(crate) oom: Option<&'a Oom>,
    pub(crate) last_tokens: Option<usize>,
}

impl<'a> Evidence<'a> {
    /// A whole probe, and nothing that failed.
    pub(crate) fn of(spec: &'a ProfileSpec, probed: &'a Probed, arithmetic: &'a Arithmetic) -> Self {
        Self {
            probe: Some((probed, spec)),
            arithmetic: Some(arithmetic),
            oom: None,
            last_tokens: None,
        }
    }
}

/// What to change.
#[derive(Default)]
struct Advice {
    knobs: Vec<Knob>,
    out_of_reach: Option<u64>,
}

impl Advice {
    #[allow(clippy::unnecessary_wraps, reason = "the end of functions that may fail")]
    fn of(knobs: Vec<Knob>) -> Result<Self, ProfileError> {
        Ok(Self {
            knobs,
            out_of_reach: None,
        })
    }
}

/// How a start with other flags would end.
enum Trial {
    Starts,
    /// Its worst step ran, but left too little for KV.
    Short(Box<Predictor>),
    Exhausted,
}

/// Lets progress through and keeps the phases of a trial to itself.
struct Trying<'a>(&'a mut dyn Observer);

impl Observer for Trying<'_> {
    fn phase(&mut self, _record: &PhaseRecord) {}

    fn progress(&mut self, progress: Progress) {
        self.0.progress(progress);
    }
}

/// What advice is computed from.
struct Basis<'a> {
    predictor: Predictor,
    /// Steps of the whole size were measured, not only a part.
    whole: Option<&'a Measured>,
    oom: Option<&'a Oom>,
}

impl<T: Target> Profiler<'_, T> {
    /// The error that ends this profile, with what would not end in one.
    pub(crate) fn refuse(&mut self, mut cause: Cause, evidence: &Evidence<'_>) -> ProfileError {
        let basis = evidence
            .probe
            .filter(|_| self.spec.gives_advice)
            .map(|(probed, spec)| Basis {
                predictor: self.predictor(probed, spec),
                whole: evidence.arithmetic.map(|_| &probed.measured),
                oom: evidence.oom,
            });
        let advice = match (basis, evidence.arithmetic) {
            (Some(basis), Some(arithmetic)) => self.advice(&mut cause, &basis, arithmetic, evidence),
            (Some(basis), None) => self.smaller_steps(&basis),
            (None, _) => Ok(Advice::default()),
        };
        let Advice { knobs, out_of_reach } = match advice {
            Ok(advice) => advice,
            Err(fatal) => return fatal,
        };
        let meters = self.target.meters();
        let blocks = evidence.arithmetic.map(|arithmetic| arithmetic.blocks);
        ProfileError::DoesNotFit(Box::new(Diagnostic {
            initial_tokens: blocks.map(|blocks| self.spec.kv(blocks).capacity_tokens()),
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
        basis: &Basis<'_>,
        arithmetic: &Arithmetic,
        evidence: &Evidence<'_>,
    ) -> Result<Advice, ProfileError> {
        let request = self.spec.request_blocks();
        let full = match cause {
            // Of all ranks.
            Cause::PinnedTooLarge { largest_tokens, .. } | Cause::PinnedTooSmall { largest_tokens, .. } => {
                self.spec.kv_of_tokens(*largest_tokens).num_pages
            }
            _ => arithmetic.full_blocks(),
        };
        match cause {
            Cause::ProbeDoesNotFit => self.smaller_steps(basis),
            Cause::ContextDoesNotFit => self.shorter_requests(basis, arithmetic),
            Cause::Exhausted { .. } => {
                let failed = self
                    .spec
                    .kv_of_tokens(evidence.last_tokens.unwrap_or(0))
                    .num_pages;
                Advice::of(self.what_is_given(basis, failed)?)
            }
            Cause::PinnedTooLarge {
                asked_tokens,
                largest_tokens,
                ..
            } => {
                let asked = self.spec.kv_of_tokens(*asked_tokens).num_pages;
                let advice = match asked > full {
                    true => self.smaller_pin(basis, full)?,
                    false => Advice::of(self.what_is_given(basis, asked)?)?,
                };
                if self.ranks.count() == 1 {
                    let largest = advice.knobs.first().and_then(|knob| self.pinned_tokens(knob));
                    *largest_tokens = largest.unwrap_or(0);
                } else if asked <= full {
                    // Only all ranks together could try it.
                    let given = basis.predictor.blocks(self.spec, self.usable(basis.oom));
                    let largest = given.min(asked.saturating_sub(1));
                    *largest_tokens = self.spec.kv(largest).capacity_tokens();
                }
                Ok(advice)
            }
            Cause::PinnedTooSmall { asked_tokens, .. } => {
                let asked = *asked_tokens;
                if request > full {
                    return self.smaller_pin(basis, full);
                }
                if !self.gives(basis, request)? {
                    return Advice::of(self.what_is_given(basis, request)?);
                }
                let mut knobs = vec![Knob::new([self.pin(request)], "one request of full length")];
                if asked > 0 {
                    knobs.push(Knob::new([Setting::MaxModelLen(asked)], "shorter requests"));
                }
                Advice::of(knobs)
            }
        }
    }

    /// The worst step fits, but leaves too little for one request.
    fn shorter_requests(
        &mut self,
        basis: &Basis<'_>,
        arithmetic: &Arithmetic,
    ) -> Result<Advice, ProfileError> {
        if arithmetic.blocks > 0 && !self.gives(basis, arithmetic.blocks)? {
            return Advice::of(self.what_is_given(basis, arithmetic.blocks)?);
        }
        let mut advice = self.larger_device(basis);
        let thousandth = |part: u32| f64::from(part) / 1000.0;
        let enough = |&fraction: &f64| {
            fraction > arithmetic.mem_fraction && arithmetic.blocks_of(fraction) >= self.spec.request_blocks()
        };
        if let Some(fraction) = (1..=1000).map(thousandth).find(enough)
            && self.gives(basis, arithmetic.blocks_of(fraction))?
        {
            let effect = "more of what is left for the KV cache";
            advice
                .knobs
                .push(Knob::new([Setting::MemFraction(fraction)], effect));
        }
        let context = self.shorter_context(basis, arithmetic.blocks)?;
        advice
            .knobs
            .extend(context.map(|settings| Knob::new([settings], "shorter requests")));
        advice.knobs.extend(self.smaller_limits(basis, &[])?);
        Ok(advice)
    }

    /// A context for which `blocks` are enough. An allocator that keeps what is freed may keep more of other steps.
    fn shorter_context(
        &mut self,
        basis: &Basis<'_>,
        mut blocks: usize,
    ) -> Result<Option<Setting>, ProfileError> {
        let exact = basis.whole.is_some_and(|measured| measured.fragmentation() == 0);
        for _ in 0..TRIES {
            if blocks == 0 {
                break;
            }
            let context = Setting::MaxModelLen(self.spec.kv(blocks).capacity_tokens());
            if exact || matches!(self.trial(&[context], None)?, Trial::Starts) {
                return Ok(Some(context));
            }
            blocks = blocks / 4 * 3;
        }
        Ok(None)
    }

    /// Not even the probe fits.
    fn smaller_steps(&mut self, basis: &Basis<'_>) -> Result<Advice, ProfileError> {
        let mut advice = self.larger_device(basis);
        let also = self.enough_for_a_request();
        advice.knobs.extend(self.smaller_limits(basis, &also)?);
        let limits = |knob: &Knob| !matches!(knob.settings[..], [Setting::DeviceMemory(_), ..]);
        if !advice.knobs.iter().any(limits) {
            let blocks = basis.predictor.blocks(self.spec, self.usable(basis.oom));
            advice.knobs.extend(self.what_is_given(basis, blocks)?);
        }
        Ok(advice)
    }

    /// Flags for a pinned size above the `full` blocks that fit.
    fn smaller_pin(&mut self, basis: &Basis<'_>, full: usize) -> Result<Advice, ProfileError> {
        if full > 0 && !self.gives(basis, full)? {
            return Advice::of(self.what_is_given(basis, full)?);
        }
        let request = self.spec.request_blocks();
        let pin = match full {
            0 => None,
            full if full >= request => Some(Knob::new(
                [self.pin(full)],
                "the largest size that fits with every margin",
            )),
            full => Some(self.short_pin(full)),
        };
        let Advice { knobs: larger, .. } = self.larger_device(basis);
        let mut knobs: Vec<Knob> = pin.into_iter().chain(larger).collect();
        if full < request {
            let enough = [self.pin(request)];
            knobs.extend(self.smaller_limits(basis, &enough)?);
        }
        Advice::of(knobs)
    }

    /// A size of the KV cache that a device gives which gives less than it promises: at most `blocks` beside the whole step,
    /// or what fits beside a part of it. Nothing can be computed there, so it is tried.
    fn what_is_given(&mut self, basis: &Basis<'_>, blocks: usize) -> Result<Vec<Knob>, ProfileError> {
        if self.ranks.count() > 1 {
            return Ok(Vec::new());
        }
        if let Some(knob) = self.largest_pin_that_starts(basis.whole, blocks, &[])? {
            return Ok(vec![knob]);
        }
        let usable = self.usable(basis.oom);
        for &divisor in &PARTS[1..] {
            let part = self.spec.part(divisor);
            let limits = [
                Setting::MaxNumBatchedTokens(part.limits.max_num_batched_tokens),
                Setting::MaxNumSeqs(part.limits.max_num_seqs),
            ];
            let blocks = basis.predictor.blocks(&part, usable);
            if let Some(knob) = self.largest_pin_that_starts(None, blocks, &limits)? {
                return Ok(vec![knob]);
            }
        }
        Ok(Vec::new())
    }

    /// The largest pin that starts, within a 64th, `also` set; the search begins at `blocks`.
    fn largest_pin_that_starts(
        &mut self,
        whole: Option<&Measured>,
        mut blocks: usize,
        also: &[Setting],
    ) -> Result<Option<Knob>, ProfileError> {
        let (mut fits, mut fails): (Option<(usize, Knob)>, Option<usize>) = (None, None);
        for _ in 0..SIZES {
            if blocks == 0 {
                break;
            }
            let mut knob = match blocks < self.spec.request_blocks() {
                true => self.short_pin(blocks),
                false => Knob::new([self.pin(blocks)], "what the device really gives"),
            };
            if !also.is_empty() {
                knob.settings.extend(also);
                "a smaller step, and what is left".clone_into(&mut knob.effect);
            }
            match self.trial(&knob.settings, whole)? {
                Trial::Starts => fits = Some((blocks, knob)),
                Trial::Short(_) | Trial::Exhausted => fails = Some(blocks),
            }
            blocks = match (&fits, fails) {
                (None, _) => blocks - blocks.div_ceil(8),
                (Some((fit, _)), None) => fit + fit.div_ceil(8),
                (Some((fit, _)), Some(fail)) if fail - fit <= fit.div_ceil(64) => break,
                (Some((fit, _)), Some(fail)) => usize::midpoint(*fit, fail),
            };
        }
        Ok(fits.map(|(_, knob)| knob))
    }

    /// A pin, and requests short enough for it.
    fn short_pin(&self, blocks: usize) -> Knob {
        let tokens = self.spec.kv(blocks).capacity_tokens();
        let settings = [
            self.pin(blocks),
            Setting::MaxModelLen(tokens.min(self.spec.limits.max_model_len)),
        ];
        Knob::new(settings, "the largest size that fits, and shorter requests")
    }

    /// Smaller steps that start, `also` set: fewer tokens, or fewer requests, or both if neither alone is enough.
    fn smaller_limits(&mut self, basis: &Basis<'_>, also: &[Setting]) -> Result<Vec<Knob>, ProfileError> {
        let StepLimits {
            max_num_batched_tokens: batched,
            max_num_seqs: seqs,
            ..
        } = self.spec.limits;
        let predictor = &basis.predictor;
        let tokens = |value| vec![Setting::MaxNumBatchedTokens(value)];
        // A step holds one token of each request.
        let tokens = self.largest_that_starts(predictor, seqs..batched, also, &tokens)?;
        let rows = |value| vec![Setting::MaxNumSeqs(value)];
        let rows = self.largest_that_starts(predictor, 1..seqs, also, &rows)?;
        let knob = |effect| move |settings: Vec<Setting>| Knob::new(settings, effect);
        let mut knobs: Vec<Knob> = tokens
            .map(knob("prompts in smaller chunks"))
            .into_iter()
            .collect();
        knobs.extend(rows.map(knob("fewer requests at once")));
        if knobs.is_empty() {
            let both = |value: usize| {
                let tokens = (batched as u128 * value as u128 / seqs as u128) as usize;
                vec![
                    Setting::MaxNumSeqs(value),
                    Setting::MaxNumBatchedTokens(tokens.max(value)),
                ]
            };
            let both = self.largest_that_starts(predictor, 1..seqs, also, &both)?;
            knobs.extend(both.map(knob("fewer requests at once, in smaller chunks")));
        }
        Ok(knobs)
    }

    /// The settings of the largest of `values` that is predicted to start and then does.
    fn largest_that_starts(
        &mut self,
        predictor: &Predictor,
        mut values: Range<usize>,
        also: &[Setting],
        settings: &dyn Fn(usize) -> Vec<Setting>,
    ) -> Result<Option<Vec<Setting>>, ProfileError> {
        let total = self.target.meters().total;
        let mut predictor = predictor.clone();
        for _ in 0..TRIES {
            let all = |value: usize| [&settings(value), also].concat();
            let set = |spec: &mut ProfileSpec, value: usize| *spec = spec.with(&all(value));
            let Some(value) = predictor.largest(self.spec, total, values.clone(), &set) else {
                return Ok(None);
            };
            match self.trial(&all(value), None)? {
                Trial::Starts => return Ok(Some(all(value))),
                Trial::Short(measured) => {
                    predictor = *measured;
                    values.end = value;
                }
                // Far from what was predicted.
                Trial::Exhausted => values.end = values.start + (value - values.start) / 2,
            }
        }
        Ok(None)
    }

    /// A larger device, where one could be had and the size is what was wrong.
    fn larger_device(&self, basis: &Basis<'_>) -> Advice {
        let also = self.enough_for_a_request();
        let total = self.target.meters().total;
        let needed = readable(basis.predictor.device_for(&self.spec.with(&also)));
        let mut advice = Advice::default();
        // Neither a device that gives less than it promises nor a number beyond all devices is helped.
        if needed <= total || needed == u64::MAX || basis.oom.is_some_and(gave_less_than_promised) {
            return advice;
        }
        match self.spec.largest_device {
            Some(largest) if needed > largest => advice.out_of_reach = Some(needed),
            _ => {
                let settings = [&[Setting::DeviceMemory(needed)], &also[..]].concat();
                advice.knobs.push(Knob::new(settings, "a larger budget"));
            }
        }
        advice
    }

    /// Whether a start with `settings` comes to a proof, as far as can be said without the whole of it; nothing is left.
    /// `whole`: what its worst steps were measured to need.
    fn trial(&mut self, settings: &[Setting], whole: Option<&Measured>) -> Result<Trial, ProfileError> {
        // A step is everyone's, and the others do not know that this rank tries something.
        if self.ranks.count() > 1 {
            return Ok(Trial::Starts);
        }
        let spec = self.spec.with(settings);
        let mut observer = Trying(self.observer);
        let mut trying = Profiler {
            target: self.target,
            spec: &spec,
            ranks: self.ranks,
            observer: &mut observer,
        };
        let trial = trying.start_and_drop(whole)?;
        let flags: Vec<_> = settings.iter().map(Setting::to_string).collect();
        let outcome = match trial {
            Trial::Starts => "fits",
            Trial::Short(_) | Trial::Exhausted => "does_not_fit",
        };
        let fields = vec![("flags", flags.join(",")), ("outcome", outcome.to_owned())];
        self.log(Phase::Advise, fields);
        Ok(trial)
    }

    fn start_and_drop(&mut self, whole: Option<&Measured>) -> Result<Trial, ProfileError> {
        let request = self.spec.request_blocks();
        let starts = match (self.spec.pinned_blocks(), whole) {
            (Some(blocks), _) if blocks < request => false,
            (Some(blocks), Some(measured)) => self.builds(blocks, measured.scratch_bytes)?,
            (Some(blocks), None) => {
                match or_exhausted(self.attempt(blocks, Scratch::Growable, &mut Vec::new()))? {
                    Ok(validated) => {
                        self.tear_down(Phase::Advise, validated.into_state())?;
                        true
                    }
                    Err(_) => false,
                }
            }
            (None, _) => {
                let Ok(probed) = or_exhausted(self.probe(self.spec, self.spec.probe_kv()))? else {
                    return Ok(Trial::Exhausted);
                };
                let arithmetic = Arithmetic::new(self.spec, &probed.measured, &self.target.meters());
                if arithmetic.blocks < request {
                    return Ok(Trial::Short(Box::new(self.predictor(&probed, self.spec))));
                }
                self.builds(arithmetic.blocks, probed.measured.scratch_bytes)?
            }
        };
        Ok(if starts { Trial::Starts } else { Trial::Exhausted })
    }

    /// Whether the device really has room for `blocks` beside the steps that were measured.
    fn gives(&mut self, basis: &Basis<'_>, blocks: usize) -> Result<bool, ProfileError> {
        match basis.whole {
            Some(measured) => self.builds(blocks, measured.scratch_bytes),
            None => Ok(false),
        }
    }

    /// Whether a state of that size can be built with its canary, which is all the memory that its steps will ever take.
    fn builds(&mut self, blocks: usize, scratch_bytes: u64) -> Result<bool, ProfileError> {
        if self.ranks.count() > 1 {
            return Ok(true);
        }
        let config = StateConfig {
            kv: self.spec.kv(blocks),
            scratch: Scratch::Fixed(scratch_bytes),
            canary_bytes: self.spec.margins.canary_bytes,
        };
        match or_exhausted(self.build(Phase::Advise, &config))? {
            Ok(state) => self.tear_down(Phase::Advise, state).map(|()| true),
            Err(_) => Ok(false),
        }
    }

    fn predictor(&self, probed: &Probed, spec: &ProfileSpec) -> Predictor {
        Predictor::new(spec, &probed.measured, &probed.scenarios, &self.target.meters())
    }

    /// Bytes that this process can have, as far as the device can be believed.
    fn usable(&self, oom: Option<&Oom>) -> u64 {
        let meters = self.target.meters();
        let promised = meters.total.saturating_sub(meters.peers());
        match oom {
            Some(oom) if gave_less_than_promised(oom) => {
                promised.min(oom.meters.reserved.saturating_add(oom.requested))
            }
            _ => promised,
        }
    }

    /// As the size is pinned now, or in tokens.
    fn pin(&self, blocks: usize) -> Setting {
        match self.spec.size {
            KvSize::Bytes(_) => Setting::KvCacheMemoryBytes(self.spec.block_bytes() * blocks as u64),
            KvSize::Auto | KvSize::Tokens(_) => {
                Setting::MaxTotalTokenNum(self.spec.kv(blocks).capacity_tokens())
            }
        }
    }

    /// What a pin that is too small for one request must become, whatever else changes.
    fn enough_for_a_request(&self) -> Vec<Setting> {
        let request = self.spec.request_blocks();
        let too_small = self.spec.pinned_blocks().is_some_and(|blocks| blocks < request);
        too_small.then(|| self.pin(request)).into_iter().collect()
    }

    /// Tokens of the pin in a knob that has one.
    fn pinned_tokens(&self, knob: &Knob) -> Option<usize> {
        let pin = |setting: &&Setting| {
            matches!(
                setting,
                Setting::MaxTotalTokenNum(_) | Setting::KvCacheMemoryBytes(_)
            )
        };
        let setting = knob.settings.iter().find(pin)?;
        let blocks = self.spec.with(&[*setting]).pinned_blocks()?;
        Some(self.spec.kv(blocks).capacity_tokens())
    }
}

impl ProfileSpec {
    /// This spec with other flags. `--device-memory` is none of its own: that is the device's.
    #[must_use]
    pub fn with(&self, settings: &[Setting]) -> Self {
        let mut spec = self.clone();
        for setting in settings {
            match *setting {
                Setting::DeviceMemory(_) => {}
                Setting::MemFraction(fraction) => {
                    spec.mem_fraction = MemFraction::new(fraction).unwrap_or(spec.mem_fraction);
                }
                Setting::MaxModelLen(len) => spec.limits.max_model_len = len,
                Setting::MaxNumBatchedTokens(tokens) => spec.limits.max_num_batched_tokens = tokens,
                Setting::MaxNumSeqs(seqs) => spec.limits.max_num_seqs = seqs,
                Setting::MaxTotalTokenNum(tokens) => spec.size = KvSize::Tokens(tokens),
                Setting::KvCacheMemoryBytes(bytes) => spec.size = KvSize::Bytes(bytes),
            }
        }
        spec
    }

    /// The same with steps of that part of the size.
    pub(crate) fn part(&self, divisor: usize) -> Self {
        let mut spec = self.clone();
        let limits = &mut spec.limits;
        limits.max_num_seqs = (limits.max_num_seqs / divisor).max(1);
        limits.max_num_batched_tokens = (limits.max_num_batched_tokens / divisor).max(limits.max_num_seqs);
        spec
    }
}

/// Whether an allocation failed although the sum said that there was room.
fn gave_less_than_promised(oom: &Oom) -> bool {
    let asked = oom.meters.reserved.saturating_add(oom.requested);
    asked.saturating_add(oom.meters.peers()) <= oom.meters.total
}
