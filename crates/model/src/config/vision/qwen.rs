use plimsoll_core::{ImageInput, PatchShape};
use plimsoll_kernels::Activation;

use super::{Described, EncoderConfig, unsupported};
use crate::encoder_spec::families;
use crate::{EncoderMlp, EncoderSpec, ModelError, PatchWindows};

/// Qwen3-VL's and Qwen3.5's.
pub(super) const QWEN3: EncoderConfig = EncoderConfig {
    fields: &[
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
    ],
    spec: |described| {
        let vision = &described.vision;
        let positions = vision.size("num_position_embeddings", None)?;
        Ok(EncoderSpec {
            family: &families::QWEN3,
            mlp: EncoderMlp::Plain(vision.gelu()?),
            positions_per_side: Some(positions.isqrt()),
            features: vision.get("deepstack_visual_indexes")?.unwrap_or_default(),
            ..spec(described)?
        })
    },
    heads: "num_heads",
};

/// Qwen2.5-VL's.
pub(super) const QWEN2_5: EncoderConfig = EncoderConfig {
    fields: &[
        "depth",
        "fullatt_block_indexes",
        "hidden_act",
        "hidden_size",
        "in_channels",
        "in_chans",
        "intermediate_size",
        "model_type",
        "num_heads",
        "out_hidden_size",
        "patch_size",
        "rope_parameters",
        "spatial_merge_size",
        "spatial_patch_size",
        "temporal_patch_size",
        // Of videos, which are not served.
        "tokens_per_second",
        "window_size",
    ],
    spec: |described| {
        let vision = &described.vision;
        let spec = spec(described)?;
        let (patch, merge) = (spec.patch_shape[2], spec.input.merge);
        // The same by other names, in published files.
        vision.only("in_chans", 3, true)?;
        vision.only("spatial_patch_size", patch, true)?;
        vision.only("hidden_act", "silu".to_owned(), true)?;
        let window = vision.size("window_size", Some(112))?;
        let side = window / merge / patch;
        if side == 0 {
            let supported = format!("at least {} pixels, a row of the encoder, are", merge * patch);
            return Err(unsupported("window_size", window, supported));
        }
        let full_layers: Vec<usize> = match vision.get("fullatt_block_indexes")? {
            Some(layers) => layers,
            None => vec![7, 15, 23, 31],
        };
        Ok(EncoderSpec {
            family: &families::QWEN2_5,
            mlp: EncoderMlp::Gated(Activation::Silu),
            windows: Some(PatchWindows { side, full_layers }),
            ..spec
        })
    },
    heads: "num_heads",
};

/// What both have.
fn spec(described: &Described<'_>) -> Result<EncoderSpec, ModelError> {
    let vision = &described.vision;
    let side = vision.size("patch_size", None)?;
    vision.only("in_channels", 3, true)?;
    let frames = vision.size("temporal_patch_size", Some(2))?;
    Ok(EncoderSpec {
        family: &families::QWEN3,
        input: ImageInput {
            placeholder: described.placeholder()?,
            patch: PatchShape {
                pixels: side * side,
                frames,
            },
            merge: vision.size("spatial_merge_size", Some(2))?,
            only: None,
            mutual: false,
            limits: described.limits,
        },
        patch_shape: vec![3, frames, side, side],
        hidden_size: vision.size("hidden_size", None)?,
        heads: vision.size("num_heads", None)?,
        intermediate_size: vision.size("intermediate_size", None)?,
        mlp: EncoderMlp::Gated(Activation::Silu),
        layers: vision.size("depth", None)?,
        eps: 1e-6,
        positions_per_side: None,
        theta: Some(vision.theta()?),
        windows: None,
        merger_eps: 1e-6,
        out_size: vision.size("out_hidden_size", None)?,
        features: Vec::new(),
    })
}
