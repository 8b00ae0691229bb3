//! Layers with experts as launches.

use half::bf16;
use plimsoll_device::cuda::{GpuError, GpuSlice};
use plimsoll_kernels::cuda::{GpuLinear, LinearOutput};

use super::layers::Step;
use crate::blocks::{DenseMlp, Moe};
use crate::spec::{DenseMlpSpec, MoeSpec};

impl<'a> Step<'a, '_> {
    /// From normalised rows through each row's experts to what is added to the residual stream.
    pub(super) fn route_to_experts(
        &mut self,
        spec: &MoeSpec,
        moe: &Moe<GpuLinear>,
        normed: GpuSlice<'a, bf16>,
    ) -> Result<(), GpuError> {
        let decoder = self.decoder;
        let experts = decoder.experts.as_ref().expect("a model with experts has them");
        let (kernels, layer, linears) = (&experts.kernels, experts.layer(self.layer), &decoder.linears);
        let (rows, act) = (self.rows, self.act.experts);
        let routes = act.routes(spec, rows);
        let logits = act.logits.range(0..rows * spec.experts);
        linears.forward_f32(normed, &layer.router, logits)?;
        kernels.route(logits, moe.router.bias(), spec.softmax, &routes)?;
        let activated = act.activated.range(0..rows * spec.top_k * spec.intermediate_size);
        kernels.gate_up(normed, &layer.gate_up, spec.activation, &routes, activated)?;
        let out = act.out.range(0..rows * spec.top_k * layer.down.outputs());
        kernels.down(activated, &layer.down, &routes, out)?;
        let delta = self.rows(self.act.delta, layer.down.outputs());
        let mut gates = None;
        if let (Some(spec), Some(shared)) = (&spec.shared, &moe.shared) {
            // Where the sum of all experts takes it up. The router's logits have been used.
            self.shared_expert(spec, &shared.mlp, normed, delta)?;
            let found = gates.insert(act.logits.range(0..rows));
            linears.forward_f32(normed, &shared.gate, *found)?;
        }
        kernels.combine(out, &routes, gates, delta)
    }

    /// The expert that every row goes to.
    fn shared_expert(
        &self,
        spec: &DenseMlpSpec,
        mlp: &DenseMlp<GpuLinear>,
        normed: GpuSlice<'a, bf16>,
        out: GpuSlice<'a, bf16>,
    ) -> Result<(), GpuError> {
        let (linears, inner) = (&self.decoder.linears, spec.intermediate_size);
        if linears.fuses_glu(self.rows, &mlp.gate_up, spec.activation) {
            let activated = self.rows(self.act.activated, inner);
            self.product(
                normed,
                &mlp.gate_up,
                LinearOutput::Glu(spec.activation),
                activated,
            )?;
            return self.linear(self.act.activated, &mlp.down, out);
        }
        let gate_up = self.rows(self.act.gate_up, mlp.gate_up.outputs());
        self.linear(normed, &mlp.gate_up, gate_up)?;
        // Quantised with the activation, if down is in eight bits.
        let inputs = self.inputs_of(&mlp.down, LinearOutput::Bf16, self.act.activated)?;
        self.decoder.fused.glu(spec.activation, gate_up, inner, inputs)?;
        self.multiply(inputs, &mlp.down, LinearOutput::Bf16, out)
    }
}
