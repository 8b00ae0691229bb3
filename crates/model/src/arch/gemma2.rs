use serde_json::json;

use super::gemma::gemma;
use super::{Family, sliding_layers, window};

/// [Gemma 2](https://arxiv.org/abs/2408.00118): a window in every other layer, soft caps of scores and logits, norms of what
/// layers add.
pub(super) const FAMILY: Family = Family {
    hf_name: "Gemma2ForCausalLM",
    headless_name: "Gemma2Model",
    model_type: "gemma2",
    gguf_name: Some("gemma2"),
    fields: || {
        json!({"vocab_size": 256_000, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
            "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-6, "tie_word_embeddings": true, "query_pre_attn_scalar": 256, "sliding_window": 4096,
            "layer_types": null, "rope_theta": 1e4, "hidden_activation": "gelu_pytorch_tanh", "hidden_act": null,
            "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
            // Repeats `sliding_window` in published files; transformers ignores it.
            "sliding_window_size": null})
    },
    spec: |config| {
        let (window, slides) = (window(config)?, sliding_layers(config, 2)?);
        let mut spec = gemma(config, |index, attention| {
            attention.soft_cap = config.attn_logit_softcapping.map(|cap| cap as f32);
            attention.window = window.filter(|_| slides[index]);
        })?;
        spec.logit_soft_cap = config.final_logit_softcapping.map(|cap| cap as f32);
        Ok(spec)
    },
};
