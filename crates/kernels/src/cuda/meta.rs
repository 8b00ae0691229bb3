use bytemuck::{Pod, Zeroable};

/// Where the rows of one request lie in a step: rows `first_row..first_row + len` are the positions up to `context_end` of
/// a request whose block table begins at `block_offset` of the step's flat array of blocks. `Run` of
/// `kernels/include/common.cuh`.
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
