//! Layers with experts as launches.

use half::bf16;
use plimsoll_device::cuda::{GpuError, GpuSlice};
use plimsoll_kernels::cuda::{GpuLinear, GpuRouter, GpuRoutes, LinearOutput};

use super::layers::Step;
use crate::blocks::{DenseMlp, Moe};
use crate::cuda::experts::Experts;
use crate::spec::{DenseMlpSpec, MoeSpec};

impl<'a> Step<'a, '_> {
    /// From normalised rows through each row's experts to what is added to the residual stream.
    pub(super) fn route_to_experts(
        &mut self,
        spec: &MoeSpec,
        moe: &Moe<GpuLinear>,
        normed: GpuSlice<'a, bf16>,
    ) -> Result<(), GpuError> {
        let router = GpuRouter::plain(moe.router.bias(), spec.softmax);
        let routes = self.choose_experts(spec, router, normed)?;
        let delta = self.rows(self.act.delta, moe.router.inputs());
        let mut gates = None;
        if let (Some(spec), Some(shared)) = (&spec.shared, &moe.shared) {
            // Where the sum of all experts takes it up. The router's logits have been used.
            self.shared_expert(spec, &shared.mlp, normed, delta)?;
            let found = gates.insert(self.act.experts.logits.range(0..self.rows));
            self.decoder.linears.forward_f32(normed, &shared.gate, *found)?;
        }
        self.sum_experts(spec, &routes, normed, gates, delta)
    }

    /// Which experts rows go to.
    pub(super) fn choose_experts(
        &self,
        spec: &MoeSpec,
        router: GpuRouter<'_>,
        normed: GpuSlice<'a, bf16>,
    ) -> Result<GpuRoutes<'a>, GpuError> {
        let (experts, act) = (self.of_experts(), self.act.experts);
        let routes = act.routes(spec, self.rows);
        let logits = act.logits.range(0..self.rows * spec.experts);
        let linear = &experts.layer(self.layer).router;
        self.decoder.linears.forward_f32(normed, linear, logits)?;
        experts.kernels.route(logits, router, &routes)?;
        Ok(routes)
    }

    /// The sums of what rows' experts make of them. With `gates`, what is in `out` is added, times their sigmoids.
    pub(super) fn sum_experts(
        &self,
        spec: &MoeSpec,
        routes: &GpuRoutes<'a>,
        normed: GpuSlice<'a, bf16>,
        gates: Option<GpuSlice<'a, f32>>,
        out: GpuSlice<'a, bf16>,
    ) -> Result<(), GpuError> {
        let (Experts { kernels, .. }, act) = (self.of_experts(), self.act.experts);
        let layer = self.of_experts().layer(self.layer);
        let places = self.rows * spec.top_k;
        let activated = act.activated.range(0..places * spec.intermediate_size);
        kernels.gate_up(normed, &layer.gate_up, spec.activation, routes, activated)?;
        let of_experts = act.out.range(0..places * layer.down.outputs());
        kernels.down(activated, &layer.down, routes, of_experts)?;
        kernels.combine(of_experts, routes, gates, out)
    }

    fn of_experts(&self) -> &'_ Experts {
        let experts = self.decoder.experts.as_ref();
        experts.expect("a model with experts has them")
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
