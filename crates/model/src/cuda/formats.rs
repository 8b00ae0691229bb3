use crate::blocks::{Decoder, Matrix, Stack, Vector, Visitor};
use crate::quantization::{FP8_BLOCK, Fp8Scales, MatrixFormat};
use crate::{DecoderSpec, ModelError};

/// What products in eight bits ask of matrices.
///
/// # Errors
/// [`ModelError::Unsupported`], which names the matrix.
pub(super) fn check(spec: &DecoderSpec) -> Result<(), ModelError> {
    Decoder::visit(spec, &mut Products).map(drop)
}

/// Sizes that cuBLASLt takes in eight bits: rows of whole 16-byte vectors, of inputs and of outputs.
const VECTOR: usize = 16;

struct Products;

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
        if let (MatrixFormat::Int4(format), part) = (stack.format(), &stack.parts[0]) {
            let value = format!("{format} for `{}`", part.module);
            let supported = "on a GPU it is not served yet; --device cpu takes it".to_owned();
            return Err(ModelError::unsupported("quantization_config", value, supported));
        }
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
