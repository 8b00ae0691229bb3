use plimsoll_kernels::RouterSoftmax;
use serde_json::json;

use super::{Family, check_layer_types, decoder, moe, window};
use crate::spec::{Mlp, MoeNames, MoeSpec};

/// [Mixtral](https://arxiv.org/abs/2401.04088): Mistral with experts in every layer.
pub(super) const FAMILY: Family = Family {
    hf_name: "MixtralForCausalLM",
    headless_name: "MixtralModel",
    model_type: "mixtral",
    // GGUF files call it llama.
    gguf_name: None,
    fields: || {
        json!({"sliding_window": null, "layer_types": null, "rope_theta": 1_000_000, "num_local_experts": 8, "num_experts": null,
            "num_experts_per_tok": 2})
    },
    spec: |config| {
        let window = window(config)?;
        check_layer_types(config, |_| window.is_some())?;
        let moe = MoeSpec {
            softmax: RouterSoftmax::Chosen,
            names: MoeNames {
                module: "block_sparse_moe",
                router: "gate",
                projections: ["w1", "w3", "w2"],
            },
            ..moe::spec(config, config.intermediate_size)?
        };
        decoder(config, |_, layer| {
            layer.attention_mut().window = window;
            layer.mlp = Mlp::Moe(moe.clone());
        })
    },
};
