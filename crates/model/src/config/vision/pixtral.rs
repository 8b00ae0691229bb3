use plimsoll_core::{ImageInput, PatchShape};
use plimsoll_kernels::Activation;

use super::{EncoderConfig, unsupported};
use crate::encoder_spec::families;
use crate::{EncoderMlp, EncoderSpec};

/// Mistral 3's and Ministral 3's.
pub(super) const PIXTRAL: EncoderConfig = EncoderConfig {
    fields: &[
        "head_dim",
        "hidden_act",
        "hidden_size",
        // The most pixels of a side, to which the processor scales down.
        "image_size",
        "intermediate_size",
        "model_type",
        "num_attention_heads",
        "num_channels",
        "num_hidden_layers",
        "patch_size",
        "rope_parameters",
        "rope_theta",
    ],
    spec: |described| {
        let vision = &described.vision;
        described.only("vision_feature_layer", -1)?;
        described.only("multimodal_projector_bias", false)?;
        described.only("projector_hidden_act", "gelu".to_owned())?;
        vision.only("hidden_act", "silu".to_owned(), false)?;
        let (hidden_size, heads) = (
            vision.size("hidden_size", None)?,
            vision.size("num_attention_heads", None)?,
        );
        vision.only("head_dim", hidden_size / heads, true)?;
        let patch = vision.size("patch_size", None)?;
        vision.only("num_channels", 3, true)?;
        let merge = described.model.get("spatial_merge_size")?.unwrap_or(2);
        if !(1..=16).contains(&merge) {
            return Err(crate::ModelError::unsupported(
                "spatial_merge_size",
                merge,
                "1 to 16 are",
            ));
        }
        if described.limits.max_patches < merge * merge {
            let supported = format!("{} and more patches of an image are", merge * merge);
            return Err(unsupported("patch_size", patch, supported));
        }
        Ok(EncoderSpec {
            family: &families::PIXTRAL,
            input: ImageInput {
                placeholder: described.placeholder()?,
                patch: PatchShape {
                    pixels: patch * patch,
                    frames: 1,
                },
                merge,
                only: None,
                mutual: false,
                limits: described.limits,
            },
            patch_shape: vec![3, patch, patch],
            hidden_size,
            heads,
            intermediate_size: vision.size("intermediate_size", None)?,
            mlp: EncoderMlp::Gated(Activation::Silu),
            layers: vision.size("num_hidden_layers", None)?,
            eps: 1e-5,
            positions_per_side: None,
            theta: Some(vision.theta()?),
            windows: None,
            merger_eps: described.decoder.final_norm.eps,
            out_size: described.decoder.hidden_size,
            features: Vec::new(),
        })
    },
    heads: "num_attention_heads",
};
