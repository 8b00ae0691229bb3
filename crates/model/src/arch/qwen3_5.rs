use serde_json::{Value, json};

use super::{Family, hybrid, with};
use crate::spec::Projections;

/// Qwen 3.5, 3.6 and 3.8, dense, text: [Qwen3-Next](super::qwen3_next), each projection stored by itself, and positions in
/// three dimensions.
pub(super) const FAMILY: Family = Family {
    hf_name: "Qwen3_5ForCausalLM",
    headless_name: "Qwen3_5TextModel",
    model_type: "qwen3_5_text",
    gguf_name: Some("qwen35"),
    fields,
    spec: |config| hybrid::hybrid(config, Projections::Separate, |_| None),
};

pub(super) fn fields() -> Value {
    // Of a layer that drafts, which is not loaded.
    let of_draft = json!({"mtp_num_hidden_layers": 0, "mtp_use_dedicated_embeddings": false});
    with(hybrid::fields(), of_draft)
}
