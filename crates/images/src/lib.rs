//! Images of prompts: files are decoded within bounds, and resized, normalised and cut into patches as the model's reference
//! processor does, so that the encoder reads the numbers with which it was trained.
//!
//! [`decode()`] makes [`Pixels`] of the bytes of a file, a [`Processor`] makes a [`plimsoll_core::Image`] of those. Both take
//! long: they are for threads that may block. Nothing here has side effects or reads files.

mod config;
mod decode;
mod error;
mod families;
mod format;
mod jpeg;
mod patches;
mod plan;
mod processor;
mod resize;
mod worst;

pub use decode::{DecodeLimits, Header, Pixels, decode, inspect};
pub use error::{ImageError, ProcessorError};
pub use format::Format;
pub use plan::{Layout, Overrides, Plan, Worst};
pub use processor::{Markers, Processor, Wrap};
