use std::cell::{Cell, RefCell};
use std::fmt;

use bytemuck::Pod;
use plimsoll_core::{Component, Oom, RefusedBy, Scratch};

use super::mapping::{Mapping, Reservation};
use super::{DeviceError, Gpu, GpuSlice};

/// Alignment of every allocation, in bytes: that of a line of L2, and what bulk copies and tensor maps ask for.
const ALIGN: usize = 256;

/// Least growth, in bytes.
const MIN_GROWTH: usize = 32 << 20;

/// The memory of one step on the GPU, allocated by advancing an offset; [`GpuArena::reset`] frees all of it at once.
///
/// Addresses for all of the device's memory are reserved at first, and a growable arena maps memory at its end as needed. So
/// an offset keeps its address for the arena's life, and graphs captured before it grew stay valid. The high-water mark is
/// the size with which a fixed arena can repeat the same steps: offsets depend on the sizes asked for alone.
///
/// Slices borrow the arena, and a reset borrows it exclusively; the work launched on them may still run, which is right as
/// long as what comes next is launched on the same stream.
pub struct GpuArena {
    gpu: Gpu,
    /// Most bytes to hand out; what is mapped beyond is a rest of the granularity.
    limit: usize,
    growable: bool,
    mappings: RefCell<Vec<Mapping>>,
    /// After the mappings: addresses go last.
    reservation: Reservation,
    reserved: usize,
    mapped: Cell<usize>,
    offset: Cell<usize>,
    high_water: Cell<usize>,
    /// The same, since it was last taken.
    recent_high_water: Cell<usize>,
}

impl GpuArena {
    /// An empty arena that grows, or one of a fixed size.
    ///
    /// # Errors
    /// [`DeviceError::Oom`] if a fixed arena does not fit.
    pub fn new(gpu: &Gpu, scratch: Scratch) -> Result<Self, DeviceError> {
        let total = gpu.info().total_bytes;
        let reserved = usize::try_from(total)
            .unwrap_or(usize::MAX / 2)
            .next_multiple_of(gpu.granularity());
        let reservation =
            Reservation::new(gpu, reserved).map_err(|error| gpu.failed(Component::Arena, total, error))?;
        let limit = match scratch {
            Scratch::Growable => reserved,
            Scratch::Fixed(bytes) => {
                usize::try_from(bytes).map_err(|_| gpu.budget().oom(Component::Arena, bytes))?
            }
        };
        let arena = Self {
            gpu: gpu.clone(),
            limit,
            growable: scratch == Scratch::Growable,
            mappings: RefCell::default(),
            reservation,
            reserved,
            mapped: Cell::new(0),
            offset: Cell::new(0),
            high_water: Cell::new(0),
            recent_high_water: Cell::new(0),
        };
        if !arena.growable {
            arena.grow(limit)?;
        }
        Ok(arena)
    }

    /// `len` elements of any content, until the next reset.
    ///
    /// # Errors
    /// [`DeviceError::Oom`] if a fixed arena is full or the device refuses to let a growable one grow.
    pub fn alloc<T: Pod>(&self, len: usize) -> Result<GpuSlice<'_, T>, DeviceError> {
        let overflow = || self.full(u64::MAX);
        let bytes = rounded_bytes::<T>(len).ok_or_else(overflow)?;
        let start = self.offset.get();
        let end = start.checked_add(bytes).ok_or_else(overflow)?;
        if end > self.limit {
            return Err(self.full(bytes as u64).into());
        }
        if end > self.mapped.get() {
            self.grow(growth(end, self.mapped.get()))?;
        }
        self.offset.set(end);
        self.high_water.set(self.high_water.get().max(end));
        self.recent_high_water.set(self.recent_high_water.get().max(end));
        Ok(GpuSlice::new(self.reservation.ptr + start as u64, len))
    }

    /// Frees everything.
    pub fn reset(&mut self) {
        self.offset.set(0);
    }

    /// Bytes of memory it holds.
    pub fn mapped(&self) -> usize {
        self.mapped.get()
    }

    /// Most bytes allocated at once since the arena was made: the size a fixed arena needs for the same steps.
    pub fn high_water(&self) -> usize {
        self.high_water.get()
    }

    /// Most bytes allocated at once since the last call: what one step takes, if called after each.
    pub fn take_high_water(&mut self) -> usize {
        self.recent_high_water.replace(0)
    }

    /// No room for `bytes` bytes in the arena itself.
    fn full(&self, bytes: u64) -> Oom {
        Oom {
            refused_by: match self.growable {
                true => RefusedBy::Device,
                false => RefusedBy::FixedScratch,
            },
            ..self.gpu.budget().oom(Component::Arena, bytes)
        }
    }

    fn grow(&self, bytes: usize) -> Result<(), DeviceError> {
        let overflow = || self.gpu.budget().oom(Component::Arena, bytes as u64);
        let bytes = bytes
            .checked_next_multiple_of(self.gpu.granularity())
            .ok_or_else(overflow)?;
        let mapped = self.mapped.get();
        if bytes > self.reserved - mapped {
            return Err(overflow().into());
        }
        self.gpu.count_allocation();
        let at = self.reservation.ptr + mapped as u64;
        let mapping = Mapping::new(&self.gpu, Component::Arena, at, bytes, &[])?;
        self.mappings.borrow_mut().push(mapping);
        self.mapped.set(mapped + bytes);
        Ok(())
    }
}

/// Bytes that `len` elements take in an arena; `None` if they fit no memory.
fn rounded_bytes<T>(len: usize) -> Option<usize> {
    len.checked_mul(size_of::<T>())?.checked_next_multiple_of(ALIGN)
}

/// By how much an arena of `mapped` bytes grows to hold `end`, which is beyond them; before it is rounded.
fn growth(end: usize, mapped: usize) -> usize {
    (end - mapped).max(MIN_GROWTH)
}

/// A growable [`GpuArena`] without memory, on a GPU that maps memory in pieces of [`DryGpuArena::GRANULARITY`]: it counts what
/// the arena would hold for the same allocations.
#[derive(Debug, Default)]
pub struct DryGpuArena {
    offset: usize,
    mapped: usize,
    recent_high_water: usize,
}

impl DryGpuArena {
    /// Bytes in which memory is mapped: that of all GPUs so far.
    pub const GRANULARITY: usize = 2 << 20;

    /// As [`GpuArena::alloc`]; `None` if no memory could hold it.
    pub fn alloc<T>(&mut self, len: usize) -> Option<()> {
        let end = self.offset.checked_add(rounded_bytes::<T>(len)?)?;
        if end > self.mapped {
            let more = growth(end, self.mapped).checked_next_multiple_of(Self::GRANULARITY)?;
            self.mapped = self.mapped.checked_add(more)?;
        }
        self.offset = end;
        self.recent_high_water = self.recent_high_water.max(end);
        Some(())
    }

    /// As [`GpuArena::reset`].
    pub fn reset(&mut self) {
        self.offset = 0;
    }

    /// As [`GpuArena::take_high_water`].
    pub fn take_high_water(&mut self) -> usize {
        std::mem::take(&mut self.recent_high_water)
    }

    /// As [`GpuArena::mapped`].
    pub fn mapped(&self) -> usize {
        self.mapped
    }
}

impl fmt::Debug for GpuArena {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GpuArena")
            .field("growable", &self.growable)
            .field("mapped", &self.mapped)
            .field("high_water", &self.high_water)
            .finish_non_exhaustive()
    }
}
