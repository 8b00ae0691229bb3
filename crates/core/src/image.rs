use std::ops::Range;
use std::sync::Arc;

/// Patches of one image (or of frames of a video): frames, rows and columns of patches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ImageGrid {
    /// Temporal patches; 1 for an image.
    pub frames: usize,
    /// Rows of patches.
    pub height: usize,
    /// Columns of patches.
    pub width: usize,
}

impl ImageGrid {
    /// Patches in all.
    pub fn patches(&self) -> usize {
        self.frames * self.height * self.width
    }
}

/// An image as the model's encoder takes it: resized, normalised and cut into patches by the model's own rule.
#[derive(Clone, Debug, PartialEq)]
pub struct Image {
    /// Identity of the content, by which embeddings and KV are shared: a hash of `grid` and `patches`.
    pub hash: [u8; 32],
    /// How the patches lie.
    pub grid: ImageGrid,
    /// `[grid.patches(), values of a patch]`, in the order in which the encoder reads them.
    pub patches: Vec<f32>,
}

/// Tokens of a prompt whose embeddings are those of an image.
#[derive(Clone, Debug, PartialEq)]
pub struct ImageSpan {
    /// Index in the prompt of the first of them. All have the id of the model's image placeholder.
    pub start: usize,
    /// How many there are: rows that the encoder makes of `image`.
    pub len: usize,
    /// Their image.
    pub image: Arc<Image>,
}

impl ImageSpan {
    /// Index in the prompt of the token after its last.
    pub fn end(&self) -> usize {
        self.start + self.len
    }

    /// Which of its rows are tokens of `range`.
    pub fn rows_in(&self, range: &Range<usize>) -> Range<usize> {
        let clamp = |at: usize| at.clamp(self.start, self.end()) - self.start;
        clamp(range.start)..clamp(range.end.max(range.start))
    }
}
