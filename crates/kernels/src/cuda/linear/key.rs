//! What decides which way a product goes.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::cublas_lt::Shape;
use super::{GpuLinear, GpuValues, LinearOutput};

/// Products that are computed alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Key {
    pub(super) shape: Shape,
    pub(super) output: LinearOutput,
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Shape { m, n, k, values, .. } = &self.shape;
        write!(f, "[{m}, {k}]{} -> {n} {:?}", values.suffix(), self.output)
    }
}

/// Layers that are computed alike, but for the number of rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Kind {
    pub(super) n: usize,
    pub(super) k: usize,
    bias: bool,
    pub(super) values: GpuValues,
    pub(super) output: LinearOutput,
}

/// Layers that are computed alike in one launch, up to the end of an MLP.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ChainKind {
    /// A mixer's output, gate and up, down.
    pub(super) layers: [Kind; 3],
    /// What the mixer and the MLP add has norms.
    pub(super) sum_norms: bool,
}

impl From<&Key> for Kind {
    fn from(key: &Key) -> Self {
        let Shape {
            n, k, bias, values, ..
        } = key.shape;
        Self {
            n,
            k,
            bias,
            values,
            output: key.output,
        }
    }
}

impl GpuLinear {
    /// Its product with `m` rows.
    pub(super) fn key(&self, m: usize, output: LinearOutput) -> Key {
        let n = self.n / output.stacked();
        let shape = Shape {
            m,
            n,
            k: self.k,
            wide: output == LinearOutput::F32,
            bias: self.bias.is_some(),
            values: self
                .matrix
                .values()
                .expect("a part of a linear layer, or all of it"),
            pitch: n,
        };
        Key { shape, output }
    }
}
