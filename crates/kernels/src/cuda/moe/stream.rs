//! Products of few rows with MXFP4 weights by one block for each multiprocessor: `kernels/moe_stream.cu`.

use plimsoll_device::cuda::{Function, Gpu, GpuError, Launch};

use super::products::Format;
use super::{EXPERT_TILES, GpuExperts, GpuRoutes, WARP};

/// Constants of the kernel.
const TEAMS: usize = 4;
const TEAM_WARPS: usize = 4;
const TOKENS: usize = 8;
const MOST_PASSES: usize = 512;
const MOST_STAGES: usize = 16;
const STAGE_ALIGN: usize = 128;
const EIGHT: usize = 8;
const WINDOW: usize = 64;
/// At least as much as its `Shared` takes.
const STATIC_BYTES: usize = 49 << 9;
/// On average: with more, many experts have more rows than [`TOKENS`], and are read twice.
const MOST_ROUTES_OF_EXPERT: usize = 5;
/// Of stages, as many are copied to as there are more than teams: with one, memory idles, and with none, the kernel would wait for ever.
const LEAST_STAGES: usize = TEAMS + 2;

/// The kernel.
#[derive(Debug)]
pub(super) struct StreamKernel {
    function: Function,
    multiprocessors: usize,
    most_shared: usize,
}

impl StreamKernel {
    pub(super) fn load(gpu: &Gpu) -> Result<Self, GpuError> {
        let most_shared = gpu.info().max_shared_bytes - STATIC_BYTES;
        let function = crate::cuda::load(gpu, "moe_stream")?.function("moe_stream_mxfp4")?;
        function.allow_shared(most_shared)?;
        Ok(Self {
            function,
            multiprocessors: gpu.info().sm_count,
            most_shared,
        })
    }

    /// The kernel for these experts and rows, and its launch; `None` if it is not for them.
    pub(super) fn launch_of(
        &self,
        experts: &GpuExperts,
        routes: &GpuRoutes<'_>,
    ) -> Option<(&Function, Launch)> {
        let many = routes.len() > MOST_ROUTES_OF_EXPERT * routes.experts;
        if Format::of(experts.matrix()) != Format::Mxfp4
            || many
            || routes.rows == 1
            || routes.tile != EXPERT_TILES[0]
            || routes.most_tiles_of(TOKENS) > MOST_PASSES
        {
            return None;
        }
        let shared = shared_bytes(experts.inputs(), self.most_shared)?;
        let threads = (TEAMS * TEAM_WARPS + 1) * WARP;
        let launch = Launch::new([self.multiprocessors as u32, 1, 1], threads as u32).shared(shared);
        Some((&self.function, launch))
    }
}

/// Bytes of the stages and rows of x of a block that has at most so many, with rows of weights of `k` inputs; `None` if too few stages fit.
fn shared_bytes(k: usize, most: usize) -> Option<usize> {
    let stage = (2 * EIGHT * Format::Mxfp4.pitch(k)).next_multiple_of(STAGE_ALIGN);
    let inputs = TOKENS * (k.div_ceil(WINDOW) * WINDOW / 8 + 1) * 16;
    let stages = (most.checked_sub(inputs)? / stage).min(MOST_STAGES);
    (stages >= LEAST_STAGES).then_some(stages * stage + inputs)
}

#[cfg(test)]
mod tests {
    use super::{STATIC_BYTES, shared_bytes};

    /// Shared memory of a block of an H100, less what is static.
    const HOPPER: usize = (227 << 10) - STATIC_BYTES;

    #[test]
    fn stages_fill_the_shared_memory() {
        // gpt-oss: six of 24 KiB, beside 8 rows of 5,776 bytes.
        assert_eq!(shared_bytes(2880, HOPPER), Some(6 * 24_576 + 8 * 5_776));
        // No more than sixteen.
        assert_eq!(shared_bytes(768, HOPPER), Some(16 * 6_656 + 8 * 1_552));
        // Too long for six stages.
        assert_eq!(shared_bytes(3488, HOPPER), None);
        assert_eq!(shared_bytes(1 << 20, HOPPER), None);
    }
}
