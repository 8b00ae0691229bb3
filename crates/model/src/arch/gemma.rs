//! What Gemma's generations have in common: norms by 1 + weight, also of what layers add, tanh GELU, and scaled embeddings.

use plimsoll_kernels::Activation;

use super::{decoder, only};
use crate::ModelError;
use crate::config::RawConfig;
use crate::spec::{AttentionSpec, DecoderSpec};

/// The model with what `change` makes of each layer's attention, by its index.
pub(super) fn gemma(
    config: &RawConfig,
    change: impl Fn(usize, &mut AttentionSpec),
) -> Result<DecoderSpec, ModelError> {
    // transformers reads the former alone; published files of Gemma 2 have both.
    for (field, found) in [
        ("hidden_activation", &config.hidden_activation),
        ("hidden_act", &config.hidden_act),
    ] {
        only(field, found.as_deref(), "gelu_pytorch_tanh")?;
    }
    let mut spec = decoder(config, |index, layer| {
        (layer.norm.unit_offset, layer.post_norms) = (true, true);
        layer.dense_mlp_mut().activation = Activation::GeluTanh;
        let attention = layer.attention_mut();
        attention.scale = config.query_pre_attn_scalar.unwrap_or(256.0).sqrt().recip() as f32;
        change(index, attention);
    })?;
    spec.final_norm.unit_offset = true;
    spec.embedding_scale = (config.hidden_size as f32).sqrt();
    Ok(spec)
}
