//! Layers of a step of one row whose products, from a mixer's output to the next mixer's projections, are one launch.

use plimsoll_device::cuda::GpuError;
use plimsoll_kernels::cuda::{GpuChain, GpuChainEnd, GpuLinear};

use super::Decoder;
use super::layers::{Step, norm};
use crate::blocks::{MlpKind, Norms};
use crate::cuda::weights::{GpuLayer, GpuVector};

/// The products of a layer from its mixer's output on, if nothing but residual sums and a norm lies between them.
pub(super) fn chain_of(layer: &GpuLayer) -> Option<[&GpuLinear; 3]> {
    let MlpKind::Dense(mlp) = &layer.mlp.kind else {
        return None;
    };
    let is_plain = !layer.spec.post_norms && !layer.spec.scalar && layer.input.is_none();
    is_plain.then_some([layer.mixer.output(), &mlp.gate_up, &mlp.down])
}

impl Decoder {
    /// Whether these are one launch in a step of so many rows.
    pub(super) fn chains(&self, layer: &GpuLayer, rows: usize) -> bool {
        let products = chain_of(layer).filter(|_| rows == 1 && self.all_reduce().is_none());
        products.is_some_and(|products| self.linears.chains(products))
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
        let (Some([output, gate_up, down]), Some(mlp)) = (chain_of(layer), layer.spec.mlp_of_all()) else {
            unreachable!("only layers with such products wait");
        };
        let next =
            next.filter(|(_, linear)| decoder.linears.can_chain([output, gate_up, down], Some(linear)));
        let next = next.map(|(norms, linear)| GpuChainEnd {
            norm: norm(norms),
            linear,
            out: self.rows(self.act.qkv, linear.outputs()),
        });
        decoder.linears.forward_chain(&GpuChain {
            x: self.rows(self.act.attended, output.inputs()),
            output,
            hidden: self.rows(self.act.hidden, output.outputs()),
            norm: norm(&Norms {
                added: None,
                weight: layer.mlp.norm(),
                eps: layer.spec.norm.eps,
            }),
            gate_up,
            activation: mlp.activation,
            activated: self.rows(self.act.activated, down.inputs()),
            down,
            next,
        })?;
        // As the norm ahead of projections leaves it: what a mixer gives is to be added next.
        self.is_fresh = next.is_none();
        Ok(next.is_some())
    }
}
