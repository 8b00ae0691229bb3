use plimsoll_core::ImageGrid;

/// What a request may change about how its images are resized.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Overrides {
    /// Fewest pixels after resizing.
    pub min_pixels: Option<usize>,
    /// Most pixels after resizing.
    pub max_pixels: Option<usize>,
}

impl Overrides {
    /// Whether nothing is changed.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// What becomes of a picture of one size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plan {
    /// Columns after resizing.
    pub width: usize,
    /// Rows after resizing.
    pub height: usize,
    /// Its patches.
    pub grid: ImageGrid,
    /// Rows that the encoder makes of it, each the embedding of one token of the prompt.
    pub rows: usize,
    /// Their tokens.
    pub layout: Layout,
    /// Bytes of `Image::pixels`.
    pub pixel_bytes: usize,
}

/// How the tokens of one image lie in a prompt: `lines` times `per_line` placeholders, with [`crate::Markers::line_end`]
/// between the lines and [`crate::Markers::last_line_end`] behind the last.
///
/// Where there are such marks, each line is a span of its own: the spans of one image follow each other in the prompt, and each
/// takes the rows of the encoder behind those of the span before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Lines.
    pub lines: usize,
    /// Placeholders of a line.
    pub per_line: usize,
}

/// The picture with the most patches of all that are admitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Worst {
    /// Columns of a picture that has so many.
    pub width: usize,
    /// Its rows.
    pub height: usize,
    /// What becomes of it.
    pub plan: Plan,
}
