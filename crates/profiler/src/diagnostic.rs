use std::fmt;

use plimsoll_core::{Oom, human_bytes};

use crate::setting::readable;
use crate::{Bound, Setting};

/// Why nothing fits, and what would.
#[derive(Clone, Debug)]
pub struct Diagnostic {
    /// What went wrong.
    pub cause: Cause,
    /// Tokens of the first target, where one was computed.
    pub initial_tokens: Option<usize>,
    /// Tokens of the last target tried.
    pub last_tokens: Option<usize>,
    /// Highest `reserved` of the probe.
    pub measured_peak: Option<u64>,
    /// Capacity of the device.
    pub total: u64,
    /// Held while a size is proved.
    pub canary: u64,
    /// Other processes.
    pub peers: u64,
    /// The allocation that failed.
    pub oom: Option<Oom>,
    /// What to change, any one of them.
    pub knobs: Vec<Knob>,
    /// A size of the device that would be enough, although it has not so many bytes.
    pub out_of_reach: Option<u64>,
}

/// What went wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Cause {
    /// The worst step does not fit even with the probe's small KV cache.
    ProbeDoesNotFit,
    /// The room for KV is less than one request of full length needs.
    ContextDoesNotFit,
    /// What was computed to fit did not, nor did smaller sizes.
    Exhausted {
        /// Sizes that were tried.
        attempts: usize,
    },
    /// The pinned size does not fit.
    PinnedTooLarge {
        /// How it was pinned.
        bound: Bound,
        /// Its tokens.
        asked_tokens: usize,
        /// The most that was computed to fit.
        largest_tokens: usize,
    },
    /// The pinned size is less than one request of full length needs.
    PinnedTooSmall {
        /// How it was pinned.
        bound: Bound,
        /// Its tokens.
        asked_tokens: usize,
        /// The most that was computed to fit.
        largest_tokens: usize,
    },
}

/// Flags that make it fit, set together and nothing else changed.
#[derive(Clone, Debug, PartialEq)]
pub struct Knob {
    /// The flags, mostly one.
    pub settings: Vec<Setting>,
    /// What they give up or need.
    pub effect: String,
}

impl Knob {
    pub(crate) fn new(settings: impl Into<Vec<Setting>>, effect: &str) -> Self {
        Self {
            settings: settings.into(),
            effect: effect.to_owned(),
        }
    }

    /// The flags as they are typed.
    pub fn flags(&self) -> String {
        let flags: Vec<_> = self.settings.iter().map(Setting::to_string).collect();
        flags.join(" ")
    }
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::ProbeDoesNotFit => {
                write!(
                    f,
                    "the device is too small for the worst step and the KV cache to measure it with"
                )
            }
            Self::ContextDoesNotFit => write!(f, "one request of full length does not fit the KV cache"),
            Self::Exhausted { attempts } => write!(
                f,
                "the device ran out of memory at each of {attempts} sizes of the KV cache"
            ),
            Self::PinnedTooLarge {
                bound,
                asked_tokens,
                largest_tokens,
            } => write!(
                f,
                "--{} asks for {asked_tokens} tokens of KV cache, but {largest_tokens} fit",
                bound.name()
            ),
            Self::PinnedTooSmall {
                bound, asked_tokens, ..
            } => write!(
                f,
                "--{} asks for {asked_tokens} tokens of KV cache, less than one request of full length needs",
                bound.name()
            ),
        }
    }
}

impl Diagnostic {
    /// What went wrong and what was measured, without advice: several lines, no newline at the end.
    pub fn facts(&self) -> String {
        let mut text = self.cause.to_string();
        let mut line = |name: &str, value: String| text += &format!("\n  {name:<22}{value}");
        line("device", human_bytes(self.total));
        line("other processes", human_bytes(self.peers));
        line("canary", human_bytes(self.canary));
        if let Some(peak) = self.measured_peak {
            line("peak of worst steps", human_bytes(peak));
        }
        // Of a size that a flag sets, the first line says what fits.
        let is_said = matches!(self.cause, Cause::PinnedTooLarge { .. });
        if let Some(tokens) = self.initial_tokens.filter(|_| !is_said) {
            line("room for KV", format!("{tokens} tokens"));
        }
        if let Some(tokens) = self.last_tokens {
            line("last size tried", format!("{tokens} tokens"));
        }
        if let Some(oom) = &self.oom {
            line("what failed", oom.to_string());
            line("most memory held", human_bytes(oom.meters.reserved_high));
        }
        if let Some(bytes) = self.out_of_reach {
            line("would be enough", format!("a device of {}", human_bytes(bytes)));
        }
        text
    }

    /// What to say where no flag is known to help.
    pub fn no_flag(&self) -> String {
        match self.least_needed() {
            Some(bytes) => format!(
                "\nthe device is too small to measure even a part of the step, which needs more than {}",
                Setting::DeviceMemory(readable(bytes))
            ),
            None => "\nno flag makes it fit: use a smaller model or a larger device".to_owned(),
        }
    }

    /// A lower bound, for a device so small that nothing could be measured. Only where the budget is the limit: a device that
    /// gives less than it promises is not helped by promising more.
    fn least_needed(&self) -> Option<u64> {
        let failed = self
            .oom
            .as_ref()
            .filter(|_| self.cause == Cause::ProbeDoesNotFit && self.measured_peak.is_none())?;
        let needed = failed
            .meters
            .reserved
            .saturating_add(failed.requested)
            .saturating_add(self.peers);
        (needed > self.total).then_some(needed)
    }
}

impl fmt::Display for Diagnostic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.facts())?;
        if self.knobs.is_empty() {
            return f.write_str(&self.no_flag());
        }
        f.write_str("\nany one of these makes it fit:")?;
        self.knobs
            .iter()
            .try_for_each(|knob| write!(f, "\n  {}  ({})", knob.flags(), knob.effect))
    }
}
