//! Layers of a step of one row whose products, from a mixer's output to the next mixer's projections, are one launch.

use plimsoll_device::cuda::GpuError;
use plimsoll_kernels::ExpertActivation;
use plimsoll_kernels::cuda::{
    GpuChain, GpuChainEnd, GpuLinear, GpuMoeChain, GpuRouter, MoeChainLayers, SharedExpertLayers,
};

use super::Decoder;
use super::layers::{Step, norm};
use crate::blocks::{MlpKind, Norms};
use crate::cuda::weights::{GpuLayer, GpuVector};
use crate::spec::{DenseMlpSpec, Mlp, MoeSpec};

/// The products of a layer from its mixer's output on, where nothing but residual sums and norms lies between them and, with experts, their
/// choice.
pub(super) enum Chain<'a> {
    /// Of the mixer, gate and up, down.
    Dense(&'a DenseMlpSpec, [&'a GpuLinear; 3]),
    /// Of the mixer, the router and the experts.
    Experts(&'a MoeSpec, MoeChainLayers<'a>),
}

/// See [`Chain::Dense`].
pub(super) fn dense_chain_of(layer: &GpuLayer) -> Option<(&DenseMlpSpec, [&GpuLinear; 3])> {
    let (Mlp::Dense(spec), MlpKind::Dense(mlp)) = (&layer.spec.mlp, &layer.mlp.kind) else {
        return None;
    };
    is_plain(layer).then_some((spec, [layer.mixer.output(), &mlp.gate_up, &mlp.down]))
}

fn is_plain(layer: &GpuLayer) -> bool {
    !layer.spec.post_norms && !layer.spec.scalar && layer.input.is_none()
}

impl Decoder {
    fn chain_of(&self, index: usize) -> Option<Chain<'_>> {
        let layer = &self.weights.decoder.layers[index];
        let (Mlp::Moe(spec), MlpKind::Moe(moe)) = (&layer.spec.mlp, &layer.mlp.kind) else {
            return dense_chain_of(layer).map(|(spec, products)| Chain::Dense(spec, products));
        };
        let experts = self.experts.as_ref()?.layer(index);
        let activations = spec.shared.as_ref().map(|shared| shared.activation);
        let are_alike = activations.is_none_or(|shared| spec.activation == ExpertActivation::Glu(shared));
        let layers = MoeChainLayers {
            output: layer.mixer.output(),
            router: &experts.router,
            gate_up: &experts.gate_up,
            down: &experts.down,
            top_k: spec.top_k,
            shared: moe.shared.as_ref().map(|shared| SharedExpertLayers {
                gate_up: &shared.mlp.gate_up,
                down: &shared.mlp.down,
                gate: &shared.gate,
            }),
        };
        (is_plain(layer) && are_alike).then_some(Chain::Experts(spec, layers))
    }

    /// Whether the products of this layer are one launch in a step of so many rows.
    pub(super) fn chains(&self, index: usize, rows: usize) -> bool {
        if rows != 1 || self.all_reduce().is_some() {
            return false;
        }
        match (self.chain_of(index), &self.experts) {
            (Some(Chain::Dense(_, products)), _) => self.linears.chains(products),
            (Some(Chain::Experts(_, layers)), Some(experts)) => experts.kernels.can_chain(&layers, None),
            _ => false,
        }
    }
}

impl Step<'_, '_> {
    /// Launches the products of the layer that waits, and with them these projections of what follows, if they can be a part of it.
    /// Returns whether they were.
    pub(super) fn launch_chain(
        &mut self,
        next: Option<(&Norms<'_, GpuVector>, &GpuLinear)>,
    ) -> Result<bool, GpuError> {
        let Some(index) = self.chain.take() else {
            return Ok(false);
        };
        let decoder = self.decoder;
        let layer = &decoder.weights.decoder.layers[index];
        let chain = decoder
            .chain_of(index)
            .expect("only layers with such products wait");
        let linears = &decoder.linears;
        let can_chain = |linear: &GpuLinear| match &chain {
            Chain::Dense(_, products) => linears.can_chain(*products, Some(linear)),
            Chain::Experts(_, layers) => self.of_experts().kernels.can_chain(layers, Some(linear)),
        };
        let next = next
            .filter(|(_, linear)| can_chain(linear))
            .map(|(norms, linear)| GpuChainEnd {
                norm: norm(norms),
                linear,
                out: self.rows(self.act.qkv, linear.outputs()),
            });
        let own_norm = norm(&Norms {
            added: None,
            weight: layer.mlp.norm(),
            eps: layer.spec.norm.eps,
        });
        let output = layer.mixer.output();
        let x = self.rows(self.act.attended, output.inputs());
        let hidden = self.rows(self.act.hidden, output.outputs());
        match chain {
            Chain::Dense(spec, [output, gate_up, down]) => linears.forward_chain(&GpuChain {
                x,
                output,
                hidden,
                norm: own_norm,
                gate_up,
                activation: spec.activation,
                activated: self.rows(self.act.activated, down.inputs()),
                down,
                next,
            })?,
            Chain::Experts(spec, layers) => {
                let act = self.act.experts;
                let bias = layer.mlp.experts().and_then(|moe| moe.router.bias());
                let inner = spec.intermediate_size;
                // The row's weights are known to the kernel alone, so their place has room for the logit of the gate.
                let shared = layers
                    .shared
                    .map(|_| (self.rows(self.act.activated, inner), act.weights.range(0..1)));
                self.of_experts().kernels.forward_chain(
                    linears,
                    &GpuMoeChain {
                        layers,
                        x,
                        hidden,
                        norm: own_norm,
                        router: GpuRouter::plain(bias, spec.softmax),
                        logits: act.logits.range(0..spec.experts),
                        loads: self.state.loads.of(index),
                        activation: spec.activation,
                        activated: act.activated.range(0..spec.top_k * inner),
                        shared,
                        next,
                    },
                )?;
            }
        }
        // As the norm ahead of projections leaves it: what a mixer gives is to be added next.
        self.is_fresh = next.is_none();
        Ok(next.is_some())
    }
}
