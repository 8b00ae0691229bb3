//! From pixels to the patches that an encoder reads.

use std::sync::Arc;

use plimsoll_core::{Image, ImageGrid, Levels, PatchShape};
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
    /// What a patch is.
    pub(crate) fn shape(self) -> PatchShape {
        PatchShape {
            pixels: self.patch * self.patch,
            frames: self.frames,
        }
    }
}

/// `(value - mean / scale) / (std / scale)` in f32, which is how the reference fuses scaling and normalising.
pub(crate) fn levels(mean: [f32; 3], std: [f32; 3], scale: f64) -> Levels {
    let inverse = (1.0 / scale) as f32;
    std::array::from_fn(|colour| {
        let (mean, std) = (mean[colour] * inverse, std[colour] * inverse);
        std::array::from_fn(|value| (value as f32 - mean) / std)
    })
}

/// The patches of resized `pixels`, each `[colour, row, column]`: squares of `merge` patches from left to right and from top to bottom,
/// and so within a square.
pub(crate) fn patches(pixels: &Pixels, grid: ImageGrid, cut: Cut) -> Vec<u8> {
    let Cut { patch, merge, .. } = cut;
    let mut patches = Vec::with_capacity(grid.patches() * cut.shape().bytes());
    for square_row in 0..grid.height / merge {
        for square_column in 0..grid.width / merge {
            for place in 0..merge * merge {
                let top = (square_row * merge + place / merge) * patch;
                let left = (square_column * merge + place % merge) * patch;
                for colour in 0..3 {
                    for row in top..top + patch {
                        let start = (row * pixels.width + left) * 3;
                        let row = &pixels.rgb[start..start + patch * 3];
                        patches.extend(row.chunks_exact(3).map(|pixel| pixel[colour]));
                    }
                }
            }
        }
    }
    patches
}

/// The image with its hash: SHA-256 of the grid and the pixels.
pub(crate) fn image(grid: ImageGrid, pixels: Vec<u8>, levels: Arc<Levels>) -> Image {
    let mut hash = Sha256::new();
    for side in [grid.frames, grid.height, grid.width] {
        hash.update((side as u64).to_le_bytes());
    }
    hash.update(&pixels);
    Image {
        hash: hash.finalize().into(),
        grid,
        pixels,
        levels,
    }
}
