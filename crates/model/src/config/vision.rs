//! From `vision_config` to an [`EncoderSpec`].

use std::path::Path;

use plimsoll_core::{EncoderLimits, ImageInput, TokenId};
use plimsoll_kernels::Gelu;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::around::Around;
use super::known::is_inert;
use super::raw::{Fields, RawRope};
use crate::{DecoderSpec, EncoderSpec, ModelError};

/// The fields of `vision_config` that are interpreted.
const FIELDS: [&str; 14] = [
    "deepstack_visual_indexes",
    "depth",
    "hidden_act",
    "hidden_size",
    "in_channels",
    "intermediate_size",
    "model_type",
    "num_heads",
    "num_position_embeddings",
    "out_hidden_size",
    "patch_size",
    "rope_parameters",
    "spatial_merge_size",
    "temporal_patch_size",
];

/// The largest of any number of the configuration: products of four fit.
const MOST: usize = 1 << 15;

impl Around {
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
        if !self.has_encoder() {
            return Ok(None);
        }
        let Some(Value::Object(values)) = self.fields.get("vision_config") else {
            return Err(ModelError::config(path, "`vision_config` is missing"));
        };
        for (field, value) in values {
            if !FIELDS.contains(&field.as_str()) && !value.is_null() && !is_inert(field) {
                return Err(unsupported(field, value, "this encoder has no such field here"));
            }
        }
        let reader = Reader {
            fields: Fields::new(path, values),
        };
        let placeholder: TokenId = Fields::new(path, &self.fields).required("image_token_id")?;
        if placeholder as usize >= decoder.vocab_size {
            let message = format!("`image_token_id` {placeholder} is outside the vocabulary");
            return Err(ModelError::config(path, message));
        }
        let side = reader.size("patch_size", None)?;
        let patch_shape = [
            reader.size("in_channels", Some(3))?,
            reader.size("temporal_patch_size", Some(2))?,
            side,
            side,
        ];
        let positions = reader.size("num_position_embeddings", None)?;
        let spec = EncoderSpec {
            input: ImageInput {
                placeholder,
                patch_values: patch_shape.iter().product(),
                merge: reader.size("spatial_merge_size", Some(2))?,
                limits,
            },
            patch_shape,
            hidden_size: reader.size("hidden_size", None)?,
            heads: reader.size("num_heads", None)?,
            intermediate_size: reader.size("intermediate_size", None)?,
            activation: reader.activation()?,
            layers: reader.size("depth", None)?,
            eps: 1e-6,
            positions_per_side: positions.isqrt(),
            theta: reader.theta()?,
            out_size: reader.size("out_hidden_size", None)?,
            features: reader.get("deepstack_visual_indexes")?.unwrap_or_default(),
        };
        check(&spec, decoder)?;
        Ok(Some(spec))
    }
}

/// What the encoder relies on.
fn check(spec: &EncoderSpec, decoder: &DecoderSpec) -> Result<(), ModelError> {
    let head_dim = spec.head_dim();
    if spec.heads * head_dim != spec.hidden_size || !head_dim.is_multiple_of(4) || head_dim > 256 {
        let value = format!("{} of a width of {}", spec.heads, spec.hidden_size);
        return Err(unsupported(
            "num_heads",
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

    fn activation(&self) -> Result<Gelu, ModelError> {
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

    fn theta(&self) -> Result<f64, ModelError> {
        let raw: RawRope = self.get("rope_parameters")?.unwrap_or_default();
        let theta = raw.rope_theta.unwrap_or(10_000.0);
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

fn unsupported(field: &str, value: impl std::fmt::Display, supported: impl Into<String>) -> ModelError {
    let field = format!("vision_config.{field}");
    let supported = format!(
        "{}; --limit-mm-per-prompt '{{\"image\": 0}}' serves the text part alone",
        supported.into()
    );
    ModelError::unsupported(field, value, supported)
}
