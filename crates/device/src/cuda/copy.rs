//! Copies between host and device, in the order of the stream.

use bytemuck::Pod;
use cudarc::driver::sys;

use super::{Gpu, GpuError, GpuSlice, PinnedSlab, check};

impl Gpu {
    /// Copies to the device and waits.
    ///
    /// # Errors
    /// [`GpuError`] of the driver.
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn upload<T: Pod>(&self, from: &[T], to: GpuSlice<'_, T>) -> Result<(), GpuError> {
        assert_eq!(from.len(), to.len(), "upload");
        self.bind()?;
        // SAFETY: both have that many bytes, and this waits before it returns.
        unsafe {
            check(
                "cuMemcpyHtoDAsync",
                sys::cuMemcpyHtoDAsync_v2(to.ptr(), from.as_ptr().cast(), size_of_val(from), self.stream()),
            )?;
        }
        self.synchronize()
    }

    /// Copies from the device, after all launched work.
    ///
    /// # Errors
    /// [`GpuError`] of the driver, or of work that failed.
    pub fn download<T: Pod>(&self, from: GpuSlice<'_, T>) -> Result<Vec<T>, GpuError> {
        self.bind()?;
        let mut to = vec![T::zeroed(); from.len()];
        // SAFETY: both have that many bytes, and this waits before it returns.
        unsafe {
            check(
                "cuMemcpyDtoHAsync",
                sys::cuMemcpyDtoHAsync_v2(
                    to.as_mut_ptr().cast(),
                    from.ptr(),
                    size_of_val(to.as_slice()),
                    self.stream(),
                ),
            )?;
        }
        self.synchronize()?;
        Ok(to)
    }

    /// Starts a copy to the device.
    ///
    /// # Errors
    /// [`GpuError`] of the driver.
    ///
    /// # Panics
    /// If `from` has not as many bytes as `to` from `offset` on.
    ///
    /// # Safety
    /// `from` must live and stay unchanged until the copy is done (an [`Event`](super::Event) recorded after it passed).
    pub unsafe fn upload_async(
        &self,
        from: &PinnedSlab,
        offset: usize,
        to: GpuSlice<'_, u8>,
    ) -> Result<(), GpuError> {
        self.bind()?;
        let from = &from.as_slice::<u8>()[offset..offset + to.len()];
        // SAFETY: the lengths agree; the caller keeps the source.
        check("cuMemcpyHtoDAsync", unsafe {
            sys::cuMemcpyHtoDAsync_v2(to.ptr(), from.as_ptr().cast(), from.len(), self.stream())
        })
    }

    /// Starts a copy from the device to the front of `to`.
    ///
    /// # Errors
    /// [`GpuError`] of the driver.
    ///
    /// # Panics
    /// If `to` has fewer bytes than `from`.
    ///
    /// # Safety
    /// `to` must live and not be read until the copy is done (an [`Event`](super::Event) recorded after it passed).
    pub unsafe fn download_async(&self, from: GpuSlice<'_, u8>, to: &mut PinnedSlab) -> Result<(), GpuError> {
        self.bind()?;
        let to = &mut to.as_mut_slice::<u8>()[..from.len()];
        // SAFETY: the lengths agree; the caller keeps the destination.
        check("cuMemcpyDtoHAsync", unsafe {
            sys::cuMemcpyDtoHAsync_v2(to.as_mut_ptr().cast(), from.ptr(), to.len(), self.stream())
        })
    }

    /// Starts a copy within the device.
    ///
    /// # Errors
    /// [`GpuError`] of the driver.
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn copy<T: Pod>(&self, from: GpuSlice<'_, T>, to: GpuSlice<'_, T>) -> Result<(), GpuError> {
        assert_eq!(from.len(), to.len(), "copy");
        self.bind()?;
        // SAFETY: the lengths agree, and a slice cannot outlive its memory.
        check("cuMemcpyDtoDAsync", unsafe {
            sys::cuMemcpyDtoDAsync_v2(to.ptr(), from.ptr(), from.len() * size_of::<T>(), self.stream())
        })
    }

    /// Starts to set every byte.
    ///
    /// # Errors
    /// [`GpuError`] of the driver.
    pub fn fill(&self, to: GpuSlice<'_, u8>, byte: u8) -> Result<(), GpuError> {
        self.bind()?;
        // SAFETY: a slice cannot outlive its memory.
        check("cuMemsetD8Async", unsafe {
            sys::cuMemsetD8Async(to.ptr(), byte, to.len(), self.stream())
        })
    }
}
