use serde_json::json;

use super::{Family, qwen2, with};

/// [Qwen2.5-VL](https://arxiv.org/abs/2502.13923): Qwen 2 with positions in three dimensions.
pub(super) const FAMILY: Family = Family {
    hf_name: "Qwen2_5_VLForConditionalGeneration",
    headless_name: "Qwen2_5_VLTextModel",
    model_type: "qwen2_5_vl_text",
    gguf_name: None,
    fields: || with(qwen2::fields(), json!({"rope_theta": 1e6})),
    spec: qwen2::FAMILY.spec,
};
