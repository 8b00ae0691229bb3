use half::{bf16, f16};
use plimsoll_device::{Budget, Slab};

use crate::dtype::{Matrix, WeightError, WeightType};
use crate::format::packed;
use crate::panel::{PANEL, Target};
use crate::simd::{Kernel, Level, Simd, dispatch};

/// A float matrix in panels of sixteen outputs: `[panels][inputs][16]`, in the type it was stored in.
///
/// Each output is one chain of fused multiply-adds over the inputs in order, so that the number of rows multiplied at once
/// cannot change a result.
pub(crate) struct Dense {
    dtype: WeightType,
    inputs: usize,
    data: Slab,
}

impl Dense {
    pub(crate) fn new(matrix: &Matrix<'_>, budget: &Budget) -> Result<Self, WeightError> {
        let (dtype, inputs) = (matrix.dtype(), matrix.cols());
        let size = dtype.block_bytes();
        let data = packed(matrix, budget, |row, lane, packed| {
            for (k, element) in row.chunks_exact(size).enumerate() {
                packed[(k * PANEL + lane) * size..][..size].copy_from_slice(element);
            }
        })?;
        Ok(Self { dtype, inputs, data })
    }

    pub(crate) fn bytes(&self) -> usize {
        self.data.bytes()
    }

    /// Row `row`, widened.
    pub(crate) fn row(&self, row: usize, out: &mut [f32]) {
        let start = row / PANEL * self.inputs * PANEL + row % PANEL;
        let at = (0..self.inputs).map(|k| start + k * PANEL);
        match self.dtype {
            WeightType::F16 => {
                let data: &[f16] = self.data.as_slice();
                out.iter_mut().zip(at).for_each(|(y, i)| *y = data[i].to_f32());
            }
            WeightType::Bf16 => {
                let data: &[bf16] = self.data.as_slice();
                out.iter_mut().zip(at).for_each(|(y, i)| *y = data[i].to_f32());
            }
            _ => {
                let data: &[f32] = self.data.as_slice();
                out.iter_mut().zip(at).for_each(|(y, i)| *y = data[i]);
            }
        }
    }

    /// `x` is `[rows, inputs]`; writes the outputs of `panels`.
    pub(crate) fn multiply(
        &self,
        level: Level,
        x: &[f32],
        rows: usize,
        panels: std::ops::Range<usize>,
        target: &Target<'_>,
    ) {
        assert_eq!(x.len(), rows * self.inputs);
        for panel in panels {
            let at = panel * self.inputs * PANEL..(panel + 1) * self.inputs * PANEL;
            match self.dtype {
                WeightType::F16 => dispatch(
                    level,
                    Panel {
                        weights: &self.data.as_slice::<f16>()[at],
                        x,
                        rows,
                        panel,
                        target,
                    },
                ),
                WeightType::Bf16 => dispatch(
                    level,
                    Panel {
                        weights: &self.data.as_slice::<bf16>()[at],
                        x,
                        rows,
                        panel,
                        target,
                    },
                ),
                _ => dispatch(
                    level,
                    Panel {
                        weights: &self.data.as_slice::<f32>()[at],
                        x,
                        rows,
                        panel,
                        target,
                    },
                ),
            }
        }
    }
}

trait Element: Copy {
    /// # Safety
    /// As the functions of [`Simd`].
    unsafe fn load<S: Simd>(from: *const Self) -> S::F;
}

impl Element for f32 {
    #[inline(always)]
    unsafe fn load<S: Simd>(from: *const Self) -> S::F {
        // SAFETY: the caller's promise.
        unsafe { S::load(from) }
    }
}

impl Element for f16 {
    #[inline(always)]
    unsafe fn load<S: Simd>(from: *const Self) -> S::F {
        // SAFETY: the caller's promise.
        unsafe { S::load_f16(from) }
    }
}

impl Element for bf16 {
    #[inline(always)]
    unsafe fn load<S: Simd>(from: *const Self) -> S::F {
        // SAFETY: the caller's promise.
        unsafe { S::load_bf16(from) }
    }
}

/// One panel times all rows.
struct Panel<'a, E> {
    weights: &'a [E],
    x: &'a [f32],
    rows: usize,
    panel: usize,
    target: &'a Target<'a>,
}

impl<E: Element> Kernel for Panel<'_, E> {
    type Out = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let mut row = 0;
        // SAFETY: the features are there; each tile's rows exist.
        unsafe {
            if S::ACCUMULATORS >= 8 {
                while row + 8 <= self.rows {
                    self.tile::<S, 8>(row);
                    row += 8;
                }
            }
            while row + 4 <= self.rows {
                self.tile::<S, 4>(row);
                row += 4;
            }
            match self.rows - row {
                3 => self.tile::<S, 3>(row),
                2 => self.tile::<S, 2>(row),
                1 => self.tile::<S, 1>(row),
                _ => {}
            }
        }
    }
}

impl<E: Element> Panel<'_, E> {
    /// # Safety
    /// The CPU has the features of `S`; `first + M` rows exist.
    #[inline(always)]
    unsafe fn tile<S: Simd, const M: usize>(&self, first: usize) {
        let inputs = self.weights.len() / PANEL;
        debug_assert!((first + M) * inputs <= self.x.len());
        // SAFETY: the caller's promise; `weights` is `[inputs][16]` and `x` has `inputs` elements for each row.
        unsafe {
            let x: [*const f32; M] = std::array::from_fn(|r| self.x.as_ptr().add((first + r) * inputs));
            let mut acc = [S::splat(0.0); M];
            for k in 0..inputs {
                let w = E::load::<S>(self.weights.as_ptr().add(k * PANEL));
                for r in 0..M {
                    acc[r] = S::fma(S::splat(*x[r].add(k)), w, acc[r]);
                }
            }
            for r in 0..M {
                self.target.store::<S>(first + r, self.panel, acc[r]);
            }
        }
    }
}
