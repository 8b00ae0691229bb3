use super::decoder;
use super::qwen2::windows;
use crate::config::RawConfig;
use crate::{DecoderSpec, ModelError};

/// What transformers takes an absent `head_dim` to mean.
const DEFAULT_HEAD_DIM: usize = 128;

/// [Qwen 3](https://arxiv.org/abs/2505.09388), dense: Qwen 2 with QK norm in place of the biases, heads of their own size.
pub(super) fn spec(config: &RawConfig) -> Result<DecoderSpec, ModelError> {
    let windows = windows(config)?;
    let mut config = config.clone();
    config.head_dim = config.head_dim.or(Some(DEFAULT_HEAD_DIM));
    decoder(&config, |index, layer| {
        let attention = layer.attention_mut();
        attention.qk_norm = true;
        attention.window = windows(index);
    })
}
