mod head;

use half::bf16;
use plimsoll_core::{Component, KvConfig, Oom, StepError};
use plimsoll_device::Pod;
use plimsoll_device::cuda::{Gpu, GpuArena, GpuError, GpuSlab, GpuSlice};
use plimsoll_kernels::Activation;
use plimsoll_kernels::cuda::{
    DecodeArgs, DecodeKernels, FusedKernels, GpuKvWrite, GpuLinear, GpuNorm, GpuQkNorm, GpuResidual, GpuRope,
    GpuTokens, LinearOutput, LinearScratch, LinearUse, Linears, PrefillArgs, PrefillKernels, SampleKernels,
};

use super::input::{AttentionKind, StepInput, StepInputs};
use super::masks::Masks;
use super::output::Outputs;
use super::scores::{ScoreSlices, Scores};
use super::step::{Activations, StepLayout};
use super::vectors::Vectors;
use super::weights::{GpuLayer, GpuVector, GpuWeights};
use crate::blocks::{Norms, Operations, Widths};
use crate::spec::{AttentionSpec, DenseMlpSpec, LayerSpec};
use crate::tables::LayerPage;
use head::Head;

/// What the kernels of a step work on.
#[derive(Debug)]
pub(super) struct StepState {
    pub(super) kv: GpuSlab,
    pub(super) kv_config: KvConfig,
    /// Where each layer's keys and values are.
    pub(super) pages: Vec<LayerPage>,
    /// Longest context that is served, in tokens.
    pub(super) max_model_len: usize,
    pub(super) inputs: StepInputs,
    pub(super) outputs: Outputs,
    pub(super) masks: Masks,
    pub(super) scores: Scores,
    /// Of a model for embeddings.
    pub(super) vectors: Option<Vectors>,
    /// Of the attention of decoding runs; zero between launches.
    pub(super) counters: GpuSlab,
}

impl StepState {
    /// K and V of layer `column` of each page: `[num_pages][kv_heads][block_size][head_dim]` each.
    fn layer_kv(&self, column: usize, spec: &AttentionSpec) -> (GpuSlice<'_, bf16>, GpuSlice<'_, bf16>) {
        let KvConfig {
            num_pages,
            block_size,
            ..
        } = self.kv_config;
        let len = num_pages * block_size.tokens() * spec.kv_size();
        let (all, start) = (self.kv.slice(), 2 * column * len);
        (
            all.range(start..start + len),
            all.range(start + len..start + 2 * len),
        )
    }
}

/// Why a step could not be launched.
#[derive(Debug)]
pub(super) enum LaunchError {
    Oom(Oom),
    Gpu(GpuError),
}

impl From<Oom> for LaunchError {
    fn from(oom: Oom) -> Self {
        Self::Oom(oom)
    }
}

impl From<GpuError> for LaunchError {
    fn from(error: GpuError) -> Self {
        Self::Gpu(error)
    }
}

impl From<LaunchError> for StepError {
    fn from(error: LaunchError) -> Self {
        match error {
            LaunchError::Oom(oom) => Self::Oom(oom),
            LaunchError::Gpu(error) => Self::Failed(error.to_string()),
        }
    }
}

/// The network on a GPU.
#[derive(Debug)]
pub(super) struct Decoder {
    gpu: Gpu,
    weights: GpuWeights,
    /// The first layer of each distinct specification, and which of them each layer is like.
    kinds: Vec<usize>,
    kind_of: Vec<usize>,
    /// A model for embeddings has no head, and samples nothing.
    head: Option<Head>,
    fused: FusedKernels,
    linears: Linears,
    pub(super) decode: DecodeKernels,
    pub(super) prefill: PrefillKernels,
}

/// Numbers of rows that linear layers are measured for: those of decode steps, and of prompts.
const MEASURED_ROWS: [usize; 16] = [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 2048, 8192];
/// Most rows that are sampled from are fewer.
const MEASURED_HEAD_ROWS: usize = 256;

impl Decoder {
    /// Loads the other kernels.
    pub(super) fn new(gpu: &Gpu, weights: GpuWeights, fused: FusedKernels) -> Result<Self, LaunchError> {
        let workspace = gpu.alloc(Component::Runtime, Linears::WORKSPACE_BYTES)?;
        let layers = &weights.spec.layers;
        let like = |index: usize| layers[..index].iter().position(|layer| *layer == layers[index]);
        let kinds: Vec<usize> = (0..layers.len()).filter(|&index| like(index).is_none()).collect();
        let kind_of = |index: usize| kinds.iter().position(|&first| layers[first] == layers[index]);
        let mut decoder = Self {
            gpu: gpu.clone(),
            kind_of: (0..layers.len()).filter_map(kind_of).collect(),
            kinds,
            head: match &weights.decoder.head {
                None => None,
                Some(linear) => Some(Head {
                    linear: linear.clone(),
                    sampler: SampleKernels::load(gpu)?,
                }),
            },
            weights,
            fused,
            linears: Linears::load(gpu, workspace)?,
            decode: DecodeKernels::load(gpu)?,
            prefill: PrefillKernels::load(gpu)?,
        };
        decoder.measure_linears()?;
        Ok(decoder)
    }

    /// Finds the fastest way for each linear layer and number of rows.
    fn measure_linears(&mut self) -> Result<(), LaunchError> {
        let GpuWeights { spec, decoder, .. } = &self.weights;
        let widths = Widths::of(spec);
        let widest = widths.hidden.max(widths.activated).max(widths.attended);
        let outputs = widths.gate_up.max(widths.qkv).max(widths.hidden);
        let most = MEASURED_ROWS[MEASURED_ROWS.len() - 1];
        let head: Vec<_> = self.head.iter().map(|head| &head.linear).collect();
        let logits = head.len() * MEASURED_HEAD_ROWS * spec.vocab_size;
        let bytes = (most * outputs * size_of::<bf16>()).max(logits * size_of::<f32>());
        // Beside the weights there is room for this, or there would be none for KV.
        let x = self
            .gpu
            .alloc(Component::Arena, most * widest * size_of::<bf16>())?;
        let out = self.gpu.alloc(Component::Arena, bytes)?;
        self.fused.fill_random(x.slice(), 0, 1.0)?;
        let scratch = LinearScratch {
            x: x.slice(),
            out: out.slice(),
        };
        let layers = &decoder.layers;
        let qkv = by_shape(layers, |layer| &layer.mixer.qkv);
        let output = by_shape(layers, |layer| &layer.mixer.output);
        let gate_up = by_shape(layers, |layer| &layer.mlp.gate_up);
        let down = by_shape(layers, |layer| &layer.mlp.down);
        let plain = |layers, output| LinearUse {
            layers,
            output,
            rows: &MEASURED_ROWS,
        };
        let mut uses = Vec::new();
        let activations = [Activation::Silu, Activation::GeluTanh];
        let used = |activation: &Activation| {
            let mut mlps = spec.layers.iter().map(|layer| layer.dense_mlp());
            mlps.any(|mlp| mlp.activation == *activation)
        };
        for (groups, kind) in [
            (&qkv, LinearOutput::Bf16),
            (&output, LinearOutput::Bf16),
            (&gate_up, LinearOutput::Bf16),
            (&down, LinearOutput::Bf16),
        ] {
            uses.extend(groups.iter().map(|layers| plain(layers, kind)));
        }
        for activation in activations.into_iter().filter(used) {
            let kind = LinearOutput::Glu(activation);
            uses.extend(gate_up.iter().map(|layers| plain(layers, kind)));
        }
        if !head.is_empty() {
            uses.push(LinearUse {
                rows: MEASURED_ROWS
                    .split_at(MEASURED_ROWS.partition_point(|&rows| rows <= MEASURED_HEAD_ROWS))
                    .0,
                ..plain(&head, LinearOutput::F32)
            });
        }
        self.linears.measure(&uses, scratch)?;
        for choice in self.linears.choices() {
            tracing::debug!(%choice, "linear layer");
        }
        Ok(())
    }

    /// Where it runs.
    pub(super) fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// A stored tensor as it lies in device memory.
    pub(super) fn tensor(&self, name: &str) -> Result<Option<Vec<f32>>, GpuError> {
        self.weights.tensor(&self.gpu, name)
    }

    /// Launches a whole step: the batch through all layers, its KV into the cache, logits and samples of the rows that are
    /// asked for, or vectors. With `logits` those are taken out instead of sampled from, which waits for them. Rows that wait
    /// for masks are not sampled from: that is [`Self::sample_deferred`]'s.
    pub(super) fn step(
        &self,
        input: &StepInput,
        state: &mut StepState,
        arena: &mut GpuArena,
        logits: Option<&mut Vec<f32>>,
    ) -> Result<(), LaunchError> {
        let spec = &self.weights.spec;
        let (layout, memory) = self.memory(input, state, arena)?;
        // SAFETY: the slot is packed again when this step has ended.
        let scores = unsafe { state.scores.send(input, layout.scores.within(memory))? };
        let act = layout.activations(memory);
        let Some(normed) = self.forward(input, state, scores.as_ref(), act)? else {
            return Ok(());
        };
        let given = layout.given.within(memory);
        let Some(head) = &self.head else {
            return self.pool(input, state, normed, given);
        };
        let (width, vocab) = (spec.hidden_size, spec.vocab_size);
        if let Some(scores) = scores {
            let rows = normed.range(input.samples * width..normed.len());
            self.score(head, input, state, rows, &scores, given)?;
            state.scores.fetch(input.slot, &scores)?;
        }
        if input.samples > 0 {
            let found = given.range(0..input.samples * vocab);
            let rows = normed.range(0..input.samples * width);
            self.linears.forward_f32(rows, &head.linear, found)?;
            match logits {
                Some(out) => *out = self.gpu.download(found)?,
                None if input.deferred.is_some() => {}
                None => self.sample(head, input, state, found)?,
            }
        }
        Ok(())
    }

    /// All that a step takes from its arena.
    fn memory<'a>(
        &self,
        input: &StepInput,
        state: &StepState,
        arena: &'a mut GpuArena,
    ) -> Result<(StepLayout, GpuSlice<'a, u8>), Oom> {
        arena.reset();
        let layout = StepLayout::of(&self.weights.spec, input, state.inputs.planners());
        let layout = layout.ok_or_else(|| self.gpu.budget().oom(Component::Arena, u64::MAX))?;
        Ok((layout, arena.alloc(layout.bytes)?))
    }

    /// Samples the rows of the step launched last that waited for masks, which were sent. `arena` has not been used since.
    pub(super) fn sample_deferred(
        &self,
        input: &StepInput,
        state: &mut StepState,
        arena: &mut GpuArena,
    ) -> Result<(), LaunchError> {
        let Some(head) = &self.head else { return Ok(()) };
        // The same memory again, also under a graph.
        let (layout, memory) = self.memory(input, state, arena)?;
        let logits = layout.given.within(memory);
        let logits = logits.range(0..input.samples * self.weights.spec.vocab_size);
        self.sample(head, input, state, logits)?;
        Ok(())
    }

    /// Runs all layers. Returns the normalised rows that are given out, if there are any: first those to sample from or to
    /// pool, then those to be scored.
    fn forward<'a>(
        &self,
        input: &StepInput,
        state: &StepState,
        scores: Option<&ScoreSlices<'_>>,
        act: Activations<'a>,
    ) -> Result<Option<GpuSlice<'a, bf16>>, LaunchError> {
        let GpuWeights { spec, decoder, .. } = &self.weights;
        let tokens = state.inputs.device(input.tokens);
        let tokens = GpuTokens {
            tokens,
            prev_sampled: state.outputs.sampled(),
            resolved: tokens,
        };
        self.fused.embedding(
            decoder.embedding.weight(),
            tokens,
            spec.embedding_scale,
            act.hidden,
        )?;
        let kinds = self.kinds.iter().map(|&first| {
            let layer = &decoder.layers[first];
            Kind::new(self, layer, input.rows, state)
        });
        let mut step = Step {
            decoder: self,
            kinds: kinds.collect(),
            input,
            state,
            scores,
            act,
            rows: input.rows,
            is_fresh: true,
            layer: 0,
        };
        decoder.forward(spec, &mut step)?;
        let given = step.rows_given();
        Ok((given > 0).then(|| step.act.normed.range(0..given * spec.hidden_size)))
    }
}

/// Layers of one shape, whose weights a measurement takes in turn.
fn by_shape<'a>(
    layers: &'a [GpuLayer],
    pick: impl Fn(&'a GpuLayer) -> &'a GpuLinear,
) -> Vec<Vec<&'a GpuLinear>> {
    let mut groups: Vec<Vec<&GpuLinear>> = Vec::new();
    for linear in layers.iter().map(pick) {
        match groups.iter_mut().find(|group| group[0].is_like(linear)) {
            Some(group) => group.push(linear),
            None => groups.push(vec![linear]),
        }
    }
    groups
}

/// What is chosen for all layers of one specification, once for a step.
#[derive(Clone, Copy, Debug)]
struct Kind {
    /// Index of its work list.
    attention: usize,
    /// Of its rotary positions: which kind, and which table.
    rope: Option<[usize; 2]>,
    qkv: Fusion,
    gate_up: Fusion,
}

/// What a linear layer's kernel does beside the product.
#[derive(Clone, Copy, Debug)]
struct Fusion {
    /// The norm of its input.
    norm: bool,
    output: LinearOutput,
}

impl Kind {
    fn new(decoder: &Decoder, layer: &GpuLayer, rows: usize, state: &StepState) -> Self {
        let spec = layer.spec.attention();
        let attention = AttentionKind::of(spec, state.kv_config.block_size);
        let planners = state.inputs.planners();
        let at = planners.iter().position(|planners| planners.kind == attention);
        let rope = spec.rope.as_deref().map(|rope| {
            let ropes = decoder.weights.spec.ropes();
            let at = ropes.iter().position(|known| *known == rope);
            let at = at.expect("a decoder knows its layers' ropes");
            [at, rope.variant(state.max_model_len)]
        });
        Self {
            attention: at.expect("there are planners for every layer"),
            rope,
            qkv: Fusion::new(&decoder.linears, rows, &layer.mixer.qkv, LinearOutput::Bf16),
            gate_up: Self::gate_up(decoder, layer, rows),
        }
    }

    fn gate_up(decoder: &Decoder, layer: &GpuLayer, rows: usize) -> Fusion {
        let (linears, gate_up) = (&decoder.linears, &layer.mlp.gate_up);
        let activation = layer.spec.dense_mlp().activation;
        let output = match linears.fuses_glu(rows, gate_up, activation) {
            true => LinearOutput::Glu(activation),
            false => LinearOutput::Bf16,
        };
        Fusion::new(linears, rows, gate_up, output)
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

/// A step on its way through the layers: launches in order.
struct Step<'a, 'b> {
    decoder: &'b Decoder,
    kinds: Vec<Kind>,
    input: &'b StepInput,
    state: &'b StepState,
    scores: Option<&'b ScoreSlices<'b>>,
    /// As wide as the widest layer needs.
    act: Activations<'a>,
    /// Rows that are computed.
    rows: usize,
    /// Nothing is to be added to the residual stream yet.
    is_fresh: bool,
    layer: usize,
}

impl<'a> Step<'a, '_> {
    fn kind(&self) -> &Kind {
        &self.kinds[self.decoder.kind_of[self.layer]]
    }

    /// The first `width` elements' worth of each row, closely packed.
    fn rows<T: Pod>(&self, of: GpuSlice<'a, T>, width: usize) -> GpuSlice<'a, T> {
        of.range(0..self.rows * width)
    }

    /// The sum of the residual stream and what is added to it, and its norm.
    fn add_norm(&mut self, norms: &Norms<'_, GpuVector>) -> Result<(), GpuError> {
        let width = norms.weight.slice().len();
        let [hidden, delta, normed] =
            [self.act.hidden, self.act.delta, self.act.normed].map(|slice| self.rows(slice, width));
        let fused = &self.decoder.fused;
        match norms.added {
            _ if std::mem::take(&mut self.is_fresh) => fused.rms_norm(hidden, norm(norms), normed),
            None => fused.add_rms_norm(hidden, delta, norm(norms), normed),
            Some(added) => fused.sandwich_norm(hidden, delta, added.slice(), norm(norms), normed),
        }
    }

    /// A linear layer of the norm of the sum of the residual stream and what is added to it.
    fn norm_linear(
        &mut self,
        norms: &Norms<'_, GpuVector>,
        linear: &GpuLinear,
        fusion: Fusion,
        out: GpuSlice<'a, bf16>,
    ) -> Result<(), GpuError> {
        let linears = &self.decoder.linears;
        let width = linear.inputs();
        if fusion.norm && !self.is_fresh && norms.added.is_none() {
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
        self.add_norm(norms)?;
        let normed = self.rows(self.act.normed, width);
        match fusion.output {
            LinearOutput::Glu(activation) => linears.forward_glu(normed, linear, activation, out),
            _ => linears.forward(normed, linear, out),
        }
    }
}

fn norm<'a>(norms: &Norms<'a, GpuVector>) -> GpuNorm<'a> {
    GpuNorm {
        weight: norms.weight.slice(),
        eps: norms.eps,
    }
}

impl Operations<GpuLinear, GpuVector> for Step<'_, '_> {
    type Error = GpuError;

    fn begin_layer(&mut self, index: usize) {
        self.layer = index;
    }

    fn project_qkv(&mut self, norms: &Norms<'_, GpuVector>, qkv: &GpuLinear) -> Result<(), GpuError> {
        let out = self.rows(self.act.qkv, qkv.outputs());
        self.norm_linear(norms, qkv, self.kind().qkv, out)
    }

    /// Queries stay in their place.
    fn write_kv(&mut self, layer: &LayerSpec, qk_norm: Option<&[GpuVector; 2]>) -> Result<(), GpuError> {
        let (spec, Self { input, state, .. }) = (layer.attention(), &*self);
        let norm = qk_norm.map(|[q, k]| GpuQkNorm {
            q: q.slice(),
            k: k.slice(),
            eps: layer.norm.eps,
        });
        let weights = &self.decoder.weights;
        let table = self.kind().rope.map(|[rope, table]| &weights.ropes[rope][table]);
        let rope = GpuRope {
            positions: state.inputs.device(input.positions),
            turns: table.map_or(weights.no_turns(), |table| table.turns.slice()),
            factor: table.map_or(1.0, |table| table.factor),
            query_scale: spec.rope.as_deref().and_then(|rope| rope.query_scale),
        };
        let page = state.pages[self.layer];
        let (k, v) = state.layer_kv(page.column, spec);
        let write = GpuKvWrite {
            k,
            v,
            slots: state.inputs.device(input.slots[page.table]),
            kv_heads: spec.kv_heads,
            block_size: state.kv_config.block_size.tokens(),
            head_dim: spec.head_dim,
        };
        let qkv = self.rows(self.act.qkv, spec.qkv_size());
        self.decoder.fused.qk_norm_rope_kv_write(qkv, norm, rope, write)
    }

    fn attend(&mut self, spec: &AttentionSpec) -> Result<(), GpuError> {
        let Self { input, state, .. } = *self;
        let page = state.pages[self.layer];
        let (k, v) = state.layer_kv(page.column, spec);
        let (inputs, at) = (&state.inputs, self.kind().attention);
        let planners = &inputs.planners()[at];
        let blocks = inputs.device(input.blocks);
        let (q, out) = (
            self.rows(self.act.qkv, spec.qkv_size()),
            self.rows(self.act.attended, spec.q_size()),
        );
        if let Some(decode) = &input.decode {
            let (header, items) = decode.work[at];
            let args = DecodeArgs {
                q,
                q_stride: spec.qkv_size(),
                k,
                v,
                runs: inputs.device(decode.runs[page.table]),
                blocks,
                header: inputs.device(header),
                items: inputs.device(items),
                out,
                scratch: self.act.scratch,
                counters: state.counters.slice(),
                scale: spec.scale,
            };
            self.decoder.decode.forward(&planners.decode, &args)?;
        }
        if let Some(prefill) = &input.prefill {
            let (plan, items) = prefill.work[at];
            let args = PrefillArgs {
                q,
                q_stride: spec.qkv_size(),
                k,
                v,
                runs: inputs.device(prefill.runs[page.table]),
                blocks,
                items: inputs.device(items),
                out,
                scratch: self.act.scratch,
                scale: spec.scale,
            };
            self.decoder.prefill.forward(&planners.prefill, plan, &args)?;
        }
        Ok(())
    }

    fn rows_given(&self) -> usize {
        self.input.samples + self.input.scored
    }

    fn keep_given(&mut self, spec: &AttentionSpec) -> Result<(), GpuError> {
        let Some(sampled) = self.input.sample_at else {
            return Ok(());
        };
        let decoder = self.decoder;
        let width = decoder.weights.spec.hidden_size;
        let attended = self.rows(self.act.attended, spec.q_size());
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
                .gather_rows(attended, at, self.act.qkv.range(part(spec.q_size())))?;
            first += at.len();
        }
        let act = self.act;
        (self.act.hidden, self.act.normed, self.act.attended) = (act.normed, act.hidden, act.qkv);
        self.rows = self.rows_given();
        let layer = &decoder.weights.decoder.layers[self.layer];
        self.kinds[decoder.kind_of[self.layer]].gate_up = Kind::gate_up(decoder, layer, self.rows);
        Ok(())
    }

    fn project_output(&mut self, spec: &AttentionSpec, output: &GpuLinear) -> Result<(), GpuError> {
        let attended = self.rows(self.act.attended, spec.q_size());
        let delta = self.rows(self.act.delta, output.outputs());
        self.decoder.linears.forward(attended, output, delta)
    }

    fn project_gated(
        &mut self,
        mlp: &DenseMlpSpec,
        norms: &Norms<'_, GpuVector>,
        gate_up: &GpuLinear,
    ) -> Result<(), GpuError> {
        let fusion = self.kind().gate_up;
        let activated = self.rows(self.act.activated, mlp.intermediate_size);
        if fusion.output != LinearOutput::Bf16 {
            return self.norm_linear(norms, gate_up, fusion, activated);
        }
        let out = self.rows(self.act.gate_up, gate_up.outputs());
        self.norm_linear(norms, gate_up, fusion, out)?;
        self.decoder
            .fused
            .glu(mlp.activation, out, mlp.intermediate_size, activated)
    }

    fn project_down(&mut self, mlp: &DenseMlpSpec, down: &GpuLinear) -> Result<(), GpuError> {
        let activated = self.rows(self.act.activated, mlp.intermediate_size);
        let delta = self.rows(self.act.delta, down.outputs());
        self.decoder.linears.forward(activated, down, delta)
    }

    fn finish(&mut self, norms: &Norms<'_, GpuVector>) -> Result<(), GpuError> {
        self.add_norm(norms)
    }
}
