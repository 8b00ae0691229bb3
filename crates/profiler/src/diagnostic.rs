use std::fmt;

use plimsoll_core::{Meters, Oom, StepLimits};

use crate::arithmetic::{Predictor, Slope};
use crate::report::human;
use crate::{Arithmetic, Bound, Measured, ProfileError, ProfileSpec, ScenarioKind, ScenarioResult};

/// Why nothing fits, and what would (A15, U6).
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
}

/// What went wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Cause {
    /// The worst step does not fit even with the probe's small KV cache.
    ProbeDoesNotFit,
    /// The room for KV is less than one request of full length needs (A17).
    ContextDoesNotFit,
    /// What was computed to fit did not, nor did smaller sizes.
    Exhausted {
        /// Sizes that were tried.
        attempts: usize,
    },
    /// The pinned size does not fit (A3).
    PinnedTooLarge {
        /// How it was pinned.
        bound: Bound,
        /// Its tokens.
        asked_tokens: usize,
        /// The most that was computed to fit.
        largest_tokens: usize,
    },
    /// The pinned size is less than one request of full length needs (A17).
    PinnedTooSmall {
        /// How it was pinned.
        bound: Bound,
        /// Its tokens.
        asked_tokens: usize,
        /// The most that was computed to fit.
        largest_tokens: usize,
    },
}

/// One flag with the value that makes it fit, alone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Knob {
    /// Such as `--max-model-len=4096`.
    pub flag: String,
    /// What it gives up or needs.
    pub effect: String,
}

impl fmt::Display for Diagnostic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.cause {
            Cause::ProbeDoesNotFit => {
                write!(f, "the worst step does not fit the device, whatever the KV cache")?
            }
            Cause::ContextDoesNotFit => write!(f, "one request of full length does not fit the KV cache")?,
            Cause::Exhausted { attempts } => {
                write!(
                    f,
                    "the device ran out of memory at each of {attempts} sizes of the KV cache"
                )?;
            }
            Cause::PinnedTooLarge {
                bound,
                asked_tokens,
                largest_tokens,
            } => write!(
                f,
                "--{} asks for {asked_tokens} tokens of KV cache, but {largest_tokens} fit",
                bound.name()
            )?,
            Cause::PinnedTooSmall {
                bound, asked_tokens, ..
            } => write!(
                f,
                "--{} asks for {asked_tokens} tokens of KV cache, less than one request of full length needs",
                bound.name()
            )?,
        }
        let mut line = |name: &str, value: String| write!(f, "\n  {name:<22}{value}");
        line("device", human(self.total))?;
        line("other processes", human(self.peers))?;
        line("canary", human(self.canary))?;
        if let Some(peak) = self.measured_peak {
            line("measured peak", human(peak))?;
        }
        if let Some(tokens) = self.initial_tokens {
            line("room for KV", format!("{tokens} tokens"))?;
        }
        if let Some(tokens) = self.last_tokens {
            line("last size tried", format!("{tokens} tokens"))?;
        }
        if let Some(oom) = &self.oom {
            line("what failed", oom.to_string())?;
            line("most we were given", human(oom.meters.reserved_high))?;
        }
        match &*self.knobs {
            [] => match self.least_needed() {
                Some(bytes) => write!(
                    f,
                    "\ntoo little to measure even a part of the step: it takes more than --device-memory={bytes}, what was \
                     held and asked for when it failed"
                ),
                None => write!(
                    f,
                    "\nnothing was found that would make it fit: use a smaller model or a larger device"
                ),
            },
            knobs => {
                write!(f, "\nany one of these makes it fit:")?;
                knobs
                    .iter()
                    .try_for_each(|knob| write!(f, "\n  {}  ({})", knob.flag, knob.effect))
            }
        }
    }
}

impl Diagnostic {
    /// A lower bound, for a device so small that nothing could be measured and no sufficient size be computed. Only where
    /// the budget is the limit: a device that gives less than it promises is not helped by promising more.
    fn least_needed(&self) -> Option<u64> {
        let oom = self
            .oom
            .as_ref()
            .filter(|_| self.cause == Cause::ProbeDoesNotFit)?;
        let needed = oom
            .meters
            .reserved
            .saturating_add(oom.requested)
            .saturating_add(self.peers);
        (needed > self.total).then_some(needed)
    }
}

/// What a failed profile knows.
pub(crate) struct Evidence<'a> {
    pub(crate) spec: &'a ProfileSpec,
    /// What was measured, and under which limits.
    pub(crate) probe: Option<(&'a Measured, &'a [ScenarioResult], StepLimits)>,
    pub(crate) arithmetic: Option<&'a Arithmetic>,
    pub(crate) oom: Option<&'a Oom>,
    pub(crate) last_tokens: Option<usize>,
    pub(crate) meters: Meters,
}

impl Evidence<'_> {
    pub(crate) fn diagnose(&self, cause: Cause) -> ProfileError {
        let knobs = match cause {
            Cause::ProbeDoesNotFit | Cause::ContextDoesNotFit => self.limit_knobs(self.meters.total, true),
            Cause::Exhausted { .. } => self.exhausted_knobs(),
            Cause::PinnedTooLarge {
                bound,
                largest_tokens,
                ..
            } => self.pin_knobs(bound, largest_tokens),
            Cause::PinnedTooSmall {
                bound,
                largest_tokens,
                asked_tokens,
            } => {
                let context = (asked_tokens > 0).then(|| Knob {
                    flag: format!("--max-model-len={asked_tokens}"),
                    effect: "shorter requests".into(),
                });
                let enough = self.spec.kv(self.spec.request_blocks()).capacity_tokens();
                let pin =
                    (enough <= largest_tokens).then(|| self.pin(bound, enough, "one full-length request"));
                pin.into_iter().chain(context).collect()
            }
        };
        ProfileError::DoesNotFit(Box::new(Diagnostic {
            initial_tokens: self.arithmetic.map(|a| self.spec.kv(a.blocks).capacity_tokens()),
            last_tokens: self.last_tokens,
            measured_peak: self.probe.map(|(measured, ..)| measured.peak_reserved),
            total: self.meters.total,
            canary: self.spec.margins.canary_bytes,
            peers: self.meters.peers(),
            oom: self.oom.cloned(),
            cause,
            knobs,
        }))
    }

    /// Smaller limits, and (if it helps) a larger device.
    fn limit_knobs(&self, total: u64, larger_device: bool) -> Vec<Knob> {
        let (Some(predictor), spec) = (self.predictor(), self.spec) else {
            return Vec::new();
        };
        let mut knobs = Vec::new();
        let mut knob = |flag: String, effect: &str| {
            knobs.push(Knob {
                flag,
                effect: effect.into(),
            })
        };
        let needed = predictor.total_needed(spec);
        if larger_device && spec.largest_device.is_none_or(|largest| needed <= largest) {
            knob(format!("--device-memory={needed}"), "a larger budget");
        }
        let StepLimits {
            max_num_batched_tokens,
            max_num_seqs,
            max_model_len,
        } = spec.limits;
        if let Some(value) = predictor.largest(spec, total, max_model_len, |spec, value| {
            spec.limits.max_model_len = value
        }) {
            knob(format!("--max-model-len={value}"), "shorter requests");
        }
        if predictor.bytes_per_token.is_some()
            && let Some(value) = predictor.largest(spec, total, max_num_batched_tokens, |spec, value| {
                spec.limits.max_num_batched_tokens = value;
            })
        {
            knob(
                format!("--max-num-batched-tokens={value}"),
                "prompts in smaller chunks",
            );
        }
        if predictor.bytes_per_row.is_some()
            && let Some(value) = predictor.largest(spec, total, max_num_seqs, |spec, value| {
                spec.limits.max_num_seqs = value
            })
        {
            knob(format!("--max-num-seqs={value}"), "fewer requests at once");
        }
        knobs
    }

    /// The sum promised more than the device gave: trust what it gave, and the neighbours as they were then.
    fn exhausted_knobs(&self) -> Vec<Knob> {
        let (Some(oom), Some(arithmetic)) = (self.oom, self.arithmetic) else {
            return Vec::new();
        };
        let usable = given(oom);
        let blocks = arithmetic.blocks_within(usable);
        if blocks >= self.spec.request_blocks() {
            let tokens = self.spec.kv(blocks).capacity_tokens();
            return vec![self.pin(Bound::PinnedTokens, tokens, "what the device really gave")];
        }
        self.limit_knobs(usable.saturating_add(self.meters.peers()), false)
    }

    fn pin_knobs(&self, bound: Bound, largest_tokens: usize) -> Vec<Knob> {
        if largest_tokens >= self.spec.limits.max_model_len {
            return vec![self.pin(bound, largest_tokens, "the largest size that fits")];
        }
        self.limit_knobs(self.meters.total, true)
    }

    fn pin(&self, bound: Bound, tokens: usize, effect: &str) -> Knob {
        let flag = match bound {
            Bound::PinnedBytes => {
                let blocks = self.spec.block_size.blocks_for(tokens) as u64;
                format!("--kv-cache-memory-bytes={}", blocks * self.spec.block_bytes())
            }
            _ => format!("--max-total-token-num={tokens}"),
        };
        Knob {
            flag,
            effect: effect.into(),
        }
    }

    fn predictor(&self) -> Option<Predictor> {
        let (measured, scenarios, at) = self.probe?;
        let meters = &self.meters;
        let arithmetic = Arithmetic::new(self.spec, measured, meters);
        Some(Predictor {
            at,
            non_kv: arithmetic.non_kv,
            bytes_per_token: slope_per_token(scenarios),
            bytes_per_row: slope_per_row(scenarios),
            set_aside: arithmetic.canary + arithmetic.fragmentation_buffer + arithmetic.peers,
            block_bytes: arithmetic.block_bytes,
        })
    }
}

/// Bytes the device really gave us, whatever it promises, with the neighbours as they were when it refused.
pub(crate) fn given(oom: &Oom) -> u64 {
    oom.meters
        .reserved_high
        .min(oom.meters.total.saturating_sub(oom.meters.peers()))
}

fn result(scenarios: &[ScenarioResult], kind: ScenarioKind) -> Option<&ScenarioResult> {
    scenarios.iter().find(|result| result.kind == kind)
}

/// Two steps with the same rows and the same sampling that differ in tokens only.
fn slope_per_token(scenarios: &[ScenarioResult]) -> Option<Slope> {
    let mixed = result(scenarios, ScenarioKind::Mixed)?;
    let sort = result(scenarios, ScenarioKind::SampleSort)?;
    let tokens = mixed
        .tokens
        .checked_sub(sort.tokens)
        .filter(|&tokens| tokens > 0)? as u64;
    let bytes = mixed.scratch_bytes.saturating_sub(sort.scratch_bytes);
    Some(Slope {
        low: bytes / tokens,
        high: bytes.div_ceil(tokens),
    })
}

/// Two steps with about the same tokens: one plain row, and many rows that sample with everything.
fn slope_per_row(scenarios: &[ScenarioResult]) -> Option<Slope> {
    let mixed = result(scenarios, ScenarioKind::Mixed)?;
    let one = result(scenarios, ScenarioKind::Prefill)?;
    let more = (mixed.rows - one.rows) as u64;
    let bytes = mixed.scratch_bytes.saturating_sub(one.scratch_bytes);
    // The plain row samples greedily, so `bytes` holds between `more` and `more + 1` rows of full sampling.
    (more > 0).then(|| Slope {
        low: bytes / (more + 1),
        high: bytes.div_ceil(more),
    })
}
