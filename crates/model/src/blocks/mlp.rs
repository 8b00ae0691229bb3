use super::{Beside, DenseMlp, Moe, Norms, Operations, Scope, Vector, Visitor};
use crate::spec::{self, LayerSpec};

/// What follows a layer's mixer, and the norms around it.
#[derive(Clone, Debug)]
pub(crate) struct Mlp<L, V> {
    norm: V,
    pub(crate) kind: MlpKind<L, V>,
    /// Of what is added to the residual stream.
    pub(crate) post_norm: Option<V>,
}

/// As [`spec::Mlp`].
#[derive(Clone, Debug)]
pub(crate) enum MlpKind<L, V> {
    Dense(DenseMlp<L>),
    Moe(Moe<L>),
    Both(DenseMlp<L>, Box<Beside<L, V>>),
}

impl<L, V> Mlp<L, V> {
    pub(super) fn visit<T: Visitor<Linear = L, Vector = V>>(
        layer: &LayerSpec,
        hidden: usize,
        scope: &Scope<'_>,
        visitor: &mut T,
    ) -> Result<Self, T::Error> {
        // The name that most families give this norm is that of attention's second where there is one.
        let before = match layer.post_norms {
            false => "post_attention_layernorm.weight",
            true => "pre_feedforward_layernorm.weight",
        };
        let norm = |part: &str| Vector::norm(scope.name(part), hidden, layer.norm);
        Ok(Self {
            norm: visitor.vector(&norm(before))?,
            kind: match &layer.mlp {
                spec::Mlp::Dense(spec) => {
                    MlpKind::Dense(DenseMlp::visit(spec, hidden, &scope.part("mlp"), visitor)?)
                }
                spec::Mlp::Moe(spec) => MlpKind::Moe(Moe::visit(spec, hidden, scope, visitor)?),
                spec::Mlp::Both(mlp, moe) => MlpKind::Both(
                    DenseMlp::visit(mlp, hidden, &scope.part("mlp"), visitor)?,
                    Box::new(Beside::visit(layer, moe, hidden, scope, visitor)?),
                ),
            },
            post_norm: (layer.post_norms)
                .then(|| visitor.vector(&norm("post_feedforward_layernorm.weight")))
                .transpose()?,
        })
    }

    /// `added` is the norm of what the block before adds.
    pub(super) fn forward<O: Operations<L, V>>(
        &self,
        layer: &LayerSpec,
        added: Option<&V>,
        step: &mut O,
    ) -> Result<(), O::Error> {
        let norms = Norms {
            added,
            weight: &self.norm,
            eps: layer.norm.eps,
        };
        match (&layer.mlp, &self.kind) {
            (spec::Mlp::Dense(spec), MlpKind::Dense(mlp)) => {
                mlp.forward(spec, &norms, step)?;
                step.sum_ranks()
            }
            (spec::Mlp::Moe(spec), MlpKind::Moe(moe)) => {
                step.experts(spec, &norms, moe)?;
                step.sum_ranks()
            }
            (spec::Mlp::Both(dense, spec), MlpKind::Both(mlp, beside)) => {
                mlp.forward(dense, &norms, step)?;
                step.sum_ranks()?;
                step.experts_beside(spec, layer.norm.eps, beside)
            }
            _ => unreachable!("a layer has the MLP of its specification"),
        }
    }

    /// The norm ahead of it.
    pub(crate) fn norm(&self) -> &V {
        &self.norm
    }

    /// What every token goes through: the MLP of a layer without experts, or the expert that is shared.
    pub(crate) fn of_all(&self) -> Option<&DenseMlp<L>> {
        match &self.kind {
            MlpKind::Dense(mlp) | MlpKind::Both(mlp, _) => Some(mlp),
            MlpKind::Moe(moe) => moe.shared.as_ref().map(|shared| &shared.mlp),
        }
    }

    /// The experts of a layer that has any.
    pub(crate) fn experts(&self) -> Option<&Moe<L>> {
        match &self.kind {
            MlpKind::Dense(_) => None,
            MlpKind::Moe(moe) => Some(moe),
            MlpKind::Both(_, beside) => Some(&beside.moe),
        }
    }
}
