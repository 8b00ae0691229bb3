//! Products of 65 to 512 rows with bf16 weights by wgmma, on GPUs of Hopper's generation (`kernels/linear_hopper_many.cu`).

use std::fmt;

use plimsoll_device::cuda::{Arg, Function, Gpu, GpuError, Launch, MatrixTiles};

use super::cublas_lt::{Operands, Shape};
use super::{GpuValues, LinearOutput};
use crate::cuda::{has_hopper_kernels, load};

/// Constants of the kernels.
const WARP_GROUP: usize = 128;
const GROUP_ROWS: usize = 64;
const STAGE_INPUTS: usize = 64;
const STAGE_ROW_BYTES: usize = 128;
const MOST_SHARED: usize = 227 << 10;
const ALIGN: usize = 1024;
/// Weights and outputs of a tile are divided in two halves of whole eights.
const EIGHT: usize = 8;
const HALVES: usize = 2;
/// Rows of x and of weights of the tiles.
const TILES: [(usize, usize); 5] = [(128, 192), (128, 224), (128, 256), (192, 192), (192, 224)];

/// Other kernels compute fewer rows; with more, cuBLASLt's tiles fill the GPU.
const ROWS: std::ops::RangeInclusive<usize> = 65..=512;

/// Estimates to rank tiles by: bytes that a multiprocessor loads from L2 in a cycle, and cycles to store a tile.
const LOADED_BYTES: usize = 36;
const STORE_CYCLES: usize = 2000;

/// What a block of the kernels for many rows computes at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LinearTile {
    /// Rows of x: 128 or 192.
    pub rows: usize,
    /// Rows of weights: 192, 224 or, with 128 rows of x, 256. If gated, half of them are gates.
    pub weights: usize,
}

impl LinearTile {
    /// Every tile there is a kernel for.
    pub fn all() -> impl Iterator<Item = Self> {
        TILES.into_iter().map(|(rows, weights)| Self { rows, weights })
    }

    fn stage_bytes(self) -> usize {
        (self.rows + self.weights) * STAGE_ROW_BYTES
    }

    fn stages(self) -> usize {
        (MOST_SHARED - 2 * ALIGN) / self.stage_bytes()
    }

    /// Stages with two barriers each, and alignment.
    fn shared_bytes(self) -> usize {
        let stages = self.stages() * (self.stage_bytes() + 2 * size_of::<u64>());
        stages.next_multiple_of(ALIGN) + ALIGN
    }

    /// Of a block: one warp group copies.
    fn threads(self) -> usize {
        WARP_GROUP * (1 + self.rows / GROUP_ROWS)
    }

    /// Blocks of a cluster, which share weights, as they have neighbouring rows of x.
    fn cluster(self, m: usize) -> usize {
        if m > self.rows { 2 } else { 1 }
    }

    /// Work items of a product: a tile for each block of a cluster.
    fn work_items(self, shape: &Shape, output: LinearOutput) -> usize {
        let outputs = self.weights / output.stacked();
        shape.n.div_ceil(outputs) * shape.m.div_ceil(self.cluster(shape.m) * self.rows)
    }
}

impl fmt::Display for LinearTile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}x{}", self.rows, self.weights)
    }
}

#[derive(Debug)]
pub(super) struct ManyKernels {
    gpu: Gpu,
    /// Of each of [`TILES`]; empty where kernels made for Hopper do not run.
    kernels: Vec<Function>,
    /// Clusters of one and of two blocks that run at once.
    clusters: [usize; 2],
}

impl ManyKernels {
    pub(super) fn load(gpu: &Gpu) -> Result<Self, GpuError> {
        let (mut kernels, mut clusters) = (Vec::new(), [gpu.info().sm_count, 0]);
        if has_hopper_kernels(gpu) {
            let module = load(gpu, "linear_hopper_many")?;
            for tile in LinearTile::all() {
                let name = format!("linear_hopper_many_{}x{}", tile.rows, tile.weights);
                let function = module.function(&name)?;
                function.allow_shared(tile.shared_bytes())?;
                if kernels.is_empty() {
                    // Blocks of all of them take a multiprocessor each.
                    clusters[1] = function.clusters_at_once(2, tile.threads(), tile.shared_bytes())?;
                }
                kernels.push(function);
            }
        }
        Ok(Self {
            gpu: gpu.clone(),
            kernels,
            clusters,
        })
    }

    /// The tiles that can compute a product and may be fast, those that should be fastest first.
    pub(super) fn tiles(&self, shape: &Shape, output: LinearOutput) -> Vec<LinearTile> {
        let may_be_fast = |tile: &LinearTile| self.can(shape, *tile) && self.fills(shape, output, *tile);
        let mut tiles: Vec<_> = LinearTile::all().filter(may_be_fast).collect();
        tiles.sort_by_key(|tile| self.cycles(shape, output, *tile));
        tiles
    }

    /// Whether a tile can compute a product.
    pub(super) fn can(&self, shape: &Shape, tile: LinearTile) -> bool {
        let &Shape { m, n, k, pitch, .. } = shape;
        !self.kernels.is_empty()
            && TILES.contains(&(tile.rows, tile.weights))
            && shape.values == GpuValues::Bf16
            && ROWS.contains(&m)
            && k > 0
            // Rows are copied, and outputs stored, in pieces of 16 bytes.
            && [n, k, pitch].iter().all(|len| len.is_multiple_of(EIGHT))
            && self.clusters_at_once(tile.cluster(m)) > 0
    }

    fn clusters_at_once(&self, blocks: usize) -> usize {
        self.clusters[blocks - 1]
    }

    /// How many tiles of a product a cluster computes at most, one after the other.
    fn turns(&self, shape: &Shape, output: LinearOutput, tile: LinearTile) -> usize {
        let at_once = self.clusters_at_once(tile.cluster(shape.m));
        tile.work_items(shape, output).div_ceil(at_once)
    }

    /// Whether tiles of a product keep more than half of the multiprocessors busy: with fewer, cuBLASLt's smaller tiles were always faster.
    fn fills(&self, shape: &Shape, output: LinearOutput, tile: LinearTile) -> bool {
        let at_once = self.clusters_at_once(tile.cluster(shape.m));
        2 * tile.work_items(shape, output) > self.turns(shape, output, tile) * at_once
    }

    /// What a product should take, of a multiprocessor.
    fn cycles(&self, shape: &Shape, output: LinearOutput, tile: LinearTile) -> usize {
        let LinearTile { rows, weights } = tile;
        // 64 rows of x by a stage of one row of weights take two.
        let multiplied = rows / GROUP_ROWS * weights * 2;
        let loaded = (rows + weights / tile.cluster(shape.m)) * STAGE_ROW_BYTES / LOADED_BYTES;
        let stages = shape.k.div_ceil(STAGE_INPUTS);
        self.turns(shape, output, tile) * (stages * multiplied.max(loaded) + STORE_CYCLES)
    }

    /// Launches a product. `shape.n` counts outputs, of which [`LinearOutput::Glu`] has half as many as rows of weights.
    ///
    /// # Safety
    /// As [`CublasLt::run`](super::cublas_lt::CublasLt::run); the tile must be one that [`Self::can`] compute the product.
    pub(super) unsafe fn run(
        &self,
        shape: &Shape,
        output: LinearOutput,
        tile: LinearTile,
        operands: &Operands,
    ) -> Result<(), GpuError> {
        let at = LinearTile::all().position(|known| known == tile);
        let row_bytes = shape.k * size_of::<half::bf16>();
        let x = self.gpu.tiles_map(&MatrixTiles {
            first: operands.x,
            rows: shape.m,
            row_bytes,
            copied: tile.rows,
        })?;
        let weight = self.gpu.tiles_map(&MatrixTiles {
            first: operands.weight,
            rows: output.stacked() * shape.n,
            row_bytes,
            copied: tile.weights / HALVES,
        })?;
        let args: [Arg; 8] = [
            operands.bias.into(),
            operands.out.into(),
            (shape.m as i32).into(),
            (shape.n as i32).into(),
            (shape.k as i32).into(),
            (shape.pitch as i32).into(),
            output.mode().into(),
            output.activation().into(),
        ];
        let cluster = tile.cluster(shape.m);
        let clusters = tile.work_items(shape, output).min(self.clusters_at_once(cluster));
        let launch = Launch::new([(clusters * cluster) as u32, 1, 1], tile.threads() as u32)
            .shared(tile.shared_bytes())
            .cluster(cluster as u32)
            .pdl(true);
        let function = &self.kernels[at.expect("one of them")];
        // SAFETY: the caller's promise; the arguments are those of `LINEAR_HOPPER_MANY` in kernels/linear_hopper_many.cu.
        unsafe { self.gpu.launch_with_maps(function, launch, &[&x, &weight], &args) }
    }
}

#[cfg(test)]
mod tests {
    use super::LinearTile;
    use crate::cuda::AssumedGpu;

    #[test]
    fn blocks_fit_on_hopper() {
        for tile in LinearTile::all() {
            assert_eq!(AssumedGpu::H200.blocks(tile.shared_bytes()), 1, "{tile}");
        }
    }
}
