//! One short file per family: how its configuration maps to a [`DecoderSpec`].

mod llama;
mod mistral;
mod qwen2;
mod qwen3;

use crate::config::{RawConfig, RawRope};
use crate::rope::{RopeScaling, RopeSpec};
use crate::spec::{OutputHead, SlidingWindow};
use crate::{DecoderSpec, ModelError};

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

/// A decoder without biases, QK norm or window: what the families start from.
fn plain(config: &RawConfig) -> Result<DecoderSpec, ModelError> {
    let heads = config.num_attention_heads;
    Ok(DecoderSpec {
        vocab_size: config.vocab_size,
        hidden_size: config.hidden_size,
        intermediate_size: config.intermediate_size,
        num_layers: config.num_hidden_layers,
        num_heads: heads,
        num_kv_heads: config.num_key_value_heads.unwrap_or(heads),
        head_dim: config.head_dim.unwrap_or(config.hidden_size / heads.max(1)),
        rms_norm_eps: config.rms_norm_eps as f32,
        rope: rope(config)?,
        qkv_bias: false,
        qk_norm: false,
        sliding_window: None,
        head: match config.tie_word_embeddings {
            Some(true) => OutputHead::Tied,
            _ => OutputHead::Own,
        },
        max_position_embeddings: config.max_position_embeddings,
    })
}

fn rope(config: &RawConfig) -> Result<RopeSpec, ModelError> {
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
    Ok(RopeSpec { theta, scaling })
}

/// `layer_types` repeats what the window fields say; if it says something else, we would run the wrong network.
fn check_layer_types(config: &RawConfig, window: Option<SlidingWindow>) -> Result<(), ModelError> {
    let first_sliding = window.map_or(usize::MAX, |window| window.first_layer);
    for (layer, found) in config.layer_types.iter().flatten().enumerate() {
        let expected = if layer < first_sliding {
            "full_attention"
        } else {
            "sliding_attention"
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
