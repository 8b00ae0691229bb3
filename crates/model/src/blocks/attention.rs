use super::{Norms, Operations, Scope, Stack, Vector, Visitor, Widths};
use crate::spec::{AttentionSpec, LayerSpec, Projections, Values};

/// Attention and the norms around it.
#[derive(Clone, Debug)]
pub(crate) struct Attention<L, V> {
    pub(crate) norm: V,
    /// q, its gates if it has any, k and v, stacked, as far as the layer has them.
    pub(crate) qkv: L,
    /// Of the heads of q and of k.
    pub(crate) qk_norm: Option<[V; 2]>,
    /// Of the heads of q, where keys and values are another layer's.
    q_norm: Option<V>,
    /// A logit of each query head that has no value.
    sinks: Option<V>,
    pub(crate) output: L,
    /// Of what is added to the residual stream.
    pub(super) post_norm: Option<V>,
}

impl<L, V> Attention<L, V> {
    pub(super) fn visit<T: Visitor<Linear = L, Vector = V>>(
        layer: &LayerSpec,
        spec: &AttentionSpec,
        hidden: usize,
        scope: &Scope<'_>,
        visitor: &mut T,
    ) -> Result<Self, T::Error> {
        let (q, kv) = (spec.q_size(), spec.kv_size());
        let own = scope.part("self_attn");
        let (shard, kv_shard) = (scope.shard, spec.kv_shard);
        let matrix = |name, outputs| own.matrix(name, outputs, hidden);
        let keys = || matrix("k_proj", kv).outputs_of(kv_shard);
        let parts = match spec.projections {
            Projections::Separate => {
                let queries = match spec.gated {
                    false => matrix("q_proj", q),
                    true => own.grouped("q_proj", spec.heads, [spec.head_dim, spec.head_dim, 0, 0], hidden),
                };
                let queries = queries.outputs_of(shard);
                match (spec.shares_kv, spec.values) {
                    (Some(_), _) => vec![queries],
                    (None, Values::NormalisedKeys) => vec![queries, keys()],
                    (None, _) => vec![queries, keys(), matrix("v_proj", kv).outputs_of(kv_shard)],
                }
            }
            Projections::Fused => {
                let parts = [(q, shard), (kv, kv_shard), (kv, kv_shard)];
                vec![matrix("qkv_proj", spec.qkv_size()).outputs_of_parts(&parts)]
            }
        };
        let norm = |name: String, len| Vector::norm(name, len, layer.norm);
        let shares = spec.shares_kv.is_some();
        if shares {
            // As transformers, which ignores them in published checkpoints of Gemma 4.
            for idle in ["k_proj", "v_proj", "k_norm", "v_norm"] {
                visitor.idle(own.name(&format!("{idle}.weight")));
            }
        }
        // What one rank adds is added once.
        let output_bias = spec.output_bias && shard.rank == 0;
        if spec.output_bias && !output_bias {
            visitor.idle(own.name("o_proj.bias"));
        }
        Ok(Self {
            norm: visitor.vector(&norm(scope.name("input_layernorm.weight"), hidden))?,
            qkv: visitor.linear(&Stack {
                bias: spec.qkv_bias,
                kv_scales: match scope.has_kv_scales() {
                    true => ["k_scale", "v_scale"].map(|scale| own.name(scale)).to_vec(),
                    false => Vec::new(),
                },
                ..Stack::new(parts)
            })?,
            q_norm: (spec.qk_norm && shares)
                .then(|| visitor.vector(&norm(own.name("q_norm.weight"), spec.head_dim)))
                .transpose()?,
            qk_norm: match spec.qk_norm && !shares {
                false => None,
                true => Some([
                    visitor.vector(&norm(own.name("q_norm.weight"), spec.head_dim))?,
                    visitor.vector(&norm(own.name("k_norm.weight"), spec.head_dim))?,
                ]),
            },
            sinks: (spec.sinks.then(|| Vector::plain(own.name("sinks"), spec.heads)))
                .map(|sinks| visitor.vector(&sinks.divided(&[(spec.heads, shard)])))
                .transpose()?,
            output: visitor.linear(&Stack {
                bias: output_bias,
                ..Stack::new(vec![own.matrix("o_proj", hidden, q).inputs_of(shard)])
            })?,
            post_norm: (layer.post_norms)
                .then(|| visitor.vector(&norm(scope.name("post_attention_layernorm.weight"), hidden)))
                .transpose()?,
        })
    }

    /// Up to the keys and values in the cache.
    pub(super) fn write<O: Operations<L, V>>(
        &self,
        layer: &LayerSpec,
        spec: &AttentionSpec,
        added: Option<&V>,
        step: &mut O,
    ) -> Result<(), O::Error> {
        let norms = Norms {
            added,
            weight: &self.norm,
            eps: layer.norm.eps,
        };
        step.project(&norms, &self.qkv, spec.qkv_size())?;
        match spec.shares_kv {
            None => step.write_kv(layer, spec, self.qk_norm.as_ref()),
            Some(_) => step.rotate_queries(layer, spec, self.q_norm.as_ref()),
        }
    }

    /// The rest, of the last layer only for the rows that are given out.
    pub(super) fn finish<O: Operations<L, V>>(
        &self,
        spec: &AttentionSpec,
        is_last: bool,
        step: &mut O,
    ) -> Result<(), O::Error> {
        step.attend(spec, self.sinks.as_ref())?;
        if is_last {
            step.keep_given(spec.q_size())?;
        }
        step.project_output(&self.output)?;
        step.sum_ranks()
    }
}

pub(super) fn widen(spec: &AttentionSpec, widths: &mut Widths) {
    widths.qkv = widths.qkv.max(spec.qkv_size());
    widths.attended = widths.attended.max(spec.q_size());
}
