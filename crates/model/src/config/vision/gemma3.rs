use plimsoll_core::{EncoderLimits, ImageGrid, ImageInput, PatchShape};

use super::{EncoderConfig, unsupported};
use crate::encoder_spec::families;
use crate::{EncoderMlp, EncoderSpec, ModelError};

/// Gemma 3's: squares of one size, each of which becomes `mm_tokens_per_image` rows, which see each other in the decoder.
pub(super) const GEMMA3: EncoderConfig = EncoderConfig {
    fields: &[
        "hidden_act",
        "hidden_size",
        "image_size",
        "intermediate_size",
        "layer_norm_eps",
        "model_type",
        "num_attention_heads",
        "num_channels",
        "num_hidden_layers",
        "patch_size",
        "vision_use_head",
    ],
    spec: |described| {
        let vision = &described.vision;
        // The head makes one vector of an image, which the decoder does not get.
        vision.only("vision_use_head", false, true)?;
        let (pixels, patch) = (vision.size("image_size", None)?, vision.size("patch_size", None)?);
        let side = pixels / patch;
        let rows: usize = described.model.get("mm_tokens_per_image")?.unwrap_or(256);
        let rows_per_side = rows.isqrt();
        let fits =
            rows > 0 && rows_per_side * rows_per_side == rows && side.checked_rem(rows_per_side) == Some(0);
        if !fits || side == 0 {
            return Err(ModelError::unsupported(
                "mm_tokens_per_image",
                rows,
                format!("the square of a divisor of the {side} patches along a side of an image is"),
            ));
        }
        let most = described.limits.max_patches;
        if most < side * side {
            let supported = format!("sizes of up to {most} patches of {patch} pixels squared are");
            return Err(unsupported("image_size", pixels, supported));
        }
        vision.only("num_channels", 3, true)?;
        let eps = vision.eps("layer_norm_eps", 1e-6)?;
        Ok(EncoderSpec {
            family: &families::GEMMA3,
            input: ImageInput {
                placeholder: described.placeholder()?,
                patch: PatchShape {
                    pixels: patch * patch,
                    frames: 1,
                },
                merge: side / rows_per_side,
                only: Some(ImageGrid {
                    frames: 1,
                    height: side,
                    width: side,
                }),
                mutual: true,
                limits: EncoderLimits {
                    max_patches: side * side,
                    ..described.limits
                },
            },
            patch_shape: vec![3, patch, patch],
            hidden_size: vision.size("hidden_size", None)?,
            heads: vision.size("num_attention_heads", None)?,
            intermediate_size: vision.size("intermediate_size", None)?,
            mlp: EncoderMlp::Plain(vision.gelu()?),
            layers: vision.size("num_hidden_layers", None)?,
            eps,
            positions_per_side: Some(side),
            theta: None,
            windows: None,
            merger_eps: eps,
            out_size: described.decoder.hidden_size,
            features: Vec::new(),
        })
    },
    heads: "num_attention_heads",
};
