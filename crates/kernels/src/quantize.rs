//! Inputs of a quantised layer, rounded to 15 bits in two planes of 8.

use plimsoll_core::Oom;
use plimsoll_device::{DryArena, Frame};

use crate::parallel::{Disjoint, run_ranges};
use crate::simd::{Kernel, LANES, Level, Simd, dispatch};

/// Inputs that share one scale of the quantised activations.
pub(crate) const X_GROUP: usize = 32;

/// The largest code of a group: 127 in the high plane, 0 in the low one.
const LARGEST_CODE: f32 = 127.0 * 128.0;

/// Rows quantised to 15 bits: `x = scale × (128 × high + low)` per [`X_GROUP`] inputs.
pub(crate) struct Activations<'a> {
    pub(crate) inputs: usize,
    pub(crate) rows: usize,
    /// In -127..=127.
    pub(crate) high: &'a [i8],
    /// In -64..=64.
    pub(crate) low: &'a [i8],
    /// `[rows][inputs / 32]`.
    pub(crate) scales: &'a [f32],
    /// Sums of the codes, per group of 32 and, where a format needs them, of 16 inputs.
    pub(crate) sums: [Sums<'a>; 2],
}

#[derive(Clone, Copy, Default)]
pub(crate) struct Sums<'a> {
    pub(crate) exact: &'a [i32],
    /// Times the group's scale.
    pub(crate) scaled: &'a [f32],
}

impl<'a> Activations<'a> {
    /// Quantises `x`, `[rows, inputs]`, into memory of `frame` with room for `room` rows.
    pub(crate) fn quantize(
        level: Level,
        room: usize,
        x: &[f32],
        inputs: usize,
        halves: bool,
        frame: &'a Frame<'_>,
    ) -> Result<Self, Oom> {
        let rows = x.len() / inputs;
        let [codes, groups, half_groups] = row_lens(inputs, halves);
        let high: &'a mut [i8] = &mut frame.alloc(room * codes)?[..rows * codes];
        let low: &'a mut [i8] = &mut frame.alloc(room * codes)?[..rows * codes];
        let scales: &'a mut [f32] = &mut frame.alloc(room * groups)?[..rows * groups];
        let exact: &'a mut [i32] = &mut frame.alloc(room * groups)?[..rows * groups];
        let scaled: &'a mut [f32] = &mut frame.alloc(room * groups)?[..rows * groups];
        let exact_halves: &'a mut [i32] = &mut frame.alloc(room * half_groups)?[..rows * half_groups];
        let scaled_halves: &'a mut [f32] = &mut frame.alloc(room * half_groups)?[..rows * half_groups];
        {
            let (high, low, scales) = (Disjoint::new(high), Disjoint::new(low), Disjoint::new(scales));
            let (exact, scaled) = (Disjoint::new(exact), Disjoint::new(scaled));
            let (exact_halves, scaled_halves) = (Disjoint::new(exact_halves), Disjoint::new(scaled_halves));
            run_ranges(rows, (4096 / inputs).max(1), &|range| {
                for row in range {
                    // SAFETY: rows are disjoint.
                    let kernel = unsafe {
                        QuantizeRow {
                            x: &x[row * inputs..(row + 1) * inputs],
                            high: high.part(row * inputs, inputs),
                            low: low.part(row * inputs, inputs),
                            scales: scales.part(row * groups, groups),
                            exact: exact.part(row * groups, groups),
                            scaled: scaled.part(row * groups, groups),
                            exact_halves: exact_halves.part(row * half_groups, half_groups),
                            scaled_halves: scaled_halves.part(row * half_groups, half_groups),
                        }
                    };
                    dispatch(level, kernel);
                }
            });
        }
        let sums = [
            Sums {
                exact: exact_halves,
                scaled: scaled_halves,
            },
            Sums { exact, scaled },
        ];
        Ok(Self {
            inputs,
            rows,
            high,
            low,
            scales,
            sums,
        })
    }
}

/// Codes, groups and half groups of a row.
fn row_lens(inputs: usize, halves: bool) -> [usize; 3] {
    let groups = inputs / X_GROUP;
    [inputs, groups, if halves { 2 * groups } else { 0 }]
}

/// Counts what [`Activations::quantize`] takes with room for `rows` rows.
pub(crate) fn quantize_scratch(rows: usize, inputs: usize, halves: bool, arena: &mut DryArena) -> Option<()> {
    let [codes, groups, half_groups] = row_lens(inputs, halves);
    for _ in 0..2 {
        arena.alloc::<i8>(rows.checked_mul(codes)?)?;
    }
    for _ in 0..3 {
        arena.alloc::<f32>(rows.checked_mul(groups)?)?;
    }
    for _ in 0..2 {
        arena.alloc::<f32>(rows.checked_mul(half_groups)?)?;
    }
    Some(())
}

struct QuantizeRow<'a> {
    x: &'a [f32],
    high: &'a mut [i8],
    low: &'a mut [i8],
    scales: &'a mut [f32],
    exact: &'a mut [i32],
    scaled: &'a mut [f32],
    exact_halves: &'a mut [i32],
    scaled_halves: &'a mut [f32],
}

impl Kernel for QuantizeRow<'_> {
    type Out = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let planes = self
            .high
            .chunks_exact_mut(X_GROUP)
            .zip(self.low.chunks_exact_mut(X_GROUP));
        for (group, (x, (high, low))) in self.x.chunks_exact(X_GROUP).zip(planes).enumerate() {
            let mut halves = [0i32; 2];
            // SAFETY: the features are there, and all three chunks are two vectors long.
            let scale = unsafe {
                let x = [S::load(x.as_ptr()), S::load(x.as_ptr().add(LANES))];
                let abs = |x| S::max(x, S::sub(S::splat(0.0), x));
                let largest = S::largest(S::max(abs(x[0]), abs(x[1])));
                let inverse = S::splat(if largest > 0.0 {
                    LARGEST_CODE / largest
                } else {
                    0.0
                });
                for half in 0..2 {
                    let code = S::round(S::mul(x[half], inverse));
                    let upper = S::round(S::mul(code, S::splat(1.0 / 128.0)));
                    S::store_i8(high.as_mut_ptr().add(half * LANES), upper);
                    S::store_i8(
                        low.as_mut_ptr().add(half * LANES),
                        S::fma(upper, S::splat(-128.0), code),
                    );
                    halves[half] = S::sum(code) as i32;
                }
                // Maxima and integers lose NaN and infinity; the scale carries them on.
                let poison = S::sum(S::mul(S::add(x[0], x[1]), S::splat(0.0)));
                largest / LARGEST_CODE + poison
            };
            let sum = halves[0] + halves[1];
            self.scales[group] = scale;
            self.exact[group] = sum;
            self.scaled[group] = scale * sum as f32;
            if !self.exact_halves.is_empty() {
                for half in 0..2 {
                    self.exact_halves[2 * group + half] = halves[half];
                    self.scaled_halves[2 * group + half] = scale * halves[half] as f32;
                }
            }
        }
    }
}
