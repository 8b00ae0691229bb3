//! What Gemma 4's models have in common (transformers 5.23, `models/gemma4`): heads by kind of layer, layers that share keys and
//! values, four norms and a number for each layer.

use std::sync::Arc;

use plimsoll_kernels::{Activation, ExpertActivation, RouterSoftmax};
use serde_json::{Value, json};

use super::{FULL, SLIDING, decoder, moe, only, rope, sliding_layers, window, with};
use crate::ModelError;
use crate::config::RawConfig;
use crate::spec::{DecoderSpec, Mlp, MoeNames, MoeSpec, PerLayerSpec, Values};

/// Of layers that see everything, where a configuration does not say.
const GLOBAL_HEAD_DIM: usize = 512;

const NAMES: MoeNames = MoeNames {
    module: "",
    router: "router.proj",
    ..moe::NAMES
};

/// Fields of all, beside `others`.
pub(super) fn fields(others: Value) -> Value {
    let own = json!({"vocab_size": 262_144, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 30,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "rms_norm_eps": 1e-6, "tie_word_embeddings": true,
        "layer_types": null, "hidden_activation": "gelu_pytorch_tanh", "final_logit_softcapping": null,
        "global_head_dim": null, "num_global_key_value_heads": null, "per_layer_config": null, "attention_k_eq_v": false,
        "num_kv_shared_layers": 0, "use_double_wide_mlp": false,
        "rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6}}});
    with(others, own)
}

/// The network.
pub(super) fn spec(config: &RawConfig) -> Result<DecoderSpec, ModelError> {
    only(
        "hidden_activation",
        config.hidden_activation.as_deref(),
        "gelu_pytorch_tanh",
    )?;
    // Between the tokens of an image, which are not served.
    let both_ways = config.use_bidirectional_attention.as_deref();
    only("use_bidirectional_attention", both_ways, "vision")?;
    let slides = slides(config)?;
    let sources = sources(config, &slides)?;
    let heads = heads(config, &slides)?;
    let ropes = slides.iter().zip(&heads).map(|(&slides, heads)| {
        let mut config = config.clone();
        config.head_dim = Some(heads.head_dim);
        let rope = if slides {
            rope::local(&config)?
        } else {
            rope::read(&config)?
        };
        Ok(Arc::new(rope))
    });
    let ropes = ropes.collect::<Result<Vec<_>, ModelError>>()?;
    let window = window(config)?;
    let experts = match config.enable_moe_block {
        Some(true) => Some(experts(config)?),
        _ => None,
    };
    let is_value = config.attention_k_eq_v == Some(true);
    let mut spec = decoder(config, |index, layer| {
        (layer.post_norms, layer.scalar) = (true, true);
        let attention = layer.attention_mut();
        (attention.head_dim, attention.kv_heads) = (heads[index].head_dim, heads[index].kv_heads);
        attention.window = window.filter(|_| slides[index]);
        attention.rope = Some(Arc::clone(&ropes[index]));
        attention.qk_norm = true;
        attention.values = match is_value && !slides[index] {
            true => Values::NormalisedKeys,
            false => Values::Normalised,
        };
        (attention.scale, attention.shares_kv) = (1.0, sources[index]);
        let mlp = layer.dense_mlp_mut();
        mlp.activation = Activation::GeluTanh;
        if config.use_double_wide_mlp == Some(true) && sources[index].is_some() {
            mlp.intermediate_size = mlp.intermediate_size.saturating_mul(2);
        }
        if let Some(experts) = &experts {
            layer.mlp = Mlp::Both(*mlp, experts.clone());
        }
    })?;
    spec.embedding_scale = (config.hidden_size as f32).sqrt();
    spec.logit_soft_cap = config.final_logit_softcapping.map(|cap| cap as f32);
    spec.per_layer = per_layer(config)?;
    Ok(spec)
}

/// Which layers have a window; the last has none.
fn slides(config: &RawConfig) -> Result<Vec<bool>, ModelError> {
    let mut slides = sliding_layers(config, 6)?;
    match (slides.last_mut(), &config.layer_types) {
        (Some(true), Some(_)) => {
            let field = format!("layer_types[{}]", config.num_hidden_layers - 1);
            let supported = format!("{FULL} is in the last layer, which transformers makes of it");
            Err(ModelError::unsupported(field, format!("`{SLIDING}`"), supported))
        }
        (last, _) => {
            last.into_iter().for_each(|last| *last = false);
            Ok(slides)
        }
    }
}

/// Of each layer the one whose keys and values it reads, if not its own: the last of its kind before the `num_kv_shared_layers` at
/// the end.
fn sources(config: &RawConfig, slides: &[bool]) -> Result<Vec<Option<usize>>, ModelError> {
    let shared = config.num_kv_shared_layers.unwrap_or(0);
    let keeping = slides.len().saturating_sub(shared);
    let source = |index: usize| {
        if index < keeping {
            return Ok(None);
        }
        let source = slides[..keeping]
            .iter()
            .rposition(|&other| other == slides[index]);
        source.map(Some).ok_or_else(|| {
            let kind = if slides[index] { SLIDING } else { FULL };
            ModelError::unsupported(
                "num_kv_shared_layers",
                shared,
                format!("as many as leave a layer of {kind} before those that share is (`layer_types`)"),
            )
        })
    };
    (0..slides.len()).map(source).collect()
}

/// What heads of keys and values a layer has.
struct Heads {
    head_dim: usize,
    kv_heads: usize,
}

/// By kind of layer, or by layer, as newer versions of transformers write it.
fn heads(config: &RawConfig, slides: &[bool]) -> Result<Vec<Heads>, ModelError> {
    let kv_heads = config.num_key_value_heads.unwrap_or(config.num_attention_heads);
    let of_all = |head_dim| Heads { head_dim, kv_heads };
    let Some(layers) = &config.per_layer_config else {
        let global = config.num_global_key_value_heads;
        let global = global.filter(|_| config.attention_k_eq_v == Some(true));
        let heads = slides.iter().map(|&slides| match slides {
            true => of_all(config.head_dim()),
            false => Heads {
                head_dim: config.global_head_dim.unwrap_or(GLOBAL_HEAD_DIM),
                kv_heads: global.unwrap_or(kv_heads),
            },
        });
        return Ok(heads.collect());
    };
    for (field, value) in [
        ("global_head_dim", config.global_head_dim),
        ("num_global_key_value_heads", config.num_global_key_value_heads),
    ] {
        if let Some(value) = value {
            let supported = "it, or `per_layer_config`, is";
            return Err(ModelError::unsupported(field, value, supported));
        }
    }
    if let Some(layer) = layers.keys().find(|&&layer| layer >= slides.len()) {
        let supported = format!("one of {} layers is (`num_hidden_layers`)", slides.len());
        return Err(ModelError::unsupported("per_layer_config", layer, supported));
    }
    let heads = (0..slides.len()).map(|index| {
        let own = layers.get(&index).copied().unwrap_or_default();
        Heads {
            head_dim: own.head_dim.unwrap_or_else(|| config.head_dim()),
            kv_heads: own.num_key_value_heads.unwrap_or(kv_heads),
        }
    });
    Ok(heads.collect())
}

/// The experts beside the MLP of each layer.
fn experts(config: &RawConfig) -> Result<MoeSpec, ModelError> {
    let inner = config.moe_intermediate_size.unwrap_or(0);
    Ok(MoeSpec {
        softmax: RouterSoftmax::Chosen,
        activation: ExpertActivation::Glu(Activation::GeluTanh),
        names: NAMES,
        ..moe::sized(config, ("top_k_experts", config.top_k_experts), inner)?
    })
}

/// What each layer gets of each token beside the residual stream.
fn per_layer(config: &RawConfig) -> Result<Option<PerLayerSpec>, ModelError> {
    let width = config.hidden_size_per_layer_input.unwrap_or(0);
    let rows = config.vocab_size_per_layer_input.unwrap_or(0);
    match width {
        0 => Ok(None),
        _ if rows < config.vocab_size => Err(ModelError::unsupported(
            "vocab_size_per_layer_input",
            rows,
            format!("a row for each of {} tokens is (`vocab_size`)", config.vocab_size),
        )),
        _ => Ok(Some(PerLayerSpec {
            vocab_size: rows,
            width,
            activation: Activation::GeluTanh,
        })),
    }
}
