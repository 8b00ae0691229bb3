//! JPEG files.

use image::metadata::Orientation;
use image::{DynamicImage, GrayImage, RgbImage};
use zune_core::bytestream::ZCursor;
use zune_core::colorspace::ColorSpace;
use zune_core::options::DecoderOptions;
use zune_jpeg::JpegDecoder;

/// A file whose header is read.
pub(crate) struct Jpeg<'a> {
    bytes: &'a [u8],
    width: usize,
    height: usize,
    is_grey: bool,
    orientation: Orientation,
}

impl<'a> Jpeg<'a> {
    pub(crate) fn open(bytes: &'a [u8]) -> Result<Self, String> {
        let mut decoder = decoder(bytes, false, ColorSpace::RGB);
        decoder.decode_headers().map_err(|error| error.to_string())?;
        let (width, height) = decoder.dimensions().ok_or("it has no size")?;
        let exif = decoder.exif().map(Vec::as_slice);
        Ok(Self {
            bytes,
            width,
            height,
            is_grey: decoder.input_colorspace() == Some(ColorSpace::Luma),
            orientation: exif
                .and_then(Orientation::from_exif_chunk)
                .unwrap_or(Orientation::NoTransforms),
        })
    }

    /// Columns and rows, as stored.
    pub(crate) fn size(&self) -> (usize, usize) {
        (self.width, self.height)
    }

    pub(crate) fn orientation(&self) -> Orientation {
        self.orientation
    }

    /// Decoders differ in what they forgive. As libjpeg does, damage within the file is forgiven, but not a missing end.
    pub(crate) fn decode(self) -> Result<DynamicImage, String> {
        let colours = match self.is_grey {
            true => ColorSpace::Luma,
            false => ColorSpace::RGB,
        };
        let strict = decoder(self.bytes, true, colours).decode();
        let pixels = match strict {
            Err(_) if self.has_end() => decoder(self.bytes, false, colours).decode(),
            strict => strict,
        };
        let pixels = pixels.map_err(|error| error.to_string())?;
        let (width, height) = (self.width as u32, self.height as u32);
        let image = match self.is_grey {
            true => GrayImage::from_raw(width, height, pixels)
                .map(DynamicImage::ImageLuma8)
                .map(|grey| grey.into_rgb8().into()),
            false => RgbImage::from_raw(width, height, pixels).map(DynamicImage::ImageRgb8),
        };
        image.ok_or_else(|| "it has fewer pixels than it says".to_owned())
    }

    /// Whether the mark of the end stands behind the last scan.
    fn has_end(&self) -> bool {
        let last = |mark: [u8; 2]| self.bytes.windows(2).rposition(|pair| pair == mark);
        last([0xff, 0xd9]) > last([0xff, 0xda])
    }
}

fn decoder(bytes: &[u8], strict: bool, colours: ColorSpace) -> JpegDecoder<ZCursor<&[u8]>> {
    let options = DecoderOptions::default()
        .set_strict_mode(strict)
        .set_max_width(usize::from(u16::MAX))
        .set_max_height(usize::from(u16::MAX))
        .jpeg_set_out_colorspace(colours);
    JpegDecoder::new_with_options(ZCursor::new(bytes), options)
}
