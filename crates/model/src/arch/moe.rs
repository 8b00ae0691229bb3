//! What configurations of families with experts have in common.

use plimsoll_kernels::{Activation, ExpertActivation, RouterSoftmax};
use serde_json::{Value, json};

use super::with;
use crate::ModelError;
use crate::config::RawConfig;
use crate::spec::{DenseMlpSpec, MoeNames, MoeSpec, Projections, StackedExperts};

/// More than any model has: each expert is described before anything is checked against the weights.
const MOST_EXPERTS: usize = 1024;

/// As most families call them.
pub(super) const NAMES: MoeNames = MoeNames {
    module: "mlp",
    router: "gate",
    projections: ["gate_proj", "up_proj", "down_proj"],
};

/// The Qwen families' fields, beside `others`; newer versions of transformers write `num_local_experts`.
pub(super) fn qwen_fields(others: Value) -> Value {
    let own = json!({"num_experts": null, "num_local_experts": null, "num_experts_per_tok": null, "moe_intermediate_size": null,
        "norm_topk_prob": false, "decoder_sparse_step": 1, "mlp_only_layers": null});
    with(others, own)
}

/// gpt-oss's fields. Its positions are those of YaRN where a configuration says nothing.
pub(super) fn gpt_oss_fields() -> Value {
    json!({"num_local_experts": 128, "num_experts": null, "num_experts_per_tok": 4, "experts_per_token": null,
        "swiglu_alpha": null, "swiglu_limit": null, "attention_bias": true, "sliding_window": 128, "layer_types": null,
        "head_dim": 64, "initial_context_length": null, "rope_theta": 150_000,
        "rope_parameters": {"rope_type": "yarn", "factor": 32, "beta_fast": 32, "beta_slow": 1, "truncate": false,
            "original_max_position_embeddings": 4096}})
}

/// What gpt-oss's configurations say twice, and constants of its activation.
pub(super) fn check_gpt_oss(config: &RawConfig) -> Result<(), ModelError> {
    let only = |field: &str, found: Option<f64>, supported: f64| match found {
        Some(found) if (found - supported).abs() > 1e-6 => {
            let supported = format!("only {} is", supported as f32);
            Err(ModelError::unsupported(field, found, supported))
        }
        _ => Ok(()),
    };
    let [alpha, limit] = ExpertActivation::CLAMPED_SWIGLU.map(f64::from);
    only("swiglu_alpha", config.swiglu_alpha, alpha)?;
    only("swiglu_limit", config.swiglu_limit, limit)?;
    let count = |count: Option<usize>| count.map(|count| count as f64);
    if let Some(top_k) = count(config.num_experts_per_tok) {
        only("experts_per_token", count(config.experts_per_token), top_k)?;
    }
    let rope = config.rope_parameters.as_ref().or(config.rope_scaling.as_ref());
    match rope.and_then(|rope| rope.original_max_position_embeddings) {
        Some(original) => only(
            "initial_context_length",
            count(config.initial_context_length),
            original,
        ),
        None => Ok(()),
    }
}

/// Experts of SwiGLU without biases, of whose logits the softmax is over all.
pub(super) fn spec(config: &RawConfig, intermediate_size: usize) -> Result<MoeSpec, ModelError> {
    let top_k = ("num_experts_per_tok", config.num_experts_per_tok);
    sized(config, top_k, intermediate_size)
}

/// The same, with the field that says how many experts a token goes to, and what it says.
pub(super) fn sized(
    config: &RawConfig,
    (top_k_field, top_k): (&str, Option<usize>),
    intermediate_size: usize,
) -> Result<MoeSpec, ModelError> {
    let (field, experts) = match (config.num_experts, config.num_local_experts) {
        (Some(one), Some(other)) if one != other => {
            let value = format!("{one}, and `num_local_experts` {other}");
            return Err(ModelError::unsupported("num_experts", value, "one number is"));
        }
        (Some(experts), _) => ("num_experts", experts),
        (None, Some(experts)) => ("num_local_experts", experts),
        (None, None) => ("num_experts", 0),
    };
    if !(1..=MOST_EXPERTS).contains(&experts) {
        let supported = format!("1 to {MOST_EXPERTS} are");
        return Err(ModelError::unsupported(field, experts, supported));
    }
    let top_k = top_k.unwrap_or(0);
    if !(1..=experts).contains(&top_k) {
        let supported = format!("1 to {experts}, as many as there are (`{field}`), are");
        return Err(ModelError::unsupported(top_k_field, top_k, supported));
    }
    Ok(MoeSpec {
        experts,
        top_k,
        softmax: RouterSoftmax::All,
        intermediate_size,
        activation: ExpertActivation::Glu(Activation::Silu),
        bias: false,
        shared: None,
        names: NAMES,
        stacked: StackedExperts::Halves,
    })
}

/// The Qwen families' experts, and which layers have them.
pub(super) fn qwen(config: &RawConfig) -> Result<(MoeSpec, impl Fn(usize) -> bool + use<>), ModelError> {
    let step = config.decoder_sparse_step.unwrap_or(1);
    if step == 0 {
        let supported = "1 for experts in each layer, and more for each n-th, are";
        return Err(ModelError::unsupported("decoder_sparse_step", step, supported));
    }
    let dense = config.mlp_only_layers.clone().unwrap_or_default();
    let spec = MoeSpec {
        softmax: match config.norm_topk_prob {
            Some(true) => RouterSoftmax::Chosen,
            _ => RouterSoftmax::All,
        },
        ..spec(config, config.moe_intermediate_size.unwrap_or(0))?
    };
    Ok((spec, move |layer: usize| {
        (layer + 1).is_multiple_of(step) && !dense.contains(&layer)
    }))
}

/// As [`qwen`], with an expert that every token goes to.
pub(super) fn qwen_shared(
    config: &RawConfig,
) -> Result<(MoeSpec, impl Fn(usize) -> bool + use<>), ModelError> {
    let (mut spec, has_experts) = qwen(config)?;
    spec.shared = Some(DenseMlpSpec {
        intermediate_size: config.shared_expert_intermediate_size.unwrap_or(0),
        activation: Activation::Silu,
        projections: Projections::Separate,
    });
    Ok((spec, has_experts))
}
