use serde_json::json;

use super::{Family, decoder, qwen2, with};

/// [Qwen 3](https://arxiv.org/abs/2505.09388), dense: Qwen 2 with QK norm in place of the biases, heads of their own size.
pub(super) const FAMILY: Family = Family {
    hf_name: "Qwen3ForCausalLM",
    headless_name: "Qwen3Model",
    model_type: "qwen3",
    gguf_name: Some("qwen3"),
    fields: || with(qwen2::fields(), json!({"head_dim": 128, "attention_bias": false})),
    spec: |config| {
        let windows = qwen2::windows(config)?;
        decoder(config, |index, layer| {
            let attention = layer.attention_mut();
            attention.qk_norm = true;
            attention.window = windows(index);
        })
    },
};
