use super::{Decoder, Inspector, Matrix, Stack};
use crate::quantization::{INT4_WORD, MXFP4_BLOCK, MatrixFormat};
use crate::{DecoderSpec, ModelError};

/// Checks that what is stacked is in one format and in whole blocks. Matrices of a GGUF file may differ, and some may be in floats beside
/// others, but for those of an expert.
///
/// # Errors
/// [`ModelError::Unsupported`], which names two parts that differ.
pub(crate) fn check_formats(spec: &DecoderSpec) -> Result<(), ModelError> {
    Decoder::visit(spec, &mut Alike).map(drop)
}

struct Alike;

impl Inspector for Alike {
    type Error = ModelError;

    fn linear(&mut self, stack: &Stack) -> Result<(), ModelError> {
        let is_coded = |part: &Matrix| !part.format.may_be_mixed();
        // Floats may stand beside others, but not in one expert with matrices of few bits.
        let is_strict = (stack.parts.iter()).any(|part| part.expert.is_some() && is_coded(part));
        let mut bound = stack.parts.iter().filter(|part| is_strict || is_coded(part));
        let Some(first) = bound.clone().find(|part| is_coded(part)) else {
            return Ok(());
        };
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
        match bound.find(|part| part.format != first.format) {
            None => Ok(()),
            Some(other) => Err(ModelError::unsupported(
                "quantization_config",
                format!(
                    "{} for `{}` and {} for `{}`",
                    first.format, first.module, other.format, other.module
                ),
                match is_strict {
                    true => "one format for gate and up of an expert is",
                    false => "one format for matrices that take the same input is, beside floats",
                },
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::blocks::{Among, InExperts, RowOrder, StoredAs};
    use crate::quantization::Fp8Scales;
    use plimsoll_kernels::WeightType;

    fn check(formats: [MatrixFormat; 3], of_expert: bool) -> Result<(), String> {
        let names = ["a.q_proj", "a.k_proj", "a.v_proj"];
        let parts = names.into_iter().zip(formats).map(|(module, format)| Matrix {
            module: module.to_owned(),
            outputs: 128,
            inputs: 256,
            format,
            order: RowOrder::Plain,
            expert: of_expert.then(|| InExperts {
                stacked: "experts".to_owned(),
                index: 0,
                count: 2,
                rows: Among {
                    all: 128,
                    first: 0,
                    step: 1,
                },
                transposed: false,
            }),
            stored_as: StoredAs::Weight,
            share: None,
        });
        let stack = Stack::new(parts.collect());
        Alike.linear(&stack).map_err(|error| error.to_string())
    }

    #[test]
    fn formats_that_cannot_stand_beside_each_other_are_named() {
        let fp8 = |scales| MatrixFormat::Fp8 {
            scales,
            input_scale: false,
        };
        let (channel, tensor) = (fp8(Fp8Scales::Channel), fp8(Fp8Scales::Tensor));
        let [few, more] = [WeightType::Q4K, WeightType::Q5K].map(MatrixFormat::Gguf);
        let plain = MatrixFormat::Plain;
        for of_expert in [false, true] {
            for same in [[channel; 3], [plain; 3], [few, more, plain]] {
                assert_eq!(check(same, of_expert), Ok(()), "{same:?}");
            }
            let error = check([channel, channel, tensor], of_expert).unwrap_err();
            for module in ["a.q_proj", "a.v_proj"] {
                assert!(error.contains(module), "{error}");
            }
        }
        for order in [[plain, channel, channel], [channel, plain, channel]] {
            assert_eq!(check(order, false), Ok(()));
            let error = check(order, true).unwrap_err();
            assert!(error.contains("of an expert"), "{error}");
        }
        let error = check([plain, tensor, channel], false).unwrap_err();
        assert!(
            error.contains("a.k_proj") && error.contains("a.v_proj"),
            "{error}"
        );
    }
}
