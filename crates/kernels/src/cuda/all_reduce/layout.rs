//! Where things are in a rank's buffer: `kernels/include/peers.cuh`.

/// Most ranks of a group.
pub(super) const MAX_RANKS: usize = 8;
/// Blocks of threads of the kernels that work through rings.
pub(super) const RING_BLOCKS: usize = 256;
/// Bytes of a tile.
const TILE: usize = 32 << 10;
/// Bytes of one half of what is for calls that send everything to everyone, of all ranks together.
const FEW: usize = 8 << 20;
/// Flags and counters, at the front.
pub(super) const STATE: usize = 64 << 10;
/// Where what is yet to arrive is told by its value.
pub(super) const FEW_RANGE: std::ops::Range<usize> = STATE..STATE + 2 * FEW;
const BYTES: usize = FEW_RANGE.end + 4 * RING_BLOCKS * TILE;

/// Nothing is wrong.
pub(super) const NO_FAULT: u32 = 0;
/// The host has said that nobody should wait. Other faults are one more than a rank.
pub(super) const ABANDONED: u32 = u32::MAX;
/// How long a kernel waits for another rank.
pub(super) const PATIENCE_SECONDS: u32 = 20;

/// Most bytes that are sent to everyone.
pub(super) const fn most_few(ranks: usize) -> usize {
    FEW / ranks
}

/// Bytes of device memory that each rank of a group holds to exchange sums, whatever the model; nothing for one rank alone. Rounded
/// as the device rounds.
pub const fn communication_bytes(ranks: usize) -> usize {
    match ranks {
        0 | 1 => 0,
        _ => BYTES.next_multiple_of(2 << 20),
    }
}
