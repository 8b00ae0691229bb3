//! How the graphs of decode steps come to be.

use plimsoll_device::cuda::DeviceError;

use super::GpuRunner;
use crate::cuda::graphs::{self, Graphs};
use crate::cuda::shape::DecodeStep;

impl GpuRunner {
    /// Those that get a graph.
    fn decode_steps(&self) -> Vec<DecodeStep> {
        graphs::steps(self.bounds.limits.max_num_seqs, self.longest_whole().is_some())
    }

    /// As [`Graphs::longest_whole`].
    fn longest_whole(&self) -> Option<usize> {
        self.model.decoder().longest_whole(&self.state)
    }

    /// Takes what decode steps will take from the arena, so that none of them runs out of it: none takes more than the largest.
    pub(in crate::cuda) fn reserve_for_graphs(&mut self) -> Result<(), DeviceError> {
        let Self {
            model, state, arena, ..
        } = self;
        let input = state.inputs.padding(DecodeStep {
            rows: self.bounds.limits.max_num_seqs,
            is_long: false,
        });
        model.decoder().reserve(&input, state, arena)
    }

    /// Runs what each decode step that gets a graph launches once for real: libraries load what they need. The arena has been reserved.
    pub(in crate::cuda) fn warm_up(
        &mut self,
        progress: &mut dyn FnMut(usize, usize),
    ) -> Result<(), DeviceError> {
        let steps = self.decode_steps();
        let Self {
            model, state, arena, ..
        } = self;
        let (gpu, decoder) = (model.gpu(), model.decoder());
        for &step in steps.iter().rev() {
            progress(0, steps.len());
            let input = state.inputs.padding(step);
            // SAFETY: nothing is in flight.
            unsafe { state.inputs.send(0, &input, None)? };
            decoder.warm_up(&input, state, arena)?;
            gpu.synchronize()?;
        }
        Ok(())
    }

    /// Records the decode steps that get a graph, all of which have run.
    pub(in crate::cuda) fn capture_graphs(
        &mut self,
        progress: &mut dyn FnMut(usize, usize),
    ) -> Result<(), DeviceError> {
        let (steps, longest_whole) = (self.decode_steps(), self.longest_whole());
        let Self {
            model, state, arena, ..
        } = self;
        let (gpu, decoder) = (model.gpu(), model.decoder());
        self.graphs = Graphs::capture(gpu, &steps, progress, |step| {
            let input = state.inputs.padding(step);
            gpu.capture(|| decoder.step(&input, state, arena, None))
        })?;
        self.graphs.longest_whole = longest_whole;
        Ok(())
    }
}
