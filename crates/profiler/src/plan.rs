//! What a finished search found, in a form that outlives the process: the next start skips the probe with it.

use plimsoll_core::{Component, Meters};
use serde::{Deserialize, Serialize};
use strum::{Display, IntoStaticStr};

use crate::{Attempt, Measured, ScenarioResult, StepTimes};

/// What a search measured and the size it led to: a start that has one skips the probe, never the proof.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Plan {
    /// What the probe measured.
    pub probe: Probed,
    /// Pages of KV that were proved.
    pub kv_pages: usize,
    /// Cuts of 5 % between the size that was computed and the one that was proved, unless other processes caused them.
    pub cuts: u32,
    /// How long steps take.
    pub step_times: Option<StepTimes>,
}

/// A measured probe.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Probed {
    /// Its meters.
    pub measured: Measured,
    /// Its worst steps.
    pub scenarios: Vec<ScenarioResult>,
    /// Bytes of weights, in `measured` too.
    pub weights: u64,
    /// Bytes of the runtime when the last step had run, in `measured` too.
    pub runtime: u64,
}

/// A plan that was given, tried and thrown away: the full search followed.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct DiscardedPlan {
    /// Why.
    pub reason: DiscardReason,
    /// Its attempt, where it came to one.
    pub attempt: Option<Attempt>,
}

/// Why a plan was thrown away.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Display, IntoStaticStr)]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case")]
pub enum DiscardReason {
    /// Its numbers contradict each other, or this start's worst steps.
    Implausible,
    /// It leaves less than one request of full length needs.
    TooSmall,
    /// A worst step needed more than the step arena it gives.
    ArenaTooSmall,
    /// Memory ran out at its size.
    OutOfMemory,
    /// Another rank has no plan that it can use.
    OtherRank,
}

impl From<DiscardReason> for DiscardedPlan {
    fn from(reason: DiscardReason) -> Self {
        Self {
            reason,
            attempt: None,
        }
    }
}

impl DiscardReason {
    /// Name in logs.
    pub fn name(self) -> &'static str {
        self.into()
    }
}

/// A cached size that differs by more than this part from the recomputed one is worth a warning.
pub const DRIFT_WARNING: f64 = 0.02;

impl Plan {
    /// Relative difference of a size computed now to the planned one.
    pub(crate) fn drift(&self, pages: usize) -> f64 {
        let planned = self.kv_pages.max(1) as f64;
        (pages as f64 - self.kv_pages as f64) / planned
    }
}

impl Probed {
    /// What the same probe would measure on top of what `now` shows before any state is built. The runtime loads more of
    /// itself when first used: it is as large as the probe saw it, or larger by now.
    pub(crate) fn on_top_of(&self, now: &Meters) -> Measured {
        let weights = i128::from(now.by_component.get(Component::Weights)) - i128::from(self.weights);
        let runtime = now
            .by_component
            .get(Component::Runtime)
            .saturating_sub(self.runtime);
        let shift = weights + i128::from(runtime);
        let shifted = |bytes: u64| u64::try_from((i128::from(bytes) + shift).max(0)).unwrap_or(u64::MAX);
        Measured {
            peak_reserved: shifted(self.measured.peak_reserved),
            peak_used: shifted(self.measured.peak_used),
            ..self.measured.clone()
        }
    }
}
