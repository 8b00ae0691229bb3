//! Where an encode's activations lie, and how its layers are cut into parts.

use std::ops::Range;

use half::bf16;
use plimsoll_core::ImageGrid;

use crate::EncoderSpec;
use crate::cuda::staging::{Layout, Section};
use crate::encoder::{KeptImages, PAGE};

/// Alignment of everything, in bytes.
const ALIGN: usize = 256;

/// Most patches of a part of a layer. Of 16,384 patches such a part takes about a millisecond.
const PART: usize = 2048;

/// Where everything lies that is on the device for images of up to so many patches.
#[derive(Clone, Copy, Debug)]
pub(super) struct EncoderLayout {
    /// Rows that are kept, of all parts.
    pub(super) kept: Section<bf16>,
    /// The residual stream.
    pub(super) hidden: Section<bf16>,
    pub(super) normed: Section<bf16>,
    /// What is to be added to the residual stream; inside the mergers.
    pub(super) delta: Section<bf16>,
    /// Patches, then q, k and v.
    pub(super) wide: Section<bf16>,
    /// What is inside the MLP, of a part.
    pub(super) inner: Section<bf16>,
    pub(super) angles: Section<f32>,
    pub(super) rows: Section<bf16>,
    /// Pages of the rows.
    pub(super) pages: Section<i32>,
    pub(super) bytes: usize,
}

impl EncoderLayout {
    /// `None` if no memory could hold it.
    pub(super) fn new(spec: &EncoderSpec, patches: usize) -> Option<Self> {
        let mut layout = Layout::aligned(ALIGN);
        let hidden = spec.hidden_size;
        let wide = (3 * hidden).max(spec.input.patch_values);
        let rows = patches / spec.merged();
        Some(Self {
            kept: layout.rows(KeptImages::rows(spec)?, spec.row_size())?,
            hidden: layout.rows(patches, hidden)?,
            normed: layout.rows(patches, hidden)?,
            delta: layout.rows(patches, hidden)?,
            wide: layout.rows(patches, wide)?,
            inner: layout.rows(patches.min(PART), spec.intermediate_size)?,
            angles: layout.rows(patches, spec.head_dim())?,
            rows: layout.rows(rows, spec.out_size)?,
            pages: layout.rows(rows.div_ceil(PAGE), 1)?,
            bytes: layout.bytes(),
        })
    }
}

/// The patches of each part of a layer, at most [`PART`]: of one frame, or whole frames.
pub(super) fn parts(grid: ImageGrid) -> impl Iterator<Item = Range<usize>> {
    let frame = grid.height * grid.width;
    let frames = (PART / frame).max(1);
    (0..grid.frames).step_by(frames).flat_map(move |first| {
        let end = (first + frames).min(grid.frames) * frame;
        (first * frame..end)
            .step_by(PART)
            .map(move |start| start..end.min(start + PART))
    })
}
