//! The part of a network that a rank computes: tensor parallelism, as in [Megatron-LM](https://arxiv.org/abs/1909.08053).
//!
//! Heads and the insides of MLPs are divided among ranks, so that what a layer adds to the residual stream is the sum of what the
//! ranks compute. The specification of a rank's part says how large it is; where it lies in the stored tensors is said by their
//! declarations ([`Share`](crate::shard::Share)).

use crate::shard::{MAX_RANKS, Shard};
use crate::spec::{DeltaNetSpec, DenseMlpSpec, LayerSpec, Mixer, Mlp, shared};
use crate::{DecoderSpec, ModelError};

/// GPUs exchange so many logits of a row at a time.
const VOCABULARY_UNIT: usize = 4;

impl DecoderSpec {
    /// The part of the network that a rank has.
    ///
    /// # Errors
    /// [`ModelError::Flag`] where something cannot be divided so, which says by how many it can be.
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
            let message = format!("{ranks} ranks cannot share {why}; {fit} can");
            return Err(ModelError::flag("--tensor-parallel-size", message));
        }
        let mut own = self.clone();
        own.shard = shard;
        if self.vocab_size.is_multiple_of(ranks * VOCABULARY_UNIT) {
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
            false => Err(format!("{count} {what} equally")),
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
