//! The rules by which families of models choose the size of a picture.

use plimsoll_core::ImageGrid;

use crate::error::ImageError;
use crate::plan::{Layout, Overrides, Plan};

/// How a picture is resized and how many rows the encoder makes of it. All sizes are in pixels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rule {
    /// Qwen2-VL and its successors: sides are multiples of `patch * merge`, the area lies between two bounds.
    Area {
        patch: usize,
        merge: usize,
        min_pixels: usize,
        max_pixels: usize,
    },
    /// SigLIP of Gemma 3: a square of one size; `side * side` rows.
    Square {
        pixels: usize,
        patch: usize,
        side: usize,
    },
    /// Pixtral: sides are multiples of `patch * merge`, the longer is bounded.
    Edge {
        patch: usize,
        merge: usize,
        longest: usize,
    },
}

/// Most that the ratio of the sides may be: the reference's.
const MAX_RATIO: usize = 200;

impl Rule {
    /// What becomes of a picture; its sides are at least 1. Bounds on memory are the caller's.
    pub(crate) fn plan(self, width: usize, height: usize, asked: &Overrides) -> Result<Plan, ImageError> {
        match self {
            Self::Area {
                patch,
                merge,
                min_pixels,
                max_pixels,
            } => {
                let bounds = asked.bounds(min_pixels, max_pixels)?;
                let (height, width) = by_area(height, width, patch * merge, bounds)?;
                Ok(plan((width, height), patch, merge, false))
            }
            Self::Square { pixels, patch, side } => {
                asked.refuse()?;
                let grid = pixels / patch;
                Ok(Plan {
                    rows: side * side,
                    layout: Layout {
                        lines: 1,
                        per_line: side * side,
                    },
                    ..plan((grid * patch, grid * patch), patch, 1, false)
                })
            }
            Self::Edge {
                patch,
                merge,
                longest,
            } => {
                asked.refuse()?;
                let (height, width) = by_edge(height, width, patch * merge, longest)?;
                Ok(plan((width, height), patch, merge, true))
            }
        }
    }

    /// The same for pictures of at most so many pixels after resizing, where their size is not one and the same: of a rule for sides,
    /// those of a square of so many pixels.
    pub(crate) fn bounded(self, most: usize) -> Self {
        match self {
            Self::Area {
                patch,
                merge,
                min_pixels,
                max_pixels,
            } => Self::Area {
                patch,
                merge,
                min_pixels: min_pixels.min(most),
                max_pixels: max_pixels.min(most),
            },
            Self::Edge {
                patch,
                merge,
                longest,
            } => {
                // In whole squares of patches, as all sizes are.
                let square = patch * merge;
                let side = most.isqrt() / square * square;
                Self::Edge {
                    patch,
                    merge,
                    longest: longest.min(side),
                }
            }
            Self::Square { .. } => self,
        }
    }

    pub(crate) fn patch(self) -> usize {
        match self {
            Self::Area { patch, .. } | Self::Square { patch, .. } | Self::Edge { patch, .. } => patch,
        }
    }

    /// Sides of the squares of patches that stand together.
    pub(crate) fn merge(self) -> usize {
        match self {
            Self::Area { merge, .. } => merge,
            // Merged by the model, after its encoder: patches stand in rows.
            Self::Square { .. } | Self::Edge { .. } => 1,
        }
    }
}

impl Overrides {
    fn refuse(&self) -> Result<(), ImageError> {
        let field = match self {
            Self {
                min_pixels: Some(_), ..
            } => "min_pixels",
            Self {
                max_pixels: Some(_), ..
            } => "max_pixels",
            _ => return Ok(()),
        };
        Err(ImageError::Override {
            field,
            why: "has no meaning for this model, which resizes all images by one rule: leave it out"
                .to_owned(),
        })
    }

    /// The bounds on the area, changed as asked.
    fn bounds(&self, min_pixels: usize, max_pixels: usize) -> Result<(usize, usize), ImageError> {
        let wrong = |field, why| Err(ImageError::Override { field, why });
        let most = self.max_pixels.unwrap_or(max_pixels);
        if !(1..=max_pixels).contains(&most) {
            return wrong(
                "max_pixels",
                format!("must be from 1 to {max_pixels}, for which the encoder has memory, not {most}"),
            );
        }
        // A smaller maximum alone lowers the minimum too.
        let least = self.min_pixels.unwrap_or(min_pixels.min(most));
        if !(1..=most).contains(&least) {
            return wrong(
                "min_pixels",
                format!("must be from 1 to max_pixels = {most}, not {least}"),
            );
        }
        Ok((least, most))
    }
}

/// A plan without room for the second frame of a patch, which the processor adds.
fn plan((width, height): (usize, usize), patch: usize, merge: usize, in_lines: bool) -> Plan {
    let grid = ImageGrid {
        frames: 1,
        height: height / patch,
        width: width / patch,
    };
    let (lines, per_line) = (grid.height / merge, grid.width / merge);
    Plan {
        width,
        height,
        grid,
        rows: lines * per_line,
        layout: match in_lines {
            true => Layout { lines, per_line },
            false => Layout {
                lines: 1,
                per_line: lines * per_line,
            },
        },
        pixel_bytes: 0,
    }
}

/// `smart_resize` of transformers' `Qwen2VLImageProcessor`: height and width.
fn by_area(
    height: usize,
    width: usize,
    factor: usize,
    (min_pixels, max_pixels): (usize, usize),
) -> Result<(usize, usize), ImageError> {
    let (long, short) = (height.max(width), height.min(width));
    let (h, w, f) = (height as f64, width as f64, factor as f64);
    if long as f64 / short as f64 > MAX_RATIO as f64 {
        return Err(ImageError::AspectRatio {
            width,
            height,
            most: MAX_RATIO,
        });
    }
    let near = |side: f64| (side / f).round_ties_even() as usize * factor;
    let (near_h, near_w) = (near(h), near(w));
    if near_h * near_w > max_pixels {
        let beta = (h * w / max_pixels as f64).sqrt();
        let floor = |side: f64| ((side / beta / f).floor() as usize * factor).max(factor);
        return Ok((floor(h), floor(w)));
    }
    if near_h * near_w < min_pixels {
        let beta = (min_pixels as f64 / (h * w)).sqrt();
        let ceil = |side: f64| (side * beta / f).ceil() as usize * factor;
        return Ok((ceil(h), ceil(w)));
    }
    Ok((near_h, near_w))
}

/// `get_resize_output_image_size` of transformers' Pixtral: height and width.
fn by_edge(height: usize, width: usize, factor: usize, longest: usize) -> Result<(usize, usize), ImageError> {
    let ratio = (height as f64 / longest as f64).max(width as f64 / longest as f64);
    let shrunk = |side: usize| match ratio > 1.0 {
        true => (side as f64 / ratio).floor() as usize,
        false => side,
    };
    let (h, w) = (shrunk(height), shrunk(width));
    if h == 0 || w == 0 {
        return Err(ImageError::AspectRatio {
            width,
            height,
            most: longest,
        });
    }
    Ok((h.div_ceil(factor) * factor, w.div_ceil(factor) * factor))
}
