//! What an engine state has for images.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use plimsoll_core::{Component, EncodeCost, Image, Oom, Scratch};
use plimsoll_device::{Arena, Budget, Slab};

use super::{ALIGNED, Embeddings, EncodedImage, Encoder, activations, largest_grid, largest_image};
use crate::{EncoderMlp, EncoderSpec};

/// How many of so many parts of an encode a share of it is, at least one.
pub(crate) fn parts_of(share: f64, parts: usize) -> usize {
    ((share * parts as f64).ceil() as usize).clamp(1, parts)
}

/// How long images take to encode, if one of so many patches took so long: in proportion to the operations.
pub(crate) fn encode_cost(spec: &EncoderSpec, patches: usize, took: Duration) -> EncodeCost {
    let (hidden, inner) = (spec.hidden_size as f64, spec.intermediate_size as f64);
    let matrices = match spec.mlp {
        EncoderMlp::Plain(_) => 2.0,
        EncoderMlp::Gated(_) => 3.0,
    };
    // Multiplications of a layer, for each patch and for each pair of patches.
    let linear = 4.0 * hidden * hidden + matrices * hidden * inner;
    let pairs = 2.0 * hidden;
    let patches = patches as f64;
    let of_each = took.as_secs_f64() / (patches * (linear + patches * pairs));
    EncodeCost {
        patch_seconds: of_each * linear,
        pair_seconds: of_each * pairs,
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

/// What a state has for images: the memory of one encode at a time, and the embeddings of a few images.
#[derive(Debug)]
pub(crate) struct EncoderState {
    activations: Slab,
    arena: Arena,
    pub(crate) embeddings: Embeddings,
    largest: Duration,
}

impl EncoderState {
    /// Takes as much memory as the largest image that limits allow, and encodes such a one: a state that cannot is not built.
    /// From then on the memory is the encoder's.
    pub(crate) fn new(encoder: &Encoder, budget: &Budget) -> Result<Self, Oom> {
        let spec = &encoder.spec;
        let too_large = || budget.oom(Component::Encoder, u64::MAX);
        let activations = Self::activation_bytes(spec).ok_or_else(too_large)?;
        let mut state = Self {
            activations: Slab::new(budget, Component::Encoder, activations)?,
            arena: Arena::of(Component::Encoder, budget, Scratch::Fixed(encoder.scratch))?,
            embeddings: Embeddings::new(spec, budget)?,
            largest: Duration::ZERO,
        };
        let begun = Instant::now();
        state.encode(encoder, &largest_image(spec))?;
        state.largest = begun.elapsed();
        state.embeddings.images.clear();
        Ok(state)
    }

    /// How long the largest image took.
    pub(crate) fn largest(&self) -> Duration {
        self.largest
    }

    /// How long others take.
    pub(crate) fn cost(&self, encoder: &Encoder) -> EncodeCost {
        let spec = &encoder.spec;
        encode_cost(spec, largest_grid(spec).patches(), self.largest)
    }

    /// The image's rows, encoded now unless they are kept.
    pub(crate) fn encode(&mut self, encoder: &Encoder, image: &Image) -> Result<EncodedImage, Oom> {
        self.advance(encoder, image, 1.0)?;
        let kept = self.embeddings.images.find(&image.hash);
        Ok(kept.expect("all of it is encoded"))
    }

    /// Encodes this share of the image at least, unless it is done or its rows are kept. The image that was begun before is given up.
    pub(crate) fn advance(&mut self, encoder: &Encoder, image: &Image, share: f64) -> Result<(), Oom> {
        let Embeddings { images, .. } = &mut self.embeddings;
        if images.find(&image.hash).is_some() {
            return Ok(());
        }
        let spec = &encoder.spec;
        let until = parts_of(share, spec.layers);
        let begun = images.begin(&image.hash, image.grid.patches() / spec.merged());
        // Nothing is done until all of this is: what is half done is of no use after a panic.
        let (done, place) = (std::mem::take(&mut begun.parts), Arc::clone(&begun.pages));
        self.arena.reset();
        let memory = self.activations.as_mut_slice::<f32>();
        let embeddings = &mut self.embeddings;
        let encoded = encoder.forward(
            image,
            done..until,
            memory,
            &self.arena,
            &mut |column, first, rows| {
                embeddings.write(&place, column, first, rows);
            },
        );
        match encoded {
            Ok(()) if until == spec.layers => self.embeddings.images.finish(),
            Ok(()) => self.embeddings.images.reach(done.max(until)),
            Err(_) => self.embeddings.images.give_up(),
        }
        encoded
    }

    /// Bytes of the activations of the largest image; `None` if no memory could hold them.
    pub(crate) fn activation_bytes(spec: &EncoderSpec) -> Option<usize> {
        let lens = activations(spec, largest_grid(spec)).into_iter();
        let floats = lens.map(|len| len.checked_next_multiple_of(ALIGNED));
        let floats = floats.sum::<Option<usize>>()?;
        floats.checked_mul(size_of::<f32>())
    }

    /// Bytes of embeddings.
    pub(crate) fn embedding_bytes(spec: &EncoderSpec) -> Option<usize> {
        Embeddings::bytes(spec)
    }
}
