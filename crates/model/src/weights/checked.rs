mod int4;

use std::collections::HashSet;
use std::ops::Range;

use plimsoll_core::untrusted::quotable;

use plimsoll_kernels::WeightType;

use super::share::in_units;
use super::{Beside, RowOrder, Scales, Source, StoredMatrix, Tensor, slice};
use crate::blocks::{Among, InExperts, Matrix, StoredAs, Vector};
use crate::names::{CLASSIFIER, TOWERS};
use crate::quantization::{FP8_BLOCK, Fp8Scales, MXFP4_BLOCK, MatrixFormat};
use crate::shard::{Axis, Share};
use crate::{ModelError, Shape};

#[cfg(test)]
pub(crate) use int4::tests as int4_tests;

/// Shapes of a single number.
const SCALAR: [&[usize]; 2] = [&[1], &[]];

/// Takes tensors from a source and checks that they are what the configuration implies, all of it and nothing else.
pub(crate) struct Checked<'a> {
    source: &'a dyn Source,
    /// Names of those not yet taken, as the source calls them.
    left: HashSet<String>,
    /// Of these, such as nothing reads.
    idle: HashSet<String>,
    /// Modules of those taken.
    modules: HashSet<String>,
}

impl<'a> Checked<'a> {
    pub(crate) fn new(source: &'a dyn Source) -> Self {
        let left = source.names().into_iter().collect();
        Self {
            source,
            left,
            idle: HashSet::new(),
            modules: HashSet::new(),
        }
    }

    /// Bytes of all tensors; 0 if unknown.
    pub(crate) fn total_bytes(&self) -> u64 {
        self.source.total_bytes()
    }

    /// A matrix, with its scales where it has any.
    pub(crate) fn matrix(&mut self, matrix: &Matrix) -> Result<StoredMatrix<'a>, ModelError> {
        let (mut stored, columns) = self.with_whole_rows(matrix)?;
        if let (Some(_), Some(share)) = (columns, &matrix.share) {
            stored.tensor = stored.tensor.of_rank(share)?;
        }
        Ok(stored)
    }

    /// The same, and where a rank has part of the inputs, which: then rows of elements are whole as far as that avoids a copy, and
    /// scales are the rank's.
    pub(crate) fn with_whole_rows(
        &mut self,
        matrix: &Matrix,
    ) -> Result<(StoredMatrix<'a>, Option<Range<usize>>), ModelError> {
        match matrix.format {
            MatrixFormat::Mxfp4 => return Ok((self.mxfp4(matrix)?, None)),
            MatrixFormat::Int4(format) => return Ok((self.int4(matrix, format)?, None)),
            MatrixFormat::Plain | MatrixFormat::Gguf(_) | MatrixFormat::Fp8 { .. } | MatrixFormat::ToFp8 => {}
        }
        let mut share = matrix.share.as_ref();
        let mut tensor = match &matrix.expert {
            Some(expert) if matrix.format == MatrixFormat::Plain && !self.source.has(&matrix.name()) => {
                let (stored, is_found) = (matrix.stored_shape(), Axis::Outputs);
                // Its rows are found among those of all.
                share = share.filter(|share| share.axis != is_found);
                self.of_experts(&matrix.name(), expert, &[matrix.outputs, stored[1]])?
            }
            _ => match &matrix.stored_as {
                StoredAs::Weight => self.take(&[matrix.name()], &[&matrix.stored_shape()])?,
                StoredAs::Kernel(kernel) => {
                    let stored = [&[matrix.outputs], &kernel[..]].concat();
                    let tensor = self.take(&[matrix.name()], &[&stored])?;
                    let shape = Shape(matrix.shape().to_vec());
                    Tensor { shape, ..tensor }
                }
                StoredAs::Parameter => {
                    let tensor = self.take(&[matrix.name()], &[&[matrix.inputs, matrix.outputs]])?;
                    let all = Among {
                        all: matrix.outputs,
                        first: 0,
                        step: 1,
                    };
                    Tensor {
                        shape: Shape(matrix.shape().to_vec()),
                        order: RowOrder::Columns(all),
                        ..tensor
                    }
                }
            },
        };
        let mut columns = None;
        if let Some(share) = share {
            match &share.own[..] {
                [own] if share.axis == Axis::Inputs && !matches!(tensor.order, RowOrder::Columns(_)) => {
                    in_units(share, tensor.dtype.block_len(), &tensor.name)?;
                    columns = Some(own.clone());
                }
                _ => tensor = tensor.of_rank(share)?,
            }
        }
        if matrix.order != RowOrder::Plain {
            tensor.order = matrix.order;
        }
        let MatrixFormat::Fp8 { scales, input_scale } = matrix.format else {
            let stored = StoredMatrix {
                tensor: in_floats(tensor)?,
                beside: Beside::Nothing,
            };
            return Ok((stored, columns));
        };
        if tensor.dtype != WeightType::F8E4M3 {
            return Err(ModelError::TensorType {
                name: tensor.name,
                found: format!("{:?}", tensor.dtype),
                supported: "F8_E4M3, as `quantization_config` says",
            });
        }
        let of_module = |names: [&str; 2]| names.map(|name| format!("{}.{name}", matrix.module));
        // The second is transformers' name, of the same: it is what the elements are multiplied by.
        let names = of_module(["weight_scale", "weight_scale_inv"]);
        let [outputs, inputs] = matrix.stored_shape();
        let shape = scales.shape(outputs, inputs);
        let values = match scales {
            Fp8Scales::Tensor => self.scales(&names, &SCALAR)?,
            // The second shapes are ModelOpt's.
            Fp8Scales::Channel => self.scales(&names, &[&shape, &shape[..1]])?,
            Fp8Scales::Block => self.scales(&names, &[&shape, &[shape[0], 1, shape[1], 1]])?,
        };
        let values = match share {
            None => values,
            Some(share) => scales_of_rank(values, scales, shape[1], share, &matrix.module)?,
        };
        if input_scale {
            self.scales(&of_module(["input_scale", "activation_scale"]), &SCALAR)?;
        }
        let beside = Beside::Scales(Scales::new(values, scales, matrix));
        Ok((StoredMatrix { tensor, beside }, columns))
    }

    /// An expert's matrix in MXFP4: elements `[outputs, inputs / 32, 16]`, two in a byte, and exponents `[outputs, inputs / 32]`.
    fn mxfp4(&mut self, matrix: &Matrix) -> Result<StoredMatrix<'a>, ModelError> {
        let [_, inputs] = matrix.stored_shape();
        let blocks = [inputs / MXFP4_BLOCK, MXFP4_BLOCK / 2];
        Ok(StoredMatrix {
            tensor: self.mxfp4_part(matrix, "blocks", &blocks)?,
            beside: Beside::Exponents(self.mxfp4_part(matrix, "scales", &blocks[..1])?),
        })
    }

    /// Bytes of an expert's matrix, so many for each row.
    fn mxfp4_part(&mut self, matrix: &Matrix, part: &str, row: &[usize]) -> Result<Tensor<'a>, ModelError> {
        let own = format!("{}_{part}", matrix.module);
        let [outputs, _] = matrix.stored_shape();
        let mut share = matrix.share.as_ref();
        let tensor = match &matrix.expert {
            Some(expert) if !self.source.has(&own) => {
                share = share.filter(|share| share.axis != Axis::Outputs);
                let shape = [&[matrix.outputs][..], row].concat();
                let stored = [&[expert.count, expert.rows.all][..], row].concat();
                let tensor = self.take(&[format!("{}_{part}", expert.stacked)], &[&stored])?;
                tensor.of_expert(expert, Shape(shape), RowOrder::Among(expert.rows))
            }
            _ => self.take(&[own], &[&[&[outputs][..], row].concat()])?,
        };
        let tensor = match share {
            None => tensor,
            Some(share) => blocks_of_rank(tensor, share)?,
        };
        match tensor.dtype {
            WeightType::U8 => Ok(tensor),
            other => Err(ModelError::TensorType {
                name: tensor.name,
                found: format!("{other:?}"),
                supported: "U8, as `quantization_config` says that it is in MXFP4",
            }),
        }
    }

    /// Takes scales of keys and values that the checkpoint says it stores, whether or not a cache uses them.
    pub(crate) fn kv_scales(&mut self, names: &[String]) -> Result<(), ModelError> {
        let mut names = names.iter();
        names.try_for_each(|name| self.scales(std::slice::from_ref(name), &SCALAR).map(drop))
    }

    /// Scales, which are positive numbers.
    fn scales(&mut self, names: &[String], shapes: &[&[usize]]) -> Result<Vec<f32>, ModelError> {
        let tensor = self.take(names, shapes)?;
        let values = tensor.widen()?;
        match values
            .iter()
            .position(|value| !(value.is_finite() && *value > 0.0))
        {
            None => Ok(values),
            Some(index) => Err(ModelError::Weights {
                name: tensor.name,
                message: format!(
                    "element {index} is {}, and scales are positive numbers: the file is damaged, download it again",
                    values[index]
                ),
            }),
        }
    }

    /// Integers of this type.
    pub(super) fn integers(
        &mut self,
        name: &str,
        dtype: WeightType,
        shape: &[usize],
    ) -> Result<Tensor<'a>, ModelError> {
        let tensor = self.take(&[name.to_owned()], &[shape])?;
        match tensor.dtype == dtype {
            true => Ok(tensor),
            false => Err(ModelError::TensorType {
                name: tensor.name,
                found: format!("{:?}", tensor.dtype),
                supported: "I32 and, for shapes, I64, as `quantization_config` says that it is in four bits",
            }),
        }
    }

    /// As [`Self::integers`], if they are there and were not taken before.
    pub(super) fn optional_integers(
        &mut self,
        name: &str,
        dtype: WeightType,
        shape: &[usize],
    ) -> Result<Option<Tensor<'a>>, ModelError> {
        match self.left.contains(&self.source.stored_name(name)) {
            true => self.integers(name, dtype, shape).map(Some),
            false => Ok(None),
        }
    }

    /// Floats of 16 bits or 32.
    pub(super) fn floats(&mut self, name: &str, shape: &[usize]) -> Result<Tensor<'a>, ModelError> {
        in_floats(self.take(&[name.to_owned()], &[shape])?)
    }

    /// The tensor of the first of these names that is there, which must have one of these shapes.
    fn take(&mut self, names: &[String], shapes: &[&[usize]]) -> Result<Tensor<'a>, ModelError> {
        let shape = || Shape(shapes[0].to_vec());
        let mut found = None;
        for name in names {
            found = self.source.tensor(name, shapes[0])?;
            if found.is_some() {
                break;
            }
        }
        let Some(tensor) = found else {
            let names: Vec<String> = names.iter().map(|name| self.source.stored_name(name)).collect();
            return Err(ModelError::MissingTensor {
                name: names.join("` or `"),
                expected: shape(),
            });
        };
        if !shapes.contains(&&tensor.shape.0[..]) {
            return Err(ModelError::MisshapenTensor {
                name: tensor.name,
                expected: shape(),
                found: tensor.shape,
            });
        }
        self.left.remove(&tensor.name);
        self.modules.insert(module(&tensor.name).to_owned());
        Ok(tensor)
    }

    /// An expert's matrix, in floats, or its bias, of this shape, in a tensor of all experts. `name` is that of a tensor of its
    /// own, for errors.
    fn of_experts(
        &mut self,
        name: &str,
        expert: &InExperts,
        shape: &[usize],
    ) -> Result<Tensor<'a>, ModelError> {
        let (rows, stacked) = (expert.rows, &expert.stacked);
        let (names, stored, order) = match shape[1..] {
            [inputs] if expert.transposed => (
                [name.to_owned(), stacked.clone()],
                vec![expert.count, inputs, rows.all],
                RowOrder::Columns(rows),
            ),
            [inputs] => (
                [name.to_owned(), stacked.clone()],
                vec![expert.count, rows.all, inputs],
                RowOrder::Among(rows),
            ),
            _ => (
                [name.to_owned(), format!("{stacked}_bias")],
                vec![expert.count, rows.all],
                RowOrder::Among(rows),
            ),
        };
        let tensor = self.take(&names, &[&stored])?;
        Ok(in_floats(tensor)?.of_expert(expert, Shape(shape.to_vec()), order))
    }

    /// A vector, in floats.
    pub(crate) fn vector(&mut self, vector: &Vector) -> Result<Tensor<'a>, ModelError> {
        let unit_offset = vector.unit_offset && !self.source.has_whole_norms();
        let tensor = match &vector.expert {
            Some(expert) if !self.source.has(&vector.name) => {
                let bias = self.of_experts(&vector.name, expert, &[vector.len])?;
                bias.in_order()
            }
            _ => {
                let tensor = self.take(std::slice::from_ref(&vector.name), &[&vector.stored_shape()])?;
                match &vector.share {
                    None => tensor,
                    Some(share) => tensor.of_rank(share)?,
                }
            }
        };
        let tensor = Tensor {
            unit_offset,
            ..in_floats(tensor)?
        };
        // Matrices have too many elements: the first step finds out.
        if let Some(index) = tensor.widen()?.iter().position(|value| !value.is_finite()) {
            return Err(ModelError::Weights {
                name: tensor.name,
                message: format!("element {index} is not a number: the file is damaged, download it again"),
            });
        }
        Ok(tensor)
    }

    /// A vector that a model may do without, not taken before.
    pub(crate) fn optional_vector(&mut self, vector: &Vector) -> Result<Option<Tensor<'a>>, ModelError> {
        match self.left.contains(&self.source.stored_name(&vector.name)) {
            true => self.vector(vector).map(Some),
            false => Ok(None),
        }
    }

    /// A tensor that checkpoints may have, and that nothing reads.
    pub(crate) fn idle(&mut self, name: &str) {
        self.idle.insert(self.source.stored_name(name));
    }

    /// A positive number, of shape `[]` or `[1]`, that a model may do without.
    pub(crate) fn optional_scale(&mut self, name: &str) -> Result<Option<f32>, ModelError> {
        if !self.left.contains(&self.source.stored_name(name)) {
            return Ok(None);
        }
        let values = self.scales(&[name.to_owned()], &SCALAR)?;
        Ok(Some(values[0]))
    }

    /// Whether a tensor is one of an encoder of which others were taken.
    fn is_of_tower(&self, name: &str) -> bool {
        let end = |tower: &&str| Some(name.find(*tower)? + tower.len());
        let Some(end) = TOWERS.iter().find_map(end) else {
            return false;
        };
        self.modules.iter().any(|module| module.starts_with(&name[..end]))
    }

    /// Checks that no tensor was left that would have changed the output.
    pub(crate) fn finish(self) -> Result<(), ModelError> {
        let mut left: Vec<_> = self.left.iter().cloned().collect();
        left.sort_unstable();
        let (in_decoder, others): (Vec<_>, Vec<_>) = left
            .into_iter()
            // Tables that old checkpoints store and everybody computes, and scales for a KV cache of 8 bits where it has 16.
            // A classifier's head is read on its own.
            .filter(|name| {
                let idle = ["rotary_emb.inv_freq", ".k_scale", ".v_scale", CLASSIFIER];
                !idle.iter().any(|end| name.ends_with(end))
            })
            .partition(|name| {
                // What is left of a module that was taken, such as a bias or a scale, would have changed it.
                let is_of_module = self.modules.contains(module(name));
                let is_idle = self.idle.contains(name);
                (is_of_module
                    || self.is_of_tower(name)
                    || [
                        "model.layers.",
                        "layers.",
                        "blk.",
                        "model.language_model.layers.",
                        "language_model.model.layers.",
                    ]
                    .iter()
                    .any(|of| name.starts_with(of)))
                    && !is_idle
            });
        if !others.is_empty() {
            tracing::info!(
                "{} tensors outside the decoder are not loaded, such as {}",
                others.len(),
                others[0]
            );
        }
        if in_decoder.is_empty() {
            return Ok(());
        }
        let names = match in_decoder.as_slice() {
            [a, b, c, _, ..] => format!("{a}, {b}, {c} and {} more", in_decoder.len() - 3),
            names => names.join(", "),
        };
        let names = quotable(&names);
        Err(ModelError::UnusedTensors { names })
    }
}

impl Tensor<'_> {
    /// An expert's part of a tensor of all.
    fn of_expert(self, expert: &InExperts, shape: Shape, order: RowOrder) -> Self {
        let bytes = self.data.len() / expert.count;
        Self {
            shape,
            order,
            data: slice(self.data, expert.index * bytes..(expert.index + 1) * bytes),
            ..self
        }
    }
}

/// Of the scales of a matrix, `columns` in a row, those of a rank's part.
fn scales_of_rank(
    values: Vec<f32>,
    scales: Fp8Scales,
    columns: usize,
    share: &Share,
    module: &str,
) -> Result<Vec<f32>, ModelError> {
    let unit = match (scales, share.axis) {
        (Fp8Scales::Tensor, _) | (Fp8Scales::Channel, Axis::Inputs) => return Ok(values),
        (Fp8Scales::Channel, Axis::Outputs) => 1,
        (Fp8Scales::Block, _) => FP8_BLOCK,
    };
    let own = in_units(share, unit, module)?;
    Ok(match share.axis {
        Axis::Outputs => own
            .into_iter()
            .flat_map(|rows| &values[rows.start * columns..rows.end * columns])
            .copied()
            .collect(),
        Axis::Inputs => values
            .chunks_exact(columns)
            .flat_map(|row| own.iter().flat_map(|own| &row[own.clone()]))
            .copied()
            .collect(),
    })
}

/// A rank's part of the elements or exponents of a matrix in MXFP4, so many bytes for each block of a row.
fn blocks_of_rank<'a>(tensor: Tensor<'a>, share: &Share) -> Result<Tensor<'a>, ModelError> {
    let RowOrder::Among(among) = tensor.order else {
        return match share.axis {
            Axis::Outputs => tensor.cut(0, share, 1),
            Axis::Inputs => tensor.cut_units(1, share, MXFP4_BLOCK),
        };
    };
    let mut tensor = tensor;
    let rows = std::mem::replace(&mut tensor.shape.0[0], among.all);
    let mut cut = tensor.cut_units(1, share, MXFP4_BLOCK)?;
    cut.shape.0[0] = rows;
    Ok(cut)
}

/// The module of a tensor.
fn module(name: &str) -> &str {
    name.rsplit_once('.').map_or("", |(module, _)| module)
}

/// The tensor, unless it is in bytes or words, which are nothing without scales.
fn in_floats(tensor: Tensor<'_>) -> Result<Tensor<'_>, ModelError> {
    match tensor.dtype {
        WeightType::F8E4M3 | WeightType::U8 | WeightType::I32 | WeightType::I64 => {
            Err(ModelError::TensorType {
                name: tensor.name,
                found: match tensor.dtype {
                    WeightType::F8E4M3 => "F8_E4M3".to_owned(),
                    other => format!("{other:?}"),
                },
                supported: "F32, F16 and BF16, as `quantization_config` does not say that it is quantised",
            })
        }
        _ => Ok(tensor),
    }
}

#[cfg(test)]
mod tests {
    use plimsoll_kernels::WeightType;

    use super::*;

    /// One tensor of `f32`.
    struct One(Vec<usize>, Vec<f32>);

    const NAME: &str = "model.layers.0.self_attn.k_scale";

    impl Source for One {
        fn has(&self, name: &str) -> bool {
            name == NAME
        }

        fn tensor(&self, name: &str, _: &[usize]) -> Result<Option<Tensor<'_>>, ModelError> {
            let data = || self.1.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
            Ok((name == NAME).then(|| Tensor::plain(name, WeightType::F32, &self.0, data())))
        }

        fn names(&self) -> Vec<String> {
            vec![NAME.to_owned()]
        }

        fn total_bytes(&self) -> u64 {
            0
        }
    }

    #[test]
    fn a_scale_is_one_positive_number() {
        let read = |shape: &[usize], values: &[f32], name| {
            let source = One(shape.to_vec(), values.to_vec());
            Checked::new(&source).optional_scale(name)
        };
        assert_eq!(read(&[], &[0.5], NAME).unwrap(), Some(0.5));
        assert_eq!(read(&[1], &[0.25], NAME).unwrap(), Some(0.25));
        assert_eq!(
            read(&[1], &[0.25], "model.layers.1.self_attn.k_scale").unwrap(),
            None
        );
        for scale in [0.0, -1.0, f32::NAN, f32::INFINITY] {
            let error = read(&[1], &[scale], NAME).unwrap_err().to_string();
            assert!(error.contains(NAME) && error.contains("positive"), "{error}");
        }
        let error = read(&[2], &[1.0, 1.0], NAME).unwrap_err();
        assert!(matches!(error, ModelError::MisshapenTensor { .. }), "{error}");
    }
}
