use std::sync::Arc;

use plimsoll_core::{BuildError, Meters, StateConfig, StepLimits};
use plimsoll_device::cuda::GpuError;
use plimsoll_model::cuda::{GpuModel, GpuOptions, GpuRunner};
use plimsoll_profiler::{BuildProgress, Target};

/// A loaded model on its GPU.
pub(crate) struct GpuTarget {
    pub(crate) model: Arc<GpuModel>,
    pub(crate) limits: StepLimits,
    pub(crate) options: GpuOptions,
}

impl Target for GpuTarget {
    type State = GpuRunner;

    fn build(
        &mut self,
        config: &StateConfig,
        piece: &mut dyn FnMut(BuildProgress),
    ) -> Result<GpuRunner, BuildError> {
        let graphs = &mut |done, of| piece(BuildProgress::Graph { done, of });
        self.model.build_state(config, &self.limits, self.options, graphs)
    }

    fn meters(&self) -> Meters {
        self.model.gpu().meters()
    }

    fn reset_high_water(&mut self) {
        let gpu = self.model.gpu();
        report(gpu.settle_runtime().and_then(|()| gpu.reset_high_water()));
    }

    fn trim(&mut self) {
        report(self.model.gpu().trim());
    }

    /// Libraries and modules load more of themselves when first used: the first run of a step is the time to look.
    fn take_scratch_high_water(&mut self, state: &mut GpuRunner) -> u64 {
        report(self.model.gpu().settle_runtime());
        state.take_arena_high_water()
    }

    /// The pool keeps what is freed until it is trimmed.
    fn release_canary(&mut self, state: &mut GpuRunner) {
        state.release_canary();
        self.trim();
    }
}

/// A GPU that fails here fails at the next step too, which says so to whoever asked.
fn report(result: Result<(), GpuError>) {
    if let Err(error) = result {
        tracing::error!(%error, "the GPU failed between two steps");
    }
}
