use crate::rope::RopeSpec;

/// What every decoder family here boils down to: pre-norm blocks of grouped-query attention with rotary positions and
/// a SwiGLU MLP ([Llama](https://arxiv.org/abs/2302.13971)). Made by [`crate::arch`]; whoever holds one need not check
/// it again.
#[derive(Clone, Debug, PartialEq)]
pub struct DecoderSpec {
    /// Rows of the embedding.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width inside the MLP.
    pub intermediate_size: usize,
    /// Decoder blocks.
    pub num_layers: usize,
    /// Query heads, a multiple of `num_kv_heads`.
    pub num_heads: usize,
    /// Key and value heads.
    pub num_kv_heads: usize,
    /// Elements of one head, even; not always `hidden_size / num_heads`.
    pub head_dim: usize,
    /// Added to the mean square in every norm.
    pub rms_norm_eps: f32,
    /// Rotary positions.
    pub rope: RopeSpec,
    /// The q, k and v projections have a bias (Qwen2).
    pub qkv_bias: bool,
    /// Each head of q and k is normalised before the rotation (Qwen3).
    pub qk_norm: bool,
    /// Attention over the last tokens only (Mistral).
    pub sliding_window: Option<SlidingWindow>,
    /// What turns the last rows into logits.
    pub head: OutputHead,
    /// Longest context the model was made for, in tokens.
    pub max_position_embeddings: usize,
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

/// Attention over a bounded past.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlidingWindow {
    /// Tokens seen, the current one included.
    pub size: usize,
    /// Blocks before this one see everything.
    pub first_layer: usize,
}

impl DecoderSpec {
    /// Logits of a row: none without a head.
    pub fn num_logits(&self) -> usize {
        match self.head {
            OutputHead::None => 0,
            OutputHead::Own | OutputHead::Tied => self.vocab_size,
        }
    }

    /// Elements of all query heads.
    pub fn q_size(&self) -> usize {
        self.num_heads * self.head_dim
    }

    /// Elements of all key heads (and of all value heads).
    pub fn kv_size(&self) -> usize {
        self.num_kv_heads * self.head_dim
    }

    /// Tokens that attention in block `layer` sees, the current one included; `None` is all.
    pub fn window(&self, layer: usize) -> Option<usize> {
        self.sliding_window
            .filter(|window| layer >= window.first_layer)
            .map(|window| window.size)
    }
}
