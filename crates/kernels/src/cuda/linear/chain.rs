//! Linear layers of one row that follow each other, with weights in bf16 or e4m3, in one launch: `kernels/linear_chain.cu`.

use std::collections::HashSet;
use std::sync::Arc;

use half::bf16;
use plimsoll_device::cuda::{Arg, Function, Gpu, GpuError, GpuSlab, GpuSlice, Launch};

use super::cublas_lt::WORKSPACE;
use super::exchange;
use super::key::{ChainKind, Kind};
use super::timer::Timer;
use super::{Fp8Scaling, GpuLinear, GpuValues, LinearOutput, LinearScratch, Linears};
use crate::Activation;
use crate::cuda::chain::{self, BYTES_IN_FLIGHT, GpuChainEnd, Matrix, PIECE, Projection, Ring, VEC};
use crate::cuda::{GpuNorm, has_hopper_kernels};

/// Constants of the kernel: threads that multiply and all threads, most vectors of a thread, and of one whose inputs are normalised, and
/// outputs of which a block adds all sums at once, however many a stage has (`kSumRows - kStageRows`).
const CONSUMERS: usize = 256;
const THREADS: usize = 288;
const MOST_VECS: usize = 14;
const MOST_NORM_VECS: usize = 4;
const LEAST_SUMS: usize = 112;
/// Shared memory beside the stages: at least `sizeof(Shared)`.
const STATIC_BYTES: usize = 5 << 10;
/// The kernels, by what weights are: without norms of what is added, and with them.
const KERNELS: [(GpuValues, [&str; 2]); 3] = [
    (
        GpuValues::Bf16,
        ["linear_chain_bf16", "linear_chain_sandwich_bf16"],
    ),
    (
        GpuValues::Fp8(Fp8Scaling::Rows),
        ["linear_chain_fp8_rows", "linear_chain_sandwich_fp8_rows"],
    ),
    (
        GpuValues::Fp8(Fp8Scaling::Blocks),
        ["linear_chain_fp8_blocks", "linear_chain_sandwich_fp8_blocks"],
    ),
];
/// A measurement makes at least so many calls.
const LEAST_CALLS: usize = 2;

/// Bytes behind the workspace of the other kernels, zero at first, where blocks of a chain exchange values: `Exchange` of
/// `kernels/include/moe_chain.cuh`. Its first word counts blocks, is zero between launches, and is all that `linear_chain.cu` uses.
pub(super) const CHAIN_BYTES: usize = 320 << 10;

/// From what a mixer gives to the projections that the next mixer begins with, for one row; the residual stream is complete before and
/// after.
#[derive(Clone, Copy, Debug)]
pub struct GpuChain<'a> {
    /// What the mixer gives: `[output.inputs()]`.
    pub x: GpuSlice<'a, bf16>,
    /// The mixer's last projection.
    pub output: &'a GpuLinear,
    /// The residual stream, to which the outputs of `output` and of `down` are added.
    pub hidden: GpuSlice<'a, bf16>,
    /// Of the residual stream, for `gate_up`.
    pub norm: GpuNorm<'a>,
    /// Of the MLP, gate, then up.
    pub gate_up: &'a GpuLinear,
    /// Of the gate.
    pub activation: Activation,
    /// Takes `activation(gate) * up`: `[down.inputs()]`.
    pub activated: GpuSlice<'a, bf16>,
    /// Of the MLP.
    pub down: &'a GpuLinear,
    /// Of a layer that has such norms.
    pub sum_norms: Option<SumNorms<'a>>,
    /// What follows, if it is to be computed too.
    pub next: Option<GpuChainEnd<'a>>,
}

/// Norms of what a mixer and an MLP add to the residual stream (Gemma 3, Gemma 4), with the eps of [`GpuChain::norm`].
#[derive(Clone, Copy, Debug)]
pub struct SumNorms<'a> {
    /// Of the mixer, `[width]`.
    pub mixer: GpuSlice<'a, f32>,
    /// Of the MLP, `[width]`.
    pub mlp: GpuSlice<'a, f32>,
    /// Multiplies the residual stream at the end, `[1]`.
    pub scalar: Option<GpuSlice<'a, f32>>,
    /// Room for what is added, `[width]`.
    pub delta: GpuSlice<'a, bf16>,
}

/// Layers of a chain to be measured.
#[derive(Clone, Copy, Debug)]
pub struct ChainUse<'a> {
    /// Each a mixer's output, gate and up, down, and what follows: measured in turn, so several keep the weights out of the cache.
    pub layers: &'a [[&'a GpuLinear; 4]],
    /// Of the gate.
    pub activation: Activation,
}

/// Adds the norm of what was computed last to the residual stream and normalises the sum, for one row, as a launch of its own:
/// [`FusedKernels::sandwich_norm`](crate::cuda::FusedKernels::sandwich_norm). It gets the weights of both norms, the residual stream, what
/// is added, and where the outputs go.
pub type AddNormed<'a> = dyn Fn(GpuNorm<'_>, [GpuSlice<'_, bf16>; 3]) -> Result<(), GpuError> + 'a;

#[derive(Debug)]
pub(super) struct ChainKernel {
    gpu: Gpu,
    /// For weights that are such values, which all layers of a chain up to the end of an MLP have, without norms of what is added and with
    /// them; on GPUs of Hopper's generation.
    functions: Vec<(GpuValues, [Function; 2])>,
    workspace: Arc<GpuSlab>,
    /// What was faster in one launch than one by one.
    pub(super) faster: HashSet<ChainKind>,
}

/// Bytes of a row of weights of a layer that the kernel can compute.
fn row_bytes(linear: &GpuLinear) -> Option<usize> {
    chain::row_bytes(linear).filter(|_| linear.k <= MOST_VECS * CONSUMERS * VEC)
}

impl ChainKernel {
    /// `workspace` has [`CHAIN_BYTES`] behind what the other kernels use.
    pub(super) fn load(gpu: &Gpu, workspace: &Arc<GpuSlab>) -> Result<Self, GpuError> {
        let names: Vec<&str> = KERNELS.iter().flat_map(|(_, names)| *names).collect();
        let functions = chain::load(gpu, "linear_chain", &names, THREADS, STATIC_BYTES)?;
        let (pairs, _) = functions.as_chunks::<2>();
        let of_values = KERNELS.iter().zip(pairs);
        let of_values = of_values.map(|((values, _), pair)| (*values, pair.clone()));
        if has_hopper_kernels(gpu) {
            gpu.fill(chain_room(workspace), 0)?;
        }
        Ok(Self {
            gpu: gpu.clone(),
            functions: of_values.collect(),
            workspace: Arc::clone(workspace),
            faster: HashSet::new(),
        })
    }

    /// The kernel and its ring for the layers up to the end of an MLP and these projections, whose weights may be bf16 beside others, if it can
    /// compute them.
    fn kernel(
        &self,
        [output, gate_up, down]: [&GpuLinear; 3],
        next: Option<&GpuLinear>,
    ) -> Option<(&[Function; 2], Ring)> {
        let (width, sm_count) = (output.n, self.gpu.info().sm_count);
        let values = output.matrix().values()?;
        let (_, functions) = self.functions.iter().find(|(of, _)| *of == values)?;
        let has = |linear: &GpuLinear, values: GpuValues| linear.matrix().values() == Some(values);
        let is_beside_others = |next: &GpuLinear| {
            let products = next.products();
            let is_taken = |linear: &GpuLinear| has(linear, values) || has(linear, GpuValues::Bf16);
            products.iter().all(is_taken) && products.iter().any(|linear| has(linear, values))
        };
        let fit = has(gate_up, values)
            && has(down, values)
            && next.is_none_or(is_beside_others)
            && down.n == width
            && gate_up.bias.is_none()
            && gate_up.n == 2 * down.k
            && width <= MOST_NORM_VECS * CONSUMERS * VEC
            && width.div_ceil(sm_count) <= LEAST_SUMS
            && [Some(gate_up), next]
                .into_iter()
                .flatten()
                .all(|linear| linear.k == width);
        let stages = [
            row_bytes(output),
            row_bytes(gate_up).map(|bytes| 2 * bytes),
            row_bytes(down),
            next.map_or(Some(0), chain::longest_row),
        ];
        let ring = Ring::new(stages, self.gpu.info().max_shared_bytes - STATIC_BYTES)?;
        fit.then_some((functions, ring))
    }
}

impl Linears {
    /// Whether [`Self::forward_chain`] can compute these layers for one row: a mixer's output, gate and up, down, and the next projections
    /// if they are to be a part of it.
    pub fn can_chain(&self, layers: [&GpuLinear; 3], next: Option<&GpuLinear>) -> bool {
        self.chain.kernel(layers, next).is_some()
    }

    /// Whether it should: [`Self::measure_chain`] found layers like these faster so, with what followed them there, and with or without norms
    /// of what is added.
    pub fn chains(&self, layers: [&GpuLinear; 3], sum_norms: bool) -> bool {
        self.fixed.is_none()
            && self.can_chain(layers, None)
            && self.chain.faster.contains(&chain_kind(layers, sum_norms))
    }

    /// Measures whether layers are faster in one launch than one by one, for which [`Self::measure`] was called: with norms of what is added
    /// ([`SumNorms`]) if there is `add_normed`, which makes them where layers are computed one by one. Returns the microseconds of both;
    /// `None` if they cannot be one launch, or there is not enough room.
    ///
    /// # Errors
    /// [`GpuError`] of the device.
    ///
    /// # Panics
    /// If there are no layers.
    pub fn measure_chain(
        &mut self,
        of: ChainUse<'_>,
        add_normed: Option<&AddNormed<'_>>,
        scratch: LinearScratch<'_>,
    ) -> Result<Option<[f32; 2]>, GpuError> {
        let ChainUse { layers, activation } = of;
        let [output, gate_up, down, next] = *layers.first().expect("layers to measure");
        let fits = |[output, gate_up, down, next]: [&GpuLinear; 4]| {
            self.can_chain([output, gate_up, down], Some(next))
        };
        let out = scratch.out.cast::<bf16>();
        let (room, width) = (scratch.x.len().min(out.len()), output.n.next_multiple_of(64));
        // Norms are of four bytes.
        let parts = [output.k, 2 * width, width, down.k, next.n, width];
        let ends = parts.iter().scan(0, |end, part| {
            *end += part.next_multiple_of(64);
            Some(*end)
        });
        let ends: Vec<usize> = ends.collect();
        if !layers.iter().all(|layers| fits(*layers)) || ends[5] > room {
            return Ok(None);
        }
        let outputs = [
            LinearOutput::Bf16,
            LinearOutput::Glu(activation),
            LinearOutput::Bf16,
            LinearOutput::Bf16,
        ];
        let known = |(linear, output): (&GpuLinear, LinearOutput)| {
            let products = linear.products().iter();
            products
                .map(|product| self.measured_us(product, 1, output))
                .sum::<Option<f32>>()
        };
        let one_by_one = [output, gate_up, down, next].into_iter().zip(outputs);
        let Some(known) = one_by_one.map(known).sum::<Option<f32>>() else {
            return Ok(None);
        };
        let part = |of: usize| ends[of] - parts[of].next_multiple_of(64)..ends[of];
        let bytes = |of: usize| scratch.x.range(part(of));
        let norm = GpuNorm {
            weight: bytes(1).cast::<f32>().range(0..output.n),
            eps: 1.0,
        };
        let row = |of: usize| out.range(part(of)).range(0..output.n);
        let (hidden, delta, normed) = (row(2), row(5), row(1));
        let timer = Timer::new(&self.gpu)?;
        let time = |launch: &dyn Fn([&GpuLinear; 4]) -> Result<(), GpuError>| {
            let recorded = timer.record(layers.len().max(LEAST_CALLS), |call| {
                launch(layers[call % layers.len()])?;
                self.stream.pause()
            })?;
            timer.start(&recorded)?;
            timer.finish(&recorded, f32::INFINITY)
        };
        let us = time(&|[output, gate_up, down, next]| {
            self.forward_chain(&GpuChain {
                x: bytes(0).range(0..output.k),
                output,
                hidden,
                norm,
                gate_up,
                activation,
                activated: out.range(part(3)).range(0..down.k),
                down,
                sum_norms: add_normed.map(|_| SumNorms {
                    mixer: norm.weight,
                    mlp: norm.weight,
                    scalar: None,
                    delta,
                }),
                next: Some(GpuChainEnd {
                    norm,
                    linear: next,
                    out: out.range(part(4)).range(0..next.n),
                }),
            })
        })?;
        let apart = match add_normed {
            // Pauses behind products stand for norms, or for what products that make their norm take longer.
            None => known,
            // A norm of a sum takes longer than a pause, and no product makes it.
            Some(add_normed) => time(&|layers| {
                for (at, (linear, output)) in layers.into_iter().zip(outputs).enumerate() {
                    if at % 2 == 1 {
                        add_normed(norm, [hidden, delta, normed])?;
                    }
                    self.launch_measured(linear, output, &scratch)?;
                }
                Ok(())
            })?,
        };
        if us < apart {
            let kind = chain_kind([output, gate_up, down], add_normed.is_some());
            self.chain.faster.insert(kind);
        }
        Ok(Some([us, apart]))
    }

    /// Where blocks of a chain exchange values. Only one such launch may run at a time.
    pub(crate) fn chain_room(&self) -> GpuSlice<'_, u8> {
        chain_room(&self.chain.workspace)
    }

    /// Computes the layers of a chain in one launch, for one row.
    ///
    /// # Errors
    /// [`GpuError`] of the launch.
    ///
    /// # Panics
    /// If a length does not fit, or it cannot be used: ask [`Self::can_chain`].
    pub fn forward_chain(&self, chain: &GpuChain<'_>) -> Result<(), GpuError> {
        let &GpuChain {
            x,
            output,
            hidden,
            norm,
            gate_up,
            activation,
            activated,
            down,
            sum_norms,
            next,
        } = chain;
        let kernel = &self.chain;
        let found = kernel.kernel([output, gate_up, down], next.map(|next| next.linear));
        let (functions, ring) = found.expect("ask `can_chain`");
        let width = output.n;
        assert_eq!((x.len(), hidden.len()), (output.k, width), "one row");
        assert_eq!((norm.weight.len(), activated.len()), (width, down.k), "one row");
        if let Some(next) = &next {
            assert_eq!(
                (next.norm.weight.len(), next.out.len()),
                (width, next.linear.n),
                "one row"
            );
        }
        if let Some(norms) = &sum_norms {
            let lengths = [norms.mixer.len(), norms.mlp.len(), norms.delta.len()];
            assert_eq!(lengths, [width; 3], "one row");
            assert!(norms.scalar.is_none_or(|scalar| scalar.len() == 1), "one number");
        }
        let of_norms = |pick: fn(&SumNorms<'_>) -> u64| sum_norms.as_ref().map_or(0, pick);
        let sum_args = [
            of_norms(|norms| norms.delta.ptr()),
            of_norms(|norms| norms.mixer.ptr()),
            of_norms(|norms| norms.mlp.ptr()),
        ];
        let next_weight = next.map_or(0, |next| next.norm.weight.ptr());
        let aligned = [
            x.ptr(),
            hidden.ptr(),
            activated.ptr(),
            norm.weight.ptr(),
            next_weight,
        ];
        assert!(
            aligned.into_iter().chain(sum_args).all(chain::is_aligned),
            "rows at multiples of {PIECE} bytes"
        );
        let bias = |linear: &GpuLinear| Arg::from(linear.operands().bias);
        let int = |value: usize| Arg::from(value as i32);
        let [of_output, of_gate_up, of_down] =
            [output, gate_up, down].map(|linear| Matrix::of(linear).args());
        let args: Vec<Arg> = [
            &[x.into()][..],
            &of_output,
            &[bias(output)],
            &of_gate_up,
            &of_down,
            &[bias(down)],
            &Projection::all(next).map(Projection::args).concat(),
            &[
                hidden.into(),
                norm.weight.into(),
                next_weight.into(),
                activated.into(),
                chain_room(&kernel.workspace).into(),
                int(x.len()),
                int(width),
                int(activated.len()),
                norm.eps.into(),
                next.map_or(0.0, |next| next.norm.eps).into(),
                LinearOutput::Glu(activation).activation().into(),
                int(ring.stage_bytes),
                int(ring.stages),
                int((BYTES_IN_FLIGHT / ring.stage_bytes).max(2)),
            ],
            &sum_args.map(Arg::from),
            &[of_norms(|norms| norms.scalar.map_or(0, |scalar| scalar.ptr())).into()],
        ]
        .concat();
        let launch = Launch::new([kernel.gpu.info().sm_count as u32, 1, 1], THREADS as u32)
            .shared(ring.bytes())
            .pdl(true);
        // SAFETY: the lengths were checked; the arguments are those that kernels/linear_chain.cu lists. Its blocks wait for each
        // other: there is one for each multiprocessor, which has room for it once the kernels ahead have ended. The GPU has one stream for
        // kernels, so no other of this kind runs beside it; a wait that lasts too long ends the kernel with an error.
        unsafe { (kernel.gpu).launch(&functions[usize::from(sum_norms.is_some())], launch, &args) }
    }
}

/// What decides how fast layers are for one row, up to the end of an MLP, with norms of what is added or without.
fn chain_kind(layers: [&GpuLinear; 3], sum_norms: bool) -> ChainKind {
    ChainKind {
        layers: layers.map(|linear| Kind::from(&linear.key(1, LinearOutput::Bf16))),
        sum_norms,
    }
}

fn chain_room(workspace: &GpuSlab) -> GpuSlice<'_, u8> {
    let start = WORKSPACE + exchange::BYTES;
    workspace.slice().range(start..start + CHAIN_BYTES)
}
