//! Pictures of random colours, for load: a server's work depends on their sizes, not on what they show.

use base64::prelude::{BASE64_STANDARD, Engine};
use image::codecs::jpeg::JpegEncoder;
use image::codecs::png::{CompressionType, FilterType, PngEncoder};
use image::{ExtendedColorType, ImageEncoder};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

/// Sides in pixels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
pub(crate) struct Size {
    pub(crate) width: usize,
    pub(crate) height: usize,
}

impl Size {
    /// Pixels.
    pub(crate) fn area(self) -> usize {
        self.width * self.height
    }

    /// On its side.
    pub(crate) fn turned(self) -> Self {
        Self {
            width: self.height,
            height: self.width,
        }
    }
}

/// How a file holds a picture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Format {
    /// With quality 75, Pillow's default.
    Jpeg,
    Png,
}

/// A picture that follows from these values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Picture {
    pub(crate) size: Size,
    /// Same seed, same picture.
    pub(crate) seed: u64,
    pub(crate) format: Format,
    /// Side of squares of one colour, at least 1; of 1 it is noise, which no format makes smaller.
    pub(crate) grain: usize,
}

impl Picture {
    /// Its part of a chat message, with all of its data.
    ///
    /// # Errors
    /// Where its format has no pictures of this size.
    pub(crate) fn part(&self) -> Result<Value, String> {
        let kind = match self.format {
            Format::Jpeg => "jpeg",
            Format::Png => "png",
        };
        let data = BASE64_STANDARD.encode(self.file()?);
        let url = format!("data:image/{kind};base64,{data}");
        Ok(json!({"type": "image_url", "image_url": {"url": url}}))
    }

    /// The bytes of its file.
    ///
    /// # Errors
    /// As [`Self::part`].
    pub(crate) fn file(&self) -> Result<Vec<u8>, String> {
        let (rgb, mut file) = (self.rgb(), Vec::new());
        let side = |side: usize| u32::try_from(side).map_err(|error| error.to_string());
        let (width, height) = (side(self.size.width)?, side(self.size.height)?);
        let colours = ExtendedColorType::Rgb8;
        let written = match self.format {
            Format::Jpeg => {
                JpegEncoder::new_with_quality(&mut file, 75).write_image(&rgb, width, height, colours)
            }
            Format::Png => {
                // Lines like those above them become zeros, which is all that a fast encoder makes smaller.
                PngEncoder::new_with_quality(&mut file, CompressionType::Fast, FilterType::Up)
                    .write_image(&rgb, width, height, colours)
            }
        };
        written.map_err(|error| format!("a picture of {width} x {height} pixels: {error}"))?;
        Ok(file)
    }

    /// `[height, width, 3]`.
    fn rgb(&self) -> Vec<u8> {
        let (Size { width, height }, grain) = (self.size, self.grain);
        let mut rng = StdRng::seed_from_u64(self.seed);
        let mut rgb = Vec::with_capacity(3 * self.size.area());
        for top in (0..height).step_by(grain) {
            let line = rgb.len();
            for left in (0..width).step_by(grain) {
                let colour: [u8; 3] = rng.random();
                (left..width.min(left + grain)).for_each(|_| rgb.extend(colour));
            }
            let end = rgb.len();
            (top + 1..height.min(top + grain)).for_each(|_| rgb.extend_from_within(line..end));
        }
        rgb
    }
}

#[cfg(test)]
mod tests {
    use plimsoll_images::{DecodeLimits, decode};

    use super::*;

    #[test]
    fn files_hold_the_picture_that_was_asked_for() {
        for (width, height, grain) in [(1, 1, 1), (17, 9, 1), (17, 9, 4), (200, 1, 8), (3, 100, 200)] {
            let size = Size { width, height };
            let picture = |seed, format| Picture {
                size,
                seed,
                format,
                grain,
            };
            let png = picture(1, Format::Png);
            let pixels = decode(&png.file().unwrap(), &DecodeLimits::default()).unwrap();
            assert_eq!((pixels.width, pixels.height), (width, height));
            assert_eq!(pixels.rgb, png.rgb());
            let square = |x: usize, y: usize| pixels.rgb[3 * (y * width + x)..][..3].to_vec();
            let (x, y) = ((grain - 1).min(width - 1), (grain - 1).min(height - 1));
            assert_eq!(square(0, 0), square(x, y));
            assert_ne!(png.file(), picture(2, Format::Png).file());
            let jpeg = picture(1, Format::Jpeg).file().unwrap();
            let pixels = decode(&jpeg, &DecodeLimits::default()).unwrap();
            assert_eq!((pixels.width, pixels.height), (width, height));
        }
        let long = Picture {
            size: Size {
                width: 70_000,
                height: 1,
            },
            seed: 1,
            format: Format::Jpeg,
            grain: 1,
        };
        assert!(long.file().unwrap_err().contains("70000 x 1"));
    }
}
