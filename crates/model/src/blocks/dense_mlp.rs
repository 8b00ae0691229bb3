use super::{Norms, Operations, Scope, Stack, Vector, Visitor, Widths};
use crate::spec::{DenseMlpSpec, LayerSpec, Projections};

/// A gated MLP and the norms around it.
#[derive(Clone, Debug)]
pub(crate) struct DenseMlp<L, V> {
    norm: V,
    /// Gate and up, stacked.
    pub(crate) gate_up: L,
    pub(crate) down: L,
    /// Of what is added to the residual stream.
    pub(super) post_norm: Option<V>,
}

impl<L, V> DenseMlp<L, V> {
    pub(super) fn visit<T>(
        layer: &LayerSpec,
        hidden: usize,
        scope: &Scope<'_>,
        visitor: &mut T,
    ) -> Result<Self, T::Error>
    where
        T: Visitor<Linear = L, Vector = V>,
    {
        let spec = layer.dense_mlp();
        let inner = spec.intermediate_size;
        let parts = match spec.projections {
            Projections::Separate => vec![("gate_proj", inner), ("up_proj", inner)],
            Projections::Fused => vec![("gate_up_proj", 2 * inner)],
        };
        let own = scope.part("mlp");
        let parts = parts
            .into_iter()
            .map(|(part, outputs)| own.matrix(part, outputs, hidden));
        // The name that most families give this norm is that of attention's second where there is one.
        let before = match layer.post_norms {
            false => "post_attention_layernorm.weight",
            true => "pre_feedforward_layernorm.weight",
        };
        let norm = |part: &str| Vector::norm(scope.name(part), hidden, layer.norm);
        Ok(Self {
            norm: visitor.vector(&norm(before))?,
            gate_up: visitor.linear(&Stack::new(parts.collect()))?,
            down: visitor.linear(&Stack::new(vec![own.matrix("down_proj", hidden, inner)]))?,
            post_norm: match layer.post_norms {
                false => None,
                true => Some(visitor.vector(&norm("post_feedforward_layernorm.weight"))?),
            },
        })
    }

    /// `added` is the norm of what the block before adds.
    pub(super) fn forward<O: Operations<L, V>>(
        &self,
        layer: &LayerSpec,
        added: Option<&V>,
        step: &mut O,
    ) -> Result<(), O::Error> {
        let spec = layer.dense_mlp();
        let norms = Norms {
            added,
            weight: &self.norm,
            eps: layer.norm.eps,
        };
        step.project_gated(spec, &norms, &self.gate_up)?;
        step.project_down(spec, &self.down)
    }
}

pub(super) fn widen(spec: &DenseMlpSpec, widths: &mut Widths) {
    widths.gate_up = widths.gate_up.max(2 * spec.intermediate_size);
    widths.activated = widths.activated.max(spec.intermediate_size);
}
