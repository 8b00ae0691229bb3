use serde_json::json;

use super::{Family, decoder, moe, no_window};
use crate::ModelError;
use crate::spec::Mlp;

/// [Qwen 3](https://arxiv.org/abs/2505.09388) with experts, in all layers or some.
pub(super) const FAMILY: Family = Family {
    hf_name: "Qwen3MoeForCausalLM",
    headless_name: "Qwen3MoeModel",
    model_type: "qwen3_moe",
    gguf_name: Some("qwen3moe"),
    fields: || {
        moe::qwen_fields(
            json!({"head_dim": null, "use_sliding_window": false, "sliding_window": null,
            "max_window_layers": null, "attention_bias": false,
            // Qwen3-Coder's files have it; transformers does not look at it.
            "use_qk_norm": true}),
        )
    },
    spec: |config| {
        if config.use_sliding_window == Some(true) {
            no_window(config)?;
        }
        if config.use_qk_norm == Some(false) {
            return Err(ModelError::unsupported("use_qk_norm", false, "only true is"));
        }
        let (moe, has_experts) = moe::qwen(config)?;
        decoder(config, |index, layer| {
            layer.attention_mut().qk_norm = true;
            if has_experts(index) {
                layer.mlp = Mlp::Moe(moe.clone());
            }
        })
    },
};
