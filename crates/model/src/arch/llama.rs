use serde_json::json;

use super::{Family, check_layer_types, decoder, no_window};

/// Llama ([2](https://arxiv.org/abs/2307.09288), [3](https://arxiv.org/abs/2407.21783)): the plain decoder.
pub(super) const FAMILY: Family = Family {
    hf_name: "LlamaForCausalLM",
    headless_name: "LlamaModel",
    model_type: "llama",
    gguf_name: Some("llama"),
    fields: || json!({"layer_types": null, "sliding_window": null, "attention_bias": false}),
    spec: |config| {
        no_window(config)?;
        check_layer_types(config, |_| false)?;
        decoder(config, |_, _| ())
    },
};
