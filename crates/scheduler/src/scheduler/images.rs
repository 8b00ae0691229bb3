//! Which images have rows when a step begins.

use std::sync::Arc;

use plimsoll_core::{Image, PartialEncode, StepPlan};

use crate::EncodeTime;

/// A share from here on counts as all: the rest is rounding.
const ALL: f64 = 1.0 - 1e-6;

/// What executors have of images, as far as steps that were planned tell. It may be less, after an image was given up for another: then
/// the step that has rows of it encodes it, and readers wait.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct KnownImages {
    /// The one of which parts are encoded, and how much of it is done, of 1.
    partial: Option<([u8; 32], f64)>,
    /// Whether the last step left it unfinished.
    encoding: bool,
    /// Those that were encoded or that steps had rows of, the latest first: of so many of any size rows are kept.
    kept: [Option<[u8; 32]>; 2],
}

impl KnownImages {
    fn done(&self, hash: &[u8; 32]) -> f64 {
        match self.partial {
            _ if self.kept.contains(&Some(*hash)) => 1.0,
            Some((partial, share)) if partial == *hash => share,
            _ => 0.0,
        }
    }

    /// Whether the next step is likely to go on with an image.
    pub(super) fn is_encoding(&self) -> bool {
        self.encoding
    }

    /// A step was planned.
    pub(super) fn plan(&mut self, plan: &StepPlan) {
        self.encoding = plan.encode.as_ref().is_some_and(|encode| encode.share < 1.0);
        if let Some(PartialEncode { image, share }) = &plan.encode {
            if self.partial.is_none_or(|(partial, _)| partial != image.hash) {
                // Rows of two images are kept, and it is one of them.
                self.kept[1] = None;
            }
            self.partial = Some((image.hash, *share));
            if *share >= 1.0 {
                self.keep(image.hash);
            }
        }
        let mut read = plan.runs.iter().flat_map(|run| run.image_rows());
        if let Some((span, _)) = read.next() {
            self.keep(span.image.hash);
        }
    }

    /// All of an image is encoded. Parts of another are lost if that was done for the step that has its rows.
    fn keep(&mut self, hash: [u8; 32]) {
        if self.done(&hash) < 1.0 || self.partial.is_some_and(|(partial, _)| partial == hash) {
            self.partial = None;
        }
        if self.kept[0] != Some(hash) {
            self.kept = [Some(hash), self.kept[0]];
        }
    }
}

/// What a step has of images: rows of one, or a part of its encode.
#[derive(Clone, Debug)]
pub(super) struct StepImage {
    known: KnownImages,
    /// How long it may encode; `None` for as long as it takes.
    time: Option<EncodeTime>,
    /// The only one: the memory of one encode was proved.
    hash: Option<[u8; 32]>,
    encode: Option<PartialEncode>,
}

impl StepImage {
    /// Of a step that has none yet.
    pub(super) fn none(known: KnownImages, time: Option<EncodeTime>) -> Self {
        Self {
            known,
            time,
            hash: None,
            encode: None,
        }
    }

    /// Whether the step may have rows of `image`. If it is not encoded by then, the step encodes a part of it.
    pub(super) fn may_read(&mut self, image: &Arc<Image>) -> bool {
        if let Some(hash) = self.hash {
            return hash == image.hash && !self.is_put_off();
        }
        self.hash = Some(image.hash);
        let done = self.known.done(&image.hash);
        let Some(time) = self.time.filter(|_| done < 1.0) else {
            return true;
        };
        let share = match done + time.share(image.grid.patches(), done > 0.0) {
            share if share > ALL => 1.0,
            share => share,
        };
        self.encode = Some(PartialEncode {
            image: Arc::clone(image),
            share,
        });
        share >= 1.0
    }

    /// Whether an image must wait for a later step.
    pub(super) fn is_put_off(&self) -> bool {
        self.encode.as_ref().is_some_and(|encode| encode.share < 1.0)
    }

    pub(super) fn encode_at_once(&mut self) {
        self.time = None;
    }

    pub(super) fn encode(self) -> Option<PartialEncode> {
        self.encode
    }
}
