//! What runs beside the residual stream or an MLP (Gemma 4): inputs of layers, and experts.

use std::f32::consts::FRAC_1_SQRT_2;
use std::sync::Arc;

use plimsoll_core::{Oom, StepError};
use plimsoll_kernels::{
    ExpertBuffers, ExpertWeights, KvElement, Linear, Router, add_normed, experts, glu, rms_norm, route,
};

use super::{Step, count_routes};
use crate::blocks::{Beside, LayerInput};
use crate::spec::{MoeSpec, PerLayerSpec};

impl<E: KvElement> Step<'_, '_, E> {
    /// [`Operations::make_layer_inputs`](crate::blocks::Operations::make_layer_inputs).
    pub(super) fn project_layer_inputs(
        &mut self,
        projection: &Linear,
        norm: &[f32],
        eps: f32,
    ) -> Result<(), Oom> {
        let (x, len) = (self.rows * projection.inputs(), self.rows * projection.outputs());
        let projected = &mut self.act.gate_up[..len];
        projection.forward(&self.act.hidden[..x], projected, self.arena)?;
        let scale = (projection.inputs() as f32).sqrt().recip();
        projected.iter_mut().for_each(|value| *value *= scale);
        add_normed(&mut self.act.layer_inputs[..len], projected, norm, eps);
        let both = FRAC_1_SQRT_2;
        self.act.layer_inputs.iter_mut().for_each(|value| *value *= both);
        Ok(())
    }

    /// [`Operations::gate_layer_input`](crate::blocks::Operations::gate_layer_input).
    pub(super) fn project_gated_input(
        &mut self,
        spec: &PerLayerSpec,
        input: &LayerInput<Arc<Linear>, Vec<f32>>,
    ) -> Result<(), Oom> {
        let (rows, width) = (self.rows, spec.width);
        let len = rows * input.gate.inputs();
        let all = self.act.layer_inputs.len() / self.batch.tokens.len();
        let gates = &mut self.act.activated[..rows * width];
        input.gate.forward(&self.act.hidden[..len], gates, self.arena)?;
        let beside = &mut self.act.gate_up[..rows * 2 * width];
        let inputs = self.act.layer_inputs.chunks_exact(all);
        for ((to, gate), input) in beside
            .chunks_exact_mut(2 * width)
            .zip(gates.chunks_exact(width))
            .zip(inputs)
        {
            to[..width].copy_from_slice(gate);
            to[width..].copy_from_slice(&input[self.layer * width..][..width]);
        }
        glu(spec.activation, beside, width, gates);
        input
            .projection
            .forward(gates, &mut self.act.delta[..len], self.arena)
    }

    /// [`Operations::experts_beside`](crate::blocks::Operations::experts_beside).
    pub(super) fn add_experts(
        &mut self,
        spec: &MoeSpec,
        eps: f32,
        beside: &Beside<Arc<Linear>, Vec<f32>>,
    ) -> Result<(), StepError> {
        let (rows, arena, moe) = (self.rows, self.arena, &beside.moe);
        let width = moe.router.inputs();
        let len = rows * width;
        let (hidden, normed, delta) = (
            &self.act.hidden[..len],
            &mut self.act.normed[..len],
            &mut self.act.delta[..len],
        );
        rms_norm(hidden, &beside.router_norm, eps, normed);
        let logits = &mut self.act.router_logits[..rows * spec.experts];
        moe.router.forward(normed, logits, arena)?;
        let router = Router {
            softmax: spec.softmax,
            scale: (width as f32).sqrt().recip(),
            expert_scale: Some(&beside.expert_scale),
        };
        let routes = &mut self.act.routes[..rows * spec.top_k];
        route(logits, spec.experts, router, routes);
        count_routes(self.expert_loads, self.layer, routes);
        rms_norm(hidden, &beside.norm, eps, normed);
        let weights = ExpertWeights {
            gate_up: &moe.gate_up,
            down: &moe.down,
        };
        let buffers = ExpertBuffers {
            gathered: self.act.gathered,
            gate_up: self.act.gate_up,
            activated: self.act.activated,
            out: self.act.projected,
        };
        // Attention is done with it.
        let out = &mut self.act.qkv[..len];
        experts(normed, routes, weights, spec.activation, buffers, out, arena)?;
        if let Some(exchange) = &mut self.exchange {
            exchange.sum(out)?;
        }
        let [of_mlp, of_experts] = &beside.post_norms;
        rms_norm(delta, of_mlp, eps, normed);
        add_normed(normed, out, of_experts, eps);
        delta.copy_from_slice(normed);
        Ok(())
    }
}
