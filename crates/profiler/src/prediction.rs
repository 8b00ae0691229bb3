//! What the profile would find, told without a device state: the same sum over computed numbers.

use plimsoll_core::{Component, KvConfig, Meters, StepLimits};
use serde::Serialize;

use crate::diagnostic::Evidence;
use crate::report::Memory;
use crate::{
    Arithmetic, Bound, Cause, KvSize, LeftOut, Margins, Measured, ProfileError, ProfileSpec, Report,
    ScenarioResult, ScenarioShape, scenario_shapes,
};

/// What a model and its states take on a device, by the formulas with which the real ones take it.
pub trait Footprint {
    /// The meters before any state is built.
    fn idle(&self) -> Meters;

    /// The meters beside a state for `limits`, without a canary, whose arena holds `arena` bytes.
    fn with_state(&self, limits: &StepLimits, kv: KvConfig, arena: u64) -> Meters;

    /// What a growing arena takes for worst steps, one after the other.
    fn arena(&self, limits: &StepLimits, steps: &[ScenarioShape]) -> ArenaUse;

    /// Bytes that a fixed arena of `scratch` bytes holds.
    fn fixed_arena(&self, scratch: u64) -> u64;
}

/// What steps take from a growing arena, in bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ArenaUse {
    /// Most that each step uses at once.
    pub scratch: Vec<u64>,
    /// Most that the arena ever holds.
    pub peak: u64,
    /// What it holds in the end.
    pub held: u64,
}

/// What the profile is computed to find; fields as in [`Report`].
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Prediction {
    /// Tokens the KV cache would hold.
    pub kv_tokens: usize,
    /// Blocks it would have.
    pub kv_blocks: usize,
    /// Tokens per block.
    pub block_size: usize,
    /// Bytes of the KV cache.
    pub kv_bytes: u64,
    /// Bytes of KV cache per token.
    pub kv_bytes_per_token: u64,
    /// Bytes of the step arena.
    pub scratch_bytes: u64,
    /// What decides the size (U35).
    pub bound: Bound,
    /// `--max-model-len`.
    pub max_model_len: usize,
    /// `--max-num-seqs`.
    pub max_num_seqs: usize,
    /// `--max-num-batched-tokens`.
    pub max_num_batched_tokens: usize,
    /// Requests of full length that would fit at once (U32).
    pub full_length_requests: f64,
    /// What would be kept free.
    pub margins: Margins,
    /// Before any state is built.
    pub baseline: Memory,
    /// Ready to serve, the canary freed.
    pub ready: Memory,
    /// What the probe would measure.
    pub probe: Measured,
    /// The probe's worst steps.
    pub probe_scenarios: Vec<PredictedScenario>,
    /// The sum.
    pub arithmetic: Arithmetic,
    /// Worst cases that these limits cannot reach.
    pub left_out: Vec<LeftOut>,
}

/// A worst step.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PredictedScenario {
    /// Kind and size.
    #[serde(flatten)]
    pub shape: ScenarioShape,
    /// Most bytes of the step arena in use at once.
    pub scratch_bytes: u64,
}

/// Computes what [`crate::profile`] would find.
///
/// # Errors
/// [`ProfileError`], where the profile would not succeed: [`ProfileError::DoesNotFit`] with the same advice.
pub fn predict(spec: &ProfileSpec, footprint: &dyn Footprint) -> Result<Prediction, ProfileError> {
    spec.check()?;
    let predictor = Predicted::new(spec, footprint);
    match spec.size {
        KvSize::Auto => predictor.automatic(),
        KvSize::Tokens(tokens) => {
            predictor.pinned(spec.block_size.blocks_for(tokens), tokens, Bound::PinnedTokens)
        }
        KvSize::Bytes(bytes) => {
            let blocks = usize::try_from(bytes / spec.block_bytes()).unwrap_or(usize::MAX);
            let tokens = blocks.saturating_mul(spec.block_size.tokens());
            predictor.pinned(blocks, tokens, Bound::PinnedBytes)
        }
    }
}

/// A computed probe.
struct Predicted<'a> {
    spec: &'a ProfileSpec,
    footprint: &'a dyn Footprint,
    idle: Meters,
    measured: Measured,
    scenarios: Vec<ScenarioResult>,
    left_out: Vec<LeftOut>,
    arithmetic: Arithmetic,
}

impl<'a> Predicted<'a> {
    fn new(spec: &'a ProfileSpec, footprint: &'a dyn Footprint) -> Self {
        let idle = footprint.idle();
        let kv = spec.probe_kv();
        let (shapes, left_out) = scenario_shapes(&spec.limits, kv);
        let arena = footprint.arena(&spec.limits, &shapes);
        let peak = footprint.with_state(&spec.limits, kv, arena.peak);
        let measured = Measured {
            peak_reserved: peak.reserved,
            peak_used: peak.used,
            kv_bytes: peak.by_component.get(Component::Kv),
            kv_tokens: kv.capacity_tokens(),
            scratch_bytes: arena.scratch.iter().copied().max().unwrap_or(0),
        };
        let result = |(shape, &scratch_bytes): (&ScenarioShape, &u64)| ScenarioResult {
            kind: shape.kind,
            rows: shape.rows,
            tokens: shape.tokens,
            seconds: 0.0,
            scratch_bytes,
            peak_reserved: peak.reserved,
        };
        Self {
            arithmetic: Arithmetic::new(spec, &measured, &idle),
            scenarios: shapes.iter().zip(&arena.scratch).map(result).collect(),
            spec,
            footprint,
            idle,
            measured,
            left_out,
        }
    }

    fn automatic(self) -> Result<Prediction, ProfileError> {
        if self.measured.peak_reserved > self.available() {
            return Err(self.diagnose(Cause::ProbeDoesNotFit));
        }
        let blocks = self.arithmetic.blocks;
        if blocks < self.spec.request_blocks() {
            return Err(self.diagnose(Cause::ContextDoesNotFit));
        }
        let arena = self.footprint.fixed_arena(self.measured.scratch_bytes);
        let bound = self.arithmetic.bound;
        Ok(self.prediction(blocks, bound, arena))
    }

    fn pinned(self, blocks: usize, asked_tokens: usize, bound: Bound) -> Result<Prediction, ProfileError> {
        let spec = self.spec;
        let largest_tokens = spec.kv(self.arithmetic.full_blocks()).capacity_tokens();
        if blocks < spec.request_blocks() {
            return Err(self.diagnose(Cause::PinnedTooSmall {
                bound,
                asked_tokens,
                largest_tokens,
            }));
        }
        let bytes = u128::from(spec.block_bytes()) * blocks as u128;
        let fits = bytes <= u128::from(self.available()) && {
            let arena = self.pinned_arena(blocks);
            let peak = self
                .footprint
                .with_state(&spec.limits, spec.kv(blocks), arena.peak)
                .reserved;
            peak.saturating_add(spec.margins.canary_bytes) <= self.available()
        };
        if !fits {
            return Err(self.diagnose(Cause::PinnedTooLarge {
                bound,
                asked_tokens,
                largest_tokens,
            }));
        }
        let held = self.pinned_arena(blocks).held;
        Ok(self.prediction(blocks, bound, held))
    }

    /// A pinned size is proved in two passes over its worst steps, the arena growing in the first.
    fn pinned_arena(&self, blocks: usize) -> ArenaUse {
        let (mut steps, _) = scenario_shapes(&self.spec.limits, self.spec.kv(blocks));
        steps.extend_from_within(..);
        self.footprint.arena(&self.spec.limits, &steps)
    }

    /// What this process could hold.
    fn available(&self) -> u64 {
        self.idle.total.saturating_sub(self.idle.peers())
    }

    fn diagnose(&self, cause: Cause) -> ProfileError {
        let evidence = Evidence {
            spec: self.spec,
            probe: Some((&self.measured, &self.scenarios, self.spec.limits)),
            arithmetic: Some(&self.arithmetic),
            oom: None,
            last_tokens: None,
            meters: self.idle,
        };
        evidence.diagnose(cause)
    }

    fn prediction(self, kv_blocks: usize, bound: Bound, arena: u64) -> Prediction {
        let Self {
            spec,
            footprint,
            idle,
            measured,
            scenarios,
            left_out,
            arithmetic,
        } = self;
        let kv = spec.kv(kv_blocks);
        let ready = footprint.with_state(&spec.limits, kv, arena);
        let scenarios = scenarios.iter().map(|result| PredictedScenario {
            shape: ScenarioShape::from(result),
            scratch_bytes: result.scratch_bytes,
        });
        Prediction {
            kv_tokens: kv.capacity_tokens(),
            kv_blocks,
            block_size: spec.block_size.tokens(),
            kv_bytes: ready.by_component.get(Component::Kv),
            kv_bytes_per_token: spec.kv_bytes_per_token,
            scratch_bytes: ready.by_component.get(Component::Arena),
            bound,
            max_model_len: spec.limits.max_model_len,
            max_num_seqs: spec.limits.max_num_seqs,
            max_num_batched_tokens: spec.limits.max_num_batched_tokens,
            full_length_requests: kv_blocks as f64 / spec.request_blocks() as f64,
            margins: spec.margins,
            baseline: Memory::from(&idle),
            ready: Memory::from(&ready),
            probe: measured,
            probe_scenarios: scenarios.collect(),
            arithmetic,
            left_out,
        }
    }
}

/// A predicted number beside the measured one.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Compared {
    /// What it is: a component, or a sum.
    pub name: &'static str,
    /// As computed.
    pub predicted: u64,
    /// As measured.
    pub measured: u64,
    /// `predicted / measured - 1`; absent where nothing was measured.
    pub error: Option<f64>,
}

impl Compared {
    fn new(name: &'static str, predicted: u64, measured: u64) -> Self {
        Self {
            name,
            predicted,
            measured,
            error: (measured > 0).then(|| predicted as f64 / measured as f64 - 1.0),
        }
    }
}

impl Prediction {
    /// Beside what was measured: tokens of KV, then bytes of all that is not KV at the peak of the probe, where there was
    /// one, then bytes of the components when ready.
    pub fn compare(&self, report: &Report) -> Vec<Compared> {
        let mut compared = vec![Compared::new(
            "kv tokens",
            self.kv_tokens as u64,
            report.kv_tokens as u64,
        )];
        if let Some(arithmetic) = &report.arithmetic {
            compared.push(Compared::new(
                "all but kv, at the peak",
                self.arithmetic.non_kv,
                arithmetic.non_kv,
            ));
        }
        let lines = self.ready.components.iter().zip(&report.ready.components);
        compared.extend(
            lines
                .filter(|(a, b)| a.bytes > 0 || b.bytes > 0)
                .map(|(a, b)| Compared::new(a.name, a.bytes, b.bytes)),
        );
        compared
    }
}
