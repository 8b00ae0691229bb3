//! From config.json or GGUF metadata to a [`ModelConfig`].

mod advice;
mod around;
mod gguf;
mod known;
mod overrides;
mod quantization;
mod raw;
mod vision;

use std::path::{Path, PathBuf};

use plimsoll_core::untrusted::{self, MAX_SETTINGS_BYTES};
use plimsoll_core::{
    BlockSize, CacheLayoutError, ImageInput, Matryoshka, MetaValue, Metadata, Pooling, TokenId,
};
use plimsoll_kernels::{DeltaLayout, WeightType};
use serde_json::{Map, Value, json};

use crate::arch::{Architecture, LINEAR};
use crate::blocks::check_formats;
use crate::embedding::{self, EmbeddingConfig, ScoringConfig, ServeAs};
use crate::generation::check_token_ids;
use crate::quantization::{OnlineQuantization, Quantization};
use crate::spec::{
    AttentionSpec, DeltaNetSpec, LayerSpec, Mixer, Mlp, NormSpec, OutputHead, Projections, shared,
};
use crate::{DecoderSpec, EncoderSpec, ModelError};
use advice::Places;
pub use around::Around;
use gguf::GgufFields;
pub use gguf::GgufTensors;
pub use overrides::HfOverrides;
use raw::Fields;
pub(crate) use raw::{RawConfig, RawRope, object};

/// What a model says about itself.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// The family.
    pub architecture: Architecture,
    /// The model of images and text of which the network is the text part.
    pub text_part_of: Option<Around>,
    /// What makes rows of images, where they are served.
    pub encoder: Option<EncoderSpec>,
    /// The network.
    pub spec: DecoderSpec,
    /// Tokens that end a text, as far as the configuration knows.
    pub eos_token_ids: Vec<TokenId>,
    /// The type in which config.json says the weights are stored.
    pub dtype: Option<WeightType>,
    /// How it makes vectors, where it is one for embeddings.
    pub embedding: Option<EmbeddingConfig>,
    /// Sizes to which its vectors may be cut.
    pub matryoshka: Matryoshka,
}

impl ModelConfig {
    /// The same model, served so: one for embeddings needs no head.
    pub(crate) fn served(mut self, path: &Path, serve_as: &ServeAs) -> Result<Self, ModelError> {
        self.embedding = serve_as.resolve(self.embedding)?;
        if let Some(embedding) = &mut self.embedding {
            if let Some(scoring) = &mut embedding.scoring {
                scoring.resolve(path, &self.spec)?;
            }
            self.spec.head = OutputHead::None;
        }
        let images = serve_as.images.filter(|limits| limits.max_images_per_prompt > 0);
        if let (Some(around), Some(limits)) = (&self.text_part_of, images) {
            self.encoder = around.encoder(path, &self.spec, limits)?;
        }
        let stored = &self.spec.quantization;
        match (serve_as.quantization, stored.name()) {
            (Some(OnlineQuantization::Fp8), None) => self.spec.quantization = Quantization::to_fp8(),
            (Some(OnlineQuantization::Fp8), Some(name)) if !stored.is_fp8() => {
                let message = format!("the model is stored in {name}, and is served so: leave the flag out");
                return Err(ModelError::flag("--quantization", message));
            }
            // A model that is stored so is kept as it is.
            _ => {}
        }
        Ok(self)
    }

    /// Reads a Hugging Face config.json.
    pub(crate) fn read_json(path: &Path, overrides: &HfOverrides) -> Result<Self, ModelError> {
        let text = untrusted::read_text(path, MAX_SETTINGS_BYTES).map_err(ModelError::io(path))?;
        let mut values = fields_of(path, &text)?;
        let quantization = quantization::beside(path, &mut values)?;
        Self::from_values(path, values, quantization, overrides)
    }

    /// Parses the text of a Hugging Face config.json; `path` is for messages.
    ///
    /// # Errors
    /// [`ModelError`], which names the field at fault, one that the family does not know included.
    pub fn from_json(path: &Path, text: &str, overrides: &HfOverrides) -> Result<Self, ModelError> {
        Self::from_values(path, fields_of(path, text)?, None, overrides)
    }

    /// `quantization` is the file beside `path` that they have their quantisation from.
    fn from_values(
        path: &Path,
        mut values: Map<String, Value>,
        quantization: Option<PathBuf>,
        overrides: &HfOverrides,
    ) -> Result<Self, ModelError> {
        overrides.apply(&mut values);
        let (text_part_of, repeated, mut places) = match known::unwrap_text(path, &mut values)? {
            Some(unwrapped) => (Some(unwrapped.around), unwrapped.repeated, unwrapped.places),
            None => (None, Map::new(), Places::default()),
        };
        places.quantization = quantization;
        let fields = Fields::new(path, &values);
        let names: Vec<String> = fields.get("architectures")?.unwrap_or_default();
        let headless = |name: &str| Architecture::ALL.into_iter().find(|a| a.headless_name() == name);
        let mut embedding = None;
        let architecture = match &names[..] {
            [name] => match (headless(name), Architecture::of_classifier(name)) {
                (Some(architecture), _) => {
                    embedding = Some(EmbeddingConfig::default());
                    architecture
                }
                (None, Some(architecture)) => {
                    embedding = Some(classifier(&fields)?.embedding());
                    architecture
                }
                (None, None) => Architecture::from_hf_name(name)?,
            },
            [] => match fields.get::<String>("model_type")? {
                Some(name) => Architecture::from_model_type(&name)?,
                None => {
                    let message = "neither `architectures` nor `model_type` is given";
                    return Err(ModelError::config(path, message));
                }
            },
            names => {
                return Err(ModelError::unsupported(
                    "architectures",
                    format!("{names:?}"),
                    "one name is",
                ));
            }
        };
        let parse = |mut values: Map<String, Value>, embedding: Option<EmbeddingConfig>| {
            // Without images, there is nothing that dimensions of a position could differ by.
            if text_part_of.is_some() {
                complete_mrope(architecture, &mut values);
            }
            Self::new(path, architecture, values, &places, embedding)
        };
        let config = parse(values.clone(), embedding)?;
        // transformers ignores fields beside the text part that belong in it. Some of its versions repeat them there; any that would
        // change the model is refused.
        for (field, value) in repeated {
            let mut values = values.clone();
            values.insert(field.clone(), value.clone());
            let changed = parse(values, config.embedding.clone());
            if changed.ok().as_ref() != Some(&config) {
                return Err(known::not_in_text(&field, &value));
            }
        }
        Ok(Self {
            text_part_of,
            ..config
        })
    }

    /// Reads the metadata of a GGUF file; `path` is for messages.
    pub fn from_gguf(
        path: &Path,
        metadata: &Metadata,
        tensors: GgufTensors,
        overrides: &HfOverrides,
    ) -> Result<Self, ModelError> {
        let fields = GgufFields::new(path, metadata)?;
        // Before the fields: an unknown architecture has other ones.
        let architecture = Architecture::from_gguf_name(fields.architecture)?;
        let architecture = match architecture {
            // GGUF calls Mixtral and Mistral models llama too.
            Architecture::Llama if fields.has_experts()? => Architecture::Mixtral,
            Architecture::Llama if fields.window()?.is_some() => Architecture::Mistral,
            architecture => architecture,
        };
        let mut values = fields.config(architecture, tensors)?;
        overrides.apply(&mut values);
        let embedding = match fields.get("pooling_type", MetaValue::as_u64)? {
            Some(code) => embedding::from_gguf(fields.key("pooling_type"), code)?,
            None => None,
        };
        let mut config = Self::new(path, architecture, values, &Places::default(), embedding)?;
        config.spec.layers = shared(config.spec.layers.iter().map(|layer| {
            let mut layer = LayerSpec::clone(layer);
            if let Mixer::DeltaNet(delta_net) = &mut layer.mixer {
                match architecture {
                    // The converter takes z from q, k and v, and puts the heads of each in order.
                    Architecture::Qwen3Next => delta_net.projections = Projections::Separate,
                    // It orders heads of v so that those of q and k take turns.
                    _ => delta_net.layout.adjacent = 1,
                }
            }
            layer
        }));
        Ok(config)
    }

    fn new(
        path: &Path,
        architecture: Architecture,
        mut values: Map<String, Value>,
        places: &Places,
        embedding: Option<EmbeddingConfig>,
    ) -> Result<Self, ModelError> {
        known::check(architecture, places, &values)?;
        let given = |field: &str| values.get(field).is_some_and(|value| !value.is_null());
        let has_old_rope = given("rope_scaling");
        if has_old_rope && given("rope_parameters") && values["rope_scaling"] != values["rope_parameters"] {
            return Err(ModelError::unsupported(
                "rope_scaling",
                "given beside `rope_parameters`, and something else",
                "one of the two is",
            ));
        }
        for (field, default) in architecture.fields() {
            if field != "rope_parameters" || !has_old_rope {
                values.entry(field).or_insert(default);
            }
        }
        let raw = RawConfig::read(
            architecture.mrope().is_some(),
            places,
            &Fields::new(path, &values),
        )?;
        let spec = architecture.spec(&raw)?;
        check(path, &spec)?;
        check_formats(&spec)?;
        for field in ["bos_token_id", "eos_token_id", "pad_token_id"] {
            let ids = values.get(field).unwrap_or(&Value::Null);
            check_token_ids(path, field, ids, spec.vocab_size)?;
        }
        Ok(Self {
            architecture,
            text_part_of: None,
            encoder: None,
            spec,
            eos_token_ids: raw.eos_token_ids,
            dtype: raw.dtype,
            embedding,
            matryoshka: raw.matryoshka,
        })
    }

    /// Longest request, in tokens.
    pub fn max_tokens(&self) -> usize {
        let trained_for = self.spec.max_position_embeddings;
        let embedding = self.embedding.as_ref().and_then(|embedding| embedding.max_tokens);
        embedding.map_or(trained_for, |tokens| tokens.min(trained_for))
    }

    /// The images that prompts may have; `None` where text alone is served.
    pub fn image_input(&self) -> Option<ImageInput> {
        self.encoder.as_ref().map(|encoder| encoder.input)
    }

    /// How prompts become vectors, where the model is served for embeddings.
    pub fn pooling(&self) -> Option<Pooling> {
        self.embedding.as_ref().map(|embedding| embedding.pooling)
    }
}

fn fields_of(path: &Path, text: &str) -> Result<Map<String, Value>, ModelError> {
    serde_json::from_str(text).map_err(|error| ModelError::config(path, error))
}

/// How the dimensions of a position share the pairs of a head, where a configuration does not say: transformers has the same
/// defaults.
fn complete_mrope(architecture: Architecture, values: &mut Map<String, Value>) {
    let Some((pairs_of, interleaved)) = architecture.mrope() else {
        return;
    };
    let is_given = |field: &&str| values.get(*field).is_some_and(|value| !value.is_null());
    let mut given: Vec<_> = ["rope_parameters", "rope_scaling"]
        .into_iter()
        .filter(is_given)
        .collect();
    if given.is_empty() {
        values.insert("rope_scaling".to_owned(), json!({}));
        given.push("rope_scaling");
    }
    for name in given {
        let Some(Value::Object(rope)) = values.get_mut(name) else {
            continue;
        };
        for (field, value) in [
            ("mrope_section", json!(pairs_of)),
            ("mrope_interleaved", interleaved.into()),
        ] {
            let own = rope.entry(field).or_insert(Value::Null);
            if own.is_null() {
                *own = value;
            }
        }
    }
}

/// A classifier with one label.
fn classifier(fields: &Fields<'_>) -> Result<ScoringConfig, ModelError> {
    let names: Option<Map<String, Value>> = fields.get("id2label")?;
    // transformers writes neither where there are two.
    let labels = match fields.get::<usize>("num_labels")? {
        Some(labels) => labels,
        None => names.map_or(2, |names| names.len()),
    };
    if labels != 1 {
        return Err(ModelError::unsupported(
            "num_labels",
            labels,
            "classifiers with 1 label, which score pairs of texts, are",
        ));
    }
    let newer: Option<Map<String, Value>> = fields.get("sentence_transformers")?;
    let newer = newer
        .as_ref()
        .and_then(|fields| fields.get("activation_fn")?.as_str());
    let older: Option<String> = fields.get("sbert_ce_default_activation_function")?;
    ScoringConfig::classifier(newer.or(older.as_deref()))
}

/// Largest head the kernels keep in registers and on the stack; those of known models end at 512.
const MOST_HEAD_DIM: usize = 512;

/// What every family needs and the decoder relies on.
fn check(path: &Path, spec: &DecoderSpec) -> Result<(), ModelError> {
    // Far above any model, and low enough that products of two cannot overflow.
    const MOST: usize = 1 << 28;
    let sizes = |sizes: &[(&str, usize)]| match sizes.iter().find(|(_, size)| !(1..=MOST).contains(size)) {
        Some((field, size)) => Err(ModelError::config(
            path,
            format!("`{field}` is {size}, which is implausible"),
        )),
        None => Ok(()),
    };
    sizes(&[
        ("vocab_size", spec.vocab_size),
        ("hidden_size", spec.hidden_size),
        ("num_hidden_layers", spec.layers.len()),
        ("max_position_embeddings", spec.max_position_embeddings),
    ])?;
    for layer in &spec.layers {
        match &layer.mlp {
            Mlp::Dense(mlp) => sizes(&[("intermediate_size", mlp.intermediate_size)])?,
            Mlp::Moe(moe) | Mlp::Both(_, moe) => {
                if let Mlp::Both(mlp, _) = &layer.mlp {
                    sizes(&[("intermediate_size", mlp.intermediate_size)])?;
                }
                sizes(&[("moe_intermediate_size", moe.intermediate_size)])?;
                let shared = moe.shared.map_or(1, |shared| shared.intermediate_size);
                sizes(&[("shared_expert_intermediate_size", shared)])?;
            }
        }
        match &layer.mixer {
            Mixer::Attention(attention) => {
                sizes(&[
                    ("num_attention_heads", attention.heads),
                    ("num_key_value_heads", attention.kv_heads),
                    ("head_dim", attention.head_dim),
                ])?;
                check_attention(path, attention)?;
            }
            Mixer::DeltaNet(DeltaNetSpec { layout, .. }) => {
                sizes(&[
                    ("linear_num_key_heads", layout.key_heads),
                    ("linear_num_value_heads", layout.value_heads),
                    ("linear_key_head_dim", layout.key_dim),
                    ("linear_value_head_dim", layout.value_dim),
                ])?;
                check_delta_net(path, layout)?;
            }
        }
        check_norm(path, layer.norm)?;
    }
    if spec.attention().next().is_none() {
        return Err(ModelError::unsupported(
            "layer_types",
            format!("{LINEAR} in all layers"),
            "at least one layer with attention is",
        ));
    }
    if let Some(per_layer) = &spec.per_layer {
        sizes(&[
            ("hidden_size_per_layer_input", per_layer.width),
            ("vocab_size_per_layer_input", per_layer.vocab_size),
        ])?;
    }
    spec.own_cache_layout(BlockSize::default()).map_err(|error| {
        let field = match error {
            CacheLayoutError::NotShared { .. } => "num_kv_shared_layers",
            _ => "sliding_window",
        };
        ModelError::config(path, format!("`{field}`: {error}"))
    })?;
    check_soft_cap(path, "final_logit_softcapping", spec.logit_soft_cap)?;
    check_norm(path, spec.final_norm)
}

fn check_soft_cap(path: &Path, field: &str, cap: Option<f32>) -> Result<(), ModelError> {
    match cap.filter(|cap| !(cap.is_normal() && *cap > 0.0)) {
        None => Ok(()),
        Some(cap) => {
            let message = format!("`{field}` is {cap}: a positive number caps, null does not");
            Err(ModelError::config(path, message))
        }
    }
}

fn check_delta_net(path: &Path, layout: &DeltaLayout) -> Result<(), ModelError> {
    let DeltaLayout {
        key_heads,
        value_heads,
        adjacent: _,
        key_dim,
        value_dim,
        taps,
    } = *layout;
    if !value_heads.is_multiple_of(key_heads) {
        let message = format!(
            "`linear_num_value_heads` ({value_heads}) is no multiple of `linear_num_key_heads` ({key_heads})"
        );
        return Err(ModelError::config(path, message));
    }
    let most = DeltaLayout::MAX_HEAD_DIM;
    for (field, dim) in [
        ("linear_key_head_dim", key_dim),
        ("linear_value_head_dim", value_dim),
    ] {
        if dim > most {
            return Err(ModelError::unsupported(field, dim, format!("up to {most} are")));
        }
    }
    let most = DeltaLayout::MAX_TAPS;
    match (2..=most).contains(&taps) {
        true => Ok(()),
        false => Err(ModelError::unsupported(
            "linear_conv_kernel_dim",
            taps,
            format!("2 to {most} are"),
        )),
    }
}

fn check_attention(path: &Path, attention: &AttentionSpec) -> Result<(), ModelError> {
    let AttentionSpec {
        heads,
        kv_heads,
        head_dim,
        ..
    } = *attention;
    if !heads.is_multiple_of(kv_heads) {
        let message =
            format!("`num_attention_heads` ({heads}) is no multiple of `num_key_value_heads` ({kv_heads})");
        return Err(ModelError::config(path, message));
    }
    if head_dim > MOST_HEAD_DIM {
        return Err(ModelError::unsupported(
            "head_dim",
            head_dim,
            format!("up to {MOST_HEAD_DIM} are"),
        ));
    }
    if !head_dim.is_multiple_of(2) {
        return Err(ModelError::config(
            path,
            format!("`head_dim` is {head_dim}, which is odd"),
        ));
    }
    check_soft_cap(path, "attn_logit_softcapping", attention.soft_cap)?;
    let Some(rope) = &attention.rope else {
        return Ok(());
    };
    if !(rope.theta > 0.0 && rope.theta.is_finite()) {
        return Err(ModelError::config(
            path,
            format!("`rope_theta` is {}", rope.theta),
        ));
    }
    if !rope.rotary_dim.is_multiple_of(2) || !(2..=head_dim).contains(&rope.rotary_dim) {
        let message = format!(
            "`partial_rotary_factor` means that {} of {head_dim} elements of a head are rotated",
            rope.rotary_dim
        );
        return Err(ModelError::config(path, message));
    }
    Ok(())
}

fn check_norm(path: &Path, norm: NormSpec) -> Result<(), ModelError> {
    match norm.eps > 0.0 && norm.eps < 1.0 {
        true => Ok(()),
        false => Err(ModelError::config(
            path,
            format!("`rms_norm_eps` is {}", norm.eps),
        )),
    }
}
