use std::sync::Arc;

use serde_json::json;

use super::gemma::gemma;
use super::{Family, rope, sliding_layers, window};

/// [Gemma 3](https://arxiv.org/abs/2503.19786): windows in most layers, whose positions turn faster; norms of what layers add.
pub(super) const FAMILY: Family = Family {
    hf_name: "Gemma3ForCausalLM",
    headless_name: "Gemma3TextModel",
    model_type: "gemma3_text",
    gguf_name: Some("gemma3"),
    fields: || {
        json!({"vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
            "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131_072,
            "rms_norm_eps": 1e-6, "tie_word_embeddings": true, "query_pre_attn_scalar": 256, "sliding_window": 4096,
            "sliding_window_pattern": 6, "_sliding_window_pattern": null, "layer_types": null, "rope_theta": 1e6,
            "rope_local_base_freq": 1e4, "hidden_activation": "gelu_pytorch_tanh"})
    },
    spec: |config| {
        let pattern = config.sliding_window_pattern.unwrap_or(0);
        let (window, slides) = (window(config)?, sliding_layers(config, pattern)?);
        let local = Arc::new(rope::local(config)?);
        gemma(config, |index, attention| {
            attention.qk_norm = true;
            if slides[index] {
                (attention.window, attention.rope) = (window, Some(Arc::clone(&local)));
            }
        })
    },
};
