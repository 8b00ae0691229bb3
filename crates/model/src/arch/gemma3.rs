use std::sync::Arc;

use plimsoll_kernels::Activation;
use serde_json::json;

use super::{Family, decoder, only, rope, sliding_layers, window};

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
        only(
            "hidden_activation",
            config.hidden_activation.as_deref(),
            "gelu_pytorch_tanh",
        )?;
        let (window, slides) = (
            window(config)?,
            sliding_layers(config, config.sliding_window_pattern.unwrap_or(0))?,
        );
        let local = Arc::new(rope::local(config)?);
        let mut spec = decoder(config, |index, layer| {
            (layer.norm.unit_offset, layer.post_norms) = (true, true);
            layer.dense_mlp_mut().activation = Activation::GeluTanh;
            let attention = layer.attention_mut();
            attention.qk_norm = true;
            attention.scale = config.query_pre_attn_scalar.unwrap_or(256.0).sqrt().recip() as f32;
            if slides[index] {
                (attention.window, attention.rope) = (window, Some(Arc::clone(&local)));
            }
        })?;
        spec.final_norm.unit_offset = true;
        spec.embedding_scale = (config.hidden_size as f32).sqrt();
        Ok(spec)
    },
};
