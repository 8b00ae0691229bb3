use super::{check_layer_types, plain};
use crate::config::RawConfig;
use crate::spec::SlidingWindow;
use crate::{DecoderSpec, ModelError};

/// [Qwen 2](https://arxiv.org/abs/2407.10671) and [2.5](https://arxiv.org/abs/2412.15115): Llama, biases on q, k and v.
pub(super) fn spec(config: &RawConfig) -> Result<DecoderSpec, ModelError> {
    let sliding_window = sliding_window(config)?;
    Ok(DecoderSpec {
        qkv_bias: true,
        sliding_window,
        ..plain(config)?
    })
}

/// The Qwen families' window: off unless `use_sliding_window`, and then only from block `max_window_layers` on.
pub(super) fn sliding_window(config: &RawConfig) -> Result<Option<SlidingWindow>, ModelError> {
    let window = match (config.use_sliding_window, config.sliding_window) {
        (Some(true), Some(Some(0))) => {
            return Err(ModelError::unsupported(
                "sliding_window",
                0,
                "null or a positive number of tokens is",
            ));
        }
        (Some(true), Some(Some(size))) => {
            // transformers' default for both families.
            Some(SlidingWindow {
                size,
                first_layer: config.max_window_layers.unwrap_or(28),
            })
        }
        _ => None,
    };
    check_layer_types(config, window)?;
    Ok(window)
}
