use super::{Family, decoder, qwen2};

/// [Qwen2.5-VL](https://arxiv.org/abs/2502.13923): Qwen 2 with positions in three dimensions.
pub(super) const FAMILY: Family = Family {
    hf_name: "Qwen2_5_VLForConditionalGeneration",
    headless_name: "Qwen2_5_VLTextModel",
    model_type: "qwen2_5_vl_text",
    gguf_name: None,
    fields: || {
        let mut fields = qwen2::fields();
        fields["rope_theta"] = 1e6.into();
        fields
    },
    spec: |config| {
        let windows = qwen2::windows(config)?;
        decoder(config, |index, layer| {
            let attention = layer.attention_mut();
            attention.qkv_bias = true;
            attention.window = windows(index);
        })
    },
};
