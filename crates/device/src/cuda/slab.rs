use std::fmt;
use std::marker::PhantomData;
use std::ops::Range;

use bytemuck::Pod;
use cudarc::driver::sys;
use plimsoll_core::Component;

use super::mapping::{Mapping, Reservation};
use super::{DeviceError, Gpu, GpuError, check};
use crate::Charge;

/// The pool's allocations are multiples of this many bytes.
pub const POOL_UNIT: usize = 512;

/// What the pool holds is a multiple of this many bytes.
pub const POOL_CHUNK: usize = 32 << 20;

/// Device memory, charged to the GPU's account and given back on drop.
///
/// The KV cache, states, the encoder, the canary and what peers reach are mapped, exactly as large as asked for (rounded to the
/// granularity, 2 MiB); everything else comes from the stream-ordered pool.
pub struct GpuSlab {
    bytes: usize,
    memory: Memory,
}

/// Fields are dropped in order: the memory before its addresses or its charge.
enum Memory {
    Mapped {
        _mapping: Mapping,
        reservation: Reservation,
    },
    Pooled {
        pooled: Pooled,
        _charge: Charge,
    },
}

struct Pooled {
    gpu: Gpu,
    ptr: sys::CUdeviceptr,
}

impl Gpu {
    /// `bytes` of device memory for `component`, of any content.
    ///
    /// # Errors
    /// [`DeviceError::Oom`] if the device or the account has no room.
    pub fn alloc(&self, component: Component, bytes: usize) -> Result<GpuSlab, DeviceError> {
        self.count_allocation();
        GpuSlab::new(self, component, bytes, &[])
    }

    /// As [`Self::alloc`], for kernels of `peers` too, which find it at the same address; mapped, so exactly as large as asked
    /// for (rounded to the granularity). All of `peers` must [reach](Self::reaches) this GPU.
    ///
    /// # Errors
    /// [`DeviceError::Oom`] if the device or the account has no room, [`DeviceError::Gpu`] if a peer cannot have access.
    pub fn alloc_for(
        &self,
        component: Component,
        bytes: usize,
        peers: &[Self],
    ) -> Result<GpuSlab, DeviceError> {
        self.count_allocation();
        GpuSlab::new(self, component, bytes, peers)
    }
}

impl GpuSlab {
    fn new(gpu: &Gpu, component: Component, bytes: usize, peers: &[Gpu]) -> Result<Self, DeviceError> {
        let failed = |error: GpuError| gpu.failed(component, bytes as u64, error);
        // What has to come back to the last byte: the pool keeps a chunk as long as any part of it is in use.
        let alone = matches!(
            component,
            Component::Kv | Component::States | Component::Encoder | Component::Canary
        );
        let mapped = alone || !peers.is_empty();
        let unit = if mapped { gpu.granularity() } else { POOL_UNIT };
        let rounded = bytes
            .max(1)
            .checked_next_multiple_of(unit)
            .ok_or_else(|| gpu.budget().oom(component, u64::MAX))?;
        let memory = if mapped {
            let reservation = Reservation::new(gpu, rounded).map_err(failed)?;
            Memory::Mapped {
                _mapping: Mapping::new(gpu, component, reservation.ptr, rounded, peers)?,
                reservation,
            }
        } else {
            let charge = gpu.budget().charge(component, rounded as u64)?;
            Memory::Pooled {
                pooled: Pooled::new(gpu, rounded).map_err(failed)?,
                _charge: charge,
            }
        };
        Ok(Self { bytes, memory })
    }

    /// Bytes asked for.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// All of it, as elements; a rest smaller than one is left out.
    pub fn slice<T: Pod>(&self) -> GpuSlice<'_, T> {
        let ptr = match &self.memory {
            Memory::Mapped { reservation, .. } => reservation.ptr,
            Memory::Pooled { pooled, .. } => pooled.ptr,
        };
        GpuSlice::new(ptr, self.bytes / size_of::<T>())
    }
}

impl Pooled {
    fn new(gpu: &Gpu, bytes: usize) -> Result<Self, GpuError> {
        gpu.bind()?;
        let mut ptr = 0;
        // SAFETY: a place to write to.
        check("cuMemAllocFromPoolAsync", unsafe {
            sys::cuMemAllocFromPoolAsync(&mut ptr, bytes, gpu.pool(), gpu.stream())
        })?;
        let pooled = Self {
            gpu: gpu.clone(),
            ptr,
        };
        // Other streams may use it from now on.
        gpu.synchronize()?;
        Ok(pooled)
    }
}

impl Drop for Pooled {
    fn drop(&mut self) {
        let freed = self.gpu.bind().and_then(|()| {
            // SAFETY: the memory is this slab's; the stream orders the free after what was launched.
            check("cuMemFreeAsync", unsafe {
                sys::cuMemFreeAsync(self.ptr, self.gpu.stream())
            })
        });
        if let Err(error) = freed {
            tracing::error!(%error, "device memory could not be freed");
        }
    }
}

impl fmt::Debug for GpuSlab {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "GpuSlab({} bytes)", self.bytes)
    }
}

/// A view of elements in device memory. Copies may overlap; kernels on the stream run in order.
pub struct GpuSlice<'a, T> {
    ptr: sys::CUdeviceptr,
    len: usize,
    of: PhantomData<&'a [T]>,
}

impl<T> Clone for GpuSlice<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for GpuSlice<'_, T> {}

impl<T> fmt::Debug for GpuSlice<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "GpuSlice({} x {})", self.len, std::any::type_name::<T>())
    }
}

impl<'a, T: Pod> GpuSlice<'a, T> {
    pub(crate) fn new(ptr: sys::CUdeviceptr, len: usize) -> Self {
        Self {
            ptr,
            len,
            of: PhantomData,
        }
    }

    /// Elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// True if there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Device address of the first.
    pub fn ptr(&self) -> u64 {
        self.ptr
    }

    /// Bytes.
    pub fn bytes(&self) -> usize {
        self.len * size_of::<T>()
    }

    /// A part.
    ///
    /// # Panics
    /// If it is not within this slice.
    pub fn range(&self, range: Range<usize>) -> Self {
        assert!(
            range.start <= range.end && range.end <= self.len,
            "{range:?} of {} elements",
            self.len
        );
        Self::new(self.ptr + (range.start * size_of::<T>()) as u64, range.len())
    }

    /// The same bytes as other elements; a rest smaller than one is left out.
    ///
    /// # Panics
    /// If the address is not aligned for them.
    pub fn cast<U: Pod>(&self) -> GpuSlice<'a, U> {
        assert!(self.ptr.is_multiple_of(align_of::<U>() as u64), "misaligned cast");
        GpuSlice::new(self.ptr, self.bytes() / size_of::<U>())
    }
}
