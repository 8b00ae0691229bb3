use std::sync::Arc;

use plimsoll_core::{BuildError, Meters, StateConfig, StepLimits};
use plimsoll_device::Budget;
use plimsoll_model::{Model, Runner};
use plimsoll_profiler::{BuildProgress, Target};

/// A loaded model on a budget of bytes.
pub(crate) struct ModelTarget {
    pub(crate) model: Arc<Model>,
    pub(crate) limits: StepLimits,
    pub(crate) budget: Budget,
}

impl Target for ModelTarget {
    type State = Runner;

    fn build(
        &mut self,
        config: &StateConfig,
        piece: &mut dyn FnMut(BuildProgress),
    ) -> Result<Runner, BuildError> {
        let touched = &mut || piece(BuildProgress::Memory);
        Ok(self
            .model
            .build_state(config, &self.limits, &self.budget, touched)?)
    }

    fn meters(&self) -> Meters {
        self.budget.look();
        self.budget.meters()
    }

    fn reset_high_water(&mut self) {
        self.budget.reset_high_water();
    }

    /// A budget holds nothing that is not in use.
    fn trim(&mut self) {}

    fn take_scratch_high_water(&mut self, state: &mut Runner) -> u64 {
        state.take_arena_high_water()
    }

    fn release_canary(&mut self, state: &mut Runner) {
        state.release_canary();
    }
}
