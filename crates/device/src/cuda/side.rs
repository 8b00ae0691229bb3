use cudarc::driver::sys;

use super::{Event, Gpu, GpuError, GpuSlice, check};

/// A second stream of a GPU, for copies while the first one computes. Nothing orders the two but the events that one of them records
/// and the other waits for.
#[derive(Debug)]
pub struct SideStream {
    gpu: Gpu,
    handle: sys::CUstream,
}

// SAFETY: the stream belongs to the driver, whose functions may be called from any thread.
unsafe impl Send for SideStream {}
// SAFETY: as above.
unsafe impl Sync for SideStream {}

impl SideStream {
    /// An empty one.
    ///
    /// # Errors
    /// [`GpuError`] of the driver.
    pub fn new(gpu: &Gpu) -> Result<Self, GpuError> {
        gpu.bind()?;
        let mut handle = std::ptr::null_mut();
        let non_blocking = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: a place to write to.
        check("cuStreamCreate", unsafe {
            sys::cuStreamCreate(&mut handle, non_blocking)
        })?;
        let gpu = gpu.clone();
        Ok(Self { gpu, handle })
    }

    /// The driver's handle.
    pub(super) fn handle(&self) -> sys::CUstream {
        self.handle
    }

    /// What is started on this stream from now on waits until `event` is reached.
    ///
    /// # Errors
    /// [`GpuError`] of the driver.
    pub fn wait_for(&self, event: &Event) -> Result<(), GpuError> {
        self.gpu.bind()?;
        wait_for(self.handle, event)
    }

    /// Moves `event` to the end of what this stream has been given.
    ///
    /// # Errors
    /// [`GpuError`] of the driver.
    pub fn record(&self, event: &Event) -> Result<(), GpuError> {
        self.gpu.bind()?;
        // SAFETY: both are alive.
        check("cuEventRecord", unsafe {
            sys::cuEventRecord(event.handle(), self.handle)
        })
    }

    /// Starts a copy to an address of this GPU or of one that it [reaches](Gpu::reaches), by a copy engine: kernels lose no
    /// multiprocessor to it.
    ///
    /// # Errors
    /// [`GpuError`] of the driver.
    ///
    /// # Safety
    /// There must be room at `to`, and both must live until the copy has ended.
    pub unsafe fn copy(&self, from: GpuSlice<'_, u8>, to: u64) -> Result<(), GpuError> {
        self.gpu.bind()?;
        // SAFETY: the caller's promise.
        check("cuMemcpyDtoDAsync", unsafe {
            sys::cuMemcpyDtoDAsync_v2(to, from.ptr(), from.len(), self.handle)
        })
    }

    /// Writes a word to such an address once everything before it is done and can be seen by all GPUs.
    ///
    /// # Errors
    /// [`GpuError`] of the driver.
    ///
    /// # Safety
    /// As [`Self::copy`].
    pub unsafe fn write(&self, to: u64, word: u32) -> Result<(), GpuError> {
        self.gpu.bind()?;
        let flags = sys::CUstreamWriteValue_flags::CU_STREAM_WRITE_VALUE_DEFAULT as u32;
        // SAFETY: the caller's promise.
        check("cuStreamWriteValue32", unsafe {
            sys::cuStreamWriteValue32_v2(self.handle, to, word, flags)
        })
    }

    /// Captures what `record` launches on this stream, and forgets it: nothing runs, but libraries load the kernels for it.
    ///
    /// # Errors
    /// [`GpuError`] of the driver or of `record`.
    pub fn rehearse<E: From<GpuError>>(
        &self,
        record: impl FnOnce(sys::CUstream) -> Result<(), E>,
    ) -> Result<(), E> {
        self.gpu.bind()?;
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        let mut graph = std::ptr::null_mut();
        // SAFETY: the stream is alive; a place to write to. A capture that was begun is ended whatever `record` says.
        unsafe {
            check(
                "cuStreamBeginCapture",
                sys::cuStreamBeginCapture_v2(self.handle, mode),
            )?;
            let recorded = record(self.handle);
            let ended = check(
                "cuStreamEndCapture",
                sys::cuStreamEndCapture(self.handle, &mut graph),
            );
            if !graph.is_null() {
                check("cuGraphDestroy", sys::cuGraphDestroy(graph))?;
            }
            recorded.and(ended.map_err(E::from))
        }
    }

    /// Waits until everything is done.
    ///
    /// # Errors
    /// [`GpuError`] of the driver, or of work that failed.
    pub fn synchronize(&self) -> Result<(), GpuError> {
        self.gpu.bind()?;
        // SAFETY: the stream is alive.
        check("cuStreamSynchronize", unsafe {
            sys::cuStreamSynchronize(self.handle)
        })
    }
}

impl Drop for SideStream {
    fn drop(&mut self) {
        // A failure means that the driver is gone with everything in it, or that a copy failed, which ends all of them.
        let _ = self.synchronize();
        if self.gpu.bind().is_ok() {
            // SAFETY: nothing can use it any more.
            let _ = unsafe { sys::cuStreamDestroy_v2(self.handle) };
        }
    }
}

impl Gpu {
    /// What is launched from now on waits until `event` is reached.
    ///
    /// # Errors
    /// [`GpuError`] of the driver.
    pub fn wait_for(&self, event: &Event) -> Result<(), GpuError> {
        self.bind()?;
        wait_for(self.stream(), event)
    }
}

fn wait_for(stream: sys::CUstream, event: &Event) -> Result<(), GpuError> {
    // SAFETY: both are alive.
    check("cuStreamWaitEvent", unsafe {
        sys::cuStreamWaitEvent(stream, event.handle(), 0)
    })
}
