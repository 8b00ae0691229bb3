//! How products of few rows are cut into thread blocks, for [`stream`](super::stream): what a GPU's multiprocessors and shared memory allow.

use std::fmt;

use half::bf16;
use serde::{Deserialize, Serialize};

use super::cublas_lt::Shape;
use super::matrix::{INT4_ROWS, INT4_WINDOW};
use super::output::LinearOutput;
use super::{Fp8Scaling, GpuValues, Int4Group};
use crate::GgufFormat;
use crate::cuda::meta::BLOCK_SHARED_BYTES;

/// Most elements of which every block computes the norm for itself: more than that is slower than a kernel of its own (one row
/// of 5120 on an H200: 18.9 ms a token instead of 17.1; tests/bench/h200/norms.json).
const MAX_NORM_ELEMENTS: usize = 4096;
/// The kernel for up to 8 rows alone computes norms.
const MAX_NORM_ROWS: usize = 4;

/// Most rows that the kernels take. Of e4m3 weights a kernel for 32 rows took as long as two launches for 16, as weights become bf16 on the
/// way (H200); so do those of four bits, and with many groups, as GGUF's types have them, there are no registers for more than 8.
pub(super) fn most_rows(values: GpuValues) -> usize {
    match values {
        GpuValues::Bf16 => 32,
        GpuValues::Fp8(_) | GpuValues::Int4(Int4Group::Of64 | Int4Group::Of128) => 16,
        GpuValues::Int4(Int4Group::Of32) | GpuValues::Gguf(_) => 8,
    }
}

/// Constants of `kernels/linear.cu`.
pub(super) const WARPS: usize = 8;
pub(super) const WARP: usize = 32;
const TILE: usize = 16;
const CHUNK_BYTES: usize = 128;
const RING_PIECES: usize = 34;
const PIECE: usize = 16;
/// Of x, at most; `kInputBytes`.
const INPUT_BYTES: usize = 32 << 10;
/// Less than that is a multiple of this.
const INPUT_ALIGN: usize = 1 << 10;
const BUFFERS: usize = 4;
const PAD: usize = 4;
const MOST_PARTS: usize = 8;

/// Constants of `kernels/linear_int4_few.cu`; a warp's ring has as many stages as fit in its bytes.
const FEW_ROWS: usize = 8;
const FEW_INPUT_PAD: usize = 16;
const FEW_RING_BYTES: usize = 8192;

/// How our own kernels cut a product into thread blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LinearCut {
    /// Warps of a block side by side along the features, each with 16; the rest of its 8 warps share k. A power of two.
    pub row_warps: usize,
    /// Blocks that share k. A power of two; more than 1 needs compute capability 9.0.
    pub cluster: usize,
    /// Blocks per multiprocessor: 1, which has it to itself, or 2, of which one reads while the other adds up its sums.
    pub blocks_per_sm: usize,
}

impl LinearCut {
    /// `row_warps` and `cluster` of those that are worth a measurement, the likeliest first. The last ones are for wide chunks of x, of
    /// which there is room for few.
    pub const SIZES: [(usize, usize); 9] = [
        (1, 1),
        (2, 1),
        (4, 1),
        (2, 2),
        (4, 2),
        (4, 4),
        (8, 4),
        (8, 2),
        (8, 1),
    ];

    /// That with the least inputs and sums.
    const WIDEST: Self = Self {
        row_warps: WARPS,
        cluster: 1,
        blocks_per_sm: 1,
    };
}

impl fmt::Display for LinearCut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            row_warps,
            cluster,
            blocks_per_sm,
        } = self;
        write!(f, "{row_warps}x{cluster}x{blocks_per_sm}")
    }
}

/// What a GPU can run, and so which cuts it can take.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cuts {
    pub(super) sm_count: usize,
    /// Bytes of shared memory that one block may have.
    pub(super) most_shared: usize,
    /// Clusters of 1, 2, 4 and 8 blocks that run at once with a multiprocessor for each block; 0 if there are none.
    pub(super) clusters: [usize; 4],
}

impl Cuts {
    /// The cuts that can compute a product.
    pub(super) fn possible(&self, shape: &Shape, output: LinearOutput) -> Vec<LinearCut> {
        let cuts = LinearCut::SIZES.into_iter().flat_map(|(row_warps, cluster)| {
            [1, 2].map(|blocks_per_sm| LinearCut {
                row_warps,
                cluster,
                blocks_per_sm,
            })
        });
        cuts.filter(|cut| self.can(shape, output, *cut)).collect()
    }

    /// Those of them that are worth a measurement, the likeliest first.
    pub(super) fn of(&self, shape: &Shape, output: LinearOutput) -> Vec<LinearCut> {
        let mut cuts = self.possible(shape, output);
        // A block's part of x should fit, and no multiprocessor should be without a block.
        if cuts.iter().any(|cut| self.fills(shape, output, *cut)) {
            cuts.retain(|cut| self.fills(shape, output, *cut));
        }
        cuts.sort_by_key(|cut| (self.few_bytes(shape, *cut).is_none(), !self.fits(shape, *cut)));
        cuts
    }

    /// The one to use where nothing was measured, if any should be.
    pub(super) fn default_of(&self, shape: &Shape, output: LinearOutput) -> Option<LinearCut> {
        let first = self.of(shape, output).first().copied();
        first.filter(|cut| self.fits(shape, *cut))
    }

    /// Most rows of one launch for such weights: with little shared memory, fewer than the kernels take.
    pub(super) fn most_rows(&self, values: GpuValues) -> usize {
        let most = most_rows(values);
        let has_room = |rows: &usize| {
            let shape = Shape {
                m: *rows,
                n: 0,
                k: 0,
                wide: false,
                bias: false,
                values,
                pitch: 0,
            };
            BUFFERS * rows * chunk_bytes(values) <= self.input_bytes(&shape, LinearCut::WIDEST)
        };
        let mut kernels = [32, 16, 8].into_iter().filter(|&rows| rows <= most);
        kernels.find(has_room).unwrap_or(most)
    }

    /// Whether a cut can compute a product.
    pub(super) fn can(&self, shape: &Shape, output: LinearOutput, cut: LinearCut) -> bool {
        if self.few_bytes(shape, cut).is_some() {
            return true;
        }
        let parts = WARPS / cut.row_warps;
        // The tile of a warp has one factor.
        let whole_blocks = shape.scaling() != Some(Fp8Scaling::Blocks)
            || output.stacked() == 1
            || shape.n.is_multiple_of(TILE);
        whole_blocks
            && shape.m <= most_rows(shape.values)
            && chunks(shape).is_some()
            && cut.row_warps >= output.stacked()
            && self.clusters(cut) > 0
            && parts * cut.cluster <= MOST_PARTS
            && BUFFERS * shape.m * parts * chunk_bytes(shape.values) <= self.input_bytes(shape, cut)
            && self.shared_bytes(shape, cut) <= self.most_shared_bytes(cut)
    }

    /// Shared memory of a block, if `kernels/linear_int4_few.cu` computes the product.
    pub(super) fn few_bytes(&self, shape: &Shape, cut: LinearCut) -> Option<usize> {
        let GpuValues::Int4(group) = shape.values else {
            return None;
        };
        let &Shape { m, n, k, .. } = shape;
        let whole_pieces = n.is_multiple_of(INT4_ROWS) && (k * size_of::<bf16>()).is_multiple_of(PIECE);
        if m > FEW_ROWS || cut.cluster > 1 || !whole_pieces {
            return None;
        }
        // Of a window: two eights of rows, and for each lane the words of two rows.
        let stage = INT4_ROWS * INT4_WINDOW + 2 * WARP * group.stride(INT4_WINDOW) * size_of::<u32>();
        let ring = WARPS * (FEW_RING_BYTES / stage) * stage;
        let inputs = m * (k.next_multiple_of(INT4_WINDOW) * size_of::<bf16>() + FEW_INPUT_PAD);
        let parts = WARPS / cut.row_warps;
        let sums = 2 * parts * FEW_ROWS * (cut.row_warps * TILE + PAD) * size_of::<f32>();
        let bytes = ring + inputs + sums;
        (bytes <= self.most_shared_bytes(cut)).then_some(bytes)
    }

    /// Shared memory that a block may have.
    fn most_shared_bytes(&self, cut: LinearCut) -> usize {
        (self.most_shared + BLOCK_SHARED_BYTES) / cut.blocks_per_sm - BLOCK_SHARED_BYTES
    }

    /// Bytes for x of a block of `kernels/linear.cu`: where it has a multiprocessor to itself, what there is besides weights and sums, up to
    /// [`INPUT_BYTES`], so that it fits where a block may have 99 KiB.
    pub(super) fn input_bytes(&self, shape: &Shape, cut: LinearCut) -> usize {
        let beside = ring_bytes(shape.values) + sum_bytes(shape.m, cut);
        match cut.blocks_per_sm {
            1 => {
                let left = self.most_shared_bytes(cut).saturating_sub(beside);
                (left / INPUT_ALIGN * INPUT_ALIGN).min(INPUT_BYTES)
            }
            _ => INPUT_BYTES,
        }
    }

    /// Of a block of `kernels/linear.cu`.
    fn shared_bytes(&self, shape: &Shape, cut: LinearCut) -> usize {
        ring_bytes(shape.values) + self.input_bytes(shape, cut) + sum_bytes(shape.m, cut)
    }

    /// Whether a block's part of x stays in shared memory.
    fn fits(&self, shape: &Shape, cut: LinearCut) -> bool {
        let fit = |chunks: usize| {
            shape.m * chunks.div_ceil(cut.cluster) * chunk_bytes(shape.values) <= self.input_bytes(shape, cut)
        };
        chunks(shape).is_some_and(fit) || self.few_bytes(shape, cut).is_some()
    }

    /// Whether a cut that can compute a product can compute a norm ahead of it.
    pub(super) fn can_norm(&self, shape: &Shape, cut: LinearCut) -> bool {
        shape.m <= MAX_NORM_ROWS
            && shape.m * shape.k <= MAX_NORM_ELEMENTS
            && shape.k.is_multiple_of(chunk_inputs(shape.values))
            && self.fits(shape, cut)
    }

    fn clusters(&self, cut: LinearCut) -> usize {
        self.clusters[cut.cluster.trailing_zeros() as usize]
    }

    /// Clusters that compute `n` outputs: not more than run at once, with as many blocks on each multiprocessor as the cut says.
    pub(super) fn clusters_of(&self, n: usize, output: LinearOutput, cut: LinearCut) -> usize {
        let features = cut.row_warps * TILE / output.stacked();
        (self.clusters(cut) * cut.blocks_per_sm).min(n.div_ceil(features))
    }

    /// Whether there is a block for nearly every multiprocessor.
    fn fills(&self, shape: &Shape, output: LinearOutput, cut: LinearCut) -> bool {
        let blocks = cut.cluster * self.clusters_of(shape.n, output, cut);
        16 * blocks >= 15 * self.sm_count
    }

    /// Shared memory to launch a block with. Products start before the kernel ahead has ended, and some multiprocessors are still full then.
    /// With one block per multiprocessor, a block asks for so much that two do not fit: otherwise some multiprocessors would get two blocks
    /// and decide how long the product takes (a token of Llama-3.1-8B's shape at batch 1 on an H200: 5.5 ms instead of 4.3;
    /// tests/bench/h200/tiles.json). Grids that leave multiprocessors idle anyway are not padded.
    pub(super) fn launched_bytes(&self, shape: &Shape, output: LinearOutput, cut: LinearCut) -> usize {
        let bytes = self
            .few_bytes(shape, cut)
            .unwrap_or_else(|| self.shared_bytes(shape, cut));
        match cut.blocks_per_sm == 1 && self.fills(shape, output, cut) {
            true => bytes.max((self.most_shared + BLOCK_SHARED_BYTES) / 2),
            false => bytes,
        }
    }
}

/// Of a chunk of a row of x.
fn chunk_bytes(values: GpuValues) -> usize {
    chunk_inputs(values) * size_of::<bf16>()
}

/// Inputs of a chunk.
fn chunk_inputs(values: GpuValues) -> usize {
    match values {
        GpuValues::Bf16 => CHUNK_BYTES / size_of::<bf16>(),
        GpuValues::Fp8(_) => CHUNK_BYTES,
        GpuValues::Int4(_) => 2 * CHUNK_BYTES,
        GpuValues::Gguf(_) => GgufFormat::WINDOW,
    }
}

/// Chunks of a row of weights; `None` if they are not whole. GGUF's windows are filled up.
fn chunks(shape: &Shape) -> Option<usize> {
    let inputs = chunk_inputs(shape.values);
    let is_whole = shape.k.is_multiple_of(inputs) || matches!(shape.values, GpuValues::Gguf(_));
    is_whole.then_some(shape.k.div_ceil(inputs))
}

/// Tiles of 8 rows of the kernel for `m` rows.
pub(super) fn tiles(m: usize) -> usize {
    m.div_ceil(8).next_power_of_two()
}

/// Weights on their way.
fn ring_bytes(values: GpuValues) -> usize {
    let row = match values {
        GpuValues::Gguf(format) => format.pieces() * PIECE,
        GpuValues::Int4(group) => CHUNK_BYTES + group.stride(chunk_inputs(values)) * size_of::<u32>(),
        GpuValues::Bf16 | GpuValues::Fp8(_) => CHUNK_BYTES,
    };
    WARPS * (RING_PIECES * PIECE / row) * TILE * row
}

/// Sums of two blocks of features, for so many rows of x.
fn sum_bytes(m: usize, cut: LinearCut) -> usize {
    let parts = WARPS / cut.row_warps;
    2 * parts * tiles(m) * 8 * (cut.row_warps * TILE + PAD) * size_of::<f32>()
}

#[cfg(test)]
mod tests;
