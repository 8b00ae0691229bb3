//! The blocks' operations as launches.

use half::bf16;
use plimsoll_device::Pod;
use plimsoll_device::cuda::{GpuError, GpuSlice};
use plimsoll_kernels::cuda::{
    DeltaArgs, DeltaKernels, Fp8Scaling, GpuAdded, GpuDeltaGates, GpuFp8Rows, GpuInputs, GpuLinear, GpuNorm,
    GpuResidual, GpuRows, LinearOutput, Linears,
};

use super::images::RowsOfImage;
use super::sum::DeltaSum;
use super::{Decoder, StepState};
use crate::blocks::{Beside, DeltaRule, LayerInput, Moe, Norms, Operations};
use crate::cuda::input::StepInput;
use crate::cuda::planners::AttentionKind;
use crate::cuda::scores::ScoreSlices;
use crate::cuda::step::Activations;
use crate::cuda::weights::{GpuLayer, GpuVector};
use crate::spec::{AttentionSpec, DeltaNetSpec, DenseMlpSpec, LayerSpec, MoeSpec, PerLayerSpec};
use crate::state::LayerPlace;
use crate::tables::LayerPage;

/// What is chosen for all layers of one specification, once for a step.
#[derive(Clone, Copy, Debug)]
pub(super) struct Kind {
    /// Of a layer with attention.
    pub(super) attention: Option<AttentionChoice>,
    /// Of what the mixer begins with.
    projections: Fusion,
    /// Of the MLP that every row goes through.
    gate_up: Fusion,
    /// All products from the mixer's output on are one launch.
    chains: bool,
    /// And so is what comes before, attention too, with layers that follow.
    pub(super) chains_whole: bool,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct AttentionChoice {
    /// Index of its work list.
    pub(super) planners: usize,
    /// Of its rotary positions: which kind, and which table.
    pub(super) rope: Option<[usize; 2]>,
}

/// What a linear layer's kernel does beside the product.
#[derive(Clone, Copy, Debug)]
struct Fusion {
    /// The norm of its input.
    norm: bool,
    output: LinearOutput,
}

impl Kind {
    /// Of layers like this one.
    pub(super) fn new(decoder: &Decoder, index: usize, rows: usize, state: &StepState) -> Self {
        let (layer, place) = (&decoder.weights.decoder.layers[index], state.places[index]);
        let attention = layer.spec.attention();
        let (linears, projections) = (&decoder.linears, layer.mixer.projections());
        Self {
            attention: attention.map(|spec| AttentionChoice::new(decoder, spec, state, place)),
            projections: Fusion::new(linears, rows, projections, LinearOutput::Bf16),
            gate_up: Self::gate_up(decoder, layer, rows),
            chains: decoder.chains(index, rows),
            chains_whole: rows == 1 && decoder.chains_whole(index, state),
        }
    }

    fn gate_up(decoder: &Decoder, layer: &GpuLayer, rows: usize) -> Fusion {
        let (Some(spec), Some(mlp)) = (layer.spec.mlp_of_all(), layer.mlp.of_all()) else {
            // Layers with routed experts alone never ask.
            return Fusion {
                norm: false,
                output: LinearOutput::Bf16,
            };
        };
        let (linears, gate_up, activation) = (&decoder.linears, &mlp.gate_up, spec.activation);
        let output = match linears.fuses_glu(rows, gate_up, activation) {
            true => LinearOutput::Glu(activation),
            false => LinearOutput::Bf16,
        };
        Fusion::new(linears, rows, gate_up, output)
    }
}

impl AttentionChoice {
    fn new(decoder: &Decoder, spec: &AttentionSpec, state: &StepState, place: LayerPlace) -> Self {
        let attention = AttentionKind::of(spec, place.page().slice_size, state.kv_element);
        let planners = state.inputs.planners();
        let at = planners.iter().position(|planners| planners.kind == attention);
        let rope = spec.rope.as_deref().map(|rope| {
            let ropes = decoder.weights.spec.ropes();
            let at = ropes.iter().position(|known| *known == rope);
            let at = at.expect("a decoder knows its layers' ropes");
            [at, rope.variant(state.max_model_len)]
        });
        Self {
            planners: at.expect("there are planners for every layer"),
            rope,
        }
    }
}

impl Fusion {
    fn new(linears: &Linears, rows: usize, linear: &GpuLinear, output: LinearOutput) -> Self {
        Self {
            norm: linears.fuses_norm(rows, linear, output),
            output,
        }
    }
}

/// A sum of the residual stream and what is added to it that nobody has asked for yet: the norm that follows makes it too.
#[derive(Debug)]
pub(super) struct Unsettled {
    /// The norm of what is added.
    pub(super) added: Option<GpuVector>,
    /// What the sum is multiplied by.
    pub(super) scalar: Option<GpuVector>,
    pub(super) eps: f32,
}

/// A step on its way through the layers: launches in order.
pub(super) struct Step<'a, 'b> {
    pub(super) decoder: &'b Decoder,
    pub(super) kinds: Vec<Kind>,
    pub(super) input: &'b StepInput,
    pub(super) state: &'b StepState,
    pub(super) scores: Option<&'b ScoreSlices<'b>>,
    /// Of a step that has any.
    pub(super) images: Option<RowsOfImage<'b>>,
    /// As wide as the widest layer needs.
    pub(super) act: Activations<'a>,
    /// How many rows are computed.
    pub(super) rows: usize,
    /// The first of them.
    pub(super) first: usize,
    /// Nothing is to be added to the residual stream yet.
    pub(super) is_fresh: bool,
    /// Layers that wait for what follows, to be one launch with it: one from its mixer's output on, or any number of whole ones.
    pub(super) chain: Vec<usize>,
    /// How far what is to be added to the residual stream has been summed.
    pub(super) sum: DeltaSum<'a>,
    /// What the residual stream becomes before anything else reads it.
    pub(super) unsettled: Option<Unsettled>,
    /// Only rows that are given out are computed.
    pub(super) are_given: bool,
    pub(super) layer: usize,
}

impl<'a, 'b> Step<'a, 'b> {
    pub(super) fn kind(&self) -> &Kind {
        &self.kinds[self.decoder.kind_of[self.layer]]
    }

    /// What is chosen for the layer's attention.
    pub(super) fn attention(&self) -> &AttentionChoice {
        let attention = self.kind().attention.as_ref();
        attention.expect("a layer with attention")
    }

    /// Where the layer's keys and values are.
    pub(super) fn page(&self) -> LayerPage {
        self.state.places[self.layer].page()
    }

    /// The output of the first product of the MLP, or shared expert, that every row goes through.
    pub(super) fn gate_up_output(&self) -> LinearOutput {
        self.kind().gate_up.output
    }

    pub(super) fn delta(&self) -> &'b DeltaKernels {
        let kernels = self.decoder.delta.as_ref();
        kernels.expect("they are loaded for models that need them")
    }

    /// The rows that are computed, closely packed, of `width` elements each.
    pub(super) fn rows<T: Pod>(&self, of: GpuSlice<'a, T>, width: usize) -> GpuSlice<'a, T> {
        of.range(self.first * width..(self.first + self.rows) * width)
    }

    /// Where a linear layer's inputs go: where they are quantised if it is one product that takes them so, else to `plain`.
    pub(super) fn inputs_of(
        &self,
        linear: &GpuLinear,
        output: LinearOutput,
        plain: GpuSlice<'a, bf16>,
    ) -> Result<GpuRows<'a>, GpuError> {
        let width = linear.inputs();
        let linears = &self.decoder.linears;
        Ok(match linears.input_scaling(self.rows, linear, output)? {
            Some(scaling) if linear.products().len() == 1 => self.quantised(width, scaling).into(),
            _ => self.rows(plain, width).into(),
        })
    }

    /// A linear layer of rows that are not quantised yet.
    pub(super) fn linear(
        &self,
        plain: GpuSlice<'a, bf16>,
        linear: &GpuLinear,
        out: GpuSlice<'a, bf16>,
    ) -> Result<(), GpuError> {
        self.product(plain, linear, LinearOutput::Bf16, out)
    }

    /// As [`Self::linear`], with this output.
    pub(super) fn product(
        &self,
        plain: GpuSlice<'a, bf16>,
        linear: &GpuLinear,
        output: LinearOutput,
        out: GpuSlice<'a, bf16>,
    ) -> Result<(), GpuError> {
        self.multiply(self.rows(plain, linear.inputs()).into(), linear, output, out)
    }

    /// A linear layer of rows that are as [`Self::inputs_of`] says, or not quantised yet.
    pub(super) fn multiply(
        &self,
        inputs: GpuRows<'a>,
        linear: &GpuLinear,
        output: LinearOutput,
        out: GpuSlice<'a, bf16>,
    ) -> Result<(), GpuError> {
        let linears = &self.decoder.linears;
        let mut taken = GpuInputs::from(inputs);
        if let (GpuRows::Bf16(plain), Some(scaling)) =
            (inputs, linears.input_scaling(self.rows, linear, output)?)
        {
            let (width, quantised) = (linear.inputs(), self.quantised(linear.inputs(), scaling));
            self.decoder.fused.quantise(plain, width, quantised)?;
            taken.fp8 = Some(quantised);
        }
        linears.forward_in(self.act.room, taken, linear, output, out)
    }

    /// Where rows of `width` inputs go that are quantised.
    pub(super) fn quantised(&self, width: usize, scaling: Fp8Scaling) -> GpuFp8Rows<'a> {
        GpuFp8Rows {
            values: self.act.quantised.range(0..self.rows * width),
            scales: self.act.scales.range(0..scaling.input_scales(self.rows, width)),
            scaling,
        }
    }

    /// The sum of the residual stream and what is added to it, and its norm.
    pub(super) fn add_norm(
        &mut self,
        norms: &Norms<'_, GpuVector>,
        normed: GpuRows<'a>,
    ) -> Result<(), GpuError> {
        let width = norms.weight.slice().len();
        let [hidden, delta] = [self.act.hidden, self.act.delta].map(|slice| self.rows(slice, width));
        if std::mem::take(&mut self.is_fresh) {
            return match self.unsettled.take() {
                Some(Unsettled {
                    added: Some(added),
                    scalar,
                    eps,
                }) if eps == norms.eps => {
                    let added = GpuAdded {
                        delta,
                        weight: added.slice(),
                        scalar: scalar.as_ref().map(GpuVector::slice),
                    };
                    self.sandwich(hidden, added, norm(norms), normed)
                }
                unsettled => {
                    self.unsettled = unsettled;
                    self.complete()?;
                    self.decoder.fused.rms_norm(hidden, norm(norms), normed)
                }
            };
        }
        match norms.added {
            None => self.add_and_norm(hidden, delta, norm(norms), normed),
            Some(added) => {
                let added = GpuAdded {
                    delta,
                    weight: added.slice(),
                    scalar: None,
                };
                self.sandwich(hidden, added, norm(norms), normed)
            }
        }
    }

    /// A linear layer of the norm of the sum of the residual stream and what is added to it, to rows of `width` elements: half by half,
    /// where the sum comes so.
    fn norm_linear(
        &mut self,
        norms: &Norms<'_, GpuVector>,
        linear: &GpuLinear,
        fusion: Fusion,
        out: GpuSlice<'a, bf16>,
        width: usize,
    ) -> Result<(), GpuError> {
        if !self.is_fresh
            && let DeltaSum::Sent(sent) = self.sum
        {
            return (0..2).try_for_each(|half| {
                self.sum = DeltaSum::Half(sent.halves[half]);
                self.of_half(sent.rows, half, |step| {
                    step.norm_product(norms, linear, fusion, out, width)
                })
            });
        }
        self.norm_product(norms, linear, fusion, out, width)
    }

    /// As [`Self::norm_linear`], of the rows at hand.
    fn norm_product(
        &mut self,
        norms: &Norms<'_, GpuVector>,
        linear: &GpuLinear,
        fusion: Fusion,
        out: GpuSlice<'a, bf16>,
        width: usize,
    ) -> Result<(), GpuError> {
        let linears = &self.decoder.linears;
        let (out, width) = (self.rows(out, width), linear.inputs());
        // The product makes the norm: that takes as many kernels as a norm that sums the experts and a plain product.
        if fusion.norm && !self.is_fresh && matches!(self.sum, DeltaSum::Experts(_)) {
            self.sum_delta()?;
        }
        // Where ranks are summed first, that kernel makes the norm.
        if fusion.norm && !self.is_fresh && self.sum.is_done() && norms.added.is_none() {
            let residual = GpuResidual {
                hidden: self.rows(self.act.hidden, width),
                delta: self.rows(self.act.delta, width),
                norm: norm(norms),
                sum: self.rows(self.act.normed, width),
            };
            linears.forward_norm(&residual, linear, fusion.output, out)?;
            std::mem::swap(&mut self.act.hidden, &mut self.act.normed);
            return Ok(());
        }
        let inputs = self.inputs_of(linear, fusion.output, self.act.normed)?;
        self.add_norm(norms, inputs)?;
        self.multiply(inputs, linear, fusion.output, out)
    }
}

pub(super) fn norm<'a>(norms: &Norms<'a, GpuVector>) -> GpuNorm<'a> {
    GpuNorm {
        weight: norms.weight.slice(),
        eps: norms.eps,
    }
}

impl Operations<GpuLinear, GpuVector> for Step<'_, '_> {
    type Error = GpuError;

    fn make_layer_inputs(
        &mut self,
        projection: &GpuLinear,
        norm: &GpuVector,
        eps: f32,
    ) -> Result<(), GpuError> {
        self.project_layer_inputs(projection, norm, eps)
    }

    fn begin_layer(&mut self, index: usize) {
        self.layer = index;
    }

    fn project(
        &mut self,
        norms: &Norms<'_, GpuVector>,
        linear: &GpuLinear,
        width: usize,
    ) -> Result<(), GpuError> {
        if self.launch_chain(Some((norms, linear)))? {
            return Ok(());
        }
        self.norm_linear(norms, linear, self.kind().projections, self.act.qkv, width)
    }

    fn write_kv(
        &mut self,
        layer: &LayerSpec,
        spec: &AttentionSpec,
        qk_norm: Option<&[GpuVector; 2]>,
    ) -> Result<(), GpuError> {
        match self.chains_whole() {
            true => Ok(()),
            false => self.put_kv(layer, spec, qk_norm),
        }
    }

    fn rotate_queries(
        &mut self,
        layer: &LayerSpec,
        spec: &AttentionSpec,
        q_norm: Option<&GpuVector>,
    ) -> Result<(), GpuError> {
        self.rotate(layer, spec, q_norm)
    }

    fn attend(&mut self, spec: &AttentionSpec, sinks: Option<&GpuVector>) -> Result<(), GpuError> {
        match self.chains_whole() {
            true => Ok(()),
            false => self.attend_to(spec, sinks),
        }
    }

    fn apply_delta_rule(
        &mut self,
        layer: &LayerSpec,
        spec: &DeltaNetSpec,
        rule: &DeltaRule<GpuVector>,
    ) -> Result<(), GpuError> {
        let Self { input, state, .. } = *self;
        let (LayerPlace::State(index), Some(states)) = (state.places[self.layer], input.states) else {
            unreachable!("a layer with a recurrence has states, and steps say where");
        };
        let [conv_states, head_states] = state.states.of(index);
        let layout = spec.layout;
        let scratch = self.act.gate_up.cast::<f32>();
        self.delta().forward(&DeltaArgs {
            layout,
            conv: rule.conv.slice(),
            gates: GpuDeltaGates {
                a_log: rule.a_log.slice(),
                dt_bias: rule.dt_bias.slice(),
                norm: rule.norm.slice(),
                eps: layer.norm.eps,
            },
            runs: state.inputs.device(states.runs),
            tiles: state.inputs.device(states.tiles),
            chunks: state.inputs.device(states.chunks),
            in_chunks: states.in_chunks,
            of_one_token: states.of_one_token,
            x: self.rows(self.act.qkv, layout.width()),
            conv_states,
            head_states,
            scratch: self.rows(scratch, DeltaKernels::scratch_floats(&layout)),
            out: self.rows(self.act.attended, layout.values()),
        })
    }

    fn rows_given(&self) -> usize {
        self.input.samples + self.input.scored
    }

    fn keep_given(&mut self, attended_width: usize) -> Result<(), GpuError> {
        let Some(sampled) = self.input.sample_at else {
            return Ok(());
        };
        let decoder = self.decoder;
        let width = decoder.weights.spec.hidden_size;
        let attended = self.rows(self.act.attended, attended_width);
        let hidden = self.rows(self.act.hidden, width);
        let sampled = (self.input.samples > 0).then(|| self.state.inputs.device(sampled));
        let mut first = 0;
        for at in sampled.into_iter().chain(self.scores.map(|scores| scores.at)) {
            let part = |width: usize| first * width..(first + at.len()) * width;
            // Each into memory that this layer has no more use for.
            decoder
                .fused
                .gather_rows(hidden, at, self.act.normed.range(part(width)))?;
            decoder
                .fused
                .gather_rows(attended, at, self.act.qkv.range(part(attended_width)))?;
            if let Some(own) = &decoder.weights.spec.per_layer {
                let (inputs, stride) = self.layer_input(own);
                let given = self.act.last_inputs.range(part(own.width));
                decoder.fused.gather_part(inputs, stride, at, given)?;
            }
            first += at.len();
        }
        self.are_given = true;
        let act = self.act;
        (self.act.hidden, self.act.normed, self.act.attended) = (act.normed, act.hidden, act.qkv);
        self.rows = self.rows_given();
        let layer = &decoder.weights.decoder.layers[self.layer];
        let kind = &mut self.kinds[decoder.kind_of[self.layer]];
        kind.gate_up = Kind::gate_up(decoder, layer, self.rows);
        kind.chains &= self.rows == 1;
        Ok(())
    }

    fn project_output(&mut self, output: &GpuLinear) -> Result<(), GpuError> {
        if self.chains_whole() || self.kind().chains && self.images.is_none() {
            self.chain.push(self.layer);
            return Ok(());
        }
        let width = output.outputs();
        self.add_in_halves(width, |step, delta| step.linear(step.act.attended, output, delta))
    }

    fn project_gated(
        &mut self,
        _: &DenseMlpSpec,
        norms: &Norms<'_, GpuVector>,
        gate_up: &GpuLinear,
    ) -> Result<(), GpuError> {
        if !self.chain.is_empty() {
            return Ok(());
        }
        let fusion = self.kind().gate_up;
        let out = match fusion.output {
            LinearOutput::Glu(_) => self.act.activated,
            _ => self.act.gate_up,
        };
        let width = gate_up.outputs() / fusion.output.stacked();
        self.norm_linear(norms, gate_up, fusion, out, width)
    }

    fn project_down(&mut self, mlp: &DenseMlpSpec, down: &GpuLinear) -> Result<(), GpuError> {
        if !self.chain.is_empty() {
            return Ok(());
        }
        let (inner, fusion) = (mlp.intermediate_size, self.kind().gate_up);
        debug_assert_eq!(inner, down.inputs(), "what is activated is what is projected");
        self.add_in_halves(down.outputs(), |step, delta| {
            let activated = step.act.activated;
            if let LinearOutput::Glu(_) = fusion.output {
                return step.linear(activated, down, delta);
            }
            // Quantised with the activation.
            let inputs = step.inputs_of(down, LinearOutput::Bf16, activated)?;
            let gate_up = step.rows(step.act.gate_up, 2 * inner);
            step.decoder.fused.glu(mlp.activation, gate_up, inner, inputs)?;
            step.multiply(inputs, down, LinearOutput::Bf16, delta)
        })
    }

    /// With what follows.
    fn sum_ranks(&mut self) -> Result<(), GpuError> {
        if self.decoder.all_reduce().is_some() && self.sum.is_done() {
            self.sum = DeltaSum::Rank;
        }
        Ok(())
    }

    fn experts(
        &mut self,
        spec: &MoeSpec,
        norms: &Norms<'_, GpuVector>,
        moe: &Moe<GpuLinear>,
    ) -> Result<(), GpuError> {
        if !self.chain.is_empty() {
            return Ok(());
        }
        let normed = self.rows(self.act.normed, moe.router.inputs());
        self.add_norm(norms, normed.into())?;
        self.route_to_experts(spec, moe, normed)
    }

    fn experts_beside(
        &mut self,
        spec: &MoeSpec,
        eps: f32,
        beside: &Beside<GpuLinear, GpuVector>,
    ) -> Result<(), GpuError> {
        self.add_experts(spec, eps, beside)
    }

    /// With what follows.
    fn settle(&mut self, added: Option<&GpuVector>, eps: f32) -> Result<(), GpuError> {
        if self.chain.is_empty() {
            let (added, scalar) = (added.cloned(), None);
            self.unsettled = Some(Unsettled { added, scalar, eps });
            self.is_fresh = true;
        }
        Ok(())
    }

    fn gate_layer_input(
        &mut self,
        spec: &PerLayerSpec,
        input: &LayerInput<GpuLinear, GpuVector>,
    ) -> Result<(), GpuError> {
        self.project_gated_input(spec, input)
    }

    fn scale(&mut self, scalar: &GpuVector) -> Result<(), GpuError> {
        if self.chain.is_empty() {
            let sum = self.unsettled.as_mut();
            sum.expect("a sum comes first").scalar = Some(scalar.clone());
        }
        Ok(())
    }

    fn add_features(&mut self, layer: usize) -> Result<(), GpuError> {
        let Some(images) = &self.images else { return Ok(()) };
        images.add_features(layer, self.act.hidden, self.rows)
    }

    fn finish(&mut self, norms: &Norms<'_, GpuVector>) -> Result<(), GpuError> {
        self.launch_chain(None)?;
        let width = norms.weight.slice().len();
        self.add_norm(norms, self.rows(self.act.normed, width).into())
    }
}
