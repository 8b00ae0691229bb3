use std::collections::HashSet;

use plimsoll_core::untrusted::quotable;

use plimsoll_kernels::WeightType;

use super::{RowOrder, Scales, Source, StoredMatrix, Tensor};
use crate::blocks::{Matrix, Vector};
use crate::quantization::{Fp8Scales, MatrixFormat};
use crate::{ModelError, Shape};

/// Shapes of a single number.
const SCALAR: [&[usize]; 2] = [&[1], &[]];

/// Takes tensors from a source and checks that they are what the configuration implies, all of it and nothing else.
pub(crate) struct Checked<'a> {
    source: &'a dyn Source,
    /// Names of those not yet taken, as the source calls them.
    left: HashSet<String>,
    /// Modules of those taken.
    modules: HashSet<String>,
}

impl<'a> Checked<'a> {
    pub(crate) fn new(source: &'a dyn Source) -> Self {
        let left = source.names().into_iter().collect();
        Self {
            source,
            left,
            modules: HashSet::new(),
        }
    }

    /// Bytes of all tensors; 0 if unknown.
    pub(crate) fn total_bytes(&self) -> u64 {
        self.source.total_bytes()
    }

    /// A matrix, with its scales where it has any.
    pub(crate) fn matrix(&mut self, matrix: &Matrix) -> Result<StoredMatrix<'a>, ModelError> {
        let mut tensor = self.take(&[matrix.name()], &[&matrix.shape()])?;
        if matrix.order != RowOrder::Plain {
            tensor.order = matrix.order;
        }
        let MatrixFormat::Fp8 { scales, input_scale } = matrix.format else {
            return Ok(StoredMatrix {
                tensor: in_floats(tensor)?,
                scales: None,
            });
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
        let shape = scales.shape(matrix.outputs, matrix.inputs);
        let values = match scales {
            Fp8Scales::Tensor => self.scales(&names, &SCALAR)?,
            Fp8Scales::Channel | Fp8Scales::Block => self.scales(&names, &[&shape])?,
        };
        if input_scale {
            self.scales(&of_module(["input_scale", "activation_scale"]), &SCALAR)?;
        }
        Ok(StoredMatrix {
            tensor,
            scales: Some(Scales::new(values, scales, matrix)),
        })
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

    /// A vector, in floats.
    pub(crate) fn vector(&mut self, vector: &Vector) -> Result<Tensor<'a>, ModelError> {
        let unit_offset = vector.unit_offset && !self.source.has_whole_norms();
        let flat = [vector.len];
        let shape = vector.shape.as_ref().map_or(&flat[..], |shape| shape);
        let tensor = Tensor {
            unit_offset,
            ..in_floats(self.take(std::slice::from_ref(&vector.name), &[shape])?)?
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

    /// A positive number, of shape `[]` or `[1]`, that a model may do without.
    pub(crate) fn optional_scale(&mut self, name: &str) -> Result<Option<f32>, ModelError> {
        if !self.left.contains(&self.source.stored_name(name)) {
            return Ok(None);
        }
        let values = self.scales(&[name.to_owned()], &SCALAR)?;
        Ok(Some(values[0]))
    }

    /// Checks that no tensor was left that would have changed the output.
    pub(crate) fn finish(self) -> Result<(), ModelError> {
        let mut left: Vec<_> = self.left.into_iter().collect();
        left.sort_unstable();
        let (in_decoder, others): (Vec<_>, Vec<_>) = left
            .into_iter()
            // Tables that old checkpoints store and everybody computes, and scales for a KV cache of 8 bits where it has 16.
            .filter(|name| {
                let idle = ["rotary_emb.inv_freq", ".k_scale", ".v_scale"];
                !idle.iter().any(|end| name.ends_with(end))
            })
            .partition(|name| {
                // What is left of a module that was taken, such as a bias or a scale, would have changed it.
                let is_of_module = self.modules.contains(module(name));
                is_of_module
                    || [
                        "model.layers.",
                        "layers.",
                        "blk.",
                        "model.language_model.layers.",
                        "language_model.model.layers.",
                    ]
                    .iter()
                    .any(|of| name.starts_with(of))
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

/// The module of a tensor.
fn module(name: &str) -> &str {
    name.rsplit_once('.').map_or("", |(module, _)| module)
}

/// The tensor, unless it is in eight bits, which are nothing without scales.
fn in_floats(tensor: Tensor<'_>) -> Result<Tensor<'_>, ModelError> {
    match tensor.dtype {
        WeightType::F8E4M3 => Err(ModelError::TensorType {
            name: tensor.name,
            found: "F8_E4M3".to_owned(),
            supported: "F32, F16 and BF16, as `quantization_config` does not say that it is quantised",
        }),
        _ => Ok(tensor),
    }
}

#[cfg(test)]
mod tests {
    use plimsoll_kernels::WeightType;

    use super::*;
    use crate::blocks::RowOrder;

    /// One tensor of `f32`.
    struct One(Vec<usize>, Vec<f32>);

    const NAME: &str = "model.layers.0.self_attn.k_scale";

    impl Source for One {
        fn tensor(&self, name: &str, _: &[usize]) -> Result<Option<Tensor<'_>>, ModelError> {
            Ok((name == NAME).then(|| Tensor {
                name: name.to_owned(),
                dtype: WeightType::F32,
                shape: Shape(self.0.clone()),
                order: RowOrder::Plain,
                unit_offset: false,
                data: self.1.iter().flat_map(|x| x.to_le_bytes()).collect(),
            }))
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
