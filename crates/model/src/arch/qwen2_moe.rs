use serde_json::json;

use super::{Family, check_layer_types, decoder, moe, no_window};
use crate::spec::Mlp;

/// [Qwen 1.5 and 2](https://arxiv.org/abs/2407.10671) with experts, one of which every token goes to.
pub(super) const FAMILY: Family = Family {
    hf_name: "Qwen2MoeForCausalLM",
    headless_name: "Qwen2MoeModel",
    model_type: "qwen2_moe",
    gguf_name: Some("qwen2moe"),
    fields: || {
        moe::qwen_fields(
            json!({"use_sliding_window": false, "sliding_window": null, "max_window_layers": null,
            "layer_types": null, "qkv_bias": true, "shared_expert_intermediate_size": null}),
        )
    },
    spec: |config| {
        if config.use_sliding_window == Some(true) {
            no_window(config)?;
        }
        check_layer_types(config, |_| false)?;
        let (moe, has_experts) = moe::qwen_shared(config)?;
        decoder(config, |index, layer| {
            layer.attention_mut().qkv_bias = config.qkv_bias.unwrap_or(true);
            if has_experts(index) {
                layer.mlp = Mlp::Moe(moe.clone());
            }
        })
    },
};
