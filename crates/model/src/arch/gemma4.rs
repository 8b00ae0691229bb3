use serde_json::json;

use super::{Family, gemma4_layers};

/// [Gemma 4](https://ai.google.dev/gemma/docs/core), text: dense, with experts beside each MLP, or with an input of each layer's own.
pub(super) const FAMILY: Family = Family {
    hf_name: "Gemma4ForCausalLM",
    headless_name: "Gemma4TextModel",
    model_type: "gemma4_text",
    gguf_name: Some("gemma4"),
    fields: || {
        gemma4_layers::fields(
            json!({"max_position_embeddings": 131_072, "sliding_window": 512, "use_bidirectional_attention": null,
            "hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262_144,
            "enable_moe_block": false, "num_experts": null, "top_k_experts": null, "moe_intermediate_size": null}),
        )
    },
    spec: gemma4_layers::spec,
};
