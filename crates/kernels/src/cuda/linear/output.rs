//! What becomes of the sums of a product.

use serde::{Deserialize, Serialize};

use crate::Activation;

/// What becomes of the sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum LinearOutput {
    /// Rounded.
    Bf16,
    /// As they are.
    F32,
    /// `activation(gate) * up` of stacked weights.
    Glu(Activation),
}

impl LinearOutput {
    /// `Mode` of `kernels/include/activation.cuh`.
    pub(super) fn mode(self) -> i32 {
        match self {
            Self::Bf16 => 0,
            Self::F32 => 1,
            Self::Glu(_) => 2,
        }
    }

    /// `Activation` of `kernels/include/activation.cuh`; the first one where there is none.
    pub(super) fn activation(self) -> i32 {
        match self {
            Self::Glu(Activation::GeluTanh) => 1,
            Self::Glu(Activation::Silu) | Self::Bf16 | Self::F32 => 0,
        }
    }

    /// Of an output.
    pub(super) fn bytes(self) -> usize {
        match self {
            Self::Bf16 | Self::Glu(_) => 2,
            Self::F32 => 4,
        }
    }

    /// Rows of weights for each output.
    pub fn stacked(self) -> usize {
        match self {
            Self::Bf16 | Self::F32 => 1,
            Self::Glu(_) => 2,
        }
    }
}
