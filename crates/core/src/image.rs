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

/// Consecutive tokens of a prompt whose embeddings are rows of an image. An image has one span, or several in a row where there are
/// other tokens between its lines.
#[derive(Clone, Debug, PartialEq)]
pub struct ImageSpan {
    /// Index in the prompt of the first of them. All have the id of the model's image placeholder.
    pub start: usize,
    /// How many there are.
    pub len: usize,
    /// Which of the rows that the encoder makes of `image` is that of the first token; the others follow.
    pub first: usize,
    /// Their image.
    pub image: Arc<Image>,
}

impl ImageSpan {
    /// Index in the prompt of the token after its last.
    pub fn end(&self) -> usize {
        self.start + self.len
    }

    /// Which rows of its image are tokens of `range`.
    pub fn rows_in(&self, range: &Range<usize>) -> Range<usize> {
        let row = |at: usize| at.clamp(self.start, self.end()) - self.start + self.first;
        row(range.start)..row(range.end.max(range.start))
    }

    /// Index in the prompt of the token of a row of its image that is one of its own.
    pub fn token_of(&self, row: usize) -> usize {
        self.start + row - self.first
    }

    /// Whether a run that ends at `end` leaves some of its tokens to a later one.
    pub fn is_cut_at(&self, end: usize) -> bool {
        (self.start + 1..self.end()).contains(&end)
    }
}
