use super::{Decoder, Matrix, Stack, Vector, Visitor};
use crate::quantization::{INT4_WORD, MXFP4_BLOCK, MatrixFormat};
use crate::{DecoderSpec, ModelError};

/// Checks that what is stacked is stored alike, as it is one product, and in whole blocks. Matrices of a GGUF file may differ, and some
/// that are no expert's may be in floats beside others.
///
/// # Errors
/// [`ModelError::Unsupported`], which names two parts that differ.
pub(crate) fn check_formats(spec: &DecoderSpec) -> Result<(), ModelError> {
    Decoder::visit(spec, &mut Alike).map(drop)
}

struct Alike;

impl Visitor for Alike {
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
        let is_coded = |part: &&Matrix| part.expert.is_some() || !part.format.may_be_mixed();
        let first = stack.parts.iter().find(is_coded).unwrap_or(&stack.parts[0]);
        if first.format == MatrixFormat::Mxfp4 && !first.inputs.is_multiple_of(MXFP4_BLOCK) {
            return Err(ModelError::unsupported(
                "quantization_config",
                format!("MXFP4 for {} inputs of `{}`", first.inputs, first.module),
                format!("a multiple of {MXFP4_BLOCK} is"),
            ));
        }
        if matches!(first.format, MatrixFormat::Int4(_)) && !first.inputs.is_multiple_of(INT4_WORD) {
            return Err(ModelError::unsupported(
                "quantization_config",
                format!(
                    "{} for {} inputs of `{}`",
                    first.format, first.inputs, first.module
                ),
                format!("a multiple of {INT4_WORD} is"),
            ));
        }
        let mut coded = stack.parts.iter().filter(is_coded);
        match coded.find(|part| part.format != first.format) {
            None => Ok(()),
            Some(other) => Err(ModelError::unsupported(
                "quantization_config",
                format!(
                    "{} for `{}` and {} for `{}`",
                    first.format, first.module, other.format, other.module
                ),
                "one format besides floats is for matrices that take the same input",
            )),
        }
    }

    fn embedding(&mut self, _: &Matrix) -> Result<(), ModelError> {
        Ok(())
    }

    fn tied(&mut self, (): &()) {}
}
