//! What a decoder is made of. Values are made by [`crate::arch`] and checked when a configuration is read; whoever holds one
//! need not check it again.

use std::sync::Arc;

use plimsoll_core::{
    BlockSize, CacheGroups, CacheKind, CacheLayer, CacheLayout, CacheLayoutError, ExpertLoads, KvConfig,
};
use plimsoll_kernels::{Activation, DeltaLayout, ExpertActivation, RouterSoftmax};

use crate::quantization::Quantization;
use crate::rope::RopeSpec;
use crate::shard::Shard;

/// A decoder-only transformer: an embedding, layers that each add to a residual stream of `hidden_size`, and a head.
#[derive(Clone, Debug, PartialEq)]
pub struct DecoderSpec {
    /// Rows of the embedding.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Longest context the model was made for, in tokens.
    pub max_position_embeddings: usize,
    /// Multiplies the embedding's rows; 1 in most families.
    pub embedding_scale: f32,
    /// At least one. Equal layers share one value.
    pub layers: Vec<Arc<LayerSpec>>,
    /// After the last layer.
    pub final_norm: NormSpec,
    /// What turns the last rows into logits.
    pub head: OutputHead,
    /// How the matrices of linear layers are stored.
    pub quantization: Quantization,
    /// Logits become `cap × tanh(logit / cap)` (Gemma 2).
    pub logit_soft_cap: Option<f32>,
    /// What each layer gets of each token beside the residual stream (Gemma 4 E2B and E4B).
    pub per_layer: Option<PerLayerSpec>,
    /// Which part of the network this is: heads and the insides of MLPs are those of one rank.
    pub shard: Shard,
    /// Which part of the embedding and the head it has: all of it where the vocabulary cannot be divided.
    pub vocab_shard: Shard,
}

/// One layer: a mixer of tokens, then an MLP, each of the norm of the residual stream.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerSpec {
    /// All norms of the layer.
    pub norm: NormSpec,
    /// What the mixer and the MLP add to the residual stream is normalised too (Gemma 2, Gemma 3).
    pub post_norms: bool,
    /// What lets tokens see each other.
    pub mixer: Mixer,
    /// What follows it.
    pub mlp: Mlp,
    /// The residual stream behind the layer is multiplied by a number of the layer (Gemma 4).
    pub scalar: bool,
}

/// Per-layer embeddings: a second table has a row of `width` elements for each layer and token. The row, times
/// `sqrt(width)`, and a normalised projection of the token's embedding, times `1 / sqrt(hidden_size)`, are added up and divided by
/// `sqrt(2)`; behind each layer, what is so made for it is multiplied by a gate of the residual stream, projected, normalised
/// and added to the stream (transformers 5.23, `Gemma4TextModel.project_per_layer_inputs`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PerLayerSpec {
    /// Rows of the table, at least as many as the vocabulary has.
    pub vocab_size: usize,
    /// Elements for a layer.
    pub width: usize,
    /// Of the gates.
    pub activation: Activation,
}

/// [RMSNorm](https://arxiv.org/abs/1910.07467).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NormSpec {
    /// Added to the mean square.
    pub eps: f32,
    /// Checkpoints store weights less 1 (Gemma). They are added up at load.
    pub unit_offset: bool,
}

/// How a layer's tokens see each other.
#[derive(Clone, Debug, PartialEq)]
pub enum Mixer {
    /// Softmax attention over a KV cache.
    Attention(AttentionSpec),
    /// A recurrence over a state of fixed size.
    DeltaNet(DeltaNetSpec),
}

/// [Gated DeltaNet](https://arxiv.org/abs/2412.06464).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeltaNetSpec {
    /// Its heads and their sizes.
    pub layout: DeltaLayout,
    /// How the projections are stored.
    pub projections: Projections,
    /// How those to the gates of states are.
    pub gates: Projections,
}

/// [Grouped-query attention](https://arxiv.org/abs/2305.13245).
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionSpec {
    /// Query heads, a multiple of `kv_heads`.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Which part of them this is: where there are fewer than ranks, several ranks have the same.
    pub kv_shard: Shard,
    /// Elements of one head, even; not always `hidden_size / heads`.
    pub head_dim: usize,
    /// Tokens seen, the current one included; `None` is all.
    pub window: Option<usize>,
    /// Rotary positions; `None` in layers without positions (SmolLM3).
    pub rope: Option<Arc<RopeSpec>>,
    /// Each head of q and k is normalised before the rotation (Qwen3, Gemma 3).
    pub qk_norm: bool,
    /// How values are made.
    pub values: Values,
    /// The index of the layer whose keys and values are attended; those of its own without (Gemma 4 E2B and E4B). A layer that
    /// shares them has projections to q alone and no place in the KV cache.
    pub shares_kv: Option<usize>,
    /// The q, k and v projections have a bias (Qwen2, and where `attention_bias` says so).
    pub qkv_bias: bool,
    /// The output projection has a bias (gpt-oss, and where `attention_bias` says so).
    pub output_bias: bool,
    /// Multiplies the scores, usually `1 / sqrt(head_dim)`.
    pub scale: f32,
    /// Scores become `cap × tanh(score / cap)` before the softmax (Gemma 2).
    pub soft_cap: Option<f32>,
    /// Each query head has a learned logit that takes part in the softmax and has no value (gpt-oss).
    pub sinks: bool,
    /// The q projection has a gate beside each element of q, and what is attended is multiplied by the sigmoids of the gates
    /// ([gated attention](https://arxiv.org/abs/2505.06708), Qwen3-Next).
    pub gated: bool,
    /// How q, k and v are stored.
    pub projections: Projections,
}

/// How values are made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Values {
    /// By a projection of their own.
    Projected,
    /// The same, and each head is normalised, without a weight (Gemma 4).
    Normalised,
    /// They are the keys before these are normalised and rotated, and each head is normalised, without a weight
    /// (Gemma 4's `attention_k_eq_v`).
    NormalisedKeys,
}

/// How matrices that take the same input are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Projections {
    /// Each as a tensor of its own.
    Separate,
    /// All as one tensor (`qkv_proj`, `gate_up_proj` of Phi-3; `in_proj_qkvz`, `in_proj_ba` of Qwen3-Next).
    Fused,
}

/// What follows a layer's mixer.
#[derive(Clone, Debug, PartialEq)]
pub enum Mlp {
    /// The same matrices for every token.
    Dense(DenseMlpSpec),
    /// A few of many experts for each token.
    Moe(MoeSpec),
    /// Both, of the same residual stream: what either adds is normalised, and so is the sum (Gemma 4). The router has a norm of its
    /// own, whose output is divided by `sqrt(hidden_size)`, and what an expert adds is multiplied by a number of the expert.
    Both(DenseMlpSpec, MoeSpec),
}

/// A [gated MLP](https://arxiv.org/abs/2002.05202): `down(activation(gate x) * up x)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DenseMlpSpec {
    /// Width inside.
    pub intermediate_size: usize,
    /// Of the gate.
    pub activation: Activation,
    /// How gate and up are stored.
    pub projections: Projections,
}

/// A [mixture of experts](https://arxiv.org/abs/1701.06538): a router sends each token to a few of many gated MLPs, whose
/// weighted sum is the output.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MoeSpec {
    /// Experts.
    pub experts: usize,
    /// Experts of a token, at most as many as there are: those with the largest logits.
    pub top_k: usize,
    /// How their logits become weights.
    pub softmax: RouterSoftmax,
    /// Width inside each expert.
    pub intermediate_size: usize,
    /// Of gate and up.
    pub activation: ExpertActivation,
    /// The router and the experts' projections have a bias (gpt-oss).
    pub bias: bool,
    /// An expert that every token goes to, whose output is multiplied by the sigmoid of a projection to one number (Qwen2-MoE).
    pub shared: Option<DenseMlpSpec>,
    /// How checkpoints call the tensors.
    pub names: MoeNames,
    /// How checkpoints that store all experts as one tensor do that.
    pub stacked: StackedExperts,
}

/// Names of a mixture's modules.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MoeNames {
    /// All of it, within the layer; empty where it is the layer.
    pub module: &'static str,
    /// The router.
    pub router: &'static str,
    /// Gate, up and down of an expert, where each expert is stored for itself.
    pub projections: [&'static str; 3],
}

/// What `experts.gate_up_proj` and `experts.down_proj` hold, each of which is one tensor of all experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StackedExperts {
    /// Of each expert all outputs of the gate, then those of up: `[experts, outputs, inputs]`.
    Halves,
    /// Outputs of gate and up by turns: `[experts, inputs, outputs]` in floats, `[experts, outputs, inputs]` in MXFP4 (gpt-oss).
    Interleaved,
}

/// What turns normalised rows into logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OutputHead {
    /// A projection of its own.
    Own,
    /// The embedding.
    Tied,
    /// Nothing: the rows are the output of a model that is served for embeddings.
    None,
}

impl DecoderSpec {
    /// Rows of the embedding and of the head that this part has.
    pub fn vocab_rows(&self) -> usize {
        self.vocab_size / self.vocab_shard.ranks
    }

    /// Logits of a row: none without a head.
    pub fn num_logits(&self) -> usize {
        match self.head {
            OutputHead::None => 0,
            OutputHead::Own | OutputHead::Tied => self.vocab_size,
        }
    }

    /// The attention of all layers that have any, in order.
    pub fn attention(&self) -> impl Iterator<Item = &AttentionSpec> {
        self.layers.iter().filter_map(|layer| layer.attention())
    }

    /// The mixtures of experts of all layers that have any, in order.
    pub fn mixtures(&self) -> impl Iterator<Item = &MoeSpec> {
        self.layers.iter().filter_map(|layer| layer.mixture())
    }

    /// Counts of where tokens go, if a layer has experts.
    pub(crate) fn expert_loads(&self) -> Option<ExpertLoads> {
        let sizes = |moe: &MoeSpec| [moe.experts, moe.top_k];
        let layers = self.layers.iter().map(|layer| layer.mixture().map(sizes));
        self.mixtures().next().map(|_| ExpertLoads::new(layers))
    }

    /// The layers that keep a state of fixed size, in order.
    pub fn delta_nets(&self) -> impl Iterator<Item = &DeltaNetSpec> {
        self.layers.iter().filter_map(|layer| match &layer.mixer {
            Mixer::DeltaNet(delta_net) => Some(delta_net),
            Mixer::Attention(_) => None,
        })
    }

    /// Whether layers have states of fixed size, or attention has gates.
    pub(crate) fn is_hybrid(&self) -> bool {
        self.delta_nets().next().is_some() || self.attention().any(|attention| attention.gated)
    }

    /// Elements of the states of one request, all layers'.
    pub fn state_elements(&self) -> usize {
        let layers = self.delta_nets().map(|delta_net| &delta_net.layout);
        layers
            .map(|layout| layout.conv_state() + layout.head_states())
            .sum()
    }

    /// The kinds of rotary positions that layers have, each once.
    pub fn ropes(&self) -> Vec<&RopeSpec> {
        let mut ropes: Vec<&RopeSpec> = Vec::new();
        for rope in self.attention().filter_map(|attention| attention.rope.as_deref()) {
            if !ropes.contains(&rope) {
                ropes.push(rope);
            }
        }
        ropes
    }

    /// Whether positions have three numbers.
    pub fn has_axes(&self) -> bool {
        self.ropes().iter().any(|rope| rope.sections.is_some())
    }

    /// Bytes that a token takes in the KV cache while all layers keep it, for elements of so many bytes.
    pub fn kv_bytes_per_token(&self, element: usize) -> u64 {
        let kept = self.attention().filter(|attention| attention.shares_kv.is_none());
        let elements: usize = kept.map(|attention| 2 * attention.kv_size()).sum();
        (elements * element) as u64
    }

    /// Bytes of a KV cache, for elements of so many bytes; `u64::MAX` if they fit no memory.
    pub fn kv_bytes(&self, config: KvConfig, element: usize) -> u64 {
        let page = self.kv_elements_per_page(&config.groups, config.block_size) * element;
        (page as u64).saturating_mul(config.num_pages as u64)
    }

    /// Elements of one page of a KV cache.
    pub fn kv_elements_per_page(&self, groups: &CacheGroups, block_size: BlockSize) -> usize {
        let layout = self.cache_layout(groups, block_size);
        layout.groups.columns_per_page() * 2 * self.kv_column() * block_size.tokens()
    }

    /// Elements of the keys of a token in one column of a page (and of the values): all layers' are multiples of it.
    pub fn kv_column(&self) -> usize {
        let gcd = |mut a: usize, mut b: usize| {
            while b > 0 {
                (a, b) = (b, a % b);
            }
            a
        };
        self.attention().map(AttentionSpec::kv_size).fold(0, gcd)
    }

    /// What the layers keep of a request in blocks of this size.
    pub fn cache_groups(&self, block_size: BlockSize) -> CacheGroups {
        self.own_cache_layout(block_size)
            .expect("checked when the configuration is read")
            .groups
    }

    /// Layers that keep a state of fixed size in place of tokens.
    pub fn state_layers(&self) -> usize {
        self.delta_nets().count()
    }

    /// Where the layers keep what they do in a cache of these groups: those of [`Self::cache_groups`] for this block size, or any
    /// others, which stand for one in which all layers keep everything.
    pub fn cache_layout(&self, groups: &CacheGroups, block_size: BlockSize) -> CacheLayout {
        match self.own_cache_layout(block_size) {
            Ok(own) if own.groups == *groups => own,
            _ => {
                let mut layers = self.cache_layers();
                layers.iter_mut().for_each(|layer| layer.kind = CacheKind::Full);
                let all_full = CacheLayout::of(&layers, usize::MAX, block_size);
                let all_full = all_full.expect("a decoder has layers with attention");
                all_full.with_states(self.state_layers())
            }
        }
    }

    /// # Errors
    /// [`CacheLayoutError`] where there can be no cache.
    pub(crate) fn own_cache_layout(&self, block_size: BlockSize) -> Result<CacheLayout, CacheLayoutError> {
        let layout = CacheLayout::of(&self.cache_layers(), self.max_position_embeddings, block_size)?;
        Ok(layout.with_states(self.state_layers()))
    }

    /// What each layer with attention asks of the cache.
    fn cache_layers(&self) -> Vec<CacheLayer> {
        let column = self.kv_column().max(1);
        let attending = |until: usize| {
            let layers = self.layers.iter().take(until);
            layers.filter(|layer| layer.attention().is_some()).count()
        };
        let layer = |attention: &AttentionSpec| CacheLayer {
            kind: attention.window.map_or(CacheKind::Full, CacheKind::Window),
            columns: attention.kv_size() / column,
            shares: attention.shares_kv.map(attending),
        };
        self.attention().map(layer).collect()
    }
}

impl LayerSpec {
    /// The layer's attention, if that is its mixer.
    pub fn attention(&self) -> Option<&AttentionSpec> {
        match &self.mixer {
            Mixer::Attention(attention) => Some(attention),
            Mixer::DeltaNet(_) => None,
        }
    }

    /// The same, to change it.
    ///
    /// # Panics
    /// Where its mixer is something else.
    pub fn attention_mut(&mut self) -> &mut AttentionSpec {
        match &mut self.mixer {
            Mixer::Attention(attention) => attention,
            Mixer::DeltaNet(_) => panic!("the layer has no attention"),
        }
    }

    /// Its mixture of experts, if it has one.
    pub fn mixture(&self) -> Option<&MoeSpec> {
        match &self.mlp {
            Mlp::Moe(moe) | Mlp::Both(_, moe) => Some(moe),
            Mlp::Dense(_) => None,
        }
    }

    /// The MLP that every token goes through: that of a layer without experts, or the expert that is shared.
    pub(crate) fn mlp_of_all(&self) -> Option<&DenseMlpSpec> {
        match &self.mlp {
            Mlp::Dense(mlp) | Mlp::Both(mlp, _) => Some(mlp),
            Mlp::Moe(moe) => moe.shared.as_ref(),
        }
    }

    /// The MLP of a layer without experts.
    ///
    /// # Panics
    /// If it has experts alone.
    pub fn dense_mlp(&self) -> &DenseMlpSpec {
        match &self.mlp {
            Mlp::Dense(mlp) | Mlp::Both(mlp, _) => mlp,
            Mlp::Moe(_) => panic!("a layer with experts"),
        }
    }

    /// The same, to change it.
    pub(crate) fn dense_mlp_mut(&mut self) -> &mut DenseMlpSpec {
        match &mut self.mlp {
            Mlp::Dense(mlp) | Mlp::Both(mlp, _) => mlp,
            Mlp::Moe(_) => panic!("a layer with experts"),
        }
    }
}

impl AttentionSpec {
    /// Elements of all query heads.
    pub fn q_size(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Elements of all key heads (and of all value heads).
    pub fn kv_size(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// Elements of q and the gates that go with it.
    pub fn gated_q_size(&self) -> usize {
        self.q_size() * if self.gated { 2 } else { 1 }
    }

    /// Elements of what is projected: q, gates, k and v, as far as the layer has them.
    pub fn qkv_size(&self) -> usize {
        let projected = match (self.shares_kv, self.values) {
            (Some(_), _) => 0,
            (None, Values::NormalisedKeys) => 1,
            (None, Values::Projected | Values::Normalised) => 2,
        };
        self.gated_q_size() + projected * self.kv_size()
    }
}

/// Layers of which equal ones share one value.
pub(crate) fn shared(layers: impl IntoIterator<Item = LayerSpec>) -> Vec<Arc<LayerSpec>> {
    let mut distinct: Vec<Arc<LayerSpec>> = Vec::new();
    let share = |layer: LayerSpec| match distinct.iter().find(|known| ***known == layer) {
        Some(known) => Arc::clone(known),
        None => {
            distinct.push(Arc::new(layer));
            Arc::clone(&distinct[distinct.len() - 1])
        }
    };
    layers.into_iter().map(share).collect()
}
