//! Where things are in a rank's buffer: `kernels/include/peers.cuh`.

use half::bf16;

/// Most ranks of a group.
pub(super) const MAX_RANKS: usize = 8;
/// Blocks of threads of the kernel that works through rings.
pub(super) const RING_BLOCKS: usize = 256;
/// Bytes of a tile.
const TILE: usize = 32 << 10;
/// Bytes of one half of what is for calls whose data says itself that it has arrived, of all ranks together.
const FEW: usize = 32 << 20;
/// Flags and counters, at the front.
pub(super) const STATE: usize = 64 << 10;
/// Up to which half of its sums the other rank has sent, a word.
pub(super) const SENT_PARTS: usize = 32 << 10;
/// Where what is yet to arrive is told by its value.
pub(super) const FEW_RANGE: std::ops::Range<usize> = STATE..STATE + 2 * FEW;
const BYTES: usize = FEW_RANGE.end + 2 * RING_BLOCKS * TILE;

/// Nothing is wrong.
pub(super) const NO_FAULT: u32 = 0;
/// The host has said that nobody should wait. Other faults are one more than a rank.
pub(super) const ABANDONED: u32 = u32::MAX;
/// How long a kernel waits for another rank.
pub(super) const PATIENCE_SECONDS: u32 = 20;

/// Most bytes that are sent to everyone at a time.
pub(super) const fn most_few(ranks: usize) -> usize {
    FEW / ranks
}

/// Most bytes of which each rank sums a share at a time: there is room for the parts and for the sums.
pub(super) const MOST_MANY: usize = FEW / 2;

/// Bytes of device memory that each rank of a group holds to exchange sums, whatever the model; nothing for one rank alone. Rounded
/// as the device rounds.
pub const fn communication_bytes(ranks: usize) -> usize {
    match ranks {
        0 | 1 => 0,
        _ => BYTES.next_multiple_of(2 << 20),
    }
}

/// Fewer rows are not summed in halves: products of half as many take longer than the sum is hidden (8B shape on two H100: steps of 2,048
/// rows became 4 % slower, of 4,096 and 8,192 rows 5 % faster).
pub(super) const LEAST_HALVED: usize = 4096;
/// Rows of the first half are a multiple of the largest tile of products.
const WHOLE_TILES: usize = 256;

/// How many rows each half of a sum has, if so many are summed in halves.
pub(super) fn split(rows: usize) -> Option<[usize; 2]> {
    let first = rows.div_ceil(2).next_multiple_of(WHOLE_TILES);
    (rows >= LEAST_HALVED).then(|| [first, rows - first])
}

/// Bytes of a half of the largest sum.
pub(super) fn area_bytes(rows: usize, width: usize) -> usize {
    split(rows).map_or(0, |[first, _]| first * width * size_of::<bf16>())
}

/// Bytes of device memory that a state of a rank holds for sums in halves of up to `rows` rows of `width` elements; nothing where sums
/// are not made so. Rounded as the device rounds.
pub fn sent_bytes(ranks: usize, rows: usize, width: usize) -> usize {
    match ranks {
        2 => (4 * area_bytes(rows, width)).next_multiple_of(2 << 20),
        _ => 0,
    }
}
