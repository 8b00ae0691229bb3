//! Attention among the patches of an image.

use std::f32::consts::LOG2_E;
use std::ops::Range;

use half::bf16;
use plimsoll_device::cuda::{Arg, Function, Gpu, GpuError, GpuSlice, Launch, Module};

use crate::cuda::fused::{VEC, int};

const THREADS: u32 = 128;

/// Kernels for heads of all sizes, from the smallest up.
#[derive(Debug)]
pub(super) struct AttentionKernels {
    gpu: Gpu,
    shapes: [(AttentionShape, Function); SHAPES.len()],
}

/// A size that heads are padded to.
#[derive(Clone, Copy, Debug)]
struct AttentionShape {
    dim: usize,
    /// Queries of a block of threads.
    rows: usize,
}

const SHAPES: [AttentionShape; 3] = [
    AttentionShape { dim: 64, rows: 128 },
    AttentionShape { dim: 80, rows: 128 },
    AttentionShape { dim: 128, rows: 64 },
];

impl AttentionShape {
    /// Keys of a tile.
    const KEYS: usize = 64;

    fn shared(self) -> usize {
        (self.rows + 4 * Self::KEYS) * (self.dim + VEC) * size_of::<bf16>()
    }
}

/// Attention in which the rows of a segment, patches of a frame or of a window, see each other.
#[derive(Clone, Debug)]
pub struct PatchAttention<'a> {
    /// `[rows, 3, heads, head_dim]`: q, k and v.
    pub qkv: GpuSlice<'a, bf16>,
    /// Heads, of q as of k and v.
    pub heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Which rows see each other.
    pub segments: PatchSegments<'a>,
    /// Multiplies the scores; more than 0.
    pub scale: f32,
    /// `[rows, heads, head_dim]`.
    pub out: GpuSlice<'a, bf16>,
}

/// Consecutive rows that see each other, and those whose attention is computed.
#[derive(Clone, Debug)]
pub enum PatchSegments<'a> {
    /// All segments are of one length.
    Equal {
        /// Rows of each.
        len: usize,
        /// Those that are computed: rows of one segment, or whole segments.
        rows: Range<usize>,
    },
    /// Each number is the first row of a segment that is computed, and the last is where the last of them ends.
    Between {
        /// Ascending.
        starts: GpuSlice<'a, i32>,
        /// Rows of the longest, or more.
        longest: usize,
    },
}

impl AttentionKernels {
    /// Largest head: multiples of 8 up to it.
    pub(super) const MAX_HEAD_DIM: usize = SHAPES[SHAPES.len() - 1].dim;

    pub(super) fn load(gpu: &Gpu, module: &Module) -> Result<Self, GpuError> {
        let shape = |shape: AttentionShape| {
            let function = module.function(&format!("encoder_attention_{}", shape.dim))?;
            function.allow_shared(shape.shared())?;
            Ok::<_, GpuError>((shape, function))
        };
        let [small, middle, large] = SHAPES;
        Ok(Self {
            gpu: gpu.clone(),
            shapes: [shape(small)?, shape(middle)?, shape(large)?],
        })
    }

    pub(super) fn forward(&self, args: &PatchAttention<'_>) -> Result<(), GpuError> {
        let PatchAttention {
            qkv,
            heads,
            head_dim: dim,
            ref segments,
            scale,
            out,
        } = *args;
        let width = heads * dim;
        assert!(width > 0, "no heads");
        assert!(
            dim.is_multiple_of(VEC),
            "heads of {dim} are not a multiple of {VEC}"
        );
        assert!(out.len().is_multiple_of(width), "out is not [rows, {width}]");
        assert_eq!(qkv.len(), 3 * out.len(), "qkv is not [rows, 3, {width}]");
        let fitting = self.shapes.iter().find(|(shape, _)| shape.dim >= dim);
        let (shape, function) = fitting.unwrap_or_else(|| panic!("heads of {dim}"));
        let Calls {
            first,
            starts,
            len,
            computed,
            count,
        } = segments.calls(out.len() / width);
        if computed.is_empty() || count == 0 {
            return Ok(());
        }
        let out = out.range(first * width..out.len());
        let part = |index: usize| Arg::from(qkv.range((3 * first + index) * width..qkv.len()));
        let args = [
            part(0),
            part(1),
            part(2),
            out.into(),
            starts.into(),
            int(3 * width),
            int(dim),
            int(len),
            int(computed.start),
            int(computed.end),
            (scale * LOG2_E).into(),
        ];
        let tiles = computed.len().div_ceil(shape.rows);
        let grid = [tiles as u32, heads as u32, count as u32];
        let launch = Launch::new(grid, THREADS).shared(shape.shared()).pdl(true);
        // SAFETY: the arguments are those of the kernel, whose lengths were checked; where segments begin is the caller's promise.
        unsafe { self.gpu.launch(function, launch, &args) }
    }
}

/// What a kernel is told of segments.
struct Calls {
    /// Row of the first, where all are of one length.
    first: usize,
    /// Address of their starts, 0 where all are of one length.
    starts: u64,
    /// Rows of each, or of the longest.
    len: usize,
    /// Of each, those that are computed.
    computed: Range<usize>,
    count: usize,
}

impl PatchSegments<'_> {
    /// Of so many rows in all.
    fn calls(&self, all: usize) -> Calls {
        match *self {
            Self::Equal { len, ref rows } => {
                assert!(
                    len > 0 && all.is_multiple_of(len),
                    "{all} rows are not segments of {len}"
                );
                assert!(rows.end <= all, "{rows:?} of {all} rows");
                // Of how many segments which rows.
                let first = rows.start / len * len;
                let (begin, end) = (rows.start - first, rows.end.max(rows.start) - first);
                let (count, end) = match end <= len {
                    true => (1, end),
                    false => (end / len, len),
                };
                assert!(
                    count == 1 || (begin == 0 && rows.end == first + count * len),
                    "rows {rows:?} of segments of {len} are neither in one nor all of some"
                );
                Calls {
                    first,
                    starts: 0,
                    len,
                    computed: begin..end,
                    count,
                }
            }
            Self::Between { starts, longest } => Calls {
                first: 0,
                starts: starts.ptr(),
                len: longest,
                computed: 0..longest,
                count: starts.len().saturating_sub(1),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::SHAPES;
    use crate::cuda::AssumedGpu;

    #[test]
    fn blocks_fit_on_every_gpu() {
        for gpu in AssumedGpu::EACH {
            for shape in SHAPES {
                assert!(gpu.blocks(shape.shared()) >= 1, "{shape:?} on {gpu:?}");
            }
        }
    }
}
