//! Flags with which what is predicted not to fit is predicted to fit: each is tried by predicting again.

use std::ops::Range;

use super::{Footprint, Predicted};
use crate::setting::readable;
use crate::{Cause, Knob, KvSize, Margins, ProfileSpec, Setting};

/// No device has so many bytes.
const LARGEST_DEVICE: u64 = 1 << 50;

impl Predicted<'_> {
    /// What to change, any one of them, and a size of the device that would be enough if it had so many bytes.
    pub(super) fn knobs(&self, cause: &mut Cause) -> (Vec<Knob>, Option<u64>) {
        let mut knobs = Vec::new();
        match cause {
            Cause::PinnedTooLarge { largest_tokens, .. } => {
                let most = self.spec.pinned_blocks().unwrap_or(0);
                let most = most.min(self.arithmetic.full_blocks().saturating_mul(2));
                let pin = largest(1..most, |blocks| self.fits(&[self.pin(blocks)]));
                *largest_tokens = pin.map_or(0, |blocks| self.spec.kv(blocks).capacity_tokens());
                knobs.extend(pin.map(|blocks| {
                    Knob::new([self.pin(blocks)], "the largest size that fits with every margin")
                }));
            }
            Cause::PinnedTooSmall { asked_tokens, .. } => {
                let enough = [self.pin(self.spec.request_blocks())];
                let shorter = [Setting::MaxModelLen(*asked_tokens)];
                if self.fits(&enough) {
                    knobs.push(Knob::new(enough, "one request of full length"));
                }
                if *asked_tokens > 0 && self.fits(&shorter) {
                    knobs.push(Knob::new(shorter, "shorter requests"));
                }
                return (knobs, None);
            }
            _ => knobs.extend(self.smaller()),
        }
        let needed = self.larger_device();
        match (needed, self.spec.largest_device) {
            (Some(bytes), Some(most)) if bytes > most => (knobs, Some(bytes)),
            (Some(bytes), _) => {
                knobs.insert(0, Knob::new([Setting::DeviceMemory(bytes)], "a larger budget"));
                (knobs, None)
            }
            (None, _) => (knobs, None),
        }
    }

    /// Smaller limits, and more of what is left.
    fn smaller(&self) -> Vec<Knob> {
        let limits = self.spec.limits;
        let (batched, seqs) = (limits.max_num_batched_tokens, limits.max_num_seqs);
        let thousandth = |part: usize| Setting::MemFraction(part as f64 / 1000.0);
        let now = (self.spec.mem_fraction.get() * 1000.0) as usize;
        let fraction = (now + 1..=1000).find(|&part| self.fits(&[thousandth(part)]));
        let one = |values: Range<usize>, setting: fn(usize) -> Setting, effect| {
            let value = largest(values, |value| self.fits(&[setting(value)]))?;
            Some(Knob::new([setting(value)], effect))
        };
        let mut knobs: Vec<Knob> = [
            fraction.map(|part| Knob::new([thousandth(part)], "more of what is left for the KV cache")),
            one(1..limits.max_model_len, Setting::MaxModelLen, "shorter requests"),
            // A step holds one token of each request.
            one(
                seqs..batched,
                Setting::MaxNumBatchedTokens,
                "prompts in smaller chunks",
            ),
            one(1..seqs, Setting::MaxNumSeqs, "fewer requests at once"),
        ]
        .into_iter()
        .flatten()
        .collect();
        if knobs.is_empty() {
            let both = |value: usize| {
                let tokens = (batched as u128 * value as u128 / seqs as u128) as usize;
                [
                    Setting::MaxNumSeqs(value),
                    Setting::MaxNumBatchedTokens(tokens.max(value)),
                ]
            };
            let value = largest(1..seqs, |value| self.fits(&both(value)));
            knobs.extend(
                value.map(|value| Knob::new(both(value), "fewer requests at once, in smaller chunks")),
            );
        }
        knobs
    }

    /// Bytes of a device on which it fits.
    fn larger_device(&self) -> Option<u64> {
        let scaled = self.spec.margins == Margins::scaled_to(self.idle.total);
        let fits = |total: u64| {
            let mut spec = self.spec.clone();
            if scaled {
                spec.margins = Margins::scaled_to(total);
            }
            fits(&spec, &*self.footprint.on_device_of(total))
        };
        let (mut short, mut enough) = (self.idle.total, self.idle.total.saturating_mul(2).max(1));
        while !fits(enough) {
            short = enough;
            enough = enough.checked_mul(2).filter(|&bytes| bytes <= LARGEST_DEVICE)?;
        }
        while enough - short > 1 {
            let middle = short + (enough - short) / 2;
            if fits(middle) {
                enough = middle
            } else {
                short = middle
            }
        }
        Some(readable(enough))
    }

    fn fits(&self, settings: &[Setting]) -> bool {
        let spec = self.spec.with(settings);
        fits(&spec, &*self.footprint.for_limits(&spec.limits))
    }

    /// As the size is pinned now.
    fn pin(&self, blocks: usize) -> Setting {
        match self.spec.size {
            KvSize::Bytes(_) => Setting::KvCacheMemoryBytes(self.spec.block_bytes() * blocks as u64),
            KvSize::Auto | KvSize::Tokens(_) => {
                Setting::MaxTotalTokenNum(self.spec.kv(blocks).capacity_tokens())
            }
        }
    }
}

fn fits(spec: &ProfileSpec, footprint: &dyn Footprint) -> bool {
    Predicted::new(spec, footprint).size().is_ok()
}

/// The largest of `values` that fits, if the first one does.
fn largest(values: Range<usize>, fits: impl Fn(usize) -> bool) -> Option<usize> {
    let Range { start, end } = values;
    if start >= end || !fits(start) {
        return None;
    }
    let (mut low, mut high) = (start, end);
    while high - low > 1 {
        let middle = low + (high - low) / 2;
        if fits(middle) { low = middle } else { high = middle }
    }
    Some(low)
}
