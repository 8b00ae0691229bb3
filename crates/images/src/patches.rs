//! From pixels to the rows that an encoder reads.

use plimsoll_core::{Image, ImageGrid};
use sha2::{Digest, Sha256};

use crate::decode::Pixels;

/// How patches are cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Cut {
    /// Side of a patch.
    pub(crate) patch: usize,
    /// Patches stand together in squares of this side.
    pub(crate) merge: usize,
    /// A patch has so many frames, which are equal.
    pub(crate) frames: usize,
}

impl Cut {
    /// Values of one patch.
    pub(crate) fn values(self) -> usize {
        3 * self.frames * self.patch * self.patch
    }
}

/// What each of the 256 values of each colour becomes: `(value - mean / scale) / (std / scale)` in f32, which is how the
/// reference fuses scaling and normalising.
pub(crate) type Values = [[f32; 256]; 3];

pub(crate) fn values(mean: [f32; 3], std: [f32; 3], scale: f64) -> Values {
    let inverse = (1.0 / scale) as f32;
    std::array::from_fn(|colour| {
        let (mean, std) = (mean[colour] * inverse, std[colour] * inverse);
        std::array::from_fn(|value| (value as f32 - mean) / std)
    })
}

/// The patches of resized `pixels`, each `[colour, frame, row, column]`: squares of `merge` patches from left to right and from
/// top to bottom, and so within a square.
pub(crate) fn patches(pixels: &Pixels, grid: ImageGrid, cut: Cut, values: &Values) -> Vec<f32> {
    let Cut { patch, merge, frames } = cut;
    let mut patches = Vec::with_capacity(grid.patches() * cut.values());
    for square_row in 0..grid.height / merge {
        for square_column in 0..grid.width / merge {
            for place in 0..merge * merge {
                let top = (square_row * merge + place / merge) * patch;
                let left = (square_column * merge + place % merge) * patch;
                for (colour, values) in values.iter().enumerate() {
                    let from = patches.len();
                    for row in top..top + patch {
                        let start = (row * pixels.width + left) * 3;
                        let row = &pixels.rgb[start..start + patch * 3];
                        patches.extend(
                            row.chunks_exact(3)
                                .map(|pixel| values[usize::from(pixel[colour])]),
                        );
                    }
                    for _ in 1..frames {
                        patches.extend_from_within(from..from + patch * patch);
                    }
                }
            }
        }
    }
    patches
}

/// The image with its hash: SHA-256 of the grid and the patches' bits.
pub(crate) fn image(grid: ImageGrid, patches: Vec<f32>) -> Image {
    let mut hash = Sha256::new();
    for side in [grid.frames, grid.height, grid.width] {
        hash.update((side as u64).to_le_bytes());
    }
    let mut bytes = Vec::with_capacity(4096);
    for some in patches.chunks(1024) {
        bytes.clear();
        bytes.extend(some.iter().flat_map(|value| value.to_bits().to_le_bytes()));
        hash.update(&bytes);
    }
    Image {
        hash: hash.finalize().into(),
        grid,
        patches,
    }
}
