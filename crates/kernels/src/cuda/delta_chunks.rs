use half::bf16;
use plimsoll_device::cuda::{Arg, Function, Gpu, GpuError, GpuSlice, Launch, Module};

use super::fused::int;
use super::state_runs::{CHUNK, GpuStateRun, GpuStateTile};
use super::{has_hopper_kernels, load};
use crate::DeltaLayout;

/// Constants of `kernels/delta_chunks.cu` and `delta_chunk.cuh`.
const COLUMNS: usize = 64;
const TRIANGLES: usize = 4 * CHUNK;
const TRIANGLE_THREADS: usize = 128;
const CHUNK_THREADS: usize = 384;
/// Largest heads of q and k.
const KEY_DIMS: [usize; 2] = [64, 128];

/// What both kernels work on: see `Chunked` in `kernels/include/delta_chunk.cuh`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Chunked<'a> {
    pub(super) layout: DeltaLayout,
    pub(super) mixed: GpuSlice<'a, bf16>,
    pub(super) gates: GpuSlice<'a, f32>,
    pub(super) triangles: GpuSlice<'a, bf16>,
    pub(super) states: GpuSlice<'a, f32>,
    pub(super) runs: GpuSlice<'a, GpuStateRun>,
    pub(super) chunks: GpuSlice<'a, GpuStateTile>,
}

/// The rule for runs of prompts, in chunks: `kernels/delta_chunks.cu`.
#[derive(Debug)]
pub(super) struct ChunkKernels {
    /// For each of [`KEY_DIMS`], as `chunks`.
    triangles: [Function; 2],
    chunks: [Function; 2],
    _module: Module,
}

impl ChunkKernels {
    /// `None` where kernels made for Hopper do not run.
    pub(super) fn load(gpu: &Gpu) -> Result<Option<Self>, GpuError> {
        if !has_hopper_kernels(gpu) {
            return Ok(None);
        }
        let module = load(gpu, "delta_chunks")?;
        let functions = |name: &str, bytes: fn(usize) -> usize| -> Result<[Function; 2], GpuError> {
            let [small, large] = KEY_DIMS.map(|key_dim| {
                let function = module.function(&format!("{name}_{key_dim}"))?;
                function.allow_shared(bytes(key_dim))?;
                Ok(function)
            });
            Ok([small?, large?])
        };
        Ok(Some(Self {
            triangles: functions("delta_triangles", triangle_bytes)?,
            chunks: functions("delta_chunks", chunk_bytes)?,
            _module: module,
        }))
    }

    /// Whether there are kernels for heads of this size.
    pub(super) fn supports(layout: &DeltaLayout) -> bool {
        layout.key_dim <= KEY_DIMS[KEY_DIMS.len() - 1]
    }

    /// Elements of [`Chunked::triangles`] for each row.
    pub(super) fn triangles(layout: &DeltaLayout) -> usize {
        match Self::supports(layout) {
            true => layout.value_heads * TRIANGLES,
            false => 0,
        }
    }

    /// The rule for all runs of `of`, of one token or more: outputs take the place of v, and gates are overwritten.
    pub(super) fn forward(&self, gpu: &Gpu, of: &Chunked<'_>) -> Result<(), GpuError> {
        let layout = &of.layout;
        let shape = [
            layout.key_heads,
            layout.value_heads,
            layout.key_dim,
            layout.value_dim,
            layout.adjacent,
        ];
        let args = |more: [Arg; 2]| {
            let shared = [of.mixed.into(), of.gates.into(), of.triangles.into()];
            [&shared[..], &more, &shape.map(int)].concat()
        };
        let (size, heads) = (usize::from(layout.key_dim > KEY_DIMS[0]), layout.value_heads);
        let launch = |kernel: &Function, grid: usize, threads: usize, shared: usize, args: &[Arg]| {
            let launch = Launch::new([grid as u32, 1, 1], threads as u32);
            // SAFETY: the kernels take these arguments, whose lengths the caller checked; indices are its caller's promise.
            unsafe { gpu.launch(kernel, launch.shared(shared).pdl(true), args) }
        };
        launch(
            &self.triangles[size],
            of.chunks.len() * heads,
            TRIANGLE_THREADS,
            triangle_bytes(KEY_DIMS[size]),
            &args([of.runs.into(), of.chunks.into()]),
        )?;
        launch(
            &self.chunks[size],
            of.runs.len() * heads * layout.value_dim.div_ceil(COLUMNS),
            CHUNK_THREADS,
            chunk_bytes(KEY_DIMS[size]),
            &args([of.states.into(), of.runs.into()]),
        )
    }
}

/// `TriangleRoom` of the kernels: q and k, or both triangles in two parts; A; a few numbers of each token.
fn triangle_bytes(key_dim: usize) -> usize {
    let keys = 2 * CHUNK * key_dim * size_of::<bf16>();
    let a = CHUNK * (CHUNK + 4) * size_of::<f32>();
    let out = 4 * CHUNK * (CHUNK + 8) * size_of::<bf16>();
    let numbers = (2 * CHUNK + 1) * size_of::<f32>();
    (keys.max(out) + a + numbers).next_multiple_of(128)
}

/// `Room` of the kernels: two stages, what warps hand over, and barriers.
fn chunk_bytes(key_dim: usize) -> usize {
    let keys = 2 * CHUNK * key_dim * size_of::<bf16>();
    let triangles = CHUNK * TRIANGLES * size_of::<bf16>();
    let values = CHUNK * COLUMNS * size_of::<bf16>();
    let gates = 2 * CHUNK * size_of::<f32>();
    let stage = (keys + triangles + values + gates).next_multiple_of(1024);
    let operand = 2 * 32 * 16;
    let handover = COLUMNS / 16 * (key_dim / 16 + CHUNK / 16) * operand;
    (2 * stage + handover + 4 * size_of::<u64>()).next_multiple_of(1024)
}

#[cfg(test)]
mod tests {
    use super::{KEY_DIMS, chunk_bytes, triangle_bytes};
    use crate::cuda::AssumedGpu;

    #[test]
    fn blocks_fit_on_hopper() {
        for key_dim in KEY_DIMS {
            for shared in [triangle_bytes(key_dim), chunk_bytes(key_dim)] {
                assert!(AssumedGpu::H200.blocks(shared) >= 1, "heads of {key_dim}");
            }
        }
    }
}
