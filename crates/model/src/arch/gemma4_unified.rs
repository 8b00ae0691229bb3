use serde_json::json;

use super::{Family, gemma4_layers};

/// Gemma 4 12B, whose text model takes images and audio without towers: text is as in the dense models of [`super::gemma4`].
pub(super) const FAMILY: Family = Family {
    hf_name: "Gemma4UnifiedForCausalLM",
    headless_name: "Gemma4UnifiedTextModel",
    model_type: "gemma4_unified_text",
    gguf_name: None,
    fields: || {
        gemma4_layers::fields(
            json!({"max_position_embeddings": 262_144, "sliding_window": 1024, "use_bidirectional_attention": "vision"}),
        )
    },
    spec: gemma4_layers::spec,
};
