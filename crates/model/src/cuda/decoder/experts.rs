//! Layers with experts as launches.

use half::bf16;
use plimsoll_device::cuda::{GpuError, GpuSlice};
use plimsoll_kernels::ExpertActivation;
use plimsoll_kernels::cuda::{
    GpuExpertLoads, GpuExpertOutputs, GpuLinear, GpuRouter, GpuRoutes, GpuRows, LinearOutput,
};

use super::layers::Step;
use super::sum::DeltaSum;
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
        let (routes, mut gates) = self.route(
            spec,
            router,
            normed,
            moe.shared.as_ref().map(|shared| &shared.gate),
        )?;
        self.begin_experts(spec, router, &routes, normed)?;
        let delta = self.rows(self.act.delta, moe.router.inputs());
        if let (Some(spec), Some(shared)) = (&spec.shared, &moe.shared) {
            if !routes.shared {
                // Where the sum of all experts takes it up.
                self.shared_expert(spec, &shared.mlp, normed, delta)?;
            }
            if gates.is_none() {
                // The router's logits have been used.
                let found = gates.insert(self.gates());
                self.decoder.linears.forward_f32(normed, &shared.gate, *found)?;
            }
        }
        let outputs = self.end_experts(spec, routes, gates)?;
        if self.decoder.all_reduce().is_some() {
            return self.of_experts().kernels.combine(&outputs, delta);
        }
        // With what follows.
        self.sum = DeltaSum::Experts(outputs);
        Ok(())
    }

    /// Sends rows to experts by the router's product with them; of one row, only computes the logits by which
    /// [`Self::begin_experts`] does. Returns where they go, and the gates of the shared expert if the same kernel computes them.
    pub(super) fn route(
        &self,
        spec: &MoeSpec,
        router: GpuRouter<'_>,
        x: GpuSlice<'a, bf16>,
        gate: Option<&GpuLinear>,
    ) -> Result<(GpuRoutes<'a>, Option<GpuSlice<'a, f32>>), GpuError> {
        let (experts, linears) = (self.of_experts(), &self.decoder.linears);
        let layer = experts.layer(self.layer);
        let tile = experts.kernels.tile(&layer.gate_up, self.rows * spec.top_k);
        let mut routes = self.act.experts.routes(spec, self.rows, tile);
        let shared = spec.shared.as_ref();
        routes.shared = shared
            .is_some_and(|shared| spec.activation == ExpertActivation::Glu(shared.activation))
            && experts.kernels.shares(&layer.gate_up, &layer.down, &routes);
        if experts.kernels.fuses_router(&layer.router, &routes) {
            let gate = gate
                .filter(|gate| experts.kernels.fuses_gate(gate))
                .map(|gate| (gate, self.gates()));
            let counted = self.counted(&routes);
            experts
                .kernels
                .route_inputs(x, &layer.router, router, &counted, gate)?;
            return Ok((routes, gate.map(|(_, gates)| gates)));
        }
        let logits = self.logits(spec);
        linears.forward_f32(x, &layer.router, logits)?;
        if self.rows > 1 {
            experts.kernels.route(logits, router, &self.counted(&routes))?;
        }
        Ok((routes, None))
    }

    /// The same, for the kernels that find them: these count the rows of each expert.
    fn counted<'c>(&'c self, routes: &GpuRoutes<'c>) -> GpuRoutes<'c> {
        let counts = self.state.loads.of(self.layer);
        GpuRoutes {
            loads: counts.map(|counts| GpuExpertLoads {
                counts,
                rows: self.state.inputs.device(self.input.real_rows),
            }),
            ..*routes
        }
    }

    /// Where those of the shared expert go: where the router's logits were, if there were any.
    fn gates(&self) -> GpuSlice<'a, f32> {
        self.act.experts.logits.range(0..self.rows)
    }

    fn logits(&self, spec: &MoeSpec) -> GpuSlice<'a, f32> {
        self.act.experts.logits.range(0..self.rows * spec.experts)
    }

    /// Makes the experts' first projection of the rows that [`Self::route`] has sent to them.
    pub(super) fn begin_experts(
        &self,
        spec: &MoeSpec,
        router: GpuRouter<'_>,
        routes: &GpuRoutes<'a>,
        normed: GpuSlice<'a, bf16>,
    ) -> Result<(), GpuError> {
        let experts = self.of_experts();
        let gate_up = &experts.layer(self.layer).gate_up;
        let mut x = GpuRows::from(normed);
        if let Some(scaling) = experts.kernels.input_scaling(gate_up, routes) {
            let quantised = self.quantised(gate_up.inputs(), scaling);
            self.decoder.fused.quantise(normed, gate_up.inputs(), quantised)?;
            x = quantised.into();
        }
        let [out, _] = self.activated(spec, routes);
        if self.rows > 1 {
            return experts.kernels.gate_up(x, gate_up, spec.activation, routes, out);
        }
        let (logits, routes) = ((self.logits(spec), router), self.counted(routes));
        experts
            .kernels
            .route_gate_up(x, logits, gate_up, spec.activation, &routes, out)
    }

    /// Where the first projection's outputs go, and where the second one takes its inputs from. These are quantised if it multiplies in eight
    /// bits; both places are the same if the first projection quantises its own outputs.
    fn activated(&self, spec: &MoeSpec, routes: &GpuRoutes<'_>) -> [GpuRows<'a>; 2] {
        let (places, inner) = (self.places(spec, routes), spec.intermediate_size);
        let (experts, act) = (self.of_experts(), self.act.experts);
        let layer = experts.layer(self.layer);
        let plain = GpuRows::from(act.activated.range(0..places * inner));
        let Some(scaling) = experts.kernels.input_scaling(&layer.down, routes) else {
            return [plain, plain];
        };
        let quantised = GpuRows::from(act.quantised(places, inner, scaling));
        match experts.kernels.output_scaling(&layer.gate_up, routes) == Some(scaling) {
            true => [quantised, quantised],
            false => [plain, quantised],
        }
    }

    /// The experts' second projection, whose outputs are still to be summed.
    pub(super) fn end_experts(
        &self,
        spec: &MoeSpec,
        routes: GpuRoutes<'a>,
        gates: Option<GpuSlice<'a, f32>>,
    ) -> Result<GpuExpertOutputs<'a>, GpuError> {
        let (experts, act) = (self.of_experts(), self.act.experts);
        let down = &experts.layer(self.layer).down;
        let x = act.out.range(0..self.places(spec, &routes) * down.outputs());
        let [given, taken] = self.activated(spec, &routes);
        if let (GpuRows::Bf16(plain), GpuRows::Fp8(quantised)) = (given, taken) {
            self.decoder.fused.quantise(plain, down.inputs(), quantised)?;
        }
        experts.kernels.down(taken, down, &routes, x)?;
        Ok(GpuExpertOutputs { x, routes, gates })
    }

    /// Rows of the experts' products.
    fn places(&self, spec: &MoeSpec, routes: &GpuRoutes<'_>) -> usize {
        self.rows * (spec.top_k + usize::from(routes.shared))
    }

    pub(super) fn of_experts(&self) -> &'_ Experts {
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
        let inner = spec.intermediate_size;
        if let output @ LinearOutput::Glu(_) = self.gate_up_output() {
            let activated = self.rows(self.act.activated, inner);
            self.product(normed, &mlp.gate_up, output, activated)?;
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
