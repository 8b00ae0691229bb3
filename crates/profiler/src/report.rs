mod suggestion;

use std::time::Duration;

use plimsoll_core::{Component, Meters};
use serde::Serialize;

use crate::attempt::Search;
use crate::{
    Arithmetic, Attempt, Bound, Disabled, DiscardedPlan, GroupReport, LeftOut, Loading, Margins, Measured,
    Origin, ProfileSpec, ScenarioResult, StatesReport, StepTimes,
};

pub use suggestion::Suggestion;
use suggestion::suggestions;

/// The size of a KV cache, what it is in requests, and the limits for which it is that large.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Sizing {
    /// Tokens the KV cache holds in every group of layers at once.
    pub kv_tokens: usize,
    /// Pages it has: with one group of layers, blocks.
    pub kv_pages: usize,
    /// Tokens per block.
    pub block_size: usize,
    /// Bytes of the KV cache.
    pub kv_bytes: u64,
    /// Bytes of the step arena.
    pub scratch_bytes: u64,
    /// What decides the size.
    pub bound: Bound,
    /// `--max-model-len`.
    pub max_model_len: usize,
    /// `--max-num-seqs`.
    pub max_num_seqs: usize,
    /// `--max-num-batched-tokens`.
    pub max_num_batched_tokens: usize,
    /// How the linear layers are stored; null in floats.
    pub quantization: Option<String>,
    /// Bits of device memory for each weight, scales and norms included; null for a simulated model.
    pub bits_per_weight: Option<f64>,
    /// What each group of layers keeps.
    pub groups: Vec<GroupReport>,
    /// What layers with states of fixed size keep; null where there are none.
    pub states: Option<StatesReport>,
    /// Requests of full length that fit at once.
    pub full_length_requests: f64,
    /// What is kept free.
    pub margins: Margins,
}

impl Sizing {
    /// Of a state of `pages`, which takes `ready`, beside weights that take `weights` bytes.
    pub(crate) fn new(spec: &ProfileSpec, pages: usize, bound: Bound, weights: u64, ready: &Memory) -> Self {
        let (kv, limits) = (spec.kv(pages), spec.limits);
        Self {
            kv_tokens: kv.capacity_tokens(),
            kv_pages: pages,
            block_size: spec.block_size.tokens(),
            kv_bytes: ready.bytes_of(Component::Kv),
            scratch_bytes: ready.bytes_of(Component::Arena),
            bound,
            max_model_len: limits.max_model_len,
            max_num_seqs: limits.max_num_seqs,
            max_num_batched_tokens: limits.max_num_batched_tokens,
            quantization: spec.quantization.clone(),
            bits_per_weight: spec.bits_per_weight(weights),
            groups: GroupReport::all(spec),
            states: StatesReport::of(spec),
            full_length_requests: kv.requests_of(limits.max_model_len),
            margins: spec.margins,
        }
    }
}

/// Everything the profile found, for `GET /memory`, `--profile-report`, metrics and people.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    /// What it proved.
    #[serde(flatten)]
    pub sizing: Sizing,
    /// While the model was loaded; null for a simulated model.
    pub loading: Option<Loading>,
    /// Before any state was built.
    pub baseline: Memory,
    /// Ready to serve, the canary freed.
    pub ready: Memory,
    /// The rank that reports, from 0.
    pub rank: usize,
    /// Ranks that serve together, all with the same KV pages.
    pub ranks: usize,
    /// Where the numbers come from.
    pub origin: Origin,
    /// A plan of an earlier start that could not be used.
    pub discarded_plan: Option<DiscardedPlan>,
    /// Where the size was planned: relative difference of the proved peak to the one the plan predicts.
    pub plan_error: Option<f64>,
    /// Absent where the size was pinned; where it was planned, as the probe would measure on today's baseline.
    pub probe: Option<Measured>,
    /// The probe's worst steps.
    pub probe_scenarios: Vec<ScenarioResult>,
    /// Absent where the size was pinned.
    pub arithmetic: Option<Arithmetic>,
    /// Sizes that were tried, the last of them proved.
    pub attempts: Vec<Attempt>,
    /// How long steps take, if that was measured.
    pub step_times: Option<StepTimes>,
    /// Worst cases that these limits or this size cannot reach.
    pub left_out: Vec<LeftOut>,
    /// What this start does without, and why.
    pub disabled: Vec<Disabled>,
    /// Flags for the next run.
    pub suggestions: Vec<Suggestion>,
    /// Time of the whole profile.
    pub seconds: f64,
}

/// One reading of the meters, in bytes. `components` + `unattributed` = `reserved`; with `peers` and `free` that is `total`
/// unless the device is overdrawn.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Memory {
    /// Capacity of the device.
    pub total: u64,
    /// Free, as the device reports it.
    pub free: u64,
    /// Held by other processes.
    pub peers: u64,
    /// Held by this process.
    pub reserved: u64,
    /// Live in what is held.
    pub used: u64,
    /// `reserved` by purpose.
    pub components: Vec<ComponentLine>,
    /// The part of `reserved` that no component claims.
    pub unattributed: u64,
    /// Sum of `components`: what this process knows the purpose of.
    pub attributed: u64,
    /// What the device says is in use, by whomever: `total` - `free`. That is `attributed` + `peers`, within 64 MiB.
    pub device_used: u64,
}

/// Bytes of one purpose.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ComponentLine {
    /// [`plimsoll_core::Component::name`].
    pub name: &'static str,
    /// Its bytes.
    pub bytes: u64,
}

impl From<&Meters> for Memory {
    fn from(meters: &Meters) -> Self {
        let lines = meters.by_component.iter().map(|(c, bytes)| ComponentLine {
            name: c.name(),
            bytes,
        });
        Self {
            total: meters.total,
            free: meters.free,
            peers: meters.peers(),
            reserved: meters.reserved,
            used: meters.used,
            components: lines.collect(),
            unattributed: meters.reserved.saturating_sub(meters.by_component.total()),
            attributed: meters.by_component.total(),
            device_used: meters.total.saturating_sub(meters.free),
        }
    }
}

impl Memory {
    /// Bytes of one component.
    pub(crate) fn bytes_of(&self, component: Component) -> u64 {
        let line = self.components.iter().find(|line| line.name == component.name());
        line.map_or(0, |line| line.bytes)
    }
}

impl Report {
    /// Time of the slowest step of the proof.
    pub fn slowest_step(&self) -> Duration {
        let proof = self.attempts.last();
        let steps = proof.into_iter().flat_map(|attempt| &attempt.scenarios);
        let slowest = steps.map(|step| step.seconds).fold(0.0, f64::max);
        Duration::try_from_secs_f64(slowest).unwrap_or_default()
    }
}

/// What a finished profile hands to its report, beside its search.
pub(crate) struct Start {
    pub(crate) baseline: Memory,
    pub(crate) ready: Memory,
    pub(crate) rank: usize,
    pub(crate) ranks: usize,
    pub(crate) left_out: Vec<LeftOut>,
    pub(crate) step_times: Option<StepTimes>,
    pub(crate) kv_pages: usize,
    pub(crate) seconds: f64,
}

impl Report {
    pub(crate) fn new(spec: &ProfileSpec, start: Start, search: Search) -> Self {
        let suggestions = suggestions(spec, &start, &search);
        let (probe, probe_scenarios, arithmetic) = match search.probe {
            Some((measured, scenarios, arithmetic)) => (Some(measured), scenarios, Some(arithmetic)),
            None => (None, Vec::new(), None),
        };
        let weights = start.baseline.bytes_of(Component::Weights);
        Self {
            sizing: Sizing::new(spec, start.kv_pages, search.bound, weights, &start.ready),
            loading: spec.loading,
            baseline: start.baseline,
            ready: start.ready,
            rank: start.rank,
            ranks: start.ranks,
            origin: search.origin,
            discarded_plan: search.discarded_plan,
            plan_error: search.plan_error,
            probe,
            probe_scenarios,
            arithmetic,
            attempts: search.attempts,
            step_times: start.step_times,
            left_out: start.left_out,
            disabled: spec.disabled.clone(),
            suggestions,
            seconds: start.seconds,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_shows_what_no_component_claims() {
        let mut meters = Meters {
            total: 100,
            free: 30,
            used: 40,
            reserved: 50,
            ..Meters::default()
        };
        *meters.by_component.get_mut(Component::Weights) = 35;
        *meters.by_component.get_mut(Component::Kv) = 10;
        let memory = Memory::from(&meters);
        assert_eq!((memory.unattributed, memory.peers), (5, 20));
        assert_eq!((memory.attributed, memory.device_used), (45, 70));
        assert_eq!(memory.components.len(), Component::ALL.len());
        let json = serde_json::to_value(&memory).unwrap();
        assert_eq!(
            json["components"][0],
            serde_json::json!({ "name": "weights", "bytes": 35 })
        );
    }
}
