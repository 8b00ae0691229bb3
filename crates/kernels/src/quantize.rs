//! Inputs of a quantised layer, rounded to 15 bits.

use std::ops::Range;

use plimsoll_core::Oom;
use plimsoll_device::{DryArena, Frame};

use crate::parallel::{Disjoint, run_ranges};
use crate::simd::{Kernel, LANES, Level, Simd, dispatch};

/// Inputs that share one scale of the quantised activations.
pub(crate) const X_GROUP: usize = 32;

/// Least inputs of a task: fewer are not worth a second thread.
const GRAIN: usize = 4096;

/// The largest code of a group: 127 in the high plane, 0 in the low one.
const LARGEST_CODE: f32 = 127.0 * 128.0;

/// Rows that are stored together: their first groups, then their second ones, and so on.
pub(crate) const TILE: usize = 8;

/// From how many rows on codes are words: fewer do not pay for weights unpacked to as many bits.
const MANY: usize = 48;

/// How the 64 bytes of the codes of a group lie, for few rows or for many.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CodeLayout {
    /// 32 bytes of `high` in -127..=127, then 32 of `low` in -64..=64: the code is `128 × high + low`.
    Planes,
    /// 32 `i16`, each four in the order 0, 2, 1, 3.
    Words,
}

/// Rows quantised to 15 bits, `x = scale × code` per [`X_GROUP`] inputs. Everything lies by groups: the first group of each
/// of [`TILE`] rows, their second, and so on, then those of the next rows; see [`Activations::tile`].
pub(crate) struct Activations<'a> {
    pub(crate) inputs: usize,
    pub(crate) rows: usize,
    pub(crate) layout: CodeLayout,
    /// 64 bytes of each group.
    pub(crate) codes: &'a [i8],
    /// One of each group.
    pub(crate) scales: &'a [f32],
    /// Sums of the codes, per group of 32 and, where a format needs them, of 16 inputs (those of a group together).
    pub(crate) sums: [Sums<'a>; 2],
}

/// Where the groups of neighbouring rows lie: group `g` of the `i`th row is at `first + g × stride + i`.
#[derive(Clone, Copy)]
pub(crate) struct Tile {
    pub(crate) first: usize,
    pub(crate) stride: usize,
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
        let layout = if rows < MANY {
            CodeLayout::Planes
        } else {
            CodeLayout::Words
        };
        let codes: &'a mut [i8] = &mut frame.alloc(room * codes)?[..rows * codes];
        let scales: &'a mut [f32] = &mut frame.alloc(room * groups)?[..rows * groups];
        let exact: &'a mut [i32] = &mut frame.alloc(room * groups)?[..rows * groups];
        let scaled: &'a mut [f32] = &mut frame.alloc(room * groups)?[..rows * groups];
        let exact_halves: &'a mut [i32] = &mut frame.alloc(room * half_groups)?[..rows * half_groups];
        let scaled_halves: &'a mut [f32] = &mut frame.alloc(room * half_groups)?[..rows * half_groups];
        {
            let (codes, scales) = (Disjoint::new(codes), Disjoint::new(scales));
            let (exact, scaled) = (Disjoint::new(exact), Disjoint::new(scaled));
            let (exact_halves, scaled_halves) = (Disjoint::new(exact_halves), Disjoint::new(scaled_halves));
            // Group by group, so that a tile's codes are written in sequence: row by row, each store would miss the cache.
            let grain = (GRAIN / (TILE.min(rows).max(1) * X_GROUP)).max(1);
            run_ranges(rows.div_ceil(TILE) * groups, grain, &|groups| {
                let kernel = QuantizeGroups {
                    x,
                    inputs,
                    groups,
                    layout,
                    halves,
                    codes: &codes,
                    scales: &scales,
                    exact: &exact,
                    scaled: &scaled,
                    exact_halves: &exact_halves,
                    scaled_halves: &scaled_halves,
                };
                dispatch(level, kernel);
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
            layout,
            codes,
            scales,
            sums,
        })
    }

    /// Where the groups of `row` and of those behind it up to a multiple of [`TILE`] lie.
    pub(crate) fn tile(&self, row: usize) -> Tile {
        tile(self.rows, self.inputs / X_GROUP, row)
    }
}

fn tile(rows: usize, groups: usize, row: usize) -> Tile {
    let start = row / TILE * TILE;
    Tile {
        first: start * groups + row % TILE,
        stride: TILE.min(rows - start),
    }
}

/// Bytes of codes, groups and half groups of a row.
fn row_lens(inputs: usize, halves: bool) -> [usize; 3] {
    let groups = inputs / X_GROUP;
    [2 * inputs, groups, if halves { 2 * groups } else { 0 }]
}

/// Counts what [`Activations::quantize`] takes with room for `rows` rows.
pub(crate) fn quantize_scratch(rows: usize, inputs: usize, halves: bool, arena: &mut DryArena) -> Option<()> {
    let [codes, groups, half_groups] = row_lens(inputs, halves);
    arena.alloc::<i8>(rows.checked_mul(codes)?)?;
    for _ in 0..3 {
        arena.alloc::<f32>(rows.checked_mul(groups)?)?;
    }
    for _ in 0..2 {
        arena.alloc::<f32>(rows.checked_mul(half_groups)?)?;
    }
    Some(())
}

/// A range of pairs of a tile and a group, tile by tile; each pair is that group of all rows of the tile.
struct QuantizeGroups<'a> {
    /// `[rows, inputs]`.
    x: &'a [f32],
    inputs: usize,
    groups: Range<usize>,
    layout: CodeLayout,
    halves: bool,
    codes: &'a Disjoint<'a, i8>,
    scales: &'a Disjoint<'a, f32>,
    exact: &'a Disjoint<'a, i32>,
    scaled: &'a Disjoint<'a, f32>,
    exact_halves: &'a Disjoint<'a, i32>,
    scaled_halves: &'a Disjoint<'a, f32>,
}

impl Kernel for QuantizeGroups<'_> {
    type Out = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let (rows, of_row) = (self.x.len() / self.inputs, self.inputs / X_GROUP);
        for index in self.groups.clone() {
            let (first_row, group) = (index / of_row * TILE, index % of_row);
            let tile = tile(rows, of_row, first_row);
            for row in 0..tile.stride {
                let x = &self.x[(first_row + row) * self.inputs + group * X_GROUP..][..X_GROUP];
                // SAFETY: the features are there, and no other task has this group.
                unsafe { self.quantize::<S>(x, tile.first + group * tile.stride + row) };
            }
        }
    }
}

impl QuantizeGroups<'_> {
    /// # Safety
    /// The CPU has the features of `S`, and no other task writes group `at`.
    #[inline(always)]
    unsafe fn quantize<S: Simd>(&self, x: &[f32], at: usize) {
        let mut halves = [0i32; 2];
        // SAFETY: the caller's promise, and `x` is two vectors long.
        unsafe {
            let codes = self.codes.part(at * 2 * X_GROUP, 2 * X_GROUP).as_mut_ptr();
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
                match self.layout {
                    CodeLayout::Planes => {
                        let upper = S::round(S::mul(code, S::splat(1.0 / 128.0)));
                        S::store_i8(codes.add(half * LANES), upper);
                        let low = S::fma(upper, S::splat(-128.0), code);
                        S::store_i8(codes.add(X_GROUP + half * LANES), low);
                    }
                    CodeLayout::Words => S::store_i16(codes.cast::<i16>().add(half * LANES), code),
                }
                halves[half] = S::sum(code) as i32;
            }
            // Maxima and integers lose NaN and infinity; the scale carries them on.
            let poison = S::sum(S::mul(S::add(x[0], x[1]), S::splat(0.0)));
            let scale = largest / LARGEST_CODE + poison;
            let sum = halves[0] + halves[1];
            self.scales.part(at, 1)[0] = scale;
            self.exact.part(at, 1)[0] = sum;
            self.scaled.part(at, 1)[0] = scale * sum as f32;
            if self.halves {
                let exact = self.exact_halves.part(2 * at, 2);
                let scaled = self.scaled_halves.part(2 * at, 2);
                for half in 0..2 {
                    exact[half] = halves[half];
                    scaled[half] = scale * halves[half] as f32;
                }
            }
        }
    }
}
