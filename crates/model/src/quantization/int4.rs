//! Matrices of four bits, as the libraries that quantise models pack them.

use std::fmt;

/// Codes of a word.
pub(crate) const INT4_WORD: usize = 8;

/// How a matrix of four bits is stored: an element is (code - zero) × scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Int4Format {
    /// The library's layout.
    pub packing: Int4Packing,
    /// Which inputs of an output share a scale and a zero.
    pub groups: Int4Groups,
    /// The group of each input is stored, and inputs of a group need not follow each other (`desc_act`, `actorder`).
    pub ordered: bool,
}

/// A layout of codes, scales and zeros of a linear layer of `N` outputs and `K` inputs in `G` groups. Eight codes are a word of 32
/// bits, the first in its lowest ones unless another order is given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Int4Packing {
    /// [compressed-tensors](https://github.com/vllm-project/compressed-tensors), `pack-quantized`: codes `[N, K / 8]`, scales
    /// `[N, G]`, zeros `[N / 8, G]`.
    Compressed {
        /// No zeros are stored: all are 8.
        symmetric: bool,
    },
    /// [AutoAWQ](https://github.com/casper-hansen/AutoAWQ), version `gemm`: codes `[K, N / 8]` and zeros `[G, N / 8]`, of which a word
    /// has outputs 0, 2, 4, 6, 1, 3, 5, 7 from its lowest bits on, scales `[G, N]`.
    Awq,
    /// [GPTQModel](https://github.com/ModelCloud/GPTQModel) and AutoGPTQ: codes `[K / 8, N]`, zeros `[G, N / 8]`, scales `[G, N]`.
    Gptq {
        /// What is stored are words of zeros less 1 in each code (`gptq`, the first version of the format).
        zeros_less_one: bool,
    },
}

/// Which inputs of an output share a scale and a zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Int4Groups {
    /// So many neighbouring ones.
    Of32,
    /// So many neighbouring ones.
    Of64,
    /// So many neighbouring ones.
    Of128,
    /// All.
    Channel,
}

impl Int4Groups {
    /// Those of a size as configurations give it, of which -1 is all inputs.
    pub(crate) fn of_size(size: i64) -> Option<Self> {
        Some(match size {
            32 => Self::Of32,
            64 => Self::Of64,
            128 => Self::Of128,
            -1 => Self::Channel,
            _ => return None,
        })
    }

    /// Inputs of a group.
    pub fn size(self, inputs: usize) -> usize {
        match self {
            Self::Of32 => 32,
            Self::Of64 => 64,
            Self::Of128 => 128,
            Self::Channel => inputs,
        }
    }

    /// Groups of an output; the last may be smaller.
    pub fn count(self, inputs: usize) -> usize {
        inputs.div_ceil(self.size(inputs).max(1))
    }
}

impl Int4Format {
    /// For reports.
    pub(super) fn name(self) -> &'static str {
        match self.groups {
            Int4Groups::Of32 => "int4-group-32",
            Int4Groups::Of64 => "int4-group-64",
            Int4Groups::Of128 => "int4-group-128",
            Int4Groups::Channel => "int4-channel",
        }
    }
}

impl fmt::Display for Int4Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let packing = match self.packing {
            Int4Packing::Compressed { symmetric: true } => "symmetric `pack-quantized`",
            Int4Packing::Compressed { symmetric: false } => "asymmetric `pack-quantized`",
            Int4Packing::Awq => "AWQ",
            Int4Packing::Gptq { .. } => "GPTQ",
        };
        write!(f, "{packing} of four bits, ")?;
        match self.groups {
            Int4Groups::Channel => f.write_str("a scale per output"),
            groups => write!(f, "a scale per {} inputs", groups.size(0)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_group_may_be_smaller() {
        let counts = [-1, 128, 64, 32].map(|size| Int4Groups::of_size(size).unwrap().count(160));
        assert_eq!(counts, [1, 2, 3, 5]);
        for size in [0, -2, 16, 48, 256] {
            assert_eq!(Int4Groups::of_size(size), None, "{size}");
        }
    }
}
