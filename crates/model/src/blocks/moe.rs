use super::{Among, DenseMlp, InExperts, Scope, Stack, Vector, Visitor, Widths, dense_mlp};
use crate::shard::Shard;
use crate::spec::{LayerSpec, MoeSpec, StackedExperts};

/// A mixture of experts.
#[derive(Clone, Debug)]
pub(crate) struct Moe<L> {
    /// From the residual stream to a logit for each expert.
    pub(crate) router: L,
    /// Gate and up of each expert, stacked.
    pub(crate) gate_up: Vec<L>,
    /// Of each expert.
    pub(crate) down: Vec<L>,
    pub(crate) shared: Option<SharedExpert<L>>,
}

/// A mixture of experts beside an MLP.
#[derive(Clone, Debug)]
pub(crate) struct Beside<L, V> {
    pub(crate) moe: Moe<L>,
    /// Of what the router sees.
    pub(crate) router_norm: V,
    /// What each expert's output is multiplied by, `[experts]`.
    pub(crate) expert_scale: V,
    /// Of what experts see.
    pub(crate) norm: V,
    /// Of what the MLP and of what the experts add.
    pub(crate) post_norms: [V; 2],
}

impl<L, V> Beside<L, V> {
    /// `scope` is the layer's.
    pub(super) fn visit<T: Visitor<Linear = L, Vector = V>>(
        layer: &LayerSpec,
        spec: &MoeSpec,
        hidden: usize,
        scope: &Scope<'_>,
        visitor: &mut T,
    ) -> Result<Self, T::Error> {
        let norm = |part: &str| Vector::norm(scope.name(part), hidden, layer.norm);
        let router = scope.part("router");
        Ok(Self {
            moe: Moe::visit(spec, hidden, scope, visitor)?,
            router_norm: visitor.vector(&Vector::plain(router.name("scale"), hidden))?,
            expert_scale: visitor.vector(&Vector::plain(router.name("per_expert_scale"), spec.experts))?,
            norm: visitor.vector(&norm("pre_feedforward_layernorm_2.weight"))?,
            post_norms: [
                visitor.vector(&norm("post_feedforward_layernorm_1.weight"))?,
                visitor.vector(&norm("post_feedforward_layernorm_2.weight"))?,
            ],
        })
    }
}

/// An expert that every token goes to.
#[derive(Clone, Debug)]
pub(crate) struct SharedExpert<L> {
    pub(crate) mlp: DenseMlp<L>,
    /// From the residual stream to one logit, whose sigmoid multiplies the output.
    pub(crate) gate: L,
}

impl<L> Moe<L> {
    /// `scope` is the layer's.
    pub(super) fn visit<T: Visitor<Linear = L>>(
        spec: &MoeSpec,
        hidden: usize,
        scope: &Scope<'_>,
        visitor: &mut T,
    ) -> Result<Self, T::Error> {
        let inner = spec.intermediate_size;
        let own = match spec.names.module {
            "" => scope.clone(),
            module => scope.part(module),
        };
        let experts = own.part("experts");
        let [gate, up, down_name] = spec.names.projections;
        let biased = |parts| Stack {
            bias: spec.bias,
            ..Stack::new(parts)
        };
        let is_interleaved = spec.stacked == StackedExperts::Interleaved;
        let expert = |index, stacked, rows| InExperts {
            stacked: experts.name(stacked),
            index,
            count: spec.experts,
            rows,
            transposed: is_interleaved,
        };
        let Shard { rank, ranks } = scope.shard;
        let gate_or_up = |index, part, second: usize| {
            let (first, step) = if is_interleaved {
                (second + 2 * rank * inner, 2)
            } else {
                ((second * ranks + rank) * inner, 1)
            };
            let rows = Among {
                all: 2 * ranks * inner,
                first,
                step,
            };
            let matrix = experts.expert_matrix(part, [inner, hidden], expert(index, "gate_up_proj", rows));
            matrix.outputs_of(scope.shard)
        };
        let gate_up = |index| biased(vec![gate_or_up(index, gate, 0), gate_or_up(index, up, 1)]);
        let all = Among {
            all: hidden,
            first: 0,
            step: 1,
        };
        let down = |index| {
            let expert = expert(index, "down_proj", all);
            let matrix = experts.expert_matrix(down_name, [hidden, inner], expert);
            Stack {
                // What one rank adds is added once.
                bias: spec.bias && rank == 0,
                ..Stack::new(vec![matrix.inputs_of(scope.shard)])
            }
        };
        if spec.bias && rank > 0 {
            visitor.idle(experts.name("down_proj_bias"));
            (0..spec.experts)
                .for_each(|index| visitor.idle(experts.name(&format!("{index}.{down_name}.bias"))));
        }
        Ok(Self {
            router: visitor.linear(&biased(vec![own.matrix(spec.names.router, spec.experts, hidden)]))?,
            gate_up: (0..spec.experts)
                .map(|index| visitor.linear(&gate_up(index)))
                .collect::<Result<_, _>>()?,
            down: (0..spec.experts)
                .map(|index| visitor.linear(&down(index)))
                .collect::<Result<_, _>>()?,
            shared: match &spec.shared {
                None => None,
                Some(shared) => Some(SharedExpert {
                    mlp: DenseMlp::visit(shared, hidden, &own.part("shared_expert"), visitor)?,
                    gate: visitor.linear(&Stack::new(vec![own.matrix("shared_expert_gate", 1, hidden)]))?,
                }),
            },
        })
    }
}

/// Every row may go to the same expert, whose buffers have room for all of them: more are not needed, as experts are computed
/// one after the other.
pub(super) fn widen(spec: &MoeSpec, widths: &mut Widths) {
    widths.gate_up = widths.gate_up.max(2 * spec.intermediate_size);
    widths.activated = widths.activated.max(spec.intermediate_size);
    widths.experts = widths.experts.max(spec.experts);
    widths.routes = widths.routes.max(spec.top_k);
    widths.expert_inner = widths.expert_inner.max(spec.intermediate_size);
    if let Some(shared) = &spec.shared {
        dense_mlp::widen(shared, widths);
    }
}
