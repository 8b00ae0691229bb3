//! What weights in GGUF's block types need besides products of few rows (`kernels/gguf.cu`).

use half::bf16;
use plimsoll_device::cuda::{Function, Gpu, GpuError, GpuSlice, Launch, Module};

use super::matrix::{GpuLinear, GpuMatrix};
use crate::GgufFormat;
use crate::cuda::{GpuTokens, GpuVocabulary};

/// Of `kernels/gguf.cu`.
const THREADS: usize = 256;
const PIECE: usize = 16;

/// The kernels.
#[derive(Debug)]
pub struct GgufKernels {
    gpu: Gpu,
    /// By the format.
    of_format: Vec<(GgufFormat, OfFormat)>,
    fill: Function,
}

#[derive(Debug)]
struct OfFormat {
    dequantise: Function,
    embedding: Function,
}

impl GgufFormat {
    /// In names of kernels.
    pub(super) fn suffix(self) -> &'static str {
        match self {
            Self::Q4_0 => "q4_0",
            Self::Q4_1 => "q4_1",
            Self::Q5_0 => "q5_0",
            Self::Q5_1 => "q5_1",
            Self::Q8_0 => "q8_0",
            Self::Q4K => "q4_k",
            Self::Q5K => "q5_k",
            Self::Q6K => "q6_k",
        }
    }

    /// Threads that dequantise a row of `inputs`.
    fn row_threads(self, inputs: usize) -> usize {
        let of_window = if self == Self::Q8_0 { 16 } else { 8 };
        inputs.div_ceil(Self::WINDOW) * of_window
    }
}

impl GgufKernels {
    /// Loads `kernels/gguf.cu`.
    ///
    /// # Errors
    /// [`GpuError`] if this binary carries no code for this GPU.
    pub fn load(gpu: &Gpu) -> Result<Self, GpuError> {
        let module = crate::cuda::load(gpu, "gguf")?;
        let of_format = |module: &Module, format: GgufFormat| {
            let function = |what: &str| module.function(&format!("gguf_{what}_{}", format.suffix()));
            let kernels = OfFormat {
                dequantise: function("dequantise")?,
                embedding: function("embedding")?,
            };
            Ok((format, kernels))
        };
        Ok(Self {
            gpu: gpu.clone(),
            of_format: GgufFormat::ALL
                .into_iter()
                .map(|format| of_format(&module, format))
                .collect::<Result<_, GpuError>>()?,
            fill: module.function("gguf_fill")?,
        })
    }

    fn of(&self, format: GgufFormat) -> &OfFormat {
        let found = self.of_format.iter().find(|(known, _)| *known == format);
        &found.expect("there are kernels for all formats").1
    }

    /// Rows at `rows` to `[n, k]` of `bf16` at `out`, rounded once. Device addresses.
    ///
    /// # Safety
    /// There are as many rows, and room for `n * k`, until the kernel is done.
    pub(super) unsafe fn dequantise(
        &self,
        [rows, out]: [u64; 2],
        [n, k]: [usize; 2],
        format: GgufFormat,
    ) -> Result<(), GpuError> {
        let args = [
            rows.into(),
            out.into(),
            (n as i32).into(),
            (k as i32).into(),
            (format.pitch(k) as i32).into(),
        ];
        let blocks = (n * format.row_threads(k)).div_ceil(THREADS);
        // SAFETY: the caller's promise; the arguments are those of `gguf_dequantise`.
        unsafe {
            self.gpu
                .launch(&self.of(format).dequantise, launch(blocks), &args)
        }
    }

    /// Rows of a table by token into `out`, `[tokens, n]`, times `scale`, rounded once; otherwise as
    /// [`FusedKernels::embedding`](crate::cuda::FusedKernels::embedding).
    ///
    /// # Errors
    /// [`GpuError`] of the launch.
    ///
    /// # Panics
    /// If the table is no matrix in one of GGUF's types, or a length does not fit.
    pub fn embedding(
        &self,
        table: &GpuLinear,
        vocabulary: GpuVocabulary,
        tokens: GpuTokens<'_>,
        scale: f32,
        out: GpuSlice<'_, bf16>,
    ) -> Result<(), GpuError> {
        let GpuMatrix::Gguf { rows, format } = table.matrix() else {
            panic!("the table is in no type of GGUF's")
        };
        let (n, len) = (table.inputs(), tokens.tokens.len());
        let GpuVocabulary { all, first, count } = vocabulary;
        assert_eq!(table.outputs(), count, "the table is not [tokens, n]");
        assert_eq!(tokens.resolved.len(), len, "one resolved token per row");
        assert_eq!(out.len(), len * n, "out of [{len}, {n}]");
        let args = [
            rows.slice().into(),
            tokens.tokens.into(),
            tokens.prev_sampled.into(),
            tokens.resolved.into(),
            out.into(),
            scale.into(),
            (all as i32).into(),
            (first as i32).into(),
            (count as i32).into(),
            (n as i32).into(),
            (format.pitch(n) as i32).into(),
        ];
        // SAFETY: the lengths were checked; the arguments are those of `gguf_embedding`.
        unsafe { self.gpu.launch(&self.of(*format).embedding, launch(len), &args) }
    }

    /// Fills rows of `inputs` with random elements of about this deviation.
    ///
    /// # Errors
    /// [`GpuError`] of the launch.
    ///
    /// # Panics
    /// If they are no whole rows.
    pub fn fill(
        &self,
        rows: GpuSlice<'_, u8>,
        inputs: usize,
        format: GgufFormat,
        seed: u64,
        deviation: f32,
    ) -> Result<(), GpuError> {
        let pitch = format.pitch(inputs);
        assert!(rows.len().is_multiple_of(pitch), "whole rows");
        let (shared, [low, high]) = format.made_up(deviation);
        let words = shared.as_chunks().0.iter().map(|&word| u64::from_le_bytes(word));
        let words: Vec<u64> = words.collect();
        let pieces = rows.len() / PIECE;
        let args = [
            rows.into(),
            (pieces as u64).into(),
            seed.into(),
            words[0].into(),
            words[1].into(),
            words[2].into(),
            words[3].into(),
            ((pitch / PIECE) as i32).into(),
            ((format.windows_bytes(inputs) / PIECE) as i32).into(),
            (format.pieces() as i32).into(),
            (format.code_pieces() as i32).into(),
            i32::from_le_bytes([low, high, low, high]).into(),
        ];
        let blocks = pieces.div_ceil(THREADS).clamp(1, 1 << 16);
        // SAFETY: the arguments are those of `gguf_fill`, which writes as much as there is.
        unsafe { self.gpu.launch(&self.fill, launch(blocks), &args) }
    }
}

fn launch(blocks: usize) -> Launch {
    Launch::new([blocks as u32, 1, 1], THREADS as u32).pdl(true)
}
