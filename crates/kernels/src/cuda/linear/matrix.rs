//! What linear layers are made of, and the rows that they take.

use std::marker::PhantomData;
use std::mem::discriminant;
use std::ops::Range;
use std::sync::Arc;

use half::bf16;
use plimsoll_device::Pod;
use plimsoll_device::cuda::{GpuSlab, GpuSlice};
use serde::{Deserialize, Serialize};

use crate::GgufFormat;

/// Elements that share a factor under [`Fp8Scaling::Blocks`]: of a row of inputs, and both ways of weights.
pub const FP8_BLOCK: usize = 128;

/// Weights in a slab that is shared with others and lives as long as any of them.
#[derive(Clone, Debug)]
pub struct GpuWeight<T = bf16> {
    slab: Arc<GpuSlab>,
    elements: Range<usize>,
    element: PhantomData<T>,
}

impl<T: Pod> GpuWeight<T> {
    /// `elements` of a slab seen as `T`.
    ///
    /// # Panics
    /// If the slab has fewer.
    pub fn new(slab: &Arc<GpuSlab>, elements: Range<usize>) -> Self {
        let this = Self {
            slab: slab.clone(),
            elements,
            element: PhantomData,
        };
        this.slice();
        this
    }

    /// The elements.
    pub fn slice(&self) -> GpuSlice<'_, T> {
        self.slab.slice().range(self.elements.clone())
    }
}

/// Which e4m3 values share a factor. What a value stands for is itself times its factor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Fp8Scaling {
    /// Those of a row of inputs; those of a row of weights, which is an output channel.
    Rows,
    /// Each [`FP8_BLOCK`] of a row of inputs; blocks of as many by as many weights.
    Blocks,
}

impl Fp8Scaling {
    /// Factors of `m` rows of `k` inputs: `[m]`, or `[k / 128, stride]` with [`Self::input_stride`].
    pub fn input_scales(self, m: usize, k: usize) -> usize {
        match self {
            Self::Rows => m,
            Self::Blocks => k.div_ceil(FP8_BLOCK) * self.input_stride(m),
        }
    }

    /// Factors between those of a block of inputs of `m` rows and those of the next; as cuBLASLt wants it, a multiple of 4. 0 without
    /// blocks.
    pub fn input_stride(self, m: usize) -> usize {
        match self {
            Self::Rows => 0,
            Self::Blocks => m.next_multiple_of(4),
        }
    }

    /// Factors of `[n, k]` weights: `[n]`, or `[n / 128, stride]` with [`Self::stride`].
    pub fn weight_scales(self, n: usize, k: usize) -> usize {
        match self {
            Self::Rows => n,
            Self::Blocks => n.div_ceil(FP8_BLOCK) * self.stride(k),
        }
    }

    /// Factors between a row of blocks of weights and the next; as cuBLASLt wants it, a multiple of 4. 0 without blocks.
    pub fn stride(self, k: usize) -> usize {
        match self {
            Self::Rows => 0,
            Self::Blocks => k.div_ceil(FP8_BLOCK).next_multiple_of(4),
        }
    }
}

/// The matrix of a linear layer, `[n, k]`.
#[derive(Clone, Debug)]
pub enum GpuMatrix {
    /// As it is.
    Bf16(GpuWeight),
    /// e4m3 values.
    Fp8 {
        /// `[n, k]`.
        values: GpuWeight<u8>,
        /// As [`Fp8Scaling::weight_scales`] says.
        scales: GpuWeight<f32>,
        /// Which values share one of them.
        scaling: Fp8Scaling,
    },
    /// Integers of four bits. `n` is a multiple of [`INT4_ROWS`].
    Int4 {
        /// [`int4_pitch`] bytes a row, as `kernels/include/int4.cuh` orders them.
        codes: GpuWeight<u8>,
        /// [`Int4Group::stride`] a row, in the same order.
        groups: GpuWeight<u32>,
        /// Which inputs share one of them.
        group: Int4Group,
        /// `[k]`: which input each is, where the matrix has them in another order.
        order: Option<GpuWeight<u32>>,
    },
    /// In one of GGUF's block types.
    Gguf {
        /// Rows of [`GgufFormat::pitch`] bytes, as [`GgufFormat::pack_row`] writes them.
        rows: GpuWeight<u8>,
        /// The type.
        format: GgufFormat,
    },
    /// Several of the same inputs, whose outputs follow each other. Biases are theirs.
    Parts(Vec<GpuLinear>),
    /// Of an expert: e2m1 codes, with an exponent for each 32 inputs of a row; [`mxfp4_pitch`] bytes a row. `n` is a multiple of
    /// [`INT4_ROWS`]: each group of so many rows has its codes first and its exponents behind them, in the order that
    /// `kernels/include/experts.cuh` describes, codes within a word as in [`mxfp4_word`](super::mxfp4_word). Padding is 0 in exponents and
    /// anything in codes.
    Mxfp4(GpuWeight<u8>),
    /// Of an expert: integers of four bits, whose windows are smaller than those of [`Self::Int4`]. `n` is a multiple of
    /// [`INT4_ROWS`]. Padding repeats the word of the last group, and is anything in codes.
    ExpertInt4 {
        /// [`expert_int4_pitch`] bytes a row, as `kernels/include/experts.cuh` orders them.
        codes: GpuWeight<u8>,
        /// `[n,` [`Int4Group::stride`]`]`.
        groups: GpuWeight<u32>,
        /// Which inputs share one of them.
        group: Int4Group,
    },
}

/// Outputs of each of [`GpuMatrix::Parts`] but the last are a multiple of this, so that those of the next begin at whole vectors.
pub const PART_OUTPUTS: usize = 8;

/// Inputs of a window of codes of four bits.
pub const INT4_WINDOW: usize = 128;

/// Rows of codes of four bits that lie together, window by window.
pub const INT4_ROWS: usize = 8;

/// Bytes of a row of `k` codes of four bits: windows of 128, the last filled up.
pub fn int4_pitch(k: usize) -> usize {
    k.div_ceil(INT4_WINDOW) * INT4_WINDOW / 2
}

/// Inputs of a window of an expert's codes of four bits.
pub const EXPERT_WINDOW: usize = 64;

/// Bytes of a row of `k` codes of four bits of an expert: windows of 64, the last filled up.
pub fn expert_int4_pitch(k: usize) -> usize {
    k.div_ceil(EXPERT_WINDOW) * EXPERT_WINDOW / 2
}

/// Bytes of a row of `k` inputs of [`GpuMatrix::Mxfp4`]: its codes, and an exponent for each 32 inputs, padded to a multiple of 16.
pub fn mxfp4_pitch(k: usize) -> usize {
    expert_int4_pitch(k) + (k / 32).next_multiple_of(16)
}

/// So many neighbouring inputs of an output have a word together: their scale as `f32`, but for the last four bits, which are the zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[expect(missing_docs, reason = "so many inputs")]
pub enum Int4Group {
    Of32,
    Of64,
    Of128,
}

impl Int4Group {
    /// Inputs.
    pub fn inputs(self) -> usize {
        match self {
            Self::Of32 => 32,
            Self::Of64 => 64,
            Self::Of128 => 128,
        }
    }

    /// Words of a row of `k` inputs, as many as whole windows of 128 have.
    pub fn stride(self, k: usize) -> usize {
        k.div_ceil(INT4_WINDOW) * (INT4_WINDOW / self.inputs())
    }

    /// The word of a group: the scale rounded to 20 bits, which those of 16 bits do not need, and its zero below 16.
    pub fn word(scale: f32, zero: u8) -> u32 {
        let half = 1 << 3;
        (scale.to_bits().saturating_add(half) & !15) | u32::from(zero & 15)
    }
}

/// What weights of linear layers are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum GpuValues {
    /// As they are.
    Bf16,
    /// e4m3 values.
    Fp8(Fp8Scaling),
    /// Integers of four bits.
    Int4(Int4Group),
    /// A block type of GGUF's.
    Gguf(GgufFormat),
}

impl GpuValues {
    /// Behind the size of a product, in words for people.
    pub(super) fn suffix(self) -> String {
        match self {
            Self::Bf16 => String::new(),
            Self::Fp8(Fp8Scaling::Rows) => " fp8".to_owned(),
            Self::Fp8(Fp8Scaling::Blocks) => " fp8 in blocks".to_owned(),
            Self::Int4(_) => " int4".to_owned(),
            Self::Gguf(format) => format!(" {}", format.suffix()),
        }
    }

    /// How e4m3 values share factors.
    pub fn scaling(self) -> Option<Fp8Scaling> {
        match self {
            Self::Bf16 | Self::Int4(_) | Self::Gguf(_) => None,
            Self::Fp8(scaling) => Some(scaling),
        }
    }
}

impl GpuMatrix {
    fn fits(&self, n: usize, k: usize) -> bool {
        match self {
            Self::Bf16(weight) => weight.slice().len() == n * k,
            Self::Fp8 {
                values,
                scales,
                scaling,
            } => {
                values.slice().len() == n * k
                    && scales.slice().len() == scaling.weight_scales(n, k)
                    && (*scaling == Fp8Scaling::Rows || k.is_multiple_of(FP8_BLOCK))
            }
            Self::Int4 {
                codes,
                groups,
                group,
                order,
            } => {
                codes.slice().len() == n * int4_pitch(k)
                    && groups.slice().len() == n * group.stride(k)
                    && order.as_ref().is_none_or(|order| order.slice().len() == k)
                    && n.is_multiple_of(INT4_ROWS)
                    && k.is_multiple_of(8)
            }
            Self::Gguf { rows, format } => {
                rows.slice().len() == n * format.pitch(k) && k.is_multiple_of(format.dtype().block_len())
            }
            Self::Parts(parts) => {
                let mut ahead = parts.iter().rev().skip(1);
                parts.iter().all(|part| part.k == k)
                    && ahead.all(|part| part.n.is_multiple_of(PART_OUTPUTS))
                    && parts.iter().map(|part| part.n).sum::<usize>() == n
            }
            Self::Mxfp4(rows) => {
                rows.slice().len() == n * mxfp4_pitch(k)
                    && n.is_multiple_of(INT4_ROWS)
                    && k.is_multiple_of(32)
            }
            Self::ExpertInt4 { codes, groups, group } => {
                codes.slice().len() == n * expert_int4_pitch(k)
                    && groups.slice().len() == n * group.stride(k)
                    && n.is_multiple_of(INT4_ROWS)
                    && k.is_multiple_of(8)
            }
        }
    }

    /// What its elements are; `None` for those of several parts, and in formats that experts alone have.
    pub fn values(&self) -> Option<GpuValues> {
        Some(match self {
            Self::Bf16(_) => GpuValues::Bf16,
            Self::Fp8 { scaling, .. } => GpuValues::Fp8(*scaling),
            Self::Int4 { group, .. } => GpuValues::Int4(*group),
            Self::Gguf { format, .. } => GpuValues::Gguf(*format),
            Self::Parts(_) | Self::Mxfp4(_) | Self::ExpertInt4 { .. } => return None,
        })
    }
}

/// One linear layer, `y = x Wᵀ + b`.
#[derive(Clone, Debug)]
pub struct GpuLinear {
    pub(super) matrix: GpuMatrix,
    pub(super) bias: Option<GpuWeight>,
    pub(super) n: usize,
    pub(super) k: usize,
}

impl GpuLinear {
    /// From `matrix` `[n, k]` and `bias` `[n]`.
    ///
    /// # Panics
    /// If a length does not fit.
    pub fn new(matrix: GpuMatrix, bias: Option<GpuWeight>, n: usize, k: usize) -> Self {
        assert!(matrix.fits(n, k), "matrix of [{n}, {k}]");
        assert!(
            bias.as_ref().is_none_or(|bias| bias.slice().len() == n),
            "bias of [{n}]"
        );
        Self { matrix, bias, n, k }
    }

    /// Its matrix.
    pub fn matrix(&self) -> &GpuMatrix {
        &self.matrix
    }

    /// The matrix of a table that is not quantised.
    ///
    /// # Panics
    /// If it is.
    pub fn weight(&self) -> GpuSlice<'_, bf16> {
        match &self.matrix {
            GpuMatrix::Bf16(weight) => weight.slice(),
            _ => panic!("a table of few bits"),
        }
    }

    /// Its bias, `[n]`.
    pub fn bias(&self) -> Option<GpuSlice<'_, bf16>> {
        self.bias.as_ref().map(GpuWeight::slice)
    }

    /// Its matrix alone, for what adds the bias elsewhere.
    #[must_use]
    pub fn without_bias(&self) -> Self {
        Self {
            bias: None,
            ..self.clone()
        }
    }

    /// Whether it has the shape and the format of another.
    pub fn is_like(&self, other: &Self) -> bool {
        let [parts, others] = [self, other].map(Self::products);
        if parts.len() > 1 || others.len() > 1 {
            return parts.len() == others.len() && parts.iter().zip(others).all(|(a, b)| a.is_like(b));
        }
        let shape = |linear: &Self| (linear.n, linear.k, linear.bias.is_some());
        let group = |linear: &Self| match linear.matrix {
            GpuMatrix::ExpertInt4 { group, .. } => Some(group),
            _ => None,
        };
        let format = |linear: &Self| {
            let matrix = &linear.matrix;
            (
                discriminant(matrix),
                matrix.values(),
                group(linear),
                linear.order().is_some(),
            )
        };
        shape(self) == shape(other) && format(self) == format(other)
    }

    /// Which input each of the matrix's is, where it has them in another order; `[k]`.
    pub fn order(&self) -> Option<GpuSlice<'_, u32>> {
        match &self.matrix {
            GpuMatrix::Int4 { order, .. } => order.as_ref().map(GpuWeight::slice),
            _ => None,
        }
    }

    /// Itself, or its parts, of which each is a product.
    pub fn products(&self) -> &[Self] {
        match &self.matrix {
            GpuMatrix::Parts(parts) => parts,
            _ => std::slice::from_ref(self),
        }
    }

    /// Output features.
    pub fn outputs(&self) -> usize {
        self.n
    }

    /// Input features.
    pub fn inputs(&self) -> usize {
        self.k
    }
}

/// Rows that linear layers take, `[m, k]`.
#[derive(Clone, Copy, Debug)]
pub enum GpuRows<'a> {
    /// As they are.
    Bf16(GpuSlice<'a, bf16>),
    /// For products of e4m3 values.
    Fp8(GpuFp8Rows<'a>),
}

/// Rows of e4m3 values, `[m, k]`.
#[derive(Clone, Copy, Debug)]
pub struct GpuFp8Rows<'a> {
    /// `[m, k]`.
    pub values: GpuSlice<'a, u8>,
    /// As [`Fp8Scaling::input_scales`] says.
    pub scales: GpuSlice<'a, f32>,
    /// Which values share one of them.
    pub scaling: Fp8Scaling,
}

impl<'a> From<GpuSlice<'a, bf16>> for GpuRows<'a> {
    fn from(rows: GpuSlice<'a, bf16>) -> Self {
        Self::Bf16(rows)
    }
}

impl<'a> From<GpuFp8Rows<'a>> for GpuRows<'a> {
    fn from(rows: GpuFp8Rows<'a>) -> Self {
        Self::Fp8(rows)
    }
}

/// Elements from one to the next of `m` rows, of which each has `n` outputs.
///
/// # Panics
/// If `len` elements are not so many rows, or they have no room for the outputs.
pub(super) fn pitch(len: usize, m: usize, n: usize) -> usize {
    assert!(
        len.is_multiple_of(m) && len / m >= n,
        "{len} outputs for [{m}, {n}]"
    );
    len / m
}

/// Rows that a linear layer takes, `[m, k]`: as its products do, which may differ.
#[derive(Clone, Copy, Debug, Default)]
pub struct GpuInputs<'a> {
    /// As they are.
    pub plain: Option<GpuSlice<'a, bf16>>,
    /// For products of e4m3 values.
    pub fp8: Option<GpuFp8Rows<'a>>,
}

impl<'a, T: Into<GpuRows<'a>>> From<T> for GpuInputs<'a> {
    fn from(rows: T) -> Self {
        match rows.into() {
            GpuRows::Bf16(rows) => Self {
                plain: Some(rows),
                fp8: None,
            },
            GpuRows::Fp8(rows) => Self {
                plain: None,
                fp8: Some(rows),
            },
        }
    }
}

impl<'a> GpuInputs<'a> {
    /// Elements of all rows.
    pub(super) fn len(&self) -> usize {
        let fp8 = self.fp8.map_or(0, |rows| rows.values.len());
        self.plain.map_or(fp8, |rows| rows.len())
    }

    /// What a product takes whose inputs are quantised so.
    pub(super) fn of(&self, scaling: Option<Fp8Scaling>) -> Option<GpuRows<'a>> {
        match scaling {
            None => self.plain.map(GpuRows::Bf16),
            Some(scaling) => {
                let rows = self.fp8.filter(|rows| rows.scaling == scaling);
                rows.map(GpuRows::Fp8)
            }
        }
    }
}

impl GpuRows<'_> {
    /// Elements of all rows.
    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Bf16(rows) => rows.len(),
            Self::Fp8(rows) => rows.values.len(),
        }
    }

    /// Device addresses of the values and of their factors, 0 for none.
    pub(in crate::cuda) fn addresses(&self) -> (u64, u64) {
        match self {
            Self::Bf16(rows) => (rows.ptr(), 0),
            Self::Fp8(rows) => (rows.values.ptr(), rows.scales.ptr()),
        }
    }
}
