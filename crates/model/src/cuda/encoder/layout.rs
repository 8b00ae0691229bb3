//! Where an encode's activations lie, and how its layers are cut into parts.

use std::ops::Range;

use half::bf16;
use plimsoll_core::ImageGrid;

use crate::cuda::staging::{Layout, Section};
use crate::encoder::{KeptImages, PAGE, PatchOrder};
use crate::{EncoderMlp, EncoderSpec};

/// Alignment of everything, in bytes.
const ALIGN: usize = 256;

/// Most patches of a part of a layer, but for windows that are larger. Of 16,384 patches such a part takes about a millisecond.
const PART: usize = 2048;

/// Where everything lies that is on the device for images of up to so many patches.
#[derive(Clone, Copy, Debug)]
pub(super) struct EncoderLayout {
    /// Rows that are kept, of all parts.
    pub(super) kept: Section<bf16>,
    /// The residual stream.
    pub(super) hidden: Section<bf16>,
    pub(super) normed: Section<bf16>,
    /// What is to be added to the residual stream; inside the mergers. Before, pixels.
    pub(super) delta: Section<bf16>,
    /// Patches, then q, k and v; inside mergers that project rows.
    pub(super) wide: Section<bf16>,
    /// What is inside the MLP, of a part.
    pub(super) inner: Section<bf16>,
    /// Its product, where it is gated.
    pub(super) activated: Section<bf16>,
    pub(super) angles: Section<f32>,
    pub(super) rows: Section<bf16>,
    pub(super) levels: Section<f32>,
    /// Pages of the rows.
    pub(super) pages: Section<i32>,
    /// Which of the image's rows each is, where there are windows.
    pub(super) order: Section<i32>,
    /// Where windows begin, and where the last ends.
    pub(super) windows: Section<i32>,
    pub(super) bytes: usize,
}

impl EncoderLayout {
    /// `None` if no memory could hold it.
    pub(super) fn new(spec: &EncoderSpec, patches: usize) -> Option<Self> {
        let mut layout = Layout::aligned(ALIGN);
        let hidden = spec.hidden_size;
        let projected = match spec.has_projection() {
            true => spec.out_size.div_ceil(spec.merged()),
            false => 0,
        };
        let wide = (3 * hidden).max(spec.input.patch.values()).max(projected);
        let inner = spec.intermediate_size;
        let (inner, activated) = match spec.mlp {
            EncoderMlp::Plain(_) => (inner, 0),
            EncoderMlp::Gated(_) => (inner.checked_mul(2)?, inner),
        };
        let rows = patches / spec.merged();
        let part = patches.min(most_of_part(spec));
        let (order, windows) = match spec.windows {
            None => (0, 0),
            // A row each at least.
            Some(_) => (rows, rows + 1),
        };
        Some(Self {
            kept: layout.rows(KeptImages::rows(spec)?, spec.row_size())?,
            hidden: layout.rows(patches, hidden)?,
            normed: layout.rows(patches, hidden)?,
            delta: layout.rows(patches, hidden.max(spec.input.patch.bytes().div_ceil(2)))?,
            wide: layout.rows(patches, wide)?,
            inner: layout.rows(part, inner)?,
            activated: layout.rows(part, activated)?,
            angles: layout.rows(patches, spec.theta.map_or(0, |_| spec.head_dim()))?,
            rows: layout.rows(rows, spec.out_size)?,
            levels: layout.rows(3, 256)?,
            pages: layout.rows(rows.div_ceil(PAGE), 1)?,
            order: layout.rows(order, 1)?,
            windows: layout.rows(windows, 1)?,
            bytes: layout.bytes(),
        })
    }

    /// Bytes of all lists that come from the host.
    pub(super) fn list_bytes(&self) -> usize {
        self.pages.bytes() + self.order.bytes() + self.windows.bytes()
    }
}

/// Patches of a part at most.
fn most_of_part(spec: &EncoderSpec) -> usize {
    let window = spec.windows.as_ref().map_or(0, |windows| {
        let rows = windows.side.saturating_mul(windows.side);
        rows.saturating_mul(spec.merged())
    });
    PART.max(window)
}

/// Some of the patches of a layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Part {
    /// Patches of one frame, or whole frames.
    pub(super) rows: Range<usize>,
    /// Which of the windows they are, where there are such.
    pub(super) windows: Range<usize>,
}

/// The parts of a layer, of at most [`PART`] patches: where there are windows, one or more of them.
pub(super) fn parts(grid: ImageGrid, order: &PatchOrder) -> Vec<Part> {
    let frame = grid.height * grid.width;
    if order.is_as_stored() {
        let frames = (PART / frame).max(1);
        let pieces = (0..grid.frames).step_by(frames).flat_map(move |first| {
            let end = (first + frames).min(grid.frames) * frame;
            (first * frame..end)
                .step_by(PART)
                .map(move |start| start..end.min(start + PART))
        });
        return pieces.map(|rows| Part { rows, windows: 0..0 }).collect();
    }
    let mut parts: Vec<Part> = Vec::new();
    let mut first = 0;
    for (index, len) in order.segments(true).into_iter().enumerate() {
        let end = first + len;
        let goes_on =
            |part: &&mut Part| part.rows.start / frame == first / frame && end - part.rows.start <= PART;
        match parts.last_mut().filter(goes_on) {
            Some(part) => (part.rows.end, part.windows.end) = (end, index + 1),
            None => parts.push(Part {
                rows: first..end,
                windows: index..index + 1,
            }),
        }
        first = end;
    }
    parts
}

#[cfg(test)]
mod tests;
