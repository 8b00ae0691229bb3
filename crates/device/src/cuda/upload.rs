use std::fmt;
use std::marker::PhantomData;

use cudarc::driver::sys;

use super::{Event, Gpu, GpuError, GpuSlice, PinnedSlab, check};

/// A stream of its own for copies to the device, with two pinned buffers that take turns: one is filled while the other is
/// copied. Each thread that uploads has one.
///
/// Nothing orders its copies against other streams: wait with [`Self::finish`] before launching what reads them.
pub struct Uploader<'a> {
    gpu: Gpu,
    stream: sys::CUstream,
    buffers: [Buffer; 2],
    /// The buffer to fill next.
    next: usize,
    /// What is copied to lives longer than the copies, for which the drop waits.
    to: PhantomData<GpuSlice<'a, u8>>,
}

struct Buffer {
    memory: PinnedSlab,
    /// The last copy from it is done.
    copied: Event,
}

// SAFETY: the stream belongs to the driver, whose functions may be called from any thread.
unsafe impl Send for Uploader<'_> {}

impl<'a> Uploader<'a> {
    /// With buffers of `bytes` bytes, the most one [`Self::upload`] takes.
    ///
    /// # Errors
    /// [`GpuError`] of the driver, or if the system has no memory to pin.
    pub fn new(gpu: &Gpu, bytes: usize) -> Result<Self, GpuError> {
        let buffer = || {
            Ok(Buffer {
                memory: PinnedSlab::new(gpu, bytes)?,
                copied: gpu.event()?,
            })
        };
        let buffers = [buffer()?, buffer()?];
        gpu.bind()?;
        let mut stream = std::ptr::null_mut();
        let non_blocking = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: a place to write to.
        check("cuStreamCreate", unsafe {
            sys::cuStreamCreate(&mut stream, non_blocking)
        })?;
        Ok(Self {
            gpu: gpu.clone(),
            stream,
            buffers,
            next: 0,
            to: PhantomData,
        })
    }

    /// Lets `fill` write as many bytes as `to` has, and starts to copy them there.
    ///
    /// # Errors
    /// What `fill` says, or [`GpuError`] of the driver or of an earlier copy.
    ///
    /// # Panics
    /// If `to` is larger than the buffers.
    pub fn upload<E: From<GpuError>>(
        &mut self,
        to: GpuSlice<'a, u8>,
        fill: impl FnOnce(&mut [u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let Buffer { memory, copied } = &mut self.buffers[self.next];
        copied.synchronize()?;
        let from = &mut memory.as_mut_slice::<u8>()[..to.len()];
        fill(from)?;
        self.next = 1 - self.next;
        self.gpu.bind()?;
        // SAFETY: the lengths agree. The source is not touched before `copied` is reached, the destination lives for 'a,
        // and neither ends before the drop has waited.
        unsafe {
            check(
                "cuMemcpyHtoDAsync",
                sys::cuMemcpyHtoDAsync_v2(to.ptr(), from.as_ptr().cast(), from.len(), self.stream),
            )?;
            check("cuEventRecord", sys::cuEventRecord(copied.handle(), self.stream))?;
        }
        Ok(())
    }

    /// Waits until all copies are done.
    ///
    /// # Errors
    /// [`GpuError`] of the driver or of a copy.
    pub fn finish(&self) -> Result<(), GpuError> {
        self.gpu.bind()?;
        // SAFETY: the stream is alive.
        check("cuStreamSynchronize", unsafe {
            sys::cuStreamSynchronize(self.stream)
        })
    }
}

impl Drop for Uploader<'_> {
    fn drop(&mut self) {
        // A failure means that the driver is gone with everything in it, or that a copy failed, which ends all of them.
        let _ = self.finish();
        if self.gpu.bind().is_ok() {
            // SAFETY: nothing can use it any more.
            let _ = unsafe { sys::cuStreamDestroy_v2(self.stream) };
        }
    }
}

impl fmt::Debug for Uploader<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Uploader({:?} x 2)", self.buffers[0].memory)
    }
}
