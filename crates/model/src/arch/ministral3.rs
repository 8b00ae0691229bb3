use serde_json::json;

use super::{Family, decoder, window};

/// [Ministral 3](https://arxiv.org/abs/2601.08584): Mistral, positions stretched by YaRN, queries that grow with them.
pub(super) const FAMILY: Family = Family {
    hf_name: "Ministral3ForCausalLM",
    headless_name: "Ministral3Model",
    model_type: "ministral3",
    gguf_name: Some("mistral3"),
    fields: || {
        json!({"sliding_window": null, "head_dim": 128, "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 1e6, "factor": 16, "original_max_position_embeddings": 16384,
            "beta_fast": 32, "beta_slow": 1, "mscale": 1, "mscale_all_dim": 1, "llama_4_scaling_beta": 0.1,
        }})
    },
    spec: |config| {
        let window = window(config)?;
        decoder(config, |_, layer| layer.attention_mut().window = window)
    },
};
