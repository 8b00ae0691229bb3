//! Where thread blocks of a product leave partial sums to each other: behind cuBLASLt's part of the workspace, for the kernels that are
//! `kernels/linear_hopper.cu`, `linear_hopper_int4.cu` and `linear_int4_rows.cu` (`kernels/include/stream_k.cuh`).

use plimsoll_device::cuda::{Gpu, GpuError, GpuSlab, GpuSlice};

use super::cublas_lt::WORKSPACE;

/// Partial sums of all blocks of a product. Those of Llama-3.1-70B's gate and up projections in four bits fit with 16 rows, those of
/// Llama-3.1-8B's with 24.
pub(super) const BYTES: usize = 7 << 20;
/// Every byte of a sum that is not there yet.
const NONE: u8 = 0xff;

/// The room of [`BYTES`].
pub(super) fn sums(workspace: &GpuSlab) -> GpuSlice<'_, u8> {
    workspace.slice().range(WORKSPACE..WORKSPACE + BYTES)
}

/// Marks all sums as not there. Kernels leave them so.
pub(super) fn clear(gpu: &Gpu, workspace: &GpuSlab) -> Result<(), GpuError> {
    gpu.fill(sums(workspace), NONE)
}
