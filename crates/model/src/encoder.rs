//! The encoder of images on a CPU: the blocks' operations on `f32` activations in an arena of its own.
//!
//! Images are encoded inside the step that first needs them, before the decoder's layers, one at a time: a CPU has no second
//! queue on which they could overlap with other steps.

mod cache;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use plimsoll_core::{BlockSize, Component, Image, ImageGrid, Oom, PageId, Scratch};
use plimsoll_device::{Arena, Budget, DryArena};
use plimsoll_kernels::{
    AttentionOptions, CachedValues, Gelu, KvLayout, Linear, LinearShape, PagedKvMut, Rotation, RunMeta,
    WeightType, attention, attention_scratch, gelu, layer_norm, qk_norm_rope_kv_write, rope_angles_of_axes,
};

use crate::blocks::{self, EncoderLayer, EncoderOperations, LayerNorm, Merger};
use crate::weights::Loader;
use crate::{EncoderSpec, ModelError};
pub(crate) use cache::{Embeddings, EncodedImage, KeptImages, PAGE, place};

/// Tokens of a page of the keys and values of an image: whole vectors.
const BLOCK: usize = 32;

/// The encoder's weights.
#[derive(Debug)]
pub(crate) struct Encoder {
    pub(crate) spec: EncoderSpec,
    weights: blocks::Encoder<Arc<Linear>, Vec<f32>>,
    /// Bytes of an arena in which the largest image can be encoded.
    scratch: u64,
}

impl Encoder {
    pub(crate) fn load(spec: &EncoderSpec, loader: &mut Loader<'_>) -> Result<Self, ModelError> {
        let weights = blocks::Encoder::visit(spec, loader)?;
        // All are stored in floats, and products of floats take nothing from the arena.
        let shapes = weights.map_linear(&|linear: &Arc<Linear>| LinearShape {
            inputs: linear.inputs(),
            parts: vec![(WeightType::F32, linear.outputs())],
        });
        let mut arena = DryArena::default();
        Ok(Self {
            scratch: count(spec, &shapes, &mut arena).map_or(u64::MAX, |()| arena.take_high_water() as u64),
            spec: spec.clone(),
            weights,
        })
    }

    /// Encodes one image: hands rows `[grid.patches() / merge², out_size]` to `emit`, part by part
    /// ([`EncoderOperations::merge`]).
    pub(crate) fn forward(
        &self,
        image: &Image,
        arena: &Arena,
        emit: &mut dyn FnMut(usize, &[f32]),
    ) -> Result<(), Oom> {
        let spec = &self.spec;
        let [
            hidden,
            normed,
            qkv,
            q,
            attended,
            inner,
            angles,
            merged,
            keys,
            values,
        ] = activations(spec, image.grid).map(|len| arena.alloc::<f32>(len));
        let angles = angles?;
        rotate(spec, image.grid, angles);
        let mut step = Step {
            spec,
            image,
            arena,
            emit,
            pages: (0..pages(image.grid) as u32).map(PageId).collect(),
            hidden: hidden?,
            normed: normed?,
            qkv: qkv?,
            q: q?,
            attended: attended?,
            inner: inner?,
            angles,
            merged: merged?,
            keys: keys?,
            values: values?,
        };
        self.weights.forward(spec, &mut step)
    }
}

/// The largest image that a model takes, with as many patches as limits allow.
pub(crate) fn largest_grid(spec: &EncoderSpec) -> ImageGrid {
    let merge = spec.input.merge;
    ImageGrid {
        frames: 1,
        height: merge,
        width: spec.most_rows() * merge,
    }
}

/// Such an image.
pub(crate) fn largest_image(spec: &EncoderSpec) -> Image {
    let grid = largest_grid(spec);
    Image {
        hash: [0xFF; 32],
        grid,
        patches: vec![0.0; grid.patches() * spec.input.patch_values],
    }
}

/// Pages of the keys of an image, each frame's in pages of its own.
fn pages(grid: ImageGrid) -> usize {
    grid.frames * (grid.height * grid.width).div_ceil(BLOCK)
}

/// Elements of each activation: the residual stream, its norm, q, k and v, rotated q, what is attended, inside the MLP, angles,
/// merged rows, keys and values.
fn activations(spec: &EncoderSpec, grid: ImageGrid) -> [usize; 10] {
    let (n, hidden) = (grid.patches(), spec.hidden_size);
    let cache = pages(grid) * BLOCK * hidden;
    [
        n * hidden,
        n * hidden,
        n * 3 * hidden,
        n * hidden,
        n * hidden,
        n * spec.intermediate_size,
        n * spec.head_dim(),
        n / spec.merged() * spec.out_size,
        cache,
        cache,
    ]
}

/// Where patches lie, row and column, in their order: merged ones one after the other.
fn places(grid: ImageGrid, merge: usize) -> impl Iterator<Item = [usize; 2]> {
    let (rows, columns) = (grid.height / merge, grid.width / merge);
    (0..grid.patches()).map(move |patch| {
        let (inside, merged) = (patch % (merge * merge), patch / (merge * merge));
        let (row, column) = (merged / columns % rows, merged % columns);
        [row * merge + inside / merge, column * merge + inside % merge]
    })
}

/// Angles of all patches: the first half of the pairs turns with the row, the other with the column.
fn rotate(spec: &EncoderSpec, grid: ImageGrid, angles: &mut [f32]) {
    let pairs = spec.head_dim() / 4;
    let frequency = |pair: usize| spec.theta.powf(-(pair as f64) / pairs as f64) as f32;
    let frequencies: Vec<f32> = (0..2 * pairs).map(|pair| frequency(pair % pairs)).collect();
    let axes: Vec<usize> = (0..2 * pairs).map(|pair| pair / pairs).collect();
    let positions: Vec<[u32; 2]> = places(grid, spec.input.merge)
        .map(|place| place.map(|at| at as u32))
        .collect();
    rope_angles_of_axes(&frequencies, 1.0, &axes, &positions, angles);
}

/// The activations of one image.
struct Step<'a, 'b> {
    spec: &'a EncoderSpec,
    image: &'a Image,
    arena: &'a Arena,
    emit: &'b mut dyn FnMut(usize, &[f32]),
    /// All of them, in order.
    pages: Vec<PageId>,
    hidden: &'a mut [f32],
    normed: &'a mut [f32],
    qkv: &'a mut [f32],
    q: &'a mut [f32],
    attended: &'a mut [f32],
    inner: &'a mut [f32],
    angles: &'a [f32],
    merged: &'a mut [f32],
    keys: &'a mut [f32],
    values: &'a mut [f32],
}

impl Step<'_, '_> {
    fn norm(&mut self, norm: &LayerNorm<Vec<f32>>) {
        layer_norm(self.hidden, &norm.weight, &norm.bias, self.spec.eps, self.normed);
    }

    /// Adds what is in `q` to the residual stream.
    fn add(&mut self) {
        self.hidden.iter_mut().zip(&*self.q).for_each(|(x, y)| *x += y);
    }
}

impl EncoderOperations<Arc<Linear>, Vec<f32>> for Step<'_, '_> {
    type Error = Oom;

    fn embed(&mut self, patches: &Arc<Linear>, positions: &Vec<f32>) -> Result<(), Oom> {
        patches.forward(&self.image.patches, self.hidden, self.arena)?;
        let (grid, hidden) = (self.image.grid, self.spec.hidden_size);
        let side = self.spec.positions_per_side;
        for (row, [y, x]) in self
            .hidden
            .chunks_exact_mut(hidden)
            .zip(places(grid, self.spec.input.merge))
        {
            for (y, of_y) in taps(y, grid.height, side) {
                for (x, of_x) in taps(x, grid.width, side) {
                    let position = &positions[(y * side + x) * hidden..][..hidden];
                    let weight = of_y * of_x;
                    row.iter_mut()
                        .zip(position)
                        .for_each(|(to, from)| *to += weight * from);
                }
            }
        }
        Ok(())
    }

    fn attend(&mut self, layer: &EncoderLayer<Arc<Linear>, Vec<f32>>) -> Result<(), Oom> {
        self.norm(&layer.attention_norm);
        layer.qkv.forward(self.normed, self.qkv, self.arena)?;
        let ImageGrid {
            frames,
            height,
            width,
        } = self.image.grid;
        let (len, blocks) = (height * width, (height * width).div_ceil(BLOCK));
        // Patches of one frame see each other.
        let runs: Vec<RunMeta<'_>> = (0..frames)
            .map(|frame| RunMeta {
                first_row: frame * len,
                len,
                start: 0,
                first_block: 0,
                blocks: &self.pages[frame * blocks..(frame + 1) * blocks],
            })
            .collect();
        let head_dim = self.spec.head_dim();
        let layout = KvLayout {
            kv_heads: self.spec.heads,
            head_dim,
            block_size: BlockSize::new(BLOCK).expect("a legal size"),
        };
        let mut kv = PagedKvMut {
            k: &mut *self.keys,
            v: &mut *self.values,
            layout,
            stride: layout.elements(1),
        };
        let rotation = Rotation {
            angles: self.angles,
            query_scale: None,
        };
        let values = CachedValues::Projected;
        qk_norm_rope_kv_write(self.qkv, None, rotation, values, &runs, &mut kv, self.q);
        let options = AttentionOptions {
            scale: 1.0 / (head_dim as f32).sqrt(),
            window: None,
            soft_cap: None,
            sinks: None,
            bidirectional: true,
        };
        attention(self.q, kv.as_ref(), &runs, options, self.attended, self.arena)?;
        layer.output.forward(self.attended, self.q, self.arena)?;
        self.add();
        Ok(())
    }

    fn mlp(&mut self, layer: &EncoderLayer<Arc<Linear>, Vec<f32>>) -> Result<(), Oom> {
        self.norm(&layer.mlp_norm);
        layer.up.forward(self.normed, self.inner, self.arena)?;
        gelu(self.spec.activation, self.inner);
        layer.down.forward(self.inner, self.q, self.arena)?;
        self.add();
        Ok(())
    }

    fn merge(&mut self, merger: &Merger<Arc<Linear>, Vec<f32>>, part: usize) -> Result<(), Oom> {
        // Merged patches are neighbours in memory: a norm of them is one of wider rows.
        self.norm(&merger.norm);
        merger.up.forward(self.normed, self.q, self.arena)?;
        gelu(Gelu::Exact, self.q);
        merger.down.forward(self.q, self.merged, self.arena)?;
        (self.emit)(part, self.merged);
        Ok(())
    }
}

/// The two places of a table of `side` between which place `at` of `len` falls where both have the same ends, and their weights.
fn taps(at: usize, len: usize, side: usize) -> [(usize, f32); 2] {
    let place = at as f32 * (side - 1) as f32 / (len - 1).max(1) as f32;
    let first = place.floor();
    let (index, weight) = (first as usize, place - first);
    [(index, 1.0 - weight), ((index + 1).min(side - 1), weight)]
}

/// Counts what [`Encoder::forward`] takes from an arena.
pub(crate) fn count(
    spec: &EncoderSpec,
    weights: &blocks::Encoder<LinearShape, ()>,
    arena: &mut DryArena,
) -> Option<()> {
    let grid = largest_grid(spec);
    for len in activations(spec, grid) {
        arena.alloc::<f32>(len)?;
    }
    let mut step = CountStep {
        rows: grid.patches(),
        spec,
        arena,
    };
    weights.forward(spec, &mut step).ok()
}

struct CountStep<'a> {
    rows: usize,
    spec: &'a EncoderSpec,
    arena: &'a mut DryArena,
}

/// No memory could hold it.
struct Boundless;

impl CountStep<'_> {
    fn linear(&mut self, linear: &LinearShape, rows: usize) -> Result<(), Boundless> {
        linear.scratch(rows, self.arena).ok_or(Boundless)
    }
}

impl EncoderOperations<LinearShape, ()> for CountStep<'_> {
    type Error = Boundless;

    fn embed(&mut self, patches: &LinearShape, (): &()) -> Result<(), Boundless> {
        self.linear(patches, self.rows)
    }

    fn attend(&mut self, layer: &EncoderLayer<LinearShape, ()>) -> Result<(), Boundless> {
        self.linear(&layer.qkv, self.rows)?;
        attention_scratch(self.spec.head_dim(), 1, self.arena).ok_or(Boundless)?;
        self.linear(&layer.output, self.rows)
    }

    fn mlp(&mut self, layer: &EncoderLayer<LinearShape, ()>) -> Result<(), Boundless> {
        self.linear(&layer.up, self.rows)?;
        self.linear(&layer.down, self.rows)
    }

    fn merge(&mut self, merger: &Merger<LinearShape, ()>, _: usize) -> Result<(), Boundless> {
        let rows = self.rows / self.spec.merged();
        self.linear(&merger.up, rows)?;
        self.linear(&merger.down, rows)
    }
}

/// How long the largest image took at most when a state was built, in nanoseconds.
#[derive(Debug, Default)]
pub(crate) struct SlowestEncode(AtomicU64);

impl SlowestEncode {
    pub(crate) fn add(&self, took: Duration) {
        let nanos = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        self.0.fetch_max(nanos, Ordering::Relaxed);
    }

    pub(crate) fn get(&self) -> Duration {
        Duration::from_nanos(self.0.load(Ordering::Relaxed))
    }
}

/// What a state has for images: the arena of one encode at a time, and the embeddings of a few images.
#[derive(Debug)]
pub(crate) struct EncoderState {
    arena: Arena,
    pub(crate) embeddings: Embeddings,
}

impl EncoderState {
    /// Takes as much memory as the largest image that limits allow, and encodes such a one: a state that cannot is not built.
    /// From then on the memory is the encoder's.
    pub(crate) fn new(encoder: &Encoder, budget: &Budget) -> Result<Self, Oom> {
        let spec = &encoder.spec;
        let mut state = Self {
            arena: Arena::of(Component::Encoder, budget, Scratch::Fixed(encoder.scratch))?,
            embeddings: Embeddings::new(spec, budget)?,
        };
        state.encode(encoder, &largest_image(spec))?;
        state.embeddings.images.clear();
        Ok(state)
    }

    /// The image's rows, encoded now unless they are kept.
    pub(crate) fn encode(&mut self, encoder: &Encoder, image: &Image) -> Result<EncodedImage, Oom> {
        if let Some(kept) = self.embeddings.images.find(&image.hash) {
            return Ok(kept);
        }
        self.arena.reset();
        let rows = image.grid.patches() / encoder.spec.merged();
        let place = self.embeddings.images.place(rows);
        let embeddings = &mut self.embeddings;
        let encoded = encoder.forward(image, &self.arena, &mut |part, rows| {
            embeddings.write(&place, part, rows);
        });
        match encoded {
            Ok(()) => Ok(self.embeddings.images.keep(image.hash, place)),
            Err(oom) => {
                self.embeddings.images.give_back(&place);
                Err(oom)
            }
        }
    }

    /// Bytes beside the arena.
    pub(crate) fn embedding_bytes(spec: &EncoderSpec) -> Option<usize> {
        Embeddings::bytes(spec)
    }
}
