//! Products of weights of four bits by the matrix instructions of warp groups (`kernels/int4_products.cu`).

use plimsoll_device::cuda::{Arg, Function, Gpu, GpuError, Launch};

use super::cublas_lt::{Operands, Shape};
use super::matrix::{GpuValues, INT4_WINDOW, Int4Group};
use super::{LinearOutput, hopper};
use crate::cuda::{has_hopper_kernels, load};

/// Constants of `kernels/int4_products.cu`.
const THREADS: usize = 512;
const FEATURES: usize = 128;
const ALIGN: usize = 1024;
/// Rows of inputs of a tile, and stages.
const TILES: [(usize, usize); 2] = [(64, 4), (128, 5)];

/// From so many rows on they are measured; fewer are `kernels/linear_hopper_int4.cu`'s.
pub(super) const LEAST_ROWS: usize = hopper::MOST_ROWS + 1;
/// Up to so many: with more, dequantising for cuBLASLt was faster for every shape (H100, 1,024 rows).
const MOST_ROWS: usize = 512;
/// Blocks for each multiprocessor above which it is not worth a measurement to divide k among more.
const MOST_BLOCKS_PER_SM: usize = 4;

#[derive(Debug)]
pub(super) struct Int4Products {
    gpu: Gpu,
    /// For each of [`TILES`], by the groups of weights; none where kernels made for Hopper do not run.
    kernels: Vec<(Int4Group, Vec<Function>)>,
}

impl Int4Products {
    pub(super) fn load(gpu: &Gpu) -> Result<Self, GpuError> {
        let mut kernels = Vec::new();
        if has_hopper_kernels(gpu) {
            let module = load(gpu, "int4_products")?;
            for group in [Int4Group::Of32, Int4Group::Of64, Int4Group::Of128] {
                let of_tile = |(rows, stages)| -> Result<Function, GpuError> {
                    let function = module.function(&format!("int4_product_{}_{rows}", group.inputs()))?;
                    function.allow_shared(shared_bytes(group, rows, stages))?;
                    Ok(function)
                };
                let of_tiles = TILES.into_iter().map(of_tile);
                kernels.push((group, of_tiles.collect::<Result<_, _>>()?));
            }
        }
        Ok(Self {
            gpu: gpu.clone(),
            kernels,
        })
    }

    /// Numbers of blocks to divide k among that are worth a measurement.
    pub(super) fn parts(&self, shape: &Shape, output: LinearOutput) -> Vec<usize> {
        let blocks = shape.m.div_ceil(tile(shape.m).0) * shape.n.div_ceil(FEATURES);
        let parts = [1, 2, 4, 8].into_iter().filter(|&parts| {
            let is_useful = parts == 1 || blocks * parts <= MOST_BLOCKS_PER_SM * self.gpu.info().sm_count;
            shape.m <= MOST_ROWS && is_useful && self.can(shape, output, parts)
        });
        parts.collect()
    }

    /// Whether so many blocks can divide k of a product.
    pub(super) fn can(&self, shape: &Shape, output: LinearOutput, parts: usize) -> bool {
        !self.kernels.is_empty()
            && matches!(shape.values, GpuValues::Int4(_))
            && output == LinearOutput::Bf16
            // Other numbers of inputs are not tested.
            && shape.k.is_multiple_of(INT4_WINDOW)
            && parts <= shape.k / INT4_WINDOW
    }

    /// Launches a product.
    ///
    /// # Safety
    /// As [`CublasLt::run`](super::cublas_lt::CublasLt::run); there must be a way to divide it so, as [`Self::can`] says.
    pub(super) unsafe fn run(
        &self,
        shape: &Shape,
        parts: usize,
        operands: &Operands,
    ) -> Result<(), GpuError> {
        let GpuValues::Int4(group) = shape.values else {
            unreachable!("weights of four bits")
        };
        let (rows, stages) = tile(shape.m);
        let of_group = self.kernels.iter().find(|(known, _)| *known == group);
        let (_, of_tiles) = of_group.expect("there are kernels for all groups");
        let at = TILES.iter().position(|known| known.0 == rows);
        let args: [Arg; 9] = [
            operands.x.into(),
            operands.weight.into(),
            operands.weight_scales.into(),
            operands.bias.into(),
            operands.out.into(),
            (shape.m as i32).into(),
            (shape.n as i32).into(),
            (shape.k as i32).into(),
            (shape.pitch as i32).into(),
        ];
        let grid = [parts, shape.m.div_ceil(rows), shape.n.div_ceil(FEATURES)].map(|blocks| blocks as u32);
        let launch = Launch::new(grid, THREADS as u32)
            .shared(shared_bytes(group, rows, stages))
            .cluster(parts as u32)
            .pdl(true);
        // SAFETY: the caller's promise; the arguments are those of `INT4_PRODUCT` in kernels/int4_products.cu.
        unsafe {
            self.gpu
                .launch(&of_tiles[at.expect("one of them")], launch, &args)
        }
    }
}

/// The smallest tile of as many rows, or the largest.
fn tile(rows: usize) -> (usize, usize) {
    let fits = TILES.into_iter().find(|tile| tile.0 >= rows);
    fits.unwrap_or(TILES[TILES.len() - 1])
}

/// Stages of inputs, codes and groups, barriers, and alignment.
fn shared_bytes(group: Int4Group, rows: usize, stages: usize) -> usize {
    let inputs = rows * INT4_WINDOW * 2;
    let codes = FEATURES * (INT4_WINDOW / 2 + group.stride(INT4_WINDOW) * size_of::<u32>());
    (stages * (inputs + codes + 2 * size_of::<u64>())).next_multiple_of(ALIGN) + ALIGN
}

#[cfg(test)]
mod tests {
    use super::{Int4Group, TILES, shared_bytes};
    use crate::cuda::AssumedGpu;

    #[test]
    fn blocks_fit_on_hopper() {
        for group in [Int4Group::Of32, Int4Group::Of64, Int4Group::Of128] {
            for (rows, stages) in TILES {
                let shared = shared_bytes(group, rows, stages);
                assert!(AssumedGpu::H200.blocks(shared) >= 1, "{rows} rows, {group:?}");
            }
        }
    }
}
