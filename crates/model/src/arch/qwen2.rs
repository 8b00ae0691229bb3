use super::{check_layer_types, decoder, window};
use crate::config::RawConfig;
use crate::{DecoderSpec, ModelError};

/// [Qwen 2](https://arxiv.org/abs/2407.10671) and [2.5](https://arxiv.org/abs/2412.15115): Llama, biases on q, k and v.
pub(super) fn spec(config: &RawConfig) -> Result<DecoderSpec, ModelError> {
    let windows = windows(config)?;
    decoder(config, |index, layer| {
        let attention = layer.attention_mut();
        attention.qkv_bias = true;
        attention.window = windows(index);
    })
}

/// The Qwen families' window, by layer: off unless `use_sliding_window`, and then only from layer `max_window_layers` on.
pub(super) fn windows(config: &RawConfig) -> Result<impl Fn(usize) -> Option<usize> + use<>, ModelError> {
    let size = match (config.use_sliding_window, config.sliding_window) {
        (Some(true), Some(Some(size))) => Some(window(size)?),
        _ => None,
    };
    // transformers' default for both families.
    let first = config.max_window_layers.unwrap_or(28);
    let windows = move |index: usize| size.filter(|_| index >= first);
    check_layer_types(config, |index| windows(index).is_some())?;
    Ok(windows)
}
