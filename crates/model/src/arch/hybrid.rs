//! What configurations of hybrid families have in common: Gated DeltaNet in most layers, gated attention in the others.

use plimsoll_kernels::DeltaLayout;
use serde_json::{Value, json};

use super::{LINEAR, decoder, layers_of_kind, moe, only, with};
use crate::ModelError;
use crate::config::RawConfig;
use crate::spec::{DecoderSpec, DeltaNetSpec, Mixer, Mlp, Projections};

/// The fields of experts, beside `others`.
pub(super) fn expert_fields(others: Value) -> Value {
    let own =
        json!({"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "norm_topk_prob": true});
    with(moe::qwen_fields(others), own)
}

/// The experts of each layer that has any.
pub(super) fn experts(config: &RawConfig) -> Result<impl Fn(usize) -> Option<Mlp> + use<>, ModelError> {
    let (moe, has_experts) = moe::qwen_shared(config)?;
    Ok(move |index| has_experts(index).then(|| Mlp::Moe(moe.clone())))
}

pub(super) fn fields() -> Value {
    json!({"head_dim": 256, "partial_rotary_factor": 0.25, "layer_types": null, "full_attention_interval": 4,
        "attn_output_gate": true, "output_gate_type": "swish", "mamba_ssm_dtype": "float32", "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32})
}

/// The network, its linear layers stored so, with these MLPs where they are not dense.
pub(super) fn hybrid(
    config: &RawConfig,
    projections: Projections,
    mlp: impl Fn(usize) -> Option<Mlp>,
) -> Result<DecoderSpec, ModelError> {
    only("mamba_ssm_dtype", config.mamba_ssm_dtype.as_deref(), "float32")?;
    only("output_gate_type", config.output_gate_type.as_deref(), "swish")?;
    if config.attn_output_gate == Some(false) {
        return Err(ModelError::unsupported("attn_output_gate", false, "only true is"));
    }
    let interval = config.full_attention_interval.unwrap_or(4);
    if interval == 0 {
        return Err(ModelError::unsupported(
            "full_attention_interval",
            0,
            "a positive number is",
        ));
    }
    let linear = layers_of_kind(config, LINEAR, interval)?;
    let key_heads = config.linear_num_key_heads.unwrap_or(16);
    let value_heads = config.linear_num_value_heads.unwrap_or(32);
    let delta_net = DeltaNetSpec {
        layout: DeltaLayout {
            key_heads,
            value_heads,
            adjacent: value_heads / key_heads.max(1),
            key_dim: config.linear_key_head_dim.unwrap_or(128),
            value_dim: config.linear_value_head_dim.unwrap_or(128),
            taps: config.linear_conv_kernel_dim.unwrap_or(4),
        },
        projections,
        gates: projections,
    };
    let mut spec = decoder(config, |index, layer| {
        layer.norm.unit_offset = true;
        if linear[index] {
            layer.mixer = Mixer::DeltaNet(delta_net);
        } else {
            let attention = layer.attention_mut();
            (attention.qk_norm, attention.gated) = (true, true);
        }
        if let Some(mlp) = mlp(index) {
            layer.mlp = mlp;
        }
    })?;
    spec.final_norm.unit_offset = true;
    Ok(spec)
}
