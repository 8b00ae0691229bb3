use super::{Norms, Operations, Scope, Stack, Vector, Visitor, Widths};
use crate::spec::{DeltaNetSpec, LayerSpec, Projections};

/// Gated DeltaNet and the norm before it.
#[derive(Clone, Debug)]
pub(crate) struct DeltaNet<L, V> {
    norm: V,
    /// q, k, v, the output's gate, and what makes the gates of the state, stacked.
    pub(crate) projections: L,
    rule: DeltaRule<V>,
    pub(crate) output: L,
    /// Of what is added to the residual stream.
    pub(super) post_norm: Option<V>,
}

/// Vectors of the convolution and the recurrence.
#[derive(Clone, Debug)]
pub(crate) struct DeltaRule<V> {
    /// `[channels, 1, taps]`.
    pub(crate) conv: V,
    pub(crate) a_log: V,
    pub(crate) dt_bias: V,
    /// Of the heads of the output. Stored whole, also where other norms are stored less 1.
    pub(crate) norm: V,
}

impl<L, V> DeltaNet<L, V> {
    pub(super) fn visit<T: Visitor<Linear = L, Vector = V>>(
        layer: &LayerSpec,
        spec: &DeltaNetSpec,
        hidden: usize,
        scope: &Scope<'_>,
        visitor: &mut T,
    ) -> Result<Self, T::Error> {
        let layout = &spec.layout;
        let (groups, heads) = (layout.key_heads, layout.value_heads);
        let own = scope.part("linear_attn");
        let shard = scope.shard;
        // q, k and v lie one after the other.
        let channels = [layout.keys(), layout.keys(), layout.values()];
        let mut projections = match spec.projections {
            Projections::Separate => vec![
                own.matrix("in_proj_qkv", layout.channels(), hidden)
                    .outputs_of_parts(&channels.map(|len| (len, shard))),
                own.matrix("in_proj_z", layout.values(), hidden).outputs_of(shard),
            ],
            Projections::Fused => {
                let (keys, values) = (layout.key_dim, layout.values() / groups);
                let parts = [keys, keys, values, values];
                vec![
                    own.grouped("in_proj_qkvz", groups, parts, hidden)
                        .outputs_of(shard),
                ]
            }
        };
        projections.extend(match spec.gates {
            Projections::Separate => vec![
                own.matrix("in_proj_b", heads, hidden).outputs_of(shard),
                own.matrix("in_proj_a", heads, hidden).outputs_of(shard),
            ],
            Projections::Fused => {
                let parts = [heads / groups, heads / groups, 0, 0];
                vec![own.grouped("in_proj_ba", groups, parts, hidden).outputs_of(shard)]
            }
        });
        let vector = |name: &str, len| Vector::plain(own.name(name), len);
        let norm = |name| Vector::norm(scope.name(name), hidden, layer.norm);
        Ok(Self {
            norm: visitor.vector(&norm("input_layernorm.weight"))?,
            projections: visitor.linear(&Stack::new(projections))?,
            rule: DeltaRule {
                conv: visitor.vector(
                    &Vector::shaped(own.name("conv1d.weight"), [layout.channels(), 1, layout.taps])
                        .divided(&channels.map(|len| (len, shard))),
                )?,
                a_log: visitor.vector(&vector("A_log", heads).divided(&[(heads, shard)]))?,
                dt_bias: visitor.vector(&vector("dt_bias", heads).divided(&[(heads, shard)]))?,
                norm: visitor.vector(&vector("norm.weight", layout.value_dim))?,
            },
            output: visitor.linear(&Stack::new(vec![
                own.matrix("out_proj", hidden, layout.values()).inputs_of(shard),
            ]))?,
            post_norm: (layer.post_norms)
                .then(|| visitor.vector(&norm("post_attention_layernorm.weight")))
                .transpose()?,
        })
    }

    /// Up to the states of all requests after the step, and what is read from them.
    pub(super) fn write<O: Operations<L, V>>(
        &self,
        layer: &LayerSpec,
        spec: &DeltaNetSpec,
        added: Option<&V>,
        step: &mut O,
    ) -> Result<(), O::Error> {
        let norms = Norms {
            added,
            weight: &self.norm,
            eps: layer.norm.eps,
        };
        step.project(&norms, &self.projections, spec.layout.width())?;
        step.apply_delta_rule(layer, spec, &self.rule)
    }

    /// The rest, of the last layer only for the rows that are given out.
    pub(super) fn finish<O: Operations<L, V>>(
        &self,
        spec: &DeltaNetSpec,
        is_last: bool,
        step: &mut O,
    ) -> Result<(), O::Error> {
        if is_last {
            step.keep_given(spec.layout.values())?;
        }
        step.project_output(&self.output)?;
        step.sum_ranks()
    }
}

pub(super) fn widen(spec: &DeltaNetSpec, widths: &mut Widths) {
    widths.qkv = widths.qkv.max(spec.layout.width());
    widths.attended = widths.attended.max(spec.layout.values());
}
