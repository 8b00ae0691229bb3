use bytemuck::{Pod, Zeroable};

/// Head sizes that the attention kernels are built for.
pub const HEAD_DIMS: [usize; 5] = [64, 96, 128, 256, 512];

/// A GPU that is not there, as far as planners ask: how many blocks of threads it runs at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AssumedGpu {
    /// Compute capability.
    pub compute_capability: (u32, u32),
    /// Streaming multiprocessors.
    pub sm_count: usize,
    /// Bytes of shared memory of each.
    pub sm_shared_bytes: usize,
}

/// Of a multiprocessor's shared memory, what the system takes for each block of threads.
pub(super) const BLOCK_SHARED_BYTES: usize = 1024;

impl AssumedGpu {
    /// An NVIDIA H200 (and an H100 SXM), by NVIDIA's CUDA programming guide.
    pub const H200: Self = Self {
        compute_capability: (9, 0),
        sm_count: 132,
        sm_shared_bytes: 228 << 10,
    };

    /// Blocks that run at once where shared memory is what limits them.
    pub(super) fn slots(self, shared_bytes: usize) -> usize {
        (self.sm_shared_bytes / (shared_bytes + BLOCK_SHARED_BYTES)).max(1) * self.sm_count
    }
}

#[cfg(test)]
impl AssumedGpu {
    /// One of each architecture that a build has machine code for, by NVIDIA's CUDA programming guide: A100, RTX 3090, L40S, H200, B200 and
    /// RTX 5090.
    pub(super) const EACH: [Self; 6] = [
        Self::of((8, 0), 108, 164),
        Self::of((8, 6), 82, 100),
        Self::of((8, 9), 142, 100),
        Self::H200,
        Self::of((10, 0), 148, 228),
        Self::of((12, 0), 170, 100),
    ];

    const fn of(compute_capability: (u32, u32), sm_count: usize, sm_shared_kib: usize) -> Self {
        Self {
            compute_capability,
            sm_count,
            sm_shared_bytes: sm_shared_kib << 10,
        }
    }

    /// Most bytes of shared memory of a block.
    pub(super) fn most_shared(self) -> usize {
        self.sm_shared_bytes - BLOCK_SHARED_BYTES
    }

    /// Blocks of so many bytes that fit on a multiprocessor.
    pub(super) fn blocks(self, shared_bytes: usize) -> usize {
        self.sm_shared_bytes / (shared_bytes + BLOCK_SHARED_BYTES)
    }
}

/// Where the rows of one request lie in a step: rows `first_row..first_row + len` are the positions up to `context_end` of
/// a request whose block table begins at `block_offset` of the step's flat array of blocks. Entries of blocks that lie wholly
/// behind the window are never read, so a table may lack them; then `block_offset` is where its first entry would be, perhaps
/// below 0. `Run` of `kernels/include/common.cuh`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C, align(16))]
pub struct RunMeta {
    /// First row of the step's matrices.
    pub first_row: i32,
    /// Rows.
    pub len: i32,
    /// Tokens in the cache after this step.
    pub context_end: i32,
    /// First entry of its block table.
    pub block_offset: i32,
}
