//! What the kernels ask of an encoder, beyond what the CPU does.

use plimsoll_kernels::cuda::EncoderKernels;

use crate::{EncoderMlp, EncoderSpec, ModelError};

/// Refuses encoders that the kernels do not know.
pub(in crate::cuda) fn check(spec: &EncoderSpec) -> Result<(), ModelError> {
    let unsupported = |field: &str, value: String, supported: String| {
        let supported = format!(
            "on a GPU {supported}; --device cpu has no such bound, and --limit-mm-per-prompt '{{\"image\": 0}}' serves the text \
             part alone"
        );
        Err(ModelError::unsupported(
            format!("vision_config.{field}"),
            value,
            supported,
        ))
    };
    // Rows inside a gated MLP, and of patches, are read by products and by kernels that take fewer elements at once.
    let of_inner = match spec.mlp {
        EncoderMlp::Plain(_) => 8,
        EncoderMlp::Gated(_) => 4,
    };
    let widths = [
        ("the values of a patch", spec.input.patch.values(), 4),
        ("num_heads", spec.head_dim(), 8),
        ("hidden_size", spec.hidden_size, 8),
        ("intermediate_size", spec.intermediate_size, of_inner),
        ("out_hidden_size", spec.out_size, 8),
    ];
    for (field, width, unit) in widths {
        if !width.is_multiple_of(unit) {
            let value = match field {
                "num_heads" => format!("heads of {width}"),
                _ => width.to_string(),
            };
            return unsupported(field, value, format!("multiples of {unit} are"));
        }
    }
    if spec.head_dim() > EncoderKernels::MAX_HEAD_DIM {
        let supported = format!("heads of up to {} are", EncoderKernels::MAX_HEAD_DIM);
        return unsupported("num_heads", format!("heads of {}", spec.head_dim()), supported);
    }
    // Norms of features are of all patches of a row.
    let normed = match spec.features.is_empty() {
        true => spec.hidden_size,
        false => spec.hidden_size * spec.merged(),
    };
    if normed > EncoderKernels::MAX_NORM {
        let supported = format!("norms of up to {} are", EncoderKernels::MAX_NORM);
        return unsupported("hidden_size", normed.to_string(), supported);
    }
    Ok(())
}
