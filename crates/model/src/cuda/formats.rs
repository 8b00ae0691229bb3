use plimsoll_kernels::cuda::FP8_CAPABILITY;

use crate::blocks::{Decoder, Matrix, Stack, Vector, Visitor};
use crate::quantization::{FP8_BLOCK, Fp8Scales};
use crate::{DecoderSpec, ModelError};

/// What products in eight bits ask of matrices and of a GPU.
///
/// # Errors
/// [`ModelError::Unsupported`], which names the matrix.
pub(super) fn check(spec: &DecoderSpec, capability: (u32, u32)) -> Result<(), ModelError> {
    Decoder::visit(spec, &mut Products { capability }).map(drop)
}

/// Sizes that cuBLASLt takes in eight bits: rows of whole 16-byte vectors, of inputs and of outputs.
const VECTOR: usize = 16;

struct Products {
    /// Of the GPU.
    capability: (u32, u32),
}

impl Visitor for Products {
    type Vector = ();
    type Linear = ();
    type Embedding = ();
    type Error = ModelError;

    fn vector(&mut self, _: &Vector) -> Result<(), ModelError> {
        Ok(())
    }

    fn optional_vector(&mut self, _: &Vector) -> Result<Option<()>, ModelError> {
        Ok(None)
    }

    fn linear(&mut self, stack: &Stack) -> Result<(), ModelError> {
        let (inputs_of, outputs_of) = match stack.format().kept_scales() {
            None => return Ok(()),
            // The blocks of stacked matrices are those of one matrix.
            Some(Fp8Scales::Block) if stack.parts.len() > 1 => (FP8_BLOCK, FP8_BLOCK),
            Some(Fp8Scales::Block) => (FP8_BLOCK, VECTOR),
            Some(Fp8Scales::Tensor | Fp8Scales::Channel) => (VECTOR, VECTOR),
        };
        for part in &stack.parts {
            let refuse = |value: String, supported: String| {
                Err(ModelError::unsupported("quantization_config", value, supported))
            };
            let Matrix {
                module,
                outputs,
                inputs,
                format,
                order: _,
                expert: _,
            } = part;
            if self.capability < FP8_CAPABILITY {
                let ((major, minor), (least_major, least_minor)) = (self.capability, FP8_CAPABILITY);
                let value = format!("{format} for `{module}`");
                let supported = format!(
                    "a GPU of compute capability {least_major}.{least_minor} or newer multiplies them, \
                     this one has {major}.{minor}; --device cpu takes it"
                );
                return refuse(value, supported);
            }
            let is_router = [".gate", ".router", ".shared_expert_gate"]
                .iter()
                .any(|name| module.ends_with(name));
            if module == "lm_head" || is_router {
                let value = format!("{format} for `{module}`");
                let what = if is_router {
                    "what chooses experts"
                } else {
                    "the head"
                };
                let supported = format!("on a GPU {what} is stored in floats; --device cpu takes it");
                return refuse(value, supported);
            }
            if !inputs.is_multiple_of(inputs_of) || !outputs.is_multiple_of(outputs_of) {
                let value = format!("{format} for `{module}` of shape [{outputs}, {inputs}]");
                let supported = format!(
                    "on a GPU multiples of [{outputs_of}, {inputs_of}] are; --device cpu has no such bound"
                );
                return refuse(value, supported);
            }
        }
        Ok(())
    }

    fn embedding(&mut self, _: &Matrix) -> Result<(), ModelError> {
        Ok(())
    }

    fn tied(&mut self, (): &()) {}
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::{ModelConfig, ServeAs};

    fn checked(name: &str, capability: (u32, u32)) -> Result<(), String> {
        let path = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/golden")).join(name);
        let config = ModelConfig::read(&path, &ServeAs::default()).unwrap();
        check(&config.spec, capability).map_err(|error| error.to_string())
    }

    #[test]
    fn eight_bits_need_a_gpu_that_multiplies_them() {
        assert_eq!(checked("qwen3-fp8-block", (8, 9)), Ok(()));
        assert_eq!(checked("llama", (8, 0)), Ok(()));
        let error = checked("qwen3-fp8-block", (8, 6)).unwrap_err();
        for part in [
            "quantization_config",
            "q_proj",
            "8.9 or newer",
            "has 8.6",
            "--device cpu",
        ] {
            assert!(error.contains(part), "{part}: {error}");
        }
    }
}
