//! The kernels of the products of experts: which there are, and how they are launched.

use plimsoll_device::cuda::{Function, Gpu, GpuError, Launch};

use super::EXPERT_TILES;
use crate::cuda::linear::{Fp8Scaling, GpuMatrix, Int4Group, expert_int4_pitch, mxfp4_pitch};

/// Inputs that the kernels go on by.
const CHUNK: usize = 64;
const EXPONENT_INPUTS: usize = 32;
const VEC: usize = 8;
/// Of a row of weights of which a warp of `kernels/moe_few.cu` multiplies all, not half.
const MOST_WHOLE_BYTES: usize = 1024;
/// Rows of weights of a block of `kernels/moe.cu`.
const PORTABLE_FEATURES: usize = 128;

/// How experts' weights are stored: `Format` of `kernels/include/experts.cuh`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Format {
    Bf16,
    Fp8,
    Fp8Blocks,
    Mxfp4,
    Int4(Int4Group),
}

impl Format {
    const ALL: [Self; 7] = [
        Self::Bf16,
        Self::Fp8,
        Self::Fp8Blocks,
        Self::Mxfp4,
        Self::Int4(Int4Group::Of32),
        Self::Int4(Int4Group::Of64),
        Self::Int4(Int4Group::Of128),
    ];

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
            GpuMatrix::ExpertInt4 { group, .. } => Self::Int4(*group),
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
            Self::Int4(_) => "int4",
        }
    }

    /// Inputs are a multiple of this.
    pub(super) fn inputs(self) -> usize {
        match self {
            Self::Bf16 | Self::Int4(_) => VEC,
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
            Self::Int4(_) => expert_int4_pitch(k),
        }
    }

    /// Bytes of a chunk of a row of weights.
    fn chunk_bytes(self) -> usize {
        match self {
            Self::Bf16 => 2 * CHUNK,
            Self::Fp8 | Self::Fp8Blocks => CHUNK,
            Self::Mxfp4 | Self::Int4(_) => CHUNK / 2,
        }
    }

    /// Rows of weights of a block of `kernels/moe_few.cu` or `moe_few_4bit.cu`, `kRows` there.
    fn few_features(self) -> usize {
        if self.has_four_bits() { 32 } else { 16 }
    }

    /// Bytes of all stages of such a block.
    fn few_ring(self) -> usize {
        let stages = if self == Self::Bf16 { 4 } else { 3 };
        match self {
            Self::Bf16 | Self::Fp8 | Self::Fp8Blocks => 2 * stages * self.few_features() * 128,
            // Of 256 inputs each: weights, and eight rows of inputs.
            Self::Mxfp4 | Self::Int4(_) => stages * (self.few_features() * 128 + 8 * (2 * 256 + 16)),
        }
    }

    pub(super) fn has_four_bits(self) -> bool {
        matches!(self, Self::Mxfp4 | Self::Int4(_))
    }

    fn has_eight_bits(self) -> bool {
        matches!(self, Self::Fp8 | Self::Fp8Blocks)
    }

    /// The stages of a block of [`Source::Hopper`].
    fn hopper_stages(self, tile: usize) -> HopperStages {
        let (count, features, [input, weight]) = match (self, tile) {
            (Self::Bf16, 128) => (4, 256, [128, 128]),
            (Self::Bf16, _) => (5, 256, [128, 128]),
            (Self::Fp8 | Self::Fp8Blocks, 128) => (6, 128, [128 + size_of::<f32>(), 128]),
            (Self::Fp8 | Self::Fp8Blocks, _) => (5, 256, [128 + size_of::<f32>(), 128]),
            (Self::Mxfp4 | Self::Int4(_), _) => {
                let inputs = 2 * CHUNK;
                let beside = match self {
                    Self::Mxfp4 => inputs / EXPONENT_INPUTS,
                    _ => Int4Group::Of32.stride(inputs) * size_of::<u32>(),
                };
                let stages = if tile == 128 { 4 } else { 6 };
                (stages, 256, [2 * inputs, inputs / 2 + beside])
            }
        };
        HopperStages {
            count,
            features,
            bytes: tile * input + features * weight,
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

/// What a block for Hopper has of weights and rows of x at once.
#[derive(Clone, Copy, Debug)]
struct HopperStages {
    count: usize,
    /// Rows of weights.
    features: usize,
    /// Of a stage, with what is beside each row of x and of weights.
    bytes: usize,
}

/// Where a kernel is written.
#[derive(Clone, Copy, Debug)]
enum Source {
    /// `kernels/moe_few.cu` and, for weights of four bits, `moe_few_4bit.cu`: a tile of up to 16 rows.
    Few,
    /// `kernels/moe.cu`: by blocks of 128 rows of weights.
    Portable,
    /// `kernels/moe_hopper.cu` and, for weights of four bits, `moe_hopper_4bit.cu`: by one block for each multiprocessor.
    Hopper,
}

impl Source {
    /// The name of a kernel.
    fn kernel(self, format: Format, tile: usize) -> String {
        let name = format.name();
        match (self, format) {
            (Self::Few, Format::Int4(group)) => format!("moe_few_{name}_{}", group.inputs()),
            (Self::Few, _) => format!("moe_few_{name}"),
            (Self::Portable, _) => format!("moe_{name}_{tile}"),
            (Self::Hopper, _) => format!("moe_hopper_{name}_{tile}"),
        }
    }

    /// Shared memory of a block for rows of `k` weights, each with so many words of groups if there are groups.
    fn shared_bytes(self, format: Format, tile: usize, k: usize, groups: usize) -> usize {
        match self {
            // Stages, and each row's exponents, or words of groups, an odd number.
            Self::Few => {
                let beside = match format {
                    Format::Int4(_) => size_of::<u32>() * (groups | 1),
                    _ => 16 * format.exponent_pieces(k),
                };
                format.few_ring() + format.few_features() * beside
            }
            // Stages, exponents and, in their place, padded sums.
            Self::Portable => {
                let (features, stages) = (PORTABLE_FEATURES, if tile == 64 { 4 } else { 3 });
                let stage = features * format.chunk_bytes() + tile * 2 * CHUNK;
                let exponents = features * 16 * format.exponent_pieces(k);
                let sums = tile * (features + 4) * size_of::<f32>();
                (stages * stage + exponents).max(sums)
            }
            // Stages, up to 2 KiB of barriers and the like, and alignment.
            Self::Hopper => {
                let HopperStages { count, bytes, .. } = format.hopper_stages(tile);
                count * bytes + 3 * 1024
            }
        }
    }
}

/// The kernel of a format and a tile.
#[derive(Debug)]
pub(super) struct Product {
    pub(super) function: Function,
    /// The same of one row, whose experts it finds itself; of the first projection of [`Source::Few`].
    pub(super) of_one: Option<Function>,
    /// The same for short rows of weights, which warps do not share; of [`Source::Few`] with eight bits.
    whole: Option<Function>,
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
        let few_4bit = super::super::load(gpu, "moe_few_4bit")?;
        let portable = super::super::load(gpu, "moe")?;
        let of_hopper = |name| hopper.then(|| super::super::load(gpu, name)).transpose();
        let (hopper, hopper_4bit) = (of_hopper("moe_hopper")?, of_hopper("moe_hopper_4bit")?);
        let product = |format: Format, tile: usize| {
            let (few, hopper) = match format.has_four_bits() {
                true => (&few_4bit, &hopper_4bit),
                false => (&few, &hopper),
            };
            let (kernels, source) = match hopper {
                _ if tile == EXPERT_TILES[0] => (few, Source::Few),
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
                whole: match source {
                    Source::Few if format.has_eight_bits() => Some(function("_whole")?),
                    _ => None,
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
        let format = Format::ALL.iter().position(|known| *known == format);
        let tile = EXPERT_TILES.iter().position(|known| *known == tile);
        &self.0[format.expect("all formats")][tile.expect("one of the tiles")]
    }
}

impl Product {
    /// How rows of x must be quantised; `None` for as they are.
    pub(super) fn input_scaling(&self) -> Option<Fp8Scaling> {
        match (self.source, self.format) {
            (Source::Hopper, Format::Fp8) => Some(Fp8Scaling::Rows),
            (Source::Hopper, Format::Fp8Blocks) => Some(Fp8Scaling::Blocks),
            _ => None,
        }
    }

    /// How gated outputs can be quantised, where they can.
    pub(super) fn output_scaling(&self) -> Option<Fp8Scaling> {
        self.input_scaling()
            .filter(|scaling| *scaling == Fp8Scaling::Blocks && self.tile == 64)
    }

    /// Whether the first argument is the experts' tensor map.
    pub(super) fn takes_map(&self) -> bool {
        matches!(self.source, Source::Hopper) && !self.format.has_four_bits()
    }

    /// Whether the kernel can have the shared expert's tiles too: `kernels/moe_few.cu`.
    pub(super) fn takes_shared(&self) -> bool {
        matches!(self.source, Source::Few) && !self.format.has_four_bits()
    }

    /// The kernel for rows of `k` weights, of a first projection or not.
    pub(super) fn function_for(&self, k: usize, is_first: bool) -> &Function {
        let whole = self.whole.as_ref().filter(|_| self.is_whole(k, is_first));
        whole.unwrap_or(&self.function)
    }

    /// Whether each warp multiplies whole rows of `k` weights.
    fn is_whole(&self, k: usize, is_first: bool) -> bool {
        self.whole.is_some() && !is_first && self.format.pitch(k) <= MOST_WHOLE_BYTES
    }

    /// Of `rows` rows of `k` weights, each with so many words of groups if there are groups, with as many tiles as there can be.
    pub(super) fn launch_of(
        &self,
        rows: usize,
        k: usize,
        groups: usize,
        most_tiles: usize,
        is_first: bool,
    ) -> Launch {
        let (features, threads) = match self.source {
            Source::Few if self.is_whole(k, is_first) => (2 * self.format.few_features(), 64),
            Source::Few => (self.format.few_features(), 64),
            Source::Portable => (PORTABLE_FEATURES, 128),
            Source::Hopper => (self.format.hopper_stages(self.tile).features, 384),
        };
        let features = rows.div_ceil(features);
        let grid = match self.source {
            Source::Few | Source::Portable => [features as u32, most_tiles as u32, 1],
            Source::Hopper => [(features * most_tiles).min(self.multiprocessors) as u32, 1, 1],
        };
        Launch::new(grid, threads).shared(self.source.shared_bytes(self.format, self.tile, k, groups))
    }
}

#[cfg(test)]
mod tests {
    use super::{EXPERT_TILES, Format, Source};
    use crate::cuda::AssumedGpu;

    /// Experts of 2,048 inputs (Qwen3-30B-A3B), 2,880 (gpt-oss), 4,096 (Mixtral), 7,168 (DeepSeek) and 14,336 (Mixtral, down).
    #[test]
    fn blocks_fit_on_every_gpu() {
        for gpu in AssumedGpu::EACH {
            let [few, some, many] = EXPERT_TILES;
            let wide = match gpu.compute_capability {
                (9, 0) => Source::Hopper,
                _ => Source::Portable,
            };
            for format in Format::ALL {
                for k in [2048, 2880, 4096, 7168, 14336] {
                    // Where a block has 99 KiB, the exponents of so many inputs do not fit; no model has them.
                    if format == Format::Mxfp4 && k > 7168 {
                        continue;
                    }
                    let groups = match format {
                        Format::Int4(group) => group.stride(k),
                        _ => 0,
                    };
                    for (source, tile) in [(Source::Few, few), (wide, some), (wide, many)] {
                        let shared = source.shared_bytes(format, tile, k, groups);
                        assert!(
                            gpu.blocks(shared) >= 1,
                            "{format:?}, {k} inputs: {shared} bytes on {gpu:?}"
                        );
                    }
                }
            }
        }
    }
}
