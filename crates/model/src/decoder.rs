//! The network: pre-norm blocks of grouped-query attention over a paged KV cache and a SwiGLU MLP.

use std::sync::Arc;

use half::f16;
use plimsoll_core::Oom;
use plimsoll_device::Arena;
use plimsoll_kernels::{
    Activation, AttentionOptions, Embedding, KvElement, KvLayout, Linear, PagedKvMut, QkNorm, add_rms_norm,
    attention, glu, qk_norm_rope_kv_write, rope_angles,
};

use crate::batch::Batch;
use crate::state::{KvCache, KvElementType};
use crate::weights::{LayerTensors, Loader, OuterTensors};
use crate::{DecoderSpec, ModelError, OutputHead};

/// The decoder's weights.
#[derive(Debug)]
pub(crate) struct Decoder {
    spec: DecoderSpec,
    /// Radians per position of each pair of a head's elements.
    frequencies: Vec<f32>,
    embedding: Embedding,
    layers: Vec<Layer>,
    final_norm: Vec<f32>,
    /// Shares the embedding's memory where tied; a model for embeddings has none.
    lm_head: Option<Arc<Linear>>,
}

#[derive(Debug)]
struct Layer {
    attention_norm: Vec<f32>,
    /// q, k and v, stacked.
    qkv: Linear,
    qk_norm: Option<(Vec<f32>, Vec<f32>)>,
    output: Linear,
    mlp_norm: Vec<f32>,
    /// Gate and up, stacked.
    gate_up: Linear,
    down: Linear,
    /// Tokens attention sees.
    window: Option<usize>,
}

impl Decoder {
    pub(crate) fn load(spec: &DecoderSpec, loader: &mut Loader<'_>) -> Result<Self, ModelError> {
        let tensors = OuterTensors::new(spec);
        let factors = loader.optional_vector(&tensors.rope_factors)?;
        let embedding = loader.embedding(&tensors.embedding)?;
        let lm_head = match (&tensors.lm_head, spec.head) {
            (Some(stack), _) => Some(Arc::new(loader.linear(stack)?)),
            (None, OutputHead::None) => None,
            (None, _) => Some(embedding.tied()),
        };
        Ok(Self {
            embedding,
            lm_head,
            layers: (0..spec.num_layers)
                .map(|i| Layer::load(spec, i, loader))
                .collect::<Result<_, _>>()?,
            final_norm: loader.vector(&tensors.final_norm)?,
            spec: spec.clone(),
            frequencies: spec.rope.scaled_frequencies(spec.head_dim, factors.as_deref()),
        })
    }

    /// Runs the batch through all blocks and extends its requests' KV. Returns the given rows of it, ascending, behind
    /// the last norm: `[rows, hidden_size]`.
    pub(crate) fn forward<'a>(
        &self,
        batch: &Batch<'_>,
        rows: &[usize],
        kv: &mut KvCache,
        arena: &'a Arena,
    ) -> Result<&'a [f32], Oom> {
        match kv.element {
            KvElementType::F32 => self.forward_as::<f32>(batch, rows, kv, arena),
            KvElementType::F16 => self.forward_as::<f16>(batch, rows, kv, arena),
        }
    }

    fn forward_as<'a, E: KvElement>(
        &self,
        batch: &Batch<'_>,
        rows: &[usize],
        kv: &mut KvCache,
        arena: &'a Arena,
    ) -> Result<&'a [f32], Oom> {
        let spec = &self.spec;
        let (n, eps) = (batch.tokens.len(), spec.rms_norm_eps);
        let (width, inner, q_size) = (spec.hidden_size, spec.intermediate_size, spec.q_size());
        let scale = 1.0 / (spec.head_dim as f32).sqrt();
        let [
            hidden,
            delta,
            normed,
            angles,
            qkv,
            q,
            attended,
            gate_up,
            activated,
        ] = activation_widths(spec).map(|width| arena.alloc::<f32>(n * width));
        let (mut hidden, mut delta, mut normed, angles) = (hidden?, delta?, normed?, angles?);
        let (qkv, q, mut attended) = (qkv?, q?, attended?);
        let (mut gate_up, mut activated) = (gate_up?, activated?);

        rope_angles(&self.frequencies, 1.0, &batch.runs, angles);
        self.embedding.forward(batch.tokens, 1.0, hidden);
        delta.fill(0.0);
        for (index, (layer, mut kv)) in self.layers.iter().zip(kv_layers::<E>(spec, kv)).enumerate() {
            add_rms_norm(hidden, delta, &layer.attention_norm, eps, normed);
            layer.qkv.forward(normed, qkv, arena)?;
            qk_norm_rope_kv_write(qkv, layer.qk_norm(eps), angles, None, &batch.runs, &mut kv, q);
            let options = AttentionOptions {
                scale,
                window: layer.window,
            };
            attention(q, kv.as_ref(), &batch.runs, options, attended, arena)?;

            if index + 1 == self.layers.len() {
                // The KV is complete; from here on only the rows that are asked for matter.
                let m = rows.len();
                hidden = keep_rows(hidden, width, rows);
                attended = keep_rows(attended, q_size, rows);
                (delta, normed) = (&mut delta[..m * width], &mut normed[..m * width]);
                (gate_up, activated) = (&mut gate_up[..m * 2 * inner], &mut activated[..m * inner]);
                if rows.is_empty() {
                    break;
                }
            }
            layer.output.forward(attended, delta, arena)?;
            add_rms_norm(hidden, delta, &layer.mlp_norm, eps, normed);
            layer.gate_up.forward(normed, gate_up, arena)?;
            glu(Activation::Silu, gate_up, inner, activated);
            layer.down.forward(activated, delta, arena)?;
        }
        add_rms_norm(hidden, delta, &self.final_norm, eps, normed);
        Ok(normed)
    }

    /// From normalised rows to logits, `[rows, vocab_size]`; none where the model is for embeddings.
    pub(crate) fn head(&self) -> Option<&Linear> {
        self.lm_head.as_deref()
    }
}

impl Layer {
    fn load(spec: &DecoderSpec, index: usize, loader: &mut Loader<'_>) -> Result<Self, ModelError> {
        let tensors = LayerTensors::new(spec, index);
        let qk_norm = match &tensors.qk_norm {
            None => None,
            Some([q, k]) => Some((loader.vector(q)?, loader.vector(k)?)),
        };
        Ok(Self {
            attention_norm: loader.vector(&tensors.attention_norm)?,
            qkv: loader.linear(&tensors.qkv)?,
            qk_norm,
            output: loader.linear(&tensors.output)?,
            mlp_norm: loader.vector(&tensors.mlp_norm)?,
            gate_up: loader.linear(&tensors.gate_up)?,
            down: loader.linear(&tensors.down)?,
            window: spec.window(index),
        })
    }

    fn qk_norm(&self, eps: f32) -> Option<QkNorm<'_>> {
        self.qk_norm.as_ref().map(|(q, k)| QkNorm { q, k, eps })
    }
}

/// Elements of a row of each activation that a step takes from the arena for all of its rows: the residual stream, what is
/// to be added to it, its norm; angles; q, k and v, rotated q, attention's output; gate and up, their product.
pub(crate) fn activation_widths(spec: &DecoderSpec) -> [usize; 9] {
    let (width, inner, q_size) = (spec.hidden_size, spec.intermediate_size, spec.q_size());
    let qkv = q_size + 2 * spec.kv_size();
    [
        width,
        width,
        width,
        spec.head_dim,
        qkv,
        q_size,
        q_size,
        2 * inner,
        inner,
    ]
}

/// The cache, layer by layer.
fn kv_layers<'a, E: KvElement>(
    spec: &DecoderSpec,
    kv: &'a mut KvCache,
) -> impl Iterator<Item = PagedKvMut<'a, E>> + use<'a, E> {
    let KvCache { slab, config, .. } = kv;
    let layout = KvLayout {
        kv_heads: spec.num_kv_heads,
        head_dim: spec.head_dim,
        block_size: config.block_size,
    };
    let elements = layout.elements(config.num_pages);
    // At least 1, as a cache without blocks has nothing to chunk.
    slab.as_mut_slice::<E>()
        .chunks_exact_mut((2 * elements).max(1))
        .map(move |layer| {
            let (k, v) = layer.split_at_mut(elements);
            PagedKvMut { k, v, layout }
        })
}

/// Moves the given rows, ascending, to the front and returns them.
fn keep_rows<'a>(matrix: &'a mut [f32], width: usize, rows: &[usize]) -> &'a mut [f32] {
    for (to, &from) in rows.iter().enumerate() {
        matrix.copy_within(from * width..(from + 1) * width, to * width);
    }
    &mut matrix[..rows.len() * width]
}
