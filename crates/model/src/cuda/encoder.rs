//! The encoder of images on a GPU: the blocks' operations as launches on `bf16` activations, in memory of its own.
//!
//! Images are encoded on the stream of the steps, ahead of the step that first has rows of them, part by part in steps before it where
//! others would wait too long for all at once: what was launched before still reads rows that make room for the new ones, and what is
//! launched afterwards finds these.

mod check;
mod layout;
mod step;

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use half::bf16;
use plimsoll_core::{Component, EncodeCost, Image, Levels};
use plimsoll_device::cuda::{DeviceError, Gpu, GpuError, GpuSlab, PinnedSlab};
use plimsoll_kernels::cuda::{EncoderKernels, KeptRows};

use super::staging::STEPS_IN_FLIGHT;
use crate::EncoderSpec;
use crate::encoder::{
    EncodedImage, KeptImages, PAGE, PartialImage, PatchOrder, encode_cost, largest_image, parts_of, place,
};
pub(super) use check::check;
use layout::{EncoderLayout, parts};
pub(super) use step::Products;
use step::{Step, is_added};

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
    /// Input from the host, one for each step in flight.
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
    pixels: PinnedSlab,
    levels: PinnedSlab,
    /// Pages, and the order of rows and where windows begin, where there are windows.
    lists: PinnedSlab,
}

impl EncoderState {
    /// Takes as much memory as the largest image that limits allow, and encodes such a one: a state that cannot is not built.
    pub(super) fn new(gpu: &Gpu, encoder: &Encoder, products: Products<'_>) -> Result<Self, DeviceError> {
        let spec = &encoder.spec;
        let layout = EncoderLayout::new(spec, Self::most_patches(spec));
        let layout = layout.ok_or_else(|| gpu.budget().oom(Component::Encoder, u64::MAX))?;
        let memory = gpu.alloc(Component::Encoder, layout.bytes)?;
        let pixels = Self::most_patches(spec) * spec.input.patch.bytes();
        let input = |_| {
            Ok::<_, GpuError>(Input {
                pixels: PinnedSlab::new(gpu, pixels)?,
                levels: PinnedSlab::new(gpu, size_of::<Levels>())?,
                lists: PinnedSlab::new(gpu, layout.list_bytes())?,
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
                let all =
                    self.spec.layers * parts(image.grid, &PatchOrder::new(&self.spec, image.grid)).len();
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
        if !parts.is_empty() {
            // Rows of any of them may be written over, and what is half done is of no use: also after a panic.
            self.images.clear();
            self.launch(products, image, &pages, parts, slot)?;
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
        let order = PatchOrder::new(&self.spec, grid);
        if parts.start == 0 {
            self.send(image, place, layout, &order, slot)?;
        }
        let spec = &self.spec;
        let parts_of_layer = self::parts(grid, &order);
        let mut step = Step {
            gpu: &self.gpu,
            spec,
            kernels: &self.kernels,
            products,
            grid,
            rows: patches / spec.merged(),
            is_added: is_added(spec, parts.start / parts_of_layer.len()),
            parts: parts_of_layer,
            hidden: layout.hidden.of(&self.memory),
            normed: layout.normed.of(&self.memory),
            delta: layout.delta.front(patches * spec.hidden_size).of(&self.memory),
            wide: layout.wide.of(&self.memory),
            inner: layout.inner.of(&self.memory),
            activated: layout.activated.of(&self.memory),
            angles: layout.angles.of(&self.memory),
            merged: layout.rows.of(&self.memory),
            pages: layout.pages.of(&self.memory),
            order: (!order.is_as_stored()).then(|| layout.order.of(&self.memory)),
            windows: layout.windows.of(&self.memory),
            largest_window: order.segments(true).into_iter().max().unwrap_or(0),
            kept: self.kept(0),
        };
        if parts.start == 0 {
            let pixels = layout.delta.of(&self.memory).cast().range(0..image.pixels.len());
            step.read_patches(pixels, layout.levels.of(&self.memory))?;
            step.find_angles()?;
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
        order: &PatchOrder,
        slot: usize,
    ) -> Result<(), GpuError> {
        let input = &mut self.host[slot];
        let pixels = image.pixels.len();
        input.pixels.as_mut_slice::<u8>()[..pixels].copy_from_slice(&image.pixels);
        input
            .levels
            .as_mut_slice::<f32>()
            .copy_from_slice(image.levels.as_flattened());
        let pages = place.iter().map(|&page| page as i32).collect();
        let (mut rows, mut windows) = (Vec::new(), Vec::new());
        if !order.is_as_stored() {
            rows.extend((0..layout.order.len()).map(|row| order.row(row) as i32));
            let mut end = 0;
            windows.push(0);
            windows.extend(order.segments(true).into_iter().map(|len| {
                end += len;
                end as i32
            }));
        }
        let lists: [(_, Vec<i32>); 3] = [
            (layout.pages, pages),
            (layout.order, rows),
            (layout.windows, windows),
        ];
        let taken = layout.delta.of(&self.memory).cast().range(0..pixels);
        // SAFETY: the slot is packed again when its step has ended, and the drop of the runner waits for all of them.
        unsafe {
            self.gpu.upload_async(&input.pixels, 0, taken)?;
            let levels = layout.levels.of(&self.memory);
            self.gpu.upload_async(&input.levels, 0, levels.cast())?;
        }
        let mut at = 0;
        for (section, list) in lists.into_iter().filter(|(_, list)| !list.is_empty()) {
            let to = section.front(list.len()).of(&self.memory);
            input.lists.as_mut_slice::<i32>()[at..at + list.len()].copy_from_slice(&list);
            // SAFETY: as above; other lists lie elsewhere.
            unsafe {
                self.gpu
                    .upload_async(&input.lists, at * size_of::<i32>(), to.cast())?;
            };
            at += list.len();
        }
        Ok(())
    }
}
