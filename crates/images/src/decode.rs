//! From the bytes of a file to RGB, as Pillow reads it: upright by its EXIF orientation, transparency over white.

use std::fmt;
use std::io::Cursor;

use image::metadata::Orientation;
use image::{DynamicImage, ImageDecoder, ImageFormat, ImageReader, Limits};

use crate::error::ImageError;
use crate::format::Format;
use crate::jpeg;

/// What a file may cost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DecodeLimits {
    /// Most bytes of the file.
    pub max_bytes: usize,
    /// Most pixels of the picture.
    pub max_pixels: usize,
}

impl Default for DecodeLimits {
    /// 64 MiB, and the number of pixels above which Pillow warns of decompression bombs.
    fn default() -> Self {
        Self {
            max_bytes: 64 << 20,
            max_pixels: 89_478_485,
        }
    }
}

/// By the first bytes of a file.
fn format_of(bytes: &[u8]) -> Result<Format, ImageError> {
    let other = |name| Err(ImageError::UnknownFormat(name));
    match bytes {
        [0x89, b'P', b'N', b'G', b'\r', b'\n', 0x1a, b'\n', ..] => Ok(Format::Png),
        [0xff, 0xd8, 0xff, ..] => Ok(Format::Jpeg),
        [b'R', b'I', b'F', b'F', _, _, _, _, b'W', b'E', b'B', b'P', ..] => Ok(Format::WebP),
        [b'G', b'I', b'F', b'8', b'7' | b'9', b'a', ..] => Ok(Format::Gif),
        [b'B', b'M', ..] => Ok(Format::Bmp),
        [] => other("an empty file"),
        [b'I', b'I', 42, 0, ..] | [b'M', b'M', 0, 42, ..] => other("TIFF"),
        [
            _,
            _,
            _,
            _,
            b'f',
            b't',
            b'y',
            b'p',
            b'a',
            b'v',
            b'i',
            b'f' | b's',
            ..,
        ] => other("AVIF"),
        [
            _,
            _,
            _,
            _,
            b'f',
            b't',
            b'y',
            b'p',
            b'h',
            b'e',
            b'i',
            b'c' | b'x',
            ..,
        ] => other("HEIC"),
        [_, _, _, _, b'f', b't', b'y', b'p', ..] => other("a video"),
        [b'%', b'P', b'D', b'F', ..] => other("a PDF document"),
        [b'<', b's', b'v', b'g', ..] | [b'<', b'?', b'x', b'm', b'l', ..] => other("SVG"),
        _ => other(""),
    }
}

/// What the beginning of a file says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Its format.
    pub format: Format,
    /// Columns, once upright.
    pub width: usize,
    /// Rows, once upright.
    pub height: usize,
    /// Bytes of memory that [`decode`] takes at most, its result included and the file not.
    pub memory: usize,
}

/// A picture: 8 bits of red, green and blue for each pixel, row by row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pixels {
    /// Columns.
    pub width: usize,
    /// Rows.
    pub height: usize,
    /// `[height, width, 3]`.
    pub rgb: Vec<u8>,
}

/// Reads a file's header and checks it against `limits`. Allocates no more than the metadata of the file.
///
/// # Errors
/// [`ImageError`] if the file is too large, broken, or no image.
pub fn inspect(bytes: &[u8], limits: &DecodeLimits) -> Result<Header, ImageError> {
    open(bytes, limits).map(|opened| opened.header)
}

/// Decodes a file that [`inspect`] accepts.
///
/// Equal to what transformers' processors make of a Pillow image: EXIF orientation is applied, transparency is laid over
/// white, of 16 bits the upper 8 are kept (of grey without transparency the lower 8, at most 255). All formats are equal bit by bit, but JPEG, of which single values may
/// differ from libjpeg-turbo's by rounding (up to 3 of 255 where colours are sampled at half the resolution).
///
/// # Errors
/// [`ImageError`], as [`inspect`]; also where the file is cut.
pub fn decode(bytes: &[u8], limits: &DecodeLimits) -> Result<Pixels, ImageError> {
    let Opened {
        header,
        orientation,
        source,
    } = open(bytes, limits)?;
    let mut image = match source {
        Source::Jpeg(jpeg) => jpeg.decode().map_err(broken(Format::Jpeg))?,
        Source::Other(decoder) => {
            let image = DynamicImage::from_decoder(decoder);
            rgb(image.map_err(broken(header.format))?)
        }
    };
    image.apply_orientation(orientation);
    let rgb = image.into_rgb8();
    Ok(Pixels {
        width: rgb.width() as usize,
        height: rgb.height() as usize,
        rgb: rgb.into_raw(),
    })
}

struct Opened<'a> {
    header: Header,
    orientation: Orientation,
    source: Source<'a>,
}

enum Source<'a> {
    Jpeg(jpeg::Jpeg<'a>),
    Other(Box<dyn ImageDecoder + 'a>),
}

fn open<'a>(bytes: &'a [u8], limits: &DecodeLimits) -> Result<Opened<'a>, ImageError> {
    if bytes.len() > limits.max_bytes {
        return Err(ImageError::TooManyBytes {
            bytes: bytes.len(),
            most: limits.max_bytes,
        });
    }
    let format = format_of(bytes)?;
    let of_image = match format {
        Format::Jpeg => {
            let jpeg = jpeg::Jpeg::open(bytes).map_err(broken(format))?;
            let (width, height) = jpeg.size();
            check_pixels(width, height, limits)?;
            // Coefficients of 16 bits, if it is progressive, and the components beside the result.
            let memory = width * height * (3 + 3 * 2 + 3);
            let orientation = jpeg.orientation();
            return Ok(Opened {
                header: upright(format, (width, height), memory, orientation),
                orientation,
                source: Source::Jpeg(jpeg),
            });
        }
        Format::Png => ImageFormat::Png,
        Format::WebP => ImageFormat::WebP,
        Format::Gif => ImageFormat::Gif,
        Format::Bmp => ImageFormat::Bmp,
    };
    let reader = ImageReader::with_format(Cursor::new(bytes), of_image);
    let mut decoder = reader.into_decoder().map_err(broken(format))?;
    let (width, height) = decoder.dimensions();
    let (width, height) = (width as usize, height as usize);
    check_pixels(width, height, limits)?;
    // Decoders of frames keep a canvas beside the frame, and what they return is turned into RGB.
    let memory = width * height * (2 * usize::from(decoder.color_type().bytes_per_pixel()) + 3);
    let mut most = Limits::no_limits();
    most.max_alloc = Some((memory + limits.max_bytes) as u64 + (1 << 20));
    decoder.set_limits(most).map_err(broken(format))?;
    // A damaged EXIF block is no reason to refuse a picture: Pillow ignores it.
    let orientation = decoder.orientation().unwrap_or(Orientation::NoTransforms);
    Ok(Opened {
        header: upright(format, (width, height), memory, orientation),
        orientation,
        source: Source::Other(Box::new(decoder)),
    })
}

fn check_pixels(width: usize, height: usize, limits: &DecodeLimits) -> Result<(), ImageError> {
    match width
        .checked_mul(height)
        .is_some_and(|pixels| pixels <= limits.max_pixels)
    {
        true => Ok(()),
        false => Err(ImageError::TooManyPixels {
            width,
            height,
            most: limits.max_pixels,
        }),
    }
}

fn upright(
    format: Format,
    (width, height): (usize, usize),
    memory: usize,
    orientation: Orientation,
) -> Header {
    let turned = matches!(
        orientation,
        Orientation::Rotate90
            | Orientation::Rotate270
            | Orientation::Rotate90FlipH
            | Orientation::Rotate270FlipH
    );
    let (width, height) = match turned {
        true => (height, width),
        false => (width, height),
    };
    Header {
        format,
        width,
        height,
        memory: memory
            + if orientation == Orientation::NoTransforms {
                0
            } else {
                width * height * 3
            },
    }
}

fn broken<E: fmt::Display>(format: Format) -> impl Fn(E) -> ImageError {
    move |error| ImageError::Broken {
        format,
        why: plimsoll_core::untrusted::quotable(&error.to_string()),
    }
}

/// Eight bits of red, green and blue, transparency over white.
fn rgb(image: DynamicImage) -> DynamicImage {
    let (width, height) = (image.width(), image.height());
    let mut rgb = Vec::with_capacity(width as usize * height as usize * 3);
    match image {
        DynamicImage::ImageRgb8(_) => return image,
        DynamicImage::ImageLuma8(grey) => {
            grey.into_raw().into_iter().for_each(|v| rgb.extend([v; 3]));
        }
        // Pillow reads 16 bits of grey as a number, and cuts those above 255.
        DynamicImage::ImageLuma16(grey) => {
            grey.into_raw()
                .into_iter()
                .for_each(|v| rgb.extend([v.min(255) as u8; 3]));
        }
        DynamicImage::ImageLumaA8(grey) => {
            for pixel in grey.into_raw().chunks_exact(2) {
                rgb.extend([over_white(pixel[0], pixel[1]); 3]);
            }
        }
        DynamicImage::ImageLumaA16(grey) => {
            for pixel in grey.into_raw().chunks_exact(2) {
                rgb.extend([over_white((pixel[0] >> 8) as u8, (pixel[1] >> 8) as u8); 3]);
            }
        }
        DynamicImage::ImageRgb16(colours) => {
            rgb.extend(colours.into_raw().into_iter().map(|v| (v >> 8) as u8));
        }
        DynamicImage::ImageRgba16(colours) => {
            for pixel in colours.into_raw().chunks_exact(4) {
                let alpha = (pixel[3] >> 8) as u8;
                rgb.extend(pixel[..3].iter().map(|&v| over_white((v >> 8) as u8, alpha)));
            }
        }
        other => {
            for pixel in other.into_rgba8().into_raw().chunks_exact(4) {
                rgb.extend(pixel[..3].iter().map(|&v| over_white(v, pixel[3])));
            }
        }
    }
    image::RgbImage::from_raw(width, height, rgb).map_or_else(DynamicImage::default, DynamicImage::ImageRgb8)
}

/// `value` with opacity `alpha` before white, rounded as Pillow's `alpha_composite` does.
fn over_white(value: u8, alpha: u8) -> u8 {
    if alpha == 0 {
        return 255;
    }
    let (value, alpha) = (u32::from(value), u32::from(alpha));
    let sum = ((value * alpha + 255 * (255 - alpha)) << 7) + (0x80 << 7);
    let divided = ((sum >> 8) + sum) >> 8;
    u8::try_from(divided >> 7).unwrap_or(u8::MAX)
}
