use super::{check_layer_types, plain};
use crate::config::RawConfig;
use crate::spec::SlidingWindow;
use crate::{DecoderSpec, ModelError};

/// What transformers takes an absent `sliding_window` to mean; null means none.
const DEFAULT_WINDOW: usize = 4096;

/// [Mistral 7B](https://arxiv.org/abs/2310.06825) and its successors: Llama, attention in a sliding window.
pub(super) fn spec(config: &RawConfig) -> Result<DecoderSpec, ModelError> {
    let size = config.sliding_window.unwrap_or(Some(DEFAULT_WINDOW));
    if size == Some(0) {
        return Err(ModelError::unsupported(
            "sliding_window",
            0,
            "null or a positive number of tokens is",
        ));
    }
    let sliding_window = size.map(|size| SlidingWindow { size, first_layer: 0 });
    check_layer_types(config, sliding_window)?;
    Ok(DecoderSpec {
        sliding_window,
        ..plain(config)?
    })
}
