//! One short file per family: how its configuration maps to a [`DecoderSpec`].

mod llama;
mod mistral;
mod qwen2;
mod qwen3;

use std::sync::Arc;

use plimsoll_kernels::Activation;

use crate::ModelError;
use crate::config::{RawConfig, RawRope};
use crate::rope::{RopeScaling, RopeSpec};
use crate::spec::{
    AttentionSpec, DecoderSpec, DenseMlpSpec, LayerSpec, Mixer, Mlp, NormSpec, OutputHead, Projections,
    shared,
};

/// A supported family of models.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Architecture {
    /// Llama 2, 3, 3.x, SmolLM2 and everything else that calls itself Llama.
    Llama,
    /// Mistral.
    Mistral,
    /// Qwen 2 and 2.5.
    Qwen2,
    /// Qwen 3, dense.
    Qwen3,
}

impl Architecture {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Llama, Self::Mistral, Self::Qwen2, Self::Qwen3];

    /// The name in `architectures` of config.json.
    pub fn hf_name(self) -> &'static str {
        match self {
            Self::Llama => "LlamaForCausalLM",
            Self::Mistral => "MistralForCausalLM",
            Self::Qwen2 => "Qwen2ForCausalLM",
            Self::Qwen3 => "Qwen3ForCausalLM",
        }
    }

    /// The name of the family's network without a head, of which embedding models are made.
    pub fn headless_name(self) -> &'static str {
        match self {
            Self::Llama => "LlamaModel",
            Self::Mistral => "MistralModel",
            Self::Qwen2 => "Qwen2Model",
            Self::Qwen3 => "Qwen3Model",
        }
    }

    /// The name in `model_type` of config.json.
    pub fn model_type(self) -> &'static str {
        match self {
            Self::Llama => "llama",
            Self::Mistral => "mistral",
            Self::Qwen2 => "qwen2",
            Self::Qwen3 => "qwen3",
        }
    }

    pub(crate) fn from_hf_name(name: &str) -> Result<Self, ModelError> {
        Self::find(name, &Self::ALL, Self::hf_name)
    }

    pub(crate) fn from_model_type(name: &str) -> Result<Self, ModelError> {
        Self::find(name, &Self::ALL, Self::model_type)
    }

    /// GGUF files call Mistral models llama.
    pub(crate) fn from_gguf_name(name: &str) -> Result<Self, ModelError> {
        Self::find(name, &[Self::Llama, Self::Qwen2, Self::Qwen3], Self::model_type)
    }

    fn find(found: &str, among: &[Self], name: fn(Self) -> &'static str) -> Result<Self, ModelError> {
        among
            .iter()
            .copied()
            .find(|&architecture| name(architecture) == found)
            .ok_or_else(|| {
                let names: Vec<_> = among.iter().map(|&architecture| name(architecture)).collect();
                ModelError::UnknownArchitecture {
                    found: found.to_owned(),
                    supported: names.join(", "),
                }
            })
    }

    pub(crate) fn spec(self, config: &RawConfig) -> Result<DecoderSpec, ModelError> {
        match self {
            Self::Llama => llama::spec(config),
            Self::Mistral => mistral::spec(config),
            Self::Qwen2 => qwen2::spec(config),
            Self::Qwen3 => qwen3::spec(config),
        }
    }
}

/// Llama's decoder, each layer as `change` leaves it, which gets its index.
fn decoder(config: &RawConfig, change: impl Fn(usize, &mut LayerSpec)) -> Result<DecoderSpec, ModelError> {
    // More than any model has: each layer is described before anything is checked against the weights.
    const MOST_LAYERS: usize = 4096;
    if config.num_hidden_layers > MOST_LAYERS {
        return Err(ModelError::unsupported(
            "num_hidden_layers",
            config.num_hidden_layers,
            format!("up to {MOST_LAYERS} are"),
        ));
    }
    let layer = layer(config)?;
    let layers = (0..config.num_hidden_layers).map(|index| {
        let mut layer = layer.clone();
        change(index, &mut layer);
        layer
    });
    Ok(DecoderSpec {
        vocab_size: config.vocab_size,
        hidden_size: config.hidden_size,
        max_position_embeddings: config.max_position_embeddings,
        embedding_scale: 1.0,
        layers: shared(layers),
        final_norm: layer.norm,
        head: match config.tie_word_embeddings {
            Some(true) => OutputHead::Tied,
            _ => OutputHead::Own,
        },
    })
}

/// Llama's layer: full attention with rotary positions, no biases, a SwiGLU MLP.
fn layer(config: &RawConfig) -> Result<LayerSpec, ModelError> {
    let heads = config.num_attention_heads;
    let head_dim = config.head_dim.unwrap_or(config.hidden_size / heads.max(1));
    Ok(LayerSpec {
        norm: NormSpec {
            eps: config.rms_norm_eps as f32,
            unit_offset: false,
        },
        post_norms: false,
        mixer: Mixer::Attention(AttentionSpec {
            heads,
            kv_heads: config.num_key_value_heads.unwrap_or(heads),
            head_dim,
            window: None,
            rope: Some(Arc::new(rope(config, head_dim)?)),
            qk_norm: false,
            qkv_bias: false,
            scale: 1.0 / (head_dim as f32).sqrt(),
            projections: Projections::Separate,
        }),
        mlp: Mlp::Dense(DenseMlpSpec {
            intermediate_size: config.intermediate_size,
            activation: Activation::Silu,
            projections: Projections::Separate,
        }),
    })
}

fn rope(config: &RawConfig, rotary_dim: usize) -> Result<RopeSpec, ModelError> {
    let (field, raw) = match (&config.rope_parameters, &config.rope_scaling) {
        (Some(raw), _) => ("rope_parameters", raw),
        (None, Some(raw)) => ("rope_scaling", raw),
        (None, None) => ("rope_scaling", &RawRope::default()),
    };
    // Every family's default in transformers and llama.cpp.
    let theta = raw.rope_theta.or(config.rope_theta).unwrap_or(10_000.0);
    if let Some(partial) = raw.partial_rotary_factor.filter(|&partial| partial != 1.0) {
        return Err(ModelError::unsupported(
            format!("{field}.partial_rotary_factor"),
            partial,
            "only 1 is",
        ));
    }
    let positive = |name: &str, value: Option<f64>| {
        let value = value.filter(|value| value.is_finite() && *value > 0.0);
        value.ok_or_else(|| {
            ModelError::unsupported(
                format!("{field}.{name}"),
                "absent or not positive",
                "a positive number is",
            )
        })
    };
    let scaling = match raw.rope_type.as_deref() {
        None | Some("default") => RopeScaling::None,
        Some("linear") => RopeScaling::Linear {
            factor: positive("factor", raw.factor)?,
        },
        Some("llama3") => RopeScaling::Llama3 {
            factor: positive("factor", raw.factor)?,
            low_freq_factor: positive("low_freq_factor", raw.low_freq_factor)?,
            high_freq_factor: positive("high_freq_factor", raw.high_freq_factor)?,
            original_context: positive(
                "original_max_position_embeddings",
                raw.original_max_position_embeddings,
            )?,
        },
        Some(other) => {
            return Err(ModelError::unsupported(
                format!("{field}.rope_type"),
                format!("`{other}`"),
                "default, linear and llama3 are",
            ));
        }
    };
    Ok(RopeSpec {
        theta,
        rotary_dim,
        scaling,
        query_scale: None,
    })
}

/// `layer_types` repeats what the window fields say; if it says something else, we would run the wrong network.
fn check_layer_types(config: &RawConfig, is_sliding: impl Fn(usize) -> bool) -> Result<(), ModelError> {
    let Some(kinds) = &config.layer_types else {
        return Ok(());
    };
    if kinds.len() != config.num_hidden_layers {
        return Err(ModelError::unsupported(
            "layer_types",
            format!("{} kinds", kinds.len()),
            format!("one for each of {} layers is", config.num_hidden_layers),
        ));
    }
    for (layer, found) in kinds.iter().enumerate() {
        let expected = if is_sliding(layer) {
            "sliding_attention"
        } else {
            "full_attention"
        };
        if found != expected {
            let field = format!("layer_types[{layer}]");
            return Err(ModelError::unsupported(
                field,
                format!("`{found}`"),
                format!("only `{expected}` is"),
            ));
        }
    }
    Ok(())
}

/// The number of tokens of a window that a field gives.
fn window(size: usize) -> Result<usize, ModelError> {
    match size {
        0 => Err(ModelError::unsupported(
            "sliding_window",
            0,
            "null or a positive number of tokens is",
        )),
        size => Ok(size),
    }
}
