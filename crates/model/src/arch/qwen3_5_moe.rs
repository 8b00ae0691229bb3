use serde_json::json;

use super::{Family, hybrid, qwen3_5, with};
use crate::ModelError;
use crate::spec::Projections;

/// [Qwen 3.5 and 3.6](super::qwen3_5) with experts in every layer, one of which every token goes to.
pub(super) const FAMILY: Family = Family {
    hf_name: "Qwen3_5MoeForCausalLM",
    headless_name: "Qwen3_5MoeTextModel",
    model_type: "qwen3_5_moe_text",
    gguf_name: Some("qwen35moe"),
    fields: || {
        // No layer is dense, so its width is not given.
        let own = json!({"intermediate_size": 0, "num_experts": 256, "num_experts_per_tok": 8});
        with(hybrid::expert_fields(qwen3_5::fields()), own)
    },
    spec: |config| {
        // What Qwen3-Next has as a choice. Transformers does not look at the field here.
        if config.norm_topk_prob == Some(false) {
            return Err(ModelError::unsupported("norm_topk_prob", false, "only true is"));
        }
        let experts = hybrid::experts(config)?;
        hybrid::hybrid(config, Projections::Separate, experts)
    },
};
