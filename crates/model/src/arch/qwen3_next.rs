use serde_json::json;

use super::hybrid::{expert_fields, experts, fields, hybrid};
use super::{Family, with};
use crate::spec::Projections;

/// [Qwen3-Next](https://qwen.ai/blog?id=qwen3-next): Gated DeltaNet in three layers of four, gated attention in the others, a part of
/// each head of which is rotated; experts unless there are 0.
pub(super) const FAMILY: Family = Family {
    hf_name: "Qwen3NextForCausalLM",
    headless_name: "Qwen3NextModel",
    model_type: "qwen3_next",
    gguf_name: Some("qwen3next"),
    fields: || {
        let own = json!({"num_experts": 512, "num_experts_per_tok": 10});
        with(expert_fields(fields()), own)
    },
    spec: |config| match config.num_experts {
        Some(0) => hybrid(config, Projections::Fused, |_| None),
        _ => hybrid(config, Projections::Fused, experts(config)?),
    },
};
