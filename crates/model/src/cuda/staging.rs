//! Step inputs: packed on the host into pinned memory, sent in one copy.

use std::marker::PhantomData;
use std::ops::Range;

use plimsoll_core::Component;
use plimsoll_device::Pod;
use plimsoll_device::cuda::{DeviceError, Gpu, GpuError, GpuSlab, GpuSlice, PinnedSlab};
use plimsoll_kernels::cuda::HostCopies;

/// Steps launched and not finished at most: while the GPU runs one, the host prepares the next.
pub(super) const STEPS_IN_FLIGHT: usize = 2;

/// Alignment of every section, in bytes.
const ALIGN: usize = 16;

/// Where a section of a step's input lies, in bytes, on the host as on the device.
#[derive(Debug)]
pub(crate) struct Section<T> {
    start: usize,
    len: usize,
    of: PhantomData<T>,
}

impl<T> Clone for Section<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Section<T> {}

impl<T: Pod> Section<T> {
    fn range(&self) -> Range<usize> {
        self.start..self.start + self.len * size_of::<T>()
    }

    /// Its first `len` elements.
    pub(crate) fn front(self, len: usize) -> Self {
        Self {
            len: self.len.min(len),
            ..self
        }
    }

    /// Its first byte.
    pub(crate) fn start(&self) -> usize {
        self.range().start
    }

    /// Behind its last byte.
    pub(crate) fn end(&self) -> usize {
        self.range().end
    }

    /// Its elements.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Bytes of its elements.
    pub(crate) fn bytes(&self) -> usize {
        self.range().len()
    }

    /// The section of memory that was laid out so.
    pub(crate) fn of<'a>(&self, memory: &'a GpuSlab) -> GpuSlice<'a, T> {
        self.within(memory.slice())
    }

    /// The same of a part of memory.
    pub(crate) fn within<'a>(&self, memory: GpuSlice<'a, u8>) -> GpuSlice<'a, T> {
        memory.range(self.range()).cast()
    }

    /// The same on the host.
    pub(crate) fn host<'a>(&self, memory: &'a mut PinnedSlab) -> &'a mut [T] {
        plimsoll_device::cast_slice_mut(&mut memory.as_mut_slice::<u8>()[self.range()])
    }
}

/// Hands out sections one after another.
#[derive(Clone, Debug)]
pub(crate) struct Layout {
    end: usize,
    align: usize,
}

impl Default for Layout {
    fn default() -> Self {
        Self::aligned(ALIGN)
    }
}

impl Layout {
    /// Of sections that begin at multiples of so many bytes.
    pub(crate) fn aligned(align: usize) -> Self {
        Self { end: 0, align }
    }

    /// # Panics
    /// If no memory could hold it.
    pub(crate) fn section<T: Pod>(&mut self, len: usize) -> Section<T> {
        self.rows(len, 1).expect("inputs of a step are small")
    }

    /// `rows` rows of `width` elements; `None` if no memory could hold them.
    pub(crate) fn rows<T: Pod>(&mut self, rows: usize, width: usize) -> Option<Section<T>> {
        let start = self
            .end
            .checked_next_multiple_of(self.align.max(align_of::<T>()))?;
        let len = rows.checked_mul(width)?;
        self.end = len.checked_mul(size_of::<T>())?.checked_add(start)?;
        Some(Section {
            start,
            len,
            of: PhantomData,
        })
    }

    /// Bytes so far.
    pub(crate) fn bytes(&self) -> usize {
        self.end
    }
}

/// Pinned memory for each step in flight, and the one copy on the device that the steps use in turn: the stream orders the
/// next step's copy after the last use.
#[derive(Debug)]
pub(crate) struct Staging {
    gpu: Gpu,
    host: Vec<PinnedSlab>,
    device: GpuSlab,
}

impl Staging {
    /// Room for `bytes` of input for each of `steps` steps in flight.
    pub(crate) fn new(gpu: &Gpu, bytes: usize, steps: usize) -> Result<Self, DeviceError> {
        let device = gpu.alloc(Component::Staging, bytes)?;
        Ok(Self {
            gpu: gpu.clone(),
            host: (0..steps)
                .map(|_| PinnedSlab::new(gpu, bytes))
                .collect::<Result<_, _>>()?,
            device,
        })
    }

    /// The host's side of a section of step `slot`, whose last use has ended.
    pub(crate) fn host<T: Pod>(&mut self, slot: usize, section: Section<T>) -> &mut [T] {
        section.host(&mut self.host[slot])
    }

    /// The device's side of a section.
    pub(crate) fn device<T: Pod>(&self, section: Section<T>) -> GpuSlice<'_, T> {
        section.of(&self.device)
    }

    /// Starts to send the first `bytes` of step `slot`, by a kernel where a graph follows.
    ///
    /// # Safety
    /// The host's side of `slot` must not be written until the copy is done. Behind a copy `ahead_of_graph`, a graph must be launched next.
    pub(crate) unsafe fn send(
        &self,
        slot: usize,
        bytes: usize,
        ahead_of_graph: Option<&HostCopies>,
    ) -> Result<(), GpuError> {
        let Some(copies) = ahead_of_graph else {
            // SAFETY: the caller's promise.
            return unsafe { self.send_range(slot, 0..bytes) };
        };
        let to = self.device.slice::<u8>().range(0..bytes);
        // SAFETY: the caller's promise; the memory lives as long as `self`, whose drop waits for the stream.
        unsafe { copies.upload(&self.host[slot], 0..bytes, to) }
    }

    /// Starts to send these bytes of step `slot`.
    ///
    /// # Safety
    /// As [`Self::send`].
    pub(crate) unsafe fn send_range(&self, slot: usize, bytes: Range<usize>) -> Result<(), GpuError> {
        let to = self.device.slice::<u8>().range(bytes.clone());
        // SAFETY: the caller's promise; the memory lives as long as `self`, whose drop waits for the stream.
        unsafe { self.gpu.upload_async(&self.host[slot], bytes.start, to) }
    }
}
