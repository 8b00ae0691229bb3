use plimsoll_kernels::{ExpertActivation, RouterSoftmax};

use super::{Family, decoder, moe, sliding_layers, window};
use crate::spec::{Mlp, MoeNames, MoeSpec, StackedExperts};

/// [gpt-oss](https://arxiv.org/abs/2508.10925): experts, sinks, a window in every other layer, biases everywhere.
pub(super) const FAMILY: Family = Family {
    hf_name: "GptOssForCausalLM",
    headless_name: "GptOssModel",
    model_type: "gpt_oss",
    gguf_name: Some("gpt-oss"),
    fields: moe::gpt_oss_fields,
    spec: |config| {
        moe::check_gpt_oss(config)?;
        let (window, slides) = (window(config)?, sliding_layers(config, 2)?);
        let has_bias = config.attention_bias.unwrap_or(true);
        let moe = MoeSpec {
            softmax: RouterSoftmax::Chosen,
            activation: ExpertActivation::ClampedSwiglu,
            bias: true,
            names: MoeNames {
                router: "router",
                ..moe::NAMES
            },
            stacked: StackedExperts::Interleaved,
            ..moe::spec(config, config.intermediate_size)?
        };
        decoder(config, |index, layer| {
            let attention = layer.attention_mut();
            attention.window = window.filter(|_| slides[index]);
            (attention.qkv_bias, attention.output_bias, attention.sinks) = (has_bias, has_bias, true);
            layer.mlp = Mlp::Moe(moe.clone());
        })
    },
};
