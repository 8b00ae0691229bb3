use bytemuck::Pod;
use half::bf16;
use plimsoll_device::cuda::{Arg, Function, Gpu, GpuError, GpuSlice, Launch, Module};

use super::delta_chunks::{ChunkKernels, Chunked};
use super::fused::int;
use super::load;
use super::state_runs::{CHUNK, GpuStateRun, GpuStateTile};
use crate::DeltaLayout;

/// Constants of `kernels/delta_rule.cu` and `delta_conv.cuh`.
const WARP: usize = 32;
const VEC: usize = 8;
const MOST_TAPS: usize = 4;
const CONV_WARPS: usize = 4;
const RULE_THREADS: usize = 128;
const SLICE: usize = 32;
const TOKENS: usize = 16;
const STAGES: usize = 2;
const NORM_WARPS: usize = 8;
/// Constants of `kernels/delta_step.cu`.
const STEP_DIM: usize = 128;
const STEP_THREADS: usize = 256;
/// Largest heads of the kernels for the convolution, and for the rule.
const CONV_DIMS: [usize; 2] = [128, 256];
const KEY_DIMS: [usize; 3] = [64, 128, 256];

/// What decides how fast a layer forgets and learns, and the norm of its output; see [`crate::DeltaGates`].
#[derive(Clone, Copy, Debug)]
pub struct GpuDeltaGates<'a> {
    /// `[value_heads]`.
    pub a_log: GpuSlice<'a, f32>,
    /// `[value_heads]`.
    pub dt_bias: GpuSlice<'a, f32>,
    /// `[value_dim]`.
    pub norm: GpuSlice<'a, f32>,
    /// Added to the mean square.
    pub eps: f32,
}

/// What [`DeltaKernels::forward`] works on.
///
/// `runs`, `tiles`, `conv_states` and `head_states` are read while kernels ahead of this one may still run, back to the last
/// that was launched without programmatic dependent launch, copy or graph. The same step must not write them in other kernels,
/// and a layer's states are of one call in a step.
#[derive(Clone, Copy, Debug)]
pub struct DeltaArgs<'a> {
    /// For which [`DeltaKernels::check`] has no complaint.
    pub layout: DeltaLayout,
    /// Of the convolution, `[channels][taps]`, the last tap that of the token itself; at a multiple of 16 bytes.
    pub conv: GpuSlice<'a, f32>,
    /// Of the recurrence and the output.
    pub gates: GpuDeltaGates<'a>,
    /// The step's runs: those in chunks first, then the others, the longest first for speed; those of one token and padding come last.
    /// No two share rows, and none reads or writes a slot that another writes.
    pub runs: GpuSlice<'a, GpuStateRun>,
    /// [`GpuStateTile::all`] of them.
    pub tiles: GpuSlice<'a, GpuStateTile>,
    /// [`GpuStateTile::chunks`] of them.
    pub chunks: GpuSlice<'a, GpuStateTile>,
    /// How many of the runs are in chunks.
    pub in_chunks: usize,
    /// How many of the others, which come last, have one token or are padding.
    pub of_one_token: usize,
    /// `[rows, layout.width()]`: q, k, v, z, b, a, padding. Stays as it is.
    pub x: GpuSlice<'a, bf16>,
    /// `[slots]` of [`DeltaLayout::conv_state`].
    pub conv_states: GpuSlice<'a, f32>,
    /// `[slots]` of [`DeltaLayout::head_states`].
    pub head_states: GpuSlice<'a, f32>,
    /// [`DeltaKernels::scratch_floats`] for each row, of any content.
    pub scratch: GpuSlice<'a, f32>,
    /// `[rows, layout.values()]`. Rows of no run hold anything afterwards.
    pub out: GpuSlice<'a, bf16>,
}

/// Gated DeltaNet and the gate of gated attention: `kernels/delta_rule.cu` and `delta_step.cu`.
#[derive(Debug)]
pub struct DeltaKernels {
    gpu: Gpu,
    /// For each of [`CONV_DIMS`].
    conv: [Function; 2],
    /// For each of [`KEY_DIMS`].
    rule: [Function; 3],
    /// For runs of one token with heads of [`STEP_DIM`].
    step: Function,
    chunks: Option<ChunkKernels>,
    norm: Function,
    sigmoid_gate: Function,
    _module: Module,
}

impl DeltaKernels {
    /// Tokens of a chunk, where prompts are computed in chunks.
    pub const CHUNK: usize = CHUNK;

    /// Loads them.
    ///
    /// # Errors
    /// [`GpuError`] if this binary carries no code for this GPU.
    pub fn load(gpu: &Gpu) -> Result<Self, GpuError> {
        let module = load(gpu, "delta_rule")?;
        let rule = |key_dim: usize| -> Result<Function, GpuError> {
            let function = module.function(&format!("delta_rule_{key_dim}"))?;
            function.allow_shared(shared_bytes(key_dim))?;
            Ok(function)
        };
        let [small, middle, large] = KEY_DIMS.map(rule);
        let conv = |dim: usize| module.function(&format!("delta_conv_{dim}"));
        Ok(Self {
            gpu: gpu.clone(),
            conv: [conv(CONV_DIMS[0])?, conv(CONV_DIMS[1])?],
            rule: [small?, middle?, large?],
            step: load(gpu, "delta_step")?.function(&format!("delta_step_{STEP_DIM}"))?,
            chunks: ChunkKernels::load(gpu)?,
            norm: module.function("delta_norm")?,
            sigmoid_gate: module.function("sigmoid_gate")?,
            _module: module,
        })
    }

    /// Whether there are kernels for a layout: heads of a multiple of 8 elements and a convolution of up to 4 taps.
    ///
    /// # Errors
    /// Which of its sizes there are none for, and what there is.
    pub fn check(layout: &DeltaLayout) -> Result<(), DeltaBound> {
        let dim = |size, name| match (size % VEC, size <= DeltaLayout::MAX_HEAD_DIM) {
            (0, true) => Ok(()),
            _ => Err(DeltaBound {
                name,
                size,
                supported: "a multiple of 8 up to 256",
            }),
        };
        dim(layout.key_dim, DeltaSize::KeyDim)?;
        dim(layout.value_dim, DeltaSize::ValueDim)?;
        match (2..=MOST_TAPS).contains(&layout.taps) {
            true => Ok(()),
            false => Err(DeltaBound {
                name: DeltaSize::Taps,
                size: layout.taps,
                supported: "from 2 to 4",
            }),
        }
    }

    /// Tokens at whose multiples a prompt can be cut so that states are the same to the bit: it is computed in chunks of as many. Cut
    /// elsewhere, prompts are rounded differently.
    pub fn chunk(&self, layout: &DeltaLayout) -> usize {
        self.chunks_for(layout).map_or(1, |_| CHUNK)
    }

    fn chunks_for(&self, layout: &DeltaLayout) -> Option<&ChunkKernels> {
        self.chunks.as_ref().filter(|_| ChunkKernels::supports(layout))
    }

    /// Floats of scratch for each row: q, k and v as the rule takes them, what chunks take (on all GPUs alike), and gates.
    pub fn scratch_floats(layout: &DeltaLayout) -> usize {
        let halves = layout.channels() + ChunkKernels::triangles(layout);
        halves / 2 + 2 * layout.value_heads
    }

    /// The convolution, the rule, and its gated and normalised output: twin of [`crate::causal_conv`] and then
    /// [`crate::gated_delta_rule`]. States, gates and sums are `f32`; q, k, v and the rule's outputs become `bf16`.
    ///
    /// # Errors
    /// [`GpuError`] of a launch.
    ///
    /// # Panics
    /// If a length does not fit, or [`Self::check`] complains.
    pub fn forward(&self, args: &DeltaArgs<'_>) -> Result<(), GpuError> {
        let layout = &args.layout;
        assert_eq!(Self::check(layout), Ok(()));
        assert!(layout.value_heads.is_multiple_of(layout.key_heads), "{layout:?}");
        let (heads, channels) = (layout.value_heads, layout.channels());
        let rows = args.out.len() / layout.values();
        assert_eq!(
            [args.x.len(), args.out.len()],
            [rows * layout.width(), rows * layout.values()],
            "as many rows of everything"
        );
        assert_eq!(args.conv.len(), channels * layout.taps, "[channels, taps]");
        assert!(args.conv.ptr().is_multiple_of(16), "taps in one access");
        let GpuDeltaGates {
            a_log,
            dt_bias,
            norm,
            eps,
        } = args.gates;
        assert_eq!(
            [a_log.len(), dt_bias.len(), norm.len()],
            [heads, heads, layout.value_dim],
            "gates of {layout:?}"
        );
        let slots = args.head_states.len() / layout.head_states();
        assert_eq!(
            [args.conv_states.len(), args.head_states.len()],
            [slots * layout.conv_state(), slots * layout.head_states()],
            "states of {layout:?}"
        );
        assert!(args.tiles.len() >= args.runs.len(), "each run has a tile");
        let (mixed, rest) = split(args.scratch, rows * channels / 2);
        let mixed = mixed.cast::<bf16>();
        let (triangles, rest) = split(rest, rows * ChunkKernels::triangles(layout) / 2);
        let (gates, _) = split(rest, rows * 2 * heads);
        let shape = [layout.key_heads, heads, layout.key_dim, layout.value_dim].map(int);

        let tasks = (2 * layout.key_heads + heads).div_ceil(CONV_WARPS);
        let grid = args.tiles.len() * tasks;
        let sources = [
            args.x.into(),
            args.conv.into(),
            args.conv_states.into(),
            mixed.into(),
            a_log.into(),
            dt_bias.into(),
            gates.into(),
            args.runs.into(),
            args.tiles.into(),
        ];
        let conv = at_least(CONV_DIMS, layout.key_dim.max(layout.value_dim));
        self.launch(
            &self.conv[conv],
            Launch::new([grid as u32, 1, 1], (CONV_WARPS * WARP) as u32),
            &[&sources[..], &shape, &[int(layout.taps)]].concat(),
        )?;

        let chunked = match self.chunks_for(layout) {
            Some(chunks) if args.in_chunks > 0 => {
                let chunked = Chunked {
                    layout: *layout,
                    mixed,
                    gates,
                    triangles: triangles.cast(),
                    states: args.head_states,
                    runs: args.runs.range(0..args.in_chunks),
                    chunks: args.chunks,
                };
                chunks.forward(&self.gpu, &chunked)?;
                args.in_chunks
            }
            _ => 0,
        };
        let rule = at_least(KEY_DIMS, layout.key_dim);
        let stepped = match [layout.key_dim, layout.value_dim] {
            [STEP_DIM, STEP_DIM] => args.of_one_token,
            _ => 0,
        };
        let (many, single) = split(
            args.runs.range(chunked..args.runs.len()),
            args.runs.len() - chunked - stepped,
        );
        let sources = |runs: GpuSlice<'_, GpuStateRun>| {
            [mixed.into(), gates.into(), args.head_states.into(), runs.into()]
        };
        let grid = many.len() * heads * layout.value_dim.div_ceil(SLICE);
        self.launch(
            &self.rule[rule],
            Launch::new([grid as u32, 1, 1], RULE_THREADS as u32).shared(shared_bytes(KEY_DIMS[rule])),
            &[&sources(many)[..], &shape, &[int(layout.adjacent)]].concat(),
        )?;
        let shape = [layout.key_heads, heads, layout.adjacent].map(int);
        self.launch(
            &self.step,
            Launch::new([(single.len() * heads) as u32, 1, 1], STEP_THREADS as u32),
            &[&sources(single)[..], &shape].concat(),
        )?;

        let all_heads = rows * heads;
        let values = 2 * layout.keys();
        let args = [
            mixed.range(values.min(mixed.len())..mixed.len()).into(),
            int(channels),
            args.x.range(channels.min(args.x.len())..args.x.len()).into(),
            int(layout.width()),
            norm.into(),
            args.out.into(),
            int(all_heads),
            int(heads),
            int(layout.value_dim),
            eps.into(),
        ];
        let grid = all_heads.div_ceil(NORM_WARPS);
        self.launch(
            &self.norm,
            Launch::new([grid as u32, 1, 1], (NORM_WARPS * WARP) as u32),
            &args,
        )
    }

    /// Attention's output times the sigmoids of its gates: `out` is `[rows, n]`, `gates` are the `n` elements of each row of
    /// `gates`, `[rows, width]`, that begin at `first`. Twin of [`crate::sigmoid_gate`].
    ///
    /// # Errors
    /// [`GpuError`] of the launch.
    ///
    /// # Panics
    /// If a length does not fit, or `n`, `width` or `first` is no multiple of 8.
    pub fn sigmoid_gate(
        &self,
        out: GpuSlice<'_, bf16>,
        n: usize,
        gates: GpuSlice<'_, bf16>,
        width: usize,
        first: usize,
    ) -> Result<(), GpuError> {
        let rows = out.len() / n;
        assert!(
            first + n <= width && gates.len() == rows * width && out.len() == rows * n,
            "gates for every element"
        );
        assert!(
            [n, width, first].iter().all(|size| size.is_multiple_of(VEC)),
            "whole vectors, not {n} from {first} of {width}"
        );
        // Small blocks, so that a single row is spread over many multiprocessors.
        let threads = if rows < 16 { 64 } else { 256 };
        let blocks_per_row = (n / VEC).div_ceil(threads);
        let args = [
            out.into(),
            gates.range(first.min(gates.len())..gates.len()).into(),
            int(n),
            int(width),
            int(blocks_per_row),
        ];
        let grid = [(rows * blocks_per_row) as u32, 1, 1];
        self.launch(&self.sigmoid_gate, Launch::new(grid, threads as u32), &args)
    }

    fn launch(&self, kernel: &Function, launch: Launch, args: &[Arg]) -> Result<(), GpuError> {
        if launch.grid[0] == 0 {
            return Ok(());
        }
        // SAFETY: the methods pass what the kernels declare and check the lengths; indices are the caller's promise.
        unsafe { self.gpu.launch(kernel, launch.pdl(true), args) }
    }
}

/// A size of a layout that there are no kernels for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeltaBound {
    /// Which.
    pub name: DeltaSize,
    /// How large it is.
    pub size: usize,
    /// What it may be.
    pub supported: &'static str,
}

/// A size that [`DeltaKernels::check`] looks at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeltaSize {
    /// [`DeltaLayout::key_dim`].
    KeyDim,
    /// [`DeltaLayout::value_dim`].
    ValueDim,
    /// [`DeltaLayout::taps`].
    Taps,
}

/// Dynamic shared memory of the rule: `Stage` of the kernel, several times.
fn shared_bytes(key_dim: usize) -> usize {
    let rows = (2 * TOKENS * key_dim + (TOKENS + 1) * SLICE) * size_of::<bf16>();
    STAGES * (rows + (TOKENS + 2) * 2 * size_of::<f32>())
}

/// The first that is as large.
fn at_least<const N: usize>(sizes: [usize; N], size: usize) -> usize {
    let at = sizes.iter().position(|&large| large >= size);
    at.expect("the layout was checked")
}

/// The first `len` elements, and the others.
fn split<T: Pod>(all: GpuSlice<'_, T>, len: usize) -> (GpuSlice<'_, T>, GpuSlice<'_, T>) {
    (all.range(0..len), all.range(len..all.len()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::AssumedGpu;

    #[test]
    fn blocks_fit_on_every_gpu() {
        for gpu in AssumedGpu::EACH {
            for key_dim in KEY_DIMS {
                assert!(
                    gpu.blocks(shared_bytes(key_dim)) >= 1,
                    "heads of {key_dim} on {gpu:?}"
                );
            }
        }
    }

    #[test]
    fn sizes_without_kernels_are_named() {
        let layout = DeltaLayout {
            key_heads: 1,
            value_heads: 2,
            adjacent: 2,
            key_dim: 16,
            value_dim: 24,
            taps: 4,
        };
        assert_eq!(DeltaKernels::check(&layout), Ok(()));
        for (bad, name) in [
            (
                DeltaLayout {
                    key_dim: 12,
                    ..layout
                },
                DeltaSize::KeyDim,
            ),
            (
                DeltaLayout {
                    value_dim: 264,
                    ..layout
                },
                DeltaSize::ValueDim,
            ),
            (DeltaLayout { taps: 5, ..layout }, DeltaSize::Taps),
        ] {
            assert_eq!(DeltaKernels::check(&bad).unwrap_err().name, name);
        }
    }
}
