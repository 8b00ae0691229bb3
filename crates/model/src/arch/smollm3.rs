use serde_json::json;

use super::{Family, check_layer_types, decoder, list, no_window};

/// [SmolLM3](https://huggingface.co/blog/smollm3): Llama, some layers without positions.
pub(super) const FAMILY: Family = Family {
    hf_name: "SmolLM3ForCausalLM",
    headless_name: "SmolLM3Model",
    model_type: "smollm3",
    gguf_name: Some("smollm3"),
    fields: || {
        json!({"no_rope_layers": null, "no_rope_layer_interval": 4, "rope_theta": 2_000_000, "tie_word_embeddings": true,
            "use_sliding_window": false, "sliding_window": null, "max_window_layers": null, "layer_types": null,
            "attention_bias": false})
    },
    spec: |config| {
        if config.use_sliding_window == Some(true) {
            no_window(config)?;
        }
        check_layer_types(config, |_| false)?;
        let interval = config.no_rope_layer_interval.unwrap_or(0);
        // 1 is a layer with positions.
        let by_interval =
            (1..=config.num_hidden_layers).map(|layer| u8::from(interval == 0 || layer % interval != 0));
        let has_rope = match &config.no_rope_layers {
            Some(layers) => list("no_rope_layers", layers, config)?.to_vec(),
            None => by_interval.collect(),
        };
        decoder(config, |index, layer| {
            if has_rope[index] == 0 {
                layer.attention_mut().rope = None;
            }
        })
    },
};
