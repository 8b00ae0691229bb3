use serde_json::json;

use super::{Family, check_layer_types, decoder, window};

/// [Mistral 7B](https://arxiv.org/abs/2310.06825) and its successors: Llama, attention in a sliding window.
pub(super) const FAMILY: Family = Family {
    hf_name: "MistralForCausalLM",
    headless_name: "MistralModel",
    model_type: "mistral",
    // GGUF files call it llama.
    gguf_name: None,
    fields: || json!({"sliding_window": 4096, "layer_types": null}),
    spec: |config| {
        let window = window(config)?;
        check_layer_types(config, |_| window.is_some())?;
        decoder(config, |_, layer| layer.attention_mut().window = window)
    },
};
