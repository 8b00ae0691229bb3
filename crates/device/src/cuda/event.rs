use cudarc::driver::sys;

use super::{Gpu, GpuError, check};

/// A point in the stream that can be waited for, and whose time is taken.
#[derive(Debug)]
pub struct Event {
    gpu: Gpu,
    handle: sys::CUevent,
}

// SAFETY: the handle belongs to the driver, whose functions may be called from any thread.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Gpu {
    /// An event, not yet recorded.
    ///
    /// # Errors
    /// [`GpuError`] of the driver.
    pub fn event(&self) -> Result<Event, GpuError> {
        self.bind()?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: a place to write to.
        check("cuEventCreate", unsafe { sys::cuEventCreate(&mut handle, 0) })?;
        Ok(Event {
            gpu: self.clone(),
            handle,
        })
    }
}

impl Event {
    /// Moves it to the end of what is launched now.
    ///
    /// # Errors
    /// [`GpuError`] of the driver.
    pub fn record(&self) -> Result<(), GpuError> {
        self.gpu.bind()?;
        // SAFETY: both are alive.
        check("cuEventRecord", unsafe {
            sys::cuEventRecord(self.handle, self.gpu.stream())
        })
    }

    /// Within [`Gpu::capture`]: each run of the graph moves it behind what was captured before.
    ///
    /// # Errors
    /// [`GpuError`] of the driver.
    pub fn record_in_graph(&self) -> Result<(), GpuError> {
        self.gpu.bind()?;
        let external = sys::CUevent_record_flags::CU_EVENT_RECORD_EXTERNAL as u32;
        // SAFETY: both are alive.
        check("cuEventRecordWithFlags", unsafe {
            sys::cuEventRecordWithFlags(self.handle, self.gpu.stream(), external)
        })
    }

    /// The driver's handle, for other streams.
    pub fn handle(&self) -> sys::CUevent {
        self.handle
    }

    /// Waits, spinning, until the stream has reached it. One that was never recorded has been reached.
    ///
    /// # Errors
    /// [`GpuError`] of the driver, or of work that failed.
    pub fn synchronize(&self) -> Result<(), GpuError> {
        self.gpu.bind()?;
        // SAFETY: it is alive.
        check("cuEventSynchronize", unsafe {
            sys::cuEventSynchronize(self.handle)
        })
    }

    /// True once the stream has reached it.
    ///
    /// # Errors
    /// [`GpuError`] of the driver, or of work that failed.
    pub fn is_reached(&self) -> Result<bool, GpuError> {
        self.gpu.bind()?;
        // SAFETY: it is alive.
        match unsafe { sys::cuEventQuery(self.handle) } {
            sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            result => check("cuEventQuery", result).map(|()| true),
        }
    }

    /// Milliseconds of device time from this event to `end`, both reached.
    ///
    /// # Errors
    /// [`GpuError`] if one was not recorded or not reached.
    pub fn elapsed_ms(&self, end: &Self) -> Result<f32, GpuError> {
        self.gpu.bind()?;
        let mut ms = 0.0;
        // SAFETY: both are alive; a place to write to.
        check("cuEventElapsedTime", unsafe {
            sys::cuEventElapsedTime_v2(&mut ms, self.handle, end.handle)
        })?;
        Ok(ms)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if self.gpu.bind().is_ok() {
            // SAFETY: the driver keeps what it still needs. It can only fail if the context is gone.
            let _ = unsafe { sys::cuEventDestroy_v2(self.handle) };
        }
    }
}
