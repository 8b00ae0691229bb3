//! What the profile would find, told without a device state: the same sum over computed numbers.

use plimsoll_core::{Component, KvConfig, Meters, StepLimits};
use serde::Serialize;

use crate::advice::{Basis, Source, advise};
use crate::arithmetic::shrunk;
use crate::report::{Memory, Sizing};
use crate::{
    Arithmetic, Bound, Cause, Diagnostic, KvSize, LeftOut, Measured, ProfileError, ProfileSpec, Report,
    ScenarioShape, scenario_shapes,
};

/// What a model and its states for the limits of one profile take on a device, by the formulas with which the real ones take
/// it.
pub trait Footprint {
    /// The meters before any state is built.
    fn idle(&self) -> Meters;

    /// The meters beside a state without a canary, whose arena holds `arena` bytes.
    fn with_state(&self, kv: KvConfig, arena: u64) -> Meters;

    /// What a growing arena takes for worst steps, one after the other.
    fn arena(&self, steps: &[ScenarioShape]) -> ArenaUse;

    /// Bytes that a fixed arena of `scratch` bytes holds.
    fn fixed_arena(&self, scratch: u64) -> u64;

    /// The same for other limits.
    fn for_limits(&self, limits: &StepLimits) -> Box<dyn Footprint>;
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
    /// What it would prove.
    #[serde(flatten)]
    pub sizing: Sizing,
    /// Bytes of KV cache per token.
    pub kv_bytes_per_token: u64,
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
    let predicted = Predicted::new(spec, footprint);
    match predicted.size() {
        Ok(size) => Ok(predicted.prediction(size)),
        Err(cause) => Err(predicted.refuse(cause)),
    }
}

/// State slots, at least 1, for a model whose layers keep states of fixed size: states and KV share the memory, so each slot
/// more leaves fewer tokens. As many as leave KV for half a request of `mean_tokens` tokens to each, and in all for one of full length; where
/// the size of the KV cache is pinned, as many as leave that size to `--mem-fraction` of the room. Half, because a running
/// request holds less than its final length, and some slots hold snapshots of requests that do not run.
///
/// The spec's `max_num_seqs` is an upper bound here: no more requests are counted than there are slots. All else (margins,
/// weights, step arena, the probe) is counted as by [`predict`].
pub fn state_slots(spec: &ProfileSpec, footprint: &dyn Footprint, mean_tokens: usize) -> usize {
    let leaves_enough = |slots: usize| {
        let mut spec = spec.clone();
        spec.limits.max_num_seqs = spec.limits.max_num_seqs.min(slots);
        spec.most_state_slots = slots;
        let footprint = footprint.for_limits(&spec.limits);
        let predicted = Predicted::new(&spec, &*footprint);
        let arithmetic = &predicted.arithmetic;
        match spec.pinned_pages() {
            Some(pages) => pages <= arithmetic.fitting_pages,
            None => {
                let probe_fits = predicted.measured.peak_reserved <= predicted.available();
                let pages = arithmetic.fitting_pages;
                let requests = spec.kv(pages).requests_of(mean_tokens);
                // A start may find less room than is predicted.
                let fits = shrunk(pages, 1) >= spec.request_pages();
                probe_fits && fits && 2.0 * requests >= slots as f64
            }
        }
    };
    // The first is taken whether or not it leaves enough: a profile says best what is missing.
    let (mut most, mut too_many) = (1, spec.state_slots() + 1);
    while too_many - most > 1 {
        let middle = most + (too_many - most) / 2;
        match leaves_enough(middle) {
            true => most = middle,
            false => too_many = middle,
        }
    }
    most
}

/// Of the state that would serve.
struct Size {
    pages: usize,
    bound: Bound,
    /// Bytes its arena holds.
    arena: u64,
}

/// A computed probe.
struct Predicted<'a> {
    spec: &'a ProfileSpec,
    footprint: &'a dyn Footprint,
    idle: Meters,
    measured: Measured,
    scenarios: Vec<PredictedScenario>,
    left_out: Vec<LeftOut>,
    arithmetic: Arithmetic,
}

impl<'a> Predicted<'a> {
    fn new(spec: &'a ProfileSpec, footprint: &'a dyn Footprint) -> Self {
        let idle = footprint.idle();
        let kv = spec.probe_kv();
        let (shapes, left_out) = scenario_shapes(&spec.limits, kv, spec.pooling);
        let arena = footprint.arena(&shapes);
        let peak = footprint.with_state(kv, arena.peak);
        let measured = Measured {
            peak_reserved: peak.reserved,
            peak_used: peak.used,
            kv_bytes: peak.by_component.get(Component::Kv),
            kv_tokens: kv.capacity_tokens(),
            scratch_bytes: arena.scratch.iter().copied().max().unwrap_or(0),
        };
        let scenarios = shapes.iter().zip(&arena.scratch);
        let scenarios = scenarios.map(|(&shape, &scratch_bytes)| PredictedScenario { shape, scratch_bytes });
        Self {
            arithmetic: Arithmetic::new(spec, &measured, &idle),
            scenarios: scenarios.collect(),
            spec,
            footprint,
            idle,
            measured,
            left_out,
        }
    }

    /// The size of the state that would serve, or why there is none.
    fn size(&self) -> Result<Size, Cause> {
        let (spec, arithmetic) = (self.spec, &self.arithmetic);
        let fixed = self.footprint.fixed_arena(self.measured.scratch_bytes);
        let (pages, bound, asked_tokens) = match (spec.pinned_pages(), spec.size) {
            (None, _) if self.measured.peak_reserved > self.available() => {
                return Err(Cause::ProbeDoesNotFit);
            }
            (None, _) if arithmetic.pages < spec.request_pages() => return Err(Cause::ContextDoesNotFit),
            (None, _) => {
                return Ok(Size {
                    pages: arithmetic.pages,
                    bound: arithmetic.bound,
                    arena: fixed,
                });
            }
            (Some(pages), KvSize::Tokens(tokens)) => (pages, Bound::PinnedTokens, tokens),
            (Some(pages), _) => {
                let tokens = spec.kv(pages).capacity_tokens();
                (pages, Bound::PinnedBytes, tokens)
            }
        };
        let largest_tokens = spec.kv(arithmetic.full_pages()).capacity_tokens();
        if pages < spec.request_pages() {
            return Err(Cause::PinnedTooSmall {
                bound,
                asked_tokens,
                largest_tokens,
            });
        }
        let bytes = u128::from(spec.page_bytes()) * pages as u128;
        if bytes <= u128::from(self.available()) {
            let growing = self.pinned_arena(pages);
            let peak = self.footprint.with_state(spec.kv(pages), growing.peak).reserved;
            if peak.saturating_add(spec.margins.canary_bytes) <= self.available() {
                return Ok(Size {
                    pages,
                    bound,
                    arena: growing.held,
                });
            }
            // An arena takes more while it grows than one of the final size.
            if pages <= arithmetic.full_pages() {
                return Ok(Size {
                    pages,
                    bound,
                    arena: fixed,
                });
            }
        }
        Err(Cause::PinnedTooLarge {
            bound,
            asked_tokens,
            largest_tokens,
        })
    }

    /// A pinned size is proved in two passes over its worst steps, the arena growing in the first.
    fn pinned_arena(&self, pages: usize) -> ArenaUse {
        let kv = self.spec.kv(pages);
        let (mut steps, _) = scenario_shapes(&self.spec.limits, kv, self.spec.pooling);
        steps.extend_from_within(..);
        self.footprint.arena(&steps)
    }

    /// What this process could hold.
    fn available(&self) -> u64 {
        self.idle.total.saturating_sub(self.idle.peers())
    }

    fn refuse(&self, mut cause: Cause) -> ProfileError {
        let basis = Basis {
            limits: self.spec.limits,
            measured: self.measured.clone(),
            given_back: 0,
            meters: self.idle,
            broke_promise: false,
            at_most: usize::MAX,
        };
        let advice = match advise(&mut Formulas(self.footprint), self.spec, basis) {
            Ok(advice) => advice,
            Err(error) => return error,
        };
        if let Cause::PinnedTooLarge { largest_tokens, .. } = &mut cause {
            *largest_tokens = self.spec.kv(advice.largest_pages).capacity_tokens();
        }
        ProfileError::DoesNotFit(Box::new(Diagnostic {
            cause,
            initial_tokens: Some(self.spec.kv(self.arithmetic.pages).capacity_tokens()),
            last_tokens: None,
            measured_peak: Some(self.measured.peak_reserved),
            total: self.idle.total,
            canary: self.spec.margins.canary_bytes,
            peers: self.idle.peers(),
            oom: None,
            knobs: advice.knobs,
            out_of_reach: advice.out_of_reach,
        }))
    }

    fn prediction(self, size: Size) -> Prediction {
        let spec = self.spec;
        let ready = self.footprint.with_state(spec.kv(size.pages), size.arena);
        let (baseline, ready) = (Memory::from(&self.idle), Memory::from(&ready));
        let weights = baseline.bytes_of(Component::Weights);
        Prediction {
            sizing: Sizing::new(spec, size.pages, size.bound, weights, &ready),
            kv_bytes_per_token: spec.kv_bytes_per_token,
            baseline,
            ready,
            probe: self.measured,
            probe_scenarios: self.scenarios,
            arithmetic: self.arithmetic,
            left_out: self.left_out,
        }
    }
}

/// Steps of other limits, by the same formulas; what they promise is there.
struct Formulas<'a>(&'a dyn Footprint);

impl Source for Formulas<'_> {
    fn measure(&mut self, spec: &ProfileSpec) -> Result<Option<Measured>, ProfileError> {
        let footprint = self.0.for_limits(&spec.limits);
        Ok(Some(Predicted::new(spec, &*footprint).measured))
    }

    fn gives(&mut self, _kv: KvConfig, _scratch_bytes: u64) -> Result<bool, ProfileError> {
        Ok(true)
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
            self.sizing.kv_tokens as u64,
            report.sizing.kv_tokens as u64,
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
