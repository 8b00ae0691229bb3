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

/// What a patch is: pixels of three colours, and equal frames of them where the encoder reads more than one at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PatchShape {
    /// Pixels of a patch.
    pub pixels: usize,
    /// Frames of a patch.
    pub frames: usize,
}

impl PatchShape {
    /// Bytes of a patch in [`Image::pixels`].
    pub fn bytes(self) -> usize {
        3 * self.pixels
    }

    /// Values that the encoder reads of a patch, `[3, frames, pixels]`.
    pub fn values(self) -> usize {
        self.bytes() * self.frames
    }
}

/// What the encoder reads for each value of a byte of red, green and blue: normalised by the model's own rule.
pub type Levels = [[f32; 256]; 3];

/// An image as the model's encoder takes it: resized and cut into patches by the model's own rule. It stays bytes until it is encoded,
/// which is an eighth of what the encoder reads in `f32` where patches have two frames.
#[derive(Clone, Debug, PartialEq)]
pub struct Image {
    /// Identity of the content, by which embeddings and KV are shared: a hash of `grid` and `pixels`.
    pub hash: [u8; 32],
    /// How the patches lie.
    pub grid: ImageGrid,
    /// `[grid.patches(), 3, pixels of a patch]`, in the order in which the encoder reads them.
    pub pixels: Vec<u8>,
    /// What these bytes are to the encoder; shared by all images of a model.
    pub levels: Arc<Levels>,
}

impl Image {
    /// An image whose bytes are all 0, which the encoder reads as 0.
    pub fn blank(hash: [u8; 32], grid: ImageGrid, shape: PatchShape) -> Self {
        Self {
            hash,
            grid,
            pixels: vec![0; grid.patches() * shape.bytes()],
            levels: Arc::new([[0.0; 256]; 3]),
        }
    }

    /// Writes what the encoder reads of one patch, [`PatchShape::values`].
    ///
    /// # Panics
    /// If there is no such patch of this shape.
    pub fn read_patch(&self, patch: usize, shape: PatchShape, out: &mut [f32]) {
        let colours = self.pixels[patch * shape.bytes()..][..shape.bytes()].chunks_exact(shape.pixels);
        let planes = out.chunks_exact_mut(shape.frames * shape.pixels);
        for ((levels, colour), planes) in self.levels.iter().zip(colours).zip(planes) {
            let (first, others) = planes.split_at_mut(shape.pixels);
            for (to, &byte) in first.iter_mut().zip(colour) {
                *to = levels[usize::from(byte)];
            }
            for frame in others.chunks_exact_mut(shape.pixels) {
                frame.copy_from_slice(first);
            }
        }
    }
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
