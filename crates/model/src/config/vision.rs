//! From `vision_config` to an [`EncoderSpec`].

mod gemma3;
mod pixtral;
mod qwen;

use std::path::Path;

use plimsoll_core::{EncoderLimits, TokenId};
use plimsoll_kernels::Gelu;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use super::around::Around;
use super::known::is_inert_in_tower;
use super::raw::{Fields, RawRope};
use crate::{DecoderSpec, EncoderSpec, ModelError};

/// The largest of any number of the configuration: products of four fit.
const MOST: usize = 1 << 15;

/// What is known of a model's encoder.
struct Described<'a> {
    /// The fields of `vision_config`.
    vision: Reader<'a>,
    /// Those beside it.
    model: Fields<'a>,
    decoder: &'a DecoderSpec,
    limits: EncoderLimits,
}

/// A family's fields of `vision_config` that are interpreted, and what they mean.
struct EncoderConfig {
    fields: &'static [&'static str],
    spec: fn(&Described<'_>) -> Result<EncoderSpec, ModelError>,
    /// The field that has the number of heads.
    heads: &'static str,
}

/// The encoders that are known, by the beginning of the name in `architectures`.
const KNOWN: [(&str, EncoderConfig); 5] = [
    ("Qwen3VL", qwen::QWEN3),
    ("Qwen3_5", qwen::QWEN3),
    ("Qwen2_5_VL", qwen::QWEN2_5),
    ("Gemma3For", gemma3::GEMMA3),
    ("Mistral3For", pixtral::PIXTRAL),
];

impl EncoderConfig {
    /// That of a model of this name.
    fn of(name: &str) -> Option<Self> {
        let found = KNOWN.into_iter().find(|(of, _)| name.starts_with(of));
        found.map(|(_, config)| config)
    }
}

impl Around {
    /// Whether images of this model can be served, where they are asked for.
    pub fn has_encoder(&self) -> bool {
        EncoderConfig::of(self.name).is_some()
    }

    /// The encoder of the model, of which `decoder` is the text part; `None` where it is not known here.
    ///
    /// # Errors
    /// [`ModelError`], which names the field at fault.
    pub(super) fn encoder(
        &self,
        path: &Path,
        decoder: &DecoderSpec,
        limits: EncoderLimits,
    ) -> Result<Option<EncoderSpec>, ModelError> {
        let Some(config) = EncoderConfig::of(self.name) else {
            return Ok(None);
        };
        let Some(Value::Object(values)) = self.fields.get("vision_config") else {
            return Err(ModelError::config(path, "`vision_config` is missing"));
        };
        for (field, value) in values {
            let is_known = config.fields.contains(&field.as_str()) || is_inert_in_tower(field, value);
            if !is_known && !value.is_null() {
                return Err(unsupported(field, value, "this encoder has no such field here"));
            }
        }
        let described = Described {
            vision: Reader {
                fields: Fields::new(path, values),
            },
            model: Fields::new(path, &self.fields),
            decoder,
            limits,
        };
        let spec = (config.spec)(&described)?;
        if spec.input.placeholder as usize >= decoder.vocab_size {
            let field = placeholder_field(&self.fields);
            let message = format!("`{field}` {} is outside the vocabulary", spec.input.placeholder);
            return Err(ModelError::config(path, message));
        }
        check(&spec, decoder, config.heads)?;
        Ok(Some(spec))
    }
}

/// Names of the placeholder's field, the newer first.
const PLACEHOLDER: [&str; 2] = ["image_token_id", "image_token_index"];

fn placeholder_field(fields: &Map<String, Value>) -> &'static str {
    let given = PLACEHOLDER.iter().find(|field| fields.contains_key(**field));
    given.copied().unwrap_or(PLACEHOLDER[0])
}

impl Described<'_> {
    fn placeholder(&self) -> Result<TokenId, ModelError> {
        match self.model.get(PLACEHOLDER[1])? {
            Some(token) => Ok(token),
            None => self.model.required(PLACEHOLDER[0]),
        }
    }

    /// A field beside `vision_config` with one supported value, which an absent one has.
    fn only<T: DeserializeOwned + PartialEq + std::fmt::Debug>(
        &self,
        field: &str,
        supported: T,
    ) -> Result<(), ModelError> {
        match self.model.get::<T>(field)? {
            Some(found) if found != supported => Err(ModelError::unsupported(
                field,
                format!("{found:?}"),
                format!("only {supported:?} is; {TEXT_ALONE}"),
            )),
            _ => Ok(()),
        }
    }
}

/// What the encoder relies on.
fn check(spec: &EncoderSpec, decoder: &DecoderSpec, heads: &str) -> Result<(), ModelError> {
    let head_dim = spec.head_dim();
    if spec.heads * head_dim != spec.hidden_size || !head_dim.is_multiple_of(4) || head_dim > 256 {
        let value = format!("{} of a width of {}", spec.heads, spec.hidden_size);
        return Err(unsupported(
            heads,
            value,
            "heads of a multiple of 4 elements, up to 256, are",
        ));
    }
    if spec.out_size != decoder.hidden_size {
        let supported = format!("{}, the decoder's `hidden_size`, is", decoder.hidden_size);
        return Err(unsupported("out_hidden_size", spec.out_size, supported));
    }
    let features = &spec.features;
    let in_order = features.is_sorted_by(|a, b| a < b);
    if !in_order || features.last().is_some_and(|&last| last >= spec.layers) {
        return Err(unsupported(
            "deepstack_visual_indexes",
            format!("{features:?}"),
            "ascending indices of layers are",
        ));
    }
    // The last layer's output is of the rows that are given out alone.
    if features.len() >= decoder.layers.len() {
        return Err(unsupported(
            "deepstack_visual_indexes",
            format!("{} entries", features.len()),
            "fewer than the decoder has layers are",
        ));
    }
    if spec.most_rows() == 0 {
        return Err(ModelError::unsupported(
            "the most patches of an image",
            spec.input.limits.max_patches,
            format!("{} make one row: at least so many are", spec.merged()),
        ));
    }
    Ok(())
}

struct Reader<'a> {
    fields: Fields<'a>,
}

impl Reader<'_> {
    fn get<T: DeserializeOwned>(&self, field: &str) -> Result<Option<T>, ModelError> {
        self.fields.get(field)
    }

    /// A number that is plausible.
    fn size(&self, field: &str, default: Option<usize>) -> Result<usize, ModelError> {
        let size = match default {
            Some(default) => self.get(field)?.unwrap_or(default),
            None => self.fields.required(field)?,
        };
        match (1..=MOST).contains(&size) {
            true => Ok(size),
            false => Err(unsupported(field, size, format!("1 to {MOST} are"))),
        }
    }

    fn gelu(&self) -> Result<Gelu, ModelError> {
        match self.get::<String>("hidden_act")?.as_deref() {
            None | Some("gelu_pytorch_tanh") => Ok(Gelu::Tanh),
            Some("gelu") => Ok(Gelu::Exact),
            Some(other) => Err(unsupported(
                "hidden_act",
                format!("`{other}`"),
                "gelu_pytorch_tanh and gelu are",
            )),
        }
    }

    /// A field with one supported value, which an absent one has too if `may_be_absent`.
    fn only<T: DeserializeOwned + PartialEq + std::fmt::Debug>(
        &self,
        field: &str,
        supported: T,
        may_be_absent: bool,
    ) -> Result<(), ModelError> {
        match self.get::<T>(field)? {
            Some(found) if found == supported => Ok(()),
            None if may_be_absent => Ok(()),
            found => {
                let found = found.map_or_else(|| "absent".to_owned(), |found| format!("{found:?}"));
                Err(unsupported(field, found, format!("only {supported:?} is")))
            }
        }
    }

    /// The number added to variances.
    fn eps(&self, field: &str, default: f64) -> Result<f32, ModelError> {
        let eps: f64 = self.get(field)?.unwrap_or(default);
        match eps > 0.0 && eps < 1.0 {
            true => Ok(eps as f32),
            false => Err(unsupported(field, eps, "more than 0 and less than 1 is")),
        }
    }

    fn theta(&self) -> Result<f64, ModelError> {
        let raw: RawRope = self.get("rope_parameters")?.unwrap_or_default();
        // Older files have it by itself.
        let beside = self.get("rope_theta")?;
        let theta = raw.rope_theta.or(beside).unwrap_or(10_000.0);
        match raw.kind() {
            None | Some("axial" | "default") if theta > 0.0 && theta.is_finite() => Ok(theta),
            _ => Err(unsupported(
                "rope_parameters",
                format!("{raw:?}"),
                "the type axial with a positive base is",
            )),
        }
    }
}

/// What goes on whatever the encoder is.
const TEXT_ALONE: &str = "--limit-mm-per-prompt '{\"image\": 0}' serves the text part alone";

fn unsupported(field: &str, value: impl std::fmt::Display, supported: impl Into<String>) -> ModelError {
    let field = format!("vision_config.{field}");
    ModelError::unsupported(field, value, format!("{}; {TEXT_ALONE}", supported.into()))
}
