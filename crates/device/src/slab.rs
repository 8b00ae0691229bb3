use std::num::NonZero;
use std::{fmt, thread};

use bytemuck::Pod;
use memmap2::{MmapMut, MmapOptions};
use plimsoll_core::{Component, Oom};

use crate::{Budget, Charge};

/// Zeroed memory of one purpose, charged to a [`Budget`], page-aligned.
///
/// Every page is touched when the slab is made. Kernels overcommit memory, so an untouched slab proves nothing: the machine
/// would run out later instead of at start. That takes the time in which the kernel zeroes the pages, which the first
/// requests would otherwise pay. Memory comes straight from the kernel and returns to it on
/// drop, past every allocator's cache, so that the budget's meters agree with the process's resident size.
pub struct Slab {
    // Dropped before `charge`, so that memory is freed before the account says so.
    map: Option<MmapMut>,
    charge: Charge,
}

impl Slab {
    /// `bytes` zero bytes for `component`.
    ///
    /// # Errors
    /// [`Oom`] if the budget or the system refuses.
    pub fn new(budget: &Budget, component: Component, bytes: usize) -> Result<Self, Oom> {
        Self::with(budget, component, bytes, &mut || {})
    }

    /// As [`Self::new`]; `touches` is called again and again while the pages are touched, which may take minutes.
    ///
    /// # Errors
    /// As there.
    pub fn with(
        budget: &Budget,
        component: Component,
        bytes: usize,
        touches: &mut dyn FnMut(),
    ) -> Result<Self, Oom> {
        let charge = budget.charge(component, bytes as u64)?;
        if bytes == 0 {
            return Ok(Self { map: None, charge });
        }
        let mut map = MmapOptions::new()
            .len(bytes)
            .map_anon()
            .map_err(|_| budget.oom(component, bytes as u64))?;
        prefault(&mut map, touches);
        Ok(Self {
            map: Some(map),
            charge,
        })
    }

    /// Size in bytes.
    pub fn bytes(&self) -> usize {
        self.map.as_ref().map_or(0, |map| map.len())
    }

    /// What the slab is for.
    pub fn component(&self) -> Component {
        self.charge.component()
    }

    /// The memory as whole elements of `T`; a remainder of the size is left out.
    pub fn as_slice<T: Pod>(&self) -> &[T] {
        match &self.map {
            Some(map) => bytemuck::cast_slice(&map[..whole::<T>(map.len())]),
            None => &[],
        }
    }

    /// The memory as whole elements of `T`, for writing.
    pub fn as_mut_slice<T: Pod>(&mut self) -> &mut [T] {
        match &mut self.map {
            Some(map) => {
                let whole = whole::<T>(map.len());
                bytemuck::cast_slice_mut(&mut map[..whole])
            }
            None => &mut [],
        }
    }

    /// Address of the first byte, stable for the slab's life and valid for reads and writes of [`Self::bytes`] bytes.
    pub(crate) fn as_mut_ptr(&mut self) -> *mut u8 {
        self.map
            .as_mut()
            .map_or(std::ptr::dangling_mut(), |map| map.as_mut_ptr())
    }
}

impl fmt::Debug for Slab {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Slab")
            .field("component", &self.component())
            .field("bytes", &self.bytes())
            .finish()
    }
}

/// Largest multiple of `T`'s size up to `bytes`; 0 for a `T` without a size.
fn whole<T>(bytes: usize) -> usize {
    bytes - bytes.checked_rem(size_of::<T>()).unwrap_or(bytes)
}

/// The smallest page of any platform; touching more often than needed is harmless.
const PAGE: usize = 4096;

/// Bytes worth a thread of its own to touch: some 10 ms. Whole huge pages, so that threads do not wait for each other's faults.
const BYTES_PER_THREAD: usize = 64 << 20;

fn prefault(map: &mut MmapMut, touches: &mut dyn FnMut()) {
    // Fewer page faults now and fewer TLB misses in attention. Advice alone: where it is refused, small pages do.
    #[cfg(target_os = "linux")]
    let _ = map.advise(memmap2::Advice::HugePage);
    // The kernel zeroes a page on the thread that touches it, and one thread does not saturate the memory.
    let pieces = map.len().div_ceil(BYTES_PER_THREAD);
    let threads = thread::available_parallelism()
        .map_or(1, NonZero::get)
        .min(pieces);
    let mut parts = map.chunks_mut(pieces.div_ceil(threads) * BYTES_PER_THREAD);
    let own = parts.next();
    thread::scope(|scope| {
        for part in parts {
            scope.spawn(|| touch(part));
        }
        // As large as any other part.
        for piece in own.into_iter().flat_map(|own| own.chunks_mut(BYTES_PER_THREAD)) {
            touches();
            touch(piece);
        }
    });
}

/// Writes to every page.
fn touch(memory: &mut [u8]) {
    for page in memory.chunks_mut(PAGE) {
        // `black_box`, because writing a zero over a zero may otherwise be optimised away.
        *std::hint::black_box(&mut page[0]) = 0;
    }
}

#[cfg(test)]
mod tests {
    use half::f16;

    use super::*;

    #[test]
    fn is_zeroed_aligned_and_charged() {
        let budget = Budget::new(1 << 20);
        let mut slab = Slab::new(&budget, Component::Kv, 10_001).unwrap();
        assert_eq!((slab.bytes(), slab.component()), (10_001, Component::Kv));
        assert_eq!(budget.meters().by_component.get(Component::Kv), 10_001);
        assert!(slab.as_slice::<u8>().iter().all(|&byte| byte == 0));
        assert_eq!(slab.as_slice::<f32>().as_ptr().addr() % 64, 0);
        assert_eq!(
            (slab.as_slice::<f32>().len(), slab.as_slice::<f16>().len()),
            (2500, 5000)
        );
        slab.as_mut_slice::<u32>()[2499] = 7;
        assert_eq!(slab.as_slice::<u32>()[2499], 7);
        assert!(slab.as_slice::<()>().is_empty());
        drop(slab);
        assert_eq!(budget.meters().reserved, 0);
    }

    #[test]
    fn an_empty_slab_is_legal() {
        let budget = Budget::new(0);
        let mut slab = Slab::new(&budget, Component::Kv, 0).unwrap();
        assert!(slab.as_slice::<f32>().is_empty() && slab.as_mut_slice::<f32>().is_empty());
    }

    #[test]
    fn refusals_of_budget_and_system_are_typed_and_leak_nothing() {
        let budget = Budget::new(u64::MAX);
        budget.set_cap(Some(100));
        assert_eq!(Slab::new(&budget, Component::Kv, 101).unwrap_err().requested, 101);
        budget.set_cap(None);
        // More than any address space: the budget agrees, the system does not.
        let oom = Slab::new(&budget, Component::Kv, 1 << 62).unwrap_err();
        assert_eq!(oom.requested, 1 << 62);
        assert_eq!(budget.meters().reserved, 0);
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn pages_are_resident_and_progress_is_reported_meanwhile() {
        let resident = || -> usize {
            let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
            statm.split(' ').nth(1).unwrap().parse::<usize>().unwrap() * PAGE
        };
        let pieces = 4;
        let bytes = pieces * BYTES_PER_THREAD;
        let (before, mut heard) = (resident(), 0);
        let budget = Budget::new(bytes as u64);
        let slab = Slab::with(&budget, Component::Kv, bytes, &mut || heard += 1).unwrap();
        let threads = thread::available_parallelism().unwrap().get().min(pieces);
        assert_eq!(heard, pieces.div_ceil(threads));
        // Other tests of this process come and go meanwhile, so leave room for them.
        assert!(resident() > before + bytes / 2);
        drop(slab);
        assert!(resident() < before + bytes / 2);
    }
}
