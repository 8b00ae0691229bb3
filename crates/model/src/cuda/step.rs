use half::bf16;
use plimsoll_device::cuda::GpuSlice;
use plimsoll_kernels::GgufFormat;
use plimsoll_kernels::cuda::{DeltaKernels, Fp8Scaling, LinearRoom, MOST_DEQUANTISED, dequantised_room};

use super::experts::{ExpertLayout, ExpertSlices};
use super::input::StepInput;
use super::planners::{AttentionPlanners, attention_scratch};
use super::scores::{SCORE_ROWS, ScoreLayout};
use super::shape::padded_rows;
use super::staging::{Layout, Section};
use crate::blocks::Widths;
use crate::footprint::StepSize;
use crate::quantization::EMBEDDING;
use crate::{DecoderSpec, OutputHead};

/// Alignment of each activation, in bytes: that of a line of L2, and what bulk copies and tensor maps ask for.
const ALIGN: usize = 256;

/// Where everything lies that a step takes from its arena, as one piece. The same for the same sizes: a step that is sampled
/// later finds its logits where a graph has put them.
#[derive(Clone, Copy, Debug)]
pub(super) struct StepLayout {
    /// The residual stream.
    pub(super) hidden: Section<bf16>,
    pub(super) normed: Section<bf16>,
    /// Of a step that scores.
    pub(super) scores: Section<u8>,
    /// What is to be added to the residual stream.
    pub(super) delta: Section<bf16>,
    pub(super) qkv: Section<bf16>,
    pub(super) attended: Section<bf16>,
    /// Also what a recurrence takes beside its states.
    pub(super) gate_up: Section<bf16>,
    pub(super) activated: Section<bf16>,
    /// Inputs of products in eight bits, and their scales.
    pub(super) quantised: Section<u8>,
    pub(super) scales: Section<f32>,
    /// Weights of few bits as `bf16`, and inputs in the order of some.
    pub(super) dequantised: Section<bf16>,
    pub(super) ordered: Section<bf16>,
    /// Inputs of layers beside the residual stream, and those of the last layer of the rows that are given out.
    pub(super) layer_inputs: Section<bf16>,
    pub(super) last_inputs: Section<bf16>,
    /// Of layers with experts.
    pub(super) experts: ExpertLayout,
    /// Partial results of attention.
    pub(super) attention: Section<f32>,
    /// What the step gives out: logits, or pooled vectors. In the place of what only the layers need.
    pub(super) given: Section<f32>,
    /// Logits of the rank's part of the vocabulary, behind all of them, where it has not all.
    pub(super) part: Section<f32>,
    /// Weights of a head of few bits as `bf16`, behind it.
    pub(super) dequantised_head: Section<bf16>,
    /// Bytes of everything.
    pub(super) bytes: usize,
}

impl StepLayout {
    /// Of a step of this size; `None` if no memory could hold it.
    pub(super) fn new(spec: &DecoderSpec, step: StepSize, planners: &[AttentionPlanners]) -> Option<Self> {
        let (widths, rows) = (Widths::beside_experts(spec), padded_rows(step.tokens));
        let step = StepSize { tokens: rows, ..step };
        let mut layout = Layout::aligned(ALIGN);
        let hidden = layout.rows(rows, widths.hidden)?;
        let normed = layout.rows(rows, widths.hidden)?;
        let scores = match step.scored > 0 && spec.head != OutputHead::None {
            true => ScoreLayout::new(rows).bytes,
            false => 0,
        };
        let scores = layout.rows(scores, 1)?;
        let mut after = layout.clone();
        Some(Self {
            hidden,
            normed,
            scores,
            delta: layout.rows(rows, widths.hidden)?,
            qkv: layout.rows(rows, widths.qkv)?,
            attended: layout.rows(rows, widths.attended)?,
            gate_up: layout.rows(rows, widths.gate_up.max(recurrence_width(spec)))?,
            activated: layout.rows(rows, widths.activated)?,
            quantised: layout.rows(rows, widths.quantised)?,
            // Of blocks there are more than the rows have.
            scales: layout.rows(Fp8Scaling::Blocks.input_stride(rows), widths.scales)?,
            dequantised: layout.rows(dequantised(&widths)?, 1)?,
            ordered: layout.rows(rows, widths.ordered)?,
            layer_inputs: layout.rows(rows, widths.layer_inputs)?,
            last_inputs: layout.rows(rows, spec.per_layer.map_or(0, |own| own.width))?,
            experts: ExpertLayout::new(&mut layout, spec, &widths, rows)?,
            attention: layout.rows(attention_scratch(planners), 1)?,
            given: match spec.head {
                OutputHead::None => after.rows(step.samples, spec.hidden_size)?,
                OutputHead::Own | OutputHead::Tied => after.rows(logit_rows(step), spec.vocab_size)?,
            },
            part: match spec.head {
                OutputHead::Own | OutputHead::Tied if spec.vocab_shard.ranks > 1 => {
                    after.rows(logit_rows(step), spec.vocab_rows())?
                }
                _ => after.rows(0, 1)?,
            },
            dequantised_head: after.rows(dequantised_head(spec), 1)?,
            bytes: layout.bytes().max(after.bytes()),
        })
    }

    /// Room for the product with the head.
    pub(super) fn head_room<'a>(&self, memory: GpuSlice<'a, u8>) -> LinearRoom<'a> {
        LinearRoom {
            weights: Some(self.dequantised_head.within(memory)),
            inputs: None,
        }
    }

    /// Of a packed step.
    pub(super) fn of(spec: &DecoderSpec, input: &StepInput, planners: &[AttentionPlanners]) -> Option<Self> {
        let step = StepSize {
            tokens: input.rows,
            samples: match spec.head {
                OutputHead::None => input.spans.len() / 2,
                OutputHead::Own | OutputHead::Tied => input.samples,
            },
            scored: input.scored,
        };
        Self::new(spec, step, planners)
    }

    /// The activations in the step's memory.
    pub(super) fn activations<'a>(&self, memory: GpuSlice<'a, u8>) -> Activations<'a> {
        Activations {
            hidden: self.hidden.within(memory),
            normed: self.normed.within(memory),
            delta: self.delta.within(memory),
            qkv: self.qkv.within(memory),
            attended: self.attended.within(memory),
            gate_up: self.gate_up.within(memory),
            activated: self.activated.within(memory),
            quantised: self.quantised.within(memory),
            scales: self.scales.within(memory),
            room: LinearRoom {
                weights: Some(self.dequantised.within(memory)),
                inputs: Some(self.ordered.within(memory)),
            },
            layer_inputs: self.layer_inputs.within(memory),
            last_inputs: self.last_inputs.within(memory),
            experts: self.experts.within(memory),
            scratch: self.attention.within(memory),
        }
    }
}

/// Elements of weights of layers that are `bf16` at one time; `None` if no memory could hold the layer.
pub(super) fn dequantised(widths: &Widths) -> Option<usize> {
    Some(widths.largest_of_codes()?.min(MOST_DEQUANTISED))
}

/// The same of the head.
pub(super) fn dequantised_head(spec: &DecoderSpec) -> usize {
    let module = match spec.head {
        OutputHead::None => return 0,
        OutputHead::Own => "lm_head",
        OutputHead::Tied => EMBEDDING,
    };
    let kept = spec.quantization.gguf.of(module).and_then(GgufFormat::of);
    kept.map_or(0, |_| dequantised_room(spec.vocab_rows(), spec.hidden_size))
}

/// Rows whose logits exist at one time: scored rows some at a time, then those to sample from all together.
fn logit_rows(step: StepSize) -> usize {
    match step.scored {
        0 => step.samples,
        _ => step.samples.max(step.tokens.min(SCORE_ROWS)),
    }
}

/// Elements of a row of what a recurrence takes beside its states, which is in `f32`.
fn recurrence_width(spec: &DecoderSpec) -> usize {
    let floats = spec
        .delta_nets()
        .map(|delta_net| DeltaKernels::scratch_floats(&delta_net.layout));
    floats.max().unwrap_or(0) * size_of::<f32>() / size_of::<bf16>()
}

/// See [`StepLayout`].
#[derive(Clone, Copy)]
pub(super) struct Activations<'a> {
    pub(super) hidden: GpuSlice<'a, bf16>,
    pub(super) normed: GpuSlice<'a, bf16>,
    pub(super) delta: GpuSlice<'a, bf16>,
    pub(super) qkv: GpuSlice<'a, bf16>,
    pub(super) attended: GpuSlice<'a, bf16>,
    pub(super) gate_up: GpuSlice<'a, bf16>,
    pub(super) activated: GpuSlice<'a, bf16>,
    pub(super) quantised: GpuSlice<'a, u8>,
    pub(super) scales: GpuSlice<'a, f32>,
    pub(super) room: LinearRoom<'a>,
    pub(super) layer_inputs: GpuSlice<'a, bf16>,
    pub(super) last_inputs: GpuSlice<'a, bf16>,
    pub(super) experts: ExpertSlices<'a>,
    pub(super) scratch: GpuSlice<'a, f32>,
}
