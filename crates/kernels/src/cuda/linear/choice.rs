//! Which way a product goes: fixed, measured, or guessed.

use std::collections::HashMap;
use std::fmt;
use std::sync::{MutexGuard, PoisonError};

use plimsoll_device::cuda::GpuError;
use serde::{Deserialize, Serialize};

use super::cublas_lt::{Algorithm, Shape};
use super::{Fp8Scaling, Key, LinearCut, LinearTile, Linears};

/// A way to compute linear layers, to be fixed in tests and benchmarks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinearPath {
    /// cuBLASLt, with its own first choice.
    CublasLt,
    /// Our kernels for few rows, cut in one of the ways there are; where that one cannot be used, cuBLASLt.
    Stream(LinearCut),
    /// Up to 32 rows of weights in bf16, e4m3 or four bits by the kernels for Hopper; where that cannot be, cuBLASLt.
    Hopper,
    /// Up to 24 rows of inputs (16 with groups of 32), held in registers, and weights in four bits; where that cannot be, cuBLASLt.
    Int4Rows,
    /// Weights of four bits by warp groups, k divided among so many blocks; where that cannot be, cuBLASLt.
    Int4(usize),
    /// 65 to 512 rows of inputs and weights in bf16, or 33 to 512 in e4m3, by the kernel for Hopper with tiles of this size; where that
    /// cannot be, cuBLASLt.
    Many(LinearTile),
}

/// How products of a shape are computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Choice {
    /// In parts of the most rows that the kernels take.
    Stream(LinearCut),
    /// By the kernels for Hopper, on so many multiprocessors: their number decides the order of sums.
    Hopper(usize),
    /// Few rows with weights of four bits, the inputs in registers, k divided into so many slabs.
    Int4Rows(usize),
    /// Weights of four bits by warp groups, k divided among so many blocks.
    Int4(usize),
    /// By the kernels for many rows on Hopper.
    Many(LinearTile),
    Lt(Algorithm),
}

impl Choice {
    /// How inputs are quantised.
    pub(super) fn input_scaling(self, key: &Key) -> Option<Fp8Scaling> {
        match self {
            Self::Stream(_) | Self::Int4Rows(_) | Self::Int4(_) => None,
            Self::Hopper(_) | Self::Many(_) | Self::Lt(_) => key.shape.scaling(),
        }
    }

    /// The same on all GPUs that have this way of a product: see [`TimedWay`](super::TimedWay).
    pub(super) fn number(self) -> u32 {
        match self {
            Self::Stream(cut) => ((cut.row_warps * 16 + cut.cluster) * 16 + cut.blocks_per_sm) as u32,
            Self::Int4Rows(slabs) => 1 << 20 | slabs as u32,
            Self::Many(tile) => 1 << 20 | tile.number() as u32,
            Self::Hopper(blocks) => 1 << 21 | blocks as u32,
            Self::Int4(parts) => 1 << 22 | parts as u32,
            Self::Lt(algorithm) => 1 << 23 | algorithm.hash() & ((1 << 23) - 1),
        }
    }
}

impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Stream(cut) => write!(f, "own {cut}"),
            Self::Hopper(_) => f.write_str("own, stream-K"),
            Self::Int4Rows(slabs) => write!(f, "own, inputs in registers, {slabs} slabs"),
            Self::Int4(parts) => write!(f, "own, k among {parts} blocks"),
            Self::Many(tile) => write!(f, "own, tiles {tile}"),
            Self::Lt(algorithm) => write!(f, "cuBLASLt {algorithm}"),
        }
    }
}

impl Linears {
    pub(super) fn known(&self) -> MutexGuard<'_, HashMap<Key, Choice>> {
        // Whole after every call, so a panic elsewhere does not spoil it.
        self.chosen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn choice(&self, key: &Key) -> Result<Choice, GpuError> {
        if let Some(own) = self.own(key) {
            return Ok(own);
        }
        if let Some(known) = self.known().get(key) {
            return Ok(*known);
        }
        let measured = match self.fixed {
            None => self.measurements.find(key).and_then(|measured| measured.choice),
            Some(LinearPath::Int4(parts)) => Some(Choice::Int4(parts)),
            Some(_) => None,
        };
        let choice = match measured {
            Some(Choice::Lt(algorithm)) if self.lt.can(&key.shape.first_slice(), &algorithm) => {
                Choice::Lt(algorithm)
            }
            Some(Choice::Int4(parts)) if self.int4_products.can(&key.shape, key.output, parts) => {
                Choice::Int4(parts)
            }
            // In parts, or it would be our own.
            Some(Choice::Stream(cut)) if key.shape.m > self.stream.cuts.most_rows(key.shape.values) => {
                Choice::Stream(cut)
            }
            _ => match self.lt.algorithms(&key.shape.first_slice(), 1)?.first() {
                Some(&algorithm) => Choice::Lt(algorithm),
                None => Choice::Stream(self.slow_cut(key)?),
            },
        };
        self.known().insert(*key, choice);
        Ok(choice)
    }

    /// How our own kernels compute any number of rows, where nothing else does.
    pub(super) fn slow_cut(&self, key: &Key) -> Result<LinearCut, GpuError> {
        let rows = Shape {
            m: key.shape.m.min(self.stream.cuts.most_rows(key.shape.values)),
            ..key.shape
        };
        let cut = self.stream.cuts.of(&rows, key.output).first().copied();
        cut.ok_or_else(|| GpuError::Call {
            call: "cublasLtMatmulAlgoGetHeuristic",
            code: "CUBLAS_STATUS_NOT_SUPPORTED".to_owned(),
            message: format!("no algorithm for {:?}", key.shape),
        })
    }

    /// How our own kernels compute this in one launch, gated or not, if they do.
    pub(super) fn own(&self, key: &Key) -> Option<Choice> {
        let choice = match self.fixed {
            None => match self.measurements.find(key) {
                Some(measured) => measured.choice,
                None => self
                    .stream
                    .cuts
                    .default_of(&key.shape, key.output)
                    .map(Choice::Stream),
            },
            Some(LinearPath::Stream(cut)) => Some(Choice::Stream(cut)),
            Some(LinearPath::Hopper) => Some(self.hopper.choice()),
            Some(LinearPath::Int4Rows) => {
                let slabs = self.int4_rows.slabs(&key.shape, key.output);
                slabs.map(Choice::Int4Rows)
            }
            Some(LinearPath::Many(tile)) => Some(Choice::Many(tile)),
            Some(LinearPath::CublasLt | LinearPath::Int4(_)) => None,
        };
        choice.filter(|choice| match choice {
            Choice::Stream(cut) => self.stream.cuts.can(&key.shape, key.output, *cut),
            Choice::Hopper(_) => self.hopper.can(&key.shape, key.output),
            Choice::Int4Rows(slabs) => self.int4_rows.can(&key.shape, key.output, *slabs),
            Choice::Many(tile) => self.many.can(&key.shape, *tile),
            Choice::Int4(_) | Choice::Lt(_) => false,
        })
    }
}
