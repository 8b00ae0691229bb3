//! The encoder of images on a CPU: the blocks' operations on `f32` activations in memory of their own.
//!
//! Images are encoded one at a time, before a step's decoder layers: at the latest in the step that first needs them, and layer by
//! layer in steps before it where others would wait too long for all at once.

mod cache;
mod order;
mod state;

use std::ops::Range;
use std::sync::Arc;

use plimsoll_core::{BlockSize, Image, ImageGrid, Oom, PageId};
use plimsoll_device::{Arena, DryArena};
use plimsoll_kernels::{
    AttentionOptions, CachedValues, Gelu, KvLayout, Linear, LinearShape, PagedKvMut, Rotation, RunMeta, Sees,
    WeightType, attention, attention_scratch, gelu, glu, layer_norm, qk_norm_rope_kv_write, rms_norm,
    rope_angles_of_axes,
};

use crate::blocks::{self, EncoderLayer, EncoderNorm, EncoderOperations, Merger};
use crate::weights::Loader;
use crate::{EncoderMlp, EncoderSpec, ModelError};
pub(crate) use cache::{Embeddings, EncodedImage, KeptImages, PAGE, PartialImage, place};
pub(crate) use order::PatchOrder;
use order::merged_patches;
pub(crate) use state::{EncoderState, SlowestEncode, encode_cost, parts_of};

/// Floats that the first of an activation is a multiple of.
const ALIGNED: usize = 16;

/// Patches that are projected at once.
const PATCHES_AT_ONCE: usize = 32;

/// Tokens of a page of the keys and values of an image: whole vectors.
const BLOCK: usize = 32;

/// The encoder's weights.
#[derive(Debug)]
pub(crate) struct Encoder {
    pub(crate) spec: EncoderSpec,
    weights: blocks::Encoder<Arc<Linear>, Vec<f32>>,
    /// Bytes that operations on the largest image take from an arena.
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

    /// Encodes some parts of an image, whose activations of the parts before `memory` holds: hands rows of `out_size` to `emit`, column
    /// by column ([`EncoderOperations::merge`]), each time consecutive ones, with the index of the first; all
    /// `grid.patches() / merge²` behind the last part.
    fn forward(
        &self,
        image: &Image,
        parts: Range<usize>,
        memory: &mut [f32],
        arena: &Arena,
        emit: &mut dyn FnMut(usize, usize, &[f32]),
    ) -> Result<(), Oom> {
        let spec = &self.spec;
        if cfg!(debug_assertions) && parts.start == 0 {
            memory.fill(f32::NAN);
        }
        let order = PatchOrder::new(spec, image.grid);
        let lens = activations(spec, image.grid);
        let mut rest = memory;
        let [
            patches,
            hidden,
            normed,
            qkv,
            q,
            attended,
            inner,
            activated,
            angles,
            merged,
            projected,
            keys,
            values,
        ] = lens.map(|len| {
            let (own, others) = std::mem::take(&mut rest).split_at_mut(len.next_multiple_of(ALIGNED));
            rest = others;
            &mut own[..len]
        });
        if parts.start == 0 {
            rotate(spec, &order, angles);
        }
        let mut step = Step {
            spec,
            image,
            arena,
            emit,
            order,
            pages: (0..pages(image.grid) as u32).map(PageId).collect(),
            patches,
            hidden,
            normed,
            qkv,
            q,
            attended,
            inner,
            activated,
            angles,
            merged,
            projected,
            keys,
            values,
        };
        self.weights.forward(spec, parts, &mut step)
    }
}

/// The largest image that a model takes, with as many patches as limits allow.
pub(crate) fn largest_grid(spec: &EncoderSpec) -> ImageGrid {
    let merge = spec.input.merge;
    spec.input.only.unwrap_or(ImageGrid {
        frames: 1,
        height: merge,
        width: spec.most_rows() * merge,
    })
}

/// Such an image.
pub(crate) fn largest_image(spec: &EncoderSpec) -> Image {
    Image::blank([0xFF; 32], largest_grid(spec), spec.input.patch)
}

/// Pages of the keys of an image, each frame's in pages of its own.
fn pages(grid: ImageGrid) -> usize {
    grid.frames * (grid.height * grid.width).div_ceil(BLOCK)
}

/// Elements of each activation: the values of some patches, the residual stream, its norm, q, k and v, rotated q, what is attended,
/// inside the MLP, its product where it is gated, angles, merged rows, what is inside a projection of such, keys and values. None depends
/// on the shape of an image but by its number of patches.
fn activations(spec: &EncoderSpec, grid: ImageGrid) -> [usize; 13] {
    let (n, hidden, inner) = (grid.patches(), spec.hidden_size, spec.intermediate_size);
    let cache = pages(grid) * BLOCK * hidden;
    let merged = n / spec.merged() * spec.out_size;
    let (wide, activated) = match spec.mlp {
        EncoderMlp::Plain(_) => (inner, 0),
        EncoderMlp::Gated(_) => (2 * inner, inner),
    };
    [
        n.min(PATCHES_AT_ONCE) * spec.input.patch.values(),
        n * hidden,
        n * hidden,
        n * 3 * hidden,
        n * hidden,
        n * hidden,
        n * wide,
        n * activated,
        spec.theta.map_or(0, |_| n * spec.head_dim()),
        merged,
        if spec.has_projection() { merged } else { 0 },
        cache,
        cache,
    ]
}

/// Angles of all patches: the first half of the pairs turns with the row, the other with the column.
fn rotate(spec: &EncoderSpec, order: &PatchOrder, angles: &mut [f32]) {
    let Some(theta) = spec.theta else { return };
    let pairs = spec.head_dim() / 4;
    let frequency = |pair: usize| {
        let shift = if pair < pairs {
            0.0
        } else {
            spec.family.column_shift
        };
        theta.powf(-((pair % pairs) as f64 + shift) / pairs as f64) as f32
    };
    let frequencies: Vec<f32> = (0..2 * pairs).map(frequency).collect();
    let axes: Vec<usize> = (0..2 * pairs).map(|pair| pair / pairs).collect();
    let positions: Vec<[u32; 2]> = order.places().map(|place| place.map(|at| at as u32)).collect();
    rope_angles_of_axes(&frequencies, 1.0, &axes, &positions, angles);
}

/// The activations of one image.
struct Step<'a, 'b> {
    spec: &'a EncoderSpec,
    image: &'a Image,
    arena: &'a Arena,
    emit: &'b mut dyn FnMut(usize, usize, &[f32]),
    order: PatchOrder,
    /// All of them, in order.
    pages: Vec<PageId>,
    patches: &'a mut [f32],
    hidden: &'a mut [f32],
    normed: &'a mut [f32],
    qkv: &'a mut [f32],
    q: &'a mut [f32],
    attended: &'a mut [f32],
    inner: &'a mut [f32],
    activated: &'a mut [f32],
    angles: &'a [f32],
    merged: &'a mut [f32],
    projected: &'a mut [f32],
    keys: &'a mut [f32],
    values: &'a mut [f32],
}

impl Step<'_, '_> {
    fn norm(&mut self, norm: &EncoderNorm<Vec<f32>>) {
        match &norm.bias {
            Some(bias) => layer_norm(self.hidden, &norm.weight, bias, self.spec.eps, self.normed),
            None => rms_norm(self.hidden, &norm.weight, self.spec.eps, self.normed),
        }
    }

    /// Adds what is in `q` to the residual stream.
    fn add(&mut self) {
        self.hidden.iter_mut().zip(&*self.q).for_each(|(x, y)| *x += y);
    }

    /// Attention of `q`, `k` and `v` within segments of so many patches, one after the other.
    fn attend_within(&mut self, segments: &[usize]) -> Result<(), Oom> {
        let (hidden, head_dim) = (self.spec.hidden_size, self.spec.head_dim());
        let layout = KvLayout {
            kv_heads: self.spec.heads,
            head_dim,
            block_size: BlockSize::new(BLOCK).expect("a legal size"),
        };
        let options = AttentionOptions {
            scale: 1.0 / (head_dim as f32).sqrt(),
            window: None,
            soft_cap: None,
            sinks: None,
            sees: Sees::Run,
        };
        let (mut segments, mut first) = (segments, 0);
        while !segments.is_empty() {
            // Segments begin in pages of their own: as many at once as there are pages for, of which each has enough for all of
            // an image in one piece.
            let (mut runs, mut rows, mut pages) = (Vec::new(), 0, &self.pages[..]);
            while let Some((&len, rest)) = segments.split_first()
                && let Some((blocks, free)) = pages.split_at_checked(len.div_ceil(BLOCK))
            {
                runs.push(RunMeta {
                    first_row: rows,
                    len,
                    start: 0,
                    first_block: 0,
                    blocks,
                });
                (rows, pages, segments) = (rows + len, free, rest);
            }
            let own = first * hidden..(first + rows) * hidden;
            let qkv = &self.qkv[3 * own.start..3 * own.end];
            let turned = head_dim * usize::from(!self.angles.is_empty());
            let rotation = Rotation {
                angles: &self.angles[first * turned..(first + rows) * turned],
                query_scale: None,
            };
            let q = &mut self.q[own.clone()];
            let mut kv = PagedKvMut {
                k: &mut *self.keys,
                v: &mut *self.values,
                layout,
                stride: layout.elements(1),
            };
            let values = CachedValues::Projected;
            qk_norm_rope_kv_write(qkv, None, rotation, values, &runs, &mut kv, q);
            let out = &mut self.attended[own];
            attention(q, kv.as_ref(), &runs, options, out, self.arena)?;
            first += rows;
        }
        Ok(())
    }
}

impl EncoderOperations<Arc<Linear>, Vec<f32>> for Step<'_, '_> {
    type Error = Oom;

    fn embed(&mut self, patches: &Arc<Linear>, positions: Option<&Vec<f32>>) -> Result<(), Oom> {
        let (grid, hidden, shape) = (self.image.grid, self.spec.hidden_size, self.spec.input.patch);
        let mut stored = self.order.patches();
        for rows in self.hidden.chunks_mut(PATCHES_AT_ONCE * hidden) {
            let values = &mut self.patches[..rows.len() / hidden * shape.values()];
            for (to, patch) in values.chunks_exact_mut(shape.values()).zip(&mut stored) {
                self.image.read_patch(patch, shape, to);
            }
            patches.forward(values, rows, self.arena)?;
        }
        let Some((positions, side)) = positions.zip(self.spec.positions_per_side) else {
            return Ok(());
        };
        for (row, [y, x]) in self.hidden.chunks_exact_mut(hidden).zip(self.order.places()) {
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

    fn normalise(&mut self, norm: &EncoderNorm<Vec<f32>>) -> Result<(), Oom> {
        self.norm(norm);
        self.hidden.copy_from_slice(self.normed);
        Ok(())
    }

    fn parts(&self) -> usize {
        1
    }

    fn project(&mut self, layer: &EncoderLayer<Arc<Linear>, Vec<f32>>) -> Result<(), Oom> {
        self.norm(&layer.attention_norm);
        layer.qkv.forward(self.normed, self.qkv, self.arena)
    }

    fn attend(&mut self, layer: &EncoderLayer<Arc<Linear>, Vec<f32>>, _: usize) -> Result<(), Oom> {
        let segments = self.order.segments(layer.is_windowed);
        self.attend_within(&segments)?;
        layer.output.forward(self.attended, self.q, self.arena)?;
        self.add();
        Ok(())
    }

    fn mlp(&mut self, layer: &EncoderLayer<Arc<Linear>, Vec<f32>>, _: usize) -> Result<(), Oom> {
        self.norm(&layer.mlp_norm);
        layer.up.forward(self.normed, self.inner, self.arena)?;
        match self.spec.mlp {
            EncoderMlp::Plain(form) => {
                gelu(form, self.inner);
                layer.down.forward(self.inner, self.q, self.arena)?;
            }
            EncoderMlp::Gated(activation) => {
                glu(
                    activation,
                    self.inner,
                    self.spec.intermediate_size,
                    self.activated,
                );
                layer.down.forward(self.activated, self.q, self.arena)?;
            }
        }
        self.add();
        Ok(())
    }

    fn merge(&mut self, merger: &Merger<Arc<Linear>, Vec<f32>>, column: usize) -> Result<(), Oom> {
        let (arena, out) = (self.arena, self.spec.out_size);
        let len = self.merged.len() / out * self.spec.hidden_size;
        match merger {
            Merger::Mlp { norm, up, down } => {
                // Merged patches are neighbours in memory: a norm of them is one of wider rows.
                self.norm(norm);
                up.forward(self.normed, self.q, arena)?;
                gelu(Gelu::Exact, self.q);
                down.forward(self.q, self.merged, arena)?;
            }
            Merger::Mean {
                last_norm,
                norm,
                projection,
            } => {
                self.norm(last_norm);
                self.average();
                rms_norm(
                    &self.q[..len],
                    norm,
                    self.spec.merger_eps,
                    &mut self.normed[..len],
                );
                projection.forward(&self.normed[..len], self.merged, arena)?;
            }
            Merger::Projected {
                norm,
                merge,
                up,
                down,
            } => {
                rms_norm(self.hidden, norm, self.spec.merger_eps, self.normed);
                self.gather();
                merge.forward(self.q, &mut self.normed[..len], arena)?;
                up.forward(&self.normed[..len], self.projected, arena)?;
                gelu(Gelu::Exact, self.projected);
                down.forward(self.projected, self.merged, arena)?;
            }
        }
        let mut first = 0;
        for count in self.order.consecutive_rows() {
            let row = self.order.row(first);
            (self.emit)(column, row, &self.merged[first * out..(first + count) * out]);
            first += count;
        }
        Ok(())
    }
}

impl Step<'_, '_> {
    /// To `q`: the mean of the normalised patches that become each row.
    fn average(&mut self) {
        let hidden = self.spec.hidden_size;
        let share = (self.spec.merged() as f32).recip();
        let rows = merged_patches(self.image.grid, self.spec.input.merge);
        for (to, patches) in self.q.chunks_exact_mut(hidden).zip(rows) {
            to.fill(0.0);
            for patch in patches {
                let from = &self.normed[patch * hidden..][..hidden];
                to.iter_mut().zip(from).for_each(|(sum, x)| *sum += x);
            }
            to.iter_mut().for_each(|sum| *sum *= share);
        }
    }

    /// To `q`: of the normalised patches that become each row all first elements, then all second ones, and so on.
    fn gather(&mut self) {
        let (hidden, merged) = (self.spec.hidden_size, self.spec.merged());
        let rows = merged_patches(self.image.grid, self.spec.input.merge);
        for (to, patches) in self.q.chunks_exact_mut(merged * hidden).zip(rows) {
            for (at, patch) in patches.enumerate() {
                let from = &self.normed[patch * hidden..][..hidden];
                let places = to.iter_mut().skip(at).step_by(merged);
                places.zip(from).for_each(|(to, from)| *to = *from);
            }
        }
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
    let mut step = CountStep {
        rows: largest_grid(spec).patches(),
        spec,
        arena,
    };
    weights.forward(spec, 0..spec.layers, &mut step).ok()
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

    fn embed(&mut self, patches: &LinearShape, _: Option<&()>) -> Result<(), Boundless> {
        self.linear(patches, self.rows)
    }

    fn normalise(&mut self, _: &EncoderNorm<()>) -> Result<(), Boundless> {
        Ok(())
    }

    fn parts(&self) -> usize {
        1
    }

    fn project(&mut self, layer: &EncoderLayer<LinearShape, ()>) -> Result<(), Boundless> {
        self.linear(&layer.qkv, self.rows)
    }

    fn attend(&mut self, layer: &EncoderLayer<LinearShape, ()>, _: usize) -> Result<(), Boundless> {
        attention_scratch(self.spec.head_dim(), 1, self.arena).ok_or(Boundless)?;
        self.linear(&layer.output, self.rows)
    }

    fn mlp(&mut self, layer: &EncoderLayer<LinearShape, ()>, _: usize) -> Result<(), Boundless> {
        self.linear(&layer.up, self.rows)?;
        self.linear(&layer.down, self.rows)
    }

    fn merge(&mut self, merger: &Merger<LinearShape, ()>, _: usize) -> Result<(), Boundless> {
        let rows = self.rows / self.spec.merged();
        let linears = match merger {
            Merger::Mlp { norm: _, up, down } => &[up, down][..],
            Merger::Mean {
                last_norm: _,
                norm: _,
                projection,
            } => &[projection],
            Merger::Projected {
                norm: _,
                merge,
                up,
                down,
            } => &[merge, up, down],
        };
        linears.iter().try_for_each(|linear| self.linear(linear, rows))
    }
}
