mod head;

use half::bf16;
use plimsoll_core::{Component, KvConfig};
use plimsoll_device::cuda::{DeviceError, DryGpuArena, Gpu, GpuArena, GpuError, GpuSlab, GpuSlice};
use plimsoll_kernels::Activation;
use plimsoll_kernels::cuda::{
    DecodeArgs, DecodeKernels, FusedKernels, GpuKvWrite, GpuLinear, GpuNorm, GpuQkNorm, GpuResidual, GpuRope,
    GpuTokens, LinearOutput, LinearScratch, LinearUse, Linears, PrefillArgs, PrefillKernels, SampleKernels,
};

use super::input::{StepInput, StepInputs, WindowPlanners, attention_scratch};
use super::masks::Masks;
use super::output::Outputs;
use super::scores::{SCORE_ROWS, ScoreLayout, ScoreSlices, Scores};
use super::vectors::Vectors;
use super::weights::{GpuLayer, GpuLinears, GpuWeights};
use crate::footprint::StepSize;
use crate::{DecoderSpec, OutputHead};
use head::Head;

/// What the kernels of a step work on.
#[derive(Debug)]
pub(super) struct StepState {
    pub(super) kv: GpuSlab,
    pub(super) kv_config: KvConfig,
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
    /// K and V of block `index`: `[num_blocks][kv_heads][block_size][head_dim]` each.
    fn layer_kv(&self, spec: &DecoderSpec, index: usize) -> (GpuSlice<'_, bf16>, GpuSlice<'_, bf16>) {
        let len = self.kv_config.capacity_tokens() * spec.kv_size();
        let (all, start) = (self.kv.slice(), 2 * index * len);
        (
            all.range(start..start + len),
            all.range(start + len..start + 2 * len),
        )
    }
}

/// The network on a GPU: the launches of a step, in order.
#[derive(Debug)]
pub(super) struct Decoder {
    gpu: Gpu,
    weights: GpuWeights,
    /// Views of `weights`, by block.
    blocks: Vec<GpuLinears>,
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

/// Activations of a step, in its arena; `[rows, n]` each.
#[derive(Clone, Copy)]
struct Activations<'a> {
    /// The residual stream.
    hidden: GpuSlice<'a, bf16>,
    normed: GpuSlice<'a, bf16>,
    /// What is to be added to the residual stream.
    delta: GpuSlice<'a, bf16>,
    qkv: GpuSlice<'a, bf16>,
    attended: GpuSlice<'a, bf16>,
    gate_up: GpuSlice<'a, bf16>,
    activated: GpuSlice<'a, bf16>,
    /// Partial results of attention, `f32`, not by row.
    scratch: GpuSlice<'a, f32>,
}

impl<'a> Activations<'a> {
    /// The first `rows` rows of all.
    fn front(&self, spec: &DecoderSpec, rows: usize) -> Self {
        let (width, inner) = (spec.hidden_size, spec.intermediate_size);
        Self {
            hidden: self.hidden.range(0..rows * width),
            normed: self.normed.range(0..rows * width),
            delta: self.delta.range(0..rows * width),
            qkv: self.qkv.range(0..rows * qkv_size(spec)),
            attended: self.attended.range(0..rows * spec.q_size()),
            gate_up: self.gate_up.range(0..rows * 2 * inner),
            activated: self.activated.range(0..rows * inner),
            scratch: self.scratch,
        }
    }
}

/// Outputs of the fused projection.
fn qkv_size(spec: &DecoderSpec) -> usize {
    spec.q_size() + 2 * spec.kv_size()
}

/// Elements of a row of each activation that outlives the blocks: the residual stream, its norm.
fn lasting_widths(spec: &DecoderSpec) -> [usize; 2] {
    [spec.hidden_size; 2]
}

/// Elements of a row of each other activation, in the order in which a step takes them from its arena.
fn layer_widths(spec: &DecoderSpec) -> [usize; 5] {
    let inner = spec.intermediate_size;
    [spec.hidden_size, qkv_size(spec), spec.q_size(), 2 * inner, inner]
}

/// Rows whose logits exist at one time: scored rows some at a time, then those to sample from all together.
fn logit_rows(step: StepSize) -> usize {
    match step.scored {
        0 => step.samples,
        _ => step.samples.max(step.tokens.min(SCORE_ROWS)),
    }
}

/// Counts the allocations of [`Decoder::step`] for a step of this size, padding included; `None` if no memory could hold
/// them.
pub(super) fn count_step(
    spec: &DecoderSpec,
    step: StepSize,
    planners: &[WindowPlanners],
    arena: &mut DryGpuArena,
) -> Option<()> {
    let rows = step.tokens;
    arena.reset();
    for width in lasting_widths(spec) {
        arena.alloc::<bf16>(rows.checked_mul(width)?)?;
    }
    if step.scored > 0 && spec.head != OutputHead::None {
        arena.alloc::<u8>(ScoreLayout::new(rows).bytes)?;
    }
    arena.frame(|arena| {
        for width in layer_widths(spec) {
            arena.alloc::<bf16>(rows.checked_mul(width)?)?;
        }
        arena.alloc::<f32>(attention_scratch(planners))
    })?;
    arena.alloc::<f32>(match spec.head {
        OutputHead::None => step.samples.checked_mul(spec.hidden_size)?,
        OutputHead::Own | OutputHead::Tied => logit_rows(step).checked_mul(spec.vocab_size)?,
    })
}

impl Decoder {
    /// Loads the other kernels.
    pub(super) fn new(gpu: &Gpu, weights: GpuWeights, fused: FusedKernels) -> Result<Self, DeviceError> {
        let workspace = gpu.alloc(Component::Runtime, Linears::WORKSPACE_BYTES)?;
        let mut decoder = Self {
            gpu: gpu.clone(),
            blocks: (0..weights.spec().num_layers)
                .map(|index| weights.linears(index))
                .collect(),
            head: match weights.head() {
                None => None,
                Some(linear) => Some(Head {
                    linear,
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
    fn measure_linears(&mut self) -> Result<(), DeviceError> {
        let spec = self.weights.spec();
        let widest = spec.hidden_size.max(spec.intermediate_size).max(spec.q_size());
        let outputs = (2 * spec.intermediate_size)
            .max(qkv_size(spec))
            .max(spec.hidden_size);
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
        let all = |pick: fn(&GpuLinears) -> &GpuLinear| self.blocks.iter().map(pick).collect::<Vec<_>>();
        let (qkv, output) = (all(|block| &block.qkv), all(|block| &block.output));
        let (gate_up, down) = (all(|block| &block.gate_up), all(|block| &block.down));
        let plain = |layers, output| LinearUse {
            layers,
            output,
            rows: &MEASURED_ROWS,
        };
        let mut uses = vec![
            plain(&qkv, LinearOutput::Bf16),
            plain(&output, LinearOutput::Bf16),
            plain(&gate_up, LinearOutput::Bf16),
            plain(&gate_up, LinearOutput::Glu(Activation::Silu)),
            plain(&down, LinearOutput::Bf16),
        ];
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

    /// Launches a whole step: the batch through all blocks, its KV into the cache, logits and samples of the rows that are
    /// asked for, or vectors. With `logits` those are taken out instead of sampled from, which waits for them. Rows that wait
    /// for masks are not sampled from: that is [`Self::sample_deferred`]'s.
    pub(super) fn step(
        &self,
        input: &StepInput,
        state: &mut StepState,
        arena: &mut GpuArena,
        logits: Option<&mut Vec<f32>>,
    ) -> Result<(), DeviceError> {
        arena.reset();
        let (spec, arena) = (self.weights.spec(), &*arena);
        let take = |width| arena.alloc(input.rows * width);
        let [hidden, normed] = lasting_widths(spec).map(take);
        let (hidden, normed) = (hidden?, normed?);
        // SAFETY: the slot is packed again when this step has ended.
        let scores = unsafe { state.scores.send(input, arena)? };
        let after = arena.mark();
        let [delta, qkv, attended, gate_up, activated] = layer_widths(spec).map(take);
        let act = Activations {
            hidden,
            normed,
            delta: delta?,
            qkv: qkv?,
            attended: attended?,
            gate_up: gate_up?,
            activated: activated?,
            scratch: arena.alloc(attention_scratch(state.inputs.planners()))?,
        };
        let Some(normed) = self.forward(input, state, scores.as_ref(), act)? else {
            return Ok(());
        };
        // The layers' activations are not needed any more.
        arena.rewind(after);
        let Some(head) = &self.head else {
            let pooled = arena.alloc(input.spans.len() / 2 * spec.hidden_size)?;
            return self.pool(input, state, normed, pooled);
        };
        let (width, vocab) = (spec.hidden_size, spec.vocab_size);
        let memory = self.logits(input, arena)?;
        if let Some(scores) = scores {
            let rows = normed.range(input.samples * width..normed.len());
            self.score(head, input, state, rows, &scores, memory)?;
            state.scores.fetch(input.slot, &scores)?;
        }
        if input.samples > 0 {
            let found = memory.range(0..input.samples * vocab);
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

    /// Memory for the logits of a step, behind what outlives its layers.
    fn logits<'a>(&self, input: &StepInput, arena: &'a GpuArena) -> Result<GpuSlice<'a, f32>, DeviceError> {
        let size = StepSize {
            tokens: input.rows,
            samples: input.samples,
            scored: input.scored,
        };
        arena.alloc(logit_rows(size) * self.weights.spec().vocab_size)
    }

    /// Samples the rows of the step launched last that waited for masks, which were sent. `arena` has not been used since.
    pub(super) fn sample_deferred(
        &self,
        input: &StepInput,
        state: &mut StepState,
        arena: &mut GpuArena,
    ) -> Result<(), DeviceError> {
        let Some(head) = &self.head else { return Ok(()) };
        // What is taken in the same order lies at the same place, also under a graph.
        arena.reset();
        let spec = self.weights.spec();
        for width in lasting_widths(spec) {
            arena.alloc::<bf16>(input.rows * width)?;
        }
        if input.scored > 0 {
            arena.alloc::<u8>(ScoreLayout::new(input.rows).bytes)?;
        }
        let logits = self
            .logits(input, arena)?
            .range(0..input.samples * spec.vocab_size);
        self.sample(head, input, state, logits)?;
        Ok(())
    }

    /// Runs all blocks. Returns the normalised rows that are given out, if there are any: first those to sample from or to
    /// pool, then those to be scored.
    fn forward<'a>(
        &self,
        input: &StepInput,
        state: &StepState,
        scores: Option<&ScoreSlices<'_>>,
        mut act: Activations<'a>,
    ) -> Result<Option<GpuSlice<'a, bf16>>, DeviceError> {
        let spec = self.weights.spec();
        let tokens = state.inputs.device(input.tokens);
        let tokens = GpuTokens {
            tokens,
            prev_sampled: state.outputs.sampled(),
            resolved: tokens,
        };
        self.fused
            .embedding(self.weights.embedding(), tokens, 1.0, act.hidden)?;
        let last = spec.num_layers - 1;
        for index in 0..=last {
            let layer = self.weights.layer(index);
            let norm = self.norm(layer.attention_norm);
            let (qkv, out) = (&self.blocks[index].qkv, act.qkv);
            if index == 0 {
                self.fused.rms_norm(act.hidden, norm, act.normed)?;
                self.linears.forward(act.normed, qkv, out)?;
            } else {
                self.add_norm_linear(&mut act, norm, qkv, LinearOutput::Bf16, out)?;
            }
            self.write_kv(input, state, &layer, index, &act)?;
            if index < last {
                self.attend(input, state, &layer, index, &act)?;
                self.finish_block(&layer, index, &mut act)?;
            }
        }
        // The KV is complete; from here on only the rows that are given out matter.
        if input.samples + input.scored == 0 {
            return Ok(None);
        }
        let layer = self.weights.layer(last);
        self.attend(input, state, &layer, last, &act)?;
        let mut act = match input.sample_at {
            None => act,
            Some(at) => {
                let rows = act.front(spec, input.samples + input.scored);
                let attended = act.qkv.range(0..rows.attended.len());
                let sampled = (input.samples > 0).then(|| state.inputs.device(at));
                let mut first = 0;
                for at in sampled.into_iter().chain(scores.map(|scores| scores.at)) {
                    let part = |width: usize| first * width..(first + at.len()) * width;
                    // Each into memory that this layer has no more use for.
                    let hidden = rows.normed.range(part(spec.hidden_size));
                    self.fused.gather_rows(act.hidden, at, hidden)?;
                    let attended = attended.range(part(spec.q_size()));
                    self.fused.gather_rows(act.attended, at, attended)?;
                    first += at.len();
                }
                Activations {
                    hidden: rows.normed,
                    normed: rows.hidden,
                    attended,
                    ..rows
                }
            }
        };
        self.finish_block(&layer, last, &mut act)?;
        let norm = self.norm(self.weights.final_norm());
        self.fused.add_rms_norm(act.hidden, act.delta, norm, act.normed)?;
        Ok(Some(act.normed))
    }

    /// `act.hidden += act.delta`, and the linear layer of its norm to `out`.
    fn add_norm_linear(
        &self,
        act: &mut Activations<'_>,
        norm: GpuNorm<'_>,
        linear: &GpuLinear,
        output: LinearOutput,
        out: GpuSlice<'_, bf16>,
    ) -> Result<(), GpuError> {
        let rows = act.hidden.len() / self.weights.spec().hidden_size;
        if self.linears.fuses_norm(rows, linear, output) {
            let residual = GpuResidual {
                hidden: act.hidden,
                delta: act.delta,
                norm,
                sum: act.normed,
            };
            self.linears.forward_norm(&residual, linear, output, out)?;
            std::mem::swap(&mut act.hidden, &mut act.normed);
            return Ok(());
        }
        self.fused.add_rms_norm(act.hidden, act.delta, norm, act.normed)?;
        match output {
            LinearOutput::Glu(activation) => self.linears.forward_glu(act.normed, linear, activation, out),
            _ => self.linears.forward(act.normed, linear, out),
        }
    }

    /// Rotates q in its place in `act.qkv` and writes k and v to the cache of block `index`.
    fn write_kv(
        &self,
        input: &StepInput,
        state: &StepState,
        layer: &GpuLayer<'_>,
        index: usize,
        act: &Activations<'_>,
    ) -> Result<(), GpuError> {
        let spec = self.weights.spec();
        let eps = spec.rms_norm_eps;
        let norm = layer.qk_norm.map(|[q, k]| GpuQkNorm { q, k, eps });
        let rope = GpuRope {
            positions: state.inputs.device(input.positions),
            turns: self.weights.turns(),
            factor: 1.0,
            query_scale: None,
        };
        let (k, v) = state.layer_kv(spec, index);
        let write = GpuKvWrite {
            k,
            v,
            slots: state.inputs.device(input.slots),
            kv_heads: spec.num_kv_heads,
            block_size: state.kv_config.block_size.tokens(),
            head_dim: spec.head_dim,
        };
        self.fused.qk_norm_rope_kv_write(act.qkv, norm, rope, write)
    }

    /// From q in `act.qkv` to `act.attended`.
    fn attend(
        &self,
        input: &StepInput,
        state: &StepState,
        layer: &GpuLayer<'_>,
        index: usize,
        act: &Activations<'_>,
    ) -> Result<(), GpuError> {
        let spec = self.weights.spec();
        let scale = 1.0 / (spec.head_dim as f32).sqrt();
        let (k, v) = state.layer_kv(spec, index);
        let (inputs, planners) = (&state.inputs, state.inputs.planners());
        let blocks = inputs.device(input.blocks);
        let at = planners
            .iter()
            .position(|planners| planners.window == layer.window)
            .expect("there is a planner for every window");
        if let Some(decode) = &input.decode {
            let (header, items) = decode.work[at];
            let args = DecodeArgs {
                q: act.qkv,
                q_stride: qkv_size(spec),
                k,
                v,
                runs: inputs.device(decode.runs),
                blocks,
                header: inputs.device(header),
                items: inputs.device(items),
                out: act.attended,
                scratch: act.scratch,
                counters: state.counters.slice(),
                scale,
            };
            self.decode.forward(&planners[at].decode, &args)?;
        }
        if let Some(prefill) = &input.prefill {
            let (plan, items) = prefill.work[at];
            let args = PrefillArgs {
                q: act.qkv,
                q_stride: qkv_size(spec),
                k,
                v,
                runs: inputs.device(prefill.runs),
                blocks,
                items: inputs.device(items),
                out: act.attended,
                scratch: act.scratch,
                scale,
            };
            self.prefill.forward(&planners[at].prefill, plan, &args)?;
        }
        Ok(())
    }

    /// From `act.attended` to what the block adds to the residual stream, `act.delta`.
    fn finish_block(
        &self,
        layer: &GpuLayer<'_>,
        index: usize,
        act: &mut Activations<'_>,
    ) -> Result<(), GpuError> {
        let (spec, block) = (self.weights.spec(), &self.blocks[index]);
        self.linears.forward(act.attended, &block.output, act.delta)?;
        let norm = self.norm(layer.mlp_norm);
        let rows = act.hidden.len() / spec.hidden_size;
        let (gate_up, activated) = (act.gate_up, act.activated);
        if self.linears.fuses_glu(rows, &block.gate_up, Activation::Silu) {
            self.add_norm_linear(
                act,
                norm,
                &block.gate_up,
                LinearOutput::Glu(Activation::Silu),
                activated,
            )?;
        } else {
            self.add_norm_linear(act, norm, &block.gate_up, LinearOutput::Bf16, gate_up)?;
            self.fused
                .glu(Activation::Silu, gate_up, spec.intermediate_size, activated)?;
        }
        self.linears.forward(activated, &block.down, act.delta)
    }

    fn norm<'a>(&self, weight: GpuSlice<'a, f32>) -> GpuNorm<'a> {
        GpuNorm {
            weight,
            eps: self.weights.spec().rms_norm_eps,
        }
    }
}
