use std::fmt;
use std::sync::atomic::AtomicU32;

use bytemuck::Pod;
use cudarc::driver::sys;

use super::{Gpu, GpuError, check};

/// Host memory that the GPU reads and writes directly, zeroed at first.
pub struct PinnedSlab {
    gpu: Gpu,
    ptr: *mut u8,
    bytes: usize,
}

// SAFETY: the memory is owned and not tied to a thread.
unsafe impl Send for PinnedSlab {}
// SAFETY: shared references only read.
unsafe impl Sync for PinnedSlab {}

impl PinnedSlab {
    /// `bytes` of pinned memory.
    ///
    /// # Errors
    /// [`GpuError`] if the system has no memory to pin.
    pub fn new(gpu: &Gpu, bytes: usize) -> Result<Self, GpuError> {
        gpu.bind()?;
        let mut ptr = std::ptr::null_mut();
        let bytes = bytes.max(1);
        // SAFETY: a place to write to; the memory has that many bytes.
        unsafe {
            check("cuMemHostAlloc", sys::cuMemHostAlloc(&mut ptr, bytes, 0))?;
            std::ptr::write_bytes(ptr.cast::<u8>(), 0, bytes);
        }
        Ok(Self {
            gpu: gpu.clone(),
            ptr: ptr.cast(),
            bytes,
        })
    }

    /// All of it, as elements; a rest smaller than one is left out.
    pub fn as_slice<T: Pod>(&self) -> &[T] {
        // SAFETY: the memory is initialised, page-aligned and as long; any bits are a `Pod`.
        unsafe { std::slice::from_raw_parts(self.ptr.cast(), self.bytes / size_of::<T>()) }
    }

    /// The same as words that kernels may change at any time.
    pub fn as_atomics(&self) -> &[AtomicU32] {
        // SAFETY: the memory is initialised, page-aligned and as long, and a word that is atomic may be shared.
        unsafe { std::slice::from_raw_parts(self.ptr.cast(), self.bytes / size_of::<AtomicU32>()) }
    }

    /// Its address, for kernels.
    pub fn ptr(&self) -> u64 {
        self.ptr.addr() as u64
    }

    /// The same, to write to.
    pub fn as_mut_slice<T: Pod>(&mut self) -> &mut [T] {
        // SAFETY: as above, and borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.cast(), self.bytes / size_of::<T>()) }
    }
}

impl Drop for PinnedSlab {
    fn drop(&mut self) {
        if self.gpu.bind().is_ok() {
            // SAFETY: the memory is this slab's. It can only fail if the context is gone.
            let _ = unsafe { sys::cuMemFreeHost(self.ptr.cast()) };
        }
    }
}

impl fmt::Debug for PinnedSlab {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PinnedSlab({} bytes)", self.bytes)
    }
}
