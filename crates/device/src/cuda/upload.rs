use std::fmt;
use std::marker::PhantomData;

use cudarc::driver::sys;

use super::{Event, Gpu, GpuError, GpuSlice, PinnedSlab, SideStream, check};

/// A stream of its own for copies to the device, with two pinned buffers that take turns: one is filled while the other is
/// copied. Each thread that uploads has one.
///
/// Nothing orders its copies against other streams: wait with [`Self::finish`] before launching what reads them.
pub struct Uploader<'a> {
    gpu: Gpu,
    stream: SideStream,
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
        Ok(Self {
            gpu: gpu.clone(),
            stream: SideStream::new(gpu)?,
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
                sys::cuMemcpyHtoDAsync_v2(to.ptr(), from.as_ptr().cast(), from.len(), self.stream.handle()),
            )?;
        }
        Ok(self.stream.record(copied)?)
    }

    /// Waits until all copies are done.
    ///
    /// # Errors
    /// [`GpuError`] of the driver or of a copy.
    pub fn finish(&self) -> Result<(), GpuError> {
        self.stream.synchronize()
    }
}

impl fmt::Debug for Uploader<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Uploader({:?} x 2)", self.buffers[0].memory)
    }
}
