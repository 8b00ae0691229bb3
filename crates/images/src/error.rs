use crate::format::Format;

/// Why an image is refused. The texts are for clients: they say what is wrong with the image and what to send instead.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum ImageError {
    /// The file is longer than allowed.
    #[error("the image has {bytes} bytes; at most {most} are allowed: scale it down before sending it")]
    TooManyBytes {
        /// Bytes of the file.
        bytes: usize,
        /// Most bytes allowed.
        most: usize,
    },
    /// The picture is larger than allowed, whatever its file's size.
    #[error(
        "the image has {width} x {height} pixels; at most {most} pixels are allowed: scale it down before sending it"
    )]
    TooManyPixels {
        /// Columns.
        width: usize,
        /// Rows.
        height: usize,
        /// Most pixels allowed.
        most: usize,
    },
    /// The file begins like no format that is read here.
    #[error("this is not an image in a known format{}: send PNG, JPEG, WebP, GIF or BMP", hint(.0))]
    UnknownFormat(&'static str),
    /// The file is damaged, cut, or uses what its format has but decoders do not read.
    #[error("the {format} image cannot be decoded: {why}")]
    Broken {
        /// What the file begins like.
        format: Format,
        /// What the decoder says.
        why: String,
    },
    /// The picture is too narrow for the model's processor.
    #[error(
        "the image has {width} x {height} pixels; its longer side may be at most {most} times as long as the other"
    )]
    AspectRatio {
        /// Columns.
        width: usize,
        /// Rows.
        height: usize,
        /// Most that the ratio of the sides may be.
        most: usize,
    },
    /// The resized picture has more patches than the encoder was measured with.
    #[error(
        "the image makes {patches} patches; the encoder's memory is for at most {most}: lower max_pixels or min_pixels"
    )]
    TooManyPatches {
        /// Patches of this image.
        patches: usize,
        /// Most patches.
        most: usize,
    },
    /// `min_pixels` or `max_pixels` of a request is not possible with this model and server.
    #[error("{field} {why}")]
    Override {
        /// `min_pixels` or `max_pixels`.
        field: &'static str,
        /// What is wrong with its value.
        why: String,
    },
}

fn hint(name: &str) -> String {
    match name {
        "" => String::new(),
        name => format!(" (it looks like {name})"),
    }
}

/// Why images cannot be prepared for a model.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{file}: {message}")]
pub struct ProcessorError {
    /// The file of the model that is not understood.
    pub file: &'static str,
    /// The field and what is wrong with it.
    pub message: String,
}
