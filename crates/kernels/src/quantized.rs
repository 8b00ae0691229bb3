//! Products with quantised weights.
//!
//! Every block format of ggml is `w = scale × code + min` over groups of 16 or 32 inputs, with small unsigned codes. Packing
//! keeps the codes (4 bits stay 4 bits) and scales but interleaves sixteen outputs, four inputs to a 32-bit lane, so that one
//! `vpdpbusd` multiplies sixteen outputs by four inputs. With an input group `x = d × q`, an output is
//! `Σ_groups (scale·d) Σ code·q + (min·d) Σ q`: the integer sums are exact and the float sums run over the groups in order,
//! so the result does not depend on the instruction set or on the rows multiplied together. Of a k-quant's scale only the
//! integer of each group is part of the integer sums; the float, which a block shares, multiplies the block's float sum.
//!
//! Inputs get 15 bits, for few rows in two 8-bit planes `q = 128 × high + low`, for many in words of 16 bits. The 8 bits that
//! are usual (llama.cpp's Q8) move logits by a percent, enough to answer another text where two tokens nearly tie; with 15
//! the weights' own rounding is all that is left of it. The price is a second multiplication per loaded weight, and small
//! batches wait for the weights anyway.

mod many;

use plimsoll_device::{Budget, Slab};

use crate::dtype::{Matrix, WeightError};
use crate::format::{Codes, FORMATS, Format, Spec, packed};
use crate::pack;
use crate::panel::{PANEL, Target};
use crate::quantize::{Activations, CodeLayout, X_GROUP};
use crate::simd::{Kernel, Level, Simd, dispatch};

use many::Many;

/// How far ahead weights are asked for, in bytes.
const PREFETCH: usize = 2048;

/// A packed matrix: `[panels][blocks]`, each block the header and its groups.
pub(crate) struct Quantized {
    format: Format,
    blocks: usize,
    data: Slab,
}

impl Quantized {
    pub(crate) fn new(matrix: &Matrix<'_>, budget: &Budget) -> Result<Self, WeightError> {
        let unsupported = || WeightError::UnsupportedDtype(format!("{:?}", matrix.dtype()));
        let format = Format::of(matrix.dtype()).ok_or_else(unsupported)?;
        let spec = format.spec();
        let blocks = matrix.cols() / spec.block();
        let data = packed(matrix, budget, |row, lane, packed| {
            pack::pack_row(matrix.dtype(), &spec, row, lane, packed)
        })?;
        Ok(Self { format, blocks, data })
    }

    pub(crate) fn format(&self) -> Format {
        self.format
    }

    pub(crate) fn bytes(&self) -> usize {
        self.data.bytes()
    }

    /// Row `row`, dequantised.
    pub(crate) fn row(&self, row: usize, out: &mut [f32]) {
        let spec = self.format.spec();
        let panel_bytes = self.blocks * spec.block_bytes();
        let panel = &self.data.as_slice::<u8>()[row / PANEL * panel_bytes..][..panel_bytes];
        pack::unpack_row(&spec, panel, row % PANEL, out);
    }

    /// Writes the outputs of `panels` for all rows of `x`.
    pub(crate) fn multiply(
        &self,
        level: Level,
        x: &Activations<'_>,
        panels: std::ops::Range<usize>,
        target: &Target<'_>,
    ) {
        assert_eq!(x.inputs, self.blocks * self.format.spec().block());
        let panel_bytes = self.blocks * self.format.spec().block_bytes();
        macro_rules! formats {
            ($($format:ident)*) => {
                match self.format {
                    $(Format::$format => {
                        let panels = Panels::<{ Format::$format as usize }> {
                            weights: self.data.as_slice(),
                            panel_bytes,
                            x,
                            panels,
                            target,
                        };
                        match x.layout {
                            CodeLayout::Planes => dispatch(level, Few(panels)),
                            CodeLayout::Words => dispatch(level, Many(panels)),
                        }
                    })*
                }
            };
        }
        formats!(Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2K Q3K Q4K Q5K Q6K Q8K);
    }
}

/// Some panels times all rows.
struct Panels<'a, const FORMAT: usize> {
    /// Of all panels.
    weights: &'a [u8],
    panel_bytes: usize,
    x: &'a Activations<'a>,
    panels: std::ops::Range<usize>,
    target: &'a Target<'a>,
}

impl<'a, const FORMAT: usize> Panels<'a, FORMAT> {
    const SPEC: Spec = FORMATS[FORMAT].spec();

    fn weights(&self, panel: usize) -> &'a [u8] {
        &self.weights[panel * self.panel_bytes..][..self.panel_bytes]
    }
}

/// For few rows, whose codes are in planes: weights are unpacked for every tile of rows.
struct Few<'a, const FORMAT: usize>(Panels<'a, FORMAT>);

impl<const FORMAT: usize> Kernel for Few<'_, FORMAT> {
    type Out = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let rows = self.0.x.rows;
        for panel in self.0.panels.clone() {
            let mut row = 0;
            // SAFETY: the features are there; each tile's rows exist and are of one tile of the input.
            unsafe {
                while row + 4 <= rows {
                    self.tile::<S, 4>(panel, row);
                    row += 4;
                }
                match rows - row {
                    3 => self.tile::<S, 3>(panel, row),
                    2 => self.tile::<S, 2>(panel, row),
                    1 => self.tile::<S, 1>(panel, row),
                    _ => {}
                }
            }
        }
    }
}

impl<const FORMAT: usize> Few<'_, FORMAT> {
    /// # Safety
    /// The CPU has the features of `S`; `first + M` rows exist and are of one tile of the input.
    #[inline(always)]
    unsafe fn tile<S: Simd, const M: usize>(&self, panel: usize, first: usize) {
        let spec = const { Panels::<FORMAT>::SPEC };
        let Panels { x, target, .. } = self.0;
        let weights = self.0.weights(panel);
        let blocks = weights.len() / spec.block_bytes();
        let per_step = spec.groups_per_step();
        let sums = &x.sums[spec.group / 32];
        let tile = x.tile(first);
        // SAFETY: the caller's promise; `weights` is whole blocks, and `x` has the inputs of as many for each row.
        unsafe {
            let mut x_codes = x.codes.as_ptr().add(tile.first * 2 * X_GROUP);
            let mut at = tile.first;
            let mut acc = [S::splat(0.0); M];
            let mut w = weights.as_ptr();
            for _ in 0..blocks {
                let header = w;
                w = w.add(spec.header_bytes());
                let (mut scaled, mut minima) = ([S::splat(0.0); M], [S::splat(0.0); M]);
                for _ in 0..spec.steps() {
                    let step = w;
                    let mut dots = [S::splat_i(0); M];
                    for g in 0..per_step {
                        let mut start = [S::splat_i(0); M];
                        if !spec.min && (S::DOT_IS_BIASED || spec.codes != Codes::I8) {
                            for r in 0..M {
                                let sum = *sums.exact.as_ptr().add((at + r) * per_step + g);
                                start[r] = S::splat_i(-spec.offset * sum);
                            }
                        }
                        // Few rows wait for memory: the hardware prefetcher alone reaches two thirds of its bandwidth.
                        for line in (0..spec.group_bytes()).step_by(64) {
                            S::prefetch(w.wrapping_add(PREFETCH + line));
                        }
                        let codes = w.add(spec.group_header_bytes());
                        let group = dot_group::<S, M>(&spec, codes, x_codes.add(g * spec.group), start);
                        if spec.is_super() {
                            let scale = S::load_i8_i(w.cast());
                            for r in 0..M {
                                dots[r] = S::add_i(dots[r], S::mul_i(group[r], scale));
                            }
                        } else {
                            dots = group;
                        }
                        if spec.is_super() && spec.min {
                            let min = S::load_i8(w.add(PANEL).cast());
                            for r in 0..M {
                                let sum = *sums.scaled.as_ptr().add((at + r) * per_step + g);
                                minima[r] = S::fma(min, S::splat(sum), minima[r]);
                            }
                        }
                        w = w.add(spec.group_bytes());
                    }
                    for r in 0..M {
                        let x_scale = S::splat(*x.scales.as_ptr().add(at + r));
                        let dot = S::to_f32(dots[r]);
                        if spec.is_super() {
                            scaled[r] = S::fma(dot, x_scale, scaled[r]);
                        } else {
                            let scale = S::load_f16(step.cast());
                            acc[r] = S::fma(dot, S::mul(scale, x_scale), acc[r]);
                            if spec.min {
                                let min = S::load_f16(step.add(2 * PANEL).cast());
                                let sum = *sums.scaled.as_ptr().add(at + r);
                                acc[r] = S::fma(min, S::splat(sum), acc[r]);
                            }
                        }
                    }
                    x_codes = x_codes.add(tile.stride * 2 * X_GROUP);
                    at += tile.stride;
                }
                if spec.is_super() {
                    for r in 0..M {
                        acc[r] = S::fma(scaled[r], S::load(header.cast()), acc[r]);
                        if spec.min {
                            let min = S::load(header.add(4 * PANEL).cast());
                            acc[r] = S::fma(minima[r], min, acc[r]);
                        }
                    }
                }
            }
            for r in 0..M {
                target.store::<S>(first + r, panel, acc[r]);
            }
        }
    }
}

/// `start + Σ code × (128 × high + low)` over one group, for `M` rows. `x` is the group's `high` of the first; 32 bytes
/// behind each `high` is its `low`, and 64 behind it the next row.
///
/// # Safety
/// The CPU has the features of `S`; `codes` and each row hold a group.
#[inline(always)]
unsafe fn dot_group<S: Simd, const M: usize>(
    spec: &Spec,
    codes: *const u8,
    x: *const i8,
    start: [S::I; M],
) -> [S::I; M] {
    let mut lows = start;
    // SAFETY: the caller's promise.
    unsafe {
        let mut highs = [S::splat_i(0); M];
        for hex in 0..spec.group / 16 {
            let w = sixteen::<S>(spec.codes, codes.add(spec.code_bytes(16 * hex)));
            for (i, w) in w.into_iter().enumerate() {
                for r in 0..M {
                    let high = x.add(r * 2 * X_GROUP + 16 * hex + 4 * i);
                    let four = |plane: *const i8| plane.cast::<i32>().read_unaligned();
                    let (high, low) = (four(high), four(high.add(X_GROUP)));
                    if spec.codes == Codes::I8 {
                        highs[r] = S::dot4_biased(highs[r], w, high);
                        lows[r] = S::dot4_biased(lows[r], w, low);
                    } else {
                        highs[r] = S::dot4(highs[r], w, high);
                        lows[r] = S::dot4(lows[r], w, low);
                    }
                }
            }
        }
        for r in 0..M {
            lows[r] = S::add_i(lows[r], S::times_128(highs[r]));
        }
    }
    lows
}

/// The codes of sixteen inputs, four inputs to a vector.
///
/// # Safety
/// The CPU has the features of `S`; `packed` holds as many codes of sixteen outputs.
#[inline(always)]
unsafe fn sixteen<S: Simd>(codes: Codes, packed: *const u8) -> [S::I; 4] {
    // SAFETY: the caller's promise.
    unsafe {
        let (a, b) = (S::load_bytes(packed), S::load_bytes(packed.add(64)));
        match codes {
            Codes::U4 => [
                S::low_nibbles(a),
                S::high_nibbles(a),
                S::low_nibbles(b),
                S::high_nibbles(b),
            ],
            Codes::U6 => {
                let upper = S::load_bytes(packed.add(128));
                [
                    S::or(S::low_nibbles(a), S::bit_pair_to_4::<0>(upper)),
                    S::or(S::high_nibbles(a), S::bit_pair_to_4::<1>(upper)),
                    S::or(S::low_nibbles(b), S::bit_pair_to_4::<2>(upper)),
                    S::or(S::high_nibbles(b), S::bit_pair_to_4::<3>(upper)),
                ]
            }
            Codes::I8 => [
                a,
                b,
                S::load_bytes(packed.add(128)),
                S::load_bytes(packed.add(192)),
            ],
        }
    }
}
