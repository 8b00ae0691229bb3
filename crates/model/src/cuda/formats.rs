use std::collections::HashMap;

use plimsoll_kernels::cuda::PART_OUTPUTS;

use super::weights::{products, rows_together};
use crate::blocks::{Decoder, Inspector, Matrix, Stack};
use crate::quantization::{FP8_BLOCK, Fp8Scales, INT4_WORD, MXFP4_BLOCK, MatrixFormat};
use crate::{DecoderSpec, ModelError};

/// What products in eight bits and in four ask of matrices.
///
/// # Errors
/// [`ModelError::Unsupported`], which names the matrix.
pub(super) fn check(spec: &DecoderSpec) -> Result<(), ModelError> {
    Decoder::visit(spec, &mut Products::default()).map(drop)
}

/// Sizes that cuBLASLt takes in eight bits: rows of whole 16-byte vectors, of inputs and of outputs.
const VECTOR: usize = 16;

/// Parts that are kept in different types are products of their own, whose outputs follow each other.
fn check_parts(parts: &[Matrix]) -> Result<(), ModelError> {
    let mut ahead = products(parts).rev().skip(1);
    let is_odd = |product: &&[Matrix]| {
        let outputs: usize = product.iter().map(|part| part.outputs).sum();
        !outputs.is_multiple_of(PART_OUTPUTS)
    };
    let odd = ahead.find(is_odd).and_then(|product| {
        let mut parts = product.iter();
        parts.find(|part| !part.outputs.is_multiple_of(PART_OUTPUTS))
    });
    match odd {
        Some(odd) => Err(ModelError::unsupported(
            odd.name(),
            format!("{} of shape [{}, {}]", odd.format, odd.outputs, odd.inputs),
            format!(
                "on a GPU, where matrices of the same inputs are in different types, multiples of {PART_OUTPUTS} outputs are; \
                 --device cpu has no such bound"
            ),
        )),
        None => Ok(()),
    }
}

/// Matrices that are one product.
fn check_product(parts: &[Matrix]) -> Result<(), ModelError> {
    for (at, part) in parts.iter().enumerate() {
        let together = rows_together(part);
        let (inputs_of, outputs_of) = match part.format.kept_scales() {
            None if together == 1 => continue,
            // Blocks or words of codes, and rows that lie together.
            None if part.format == MatrixFormat::Mxfp4 => (MXFP4_BLOCK, together),
            None => (INT4_WORD, together),
            // The blocks of stacked matrices are those of one matrix: the last alone may be smaller.
            Some(Fp8Scales::Block) if at + 1 < parts.len() => (FP8_BLOCK, FP8_BLOCK),
            Some(Fp8Scales::Block) => (FP8_BLOCK, VECTOR),
            Some(Fp8Scales::Tensor | Fp8Scales::Channel) => (VECTOR, VECTOR),
        };
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
            // Of an encoder, which is stored in floats.
            stored_as: _,
            // Outputs and inputs are the rank's.
            share: _,
        } = part;
        let is_router = part.is_router();
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

/// Module and format of the first expert of each layer, by the name of the tensor in which all of them are or would be stacked.
#[derive(Default)]
struct Products(HashMap<String, (String, MatrixFormat)>);

impl Products {
    /// A kernel takes all experts of a layer in one format.
    fn check_experts(&mut self, parts: &[Matrix]) -> Result<(), ModelError> {
        for part in parts {
            let Some(expert) = &part.expert else {
                continue;
            };
            let own = || (part.module.clone(), part.format);
            let (module, format) = self.0.entry(expert.stacked.clone()).or_insert_with(own);
            if *format != part.format {
                return Err(ModelError::unsupported(
                    "quantization_config",
                    format!(
                        "{format} for `{module}` and {} for `{}`",
                        part.format, part.module
                    ),
                    "on a GPU one format for all experts of a layer is; --device cpu has no such bound",
                ));
            }
        }
        Ok(())
    }
}

impl Inspector for Products {
    type Error = ModelError;

    fn linear(&mut self, stack: &Stack) -> Result<(), ModelError> {
        check_parts(&stack.parts)?;
        self.check_experts(&stack.parts)?;
        products(&stack.parts).try_for_each(check_product)
    }
}

#[cfg(test)]
mod tests {
    use plimsoll_kernels::WeightType;

    use super::*;
    use crate::blocks::{Among, InExperts, RowOrder, StoredAs};
    use crate::quantization::{Int4Format, Int4Groups, Int4Packing};

    #[test]
    fn matrices_of_four_bits_have_multiples_of_eight_outputs() {
        let int4 = MatrixFormat::Int4(Int4Format {
            packing: Int4Packing::Compressed { symmetric: true },
            groups: Int4Groups::Of32,
            ordered: false,
        });
        let in_experts = InExperts {
            stacked: "experts".to_owned(),
            index: 0,
            count: 1,
            rows: Among {
                first: 0,
                step: 1,
                all: 16,
            },
            transposed: false,
        };
        for (format, expert, multiples) in [
            (int4, None, "[8, 8]"),
            (int4, Some(in_experts.clone()), "[8, 8]"),
            (MatrixFormat::Mxfp4, Some(in_experts), "[8, 32]"),
        ] {
            let part = |outputs, inputs| Matrix {
                module: "a.q_proj".to_owned(),
                outputs,
                inputs,
                format,
                order: RowOrder::Plain,
                expert: expert.clone(),
                stored_as: StoredAs::Weight,
                share: None,
            };
            check_product(&[part(16, 160), part(8, 160)]).unwrap();
            for (outputs, inputs) in [(12, 160), (16, 36)] {
                let error = check_product(&[part(16, 160), part(outputs, inputs)])
                    .unwrap_err()
                    .to_string();
                let shape = format!("`a.q_proj` of shape [{outputs}, {inputs}]");
                for said in [&*shape, multiples, "--device cpu"] {
                    assert!(error.contains(said), "{error}");
                }
            }
        }
    }

    #[test]
    fn parts_of_odd_sizes_in_different_types_are_named() {
        let part = |module: &str, outputs, dtype| Matrix {
            module: module.to_owned(),
            outputs,
            inputs: 256,
            format: MatrixFormat::Gguf(dtype),
            order: RowOrder::Plain,
            expert: None,
            stored_as: StoredAs::Weight,
            share: None,
        };
        let parts = |dtype| {
            vec![
                part("a.q_proj", 12, dtype),
                part("a.k_proj", 64, dtype),
                // The last may be of any size.
                part("a.v_proj", 12, WeightType::Q4K),
            ]
        };
        // One product, whatever its size.
        check_parts(&parts(WeightType::Q4K)).unwrap();
        let error = check_parts(&parts(WeightType::Q6K)).unwrap_err().to_string();
        for said in ["a.q_proj.weight", "Q6_K", "[12, 256]", "--device cpu"] {
            assert!(error.contains(said), "{error}");
        }
    }
}
