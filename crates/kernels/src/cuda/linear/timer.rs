//! How long launches take.

use plimsoll_device::cuda::{Event, Gpu, GpuError, Graph};

/// Of a measurement, beyond the first; the least counts.
const MORE_REPEATS: usize = 2;
/// A way whose first time exceeds the fastest so far by this factor is not timed again.
const HOPELESS: f32 = 1.2;

/// Times calls that launch kernels.
#[derive(Debug)]
pub(super) struct Timer {
    gpu: Gpu,
    /// Before and behind the calls, in each graph: what the driver does for other threads between two launches does not count.
    marks: [Event; 2],
}

/// Calls to be timed, in a graph.
#[derive(Debug)]
pub(super) struct Recorded {
    graph: Graph,
    calls: usize,
}

impl Timer {
    pub(super) fn new(gpu: &Gpu) -> Result<Self, GpuError> {
        Ok(Self {
            gpu: gpu.clone(),
            marks: [gpu.event()?, gpu.event()?],
        })
    }

    /// So many calls, in a graph. It may be made while another runs.
    pub(super) fn record(
        &self,
        calls: usize,
        launch: impl FnMut(usize) -> Result<(), GpuError>,
    ) -> Result<Recorded, GpuError> {
        let [start, end] = &self.marks;
        let graph = self.gpu.capture(|| {
            start.record_in_graph()?;
            (0..calls).try_for_each(launch)?;
            end.record_in_graph()
        })?;
        Ok(Recorded { graph, calls })
    }

    /// Starts a run that loads what is needed, and one that counts.
    pub(super) fn start(&self, recorded: &Recorded) -> Result<(), GpuError> {
        recorded.graph.launch()?;
        recorded.graph.launch()
    }

    /// Waits for what was started last, and runs it again unless it is hopeless: `fastest` is the time of the fastest way so far. Returns the
    /// microseconds of each call.
    pub(super) fn finish(&self, recorded: &Recorded, fastest: f32) -> Result<f32, GpuError> {
        let mut least = self.last(recorded)?;
        if least > HOPELESS * fastest {
            return Ok(least);
        }
        for _ in 0..MORE_REPEATS {
            recorded.graph.launch()?;
            least = least.min(self.last(recorded)?);
        }
        Ok(least)
    }

    /// Waits for the last run. Returns the microseconds of each call.
    fn last(&self, recorded: &Recorded) -> Result<f32, GpuError> {
        let [start, end] = &self.marks;
        end.synchronize()?;
        Ok(start.elapsed_ms(end)? * 1e3 / recorded.calls as f32)
    }
}
