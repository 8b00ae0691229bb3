use super::{Norms, Operations, Scope, Stack, Visitor, Widths};
use crate::spec::{DenseMlpSpec, Projections};

/// A gated MLP.
#[derive(Clone, Debug)]
pub(crate) struct DenseMlp<L> {
    /// Gate and up, stacked.
    pub(crate) gate_up: L,
    pub(crate) down: L,
}

impl<L> DenseMlp<L> {
    /// `scope` is the MLP's own.
    pub(super) fn visit<T: Visitor<Linear = L>>(
        spec: &DenseMlpSpec,
        hidden: usize,
        scope: &Scope<'_>,
        visitor: &mut T,
    ) -> Result<Self, T::Error> {
        let inner = spec.intermediate_size;
        let parts = match spec.projections {
            Projections::Separate => vec![("gate_proj", inner), ("up_proj", inner)],
            Projections::Fused => vec![("gate_up_proj", 2 * inner)],
        };
        let shard = scope.shard;
        let parts = parts.into_iter().map(|(part, outputs)| {
            let pieces = [(inner, shard); 2];
            let matrix = scope.matrix(part, outputs, hidden);
            matrix.outputs_of_parts(&pieces[..outputs / inner])
        });
        Ok(Self {
            gate_up: visitor.linear(&Stack::new(parts.collect()))?,
            down: visitor.linear(&Stack::new(vec![
                scope.matrix("down_proj", hidden, inner).inputs_of(shard),
            ]))?,
        })
    }

    pub(super) fn forward<V, O: Operations<L, V>>(
        &self,
        spec: &DenseMlpSpec,
        norms: &Norms<'_, V>,
        step: &mut O,
    ) -> Result<(), O::Error> {
        step.project_gated(spec, norms, &self.gate_up)?;
        step.project_down(spec, &self.down)
    }
}

pub(super) fn widen(spec: &DenseMlpSpec, widths: &mut Widths) {
    widths.gate_up = widths.gate_up.max(2 * spec.intermediate_size);
    widths.activated = widths.activated.max(spec.intermediate_size);
}
