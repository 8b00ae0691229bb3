//! The packed block formats, one for each of ggml's.

use plimsoll_core::Component;
use plimsoll_device::{Budget, Slab};

use crate::dtype::{Matrix, WeightError, WeightType};
use crate::panel::PANEL;
use crate::parallel::{Disjoint, run};
use crate::quantize::X_GROUP;

/// How codes are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Codes {
    /// Four bits: per 8 inputs 64 bytes, the low nibbles inputs 0..4 of the sixteen outputs, the high ones 4..8.
    U4,
    /// Six bits (also for 5-bit types): per 16 inputs two blocks of nibbles as above, then 64 bytes of upper bit pairs, pair
    /// `i` belonging to inputs `4i..4i + 4`.
    U6,
    /// Eight bits, plus 128: per 4 inputs 64 bytes.
    I8,
}

/// A packed block format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Spec {
    pub(crate) codes: Codes,
    /// Inputs that share a scale.
    pub(crate) group: usize,
    /// Groups with integer scales that share a float scale, as in the k-quants; 1 where each group has its own f16.
    pub(crate) groups: usize,
    /// Groups have a minimum; otherwise `offset` is subtracted from each code.
    pub(crate) min: bool,
    pub(crate) offset: i32,
}

/// The packed formats.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(non_camel_case_types)]
pub(crate) enum Format {
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    /// Also Q8_1, whose sums are redundant.
    Q8_0,
    Q2K,
    Q3K,
    Q4K,
    Q5K,
    Q6K,
    Q8K,
}

impl Format {
    pub(crate) fn of(dtype: WeightType) -> Option<Self> {
        Some(match dtype {
            WeightType::F32
            | WeightType::F16
            | WeightType::Bf16
            | WeightType::F8E4M3
            | WeightType::U8
            | WeightType::I32
            | WeightType::I64 => return None,
            // Twice an element is a whole number of five bits.
            WeightType::Mxfp4 => Self::Q5_0,
            WeightType::Q4_0 => Self::Q4_0,
            WeightType::Q4_1 => Self::Q4_1,
            WeightType::Q5_0 => Self::Q5_0,
            WeightType::Q5_1 => Self::Q5_1,
            WeightType::Q8_0 | WeightType::Q8_1 => Self::Q8_0,
            WeightType::Q2K => Self::Q2K,
            WeightType::Q3K => Self::Q3K,
            WeightType::Q4K => Self::Q4K,
            WeightType::Q5K => Self::Q5K,
            WeightType::Q6K => Self::Q6K,
            WeightType::Q8K => Self::Q8K,
        })
    }

    pub(crate) const fn spec(self) -> Spec {
        // Inputs of a group, groups of a block, what is subtracted from codes.
        let (codes, group, groups, offset) = match self {
            Self::Q4_0 => (Codes::U4, 32, 1, Some(8)),
            Self::Q4_1 => (Codes::U4, 32, 1, None),
            Self::Q5_0 => (Codes::U6, 32, 1, Some(16)),
            Self::Q5_1 => (Codes::U6, 32, 1, None),
            Self::Q8_0 => (Codes::I8, 32, 1, Some(128)),
            Self::Q2K => (Codes::U4, 16, 16, None),
            Self::Q3K => (Codes::U4, 16, 16, Some(4)),
            Self::Q4K => (Codes::U4, 32, 8, None),
            Self::Q5K => (Codes::U6, 32, 8, None),
            Self::Q6K => (Codes::U6, 16, 16, Some(32)),
            Self::Q8K => (Codes::I8, 32, 8, Some(128)),
        };
        let (min, offset) = match offset {
            Some(offset) => (false, offset),
            None => (true, 0),
        };
        Spec {
            codes,
            group,
            groups,
            min,
            offset,
        }
    }

    pub(crate) fn group(self) -> usize {
        self.spec().group
    }
}

/// Bytes of a panel of sixteen outputs of `inputs` whole blocks, packed.
pub(crate) fn panel_bytes(dtype: WeightType, inputs: usize) -> Option<usize> {
    match Format::of(dtype) {
        None => inputs.checked_mul(PANEL * dtype.block_bytes()),
        Some(format) => {
            let spec = format.spec();
            (inputs / spec.block()).checked_mul(spec.block_bytes())
        }
    }
}

/// A matrix in panels: `pack` writes a row to its lane of the bytes of a panel.
pub(crate) fn packed(
    matrix: &Matrix<'_>,
    budget: &Budget,
    pack: impl Fn(&[u8], usize, &mut [u8]) + Sync,
) -> Result<Slab, WeightError> {
    let panels = matrix.rows().div_ceil(PANEL);
    let panel_bytes = panel_bytes(matrix.dtype(), matrix.cols()).expect("the matrix is in memory");
    let mut data = Slab::new(budget, Component::Weights, panels * panel_bytes)?;
    let packed = Disjoint::new(data.as_mut_slice::<u8>());
    run(panels, &|_, panel| {
        // SAFETY: panels are disjoint.
        let packed = unsafe { packed.part(panel * panel_bytes, panel_bytes) };
        for lane in 0..PANEL.min(matrix.rows() - panel * PANEL) {
            pack(matrix.row(panel * PANEL + lane), lane, packed);
        }
    });
    Ok(data)
}

impl Spec {
    /// Inputs of a block.
    pub(crate) const fn block(&self) -> usize {
        self.group * self.groups
    }

    /// Groups in a step, the inputs that share a scale of the activations.
    pub(crate) const fn groups_per_step(&self) -> usize {
        X_GROUP / self.group
    }

    /// Steps of [`X_GROUP`] inputs in a block.
    pub(crate) const fn steps(&self) -> usize {
        self.block() / X_GROUP
    }

    pub(crate) const fn is_super(&self) -> bool {
        self.groups > 1
    }

    /// Bytes of the float scales before the groups of a block: scale, then minimum.
    pub(crate) const fn header_bytes(&self) -> usize {
        if self.is_super() {
            (1 + self.min as usize) * 4 * PANEL
        } else {
            0
        }
    }

    /// Bytes of the scales (and again of the minima) of one group.
    pub(crate) const fn scale_bytes(&self) -> usize {
        if self.is_super() { PANEL } else { 2 * PANEL }
    }

    /// Bytes before the codes of a group.
    pub(crate) const fn group_header_bytes(&self) -> usize {
        (1 + self.min as usize) * self.scale_bytes()
    }

    const fn bits(&self) -> usize {
        match self.codes {
            Codes::U4 => 4,
            Codes::U6 => 6,
            Codes::I8 => 8,
        }
    }

    /// Bytes of the codes of `inputs` inputs.
    pub(crate) const fn code_bytes(&self, inputs: usize) -> usize {
        inputs * PANEL * self.bits() / 8
    }

    /// Bytes of one group of a panel.
    pub(crate) const fn group_bytes(&self) -> usize {
        self.group_header_bytes() + self.code_bytes(self.group)
    }

    /// Bytes of one block of a panel.
    pub(crate) const fn block_bytes(&self) -> usize {
        self.header_bytes() + self.groups * self.group_bytes()
    }
}

/// By discriminant.
pub(crate) const FORMATS: [Format; 11] = [
    Format::Q4_0,
    Format::Q4_1,
    Format::Q5_0,
    Format::Q5_1,
    Format::Q8_0,
    Format::Q2K,
    Format::Q3K,
    Format::Q4K,
    Format::Q5K,
    Format::Q6K,
    Format::Q8K,
];
