//! What runs beside the residual stream or an MLP (Gemma 4) as launches: inputs of layers, and experts.

use std::f32::consts::FRAC_1_SQRT_2;

use half::bf16;
use plimsoll_device::cuda::{GpuError, GpuSlice};
use plimsoll_kernels::cuda::{GpuLinear, GpuNorm, GpuRouter};

use super::layers::{Step, Unsettled};
use crate::blocks::{Beside, LayerInput};
use crate::cuda::weights::GpuVector;
use crate::spec::{MoeSpec, PerLayerSpec};

impl<'a> Step<'a, '_> {
    /// Makes the residual stream complete.
    pub(super) fn complete(&mut self) -> Result<(), GpuError> {
        let Some(Unsettled { added, scalar, eps }) = self.unsettled.take() else {
            return Ok(());
        };
        self.sum_delta()?;
        let width = self.decoder.weights.spec.hidden_size;
        let [hidden, delta] = [self.act.hidden, self.act.delta].map(|slice| self.rows(slice, width));
        let norm = added.as_ref().map(|weight| GpuNorm {
            weight: weight.slice(),
            eps,
        });
        let scalar = scalar.as_ref().map(GpuVector::slice);
        let fused = &self.decoder.fused;
        fused.add_normed(hidden, delta, width, norm, (1.0, scalar))
    }

    /// [`Operations::make_layer_inputs`](crate::blocks::Operations::make_layer_inputs).
    pub(super) fn project_layer_inputs(
        &mut self,
        projection: &GpuLinear,
        norm: &GpuVector,
        eps: f32,
    ) -> Result<(), GpuError> {
        let all = projection.outputs();
        let projected = self.rows(self.act.gate_up, all);
        self.linear(self.act.hidden, projection, projected)?;
        let norm = GpuNorm {
            weight: norm.slice(),
            // What is normalised is divided by the root of the width: that does nothing else to its norm.
            eps: eps * projection.inputs() as f32,
        };
        let inputs = self.rows(self.act.layer_inputs, all);
        let fused = &self.decoder.fused;
        fused.add_normed(
            inputs,
            projected,
            norm.weight.len(),
            Some(norm),
            (FRAC_1_SQRT_2, None),
        )
    }

    /// The layer's inputs, and elements from one row's to the next one's.
    pub(super) fn layer_input(&self, spec: &PerLayerSpec) -> (GpuSlice<'a, bf16>, usize) {
        if self.are_given {
            return (self.act.last_inputs, spec.width);
        }
        let inputs = self.act.layer_inputs;
        let stride = self.decoder.weights.spec.layers.len() * spec.width;
        (inputs.range(self.layer * spec.width..inputs.len()), stride)
    }

    /// [`Operations::gate_layer_input`](crate::blocks::Operations::gate_layer_input).
    pub(super) fn project_gated_input(
        &mut self,
        spec: &PerLayerSpec,
        input: &LayerInput<GpuLinear, GpuVector>,
    ) -> Result<(), GpuError> {
        self.complete()?;
        let gates = self.rows(self.act.activated, spec.width);
        self.linear(self.act.hidden, &input.gate, gates)?;
        let fused = &self.decoder.fused;
        fused.glu_of(spec.activation, gates, self.layer_input(spec), spec.width, gates)?;
        let delta = self.rows(self.act.delta, input.projection.outputs());
        self.linear(self.act.activated, &input.projection, delta)
    }

    /// [`Operations::experts_beside`](crate::blocks::Operations::experts_beside).
    pub(super) fn add_experts(
        &mut self,
        spec: &MoeSpec,
        eps: f32,
        beside: &Beside<GpuLinear, GpuVector>,
    ) -> Result<(), GpuError> {
        if !self.chain.is_empty() {
            return Ok(());
        }
        // Of the MLP.
        self.sum_delta()?;
        let (decoder, moe) = (self.decoder, &beside.moe);
        let width = moe.router.inputs();
        let [hidden, normed, delta] =
            [self.act.hidden, self.act.normed, self.act.delta].map(|slice| self.rows(slice, width));
        let norm = |weight: &GpuVector| {
            let weight = weight.slice();
            decoder.fused.rms_norm(hidden, GpuNorm { weight, eps }, normed)
        };
        norm(&beside.router_norm)?;
        let router = router_of(beside, spec);
        let (routes, _) = self.route(spec, router, normed, None)?;
        norm(&beside.norm)?;
        self.begin_experts(spec, router, &routes, normed)?;
        let outputs = self.end_experts(spec, routes, None)?;
        // Attention is done with it.
        let out = self.rows(self.act.qkv, width);
        self.of_experts().kernels.combine(&outputs, out)?;
        decoder.all_reduce().map_or(Ok(()), |ranks| ranks.sum(out))?;
        let weights = [&beside.post_norms[0], &beside.post_norms[1]].map(GpuVector::slice);
        decoder.fused.sum_norms(delta, out, weights, eps)
    }
}

/// How the logits of experts that an MLP is beside become weights.
pub(super) fn router_of<'a>(beside: &'a Beside<GpuLinear, GpuVector>, spec: &MoeSpec) -> GpuRouter<'a> {
    GpuRouter {
        scale: (beside.moe.router.inputs() as f32).sqrt().recip(),
        expert_scale: Some(beside.expert_scale.slice()),
        ..GpuRouter::plain(beside.moe.router.bias(), spec.softmax)
    }
}
