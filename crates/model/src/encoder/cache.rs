//! Embeddings of images that were encoded, by content.

use std::sync::Arc;

use plimsoll_core::{Component, Oom};
use plimsoll_device::{Budget, Slab};

use crate::EncoderSpec;

/// Rows of a page.
pub(crate) const PAGE: usize = 16;

/// Images of the most rows that there is room for: the one that a step reads, and as much again for others.
const LARGEST_KEPT: usize = 2;

/// Where the rows of an image are: its pages. Valid until the next image is encoded.
pub(crate) type EncodedImage = Arc<[usize]>;

/// Which images have rows, and in which pages. Those used least recently go first.
#[derive(Clone, Debug)]
pub(crate) struct KeptImages {
    free: Vec<usize>,
    /// The least recently used first.
    kept: Vec<([u8; 32], EncodedImage)>,
    partial: Option<PartialImage>,
}

/// An image of which some parts of the encode are done.
#[derive(Clone, Debug)]
pub(crate) struct PartialImage {
    hash: [u8; 32],
    /// Where its rows will be.
    pub(crate) pages: EncodedImage,
    pub(crate) parts: usize,
}

impl KeptImages {
    pub(crate) fn new(spec: &EncoderSpec) -> Self {
        Self {
            free: (0..pages(spec)).rev().collect(),
            kept: Vec::new(),
            partial: None,
        }
    }

    /// Rows that there is room for; `None` if no memory could hold them.
    pub(crate) fn rows(spec: &EncoderSpec) -> Option<usize> {
        pages(spec).checked_mul(PAGE)
    }

    /// An image that is kept, which is then the one used last.
    pub(crate) fn find(&mut self, hash: &[u8; 32]) -> Option<EncodedImage> {
        let at = self.kept.iter().position(|(kept, _)| kept == hash)?;
        self.kept[at..].rotate_left(1);
        self.kept.last().map(|(_, pages)| Arc::clone(pages))
    }

    /// What is done of an image that is not kept, of so many rows: at most those of the largest. Parts of any other are lost.
    pub(crate) fn begin(&mut self, hash: &[u8; 32], rows: usize) -> &mut PartialImage {
        if self.partial.as_ref().is_none_or(|partial| partial.hash != *hash) {
            self.give_up();
            let pages = self.place(rows);
            self.partial = Some(PartialImage {
                hash: *hash,
                pages,
                parts: 0,
            });
        }
        self.partial.as_mut().expect("it has begun")
    }

    /// So many parts of the image that has begun are done.
    pub(crate) fn reach(&mut self, parts: usize) {
        if let Some(partial) = &mut self.partial {
            partial.parts = parts;
        }
    }

    /// What was written of the image that has begun is of no use.
    pub(crate) fn give_up(&mut self) {
        if let Some(PartialImage { pages, .. }) = self.partial.take() {
            self.free.extend(pages.iter());
        }
    }

    /// All rows of the image that has begun were written: it is kept.
    pub(crate) fn finish(&mut self) {
        if let Some(PartialImage { hash, pages, .. }) = self.partial.take() {
            self.kept.push((hash, pages));
        }
    }

    fn place(&mut self, rows: usize) -> EncodedImage {
        let pages = rows.div_ceil(PAGE);
        let mut gone = 0;
        while self.free.len() < pages {
            self.free.extend(self.kept[gone].1.iter());
            gone += 1;
        }
        self.kept.drain(..gone);
        self.free.drain(self.free.len() - pages..).collect()
    }

    /// Forgets all.
    pub(crate) fn clear(&mut self) {
        self.give_up();
        for (_, pages) in self.kept.drain(..) {
            self.free.extend(pages.iter());
        }
    }
}

/// The rows of images that are kept, in memory that is there from the beginning.
#[derive(Debug)]
pub(crate) struct Embeddings {
    slab: Slab,
    /// Elements of one part of a row, and of all.
    part: usize,
    row: usize,
    pub(crate) images: KeptImages,
}

impl Embeddings {
    pub(crate) fn new(spec: &EncoderSpec, budget: &Budget) -> Result<Self, Oom> {
        let bytes = Self::bytes(spec).ok_or_else(|| budget.oom(Component::Encoder, u64::MAX))?;
        Ok(Self {
            slab: Slab::new(budget, Component::Encoder, bytes)?,
            part: spec.out_size,
            row: spec.row_size(),
            images: KeptImages::new(spec),
        })
    }

    /// What they take; `None` if no memory could hold it.
    pub(crate) fn bytes(spec: &EncoderSpec) -> Option<usize> {
        let elements = KeptImages::rows(spec)?.checked_mul(spec.row_size())?;
        elements.checked_mul(size_of::<f32>())
    }

    /// Writes one part of consecutive rows from `first` on.
    pub(crate) fn write(&mut self, pages: &EncodedImage, part: usize, first: usize, rows: &[f32]) {
        let (row, len) = (self.row, self.part);
        let slab = self.slab.as_mut_slice::<f32>();
        for (index, values) in rows.chunks_exact(len).enumerate() {
            let at = place(pages, first + index) * row + part * len;
            slab[at..at + len].copy_from_slice(values);
        }
    }

    /// One part of a row.
    pub(crate) fn row(&self, pages: &EncodedImage, index: usize, part: usize) -> &[f32] {
        let at = place(pages, index) * self.row + part * self.part;
        &self.slab.as_slice::<f32>()[at..at + self.part]
    }
}

/// Where a row of an image is, among all that there is room for.
pub(crate) fn place(pages: &EncodedImage, row: usize) -> usize {
    pages[row / PAGE] * PAGE + row % PAGE
}

fn pages(spec: &EncoderSpec) -> usize {
    LARGEST_KEPT * spec.most_rows().div_ceil(PAGE)
}
