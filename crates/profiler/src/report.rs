use std::time::Duration;

use plimsoll_core::{Meters, Oom, StepLimits};
use serde::{Deserialize, Serialize};

use crate::suggestion::suggestions;
use crate::{
    Arithmetic, DiscardedPlan, GroupReport, LeftOut, Margins, Measured, Phase, ProfileSpec, ScenarioKind,
    ScenarioShape, Suggestion,
};

/// Everything the profile found, for `GET /memory`, `--profile-report`, metrics and people.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    /// Tokens the KV cache holds in every group of layers at once.
    pub kv_tokens: usize,
    /// Pages it has: with one group of layers, blocks.
    pub kv_blocks: usize,
    /// Tokens per block.
    pub block_size: usize,
    /// Bytes of the KV cache.
    pub kv_bytes: u64,
    /// Bytes of the step arena.
    pub scratch_bytes: u64,
    /// What decided the size.
    pub bound: Bound,
    /// `--max-model-len`.
    pub max_model_len: usize,
    /// `--max-num-seqs`.
    pub max_num_seqs: usize,
    /// `--max-num-batched-tokens`.
    pub max_num_batched_tokens: usize,
    /// What each group of layers keeps.
    pub groups: Vec<GroupReport>,
    /// Requests of full length that fit at once.
    pub full_length_requests: f64,
    /// What was kept free.
    pub margins: Margins,
    /// Before any state was built.
    pub baseline: Memory,
    /// Ready to serve, the canary freed.
    pub ready: Memory,
    /// The rank that reports, from 0.
    pub rank: usize,
    /// Ranks that serve together, all with the same KV blocks.
    pub ranks: usize,
    /// Where the numbers come from.
    pub origin: Origin,
    /// A plan that was given and was of no use.
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
    /// Worst cases that these limits or this size cannot reach.
    pub left_out: Vec<LeftOut>,
    /// What this start does without, and why.
    pub disabled: Vec<Disabled>,
    /// Flags for the next run.
    pub suggestions: Vec<Suggestion>,
    /// Time of the whole profile.
    pub seconds: f64,
}

/// Where the size of the KV cache comes from.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(tag = "from", rename_all = "snake_case")]
pub enum Origin {
    /// This start's probe.
    Measured,
    /// An earlier start's probe and today's meters.
    Cached {
        /// Relative difference of the size computed now to the planned one.
        drift: f64,
    },
    /// A flag.
    Pinned,
}

/// What decides the size of the KV cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Bound {
    /// Memory, times `--mem-fraction`.
    Memory,
    /// More would be of no use.
    Useful,
    /// `--max-total-token-num`.
    PinnedTokens,
    /// `--kv-cache-memory-bytes`.
    PinnedBytes,
    /// The device of another rank holds less.
    OtherRank,
}

impl Bound {
    /// Name in logs.
    pub fn name(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::Useful => "useful",
            Self::PinnedTokens => "max-total-token-num",
            Self::PinnedBytes => "kv-cache-memory-bytes",
            Self::OtherRank => "other-rank",
        }
    }
}

/// One reading of the meters, in bytes. `components` + `unattributed` = `reserved`; with `peers` and `free` that is `total`
/// unless the device is overdrawn.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Memory {
    /// Capacity of the device.
    pub total: u64,
    /// Used by nobody.
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

/// One worst step that ran.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ScenarioResult {
    /// Which worst case.
    pub kind: ScenarioKind,
    /// Rows in the step.
    pub rows: usize,
    /// Tokens in the step.
    pub tokens: usize,
    /// Its time, the first run of these shapes.
    pub seconds: f64,
    /// Most bytes of the step arena in use at once.
    pub scratch_bytes: u64,
    /// Highest `reserved` of the phase so far.
    pub peak_reserved: u64,
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

impl From<&ScenarioResult> for ScenarioShape {
    fn from(result: &ScenarioResult) -> Self {
        Self {
            kind: result.kind,
            rows: result.rows,
            tokens: result.tokens,
        }
    }
}

/// One size that was tried.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Attempt {
    /// Tokens of the KV cache.
    pub kv_tokens: usize,
    /// How it ended.
    pub outcome: Outcome,
    /// The worst steps that passed.
    pub scenarios: Vec<ScenarioResult>,
    /// Highest `reserved`.
    pub peak_reserved: u64,
    /// Its time.
    pub seconds: f64,
}

/// How an attempt ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "outcome", rename_all = "snake_case")]
pub enum Outcome {
    /// Every worst step ran.
    Proved,
    /// Memory ran out.
    OutOfMemory {
        /// Rebuild or validate.
        phase: Phase,
        /// The worst step, in validate.
        scenario: Option<ScenarioKind>,
        /// Bytes asked for.
        requested: u64,
        /// What they were for.
        component: &'static str,
        /// Free at that moment.
        free: u64,
        /// Other processes at that moment.
        peers: u64,
    },
    /// Another rank ran out of memory.
    OtherRank {
        /// Which one.
        rank: usize,
    },
}

impl Outcome {
    pub(crate) fn out_of_memory(phase: Phase, scenario: Option<ScenarioKind>, oom: &Oom) -> Self {
        Self::OutOfMemory {
            phase,
            scenario,
            requested: oom.requested,
            component: oom.component.name(),
            free: oom.meters.free,
            peers: oom.meters.peers(),
        }
    }
}

/// A faster or larger path that a start does without.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Disabled {
    /// Which path, such as `CUDA graphs`.
    pub path: &'static str,
    /// What is done instead, and why.
    pub reason: String,
}

/// What a finished profile hands to its report.
pub(crate) struct Findings {
    pub(crate) baseline: Memory,
    pub(crate) ready: Memory,
    pub(crate) rank: usize,
    pub(crate) ranks: usize,
    pub(crate) bound: Bound,
    pub(crate) origin: Origin,
    pub(crate) discarded_plan: Option<DiscardedPlan>,
    pub(crate) plan_error: Option<f64>,
    pub(crate) probe: Option<(Measured, Vec<ScenarioResult>, Arithmetic)>,
    pub(crate) attempts: Vec<Attempt>,
    pub(crate) left_out: Vec<LeftOut>,
    pub(crate) kv_blocks: usize,
    pub(crate) seconds: f64,
}

impl Report {
    pub(crate) fn new(spec: &ProfileSpec, findings: Findings) -> Self {
        let StepLimits {
            max_num_batched_tokens,
            max_num_seqs,
            max_model_len,
        } = spec.limits;
        let suggestions = suggestions(spec, &findings);
        let Findings {
            baseline,
            ready,
            rank,
            ranks,
            bound,
            origin,
            discarded_plan,
            plan_error,
            probe,
            attempts,
            left_out,
            kv_blocks,
            seconds,
        } = findings;
        let (probe, probe_scenarios, arithmetic) = match probe {
            Some((measured, scenarios, arithmetic)) => (Some(measured), scenarios, Some(arithmetic)),
            None => (None, Vec::new(), None),
        };
        let component = |name: &str| {
            ready
                .components
                .iter()
                .find(|line| line.name == name)
                .map_or(0, |l| l.bytes)
        };
        let kv_bytes = component("kv");
        let kv = spec.kv(kv_blocks);
        Self {
            kv_tokens: kv.capacity_tokens(),
            kv_blocks,
            block_size: spec.block_size.tokens(),
            kv_bytes,
            scratch_bytes: component("arena"),
            bound,
            max_model_len,
            max_num_seqs,
            max_num_batched_tokens,
            groups: GroupReport::all(spec),
            full_length_requests: kv.requests_of(max_model_len),
            margins: spec.margins,
            baseline,
            ready,
            rank,
            ranks,
            origin,
            discarded_plan,
            plan_error,
            probe,
            probe_scenarios,
            arithmetic,
            attempts,
            left_out,
            disabled: spec.disabled.clone(),
            suggestions,
            seconds,
        }
    }
}

/// Bytes in binary units, for people.
pub(crate) fn human(bytes: u64) -> String {
    match bytes {
        0..1024 => format!("{bytes} B"),
        1024..0x10_0000 => format!("{:.1} KiB", bytes as f64 / 1024.0),
        0x10_0000..0x4000_0000 => format!("{:.1} MiB", bytes as f64 / 1048576.0),
        _ => format!("{:.2} GiB", bytes as f64 / 1073741824.0),
    }
}

#[cfg(test)]
mod tests {
    use plimsoll_core::Component;

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

    #[test]
    fn bytes_for_people() {
        let cases = [
            (0, "0 B"),
            (1023, "1023 B"),
            (1536, "1.5 KiB"),
            (150 << 20, "150.0 MiB"),
            (3 << 29, "1.50 GiB"),
        ];
        for (bytes, text) in cases {
            assert_eq!(human(bytes), text);
        }
    }
}
