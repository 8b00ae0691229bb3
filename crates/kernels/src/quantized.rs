//! Products with quantised weights.
//!
//! Every block format of ggml is `w = scale × code + min` over groups of 16 or 32 inputs, with small unsigned codes. Packing
//! keeps the codes (4 bits stay 4 bits) and scales but interleaves sixteen outputs, four inputs to a 32-bit lane, so that one
//! `vpdpbusd` multiplies sixteen outputs by four inputs. With an input group `x = d × q`, an output is
//! `Σ_groups (scale·d) Σ code·q + (min·d) Σ q`: the integer sums are exact and the float sums run over the groups in order,
//! so the result does not depend on the instruction set or on the rows multiplied together.
//!
//! Inputs get 15 bits, in two 8-bit planes `q = 128 × high + low`. The 8 bits that are usual (llama.cpp's Q8) move logits
//! by a percent, enough to answer another text where two tokens nearly tie; with 15 the weights' own rounding is all that is
//! left of it. The price is a second multiplication per loaded weight, and small batches wait for the weights anyway.

use plimsoll_core::Component;
use plimsoll_device::{Budget, Slab};

use crate::dtype::{Matrix, WeightError};
use crate::format::{Codes, FORMATS, Format, Spec, panel_bytes};
use crate::pack;
use crate::panel::{PANEL, Target};
use crate::parallel::{Disjoint, run};
use crate::quantize::{Activations, X_GROUP};
use crate::simd::{Kernel, Level, Simd, dispatch};

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
        let panels = matrix.rows().div_ceil(PANEL);
        let panel_bytes = panel_bytes(matrix.dtype(), matrix.cols()).expect("the matrix is in memory");
        let mut data = Slab::new(budget, Component::Weights, panels * panel_bytes)?;
        let packed = Disjoint::new(data.as_mut_slice::<u8>());
        run(panels, &|_, panel| {
            // SAFETY: panels are disjoint.
            let packed = unsafe { packed.part(panel * panel_bytes, panel_bytes) };
            for lane in 0..PANEL.min(matrix.rows() - panel * PANEL) {
                pack::pack_row(
                    matrix.dtype(),
                    &spec,
                    matrix.row(panel * PANEL + lane),
                    lane,
                    packed,
                );
            }
        });
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
        for panel in panels {
            let weights = &self.data.as_slice::<u8>()[panel * panel_bytes..][..panel_bytes];
            macro_rules! formats {
                ($($format:ident)*) => {
                    match self.format {
                        $(Format::$format => dispatch(
                            level,
                            Panel::<{ Format::$format as usize }> { weights, x, panel, target },
                        ),)*
                    }
                };
            }
            formats!(Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2K Q3K Q4K Q5K Q6K Q8K);
        }
    }
}

/// One panel times all rows.
struct Panel<'a, const FORMAT: usize> {
    weights: &'a [u8],
    x: &'a Activations<'a>,
    panel: usize,
    target: &'a Target<'a>,
}

impl<const FORMAT: usize> Kernel for Panel<'_, FORMAT> {
    type Out = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let rows = self.x.rows;
        let mut row = 0;
        // SAFETY: the features are there; each tile's rows exist.
        unsafe {
            if S::ACCUMULATORS >= 8 {
                while row + 8 <= rows {
                    self.tile::<S, 8>(row);
                    row += 8;
                }
            }
            while row + 4 <= rows {
                self.tile::<S, 4>(row);
                row += 4;
            }
            match rows - row {
                3 => self.tile::<S, 3>(row),
                2 => self.tile::<S, 2>(row),
                1 => self.tile::<S, 1>(row),
                _ => {}
            }
        }
    }
}

impl<const FORMAT: usize> Panel<'_, FORMAT> {
    const SPEC: Spec = FORMATS[FORMAT].spec();

    /// # Safety
    /// The CPU has the features of `S`; `first + M` rows exist.
    #[inline(always)]
    unsafe fn tile<S: Simd, const M: usize>(&self, first: usize) {
        let spec = const { Self::SPEC };
        let blocks = self.weights.len() / spec.block_bytes();
        let groups = blocks * spec.groups;
        let x_groups = self.x.inputs / X_GROUP;
        let sums = &self.x.sums[spec.group / 32];
        // SAFETY: the caller's promise; `weights` is whole blocks, and `x` has the inputs of as many for each row.
        unsafe {
            let high = self.x.high.as_ptr().add(first * self.x.inputs);
            let low = self.x.low.as_ptr().add(first * self.x.inputs);
            let scales = self.x.scales.as_ptr().add(first * x_groups);
            let exact = sums.exact.as_ptr().add(first * groups);
            let scaled = sums.scaled.as_ptr().add(first * groups);
            let mut acc = [S::splat(0.0); M];
            let mut w = self.weights.as_ptr();
            for block in 0..blocks {
                let (mut block_scale, mut block_min) = (S::splat(1.0), S::splat(1.0));
                if spec.is_super() {
                    block_scale = S::load(w.cast());
                    if spec.min {
                        block_min = S::load(w.add(4 * PANEL).cast());
                    }
                    w = w.add(spec.header_bytes());
                }
                for g in block * spec.groups..(block + 1) * spec.groups {
                    let (mut scale, mut min) = (block_scale, block_min);
                    if spec.is_super() {
                        scale = S::mul(scale, S::load_i8(w.cast()));
                        if spec.min {
                            min = S::mul(min, S::load_i8(w.add(PANEL).cast()));
                        }
                    } else {
                        scale = S::load_f16(w.cast());
                        if spec.min {
                            min = S::load_f16(w.add(2 * PANEL).cast());
                        }
                    }
                    let start = if spec.min {
                        [S::splat_i(0); M]
                    } else {
                        let mut start = [S::splat_i(0); M];
                        let unbias = if S::DOT_IS_BIASED || spec.codes != Codes::I8 {
                            spec.offset
                        } else {
                            0
                        };
                        for r in 0..M {
                            start[r] = S::splat_i(-unbias * *exact.add(r * groups + g));
                        }
                        start
                    };
                    if M <= 4 {
                        // Few rows wait for memory: the hardware prefetcher alone reaches two thirds of its bandwidth.
                        for line in (0..spec.group_bytes()).step_by(64) {
                            S::prefetch(w.wrapping_add(PREFETCH + line));
                        }
                    }
                    let codes = w.add(spec.group_header_bytes());
                    let x = [high.add(g * spec.group), low.add(g * spec.group)];
                    let dots = dot_group::<S, M>(&spec, codes, x, self.x.inputs, start);
                    for r in 0..M {
                        let x_scale = S::splat(*scales.add(r * x_groups + g * spec.group / X_GROUP));
                        acc[r] = S::fma(S::to_f32(dots[r]), S::mul(scale, x_scale), acc[r]);
                        if spec.min {
                            acc[r] = S::fma(min, S::splat(*scaled.add(r * groups + g)), acc[r]);
                        }
                    }
                    w = w.add(spec.group_bytes());
                }
            }
            for r in 0..M {
                self.target.store::<S>(first + r, self.panel, acc[r]);
            }
        }
    }
}

/// `start + Σ code × (128 × high + low)` over one group, for `M` rows of `[high, low]` that are `stride` apart.
///
/// # Safety
/// The CPU has the features of `S`, `codes` and each row of both planes hold a group.
#[inline(always)]
unsafe fn dot_group<S: Simd, const M: usize>(
    spec: &Spec,
    codes: *const u8,
    [high, low]: [*const i8; 2],
    stride: usize,
    start: [S::I; M],
) -> [S::I; M] {
    let mut lows = start;
    // SAFETY: the caller's promise.
    unsafe {
        let mut highs = [S::splat_i(0); M];
        let four =
            |plane: *const i8, r: usize, k: usize| plane.add(r * stride + k).cast::<i32>().read_unaligned();
        match spec.codes {
            Codes::U4 => {
                for oct in 0..spec.group / 8 {
                    let bytes = S::load_bytes(codes.add(oct * 64));
                    let (first, second) = (S::low_nibbles(bytes), S::high_nibbles(bytes));
                    for r in 0..M {
                        highs[r] = S::dot4(highs[r], first, four(high, r, 8 * oct));
                        lows[r] = S::dot4(lows[r], first, four(low, r, 8 * oct));
                    }
                    for r in 0..M {
                        highs[r] = S::dot4(highs[r], second, four(high, r, 8 * oct + 4));
                        lows[r] = S::dot4(lows[r], second, four(low, r, 8 * oct + 4));
                    }
                }
            }
            Codes::U6 => {
                for hex in 0..spec.group / 16 {
                    let codes = codes.add(hex * 192);
                    let (a, b) = (S::load_bytes(codes), S::load_bytes(codes.add(64)));
                    let upper = S::load_bytes(codes.add(128));
                    let w = [
                        S::or(S::low_nibbles(a), S::bit_pair_to_4::<0>(upper)),
                        S::or(S::high_nibbles(a), S::bit_pair_to_4::<1>(upper)),
                        S::or(S::low_nibbles(b), S::bit_pair_to_4::<2>(upper)),
                        S::or(S::high_nibbles(b), S::bit_pair_to_4::<3>(upper)),
                    ];
                    for r in 0..M {
                        for (i, &w) in w.iter().enumerate() {
                            highs[r] = S::dot4(highs[r], w, four(high, r, 16 * hex + 4 * i));
                            lows[r] = S::dot4(lows[r], w, four(low, r, 16 * hex + 4 * i));
                        }
                    }
                }
            }
            Codes::I8 => {
                for quad in 0..spec.group / 4 {
                    let w = S::load_bytes(codes.add(quad * 64));
                    for r in 0..M {
                        highs[r] = S::dot4_biased(highs[r], w, four(high, r, 4 * quad));
                        lows[r] = S::dot4_biased(lows[r], w, four(low, r, 4 * quad));
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
