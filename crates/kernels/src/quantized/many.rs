//! Products for many rows: weights become 16-bit words once and are multiplied with all rows' codes, themselves words.
//!
//! `vpdpwssd` multiplies half as many pairs as `vpdpbusd`, but of whole codes rather than of one of two planes: as fast,
//! with one sum instead of two. A k-quant's integer scale is part of the word (at most 13 bits), so that nothing but
//! the input's scale is left to multiply per step: the largest sum of one, `32 × 128 × 32 × 16256`, just fits 31 bits.

use std::ops::Range;

use super::{Panels, sixteen};
use crate::panel::PANEL;
use crate::quantize::{TILE, X_GROUP};
use crate::simd::{Kernel, Simd};

/// Panels unpacked at a time: with the inputs of a tile of rows they fit the nearest cache.
const PANELS: usize = 2;

/// Rows that are multiplied before the next panels: their inputs stay in a near cache unless they are wide.
const ROWS: usize = 128;

/// Steps of [`X_GROUP`] inputs unpacked at a time: a block of the k-quants.
const STEPS: usize = 8;

/// The weights of one step.
#[repr(C, align(64))]
#[derive(Clone, Copy)]
struct Step {
    /// For each four inputs: of all sixteen outputs the words of inputs 0 and 2, then of inputs 1 and 3.
    words: [[i16; 2 * PANEL]; X_GROUP / 2],
    /// If each group has its own float scale.
    scale: [f32; PANEL],
    /// Of each group.
    minima: [[f32; PANEL]; 2],
}

/// Some steps of one panel.
#[derive(Clone, Copy)]
struct Unpacked {
    steps: [Step; STEPS],
    /// Of a block of the k-quants.
    scale: [f32; PANEL],
    min: [f32; PANEL],
}

impl Unpacked {
    const ZERO: Self = Self {
        steps: [Step {
            words: [[0; 2 * PANEL]; X_GROUP / 2],
            scale: [0.0; PANEL],
            minima: [[0.0; PANEL]; 2],
        }; STEPS],
        scale: [0.0; PANEL],
        min: [0.0; PANEL],
    };
}

/// For many rows, whose codes are words.
pub(super) struct Many<'a, const FORMAT: usize>(pub(super) Panels<'a, FORMAT>);

impl<const FORMAT: usize> Kernel for Many<'_, FORMAT> {
    type Out = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let mut unpacked = [Unpacked::ZERO; PANELS];
        let mut sums = [[[0.0; PANEL]; ROWS]; PANELS];
        let steps = self.0.x.inputs / X_GROUP;
        let all = self.0.x.rows;
        for chunk in (0..all).step_by(ROWS) {
            let rows = chunk..all.min(chunk + ROWS);
            for first in self.0.panels.clone().step_by(PANELS) {
                let panels = first..self.0.panels.end.min(first + PANELS);
                for start in (0..steps).step_by(STEPS) {
                    let steps = start..steps.min(start + STEPS);
                    // SAFETY: the features are there; panels, steps and each tile's rows exist.
                    unsafe {
                        for (panel, to) in panels.clone().zip(&mut unpacked) {
                            self.unpack::<S>(panel, steps.clone(), to);
                        }
                        for row in rows.clone().step_by(TILE) {
                            let tile = row..rows.end.min(row + TILE);
                            let here = panels.clone().zip(&unpacked).zip(&mut sums);
                            for ((panel, weights), sums) in here {
                                let sums = &mut sums[row - chunk..][..tile.len()];
                                self.rows::<S>(panel, tile.clone(), steps.clone(), weights, sums);
                            }
                        }
                    }
                }
            }
        }
    }
}

impl<const FORMAT: usize> Many<'_, FORMAT> {
    /// # Safety
    /// The CPU has the features of `S`; `panel` has these steps, of which the first starts a block.
    #[inline(always)]
    unsafe fn unpack<S: Simd>(&self, panel: usize, steps: Range<usize>, to: &mut Unpacked) {
        let spec = const { Panels::<FORMAT>::SPEC };
        let weights = self.0.weights(panel);
        // SAFETY: the caller's promise; `to` has as many steps, groups and outputs.
        unsafe {
            let mut w = weights
                .as_ptr()
                .add(steps.start / spec.steps() * spec.block_bytes());
            if spec.is_super() {
                S::store(to.scale.as_mut_ptr(), S::load(w.cast()));
                if spec.min {
                    S::store(to.min.as_mut_ptr(), S::load(w.add(4 * PANEL).cast()));
                }
                w = w.add(spec.header_bytes());
            }
            for step in &mut to.steps[..steps.len()] {
                // Prefetches the weights of the next `STEPS` steps: they arrive while all rows are multiplied by these.
                let bytes = spec.groups_per_step() * spec.group_bytes();
                for line in (0..bytes).step_by(64) {
                    S::prefetch(w.wrapping_add(STEPS * bytes + line));
                }
                let mut words = step.words.as_mut_ptr().cast::<u8>();
                for g in 0..spec.groups_per_step() {
                    let mut scale = S::splat_i(1);
                    if spec.is_super() {
                        scale = S::load_i8_i(w.cast());
                        if spec.min {
                            S::store(step.minima[g].as_mut_ptr(), S::load_i8(w.add(PANEL).cast()));
                        }
                    } else {
                        S::store(step.scale.as_mut_ptr(), S::load_f16(w.cast()));
                        if spec.min {
                            let min = S::load_f16(w.add(2 * PANEL).cast());
                            S::store(step.minima[g].as_mut_ptr(), min);
                        }
                    }
                    let codes = w.add(spec.group_header_bytes());
                    for hex in 0..spec.group / 16 {
                        for bytes in sixteen::<S>(spec.codes, codes.add(spec.code_bytes(16 * hex))) {
                            for pair in S::scaled_words(bytes, spec.offset as i16, scale) {
                                S::store_bytes(words, pair);
                                words = words.add(64);
                            }
                        }
                    }
                    w = w.add(spec.group_bytes());
                }
            }
        }
    }

    /// Adds these steps of rows of one tile of the input to `sums`, which become outputs of `panel` with the last step.
    ///
    /// # Safety
    /// The CPU has the features of `S`; the rows have these steps, which `weights` holds.
    #[inline(always)]
    unsafe fn rows<S: Simd>(
        &self,
        panel: usize,
        rows: Range<usize>,
        steps: Range<usize>,
        weights: &Unpacked,
        sums: &mut [[f32; PANEL]],
    ) {
        let mut row = rows.start;
        // SAFETY: the caller's promise.
        unsafe {
            if S::ACCUMULATORS >= 8 && rows.len() == 8 {
                return self.tile::<S, 8>(panel, row, steps, weights, sums);
            }
            let mut left = sums;
            while row + 4 <= rows.end {
                let (sums, rest) = left.split_at_mut(4);
                self.tile::<S, 4>(panel, row, steps.clone(), weights, sums);
                (row, left) = (row + 4, rest);
            }
            match rows.end - row {
                3 => self.tile::<S, 3>(panel, row, steps, weights, left),
                2 => self.tile::<S, 2>(panel, row, steps, weights, left),
                1 => self.tile::<S, 1>(panel, row, steps, weights, left),
                _ => {}
            }
        }
    }

    /// # Safety
    /// As for [`Self::rows`], for `M` rows from `first` on.
    #[inline(always)]
    unsafe fn tile<S: Simd, const M: usize>(
        &self,
        panel: usize,
        first: usize,
        steps: Range<usize>,
        weights: &Unpacked,
        sums: &mut [[f32; PANEL]],
    ) {
        let spec = const { Panels::<FORMAT>::SPEC };
        let Panels { x, target, .. } = self.0;
        let per_step = spec.groups_per_step();
        let x_sums = &x.sums[spec.group / 32];
        let tile = x.tile(first);
        let sums: &mut [[f32; PANEL]; M] = sums.try_into().expect("a sum of each row");
        // SAFETY: the caller's promise; `x` has 64 bytes of codes, a scale and the sums of each row's group.
        unsafe {
            let mut acc = [S::splat(0.0); M];
            if steps.start > 0 {
                for r in 0..M {
                    acc[r] = S::load(sums[r].as_ptr());
                }
            }
            // Of the k-quants: these steps alone, without the scales of their block.
            let (mut scaled, mut minima) = ([S::splat(0.0); M], [S::splat(0.0); M]);
            let mut at = tile.first + steps.start * tile.stride;
            for step in &weights.steps[..steps.len()] {
                let codes = x.codes.as_ptr().add(at * 2 * X_GROUP).cast::<i32>();
                let mut dots = [S::splat_i(0); M];
                for (pair, w) in step.words.iter().enumerate() {
                    let w = S::load_bytes(w.as_ptr().cast());
                    for r in 0..M {
                        let x = codes.add(r * X_GROUP / 2 + pair).read_unaligned();
                        dots[r] = S::dot2(dots[r], w, x);
                    }
                }
                for r in 0..M {
                    let x_scale = S::splat(*x.scales.as_ptr().add(at + r));
                    let dot = S::to_f32(dots[r]);
                    let sum = |g: usize| S::splat(*x_sums.scaled.as_ptr().add((at + r) * per_step + g));
                    if spec.is_super() {
                        scaled[r] = S::fma(dot, x_scale, scaled[r]);
                        if spec.min {
                            for g in 0..per_step {
                                minima[r] = S::fma(S::load(step.minima[g].as_ptr()), sum(g), minima[r]);
                            }
                        }
                    } else {
                        let scale = S::load(step.scale.as_ptr());
                        acc[r] = S::fma(dot, S::mul(scale, x_scale), acc[r]);
                        if spec.min {
                            acc[r] = S::fma(S::load(step.minima[0].as_ptr()), sum(0), acc[r]);
                        }
                    }
                }
                at += tile.stride;
            }
            let last = steps.end * X_GROUP == x.inputs;
            for r in 0..M {
                if spec.is_super() {
                    acc[r] = S::fma(scaled[r], S::load(weights.scale.as_ptr()), acc[r]);
                    if spec.min {
                        acc[r] = S::fma(minima[r], S::load(weights.min.as_ptr()), acc[r]);
                    }
                }
            }
            if last {
                for r in 0..M {
                    target.store::<S>(first + r, panel, acc[r]);
                }
            } else {
                for r in 0..M {
                    S::store(sums[r].as_mut_ptr(), acc[r]);
                }
            }
        }
    }
}
