//! What would fit where something does not: one computation, for measured and for predicted numbers.
//!
//! What steps of other limits take is not guessed: a [`Source`] measures or predicts it. A limit is searched by
//! interpolation, until the value that fits and one that does not are 1/64 apart; sizes, contexts and devices are computed
//! to the page and the byte.

use std::ops::Range;

use plimsoll_core::{KvConfig, Meters, StepLimits};

use crate::setting::readable;
use crate::{Arithmetic, Knob, KvSize, Margins, Measured, MemFraction, ProfileError, ProfileSpec, Setting};

/// Values of one limit that are measured at most.
const TRIES: usize = 10;

/// No device has so many bytes.
const LARGEST_DEVICE: u64 = 1 << 50;

/// By what the limits are divided where the whole step does not fit; the last leaves one token of one row.
pub(crate) const PARTS: [usize; 6] = [1, 4, 16, 64, 256, usize::MAX];

/// A device, or the formulas of one.
pub(crate) trait Source {
    /// What the worst steps of `spec` take; `None` where they do not fit or cannot be tried.
    fn measure(&mut self, spec: &ProfileSpec) -> Result<Option<Measured>, ProfileError>;

    /// Whether that KV cache with its states, an arena of so many bytes and the canary can really be allocated.
    fn gives(&mut self, kv: KvConfig, scratch_bytes: u64) -> Result<bool, ProfileError>;
}

/// What advice is computed from.
pub(crate) struct Basis {
    /// Limits that were measured: those of the spec, or a part of them where the whole step does not fit.
    pub(crate) limits: StepLimits,
    /// What their worst steps took.
    pub(crate) measured: Measured,
    /// What an allocator gave back meanwhile and would keep on a larger device.
    pub(crate) given_back: u64,
    /// Without any state.
    pub(crate) meters: Meters,
    /// An allocation failed for which the meters promised room.
    pub(crate) broke_promise: bool,
    /// Most pages that are not known to be too many: larger sizes failed, or other ranks cannot hold them.
    pub(crate) at_most: usize,
}

/// What to change.
#[derive(Default)]
pub(crate) struct Advice {
    /// Any one of these.
    pub(crate) knobs: Vec<Knob>,
    /// Bytes that would be enough, where the device has not so many.
    pub(crate) out_of_reach: Option<u64>,
    /// The largest pin that fits with every margin, in pages.
    pub(crate) largest_pages: usize,
}

/// Computes what would fit instead of `spec`.
pub(crate) fn advise(
    source: &mut dyn Source,
    spec: &ProfileSpec,
    basis: Basis,
) -> Result<Advice, ProfileError> {
    let mut advisor = Advisor { source, spec, basis };
    let pin = advisor.largest_pin(spec.limits)?;
    let mut advice = Advice {
        largest_pages: pin.as_ref().map_or(0, |pin| pin.pages),
        ..Advice::default()
    };
    // Where the device does not give what it promises, only a size can be advised.
    let honest = !advisor.basis.broke_promise && pin.as_ref().is_none_or(|pin| !pin.is_short);
    if honest {
        advisor.other_sizes(&mut advice)?;
    }
    let is_size = |knob: &Knob| {
        !matches!(
            knob.settings[0],
            Setting::DeviceMemory(_) | Setting::MemFraction(_)
        )
    };
    if let Some(pin) = pin.filter(|_| !advice.knobs.iter().any(is_size)) {
        let at = usize::from(spec.size == KvSize::Auto).min(advice.knobs.len());
        advice.knobs.insert(at, pin.knob);
    }
    if honest && (spec.size == KvSize::Auto || advice.largest_pages < spec.request_pages()) {
        advisor.smaller_limits(&mut advice.knobs)?;
    }
    let is_device = |knob: &Knob| matches!(knob.settings[0], Setting::DeviceMemory(_));
    if advice.knobs.iter().all(is_device) {
        advice.knobs.extend(advisor.smaller_step()?);
    }
    Ok(advice)
}

struct Advisor<'a> {
    source: &'a mut dyn Source,
    spec: &'a ProfileSpec,
    basis: Basis,
}

/// A pinned size that fits.
struct Pin {
    knob: Knob,
    pages: usize,
    /// Less than the meters promise: the device does not give it.
    is_short: bool,
}

impl Advisor<'_> {
    /// A device, a fraction or a context for which the same steps fit.
    fn other_sizes(&mut self, advice: &mut Advice) -> Result<(), ProfileError> {
        let spec = self.spec;
        let also = self.enough_for_a_request();
        match (self.enough(&spec.with(&also)), spec.largest_device) {
            (Some(bytes), Some(most)) if bytes > most => advice.out_of_reach = Some(bytes),
            (Some(bytes), _) => {
                let settings = [&[Setting::DeviceMemory(bytes)], &also[..]].concat();
                advice.knobs.push(Knob::new(settings, "a larger budget"));
            }
            (None, _) => {}
        }
        if self.basis.limits != spec.limits {
            return Ok(());
        }
        let thousandths = (1..=1000).map(|part| f64::from(part) / 1000.0);
        let mut larger =
            thousandths.filter(|&part| spec.size == KvSize::Auto && part > spec.mem_fraction.get());
        if let Some(fraction) = larger.find(|&part| self.fits(&[Setting::MemFraction(part)])) {
            let effect = "more of what is left for the KV cache";
            advice
                .knobs
                .push(Knob::new([Setting::MemFraction(fraction)], effect));
        }
        if !also.is_empty() && self.fits(&also) {
            advice.knobs.push(Knob::new(also, "one request of full length"));
        }
        let context = self.shorter_context()?;
        advice
            .knobs
            .extend(context.map(|len| Knob::new([Setting::MaxModelLen(len)], "shorter requests")));
        Ok(())
    }

    /// The longest context for which the size is enough that there is. Steps of shorter requests take no more; only an
    /// allocator that keeps what is freed may keep more of them.
    fn shorter_context(&mut self) -> Result<Option<usize>, ProfileError> {
        let arithmetic = Arithmetic::new(self.spec, &self.basis.measured, &self.basis.meters);
        let mut pages = self.spec.pinned_pages().unwrap_or(arithmetic.pages);
        loop {
            let len = self.longest_request(self.spec, pages);
            let settings = [Setting::MaxModelLen(len)];
            if len == 0 || len == self.spec.limits.max_model_len || !self.fits(&settings) {
                return Ok(None);
            }
            if self.basis.measured.fragmentation() == 0
                || self.spare_with(&settings)?.is_some_and(|spare| spare >= 0)
            {
                return Ok(Some(len));
            }
            pages = pages / 4 * 3;
        }
    }

    /// Fewer tokens or fewer requests in a step, or both if neither alone is enough.
    fn smaller_limits(&mut self, knobs: &mut Vec<Knob>) -> Result<(), ProfileError> {
        let StepLimits {
            max_num_batched_tokens: batched,
            max_num_seqs: seqs,
            ..
        } = self.spec.limits;
        let tokens = |value: usize| vec![Setting::MaxNumBatchedTokens(value)];
        let (least, spec) = (self.spec.least_batched_tokens(seqs), self.spec);
        let fewer_tokens = self.largest(least..batched, &tokens)?;
        let fewer_seqs = self.largest(1..seqs, &|value| vec![Setting::MaxNumSeqs(value)])?;
        if fewer_tokens.is_none() && fewer_seqs.is_none() {
            let both = |value: usize| {
                let tokens = (batched as u128 * value as u128 / seqs as u128) as usize;
                vec![
                    Setting::MaxNumSeqs(value),
                    Setting::MaxNumBatchedTokens(tokens.max(spec.least_batched_tokens(value))),
                ]
            };
            let both = self.largest(1..seqs, &both)?;
            knobs.extend(
                both.map(|settings| Knob::new(settings, "fewer requests at once, in smaller chunks")),
            );
        }
        knobs.extend(fewer_tokens.map(|settings| Knob::new(settings, "prompts in smaller chunks")));
        knobs.extend(fewer_seqs.map(|settings| Knob::new(settings, "fewer requests at once")));
        Ok(())
    }

    /// The largest of `values` that fits, within 1/64, if the first one does; the end of the range does not.
    fn largest(
        &mut self,
        values: Range<usize>,
        settings: &dyn Fn(usize) -> Vec<Setting>,
    ) -> Result<Option<Vec<Setting>>, ProfileError> {
        let also = self.enough_for_a_request();
        let settings = |value: usize| [settings(value), also.clone()].concat();
        let Range {
            start: mut low,
            end: mut high,
        } = values;
        if low >= high {
            return Ok(None);
        }
        let Some(mut spare) = self.spare_with(&settings(low))?.filter(|&spare| spare >= 0) else {
            return Ok(None);
        };
        let mut lack = self.spare_with(&settings(high))?;
        let mut found = false;
        for round in 0..TRIES {
            let close = (low / 64).max(1);
            if high - low <= close {
                break;
            }
            let step = match lack {
                // Is that the largest already?
                _ if found && round % 2 == 1 => close,
                Some(lack) if round % 2 == 0 => {
                    ((high - low) as f64 * (spare as f64 / (spare as f64 - lack as f64))) as usize
                }
                _ => (high - low) / 2,
            };
            let value = (low + step).clamp(low + 1, high - 1);
            let result = self.spare_with(&settings(value))?;
            found = result.is_some_and(|spare| spare >= 0);
            match result {
                Some(enough) if found => (low, spare) = (value, enough),
                _ => (high, lack) = (value, result),
            }
        }
        Ok(Some(settings(low)))
    }

    /// A part of the step, and a size that fits beside it.
    fn smaller_step(&mut self) -> Result<Option<Knob>, ProfileError> {
        for &divisor in &PARTS[1..] {
            let limits = self.spec.part(divisor).limits;
            if let Some(pin) = self.largest_pin(limits)? {
                return Ok(Some(pin.knob));
            }
        }
        Ok(None)
    }

    /// The largest size that fits with every margin beside steps of `limits`, with a context that it holds. What the meters
    /// promise is tried; a device that does not give it is asked how much it gives, within 1/64.
    fn largest_pin(&mut self, limits: StepLimits) -> Result<Option<Pin>, ProfileError> {
        let spec = ProfileSpec {
            limits,
            size: KvSize::Tokens(limits.max_model_len),
            ..self.spec.clone()
        };
        let Some(measured) = self.measured(&spec)? else {
            return Ok(None);
        };
        let full = Arithmetic::new(&spec, &measured, &self.basis.meters).full_pages();
        let full = full.min(self.basis.at_most);
        let (mut low, mut high) = (0, full.saturating_add(1));
        let mut pages = high - 1;
        while high - low > (low / 64).max(1) {
            match self.source.gives(spec.kv(pages), measured.scratch_bytes)? {
                true => low = pages,
                false => high = pages,
            }
            pages = usize::midpoint(low, high);
        }
        let pin = self.pin(low);
        let pages = spec.with(&[pin]).pinned_pages().unwrap_or(low);
        let len = self.longest_request(&spec, pages);
        if len == 0 {
            return Ok(None);
        }
        let mut settings = vec![pin];
        let mut effect = match low < full || self.basis.broke_promise {
            true => "what the device really gives",
            false => "the largest size that fits with every margin",
        };
        if len < limits.max_model_len {
            settings.push(Setting::MaxModelLen(len));
            effect = "the largest size that fits with every margin, and shorter requests";
        }
        if limits != self.spec.limits {
            settings.push(Setting::MaxNumBatchedTokens(limits.max_num_batched_tokens));
            settings.push(Setting::MaxNumSeqs(limits.max_num_seqs));
            effect = "a smaller step, and what is left";
        }
        Ok(Some(Pin {
            knob: Knob::new(settings, effect),
            pages,
            is_short: low < full,
        }))
    }

    /// Bytes of the smallest device on which `spec` fits, in a number that people can read.
    fn enough(&self, spec: &ProfileSpec) -> Option<u64> {
        let now = self.basis.meters.total;
        let scaled = spec.margins == Margins::scaled_to(now);
        let measured = self.on_a_larger_device(&spec.limits);
        let fits = |total: u64| {
            let mut spec = spec.clone();
            if scaled {
                spec.margins = Margins::scaled_to(total);
            }
            let peers = self.basis.meters.peers();
            let free = total
                .saturating_sub(peers)
                .saturating_sub(self.basis.meters.reserved);
            let meters = Meters {
                total,
                free,
                ..self.basis.meters
            };
            // An allocator that rounds may round other sizes up by more.
            let rounding = match measured.fragmentation() {
                0 => 0,
                bytes => i128::from(spec.margins.fragmentation_buffer(bytes)),
            };
            spare(&spec, &measured, &meters) >= rounding
        };
        if fits(now) {
            return None;
        }
        let (mut short, mut enough) = (now, now.saturating_mul(2).max(1));
        while !fits(enough) {
            short = enough;
            enough = enough.checked_mul(2).filter(|&bytes| bytes <= LARGEST_DEVICE)?;
        }
        while enough - short > 1 {
            let middle = u64::midpoint(short, enough);
            match fits(middle) {
                true => enough = middle,
                false => short = middle,
            }
        }
        Some(readable(enough))
    }

    /// What was measured, as on a device on which all steps of `limits` fit. What only a part of them took grows at most in
    /// proportion.
    fn on_a_larger_device(&self, limits: &StepLimits) -> Measured {
        let Basis {
            limits: at,
            measured,
            given_back,
            meters,
            ..
        } = &self.basis;
        let non_kv = measured.peak_reserved.saturating_sub(measured.kv_bytes);
        let fixed = non_kv.min(meters.reserved);
        let mut steps = u128::from(non_kv - fixed + given_back);
        let mut fragmentation = measured.fragmentation() + given_back;
        if limits != at {
            // Steps of another size may leave an arena behind where these did not.
            let (grown, kept) = (steps + u128::from(measured.scratch_bytes), fragmentation);
            let in_proportion = |bytes: u128| {
                let scaled = |to: usize, from: usize| (bytes * to as u128).div_ceil(from as u128);
                scaled(limits.max_num_batched_tokens, at.max_num_batched_tokens)
                    .max(scaled(limits.max_num_seqs, at.max_num_seqs))
            };
            steps = in_proportion(grown);
            fragmentation = u64::try_from(in_proportion(kept.into())).unwrap_or(u64::MAX);
        }
        let steps = u64::try_from(steps).unwrap_or(u64::MAX);
        let peak_reserved = fixed.saturating_add(steps).saturating_add(measured.kv_bytes);
        Measured {
            peak_reserved,
            peak_used: peak_reserved.saturating_sub(fragmentation),
            ..measured.clone()
        }
    }

    /// Whether it fits with `settings`, under which the steps are no larger than those that were measured.
    fn fits(&self, settings: &[Setting]) -> bool {
        spare(
            &self.spec.with(settings),
            &self.basis.measured,
            &self.basis.meters,
        ) >= 0
    }

    /// [`spare`] with steps as they are under `settings`; `None` if not even they fit, or the size that follows from them.
    fn spare_with(&mut self, settings: &[Setting]) -> Result<Option<i128>, ProfileError> {
        let spec = self.spec.with(settings);
        let Some(measured) = self.measured(&spec)? else {
            return Ok(None);
        };
        let spare = spare(&spec, &measured, &self.basis.meters);
        if spare >= 0 {
            let arithmetic = Arithmetic::new(&spec, &measured, &self.basis.meters);
            let pages = spec.pinned_pages().unwrap_or(arithmetic.pages);
            let given = self.source.gives(spec.kv(pages), measured.scratch_bytes)?;
            return Ok(Some(spare).filter(|_| given));
        }
        Ok(Some(spare))
    }

    fn measured(&mut self, spec: &ProfileSpec) -> Result<Option<Measured>, ProfileError> {
        if spec.limits == self.basis.limits {
            return Ok(Some(self.basis.measured.clone()));
        }
        // Those of the spec itself were tried.
        if spec.limits == self.spec.limits {
            return Ok(None);
        }
        self.source.measure(spec)
    }

    /// Tokens of the longest request that `pages` pages hold alone, at most as long as allowed now.
    fn longest_request(&self, spec: &ProfileSpec, pages: usize) -> usize {
        let longest = spec.kv(pages).longest_request(spec.limits.max_num_batched_tokens);
        longest.min(spec.limits.max_model_len)
    }

    /// What a pin that is too small for one request must become, whatever else changes.
    fn enough_for_a_request(&self) -> Vec<Setting> {
        let request = self.spec.request_pages();
        let too_small = self.spec.pinned_pages().is_some_and(|pages| pages < request);
        // A pin in tokens is held in every group.
        let whole_blocks = request.next_multiple_of(self.spec.groups.pages_per_block());
        too_small.then(|| self.pin(whole_blocks)).into_iter().collect()
    }

    /// At most so many pages, as the size is pinned now, or in tokens.
    fn pin(&self, pages: usize) -> Setting {
        match self.spec.size {
            KvSize::Bytes(_) => Setting::KvCacheMemoryBytes(self.spec.page_bytes() * pages as u64),
            KvSize::Auto | KvSize::Tokens(_) => {
                Setting::MaxTotalTokenNum(self.spec.kv(pages).capacity_tokens())
            }
        }
    }
}

/// Bytes that a start of `spec` leaves on a device with these meters if its steps take what was measured; below 0 where it
/// does not fit.
fn spare(spec: &ProfileSpec, measured: &Measured, meters: &Meters) -> i128 {
    let sum = Arithmetic::new(spec, measured, meters);
    let bytes = |pages: usize| i128::from(sum.page_bytes).saturating_mul(pages as i128);
    let request = bytes(spec.request_pages());
    match spec.pinned_pages() {
        Some(pages) if bytes(pages) < request => bytes(pages) - request,
        Some(pages) => sum.room - bytes(pages),
        None => {
            let margins = i128::from(sum.canary) + i128::from(sum.fragmentation_buffer);
            let beside_probe = sum.room + margins - bytes(spec.probe_kv().num_pages);
            let room = sum.room - (request as f64 / sum.mem_fraction) as i128;
            let room = match sum.fitting_pages >= spec.request_pages() {
                true => room.max(0),
                false => room.min(-1),
            };
            beside_probe.min(room)
        }
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
        let (seqs, batched) = (limits.max_num_seqs, limits.max_num_batched_tokens);
        spec.limits.max_num_batched_tokens = (batched / divisor).max(spec.least_batched_tokens(seqs));
        spec
    }
}
