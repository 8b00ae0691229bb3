//! Panels: what a weight matrix is packed into.

use plimsoll_core::Component;
use plimsoll_device::{Budget, Slab};

use crate::dtype::{Matrix, WeightError};
use crate::format::panel_bytes;
use crate::parallel::{Disjoint, run};
use crate::simd::{LANES, Simd};

/// Outputs of one panel of packed weights: the lanes of a vector.
pub(crate) const PANEL: usize = LANES;

/// A matrix in panels: `pack` writes a row to its lane of the bytes of a panel.
pub(crate) fn packed(
    matrix: &Matrix<'_>,
    budget: &Budget,
    pack: impl Fn(&[u8], usize, &mut [u8]) + Sync,
) -> Result<Slab, WeightError> {
    let panels = matrix.rows().div_ceil(PANEL);
    let panel_bytes = panel_bytes(matrix.dtype(), matrix.cols()).expect("the matrix is in memory");
    let mut data = Slab::new(budget, Component::Weights, panels * panel_bytes)?;
    let packed = Disjoint::new(data.as_mut_slice::<u8>());
    run(panels, &|_, panel| {
        // SAFETY: panels are disjoint.
        let packed = unsafe { packed.part(panel * panel_bytes, panel_bytes) };
        for lane in 0..PANEL.min(matrix.rows() - panel * PANEL) {
            pack(matrix.row(panel * PANEL + lane), lane, packed);
        }
    });
    Ok(data)
}

/// Where the outputs of one part go.
pub(crate) struct Target<'a> {
    pub(crate) out: &'a Disjoint<'a, f32>,
    pub(crate) stride: usize,
    pub(crate) first: usize,
    pub(crate) outputs: usize,
}

impl Target<'_> {
    /// Stores the sixteen outputs of `panel` of row `row`, without those beyond the last.
    ///
    /// # Safety
    /// No other task writes this row and panel.
    #[inline(always)]
    pub(crate) unsafe fn store<S: Simd>(&self, row: usize, panel: usize, value: S::F) {
        let at = row * self.stride + self.first + panel * PANEL;
        let width = PANEL.min(self.outputs - panel * PANEL);
        // SAFETY: the caller's promise; the array has sixteen elements.
        unsafe {
            let out = self.out.part(at, width);
            if width == PANEL {
                S::store(out.as_mut_ptr(), value);
            } else {
                let mut lanes = [0f32; PANEL];
                S::store(lanes.as_mut_ptr(), value);
                out.copy_from_slice(&lanes[..width]);
            }
        }
    }
}
