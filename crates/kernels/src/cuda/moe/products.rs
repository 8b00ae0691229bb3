//! The kernels of the products of experts: which there are, and how they are launched.

use plimsoll_device::cuda::{Function, Gpu, GpuError, Launch};

use super::EXPERT_TILES;
use crate::cuda::linear::{Fp8Scaling, GpuMatrix, Int4Group, expert_int4_pitch, mxfp4_pitch};

/// Inputs that the kernels go on by.
const CHUNK: usize = 64;
const EXPONENT_INPUTS: usize = 32;
const VEC: usize = 8;

/// How experts' weights are stored: `Format` of `kernels/include/experts.cuh`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Format {
    Bf16,
    Fp8,
    Fp8Blocks,
    Mxfp4,
    Int4,
}

impl Format {
    const ALL: [Self; 5] = [Self::Bf16, Self::Fp8, Self::Fp8Blocks, Self::Mxfp4, Self::Int4];

    pub(super) fn of(matrix: &GpuMatrix) -> Self {
        match matrix {
            GpuMatrix::Bf16(_) => Self::Bf16,
            GpuMatrix::Fp8 {
                scaling: Fp8Scaling::Rows,
                ..
            } => Self::Fp8,
            GpuMatrix::Fp8 {
                scaling: Fp8Scaling::Blocks,
                ..
            } => Self::Fp8Blocks,
            GpuMatrix::Mxfp4(_) => Self::Mxfp4,
            GpuMatrix::ExpertInt4 { .. } => Self::Int4,
            GpuMatrix::Int4 { .. } | GpuMatrix::Gguf { .. } | GpuMatrix::Parts(_) => {
                panic!("there are no products of experts in this format")
            }
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Bf16 => "bf16",
            Self::Fp8 => "fp8",
            Self::Fp8Blocks => "fp8_blocks",
            Self::Mxfp4 => "mxfp4",
            Self::Int4 => "int4",
        }
    }

    /// Inputs are a multiple of this.
    pub(super) fn inputs(self) -> usize {
        match self {
            Self::Bf16 | Self::Int4 => VEC,
            Self::Fp8 => 16,
            Self::Fp8Blocks => 128,
            Self::Mxfp4 => EXPONENT_INPUTS,
        }
    }

    /// Bytes between two rows of `k` weights.
    pub(super) fn pitch(self, k: usize) -> usize {
        match self {
            Self::Bf16 => 2 * k,
            Self::Fp8 | Self::Fp8Blocks => k,
            Self::Mxfp4 => mxfp4_pitch(k),
            Self::Int4 => expert_int4_pitch(k),
        }
    }

    /// Bytes of a chunk of a row of weights.
    fn chunk_bytes(self) -> usize {
        match self {
            Self::Bf16 => 2 * CHUNK,
            Self::Fp8 | Self::Fp8Blocks => CHUNK,
            Self::Mxfp4 | Self::Int4 => CHUNK / 2,
        }
    }

    /// Stages of `kernels/moe_few.cu`.
    fn few_stages(self) -> usize {
        match self {
            Self::Bf16 => 4,
            Self::Fp8 | Self::Fp8Blocks | Self::Mxfp4 => 3,
            Self::Int4 => 2,
        }
    }

    /// Pieces of 16 bytes with the exponents of a row.
    fn exponent_pieces(self, k: usize) -> usize {
        match self {
            Self::Mxfp4 => (k / EXPONENT_INPUTS).div_ceil(16),
            _ => 0,
        }
    }
}

/// Where a kernel is written.
#[derive(Clone, Copy, Debug)]
enum Source {
    /// `kernels/moe_few.cu`: a tile of up to 16 rows, by blocks of 16 rows of weights.
    Few,
    /// `kernels/moe.cu`: by blocks of 128 rows of weights.
    Portable,
    /// `kernels/moe_hopper.cu`: by one block for each multiprocessor, 256 rows of weights at a time.
    Hopper,
}

impl Source {
    /// The name of a kernel.
    fn kernel(self, format: Format, tile: usize) -> String {
        let format = format.name();
        match self {
            Self::Few => format!("moe_few_{format}"),
            Self::Portable => format!("moe_{format}_{tile}"),
            Self::Hopper => format!("moe_hopper_{format}_{tile}"),
        }
    }
}

/// The kernel of a format and a tile.
#[derive(Debug)]
pub(super) struct Product {
    pub(super) function: Function,
    /// The same of one row, whose experts it finds itself; of the first projection of [`Source::Few`].
    pub(super) of_one: Option<Function>,
    source: Source,
    format: Format,
    tile: usize,
    multiprocessors: usize,
}

/// Of each [`Format`], for each of [`EXPERT_TILES`].
#[derive(Debug)]
pub(super) struct Products(Vec<[Product; EXPERT_TILES.len()]>);

impl Products {
    /// With those of Hopper's generation where `hopper` says so.
    pub(super) fn load(gpu: &Gpu, hopper: bool) -> Result<Self, GpuError> {
        let few = super::super::load(gpu, "moe_few")?;
        let portable = super::super::load(gpu, "moe")?;
        let hopper = hopper
            .then(|| super::super::load(gpu, "moe_hopper"))
            .transpose()?;
        let product = |format: Format, tile: usize| {
            let (kernels, source) = match &hopper {
                _ if tile == EXPERT_TILES[0] => (&few, Source::Few),
                Some(hopper) => (hopper, Source::Hopper),
                None => (&portable, Source::Portable),
            };
            let name = source.kernel(format, tile);
            let function = |suffix: &str| -> Result<Function, GpuError> {
                let function = kernels.function(&format!("{name}{suffix}"))?;
                function.allow_shared(gpu.info().max_shared_bytes)?;
                Ok(function)
            };
            Ok(Product {
                function: function("")?,
                of_one: match source {
                    Source::Few => Some(function("_one")?),
                    Source::Portable | Source::Hopper => None,
                },
                source,
                format,
                tile,
                multiprocessors: gpu.info().sm_count,
            })
        };
        let of = |format| {
            let [few, some, many] = EXPERT_TILES.map(|tile| product(format, tile));
            Ok([few?, some?, many?])
        };
        Ok(Self(
            Format::ALL.into_iter().map(of).collect::<Result<_, GpuError>>()?,
        ))
    }

    pub(super) fn of(&self, format: Format, tile: usize) -> &Product {
        let at = EXPERT_TILES.iter().position(|known| *known == tile);
        &self.0[format as usize][at.expect("one of the tiles")]
    }
}

impl Product {
    /// Of `rows` rows of `k` weights, each with so many words of groups if there are groups, with as many tiles as there can be.
    pub(super) fn launch_of(&self, rows: usize, k: usize, groups: usize, most_tiles: usize) -> Launch {
        let (tile, format) = (self.tile, self.format);
        let grid = |features: usize| [rows.div_ceil(features) as u32, most_tiles as u32, 1];
        match self.source {
            // A ring of stages for each of two parts of k, and each row's exponents or groups, an odd number of pieces or words.
            Source::Few => {
                let features = 16;
                let ring = format.few_stages() * features * 128;
                let beside = match (format, format.exponent_pieces(k)) {
                    (Format::Int4, _) => features * size_of::<u32>() * (groups | 1),
                    (_, 0) => 0,
                    (_, pieces) => features * 16 * (pieces | 1),
                };
                Launch::new(grid(features), 64).shared(2 * ring + beside)
            }
            // Stages, exponents and, in their place, padded sums.
            Source::Portable => {
                let (features, stages) = (128, if tile == 64 { 4 } else { 3 });
                let stage = features * format.chunk_bytes() + tile * 2 * CHUNK;
                let exponents = features * 16 * format.exponent_pieces(k);
                let sums = tile * (features + 4) * size_of::<f32>();
                Launch::new(grid(features), 128).shared((stages * stage + exponents).max(sums))
            }
            // Stages of one chunk or two, with exponents or groups, barriers, and alignment.
            Source::Hopper => {
                let features = 256;
                let (chunks, [some, many], beside) = match format {
                    Format::Bf16 => (1, [5, 4], 0),
                    Format::Fp8 | Format::Fp8Blocks => (2, [4, 3], 0),
                    Format::Mxfp4 => (2, [6, 4], 2 * CHUNK / EXPONENT_INPUTS),
                    Format::Int4 => (2, [6, 4], Int4Group::Of32.stride(2 * CHUNK) * size_of::<u32>()),
                };
                let stages = if tile == 64 { some } else { many };
                let stage = chunks * (features * format.chunk_bytes() + tile * 2 * CHUNK) + features * beside;
                let blocks = (rows.div_ceil(features) * most_tiles).min(self.multiprocessors);
                Launch::new([blocks as u32, 1, 1], 384).shared(stages * stage + 2 * 1024)
            }
        }
    }
}
