//! One short file per family: its names, the fields of its configuration, and how they map to a [`DecoderSpec`].

mod gemma;
mod gemma2;
mod gemma3;
mod gemma4;
mod gemma4_layers;
mod gemma4_unified;
mod gpt_oss;
mod hybrid;
mod llama;
mod ministral3;
mod mistral;
mod mixtral;
mod moe;
mod phi3;
mod qwen2;
mod qwen2_5_vl;
mod qwen2_moe;
mod qwen3;
mod qwen3_5;
mod qwen3_5_moe;
mod qwen3_moe;
mod qwen3_next;
mod qwen3_vl;
mod rope;
mod smollm3;

use plimsoll_core::untrusted::quotable;
use std::sync::Arc;

use plimsoll_kernels::Activation;
use serde_json::{Map, Value};

use crate::ModelError;
use crate::config::{RawConfig, object};
use crate::shard::Shard;
use crate::spec::{
    AttentionSpec, DecoderSpec, DenseMlpSpec, LayerSpec, Mixer, Mlp, NormSpec, OutputHead, Projections,
    Values, shared,
};

/// A supported family of models.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Architecture {
    /// Gemma 2.
    Gemma2,
    /// Gemma 3, text.
    Gemma3,
    /// Gemma 4, text.
    Gemma4,
    /// Gemma 4 12B, text.
    Gemma4Unified,
    /// gpt-oss.
    GptOss,
    /// Llama 2, 3, 3.x, SmolLM2 and everything else that calls itself Llama.
    Llama,
    /// Ministral 3, text.
    Ministral3,
    /// Mistral.
    Mistral,
    /// Mixtral.
    Mixtral,
    /// Phi-3, Phi-3.5, Phi-4 and Phi-4-mini.
    Phi3,
    /// Qwen 2 and 2.5.
    Qwen2,
    /// Qwen2.5-VL.
    Qwen2_5VL,
    /// Qwen 1.5 and 2 with experts.
    Qwen2Moe,
    /// Qwen 3, dense.
    Qwen3,
    /// Qwen 3.5, dense, text; Qwen 3.6 and 3.8 too.
    Qwen3_5,
    /// Qwen 3.5 and 3.6 with experts, text.
    Qwen3_5Moe,
    /// Qwen 3 with experts.
    Qwen3Moe,
    /// Qwen3-Next.
    Qwen3Next,
    /// Qwen3-VL, dense.
    Qwen3VL,
    /// SmolLM3.
    SmolLM3,
}

/// What is to be known of a family.
struct Family {
    /// The name in `architectures` of config.json.
    hf_name: &'static str,
    /// The same of the network without a head, of which embedding models are made.
    headless_name: &'static str,
    /// The name in `model_type` of config.json.
    model_type: &'static str,
    /// The name in `general.architecture` of GGUF files, where there are any.
    gguf_name: Option<&'static str>,
    /// Fields of config.json beside those of all families, and what transformers takes absent ones to mean.
    fields: fn() -> Value,
    /// From the configuration, whose fields are all known, to the network.
    spec: fn(&RawConfig) -> Result<DecoderSpec, ModelError>,
}

impl Architecture {
    /// All of them.
    pub const ALL: [Self; 20] = [
        Self::Llama,
        Self::Mistral,
        Self::Qwen2,
        Self::Qwen2_5VL,
        Self::Qwen3,
        Self::Qwen3_5,
        Self::Qwen3_5Moe,
        Self::Qwen3Next,
        Self::Qwen3VL,
        Self::Gemma2,
        Self::Gemma3,
        Self::Gemma4,
        Self::Gemma4Unified,
        Self::Ministral3,
        Self::Phi3,
        Self::SmolLM3,
        Self::GptOss,
        Self::Mixtral,
        Self::Qwen2Moe,
        Self::Qwen3Moe,
    ];

    fn family(self) -> Family {
        match self {
            Self::Gemma2 => gemma2::FAMILY,
            Self::Gemma3 => gemma3::FAMILY,
            Self::Gemma4 => gemma4::FAMILY,
            Self::Gemma4Unified => gemma4_unified::FAMILY,
            Self::GptOss => gpt_oss::FAMILY,
            Self::Llama => llama::FAMILY,
            Self::Ministral3 => ministral3::FAMILY,
            Self::Mistral => mistral::FAMILY,
            Self::Mixtral => mixtral::FAMILY,
            Self::Phi3 => phi3::FAMILY,
            Self::Qwen2 => qwen2::FAMILY,
            Self::Qwen2_5VL => qwen2_5_vl::FAMILY,
            Self::Qwen2Moe => qwen2_moe::FAMILY,
            Self::Qwen3 => qwen3::FAMILY,
            Self::Qwen3_5 => qwen3_5::FAMILY,
            Self::Qwen3_5Moe => qwen3_5_moe::FAMILY,
            Self::Qwen3Moe => qwen3_moe::FAMILY,
            Self::Qwen3Next => qwen3_next::FAMILY,
            Self::Qwen3VL => qwen3_vl::FAMILY,
            Self::SmolLM3 => smollm3::FAMILY,
        }
    }

    /// The name in `architectures` of config.json.
    pub fn hf_name(self) -> &'static str {
        self.family().hf_name
    }

    /// The name of the family's network without a head, of which embedding models are made.
    pub fn headless_name(self) -> &'static str {
        self.family().headless_name
    }

    /// The name in `model_type` of config.json.
    pub fn model_type(self) -> &'static str {
        self.family().model_type
    }

    /// The name in `general.architecture` of GGUF files.
    pub fn gguf_name(self) -> Option<&'static str> {
        self.family().gguf_name
    }

    /// For families whose positions may have three dimensions, what holds where a configuration does not say: the pairs of a head for
    /// each dimension, and whether these are interleaved (transformers' `mrope_section` and `mrope_interleaved`).
    pub(crate) fn mrope(self) -> Option<([usize; 3], bool)> {
        match self {
            Self::Qwen2_5VL => Some(([16, 24, 24], false)),
            Self::Qwen3VL => Some(([24, 20, 20], true)),
            Self::Qwen3_5 | Self::Qwen3_5Moe => Some(([11, 11, 10], true)),
            _ => None,
        }
    }

    /// The family whose network is below a classifier of this name.
    pub(crate) fn of_classifier(name: &str) -> Option<Self> {
        let family = name.strip_suffix("ForSequenceClassification")?;
        let is_it = |architecture: &Self| architecture.headless_name().strip_suffix("Model") == Some(family);
        Self::ALL.into_iter().find(is_it)
    }

    pub(crate) fn from_hf_name(name: &str) -> Result<Self, ModelError> {
        Self::find(name, |architecture| Some(architecture.hf_name()))
    }

    pub(crate) fn from_model_type(name: &str) -> Result<Self, ModelError> {
        Self::find(name, |architecture| Some(architecture.model_type()))
    }

    pub(crate) fn from_gguf_name(name: &str) -> Result<Self, ModelError> {
        Self::find(name, Self::gguf_name)
    }

    fn find(found: &str, name: fn(Self) -> Option<&'static str>) -> Result<Self, ModelError> {
        let known = Self::ALL
            .into_iter()
            .find(|&architecture| name(architecture) == Some(found));
        known.ok_or_else(|| {
            let names: Vec<_> = Self::ALL.into_iter().filter_map(name).collect();
            ModelError::UnknownArchitecture {
                found: quotable(found),
                supported: names.join(", "),
            }
        })
    }

    /// Fields of config.json that the family has beside those of all families, with what transformers takes an absent one to
    /// mean.
    pub(crate) fn fields(self) -> Map<String, Value> {
        object((self.family().fields)())
    }

    pub(crate) fn spec(self, config: &RawConfig) -> Result<DecoderSpec, ModelError> {
        (self.family().spec)(config)
    }
}

/// `fields` with `others`, which take the place of those of the same names.
fn with(fields: Value, others: Value) -> Value {
    let mut fields = object(fields);
    fields.extend(object(others));
    fields.into()
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
        quantization: config.quantization.clone(),
        logit_soft_cap: None,
        per_layer: None,
        shard: Shard::WHOLE,
        vocab_shard: Shard::WHOLE,
    })
}

/// Llama's layer: full attention with rotary positions, biases in it where `attention_bias` says so, a SwiGLU MLP.
fn layer(config: &RawConfig) -> Result<LayerSpec, ModelError> {
    let heads = config.num_attention_heads;
    // Refused where the family does not list it.
    let has_bias = config.attention_bias == Some(true);
    let head_dim = config.head_dim();
    Ok(LayerSpec {
        norm: NormSpec {
            eps: config.rms_norm_eps as f32,
            unit_offset: false,
        },
        post_norms: false,
        mixer: Mixer::Attention(AttentionSpec {
            heads,
            kv_heads: config.num_key_value_heads.unwrap_or(heads),
            kv_shard: Shard::WHOLE,
            head_dim,
            window: None,
            rope: Some(Arc::new(rope::read(config)?)),
            qk_norm: false,
            values: Values::Projected,
            shares_kv: None,
            qkv_bias: has_bias,
            output_bias: has_bias,
            scale: 1.0 / (head_dim as f32).sqrt(),
            soft_cap: None,
            sinks: false,
            gated: false,
            projections: Projections::Separate,
        }),
        mlp: Mlp::Dense(DenseMlpSpec {
            intermediate_size: config.intermediate_size,
            activation: Activation::Silu,
            projections: Projections::Separate,
        }),
        scalar: false,
    })
}

/// `layer_types` repeats what the window fields say; if it says something else, we would run the wrong network.
fn check_layer_types(config: &RawConfig, is_sliding: impl Fn(usize) -> bool) -> Result<(), ModelError> {
    let Some(kinds) = &config.layer_types else {
        return Ok(());
    };
    for (layer, found) in list("layer_types", kinds, config)?.iter().enumerate() {
        let expected = if is_sliding(layer) { SLIDING } else { FULL };
        only(&format!("layer_types[{layer}]"), Some(found), expected)?;
    }
    Ok(())
}

const SLIDING: &str = "sliding_attention";
const FULL: &str = "full_attention";
pub(crate) const LINEAR: &str = "linear_attention";

/// Which layers have a window, of a family in which all but every n-th have one (0: all) unless `layer_types` says otherwise.
fn sliding_layers(config: &RawConfig, every: usize) -> Result<Vec<bool>, ModelError> {
    layers_of_kind(config, SLIDING, every)
}

/// Which layers are of `kind`, of a family in which all but every n-th are (0: all) unless `layer_types` says otherwise; the
/// others have full attention.
fn layers_of_kind(config: &RawConfig, kind: &str, every: usize) -> Result<Vec<bool>, ModelError> {
    let Some(kinds) = &config.layer_types else {
        return Ok((1..=config.num_hidden_layers)
            .map(|layer| every == 0 || layer % every != 0)
            .collect());
    };
    let kinds = list("layer_types", kinds, config)?.iter().enumerate();
    kinds
        .map(|(layer, found)| match found.as_str() {
            FULL => Ok(false),
            found if found == kind => Ok(true),
            other => Err(ModelError::unsupported(
                format!("layer_types[{layer}]"),
                format!("`{other}`"),
                format!("{kind} and {FULL} are"),
            )),
        })
        .collect()
}

/// A list with an entry for each layer.
fn list<'a, T>(field: &str, list: &'a [T], config: &RawConfig) -> Result<&'a [T], ModelError> {
    let layers = config.num_hidden_layers;
    match list.len() == layers {
        true => Ok(list),
        false => Err(ModelError::unsupported(
            field,
            format!("a list of {}", list.len()),
            format!("one entry for each of {layers} layers is (`num_hidden_layers`)"),
        )),
    }
}

/// A field with one supported value.
fn only(field: &str, found: Option<&str>, supported: &str) -> Result<(), ModelError> {
    match found {
        Some(found) if found != supported => Err(ModelError::unsupported(
            field,
            format!("`{found}`"),
            format!("only `{supported}` is"),
        )),
        _ => Ok(()),
    }
}

/// Tokens that `sliding_window` lets a query see; `None` is all.
fn window(config: &RawConfig) -> Result<Option<usize>, ModelError> {
    match config.sliding_window {
        Some(0) => Err(ModelError::unsupported(
            "sliding_window",
            0,
            "null or a positive number of tokens is",
        )),
        size => Ok(size),
    }
}

fn no_window(config: &RawConfig) -> Result<(), ModelError> {
    match config.sliding_window {
        None => Ok(()),
        Some(size) => Err(ModelError::unsupported(
            "sliding_window",
            size,
            "models of this family have none: only null is",
        )),
    }
}
