//! What blocks hold.

use plimsoll_core::{BlockImage, ImageSpan, TokenId};

/// The tokens of a block, and what is behind placeholders among them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Content<'a> {
    pub(crate) tokens: &'a [TokenId],
    pub(crate) images: &'a [BlockImage],
}

/// The [`Content`] of a block of a prompt, with its list of images.
#[derive(Clone, Debug)]
pub(crate) struct BlockContent<'a> {
    pub(crate) tokens: &'a [TokenId],
    pub(crate) images: Vec<BlockImage>,
}

impl BlockContent<'_> {
    pub(crate) fn content(&self) -> Content<'_> {
        Content {
            tokens: self.tokens,
            images: &self.images,
        }
    }
}

/// Images of the tokens `start..start + len`.
pub(crate) fn images_of(images: &[ImageSpan], start: usize, len: usize) -> Vec<BlockImage> {
    let block = start..start + len;
    let of_span = |span: &ImageSpan| {
        let rows = span.rows_in(&block);
        (!rows.is_empty()).then(|| BlockImage {
            hash: span.image.hash,
            row: rows.start,
            at: span.token_of(rows.start) - start,
            len: rows.len(),
        })
    };
    images.iter().filter_map(of_span).collect()
}
