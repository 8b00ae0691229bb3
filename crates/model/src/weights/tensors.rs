//! Which stored tensors make up a decoder, under the names of Hugging Face checkpoints.

use crate::{DecoderSpec, OutputHead};

/// A vector.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Vector {
    pub(crate) name: String,
    pub(crate) len: usize,
}

/// Projections of the same inputs, stacked along the output.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Stack {
    /// Names, without `.weight` or `.bias`, and outputs.
    pub(crate) parts: Vec<(String, usize)>,
    pub(crate) inputs: usize,
    pub(crate) bias: bool,
}

impl Stack {
    fn one(name: impl Into<String>, outputs: usize, inputs: usize) -> Self {
        Self {
            parts: vec![(name.into(), outputs)],
            inputs,
            bias: false,
        }
    }

    /// Outputs of all parts.
    pub(crate) fn outputs(&self) -> usize {
        self.parts.iter().map(|(_, outputs)| outputs).sum()
    }

    /// Names and outputs of the matrices.
    pub(crate) fn weights(&self) -> impl Iterator<Item = (String, usize)> {
        self.parts
            .iter()
            .map(|(name, outputs)| (format!("{name}.weight"), *outputs))
    }

    /// The biases; none where there is no bias.
    pub(crate) fn biases(&self) -> impl Iterator<Item = Vector> {
        let parts = if self.bias { self.parts.as_slice() } else { &[] };
        parts.iter().map(|(name, outputs)| Vector {
            name: format!("{name}.bias"),
            len: *outputs,
        })
    }
}

/// The tensors outside the blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct OuterTensors {
    /// One divisor per frequency, by which GGUF files of Llama 3 spell out the scaling; others have none.
    pub(crate) rope_factors: Vector,
    /// One row per token of the vocabulary.
    pub(crate) embedding: Stack,
    /// `None` where it is the embedding, or there is none.
    pub(crate) lm_head: Option<Stack>,
    pub(crate) final_norm: Vector,
}

impl OuterTensors {
    pub(crate) fn new(spec: &DecoderSpec) -> Self {
        let (vocab, hidden) = (spec.vocab_size, spec.hidden_size);
        let vector = |name: &str, len| Vector {
            name: name.to_owned(),
            len,
        };
        Self {
            rope_factors: vector("rope_freqs.weight", spec.head_dim / 2),
            embedding: Stack::one("model.embed_tokens", vocab, hidden),
            lm_head: (spec.head == OutputHead::Own).then(|| Stack::one("lm_head", vocab, hidden)),
            final_norm: vector("model.norm.weight", hidden),
        }
    }
}

/// The tensors of one block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LayerTensors {
    pub(crate) attention_norm: Vector,
    /// q, k and v.
    pub(crate) qkv: Stack,
    /// Norms of the heads of q and of k.
    pub(crate) qk_norm: Option<[Vector; 2]>,
    pub(crate) output: Stack,
    pub(crate) mlp_norm: Vector,
    /// Gate and up.
    pub(crate) gate_up: Stack,
    pub(crate) down: Stack,
}

impl LayerTensors {
    pub(crate) fn new(spec: &DecoderSpec, index: usize) -> Self {
        let name = |part: &str| format!("model.layers.{index}.{part}");
        let vector = |part: &str, len| Vector {
            name: name(part),
            len,
        };
        let (hidden, inner) = (spec.hidden_size, spec.intermediate_size);
        let (q, kv) = (spec.q_size(), spec.kv_size());
        let qk_norm =
            || ["self_attn.q_norm.weight", "self_attn.k_norm.weight"].map(|part| vector(part, spec.head_dim));
        Self {
            attention_norm: vector("input_layernorm.weight", hidden),
            qkv: Stack {
                parts: vec![
                    (name("self_attn.q_proj"), q),
                    (name("self_attn.k_proj"), kv),
                    (name("self_attn.v_proj"), kv),
                ],
                inputs: hidden,
                bias: spec.qkv_bias,
            },
            qk_norm: spec.qk_norm.then(qk_norm),
            output: Stack::one(name("self_attn.o_proj"), hidden, q),
            mlp_norm: vector("post_attention_layernorm.weight", hidden),
            gate_up: Stack {
                parts: vec![(name("mlp.gate_proj"), inner), (name("mlp.up_proj"), inner)],
                inputs: hidden,
                bias: false,
            },
            down: Stack::one(name("mlp.down_proj"), hidden, inner),
        }
    }
}
