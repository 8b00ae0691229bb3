//! Panels: what a weight matrix is packed into.

use crate::parallel::Disjoint;
use crate::simd::{LANES, Simd};

/// Outputs of one panel of packed weights: the lanes of a vector.
pub(crate) const PANEL: usize = LANES;

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
