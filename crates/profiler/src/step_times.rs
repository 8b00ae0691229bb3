//! How long steps take, in a form that outlives the process.

use plimsoll_core::{StepCost, StepCosts};
use serde::{Deserialize, Serialize};

/// Measured times of steps. A row is a token that a step computes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StepTimes {
    /// Steps in which every request generates a token.
    pub decode: Vec<TimedStep>,
    /// Steps that compute prompts of at most 512 tokens too.
    pub mixed: Vec<TimedStep>,
    /// Seconds that a request which generates adds for each token of its context.
    pub context_seconds: f64,
}

/// The shortest of a few steps of one size.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TimedStep {
    /// Its rows.
    pub rows: usize,
    /// Its time.
    pub seconds: f64,
}

impl StepTimes {
    /// What the scheduler makes of them; `None` where too little is known.
    pub fn costs(&self) -> Option<StepCosts> {
        let costs = |steps: &[TimedStep]| {
            let cost = |&TimedStep { rows, seconds }: &TimedStep| StepCost { rows, seconds };
            steps.iter().map(cost).collect()
        };
        StepCosts::new(costs(&self.decode), costs(&self.mixed), self.context_seconds)
    }
}
