//! Virtual memory: addresses are reserved first, and memory is mapped to them as needed.

use cudarc::driver::sys;
use plimsoll_core::Component;

use super::gpu::allocation_prop;
use super::{DeviceError, Gpu, GpuError, check};
use crate::Charge;

/// A range of addresses without memory.
#[derive(Debug)]
pub(super) struct Reservation {
    gpu: Gpu,
    pub(super) ptr: sys::CUdeviceptr,
    bytes: usize,
}

impl Reservation {
    /// `bytes` is a multiple of the granularity.
    pub(super) fn new(gpu: &Gpu, bytes: usize) -> Result<Self, GpuError> {
        gpu.bind()?;
        let mut ptr = 0;
        // SAFETY: a place to write to.
        check("cuMemAddressReserve", unsafe {
            sys::cuMemAddressReserve(&mut ptr, bytes, 0, 0, 0)
        })?;
        Ok(Self {
            gpu: gpu.clone(),
            ptr,
            bytes,
        })
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        if self.gpu.bind().is_ok() {
            // SAFETY: nothing is mapped any more. It can only fail if the context is gone.
            let _ = unsafe { sys::cuMemAddressFree(self.ptr, self.bytes) };
        }
    }
}

/// Memory at reserved addresses, charged.
#[derive(Debug)]
pub(super) struct Mapping {
    gpu: Gpu,
    ptr: sys::CUdeviceptr,
    bytes: usize,
    _charge: Charge,
}

impl Mapping {
    /// Maps `bytes`, a multiple of the granularity, at `ptr`, for kernels of `gpu` and of `peers`.
    pub(super) fn new(
        gpu: &Gpu,
        component: Component,
        ptr: sys::CUdeviceptr,
        bytes: usize,
        peers: &[Gpu],
    ) -> Result<Self, DeviceError> {
        let charge = gpu.budget().charge(component, bytes as u64)?;
        map(gpu, ptr, bytes, peers).map_err(|error| gpu.failed(component, bytes as u64, error))?;
        Ok(Self {
            gpu: gpu.clone(),
            ptr,
            bytes,
            _charge: charge,
        })
    }
}

fn map(gpu: &Gpu, ptr: sys::CUdeviceptr, bytes: usize, peers: &[Gpu]) -> Result<(), GpuError> {
    gpu.bind()?;
    let prop = allocation_prop(gpu.device());
    let mut handle = 0;
    // SAFETY: places to write to; each call is undone if a later one fails.
    unsafe {
        check("cuMemCreate", sys::cuMemCreate(&mut handle, bytes, &prop, 0))?;
        let mapped = check("cuMemMap", sys::cuMemMap(ptr, bytes, 0, handle, 0));
        // From here on the mapping keeps the memory; without one it goes back now.
        let released = check("cuMemRelease", sys::cuMemRelease(handle));
        mapped.and(released)?;
        // A device that is named twice is refused.
        let mut devices: Vec<_> = peers.iter().chain([gpu]).map(Gpu::device).collect();
        devices.sort_unstable();
        devices.dedup();
        let access = devices.iter().map(|&device| {
            let mut access: sys::CUmemAccessDesc = std::mem::zeroed();
            access.location = allocation_prop(device).location;
            access.flags = sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
            access
        });
        let access: Vec<_> = access.collect();
        let set = sys::cuMemSetAccess(ptr, bytes, access.as_ptr(), access.len());
        check("cuMemSetAccess", set).inspect_err(|_| {
            // The first error is the one to tell.
            let _ = sys::cuMemUnmap(ptr, bytes);
        })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the memory is this mapping's, and nothing that was launched still uses it.
        let unmapped = self
            .gpu
            .synchronize()
            .and_then(|()| check("cuMemUnmap", unsafe { sys::cuMemUnmap(self.ptr, self.bytes) }));
        if let Err(error) = unmapped {
            tracing::error!(%error, bytes = self.bytes, "device memory could not be freed");
        }
    }
}
