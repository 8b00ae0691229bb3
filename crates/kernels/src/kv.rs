use half::f16;
use plimsoll_core::{BlockSize, PageId};
use plimsoll_device::Pod;

/// Storage element of the KV cache: `f32`, or `f16` for half the memory.
pub trait KvElement: Pod + Send + Sync + sealed::Sealed {
    /// Rounds to nearest.
    fn from_f32(value: f32) -> Self;

    /// Widens, exactly.
    fn to_f32(self) -> f32;
}

#[allow(
    unnameable_types,
    private_bounds,
    private_interfaces,
    reason = "seals a public trait"
)]
mod sealed {
    use crate::simd::Simd;

    pub trait Sealed: Sized {
        /// Sixteen elements.
        ///
        /// # Safety
        /// As the functions of `Simd`.
        unsafe fn load<S: Simd>(from: *const Self) -> S::F;
    }

    impl Sealed for f32 {
        #[inline(always)]
        unsafe fn load<S: Simd>(from: *const Self) -> S::F {
            // SAFETY: the caller's promise.
            unsafe { S::load(from) }
        }
    }

    impl Sealed for half::f16 {
        #[inline(always)]
        unsafe fn load<S: Simd>(from: *const Self) -> S::F {
            // SAFETY: the caller's promise.
            unsafe { S::load_f16(from) }
        }
    }
}

impl KvElement for f32 {
    fn from_f32(value: f32) -> Self {
        value
    }

    fn to_f32(self) -> f32 {
        self
    }
}

impl KvElement for f16 {
    fn from_f32(value: f32) -> Self {
        Self::from_f32(value)
    }

    fn to_f32(self) -> f32 {
        self.to_f32()
    }
}

/// Shape of one layer of the paged KV cache. The layer is two arrays of [`KvLayout::elements`]:
/// K is `[blocks][kv_heads][head_dim][block_size]`, so that the scores of a block's tokens are one vector, and
/// V is `[blocks][kv_heads][block_size][head_dim]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvLayout {
    /// Heads of K and V.
    pub kv_heads: usize,
    /// Elements of one head.
    pub head_dim: usize,
    /// Tokens of one block.
    pub block_size: BlockSize,
}

impl KvLayout {
    /// Elements of K (and of V) of one layer of `blocks` blocks.
    pub fn elements(&self, blocks: usize) -> usize {
        blocks * self.block_elements()
    }

    fn block_elements(&self) -> usize {
        self.kv_heads * self.head_elements()
    }

    /// Elements of one head of one block.
    fn head_elements(&self) -> usize {
        self.head_dim * self.block_size.tokens()
    }

    /// Where one head of one block starts, of blocks that start `stride` elements apart.
    pub(crate) fn head_offset(&self, stride: usize, block: PageId, kv_head: usize) -> usize {
        block.index() * stride + kv_head * self.head_elements()
    }
}

/// One layer of the paged KV cache, for reading.
#[derive(Clone, Copy, Debug)]
pub struct PagedKv<'a, E> {
    /// Keys.
    pub k: &'a [E],
    /// Values.
    pub v: &'a [E],
    /// Shape of both.
    pub layout: KvLayout,
    /// Elements from the start of a block to that of the next one, of either: [`KvLayout::elements`] of one block, or more where
    /// other layers' are between them.
    pub stride: usize,
}

/// One layer of the paged KV cache, for writing.
#[derive(Debug)]
pub struct PagedKvMut<'a, E> {
    /// Keys.
    pub k: &'a mut [E],
    /// Values.
    pub v: &'a mut [E],
    /// Shape of both.
    pub layout: KvLayout,
    /// Elements from the start of a block to that of the next one, of either: [`KvLayout::elements`] of one block, or more where
    /// other layers' are between them.
    pub stride: usize,
}

impl<E> PagedKvMut<'_, E> {
    /// For reading.
    pub fn as_ref(&self) -> PagedKv<'_, E> {
        PagedKv {
            k: self.k,
            v: self.v,
            layout: self.layout,
            stride: self.stride,
        }
    }
}

/// Where one run of a step plan lies: rows `first_row..first_row + len` of the step are positions `start..start + len` of a
/// request whose KV is in `blocks`.
#[derive(Clone, Copy, Debug)]
pub struct RunMeta<'a> {
    /// First row of the step's matrices.
    pub first_row: usize,
    /// Rows.
    pub len: usize,
    /// Position of the first row in its request.
    pub start: usize,
    /// Which of the request's blocks the table begins with: those before it lie behind the window and are never read.
    pub first_block: usize,
    /// Block table, long enough for the tokens up to `start + len`.
    pub blocks: &'a [PageId],
}

impl RunMeta<'_> {
    /// Tokens in the cache after this run.
    pub(crate) fn end(&self) -> usize {
        self.start + self.len
    }

    /// The block that holds a position.
    #[inline(always)]
    pub(crate) fn block_of(&self, position: usize, block_size: usize) -> PageId {
        self.blocks[position / block_size - self.first_block]
    }

    /// Panics unless the blocks of the positions from `lowest` on are in the table, and those of the table exist in a layer
    /// of `elements` elements.
    pub(crate) fn check(&self, layout: &KvLayout, stride: usize, elements: usize, lowest: usize) {
        let (first, needed) = (self.first_block, layout.block_size.blocks_for(self.end()));
        assert!(
            first <= lowest / layout.block_size.tokens() && first + self.blocks.len() >= needed,
            "{} blocks from the {first}th for the tokens {lowest}..{}",
            self.blocks.len(),
            self.end()
        );
        let own = layout.block_elements();
        assert!(stride >= own, "blocks of {own} elements start {stride} apart");
        let blocks = (elements + stride - own) / stride.max(1);
        for block in &self.blocks[..needed - first] {
            assert!(block.index() < blocks, "block {} of {blocks}", block.index());
        }
    }
}
