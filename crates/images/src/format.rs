use std::fmt;

/// Formats that are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// PNG; of an animation the default image.
    Png,
    /// JPEG.
    Jpeg,
    /// WebP; of an animation the first frame.
    WebP,
    /// GIF; of an animation the first frame.
    Gif,
    /// Windows bitmap.
    Bmp,
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Png => "PNG",
            Self::Jpeg => "JPEG",
            Self::WebP => "WebP",
            Self::Gif => "GIF",
            Self::Bmp => "BMP",
        })
    }
}
