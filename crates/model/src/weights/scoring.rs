//! The head of a cross-encoder, which the host keeps.

use super::Source;
use crate::embedding::{ScoringConfig, ScoringHead};
use crate::names::CLASSIFIER;
use crate::{DecoderSpec, ModelError, Shape};

impl ScoringConfig {
    /// The head: as many numbers as a row has.
    ///
    /// # Errors
    /// Where it is missing, of another shape, or not in floats.
    pub(crate) fn row(&self, source: &dyn Source, spec: &DecoderSpec) -> Result<Vec<f32>, ModelError> {
        let width = spec.hidden_size;
        let (name, rows) = match self.head {
            ScoringHead::Classifier => (CLASSIFIER, 1),
            ScoringHead::Tokens { tied: false, .. } => ("lm_head.weight", spec.vocab_size),
            ScoringHead::Tokens { tied: true, .. } => ("model.embed_tokens.weight", spec.vocab_size),
        };
        let expected = [rows, width];
        let missing = || ModelError::MissingTensor {
            name: source.stored_name(name),
            expected: Shape(expected.to_vec()),
        };
        let tensor = source.tensor(name, &expected)?.ok_or_else(missing)?;
        if tensor.shape.0 != expected {
            return Err(ModelError::MisshapenTensor {
                name: tensor.name,
                expected: Shape(expected.to_vec()),
                found: tensor.shape,
            });
        }
        let row = |row| tensor.float_row(row);
        match self.head {
            ScoringHead::Classifier => row(0),
            ScoringHead::Tokens { yes, no, .. } => {
                let mut values = row(yes as usize)?;
                if let Some(no) = no {
                    let other = row(no as usize)?;
                    values.iter_mut().zip(other).for_each(|(yes, no)| *yes -= no);
                }
                Ok(values)
            }
        }
    }
}
