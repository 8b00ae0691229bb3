//! What single steps of the profile find, as the report and plans have it.

use plimsoll_core::Oom;
use serde::{Deserialize, Serialize};

use crate::{Phase, ScenarioKind, ScenarioShape};

/// What the stress of a state measured.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Measured {
    /// Highest `reserved`.
    pub peak_reserved: u64,
    /// Highest `used`.
    pub peak_used: u64,
    /// Bytes of the KV cache meanwhile.
    pub kv_bytes: u64,
    /// Tokens it held.
    pub kv_tokens: usize,
    /// Most bytes of the step arena in use at once.
    pub scratch_bytes: u64,
}

impl Measured {
    /// Bytes allocators held without using them, at the peak.
    pub fn fragmentation(&self) -> u64 {
        self.peak_reserved.saturating_sub(self.peak_used)
    }
}

/// What decides the size of the KV cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, strum::IntoStaticStr)]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "kebab-case")]
pub enum Bound {
    /// Memory, times `--mem-fraction`.
    Memory,
    /// More would be of no use.
    Useful,
    /// `--max-total-token-num`.
    #[strum(serialize = "max-total-token-num")]
    PinnedTokens,
    /// `--kv-cache-memory-bytes`.
    #[strum(serialize = "kv-cache-memory-bytes")]
    PinnedBytes,
    /// The device of another rank holds less.
    OtherRank,
}

impl Bound {
    /// Name in logs.
    pub fn name(self) -> &'static str {
        self.into()
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
