//! Where the allocations of a step lie in an [`Arena`](crate::Arena): arithmetic alone, so that what a step would take can
//! be told without memory.

/// Alignment of every allocation, in bytes: a cache line, and the widest SIMD register.
pub(crate) const ALIGN: usize = 64;

/// Least size of a chunk of a growable arena, in bytes.
pub(crate) const MIN_CHUNK: usize = 64 << 10;

/// The chunks of an arena and how far they are handed out.
#[derive(Clone, Debug, Default)]
pub(crate) struct Placement {
    /// Bytes of each.
    chunks: Vec<usize>,
    position: Position,
    high_water: usize,
    /// The same, since it was last taken.
    recent_high_water: usize,
}

#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Position {
    chunk: usize,
    offset: usize,
    /// Bytes handed out, without the unused ends of chunks.
    used: usize,
}

/// Where an allocation goes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    pub(crate) chunk: usize,
    pub(crate) offset: usize,
    bytes: usize,
    /// Bytes of the chunk that must be added for it.
    pub(crate) new_chunk: Option<usize>,
}

impl Placement {
    /// Of one chunk.
    pub(crate) fn fixed(bytes: usize) -> Self {
        Self {
            chunks: vec![bytes],
            ..Self::default()
        }
    }

    /// The place for `bytes`, a multiple of [`ALIGN`] above 0.
    pub(crate) fn find(&self, bytes: usize) -> Place {
        let mut place = Place {
            chunk: self.position.chunk,
            offset: self.position.offset,
            bytes,
            new_chunk: None,
        };
        while self
            .chunks
            .get(place.chunk)
            .is_some_and(|chunk| chunk - place.offset < bytes)
        {
            (place.chunk, place.offset) = (place.chunk + 1, 0);
        }
        if place.chunk == self.chunks.len() {
            let least = match self.chunks.is_empty() {
                // What the steps before needed, in one.
                true => self.high_water.max(MIN_CHUNK),
                false => MIN_CHUNK,
            };
            place.new_chunk = Some(least.max(bytes));
        }
        place
    }

    /// Hands out a place that was just found.
    pub(crate) fn take(&mut self, place: Place) {
        self.chunks.extend(place.new_chunk);
        self.position = Position {
            chunk: place.chunk,
            offset: place.offset + place.bytes,
            used: self.position.used + place.bytes,
        };
        self.high_water = self.high_water.max(self.position.used);
        self.recent_high_water = self.recent_high_water.max(self.position.used);
    }

    /// Frees everything. True if the chunks go too, to be replaced by one.
    pub(crate) fn reset(&mut self) -> bool {
        self.position = Position::default();
        let several = self.chunks.len() > 1;
        if several {
            self.chunks.clear();
        }
        several
    }

    pub(crate) fn position(&self) -> Position {
        self.position
    }

    /// Takes back what was handed out since.
    pub(crate) fn rewind(&mut self, position: Position) {
        self.position = position;
    }

    pub(crate) fn used(&self) -> usize {
        self.position.used
    }

    pub(crate) fn high_water(&self) -> usize {
        self.high_water
    }

    pub(crate) fn take_high_water(&mut self) -> usize {
        std::mem::take(&mut self.recent_high_water)
    }

    pub(crate) fn capacity(&self) -> usize {
        self.chunks.iter().sum()
    }
}

/// Bytes that `len` elements take in an arena; `None` if they fit no memory.
pub(crate) fn rounded_bytes<T>(len: usize) -> Option<usize> {
    len.checked_mul(size_of::<T>())
        .and_then(|bytes| bytes.checked_next_multiple_of(ALIGN))
        .filter(|&bytes| bytes <= isize::MAX as usize)
}

/// A growable [`Arena`](crate::Arena) without memory: it counts what the arena would hold for the same allocations.
///
/// ```
/// # use plimsoll_device::DryArena;
/// # fn count() -> Option<()> {
/// let mut arena = DryArena::default();
/// arena.alloc::<f32>(1 << 20)?;
/// arena.frame(|frame| frame.alloc::<f32>(1 << 10))?;
/// assert_eq!(arena.take_high_water(), (4 << 20) + (4 << 10));
/// # Some(())
/// # }
/// # count().expect("it fits");
/// ```
#[derive(Debug, Default)]
pub struct DryArena {
    placement: Placement,
    peak_capacity: usize,
}

impl DryArena {
    /// As [`Arena::alloc`](crate::Arena::alloc); `None` if no memory could hold it.
    pub fn alloc<T>(&mut self, len: usize) -> Option<()> {
        let bytes = rounded_bytes::<T>(len)?;
        if bytes > 0 {
            let place = self.placement.find(bytes);
            self.placement
                .capacity()
                .checked_add(place.new_chunk.unwrap_or(0))?;
            self.placement.take(place);
            self.peak_capacity = self.peak_capacity.max(self.placement.capacity());
        }
        Some(())
    }

    /// What `work` takes is given back when it returns.
    pub fn frame<R>(&mut self, work: impl FnOnce(&mut Self) -> R) -> R {
        let start = self.placement.position();
        let result = work(self);
        self.placement.rewind(start);
        result
    }

    /// As [`Arena::reset`](crate::Arena::reset).
    pub fn reset(&mut self) {
        self.placement.reset();
    }

    /// As [`Arena::take_high_water`](crate::Arena::take_high_water).
    pub fn take_high_water(&mut self) -> usize {
        self.placement.take_high_water()
    }

    /// Bytes the arena would hold now.
    pub fn capacity(&self) -> usize {
        self.placement.capacity()
    }

    /// Most bytes the arena would ever have held.
    pub fn peak_capacity(&self) -> usize {
        self.peak_capacity
    }
}
