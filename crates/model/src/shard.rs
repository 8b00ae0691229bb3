//! Which part of a model a rank has: tensor parallelism, as in [Megatron-LM](https://arxiv.org/abs/1909.08053).
//!
//! Heads and the insides of MLPs are divided among ranks, so that what a layer adds to the residual stream is the sum of what the
//! ranks compute. The specification of a rank's part says how large it is; where it lies in the stored tensors is said by their
//! declarations ([`Share`]).

use std::ops::Range;

use crate::spec::{DeltaNetSpec, DenseMlpSpec, LayerSpec, Mixer, Mlp, shared};
use crate::{DecoderSpec, ModelError};

/// Most ranks.
pub const MAX_RANKS: usize = 8;

/// The flag.
const FLAG: &str = "--tensor-parallel-size";

/// A rank of several, each of which has a part of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shard {
    /// From 0.
    pub rank: usize,
    /// How many there are.
    pub ranks: usize,
}

impl Default for Shard {
    fn default() -> Self {
        Self::WHOLE
    }
}

impl Shard {
    /// The one that has all of it.
    pub const WHOLE: Self = Self { rank: 0, ranks: 1 };

    /// Of fewer parts, each of which several ranks have.
    pub(crate) fn among(self, parts: usize) -> Self {
        Self {
            rank: self.rank * parts / self.ranks,
            ranks: parts,
        }
    }
}

/// Which rows or columns of a stored tensor are a rank's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Share {
    pub(crate) axis: Axis,
    /// As many as are stored.
    pub(crate) of: usize,
    /// Those of the rank, ascending.
    pub(crate) own: Vec<Range<usize>>,
}

/// What is divided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Axis {
    /// Of a matrix `[outputs, inputs]`, or elements of a vector.
    Outputs,
    Inputs,
}

impl Share {
    /// Of parts that lie one after the other: the length of each that the rank has, and among whom it is divided. None where that
    /// is all.
    pub(crate) fn of_parts(axis: Axis, parts: &[(usize, Shard)]) -> Option<Self> {
        let mut of = 0;
        let own = parts.iter().map(|&(len, shard)| {
            let start = of + shard.rank * len;
            of += shard.ranks * len;
            start..start + len
        });
        let own = own.collect();
        let is_all = parts.iter().all(|(_, shard)| shard.ranks == 1);
        (!is_all).then_some(Self { axis, of, own })
    }
}

impl DecoderSpec {
    /// The part of the network that a rank has.
    ///
    /// # Errors
    /// [`ModelError::Unsupported`] where something cannot be divided so, which says by how many it can be.
    pub fn shard(&self, shard: Shard) -> Result<Self, ModelError> {
        let ranks = shard.ranks;
        if ranks == 1 {
            return Ok(self.clone());
        }
        if let Err(why) = self.divisible(ranks) {
            let fit: Vec<_> = (1..=MAX_RANKS)
                .filter(|&ranks| self.divisible(ranks).is_ok())
                .map(|ranks| ranks.to_string())
                .collect();
            let fit = fit.join(", ");
            return Err(ModelError::unsupported(
                FLAG,
                format!("{ranks} for {why}"),
                format!("{fit} is"),
            ));
        }
        let mut own = self.clone();
        own.shard = shard;
        if self.vocab_size.is_multiple_of(ranks) {
            own.vocab_shard = shard;
        }
        own.layers = shared(self.layers.iter().map(|layer| part_of(layer, shard)));
        Ok(own)
    }

    /// Whether as many ranks can have a part; or what they cannot divide.
    fn divisible(&self, ranks: usize) -> Result<(), String> {
        if ranks == 1 {
            return Ok(());
        }
        let even = |what: &str, count: usize| match count.is_multiple_of(ranks) {
            true => Ok(()),
            false => Err(format!("{count} {what}")),
        };
        for layer in &self.layers {
            match &layer.mixer {
                Mixer::Attention(attention) => {
                    let kv_heads = attention.kv_heads;
                    even("attention heads", attention.heads)?;
                    if !ranks.is_multiple_of(kv_heads) {
                        even("heads of keys and values", kv_heads)?;
                    }
                }
                Mixer::DeltaNet(DeltaNetSpec { layout, .. })
                    if layout.adjacent * layout.key_heads != layout.value_heads =>
                {
                    return Err("heads of linear attention that take turns, as in GGUF files".to_owned());
                }
                Mixer::DeltaNet(delta_net) => {
                    even("key heads of linear attention", delta_net.layout.key_heads)?;
                    even("value heads of linear attention", delta_net.layout.value_heads)?;
                }
            }
            match &layer.mlp {
                Mlp::Dense(mlp) => even("inner elements of MLPs", mlp.intermediate_size)?,
                Mlp::Moe(moe) => {
                    even("inner elements of experts", moe.intermediate_size)?;
                    if let Some(mlp) = &moe.shared {
                        even("inner elements of the shared expert", mlp.intermediate_size)?;
                    }
                }
                Mlp::Both(mlp, moe) => {
                    even("inner elements of MLPs", mlp.intermediate_size)?;
                    even("inner elements of experts", moe.intermediate_size)?;
                }
            }
        }
        Ok(())
    }
}

/// What a rank has of a layer whose parts can be divided so.
fn part_of(layer: &LayerSpec, shard: Shard) -> LayerSpec {
    let ranks = shard.ranks;
    let mut part = layer.clone();
    match &mut part.mixer {
        Mixer::Attention(attention) => {
            attention.kv_shard = shard.among(attention.kv_heads.min(ranks));
            attention.heads /= ranks;
            attention.kv_heads = attention.kv_heads.div_ceil(ranks);
        }
        Mixer::DeltaNet(delta_net) => {
            delta_net.layout.key_heads /= ranks;
            delta_net.layout.value_heads /= ranks;
        }
    }
    let narrow = |mlp: &mut DenseMlpSpec| mlp.intermediate_size /= ranks;
    match &mut part.mlp {
        Mlp::Dense(mlp) => narrow(mlp),
        Mlp::Moe(moe) => {
            moe.intermediate_size /= ranks;
            moe.shared.iter_mut().for_each(narrow);
        }
        Mlp::Both(mlp, moe) => {
            narrow(mlp);
            moe.intermediate_size /= ranks;
        }
    }
    part
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_lie_one_after_the_other() {
        let shard = Shard { rank: 3, ranks: 4 };
        let kv = shard.among(2);
        assert_eq!(kv, Shard { rank: 1, ranks: 2 });
        let share = Share::of_parts(Axis::Outputs, &[(8, shard), (2, kv), (2, kv)]).unwrap();
        assert_eq!((share.of, share.own), (40, vec![24..32, 34..36, 38..40]));
        assert_eq!(Share::of_parts(Axis::Inputs, &[(8, Shard::WHOLE)]), None);
    }
}
