use serde_json::json;

use super::{Family, decoder};

/// [Qwen3-VL](https://arxiv.org/abs/2511.21631), dense: Qwen 3 with positions in three dimensions.
pub(super) const FAMILY: Family = Family {
    hf_name: "Qwen3VLForConditionalGeneration",
    headless_name: "Qwen3VLTextModel",
    model_type: "qwen3_vl_text",
    gguf_name: None,
    fields: || json!({"head_dim": 128, "rope_theta": 500_000.0, "attention_bias": false}),
    spec: |config| {
        decoder(config, |_, layer| {
            layer.attention_mut().qk_norm = true;
        })
    },
};
