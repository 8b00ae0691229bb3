//! Products of 65 to 512 rows with bf16 weights, and of 33 to 512 with e4m3 weights, by wgmma on GPUs of Hopper's generation
//! (`kernels/linear_hopper_many.cu`).

use std::fmt;

use plimsoll_device::cuda::{Arg, Function, Gpu, GpuError, Launch, MatrixTiles};
use serde::{Deserialize, Serialize};

use super::cublas_lt::{Operands, Shape};
use super::{Fp8Scaling, GpuValues, LinearOutput};
use crate::cuda::{has_hopper_kernels, load};

/// Constants of the kernels.
const WARP_GROUP: usize = 128;
const GROUP_ROWS: usize = 64;
const STAGE_ROW_BYTES: usize = 128;
const MOST_SHARED: usize = 227 << 10;
const BESIDE_STAGES: usize = 6 << 10;
const GROUP_WARPS: usize = 4;
const ALIGN: usize = 1024;
/// Weights and outputs of a tile are divided in two halves of whole eights.
const EIGHT: usize = 8;
const PIECE: usize = 16;
const HALVES: usize = 2;
/// Fewest rows with bf16 weights, and with e4m3 weights: `linear_hopper.cu` computes up to 32.
const LEAST_ROWS: usize = 65;
const LEAST_FP8_ROWS: usize = 33;
/// With more, cuBLASLt's tiles fill the GPU.
const MOST_ROWS: usize = 512;

/// How many of the tiles that may be fast are measured at load.
const MOST_TILES: usize = 2;
/// Estimates to rank tiles by: bytes that a multiprocessor loads from L2 in a cycle, and cycles to store a tile.
const LOADED_BYTES: usize = 36;
const STORE_CYCLES: usize = 2000;

/// What a block of the kernels for many rows computes at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LinearTile {
    /// Rows of x: 64, 128 or 192.
    pub rows: usize,
    /// Rows of weights, up to 256. If gated, half of them are gates.
    pub weights: usize,
    /// Blocks that have a tile together, each a part of its inputs: 1 or 2.
    pub parts: usize,
}

/// Those of bf16, which have a block each.
const BF16_TILES: [LinearTile; 5] = [
    LinearTile::plain(128, 192),
    LinearTile::plain(128, 224),
    LinearTile::plain(128, 256),
    LinearTile::plain(192, 192),
    LinearTile::plain(192, 224),
];
/// Those of e4m3: of 46, the eight whose fastest lose least to the fastest of all in Llama-3.1-8B's layers at 40 to 384 rows, on an H200.
const FP8_TILES: [LinearTile; 8] = [
    LinearTile::plain(64, 128).in_parts(2),
    LinearTile::plain(64, 224),
    LinearTile::plain(128, 64),
    LinearTile::plain(128, 64).in_parts(2),
    LinearTile::plain(128, 224),
    LinearTile::plain(192, 64),
    LinearTile::plain(192, 96),
    LinearTile::plain(192, 224),
];

impl LinearTile {
    const fn plain(rows: usize, weights: usize) -> Self {
        Self {
            rows,
            weights,
            parts: 1,
        }
    }

    const fn in_parts(self, parts: usize) -> Self {
        Self { parts, ..self }
    }

    /// Every tile there is a kernel for, of weights that are these.
    pub fn all(values: GpuValues) -> &'static [Self] {
        match values {
            GpuValues::Bf16 => &BF16_TILES,
            GpuValues::Fp8(Fp8Scaling::Rows) => &FP8_TILES,
            GpuValues::Fp8(Fp8Scaling::Blocks) | GpuValues::Int4(_) | GpuValues::Gguf(_) => &[],
        }
    }

    /// Different for each of them, below 2^20.
    pub(super) fn number(self) -> usize {
        (self.parts * 256 + self.rows) * 512 + self.weights
    }

    /// What the names of its kernels end in.
    fn suffix(self) -> String {
        let Self { rows, weights, parts } = self;
        format!("{rows}x{weights}_{parts}")
    }

    fn stage_bytes(self) -> usize {
        (self.rows + self.weights) * STAGE_ROW_BYTES
    }

    fn stages(self) -> usize {
        (MOST_SHARED - BESIDE_STAGES) / self.stage_bytes()
    }

    /// Stages with two barriers each, factors of weights for each group, barriers of warps whose sums another block has too, and alignment.
    fn shared_bytes(self) -> usize {
        let stages = self.stages() * (self.stage_bytes() + 2 * size_of::<u64>());
        let factors = self.groups() * self.weights * size_of::<f32>();
        let barriers = self.groups() * GROUP_WARPS / self.parts * size_of::<u64>();
        (stages + factors + barriers).next_multiple_of(ALIGN) + ALIGN
    }

    /// Warp groups that multiply.
    fn groups(self) -> usize {
        self.rows / GROUP_ROWS
    }

    /// Of a block: one warp group copies.
    fn threads(self) -> usize {
        WARP_GROUP * (1 + self.groups())
    }

    /// Blocks that share weights, as they have neighbouring rows of x.
    fn sharers(self, m: usize) -> usize {
        if m > self.rows { 2 } else { 1 }
    }

    /// Blocks of a cluster.
    fn cluster(self, m: usize) -> usize {
        self.sharers(m) * self.parts
    }

    /// Work items of a product: a tile for each sharer of a cluster.
    fn work_items(self, shape: &Shape, output: LinearOutput) -> usize {
        let outputs = self.weights / output.stacked();
        shape.n.div_ceil(outputs) * shape.m.div_ceil(self.sharers(shape.m) * self.rows)
    }

    /// The tiles that should be fastest, where so many clusters run at once.
    fn fastest(
        tiles: impl Iterator<Item = Self>,
        shape: &Shape,
        output: LinearOutput,
        at_once: impl Fn(Self) -> usize,
    ) -> Vec<Self> {
        let may_be_fast = tiles.filter(|tile| tile.fills(shape, output, at_once(*tile)));
        let mut tiles: Vec<_> = may_be_fast.collect();
        tiles.sort_by_key(|tile| tile.cycles(shape, output, at_once(*tile)));
        tiles.truncate(MOST_TILES);
        tiles
    }

    /// How many tiles of a product a cluster computes at most, one after the other.
    fn turns(self, shape: &Shape, output: LinearOutput, at_once: usize) -> usize {
        self.work_items(shape, output).div_ceil(at_once)
    }

    /// Whether tiles of a product keep more than half of the multiprocessors busy: with fewer, cuBLASLt's smaller tiles were always faster.
    /// With e4m3 weights it was slower even where our tiles kept only 64 of 132 busy.
    fn fills(self, shape: &Shape, output: LinearOutput, at_once: usize) -> bool {
        let part = match shape.values {
            GpuValues::Fp8(_) => 3,
            _ => 2,
        };
        part * self.work_items(shape, output) > self.turns(shape, output, at_once) * at_once
    }

    /// What a product should take, of a multiprocessor.
    fn cycles(self, shape: &Shape, output: LinearOutput, at_once: usize) -> usize {
        // 64 rows of x by a stage of one row of weights take two.
        let multiplied = self.groups() * self.weights * 2;
        // Those that the other sharer brings count in e4m3 and not in bf16: so tiles are ranked as they were measured.
        let weights = match shape.values {
            GpuValues::Fp8(_) => self.weights,
            _ => self.weights / self.sharers(shape.m),
        };
        let loaded = (self.rows + weights) * STAGE_ROW_BYTES / LOADED_BYTES;
        let stages = stages(shape).div_ceil(self.parts);
        self.turns(shape, output, at_once) * (stages * multiplied.max(loaded) + STORE_CYCLES)
    }
}

impl fmt::Display for LinearTile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}x{}", self.rows, self.weights)?;
        if self.parts > 1 {
            write!(f, " in {} parts", self.parts)?;
        }
        Ok(())
    }
}

#[derive(Debug)]
pub(super) struct ManyKernels {
    gpu: Gpu,
    /// Empty where kernels made for Hopper do not run.
    kernels: Vec<Kernel>,
}

#[derive(Debug)]
struct Kernel {
    values: GpuValues,
    tile: LinearTile,
    function: Function,
    /// Clusters that run at once, with one tile of rows and with more.
    at_once: [usize; 2],
}

impl ManyKernels {
    /// `fp8_products`: whether e4m3 values are multiplied as they are.
    pub(super) fn load(gpu: &Gpu, fp8_products: bool) -> Result<Self, GpuError> {
        let mut kernels = Vec::new();
        if has_hopper_kernels(gpu) {
            let module = load(gpu, "linear_hopper_many")?;
            let fp8 = ("linear_hopper_many_fp8", GpuValues::Fp8(Fp8Scaling::Rows));
            let types = [("linear_hopper_many", GpuValues::Bf16)]
                .into_iter()
                .chain(fp8_products.then_some(fp8));
            for (name, values) in types {
                for &tile in LinearTile::all(values) {
                    let function = module.function(&format!("{name}_{}", tile.suffix()))?;
                    function.allow_shared(tile.shared_bytes())?;
                    let at_once = |sharers: usize| match sharers * tile.parts {
                        // Blocks take a multiprocessor each.
                        1 => Ok(gpu.info().sm_count),
                        blocks => function.clusters_at_once(blocks, tile.threads(), tile.shared_bytes()),
                    };
                    let at_once = [at_once(1)?, at_once(2)?];
                    kernels.push(Kernel {
                        values,
                        tile,
                        function,
                        at_once,
                    });
                }
            }
        }
        Ok(Self {
            gpu: gpu.clone(),
            kernels,
        })
    }

    /// The tiles that can compute a product and should be fastest.
    pub(super) fn tiles(&self, shape: &Shape, output: LinearOutput) -> Vec<LinearTile> {
        let can = LinearTile::all(shape.values).iter().copied();
        let can = can.filter(|tile| self.can(shape, *tile));
        LinearTile::fastest(can, shape, output, |tile| self.clusters_at_once(shape, tile))
    }

    /// Whether a tile can compute a product.
    pub(super) fn can(&self, shape: &Shape, tile: LinearTile) -> bool {
        let &Shape { m, n, k, pitch, .. } = shape;
        let (least, piece) = match shape.values {
            GpuValues::Fp8(_) => (LEAST_FP8_ROWS, PIECE),
            _ => (LEAST_ROWS, EIGHT),
        };
        (least..=MOST_ROWS).contains(&m)
            && self.clusters_at_once(shape, tile) > 0
            && stages(shape) >= tile.parts
            // Rows are copied, and outputs stored, in pieces of 16 bytes.
            && k.is_multiple_of(piece)
            && n.is_multiple_of(EIGHT)
            && pitch.is_multiple_of(EIGHT)
    }

    fn kernel(&self, values: GpuValues, tile: LinearTile) -> Option<&Kernel> {
        let mut kernels = self.kernels.iter();
        kernels.find(|kernel| kernel.values == values && kernel.tile == tile)
    }

    /// 0 where there is no such kernel.
    fn clusters_at_once(&self, shape: &Shape, tile: LinearTile) -> usize {
        let kernel = self.kernel(shape.values, tile);
        kernel.map_or(0, |kernel| kernel.at_once[tile.sharers(shape.m) - 1])
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
        let kernel = self.kernel(shape.values, tile).expect("as `can` says");
        let row_bytes = row_bytes(shape);
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
        let args: [Arg; 10] = [
            operands.x_scales.into(),
            operands.weight_scales.into(),
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
        let items = tile.work_items(shape, output);
        // Blocks of parts take one tile each.
        let clusters = match tile.parts {
            1 => items.min(self.clusters_at_once(shape, tile)),
            _ => items,
        };
        let launch = Launch::new([(clusters * cluster) as u32, 1, 1], tile.threads() as u32)
            .shared(tile.shared_bytes())
            .cluster(cluster as u32)
            .pdl(true);
        // SAFETY: the caller's promise; the arguments are those of `LINEAR_HOPPER_MANY` in kernels/linear_hopper_many.cu.
        unsafe {
            self.gpu
                .launch_with_maps(&kernel.function, launch, &[&x, &weight], &args)
        }
    }
}

/// Bytes of a row of x, which are those of a row of weights.
fn row_bytes(shape: &Shape) -> usize {
    shape.weight_bytes() / shape.n
}

fn stages(shape: &Shape) -> usize {
    row_bytes(shape).div_ceil(STAGE_ROW_BYTES)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::{BF16_TILES, FP8_TILES, LinearTile, Shape};
    use crate::Activation;
    use crate::cuda::{AssumedGpu, Fp8Scaling, GpuValues, LinearOutput};

    #[test]
    fn blocks_fit_on_hopper() {
        for tile in BF16_TILES.into_iter().chain(FP8_TILES) {
            assert_eq!(AssumedGpu::H200.blocks(tile.shared_bytes()), 1, "{tile}");
        }
    }

    #[test]
    fn tiles_have_numbers_of_their_own() {
        for tiles in [&BF16_TILES[..], &FP8_TILES] {
            let numbers: HashSet<usize> = tiles.iter().map(|tile| tile.number()).collect();
            assert_eq!(numbers.len(), tiles.len());
            assert!(numbers.iter().all(|&number| number < 1 << 20));
        }
    }

    /// Those that were fastest on an H200 for qkv, o, gate and up with SiLU, and down of Llama-3.1-8B's shape.
    #[test]
    fn fastest_fp8_tiles_are_measured() {
        let plain = LinearTile::plain;
        let halves = |rows, weights| plain(rows, weights).in_parts(2);
        let gated = LinearOutput::Glu(Activation::Silu);
        let products = [
            (6144, 4096, LinearOutput::Bf16),
            (4096, 4096, LinearOutput::Bf16),
            (14336, 4096, gated),
            (4096, 14336, LinearOutput::Bf16),
        ];
        for (m, fastest) in [
            (
                40,
                [halves(64, 128), halves(64, 128), plain(64, 224), halves(64, 128)],
            ),
            (
                64,
                [halves(64, 128), halves(64, 128), plain(64, 224), halves(64, 128)],
            ),
            (
                96,
                [plain(128, 64), plain(128, 64), plain(128, 224), halves(128, 64)],
            ),
            (
                128,
                [plain(128, 64), halves(128, 64), plain(128, 224), halves(128, 64)],
            ),
            (
                384,
                [plain(192, 96), plain(192, 64), plain(192, 224), plain(192, 64)],
            ),
        ] {
            for ((n, k, output), fastest) in products.into_iter().zip(fastest) {
                let shape = Shape {
                    m,
                    n,
                    k,
                    wide: false,
                    bias: false,
                    values: GpuValues::Fp8(Fp8Scaling::Rows),
                    pitch: n,
                };
                // As an H200 has them.
                let at_once = |tile: LinearTile| [132, 66, 30][tile.cluster(m).ilog2() as usize];
                let tiles = LinearTile::fastest(FP8_TILES.into_iter(), &shape, output, at_once);
                assert!(
                    tiles.contains(&fastest),
                    "{shape:?} {output:?}: {fastest}, not {tiles:?}"
                );
            }
        }
    }
}
