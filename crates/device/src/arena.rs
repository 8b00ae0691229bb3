use std::cell::{Cell, RefCell};
use std::fmt;

use bytemuck::Pod;
use plimsoll_core::{Component, Oom, RefusedBy, Scratch};

use crate::placement::{ALIGN, Placement, Position, rounded_bytes};
use crate::{Budget, Slab};

/// The memory of one step, allocated by advancing an offset; [`Arena::reset`] frees all of it at once.
///
/// ```
/// # use plimsoll_core::Scratch;
/// # use plimsoll_device::{Arena, Budget};
/// # fn main() -> Result<(), plimsoll_core::Oom> {
/// let mut arena = Arena::new(&Budget::new(1 << 20), Scratch::Growable)?;
/// let hidden: &mut [f32] = arena.alloc(1024)?;
/// let logits: &mut [f32] = arena.alloc(512)?;
/// hidden[0] = 1.0;
/// logits[0] = hidden[0];
/// arena.reset(); // Borrows exclusively: nothing can still point into the arena.
/// # Ok(())
/// # }
/// ```
///
/// A growable arena adds chunks as they are needed, and a reset joins them into one. Its high-water mark is the size with
/// which a fixed arena can repeat the same steps: offsets depend on the sizes asked for alone.
///
/// Contents are whatever was there before; debug builds fill every allocation with ones, which are NaN as `f32`, `f16` and
/// `bf16` and out of range as an index.
pub struct Arena {
    budget: Budget,
    component: Component,
    growable: bool,
    chunks: RefCell<Vec<Chunk>>,
    /// Of the same chunks.
    placement: RefCell<Placement>,
    /// Frames open now. Only the innermost may allocate.
    depth: Cell<usize>,
}

struct Chunk {
    _slab: Slab,
    /// The slab's address, taken once: no reference to the whole slab is made again while parts are lent out.
    base: *mut u8,
}

// SAFETY: `base` points into `_slab`, which the chunk owns and which is not tied to a thread.
unsafe impl Send for Chunk {}

impl Arena {
    /// An empty arena that grows, or one of a fixed size.
    ///
    /// # Errors
    /// [`Oom`] if a fixed arena does not fit.
    pub fn new(budget: &Budget, scratch: Scratch) -> Result<Self, Oom> {
        Self::of(Component::Arena, budget, scratch)
    }

    /// The same, charged to another component.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn of(component: Component, budget: &Budget, scratch: Scratch) -> Result<Self, Oom> {
        let (mut chunks, mut placement) = (Vec::new(), Placement::default());
        if let Scratch::Fixed(bytes) = scratch {
            let bytes_usize = usize::try_from(bytes).map_err(|_| budget.oom(component, bytes))?;
            chunks.push(Chunk::new(budget, component, bytes_usize)?);
            placement = Placement::fixed(bytes_usize);
        }
        Ok(Self {
            budget: budget.clone(),
            component,
            growable: scratch == Scratch::Growable,
            chunks: RefCell::new(chunks),
            placement: RefCell::new(placement),
            depth: Cell::new(0),
        })
    }

    /// `len` elements of any content, until the next reset.
    ///
    /// # Errors
    /// [`Oom`] if a fixed arena is full or the budget refuses to let a growable one grow.
    ///
    /// # Panics
    /// If a [`Frame`] of this arena is open.
    #[allow(
        clippy::mut_from_ref,
        reason = "each call returns memory that no other call returned since the last reset"
    )]
    pub fn alloc<T: Pod>(&self, len: usize) -> Result<&mut [T], Oom> {
        self.alloc_at_depth(0, len)
    }

    /// Memory for a part of the step, given back when the frame is dropped.
    ///
    /// # Panics
    /// If a frame of this arena is open: open the inner one on the outer one.
    pub fn frame(&self) -> Frame<'_> {
        self.frame_at_depth(0)
    }

    /// Frees everything.
    pub fn reset(&mut self) {
        // Frames borrow the arena, so those still counted were leaked, and their borrows have ended.
        self.depth.set(0);
        if self.placement.get_mut().reset() {
            // The next allocation makes one chunk of the high-water mark's size.
            self.chunks.get_mut().clear();
        }
    }

    /// Most bytes allocated at once since the arena was made: the size a fixed arena needs for the same steps.
    pub fn high_water(&self) -> usize {
        self.placement.borrow().high_water()
    }

    /// Most bytes allocated at once since the last call: what one step takes, if called after each.
    pub fn take_high_water(&mut self) -> usize {
        self.placement.get_mut().take_high_water()
    }

    /// Bytes handed out now.
    pub fn used(&self) -> usize {
        self.placement.borrow().used()
    }

    /// Bytes the arena holds.
    pub fn capacity(&self) -> usize {
        self.placement.borrow().capacity()
    }

    #[allow(clippy::mut_from_ref, reason = "as alloc")]
    fn alloc_at_depth<T: Pod>(&self, depth: usize, len: usize) -> Result<&mut [T], Oom> {
        const { assert!(align_of::<T>() <= ALIGN) };
        assert_eq!(
            self.depth.get(),
            depth,
            "an arena frame is open: allocate from the innermost one"
        );
        let Some(bytes) = rounded_bytes::<T>(len) else {
            return Err(self.full(u64::MAX));
        };
        if bytes == 0 {
            return Ok(&mut []);
        }
        let start = self.bump(bytes)?;
        // SAFETY: `bump` returned the start of `bytes` writable bytes inside a live chunk that no reference points to:
        // positions only grow until a reset or the end of a frame, and both need every borrow of what they take back to
        // have ended. All bytes of a chunk are initialised (it was zeroed), every bit pattern is a `T`, and chunks and
        // sizes are multiples of ALIGN, so `start` is aligned. The lifetime is that of `&self`, which keeps the chunk.
        unsafe {
            if cfg!(debug_assertions) {
                start.write_bytes(0xFF, bytes);
            }
            Ok(std::slice::from_raw_parts_mut(start.cast(), len))
        }
    }

    /// Moves the position past `bytes` bytes, a multiple of ALIGN above 0, and returns where they start.
    fn bump(&self, bytes: usize) -> Result<*mut u8, Oom> {
        let (mut chunks, mut placement) = (self.chunks.borrow_mut(), self.placement.borrow_mut());
        let place = placement.find(bytes);
        if let Some(size) = place.new_chunk {
            if !self.growable {
                return Err(self.full(bytes as u64));
            }
            chunks.push(Chunk::new(&self.budget, self.component, size)?);
        }
        // SAFETY: the chunk has at least `bytes` bytes from this offset on.
        let start = unsafe { chunks[place.chunk].base.add(place.offset) };
        placement.take(place);
        Ok(start)
    }

    /// No room for `bytes` bytes in the arena itself.
    fn full(&self, bytes: u64) -> Oom {
        Oom {
            refused_by: match self.growable {
                true => RefusedBy::Device,
                false => RefusedBy::FixedScratch,
            },
            ..self.budget.oom(self.component, bytes)
        }
    }

    fn frame_at_depth(&self, depth: usize) -> Frame<'_> {
        assert_eq!(
            self.depth.get(),
            depth,
            "an arena frame is open: open this one on the innermost"
        );
        self.depth.set(depth + 1);
        Frame {
            arena: self,
            depth: depth + 1,
            start: self.placement.borrow().position(),
        }
    }
}

impl Chunk {
    fn new(budget: &Budget, component: Component, bytes: usize) -> Result<Self, Oom> {
        let mut slab = Slab::new(budget, component, bytes)?;
        let base = slab.as_mut_ptr();
        Ok(Self { _slab: slab, base })
    }
}

impl fmt::Debug for Arena {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Arena")
            .field("growable", &self.growable)
            .field("capacity", &self.capacity())
            .field("used", &self.used())
            .field("high_water", &self.high_water())
            .finish_non_exhaustive()
    }
}

/// Part of an [`Arena`] that ends before the step does: scratch of one layer or one operation. While it is open only it, or
/// a frame opened on it, can allocate; that is checked when it happens, as `RefCell` checks borrows.
pub struct Frame<'a> {
    arena: &'a Arena,
    depth: usize,
    start: Position,
}

impl Frame<'_> {
    /// `len` elements of any content, until the frame is dropped; see [`Arena::alloc`].
    ///
    /// # Errors
    /// [`Oom`] as [`Arena::alloc`].
    ///
    /// # Panics
    /// If a frame is open on this one.
    #[allow(clippy::mut_from_ref, reason = "as Arena::alloc")]
    pub fn alloc<T: Pod>(&self, len: usize) -> Result<&mut [T], Oom> {
        self.arena.alloc_at_depth(self.depth, len)
    }

    /// A frame inside this one.
    ///
    /// # Panics
    /// If a frame is open on this one.
    pub fn frame(&self) -> Frame<'_> {
        self.arena.frame_at_depth(self.depth)
    }
}

impl Drop for Frame<'_> {
    fn drop(&mut self) {
        // A frame leaked inside this one has lost its borrows by now, so this one closes it too.
        self.arena.depth.set(self.depth - 1);
        self.arena.placement.borrow_mut().rewind(self.start);
    }
}

impl fmt::Debug for Frame<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Frame")
            .field("depth", &self.depth)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use rand::rngs::StdRng;
    use rand::{Rng, SeedableRng};

    use super::*;
    use crate::DryArena;
    use crate::placement::MIN_CHUNK;

    fn growable(total: u64) -> (Budget, Arena) {
        let budget = Budget::new(total);
        let arena = Arena::new(&budget, Scratch::Growable).unwrap();
        (budget, arena)
    }

    /// Allocations, frames and resets at random: nothing overlaps, everything is aligned, and a fixed arena of the
    /// high-water mark's size repeats the run while one that is a cache line smaller does not.
    #[test]
    fn random_steps_never_overlap_and_repeat_in_a_fixed_arena() {
        let seeds = if cfg!(miri) { 0..3 } else { 0..100 };
        for seed in seeds {
            let (budget, mut arena) = growable(1 << 30);
            run(&mut arena, seed).unwrap();
            let high = arena.high_water() as u64;
            drop(arena);
            assert_eq!(budget.meters().reserved, 0);
            let mut fixed = Arena::new(&budget, Scratch::Fixed(high)).unwrap();
            let before = budget.meters().allocations;
            run(&mut fixed, seed).unwrap();
            assert_eq!(
                budget.meters().allocations,
                before,
                "seed {seed}: a fixed arena allocates nothing"
            );
            let mut small = Arena::new(&budget, Scratch::Fixed(high - ALIGN as u64)).unwrap();
            assert!(run(&mut small, seed).is_err(), "seed {seed}");
        }
    }

    /// Steps of any sizes: the dry arena counts what a real one holds at most, and hands out.
    #[test]
    fn a_dry_arena_counts_what_a_real_one_holds() {
        for seed in (0..200).chain([rand::random()]) {
            let mut rng = StdRng::seed_from_u64(seed);
            let (budget, mut arena) = growable(1 << 30);
            let mut dry = DryArena::default();
            for step in 0..rng.random_range(1..6) {
                arena.reset();
                dry.reset();
                for _ in 0..rng.random_range(0..8) {
                    let len = rng.random_range(0..60_000);
                    arena.alloc::<u32>(len).unwrap();
                    dry.alloc::<u32>(len).unwrap();
                    let lens = [rng.random_range(0..90_000), rng.random_range(0..200)];
                    let frame = arena.frame();
                    lens.iter()
                        .for_each(|&len| assert_eq!(frame.alloc::<u8>(len).unwrap().len(), len));
                    dry.frame(|dry| lens.iter().for_each(|&len| dry.alloc::<u8>(len).unwrap()));
                }
                assert_eq!(
                    dry.take_high_water(),
                    arena.take_high_water(),
                    "seed {seed}, step {step}"
                );
                assert_eq!(
                    dry.peak_capacity() as u64,
                    budget.meters().reserved_high,
                    "seed {seed}, step {step}"
                );
            }
        }
    }

    fn run(arena: &mut Arena, seed: u64) -> Result<(), Oom> {
        let mut rng = StdRng::seed_from_u64(seed);
        for _ in 0..4 {
            let mut held: Vec<&mut [u32]> = Vec::new();
            for mark in 0..12_u32 {
                let slice = arena.alloc::<u32>(rng.random_range(1..20_000))?;
                assert_eq!(slice.as_ptr().addr() % ALIGN, 0);
                slice.fill(mark);
                held.push(slice);
                let frame = arena.frame();
                let scratch = frame.alloc::<u64>(rng.random_range(1..9_000))?;
                scratch.fill(u64::MAX);
                let inner = frame.frame();
                inner.alloc::<u8>(rng.random_range(1..9_000))?.fill(0xEE);
            }
            for (mark, slice) in held.iter().enumerate() {
                assert!(slice.iter().all(|&value| value == mark as u32), "seed {seed}");
            }
            arena.reset();
        }
        Ok(())
    }

    #[test]
    fn a_reset_joins_the_chunks() {
        let (budget, mut arena) = growable(1 << 20);
        for _ in 0..4 {
            arena.alloc::<u8>(40_000).unwrap();
        }
        assert_eq!(arena.capacity(), 4 * MIN_CHUNK);
        arena.reset();
        assert_eq!(budget.meters().reserved, 0);
        arena.alloc::<u8>(1).unwrap();
        assert_eq!((arena.capacity(), arena.used()), (160_000, 64));
        let before = budget.meters().allocations;
        for _ in 0..3 {
            arena.alloc::<u8>(40_000).unwrap();
        }
        arena.reset();
        assert_eq!(budget.meters().allocations, before);
    }

    #[test]
    fn a_full_arena_is_a_typed_error_and_stays_usable() {
        let budget = Budget::new(1 << 20);
        let mut arena = Arena::new(&budget, Scratch::Fixed(1024)).unwrap();
        arena.alloc::<f32>(200).unwrap();
        let oom = arena.alloc::<f32>(57).unwrap_err();
        assert_eq!((oom.requested, oom.component), (256, Component::Arena));
        assert_eq!(oom.refused_by, RefusedBy::FixedScratch);
        let beyond = arena.alloc::<u64>(usize::MAX).unwrap_err();
        assert_eq!(beyond.refused_by, RefusedBy::FixedScratch);
        arena.alloc::<f32>(48).unwrap();
        assert!(arena.alloc::<u64>(usize::MAX).is_err() && arena.alloc::<u8>(usize::MAX).is_err());
        assert!(arena.alloc::<f32>(0).unwrap().is_empty());
        arena.reset();
        assert_eq!(arena.alloc::<f32>(256).unwrap().len(), 256);
        assert_eq!(arena.high_water(), 1024);
        let oom = Arena::new(&budget, Scratch::Fixed(1 << 20)).unwrap_err();
        assert_eq!(oom.refused_by, RefusedBy::Device);
        assert!(
            Arena::new(&budget, Scratch::Fixed(0))
                .unwrap()
                .alloc::<u8>(1)
                .is_err()
        );
    }

    #[test]
    fn growth_is_charged_and_may_be_refused() {
        let (budget, arena) = growable(100_000);
        arena.alloc::<u8>(MIN_CHUNK).unwrap();
        let oom = arena.alloc::<u8>(40_000).unwrap_err();
        assert_eq!(oom.refused_by, RefusedBy::Device);
        assert_eq!(
            budget.meters().by_component.get(Component::Arena),
            MIN_CHUNK as u64
        );
        drop(arena);
        assert_eq!(budget.meters().reserved, 0);
    }

    #[test]
    #[cfg(debug_assertions)]
    fn fresh_memory_is_poisoned() {
        use half::{bf16, f16};
        let (_, mut arena) = growable(1 << 20);
        arena.alloc::<f32>(100).unwrap().fill(0.0);
        arena.reset();
        assert!(arena.alloc::<f32>(10).unwrap().iter().all(|value| value.is_nan()));
        assert!(arena.alloc::<f16>(10).unwrap().iter().all(|value| value.is_nan()));
        assert!(
            arena
                .alloc::<bf16>(10)
                .unwrap()
                .iter()
                .all(|value| value.is_nan())
        );
        assert_eq!(arena.alloc::<u32>(1).unwrap(), [u32::MAX]);
    }

    #[test]
    fn frames_give_back_and_nest() {
        let (_, arena) = growable(1 << 20);
        let outer = arena.alloc::<u8>(64).unwrap();
        outer.fill(1);
        let first = {
            let frame = arena.frame();
            frame.alloc::<u8>(100).unwrap().as_ptr()
        };
        assert_eq!(arena.used(), 64);
        assert_eq!(arena.alloc::<u8>(100).unwrap().as_ptr(), first);
        assert_eq!(outer, [1; 64]);
    }

    #[test]
    fn each_step_has_its_own_mark() {
        let (_, mut arena) = growable(1 << 20);
        for (bytes, overall) in [(640, 640), (128, 640), (1280, 1280), (64, 1280)] {
            arena.reset();
            arena.alloc::<u8>(bytes).unwrap();
            assert_eq!((arena.take_high_water(), arena.high_water()), (bytes, overall));
        }
    }

    #[test]
    #[should_panic(expected = "allocate from the innermost")]
    fn an_open_frame_blocks_its_arena() {
        let (_, arena) = growable(1 << 20);
        let _frame = arena.frame();
        let _ = arena.alloc::<u8>(1);
    }

    #[test]
    #[should_panic(expected = "on the innermost")]
    fn frames_cannot_be_siblings() {
        let (_, arena) = growable(1 << 20);
        let _first = arena.frame();
        let _second = arena.frame();
    }

    #[test]
    fn a_leaked_frame_is_closed_by_the_next_reset() {
        let (_, mut arena) = growable(1 << 20);
        std::mem::forget(arena.frame());
        arena.reset();
        arena.alloc::<u8>(1).unwrap();
    }
}
