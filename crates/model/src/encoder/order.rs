//! In which order an encoder has the patches of an image.

use plimsoll_core::ImageGrid;

use crate::EncoderSpec;

/// The order of patches: as they are stored, or window by window.
#[derive(Debug)]
pub(crate) struct PatchOrder {
    grid: ImageGrid,
    /// Sides of the squares of patches that follow each other, and patches of one row.
    together: usize,
    merged: usize,
    /// Of each row, where windows are one after the other: which row it is line by line.
    by_window: Option<Vec<usize>>,
    /// Patches of each window.
    windows: Vec<usize>,
}

impl PatchOrder {
    pub(crate) fn new(spec: &EncoderSpec, grid: ImageGrid) -> Self {
        let (merge, merged) = (spec.input.merge, spec.merged());
        let (rows, columns) = (grid.height / merge, grid.width / merge);
        let mut windows = Vec::new();
        let by_window = spec.windows.as_ref().map(|of| {
            let mut order = Vec::with_capacity(grid.patches() / merged);
            for frame in 0..grid.frames {
                for top in (0..rows).step_by(of.side) {
                    for left in (0..columns).step_by(of.side) {
                        let before = order.len();
                        for row in top..rows.min(top + of.side) {
                            let line = (frame * rows + row) * columns;
                            order.extend((left..columns.min(left + of.side)).map(|column| line + column));
                        }
                        windows.push((order.len() - before) * merged);
                    }
                }
            }
            order
        });
        Self {
            grid,
            together: spec.together(),
            merged,
            by_window,
            windows,
        }
    }

    /// Whether patches have the order in which images store them.
    pub(crate) fn is_as_stored(&self) -> bool {
        self.by_window.is_none()
    }

    /// Which of the stored patches each is.
    pub(crate) fn patches(&self) -> impl Iterator<Item = usize> {
        (0..self.grid.patches())
            .map(|patch| self.row(patch / self.merged) * self.merged + patch % self.merged)
    }

    /// Where they lie, row and column.
    pub(crate) fn places(&self) -> impl Iterator<Item = [usize; 2]> {
        let side = self.together;
        let (rows, columns) = (self.grid.height / side, self.grid.width / side);
        self.patches().map(move |patch| {
            let (inside, square) = (patch % (side * side), patch / (side * side));
            let (row, column) = (square / columns % rows, square % columns);
            [row * side + inside / side, column * side + inside % side]
        })
    }

    /// Numbers of consecutive patches that see each other: those of a window or of a frame.
    pub(crate) fn segments(&self, in_windows: bool) -> Vec<usize> {
        match in_windows {
            true => self.windows.clone(),
            false => vec![self.grid.height * self.grid.width; self.grid.frames],
        }
    }

    /// Which of the image's rows is made of the patches of row `index` in this order.
    pub(crate) fn row(&self, index: usize) -> usize {
        self.by_window.as_ref().map_or(index, |order| order[index])
    }

    /// How many rows follow each other in the image too, one group after the other.
    pub(crate) fn consecutive_rows(&self) -> Vec<usize> {
        let rows = self.grid.patches() / self.merged;
        match &self.by_window {
            None => vec![rows],
            Some(order) => order.chunk_by(|a, b| a + 1 == *b).map(<[usize]>::len).collect(),
        }
    }
}

/// The patches that become each row, where they lie line by line.
pub(crate) fn merged_patches(
    grid: ImageGrid,
    merge: usize,
) -> impl Iterator<Item = impl Iterator<Item = usize>> {
    let (width, columns) = (grid.width, grid.width / merge);
    (0..grid.patches() / (merge * merge)).map(move |row| {
        // Whole squares: frames follow each other as lines do.
        let first = row / columns * merge * width + row % columns * merge;
        (0..merge * merge).map(move |patch| first + patch / merge * width + patch % merge)
    })
}
