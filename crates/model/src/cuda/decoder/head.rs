//! What a step gives out of its last rows: samples, log-probabilities of prompt tokens, vectors.

use half::bf16;
use plimsoll_device::cuda::{GpuError, GpuSlice};
use plimsoll_kernels::cuda::{GpuLinear, LinearRoom, RankArgs, SampleArgs, SampleKernels};

use super::{Decoder, DeviceError, StepState};
use crate::cuda::input::StepInput;
use crate::cuda::parts::SamplePart;
use crate::cuda::scores::{SCORE_ROWS, ScoreSlices};

/// From normalised rows to samples.
#[derive(Debug)]
pub(super) struct Head {
    pub(super) linear: GpuLinear,
    pub(super) sampler: SampleKernels,
}

/// Where logits go, and room for the product with the head.
#[derive(Clone, Copy)]
pub(super) struct Logits<'a> {
    pub(super) out: GpuSlice<'a, f32>,
    /// Room for those of the rank's part of the vocabulary; nothing where that is all.
    pub(super) part: GpuSlice<'a, f32>,
    pub(super) room: LinearRoom<'a>,
}

impl Decoder {
    /// Sums the rows of each vector and sends them to the host.
    pub(super) fn pool(
        &self,
        input: &StepInput,
        state: &mut StepState,
        normed: GpuSlice<'_, bf16>,
        pooled: GpuSlice<'_, f32>,
    ) -> Result<(), DeviceError> {
        let spans = state.inputs.device(input.spans);
        self.fused.sum_rows(normed, spans, pooled)?;
        if let Some(vectors) = &mut state.vectors {
            vectors.fetch(input.slot, pooled)?;
        }
        Ok(())
    }

    /// From normalised rows to logits.
    pub(super) fn logits(
        &self,
        head: &Head,
        normed: GpuSlice<'_, bf16>,
        logits: Logits<'_>,
    ) -> Result<(), GpuError> {
        let Logits {
            out: logits,
            part,
            room,
        } = logits;
        match self.all_reduce().filter(|_| !part.is_empty()) {
            None => self.linears.forward_f32_in(room, normed, &head.linear, logits)?,
            Some(ranks) => {
                let rows = normed.len() / head.linear.inputs();
                let part = part.range(0..rows * head.linear.outputs());
                self.linears.forward_f32_in(room, normed, &head.linear, part)?;
                ranks.gather(part, rows, logits)?;
            }
        }
        match self.weights.spec.logit_soft_cap {
            None => Ok(()),
            Some(cap) => self.fused.soft_cap(logits, cap),
        }
    }

    /// Samples the step's rows, or those that waited for masks or for the end of a graph.
    pub(super) fn sample(
        &self,
        head: &Head,
        input: &StepInput,
        state: &mut StepState,
        logits: GpuSlice<'_, f32>,
    ) -> Result<(), GpuError> {
        let vocab = self.weights.spec.vocab_size;
        for (index, SamplePart { rows, .. }) in input.sample_parts.iter().enumerate() {
            if index > 0 {
                state.inputs.send_part(&self.gpu, input, index)?;
            }
            let (inputs, outputs, masks) = (&state.inputs, &state.outputs, &state.masks);
            let (all_rows, all_masks) = match input.deferred {
                Some(_) => {
                    let (rows, masks) = masks.device(input.samples);
                    (rows, Some(masks))
                }
                None => (inputs.device(input.late_rows.unwrap_or(input.sample_rows)), None),
            };
            let words = masks.words();
            head.sampler.sample(&SampleArgs {
                logits: logits.range(rows.start * vocab..rows.end * vocab),
                rows: all_rows.range(rows.clone()),
                history: inputs.device(input.history),
                biases: inputs.device(input.biases),
                resolved: inputs.device(input.tokens),
                masks: all_masks.map(|masks| masks.range(rows.start * words..rows.end * words)),
                sampled: outputs.sampled().range(rows.clone()),
                logprobs: outputs.logprobs().range(rows.clone()),
            })?;
        }
        Ok(())
    }

    /// Log-probabilities of prompt tokens from the normalised rows before them, some rows at a time in the memory of `room`.
    pub(super) fn score(
        &self,
        head: &Head,
        input: &StepInput,
        state: &StepState,
        normed: GpuSlice<'_, bf16>,
        scores: &ScoreSlices<'_>,
        room: Logits<'_>,
    ) -> Result<(), GpuError> {
        let (width, vocab) = (self.weights.spec.hidden_size, self.weights.spec.vocab_size);
        let inputs = &state.inputs;
        for first in (0..input.scored).step_by(SCORE_ROWS) {
            let rows = first..(first + SCORE_ROWS).min(input.scored);
            let logits = room.out.range(0..rows.len() * vocab);
            let (best, likeliest) = (
                scores.best.range(rows.clone()),
                scores.likeliest.range(rows.clone()),
            );
            let normed = normed.range(rows.start * width..rows.end * width);
            self.logits(head, normed, Logits { out: logits, ..room })?;
            head.sampler.sample(&SampleArgs {
                logits,
                rows: scores.sample_rows.range(0..rows.len()),
                history: inputs.device(input.history),
                biases: inputs.device(input.biases),
                resolved: inputs.device(input.tokens),
                masks: None,
                sampled: best,
                logprobs: likeliest,
            })?;
            head.sampler.rank(&RankArgs {
                logits,
                targets: scores.targets.range(rows.clone()),
                best,
                likeliest,
                ranks: scores.ranks.range(rows),
            })?;
        }
        Ok(())
    }
}
