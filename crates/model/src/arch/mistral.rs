use super::{check_layer_types, decoder, window};
use crate::config::RawConfig;
use crate::{DecoderSpec, ModelError};

/// What transformers takes an absent `sliding_window` to mean; null means none.
const DEFAULT_WINDOW: usize = 4096;

/// [Mistral 7B](https://arxiv.org/abs/2310.06825) and its successors: Llama, attention in a sliding window.
pub(super) fn spec(config: &RawConfig) -> Result<DecoderSpec, ModelError> {
    let size = config.sliding_window.unwrap_or(Some(DEFAULT_WINDOW));
    let size = size.map(window).transpose()?;
    check_layer_types(config, |_| size.is_some())?;
    decoder(config, |_, layer| layer.attention_mut().window = size)
}
