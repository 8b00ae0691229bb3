use super::plain;
use super::qwen2::sliding_window;
use crate::config::RawConfig;
use crate::{DecoderSpec, ModelError};

/// What transformers takes an absent `head_dim` to mean.
const DEFAULT_HEAD_DIM: usize = 128;

/// [Qwen 3](https://arxiv.org/abs/2505.09388), dense: Qwen 2 with QK norm in place of the biases, heads of their own size.
pub(super) fn spec(config: &RawConfig) -> Result<DecoderSpec, ModelError> {
    let sliding_window = sliding_window(config)?;
    let head_dim = config.head_dim.unwrap_or(DEFAULT_HEAD_DIM);
    Ok(DecoderSpec {
        qk_norm: true,
        head_dim,
        sliding_window,
        ..plain(config)?
    })
}
