use serde_json::{Value, json};

use super::{Family, check_layer_types, decoder, window};
use crate::ModelError;
use crate::config::RawConfig;

/// [Qwen 2](https://arxiv.org/abs/2407.10671) and [2.5](https://arxiv.org/abs/2412.15115): Llama, biases on q, k and v.
pub(super) const FAMILY: Family = Family {
    hf_name: "Qwen2ForCausalLM",
    headless_name: "Qwen2Model",
    model_type: "qwen2",
    gguf_name: Some("qwen2"),
    fields,
    spec: |config| {
        let windows = windows(config)?;
        decoder(config, |index, layer| {
            let attention = layer.attention_mut();
            attention.qkv_bias = true;
            attention.window = windows(index);
        })
    },
};

pub(super) fn fields() -> Value {
    json!({"use_sliding_window": false, "sliding_window": 4096, "max_window_layers": 28, "layer_types": null})
}

/// The Qwen families' window, by layer: off unless `use_sliding_window`, and then only from layer `max_window_layers` on.
pub(super) fn windows(config: &RawConfig) -> Result<impl Fn(usize) -> Option<usize> + use<>, ModelError> {
    let size = match config.use_sliding_window {
        Some(true) => window(config)?,
        _ => None,
    };
    let first = config.max_window_layers.unwrap_or(0);
    let windows = move |index: usize| size.filter(|_| index >= first);
    check_layer_types(config, |index| windows(index).is_some())?;
    Ok(windows)
}
