//! The encoder of images on a GPU: the blocks' operations as launches on `bf16` activations, in memory of its own.
//!
//! Images are encoded on the stream of the steps, ahead of the step that first has rows of them, part by part in steps before it where
//! others would wait too long for all at once: what was launched before still reads rows that make room for the new ones, and what is
//! launched afterwards finds these.

mod layout;

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use half::bf16;
use half::slice::HalfFloatSliceExt;
use plimsoll_core::{Component, EncodeCost, Image, ImageGrid};
use plimsoll_device::cuda::{DeviceError, Gpu, GpuError, GpuSlab, GpuSlice, PinnedSlab};
use plimsoll_kernels::Gelu;
use plimsoll_kernels::cuda::{
    AllReduce, EncoderKernels, GpuLayerNorm, GpuLinear, KeptRows, Linears, PatchAttention, PatchGrid,
};
use rayon::prelude::*;

use super::staging::STEPS_IN_FLIGHT;
use super::weights::{GpuEncoderWeights, GpuVector};
use crate::blocks::{EncoderLayer, EncoderNorm, EncoderOperations, Merger};
use crate::encoder::{
    EncodedImage, KeptImages, PAGE, PartialImage, encode_cost, largest_image, parts_of, place,
};
use crate::encoder_spec::families;
use crate::{EncoderMlp, EncoderSpec, ModelError};
use layout::{EncoderLayout, parts};

/// Floats that a thread rounds at a time.
const CHUNK: usize = 1 << 16;

/// What the kernels ask of an encoder, beyond what the CPU does.
pub(super) fn check(spec: &EncoderSpec) -> Result<(), ModelError> {
    let merged = spec.hidden_size * spec.merged();
    let widths = [
        ("the values of a patch", spec.input.patch_values),
        ("num_heads", spec.head_dim()),
        ("hidden_size", spec.hidden_size),
        ("intermediate_size", spec.intermediate_size),
        ("out_hidden_size", spec.out_size),
    ];
    let unsupported = |field: &str, value: String, supported: String| {
        let supported = format!(
            "on a GPU {supported}; --device cpu has no such bound, and --limit-mm-per-prompt '{{\"image\": 0}}' serves the text \
             part alone"
        );
        Err(ModelError::unsupported(
            format!("vision_config.{field}"),
            value,
            supported,
        ))
    };
    if Form::of(spec).is_none() {
        let supported = format!("encoders such as {}'s are", families::QWEN3.name);
        return unsupported("model_type", spec.family.name.to_owned(), supported);
    }
    for (field, width) in widths {
        if !width.is_multiple_of(8) {
            let value = match field {
                "num_heads" => format!("heads of {width}"),
                _ => width.to_string(),
            };
            return unsupported(field, value, "multiples of 8 are".to_owned());
        }
    }
    if spec.head_dim() > EncoderKernels::MAX_HEAD_DIM {
        let supported = format!("heads of up to {} are", EncoderKernels::MAX_HEAD_DIM);
        return unsupported("num_heads", format!("heads of {}", spec.head_dim()), supported);
    }
    if merged > EncoderKernels::MAX_NORM {
        let supported = format!("up to {} for the patches of a row are", EncoderKernels::MAX_NORM);
        return unsupported("hidden_size", merged.to_string(), supported);
    }
    Ok(())
}

/// What the kernels compute, of the family whose encoders they know.
#[derive(Clone, Copy, Debug)]
struct Form {
    positions_per_side: usize,
    theta: f64,
    activation: Gelu,
}

impl Form {
    fn of(spec: &EncoderSpec) -> Option<Self> {
        match (spec.positions_per_side, spec.theta, spec.mlp) {
            (Some(positions_per_side), Some(theta), EncoderMlp::Plain(activation))
                if *spec.family == families::QWEN3 && spec.windows.is_none() =>
            {
                Some(Self {
                    positions_per_side,
                    theta,
                    activation,
                })
            }
            _ => None,
        }
    }
}

/// A model's encoder, but for its weights.
#[derive(Debug)]
pub(super) struct Encoder {
    spec: EncoderSpec,
    kernels: Arc<EncoderKernels>,
}

impl Encoder {
    pub(super) fn load(gpu: &Gpu, spec: &EncoderSpec) -> Result<Self, GpuError> {
        Ok(Self {
            spec: spec.clone(),
            kernels: Arc::new(EncoderKernels::load(gpu)?),
        })
    }
}

/// What multiplies with which weights.
#[derive(Clone, Copy, Debug)]
pub(super) struct Products<'a> {
    pub(super) linears: &'a Linears,
    pub(super) weights: &'a GpuEncoderWeights,
    /// Where GPUs meet, if there are several: each encodes all of an image.
    pub(super) all_reduce: Option<&'a AllReduce>,
}

/// What a state has for images: the memory of one encode at a time, and the rows of a few images.
#[derive(Debug)]
pub(super) struct EncoderState {
    gpu: Gpu,
    spec: EncoderSpec,
    kernels: Arc<EncoderKernels>,
    memory: GpuSlab,
    layout: EncoderLayout,
    images: KeptImages,
    largest: Duration,
    /// Patches and pages of each step in flight.
    host: Vec<Input>,
}

/// Where an image's rows are, or will be once it is encoded.
#[derive(Debug)]
pub(super) struct PlacedImage<'a> {
    image: &'a Image,
    pages: EncodedImage,
    /// Parts of it that are to be encoded.
    parts: Range<usize>,
    /// What is kept once they are, or begun.
    images: KeptImages,
}

impl PlacedImage<'_> {
    /// Which of all rows that are kept a row of it is.
    pub(super) fn place(&self, row: usize) -> i32 {
        place(&self.pages, row) as i32
    }
}

/// What an encode takes from the host.
#[derive(Debug)]
struct Input {
    patches: PinnedSlab,
    pages: PinnedSlab,
}

impl EncoderState {
    /// Takes as much memory as the largest image that limits allow, and encodes such a one: a state that cannot is not built.
    pub(super) fn new(gpu: &Gpu, encoder: &Encoder, products: Products<'_>) -> Result<Self, DeviceError> {
        let spec = &encoder.spec;
        let layout = EncoderLayout::new(spec, Self::most_patches(spec));
        let layout = layout.ok_or_else(|| gpu.budget().oom(Component::Encoder, u64::MAX))?;
        let memory = gpu.alloc(Component::Encoder, layout.bytes)?;
        let patches = Self::most_patches(spec) * spec.input.patch_values;
        let input = |_| {
            Ok::<_, GpuError>(Input {
                patches: PinnedSlab::new(gpu, patches * size_of::<bf16>())?,
                pages: PinnedSlab::new(gpu, layout.pages.bytes())?,
            })
        };
        let mut state = Self {
            gpu: gpu.clone(),
            spec: spec.clone(),
            kernels: Arc::clone(&encoder.kernels),
            memory,
            layout,
            images: KeptImages::new(spec),
            largest: Duration::ZERO,
            host: (0..STEPS_IN_FLIGHT).map(input).collect::<Result<_, _>>()?,
        };
        // Nobody reads these rows, and other ranks may not have the memory for theirs.
        let alone = Products {
            all_reduce: None,
            ..products
        };
        let image = largest_image(spec);
        // The second time, libraries have loaded what they need.
        for _ in 0..2 {
            state.images.clear();
            let begun = Instant::now();
            state.encode(alone, state.look_up(&image, 1.0), 0)?;
            gpu.synchronize()?;
            state.largest = begun.elapsed();
        }
        state.images.clear();
        Ok(state)
    }

    /// How long the largest image took.
    pub(super) fn largest(&self) -> Duration {
        self.largest
    }

    /// How long others take.
    pub(super) fn cost(&self) -> EncodeCost {
        encode_cost(&self.spec, Self::most_patches(&self.spec), self.largest)
    }

    /// Bytes of device memory; `None` if no memory could hold it.
    pub(super) fn bytes(spec: &EncoderSpec) -> Option<usize> {
        EncoderLayout::new(spec, Self::most_patches(spec)).map(|layout| layout.bytes)
    }

    fn most_patches(spec: &EncoderSpec) -> usize {
        spec.most_rows() * spec.merged()
    }

    pub(super) fn kernels(&self) -> &EncoderKernels {
        &self.kernels
    }

    /// Elements of one part of a row.
    pub(super) fn width(&self) -> usize {
        self.spec.out_size
    }

    /// Layers of the decoder to whose output rows of images are added.
    pub(super) fn features(&self) -> usize {
        self.spec.features.len()
    }

    /// One part of all rows that are kept.
    pub(super) fn kept(&self, part: usize) -> KeptRows<'_> {
        KeptRows {
            rows: self.layout.kept.of(&self.memory),
            stride: self.spec.row_size(),
            column: part * self.spec.out_size,
        }
    }

    /// Finds the image's rows, or room for them, and what there is to do until this share of it is encoded. Nothing changes before that is
    /// launched: a step that one rank cannot begin leaves the same images on all of them, which then encode the same again.
    pub(super) fn look_up<'a>(&self, image: &'a Image, share: f64) -> PlacedImage<'a> {
        let mut images = self.images.clone();
        let (pages, parts) = match images.find(&image.hash) {
            Some(pages) => (pages, 0..0),
            None => {
                let all = self.spec.layers * parts(image.grid).count();
                let begun = images.begin(&image.hash, image.grid.patches() / self.spec.merged());
                let PartialImage {
                    pages, parts: done, ..
                } = begun;
                let (pages, todo) = (Arc::clone(pages), *done..parts_of(share, all).max(*done));
                *done = todo.end;
                if todo.end == all {
                    images.finish();
                }
                (pages, todo)
            }
        };
        PlacedImage {
            image,
            pages,
            parts,
            images,
        }
    }

    /// Launches what is to be encoded of the image, as a part of step slot `slot`, whose last step has ended. Nothing was encoded since it
    /// was looked up.
    pub(super) fn encode(
        &mut self,
        products: Products<'_>,
        placed: PlacedImage<'_>,
        slot: usize,
    ) -> Result<EncodedImage, DeviceError> {
        let PlacedImage {
            image,
            pages,
            parts,
            images,
        } = placed;
        if !parts.is_empty()
            && let Err(error) = self.launch(products, image, &pages, parts, slot)
        {
            // Rows of any of them may have been written over.
            self.images.clear();
            return Err(error);
        }
        self.images = images;
        Ok(pages)
    }

    /// Rows of an encoded image, `[rows, row_size]`, when all work is done.
    pub(super) fn download(&self, encoded: &EncodedImage, rows: usize) -> Result<Vec<f32>, GpuError> {
        let (kept, size) = (self.layout.kept.of(&self.memory), self.spec.row_size());
        let mut out = Vec::with_capacity(rows * size);
        for first in (0..rows).step_by(PAGE) {
            let (at, len) = (place(encoded, first) * size, (rows - first).min(PAGE) * size);
            let page = self.gpu.download(kept.range(at..at + len))?;
            out.extend(page.into_iter().map(bf16::to_f32));
        }
        Ok(out)
    }

    fn launch(
        &mut self,
        products: Products<'_>,
        image: &Image,
        place: &EncodedImage,
        parts: Range<usize>,
        slot: usize,
    ) -> Result<(), DeviceError> {
        let grid = image.grid;
        let patches = grid.patches();
        let layout = EncoderLayout::new(&self.spec, patches);
        let layout = layout.ok_or_else(|| self.gpu.budget().oom(Component::Encoder, u64::MAX))?;
        if parts.start == 0 {
            self.send(image, place, layout, slot)?;
        }
        let spec = &self.spec;
        let form = Form::of(spec).expect(CHECKED);
        let parts_of_image: Vec<_> = self::parts(grid).collect();
        let parts_of_layer = parts_of_image.len();
        let mut step = Step {
            gpu: &self.gpu,
            spec,
            form,
            kernels: &self.kernels,
            linears: products.linears,
            all_reduce: products.all_reduce,
            grid,
            rows: patches / spec.merged(),
            parts: parts_of_image,
            is_added: is_added(spec, parts.start / parts_of_layer),
            hidden: layout.hidden.of(&self.memory),
            normed: layout.normed.of(&self.memory),
            delta: layout.delta.of(&self.memory),
            wide: layout.wide.of(&self.memory),
            inner: layout.inner.of(&self.memory),
            angles: layout.angles.of(&self.memory),
            merged: layout.rows.of(&self.memory),
            pages: layout.pages.of(&self.memory),
            kept: self.kept(0),
        };
        if parts.start == 0 {
            self.kernels
                .patch_angles(step.patch_grid(), form.theta, step.angles)?;
        }
        products.weights.forward(spec, parts, &mut step)?;
        Ok(())
    }

    /// Launches the copies of what the first part takes from the host.
    fn send(
        &mut self,
        image: &Image,
        place: &EncodedImage,
        layout: EncoderLayout,
        slot: usize,
    ) -> Result<(), GpuError> {
        let input = &mut self.host[slot];
        let values = image.patches.len();
        let patches = &mut input.patches.as_mut_slice::<bf16>()[..values];
        let chunks = patches.par_chunks_mut(CHUNK).zip(image.patches.par_chunks(CHUNK));
        chunks.for_each(|(to, from)| to.convert_from_f32_slice(from));
        for (to, &page) in input.pages.as_mut_slice::<i32>().iter_mut().zip(place.iter()) {
            *to = page as i32;
        }
        let taken = layout.wide.of(&self.memory).range(0..values);
        let pages = layout.pages.of(&self.memory);
        // SAFETY: the slot is packed again when its step has ended, and the drop of the runner waits for all of them.
        unsafe {
            self.gpu.upload_async(&input.patches, 0, taken.cast())?;
            self.gpu.upload_async(&input.pages, 0, pages.cast())
        }
    }
}

/// Whether nothing is left to be added to the residual stream before this layer: rows were made of it.
fn is_added(spec: &EncoderSpec, layer: usize) -> bool {
    layer
        .checked_sub(1)
        .is_none_or(|before| spec.features.contains(&before))
}

/// Of what [`check`] refuses.
const CHECKED: &str = "a model whose encoder has another form is not loaded";

/// The activations of one image.
struct Step<'a> {
    gpu: &'a Gpu,
    spec: &'a EncoderSpec,
    form: Form,
    kernels: &'a EncoderKernels,
    linears: &'a Linears,
    all_reduce: Option<&'a AllReduce>,
    grid: ImageGrid,
    /// Rows that it becomes.
    rows: usize,
    /// Of each part of a layer.
    parts: Vec<Range<usize>>,
    /// Nothing is to be added to the residual stream.
    is_added: bool,
    hidden: GpuSlice<'a, bf16>,
    normed: GpuSlice<'a, bf16>,
    delta: GpuSlice<'a, bf16>,
    wide: GpuSlice<'a, bf16>,
    inner: GpuSlice<'a, bf16>,
    angles: GpuSlice<'a, f32>,
    merged: GpuSlice<'a, bf16>,
    pages: GpuSlice<'a, i32>,
    kept: KeptRows<'a>,
}

impl<'a> Step<'a> {
    fn patch_grid(&self) -> PatchGrid {
        PatchGrid {
            patches: self.grid.patches(),
            height: self.grid.height,
            width: self.grid.width,
            merge: self.spec.input.merge,
        }
    }

    /// The first elements of the widest activation: as many as all patches have of this width.
    fn wide(&self, width: usize) -> GpuSlice<'a, bf16> {
        self.wide.range(0..self.grid.patches() * width)
    }

    /// The norm of the residual stream, to which what is left is added first.
    fn norm(&mut self, norm: &EncoderNorm<GpuVector>) -> Result<(), GpuError> {
        let is_added = std::mem::replace(&mut self.is_added, true);
        self.norm_of(norm, 0..self.grid.patches(), !is_added)
    }

    /// The same of some patches.
    fn norm_of(
        &self,
        norm: &EncoderNorm<GpuVector>,
        patches: Range<usize>,
        is_left: bool,
    ) -> Result<(), GpuError> {
        let of = |x| self.rows_of(x, &patches);
        let weights = GpuLayerNorm {
            weight: norm.weight.slice(),
            bias: norm.bias.as_ref().expect(CHECKED).slice(),
            eps: self.spec.eps,
        };
        let delta = is_left.then(|| of(self.delta));
        self.kernels
            .layer_norm(of(self.hidden), delta, weights, of(self.normed))
    }

    /// Rows of an activation of `[patches, hidden_size]`.
    fn rows_of(&self, x: GpuSlice<'a, bf16>, patches: &Range<usize>) -> GpuSlice<'a, bf16> {
        let width = self.spec.hidden_size;
        x.range(patches.start * width..patches.end * width)
    }

    /// Chips of one kind may compute a product in different ways, which differ in the last bits, and ranks that sample different tokens
    /// are an error. So all take the rows of the first: a sum with zeros is exact.
    fn take_rows_of_first_rank(&self) -> Result<(), GpuError> {
        let Some(all_reduce) = self.all_reduce else {
            return Ok(());
        };
        if all_reduce.rank() > 0 {
            self.gpu.fill(self.merged.cast(), 0)?;
        }
        all_reduce.sum(self.merged)
    }
}

impl EncoderOperations<GpuLinear, GpuVector> for Step<'_> {
    type Error = GpuError;

    fn embed(&mut self, patches: &GpuLinear, positions: Option<&GpuVector>) -> Result<(), GpuError> {
        let values = self.wide(self.spec.input.patch_values);
        self.linears.forward(values, patches, self.hidden)?;
        let (positions, side) = (positions.expect(CHECKED), self.form.positions_per_side);
        self.kernels
            .add_positions(self.hidden, positions.slice(), side, self.patch_grid())
    }

    fn normalise(&mut self, _: &EncoderNorm<GpuVector>) -> Result<(), GpuError> {
        unreachable!("{CHECKED}: there is no norm before the first layer")
    }

    fn parts(&self) -> usize {
        self.parts.len()
    }

    fn project(&mut self, layer: &EncoderLayer<GpuLinear, GpuVector>) -> Result<(), GpuError> {
        self.norm(&layer.attention_norm)?;
        let qkv = self.wide(3 * self.spec.hidden_size);
        self.linears.forward(self.normed, &layer.qkv, qkv)?;
        let (heads, patches) = (self.spec.heads, self.grid.patches());
        self.kernels.rotate(qkv, heads, self.angles, patches)
    }

    fn attend(&mut self, layer: &EncoderLayer<GpuLinear, GpuVector>, part: usize) -> Result<(), GpuError> {
        let rows = self.parts[part].clone();
        let (heads, head_dim) = (self.spec.heads, self.spec.head_dim());
        self.kernels.attention(&PatchAttention {
            qkv: self.wide(3 * self.spec.hidden_size),
            heads,
            head_dim,
            // Patches of one frame see each other.
            segment: self.grid.height * self.grid.width,
            rows: rows.clone(),
            scale: 1.0 / (head_dim as f32).sqrt(),
            out: self.normed,
        })?;
        let (attended, delta) = (self.rows_of(self.normed, &rows), self.rows_of(self.delta, &rows));
        self.linears.forward(attended, &layer.output, delta)
    }

    fn mlp(&mut self, layer: &EncoderLayer<GpuLinear, GpuVector>, part: usize) -> Result<(), GpuError> {
        let rows = self.parts[part].clone();
        self.norm_of(&layer.mlp_norm, rows.clone(), true)?;
        let inner = self.inner.range(0..rows.len() * self.spec.intermediate_size);
        let (normed, delta) = (self.rows_of(self.normed, &rows), self.rows_of(self.delta, &rows));
        self.linears.forward(normed, &layer.up, inner)?;
        self.kernels.gelu(self.form.activation, inner)?;
        // Of the last part, that of all of them.
        self.is_added = false;
        self.linears.forward(inner, &layer.down, delta)
    }

    fn merge(&mut self, merger: &Merger<GpuLinear, GpuVector>, column: usize) -> Result<(), GpuError> {
        let Merger::Mlp { norm, up, down } = merger else {
            unreachable!("{CHECKED}: rows are made by an MLP");
        };
        // Merged patches are neighbours in memory: a norm of them is one of wider rows.
        self.norm(norm)?;
        self.linears.forward(self.normed, up, self.delta)?;
        self.kernels.gelu(Gelu::Exact, self.delta)?;
        self.linears.forward(self.delta, down, self.merged)?;
        self.take_rows_of_first_rank()?;
        let kept = KeptRows {
            column: column * self.spec.out_size,
            ..self.kept
        };
        self.kernels
            .keep_rows(self.merged, self.rows, (self.pages, PAGE), kept)
    }
}
