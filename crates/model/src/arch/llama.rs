use super::{check_layer_types, decoder};
use crate::config::RawConfig;
use crate::{DecoderSpec, ModelError};

/// Llama ([2](https://arxiv.org/abs/2307.09288), [3](https://arxiv.org/abs/2407.21783)): the plain decoder.
pub(super) fn spec(config: &RawConfig) -> Result<DecoderSpec, ModelError> {
    if let Some(Some(window)) = config.sliding_window {
        return Err(ModelError::unsupported(
            "sliding_window",
            window,
            "Llama models have none: only null is",
        ));
    }
    check_layer_types(config, |_| false)?;
    decoder(config, |_, _| ())
}
