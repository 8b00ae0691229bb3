use cudarc::driver::sys;

use super::{Gpu, GpuError, check};

/// Recorded launches, replayed as one.
#[derive(Debug)]
pub struct Graph {
    gpu: Gpu,
    exec: sys::CUgraphExec,
}

// SAFETY: the handle belongs to the driver, whose functions may be called from any thread.
unsafe impl Send for Graph {}

impl Gpu {
    /// Records what `record` launches as a graph, without running it.
    ///
    /// # Errors
    /// [`GpuError`] of the driver or of `record`.
    pub fn capture<E: From<GpuError>>(&self, record: impl FnOnce() -> Result<(), E>) -> Result<Graph, E> {
        self.bind()?;
        Graph::capture(self, record)
    }
}

impl Graph {
    fn capture<E: From<GpuError>>(gpu: &Gpu, record: impl FnOnce() -> Result<(), E>) -> Result<Self, E> {
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        let stream = gpu.stream();
        let (mut graph, mut exec) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: the stream is alive; places to write to. A capture that was begun is ended whatever `record` says.
        unsafe {
            check("cuStreamBeginCapture", sys::cuStreamBeginCapture_v2(stream, mode))?;
            let recorded = record();
            let ended = check("cuStreamEndCapture", sys::cuStreamEndCapture(stream, &mut graph));
            let instantiated = recorded.and(ended.map_err(E::from)).and_then(|()| {
                let result = sys::cuGraphInstantiateWithFlags(&mut exec, graph, 0);
                Ok(check("cuGraphInstantiate", result)?)
            });
            if !graph.is_null() {
                check("cuGraphDestroy", sys::cuGraphDestroy(graph))?;
            }
            instantiated?;
        }
        let graph = Self {
            gpu: gpu.clone(),
            exec,
        };
        // Takes its device memory now, not at the first launch.
        // SAFETY: the graph and the stream are alive.
        check("cuGraphUpload", unsafe { sys::cuGraphUpload(graph.exec, stream) })?;
        Ok(graph)
    }

    /// Starts a replay on the stream.
    ///
    /// # Errors
    /// [`GpuError`] of the driver.
    pub fn launch(&self) -> Result<(), GpuError> {
        self.gpu.bind()?;
        // SAFETY: the graph and the stream are alive.
        check("cuGraphLaunch", unsafe {
            sys::cuGraphLaunch(self.exec, self.gpu.stream())
        })
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        if self.gpu.bind().is_ok() {
            // SAFETY: the driver keeps what a running replay needs. It can only fail if the context is gone.
            let _ = unsafe { sys::cuGraphExecDestroy(self.exec) };
        }
    }
}
