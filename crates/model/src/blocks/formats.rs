use super::{Decoder, Matrix, Stack, Vector, Visitor};
use crate::{DecoderSpec, ModelError};

/// Checks that what is stacked is stored alike: it is one product, in one format.
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
        let first = &stack.parts[0];
        match stack.parts.iter().find(|part| part.format != first.format) {
            None => Ok(()),
            Some(other) => Err(ModelError::unsupported(
                "quantization_config",
                format!(
                    "{} for `{}` and {} for `{}`",
                    first.format, first.module, other.format, other.module
                ),
                "one format for matrices that take the same input is: they are one product here",
            )),
        }
    }

    fn embedding(&mut self, _: &Matrix) -> Result<(), ModelError> {
        Ok(())
    }

    fn tied(&mut self, (): &()) {}
}
