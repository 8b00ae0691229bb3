//! Where few rows go, from the router's product on: `kernels/moe_route_hopper.cu`.

use plimsoll_device::cuda::{Function, Gpu, GpuError, Launch};

use super::{GpuRoutes, WARP};
use crate::cuda::linear::{GpuLinear, GpuMatrix};

/// Constants of the kernels.
const BLOCKS: usize = 8;
const THREADS: usize = 512;
const EXPERTS_OF_WARP: usize = 32;
const UNIT: usize = 32;
const MOST_ROWS: usize = 32;
const MOST_EXPERTS: usize = 256;
/// Of all rows: no more than the threads of a block, each of which counts one.
const MOST_ROUTES_OF_ALL: usize = 256;
/// Units of inputs of a warp, of which there is a kernel each.
const UNITS: [usize; 3] = [1, 2, 4];
/// Bytes of shared memory that are left for inputs and sums.
const MOST_SHARED: usize = 128 << 10;

/// One kernel for each of [`UNITS`].
#[derive(Debug)]
pub(super) struct FusedRouter([Function; UNITS.len()]);

/// How warps share the product of `[rows, k]` and `[experts, k]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Cut {
    /// Most units of inputs of a warp.
    units: usize,
    /// Bytes of inputs and sums of a block.
    shared: usize,
}

impl Cut {
    /// `None` if the kernels cannot compute it.
    fn new(rows: usize, experts: usize, k: usize) -> Option<Self> {
        if !(2..=MOST_ROWS).contains(&rows) || experts > MOST_EXPERTS || !k.is_multiple_of(UNIT) {
            return None;
        }
        let warps = experts.div_ceil(EXPERTS_OF_WARP);
        let parts = THREADS / WARP / warps.next_power_of_two();
        let units = (k / UNIT).div_ceil(BLOCKS);
        let row = (units | 1) * UNIT * size_of::<u16>();
        let sums = parts * (warps * EXPERTS_OF_WARP + 4) * size_of::<f32>();
        let cut = Self {
            units: units.div_ceil(parts),
            shared: rows * (row + sums),
        };
        (cut.units <= UNITS[2] && cut.shared <= MOST_SHARED).then_some(cut)
    }
}

impl FusedRouter {
    pub(super) fn load(gpu: &Gpu) -> Result<Self, GpuError> {
        let module = crate::cuda::load(gpu, "moe_route_hopper")?;
        let load = |units: usize| -> Result<Function, GpuError> {
            let function = module.function(&format!("moe_route_hopper_{units}"))?;
            function.allow_shared(MOST_SHARED)?;
            Ok(function)
        };
        let [one, two, four] = UNITS;
        Ok(Self([load(one)?, load(two)?, load(four)?]))
    }

    /// Whether the kernels compute the gates of a shared expert with these weights.
    pub(super) fn takes_gate(gate: &GpuLinear) -> bool {
        gate.outputs() == 1 && matches!(gate.matrix(), GpuMatrix::Bf16(_)) && gate.bias().is_none()
    }

    /// The kernel that sends rows to experts by those weights, and its launch; `None` if there is none.
    pub(super) fn launch_of(
        &self,
        linear: &GpuLinear,
        routes: &GpuRoutes<'_>,
    ) -> Option<(&Function, Launch)> {
        assert_eq!(linear.outputs(), routes.experts, "a router of [experts, k]");
        let is_plain = matches!(linear.matrix(), GpuMatrix::Bf16(_)) && linear.bias().is_none();
        if !is_plain || routes.len() > MOST_ROUTES_OF_ALL {
            return None;
        }
        let Cut { units, shared } = Cut::new(routes.rows, routes.experts, linear.inputs())?;
        let kernel = UNITS.iter().position(|&most| units <= most)?;
        let launch = Launch::new([BLOCKS as u32, 1, 1], THREADS as u32)
            .cluster(BLOCKS as u32)
            .shared(shared);
        Some((&self.0[kernel], launch))
    }
}

#[cfg(test)]
mod tests {
    use super::Cut;

    #[test]
    fn warps_share_the_products_of_routers() {
        let units = |rows, experts, k| Cut::new(rows, experts, k).map(|cut| cut.units);
        // Qwen3-30B-A3B, Qwen3-235B-A22B, gpt-oss-20b and gpt-oss-120b.
        assert_eq!(units(32, 128, 2048), Some(2));
        assert_eq!(units(32, 128, 4096), Some(4));
        assert_eq!(units(32, 32, 2880), Some(1));
        assert_eq!(units(32, 128, 2880), Some(3));
        assert_eq!(units(2, 8, 32), Some(1));
        // A row, many rows, many experts, inputs that are no whole units, and more of them than fit.
        for (rows, experts, k) in [(1, 8, 64), (33, 8, 64), (2, 257, 64), (2, 8, 40), (2, 128, 8192)] {
            assert_eq!(units(rows, experts, k), None);
        }
    }
}
