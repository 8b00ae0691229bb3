//! Whole layers of one row, with their attention, in one launch: `kernels/layer_chain.cu`.

use std::collections::HashSet;
use std::sync::Arc;

use bytemuck::{Pod, Zeroable};
use half::bf16;
use plimsoll_device::cuda::{Function, Gpu, GpuError, GpuSlab, GpuSlice, Launch};

use super::chain::CHAIN_BYTES;
use super::cublas_lt::WORKSPACE;
use super::exchange;
use super::key::Kind;
use super::timer::Timer;
use super::{GpuLinear, GpuValues, LinearOutput, LinearScratch, Linears};
use crate::cuda::chain::{self, BYTES_IN_FLIGHT, GpuChainEnd, VEC, is_aligned};
use crate::cuda::{GpuKv, GpuKvElement, GpuNorm, GpuQkNorm, GpuRope, GpuRun, has_hopper_kernels};
use crate::{Activation, KvLayout};

/// Constants of the kernels, `kernels/include/layer_chain.cuh`: threads, most layers of a launch, widths, outputs of a block that are added
/// to the residual stream or may have a bias, and blocks. With the least width every block has a part of the residual stream, and chunks of
/// gate and up are long enough for the ring.
const THREADS: usize = 384;
const MOST_LAYERS: usize = 32;
const LEAST_WIDTH: usize = 512;
const MOST_WIDTH: usize = 2048;
const MOST_PROJECTED: usize = 4096;
const MOST_INNER: usize = 11520;
const MOST_OUTPUTS: usize = 24;
const MOST_BIASES: usize = 64;
const MOST_BLOCKS: usize = 160;
/// Inputs of every product are a multiple of so many.
const STEP: usize = 128;
/// Tokens that lie together in the cache.
const TILE: usize = 16;
/// Shared memory beside the ring: `kStaticBytes`.
const STATIC_BYTES: usize = 32 << 10;
/// The kernels, by the size of a head and the most inputs of a product, but of `down`.
const KERNELS: [(usize, usize, &str); 4] = [
    (64, 1024, "layer_chain_64_4"),
    (64, MOST_WIDTH, "layer_chain_64_8"),
    (128, 1024, "layer_chain_128_4"),
    (128, MOST_WIDTH, "layer_chain_128_8"),
];
/// `kMostSplits`: blocks that attend for one head at most.
const MOST_SPLITS: usize = 9;
/// Cached tokens for each block that attends, up to which layers were faster in one launch: heads of 14, 16 (of 128) and 32 (of 64) took as
/// long as with kernels of their own at 1,290, 1,200 and 925 (`tests/bench/h200/kernels.md`).
const MOST_TOKENS: usize = 896;
/// Tokens that a measurement attends to.
const MEASURED_CONTEXT: usize = 256;
/// A measurement makes so many calls.
const CALLS: usize = 2;

/// Bytes behind those of [`GpuChain`](super::GpuChain), zero at first, where blocks exchange values: `LayerExchange` of
/// `kernels/include/layer_chain.cuh`.
pub(super) const LAYER_BYTES: usize = 256 << 10;

/// The products of a layer, all of one row.
#[derive(Clone, Copy, Debug)]
pub struct RowLayerProducts<'a> {
    /// To q, k and v.
    pub projections: &'a GpuLinear,
    /// From what is attended.
    pub output: &'a GpuLinear,
    /// Of the MLP, gate, then up.
    pub gate_up: &'a GpuLinear,
    /// Of the MLP.
    pub down: &'a GpuLinear,
}

impl<'a> RowLayerProducts<'a> {
    /// In the order in which they are computed.
    fn all(&self) -> [&'a GpuLinear; 4] {
        [self.projections, self.output, self.gate_up, self.down]
    }
}

/// A layer of [`GpuRowLayers`], from its q, k and v on.
#[derive(Clone, Copy, Debug)]
pub struct GpuRowLayer<'a> {
    /// Its products; the first is that of the layer before.
    pub products: RowLayerProducts<'a>,
    /// Of the heads of q and k, before the rotation.
    pub qk_norm: Option<GpuQkNorm<'a>>,
    /// Keys and values, of 16 bits.
    pub kv: GpuKv<'a>,
    /// Of the residual stream, for the MLP.
    pub norm: GpuNorm<'a>,
    /// Of the residual stream, for `projections`: what the layer before ends with.
    pub first_norm: GpuNorm<'a>,
}

/// Attention that all layers of [`GpuRowLayers`] have alike, without a window, soft cap, sinks or gates.
#[derive(Clone, Copy, Debug)]
pub struct GpuRowAttention<'a> {
    /// Query heads.
    pub heads: usize,
    /// Of the cache.
    pub layout: KvLayout,
    /// Multiplies the scores.
    pub scale: f32,
    /// Of whole heads, with one number for a position and nothing for queries.
    pub rope: GpuRope<'a>,
    /// The row's: its context ends behind the row.
    pub run: GpuSlice<'a, GpuRun>,
    /// Its block table.
    pub blocks: GpuSlice<'a, i32>,
    /// Where the row's key and value go: block × block size + offset, or -1 to write nothing.
    pub slot: GpuSlice<'a, i32>,
}

/// Layers that follow each other, of one row, from q, k and v of the first on; the residual stream is complete before and after.
///
/// `run`, `blocks`, `slot` and positions, and keys and values of all positions but the row's, are read while kernels ahead may still run, as
/// [`DecodeArgs`](crate::cuda::DecodeArgs) says.
#[derive(Clone, Copy, Debug)]
pub struct GpuRowLayers<'a> {
    /// At most [`Linears::MOST_ROW_LAYERS`], with one `eps` for all their norms.
    pub layers: &'a [GpuRowLayer<'a>],
    /// Of all of them.
    pub attention: GpuRowAttention<'a>,
    /// Of the gates.
    pub activation: Activation,
    /// q, k and v of the first layer, as it projects them.
    pub projected: GpuSlice<'a, bf16>,
    /// The residual stream.
    pub hidden: GpuSlice<'a, bf16>,
    /// The projections that follow, if they are to be computed too: of as many outputs as those of the layers.
    pub next: Option<GpuChainEnd<'a>>,
}

/// Layers to be measured.
#[derive(Clone, Copy, Debug)]
pub struct RowLayersUse<'a> {
    /// In one launch, as far as there is room; several keep the weights out of the cache.
    pub layers: &'a [RowLayerProducts<'a>],
    /// Query heads.
    pub heads: usize,
    /// Of the cache.
    pub layout: KvLayout,
    /// Of the gates.
    pub activation: Activation,
    /// Microseconds of a layer's products otherwise.
    pub apart: f32,
}

/// `ChainLayer` of the kernels: addresses, or 0.
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
#[repr(C)]
struct Layer {
    output: u64,
    gate_up: u64,
    down: u64,
    next: u64,
    output_bias: u64,
    down_bias: u64,
    next_bias: u64,
    norm: u64,
    next_norm: u64,
    q_norm: u64,
    k_norm: u64,
    k: u64,
    v: u64,
}

/// `LayerChain` of the kernels.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
struct Args {
    layers: [Layer; MOST_LAYERS],
    projected: u64,
    hidden: u64,
    out: u64,
    exchange: u64,
    run: u64,
    blocks: u64,
    slot: u64,
    position: u64,
    frequencies: u64,
    count: i32,
    width: i32,
    inner: i32,
    projected_width: i32,
    heads: i32,
    kv_heads: i32,
    block_shift: i32,
    block_stride: i32,
    ring_bytes: i32,
    in_flight: i32,
    eps: f32,
    head_eps: f32,
    turn_factor: f32,
    scale: f32,
    activation: i32,
    padding: i32,
}

#[derive(Debug)]
pub(super) struct LayerKernels {
    gpu: Gpu,
    /// As [`KERNELS`]; none where the GPU cannot run them.
    functions: Vec<Function>,
    workspace: Arc<GpuSlab>,
    /// Layers that were faster so than as launches of their own.
    pub(super) faster: HashSet<[Kind; 4]>,
}

impl LayerKernels {
    /// `workspace` has [`LAYER_BYTES`] behind those of chains.
    pub(super) fn load(gpu: &Gpu, workspace: &Arc<GpuSlab>) -> Result<Self, GpuError> {
        let names = KERNELS.map(|(.., name)| name);
        let functions = chain::load(gpu, "layer_chain", &names, THREADS, STATIC_BYTES)?;
        if has_hopper_kernels(gpu) {
            gpu.fill(room(workspace), 0)?;
        }
        Ok(Self {
            gpu: gpu.clone(),
            functions,
            workspace: Arc::clone(workspace),
            faster: HashSet::new(),
        })
    }

    fn ring_bytes(&self) -> usize {
        (self.gpu.info().max_shared_bytes - STATIC_BYTES) / 128 * 128
    }

    /// The kernel for such layers, if there is one.
    fn kernel(&self, products: &RowLayerProducts<'_>, heads: usize, layout: &KvLayout) -> Option<&Function> {
        let all = products.all();
        let [projections, output, gate_up, down] = all;
        let (width, inner, sm_count) = (output.n, down.k, self.gpu.info().sm_count);
        let rows = all.map(|linear| {
            let is_bf16 = linear.matrix().values() == Some(GpuValues::Bf16);
            chain::row_bytes(linear).filter(|_| is_bf16)
        });
        // Two rows go through the ring at once.
        let fits = |bytes: usize| 4 * bytes <= self.ring_bytes();
        let heads_of_all = heads + 2 * layout.kv_heads;
        let can = rows.iter().all(|bytes| bytes.is_some_and(fits))
            && all.iter().all(|linear| linear.k.is_multiple_of(STEP))
            && heads.is_multiple_of(layout.kv_heads)
            && output.k == heads * layout.head_dim
            && (gate_up.k, gate_up.n, down.n) == (width, 2 * inner, width)
            && (projections.k, projections.n) == (width, heads_of_all * layout.head_dim)
            && gate_up.bias.is_none()
            && (LEAST_WIDTH..=MOST_WIDTH).contains(&width)
            && inner <= MOST_INNER
            && (sm_count..=MOST_PROJECTED).contains(&projections.n)
            && width.div_ceil(sm_count) <= MOST_OUTPUTS
            && projections.n.div_ceil(sm_count) <= MOST_BIASES
            && heads <= sm_count
            && sm_count <= MOST_BLOCKS
            && layout.block_size.tokens().is_multiple_of(TILE);
        let longest = width.max(output.k);
        let fitting = |(dim, most, _): &(usize, usize, &str)| *dim == layout.head_dim && longest <= *most;
        let at = KERNELS.iter().position(fitting)?;
        self.functions.get(at).filter(|_| can)
    }
}

impl Linears {
    /// Layers of a launch of [`Self::forward_row_layers`].
    pub const MOST_ROW_LAYERS: usize = MOST_LAYERS;

    /// Cached tokens up to which [`Self::forward_row_layers`] is faster with so many query heads: it reads keys and values once for each of
    /// them.
    pub fn longest_row_context(&self, heads: usize) -> usize {
        (self.gpu.info().sm_count / heads).min(MOST_SPLITS) * MOST_TOKENS
    }

    /// Whether [`Self::forward_row_layers`] can compute layers like this one.
    pub fn can_chain_layer(&self, products: &RowLayerProducts<'_>, heads: usize, layout: &KvLayout) -> bool {
        self.layers.kernel(products, heads, layout).is_some()
    }

    /// Whether it should: [`Self::measure_row_layers`] found layers like it faster so.
    pub fn chains_layer(&self, products: &RowLayerProducts<'_>, heads: usize, layout: &KvLayout) -> bool {
        self.fixed.is_none()
            && self.can_chain_layer(products, heads, layout)
            && self.layers.faster.contains(&kinds(products))
    }

    /// Measures whether layers are faster in one launch, with their attention, than their products alone are otherwise. Returns the
    /// microseconds of a layer; `None` if they cannot be one launch, or there is not enough room.
    ///
    /// # Errors
    /// [`GpuError`] of the device.
    pub fn measure_row_layers(
        &mut self,
        of: RowLayersUse<'_>,
        scratch: LinearScratch<'_>,
    ) -> Result<Option<f32>, GpuError> {
        let RowLayersUse {
            layers,
            heads,
            layout,
            activation,
            apart,
        } = of;
        let layers = &layers[..layers.len().min(MOST_LAYERS)];
        let Some(&first) = layers.first() else {
            return Ok(None);
        };
        let can = |products: &RowLayerProducts<'_>| {
            self.can_chain_layer(products, heads, &layout) && kinds(products) == kinds(&first)
        };
        let (width, projected, block) = (first.output.n, first.projections.n, layout.elements(1));
        let (pairs, blocks) = (
            layout.head_dim / 2,
            MEASURED_CONTEXT.div_ceil(layout.block_size.tokens()),
        );
        // All of a context's blocks are one. Norms are of four bytes; numbers lie apart from each other.
        const NUMBERS: usize = 256;
        let out_bytes = (width + projected) * size_of::<bf16>() + 4 * NUMBERS + pairs * size_of::<[f32; 2]>();
        let x_elements = 2 * width.next_multiple_of(64) + 2 * block;
        if !layers.iter().all(can)
            || scratch.x.len() < x_elements
            || scratch.out.len() < out_bytes + NUMBERS
            || blocks * size_of::<i32>() > NUMBERS
        {
            return Ok(None);
        }
        let numbers = scratch.out.range(0..4 * NUMBERS + pairs * size_of::<[f32; 2]>());
        self.gpu.fill(numbers, 0)?;
        let part = |at: usize, bytes: usize| numbers.range(at * NUMBERS..at * NUMBERS + bytes);
        let run = part(0, size_of::<GpuRun>()).cast::<GpuRun>();
        let context = GpuRun {
            len: 1,
            context_end: MEASURED_CONTEXT as i32,
            ..GpuRun::default()
        };
        self.gpu.upload(&[context], run)?;
        let rows_at = numbers.len().next_multiple_of(NUMBERS);
        let row = |at: usize, elements: usize| {
            let bytes = rows_at + at * size_of::<bf16>();
            scratch
                .out
                .range(bytes..bytes + elements * size_of::<bf16>())
                .cast::<bf16>()
        };
        let norm = GpuNorm {
            weight: scratch.x.range(0..2 * width).cast::<f32>(),
            eps: 1.0,
        };
        let cache_at = 2 * width.next_multiple_of(64);
        let cache = |at: usize| {
            scratch
                .x
                .range(cache_at + at * block..cache_at + (at + 1) * block)
                .cast::<u8>()
        };
        let kv = GpuKv {
            k: cache(0),
            v: cache(1),
            block_stride: block,
            element: GpuKvElement::Bf16,
            k_scale: 1.0,
            v_scale: 1.0,
        };
        let layer = |&products| GpuRowLayer {
            products,
            qk_norm: None,
            kv,
            norm,
            first_norm: norm,
        };
        let measured: Vec<_> = layers.iter().map(layer).collect();
        let timer = Timer::new(&self.gpu)?;
        let recorded = timer.record(CALLS, |_| {
            self.forward_row_layers(&GpuRowLayers {
                layers: &measured,
                attention: GpuRowAttention {
                    heads,
                    layout,
                    scale: 1.0,
                    rope: GpuRope {
                        positions: part(1, size_of::<i32>()).cast::<i32>(),
                        axes: None,
                        frequencies: numbers.range(4 * NUMBERS..numbers.len()).cast::<f32>(),
                        factor: 1.0,
                        query_scale: None,
                    },
                    run,
                    blocks: part(2, blocks * size_of::<i32>()).cast::<i32>(),
                    slot: part(3, size_of::<i32>()).cast::<i32>(),
                },
                activation,
                projected: row(width.next_multiple_of(VEC), projected),
                hidden: row(0, width),
                next: None,
            })?;
            self.stream.pause()
        })?;
        timer.start(&recorded)?;
        let us = timer.finish(&recorded, f32::INFINITY)? / layers.len() as f32;
        if us < apart {
            self.layers.faster.insert(kinds(&first));
        }
        Ok(Some(us))
    }

    /// Computes layers in one launch, for one row.
    ///
    /// # Errors
    /// [`GpuError`] of the launch.
    ///
    /// # Panics
    /// If something is not as documented, or it cannot be used: ask [`Self::can_chain_layer`].
    pub fn forward_row_layers(&self, of: &GpuRowLayers<'_>) -> Result<(), GpuError> {
        let GpuRowAttention {
            heads,
            ref layout,
            scale,
            rope,
            run,
            blocks,
            slot,
        } = of.attention;
        let kernels = &self.layers;
        assert!(
            (1..=MOST_LAYERS).contains(&of.layers.len()),
            "{} layers",
            of.layers.len()
        );
        let first = &of.layers[0];
        let found = kernels.kernel(&first.products, heads, layout);
        let function = found.expect("ask `can_chain_layer`");
        let width = first.products.output.n;
        let (projected, inner) = (first.products.projections.n, first.products.down.k);
        assert_eq!(
            (of.projected.len(), of.hidden.len()),
            (projected, width),
            "one row"
        );
        assert_eq!((rope.rows(), run.len(), slot.len()), (1, 1, 1), "one row");
        assert!(
            rope.axes.is_none() && rope.query_scale.is_none() && rope.frequencies.len() == layout.head_dim,
            "whole heads are rotated, and nothing else"
        );
        let norms = of.layers.iter().map(|layer| (layer.norm, layer.first_norm));
        let ends = of.next.map(|next| next.norm);
        let mut norms = norms.flat_map(|(norm, first)| [norm, first]).chain(ends);
        let eps = first.norm.eps;
        assert!(
            norms.all(|norm| norm.weight.len() == width && norm.eps == eps && is_aligned(norm.weight.ptr())),
            "norms of {width} inputs, alike"
        );
        if let Some(next) = &of.next {
            assert_eq!(
                (next.linear.k, next.linear.n, next.out.len()),
                (width, projected, projected)
            );
            assert!(
                chain::row_bytes(next.linear).is_some()
                    && next.linear.matrix().values() == Some(GpuValues::Bf16)
            );
        }
        assert!(is_aligned(of.projected.ptr()) && is_aligned(of.hidden.ptr()));
        let mut args = Args {
            projected: of.projected.ptr(),
            hidden: of.hidden.ptr(),
            out: of.next.map_or(0, |next| next.out.ptr()),
            exchange: room(&kernels.workspace).ptr(),
            run: run.ptr(),
            blocks: blocks.ptr(),
            slot: slot.ptr(),
            position: rope.positions.ptr(),
            frequencies: rope.frequencies.ptr(),
            count: of.layers.len() as i32,
            width: width as i32,
            inner: inner as i32,
            projected_width: projected as i32,
            heads: heads as i32,
            kv_heads: layout.kv_heads as i32,
            block_shift: layout.block_size.tokens().ilog2() as i32,
            block_stride: first.kv.block_stride as i32,
            ring_bytes: kernels.ring_bytes() as i32,
            in_flight: BYTES_IN_FLIGHT as i32,
            eps,
            head_eps: first.qk_norm.map_or(0.0, |norm| norm.eps),
            turn_factor: rope.factor,
            scale,
            activation: LinearOutput::Glu(of.activation).activation(),
            ..Args::zeroed()
        };
        let following = of.layers[1..]
            .iter()
            .map(|layer| (layer.first_norm, layer.products.projections));
        let ends = following
            .map(Some)
            .chain([of.next.map(|next| (next.norm, next.linear))]);
        for ((layer, next), to) in of.layers.iter().zip(ends).zip(&mut args.layers) {
            let products = &layer.products;
            let is_alike = kernels.kernel(products, heads, layout).is_some()
                && (products.output.n, products.down.k) == (width, inner)
                && layer.kv.block_stride == first.kv.block_stride
                && layer.kv.element == GpuKvElement::Bf16
                && layer.qk_norm.map(|norm| norm.eps) == first.qk_norm.map(|norm| norm.eps);
            assert!(is_alike, "layers of one kind");
            layer.kv.block_rows(layout);
            assert!(is_aligned(layer.kv.k.ptr()) && is_aligned(layer.kv.v.ptr()));
            let of_heads = layer.qk_norm.map_or([0; 2], |norm| {
                assert_eq!((norm.q.len(), norm.k.len()), (layout.head_dim, layout.head_dim));
                [norm.q.ptr(), norm.k.ptr()]
            });
            *to = Layer {
                output: weights(products.output),
                gate_up: weights(products.gate_up),
                down: weights(products.down),
                next: next.map_or(0, |(_, linear)| weights(linear)),
                output_bias: products.output.operands().bias,
                down_bias: products.down.operands().bias,
                next_bias: next.map_or(0, |(_, linear)| linear.operands().bias),
                norm: layer.norm.weight.ptr(),
                next_norm: next.map_or(0, |(norm, _)| norm.weight.ptr()),
                q_norm: of_heads[0],
                k_norm: of_heads[1],
                k: layer.kv.k.ptr(),
                v: layer.kv.v.ptr(),
            };
        }
        let launch = Launch::new([kernels.gpu.info().sm_count as u32, 1, 1], THREADS as u32)
            .shared(kernels.ring_bytes())
            .pdl(true);
        // SAFETY: the lengths were checked; the argument is that of kernels/layer_chain.cu. As for `forward_chain`, its blocks all run at
        // once, and alone.
        unsafe { kernels.gpu.launch_with_struct(function, launch, &args) }
    }
}

/// Address of weights in bf16.
fn weights(linear: &GpuLinear) -> u64 {
    linear.operands().weight
}

/// What decides how fast a layer is for one row.
fn kinds(products: &RowLayerProducts<'_>) -> [Kind; 4] {
    let kind = |linear: &GpuLinear| Kind::from(&linear.key(1, LinearOutput::Bf16));
    products.all().map(kind)
}

fn room(workspace: &GpuSlab) -> GpuSlice<'_, u8> {
    let start = WORKSPACE + exchange::BYTES + CHAIN_BYTES;
    workspace.slice().range(start..start + LAYER_BYTES)
}
