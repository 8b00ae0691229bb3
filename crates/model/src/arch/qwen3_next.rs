use plimsoll_kernels::DeltaLayout;
use serde_json::{Value, json};

use super::{Family, LINEAR, decoder, layers_of_kind, only};
use crate::ModelError;
use crate::config::RawConfig;
use crate::spec::{DecoderSpec, DeltaNetSpec, Mixer, Projections};

/// [Qwen3-Next](https://qwen.ai/blog?id=qwen3-next), as far as its MLPs are dense: Gated DeltaNet in three layers of four, gated
/// attention in the others, a part of each head of which is rotated.
pub(super) const FAMILY: Family = Family {
    hf_name: "Qwen3NextForCausalLM",
    headless_name: "Qwen3NextModel",
    model_type: "qwen3_next",
    gguf_name: None,
    fields: || {
        let mut fields = fields();
        let experts = json!({"num_experts": 512, "num_experts_per_tok": 10, "decoder_sparse_step": 1, "mlp_only_layers": [],
            "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "norm_topk_prob": true,
            "output_router_logits": false, "router_aux_loss_coef": 0.001});
        if let (Some(fields), Value::Object(experts)) = (fields.as_object_mut(), experts) {
            fields.extend(experts);
        }
        fields
    },
    spec: |config| match config.num_experts {
        Some(0) => hybrid(config, Projections::Fused),
        experts => Err(ModelError::unsupported(
            "num_experts",
            experts.unwrap_or_default(),
            "only 0 is: experts of this family are not served yet",
        )),
    },
};

pub(super) fn fields() -> Value {
    json!({"head_dim": 256, "partial_rotary_factor": 0.25, "layer_types": null, "full_attention_interval": 4,
        "attn_output_gate": true, "output_gate_type": "swish", "mamba_ssm_dtype": "float32", "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32})
}

/// The network, its linear layers stored so.
pub(super) fn hybrid(config: &RawConfig, projections: Projections) -> Result<DecoderSpec, ModelError> {
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
    let delta_net = DeltaNetSpec {
        layout: DeltaLayout {
            key_heads: config.linear_num_key_heads.unwrap_or(16),
            value_heads: config.linear_num_value_heads.unwrap_or(32),
            key_dim: config.linear_key_head_dim.unwrap_or(128),
            value_dim: config.linear_value_head_dim.unwrap_or(128),
            taps: config.linear_conv_kernel_dim.unwrap_or(4),
        },
        projections,
    };
    let mut spec = decoder(config, |index, layer| {
        layer.norm.unit_offset = true;
        if linear[index] {
            layer.mixer = Mixer::DeltaNet(delta_net);
        } else {
            let attention = layer.attention_mut();
            (attention.qk_norm, attention.gated) = (true, true);
        }
    })?;
    spec.final_norm.unit_offset = true;
    Ok(spec)
}
