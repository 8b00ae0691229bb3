use serde_json::json;

use super::{Family, decoder, window};
use crate::spec::Projections;

/// [Phi-3](https://arxiv.org/abs/2404.14219), Phi-4 and [Phi-4-mini](https://arxiv.org/abs/2503.01743): Llama, projections of
/// the same input stored as one; some rotate a part of each head, by frequencies stretched one by one.
pub(super) const FAMILY: Family = Family {
    hf_name: "Phi3ForCausalLM",
    headless_name: "Phi3Model",
    model_type: "phi3",
    gguf_name: Some("phi3"),
    fields: || json!({"sliding_window": null, "partial_rotary_factor": 1, "original_max_position_embeddings": 4096}),
    spec: |config| {
        let window = window(config)?;
        decoder(config, |_, layer| {
            let attention = layer.attention_mut();
            attention.window = window;
            attention.projections = Projections::Fused;
            layer.dense_mlp_mut().projections = Projections::Fused;
        })
    },
};
