//! What ranks of a model do together: both ends of the vocabulary, and sums of what they add to the residual stream.

use half::bf16;
use plimsoll_device::cuda::{GpuError, GpuSlice};
use plimsoll_kernels::cuda::{
    AllReduce, GpuAdded, GpuLinear, GpuMatrix, GpuNorm, GpuRows, GpuTokens, GpuVocabulary,
};

use super::Decoder;
use super::layers::Step;
use super::sum::{DeltaSum, SentSum};

impl Decoder {
    /// Where GPUs meet, if there are several.
    pub(super) fn all_reduce(&self) -> Option<&AllReduce> {
        self.link.as_ref().map(|link| &*link.all_reduce)
    }

    /// The embeddings of all rows: of each rank those of its part of the vocabulary, whose sum they are.
    pub(super) fn embed(
        &self,
        table: &GpuLinear,
        tokens: GpuTokens<'_>,
        out: GpuSlice<'_, bf16>,
    ) -> Result<(), GpuError> {
        let spec = &self.weights.spec;
        let count = spec.vocab_rows();
        let own = GpuVocabulary {
            all: spec.vocab_size,
            first: spec.vocab_shard.rank * count,
            count,
        };
        self.look_up(table, own, tokens, spec.embedding_scale, out)?;
        match self.all_reduce().filter(|_| spec.vocab_shard.ranks > 1) {
            None => Ok(()),
            Some(ranks) => ranks.sum(out),
        }
    }

    /// Rows of a table by token.
    pub(super) fn look_up(
        &self,
        table: &GpuLinear,
        vocabulary: GpuVocabulary,
        tokens: GpuTokens<'_>,
        scale: f32,
        out: GpuSlice<'_, bf16>,
    ) -> Result<(), GpuError> {
        match table.matrix() {
            GpuMatrix::Gguf { .. } => {
                let gguf = self.linears.gguf();
                gguf.embedding(table, vocabulary, tokens, scale, out)
            }
            _ => {
                let table = table.weight();
                self.fused.embedding(table, vocabulary, tokens, scale, out)
            }
        }
    }
}

impl<'a> Step<'a, '_> {
    /// Computes a rank's part of what is to be added to the residual stream, of so many elements a row: `compute` gets where it goes.
    /// Where its sum over the ranks is faster in halves, the first is sent while the second is computed; in steps with prompts alone, as
    /// no graph replays these: each half that is sent has a number of its own.
    pub(super) fn add_in_halves(
        &mut self,
        width: usize,
        compute: impl Fn(&mut Self, GpuSlice<'a, bf16>) -> Result<(), GpuError>,
    ) -> Result<(), GpuError> {
        let delta = |step: &Self| step.rows(step.act.delta, width);
        let halves = self
            .decoder
            .all_reduce()
            .filter(|_| self.input.prefill.is_some())
            .and_then(|ranks| Some((ranks, ranks.halves(self.rows, width)?)));
        let Some((ranks, rows)) = halves else {
            return compute(self, delta(self));
        };
        let mut of_half = |half: usize| {
            self.of_half(rows, half, |step| {
                compute(step, delta(step))?;
                ranks.send(half, delta(step))
            })
        };
        let halves = [of_half(0)?, of_half(1)?];
        self.sum = DeltaSum::Sent(SentSum { rows, halves });
        Ok(())
    }

    /// Does something to one half of the rows.
    pub(super) fn of_half<R>(
        &mut self,
        rows: [usize; 2],
        half: usize,
        work: impl FnOnce(&mut Self) -> Result<R, GpuError>,
    ) -> Result<R, GpuError> {
        let all = (self.first, self.rows);
        (self.first, self.rows) = ([0, rows[0]][half], rows[half]);
        let done = work(self);
        (self.first, self.rows) = all;
        done
    }

    /// What the caller has to sum; halves of a sum that it does not take one by one are summed here.
    fn take_sum(&mut self) -> Result<DeltaSum<'a>, GpuError> {
        let (sum, width) = (
            std::mem::take(&mut self.sum),
            self.decoder.weights.spec.hidden_size,
        );
        let (DeltaSum::Sent(SentSum { rows, halves }), Some(ranks)) = (sum, self.decoder.all_reduce()) else {
            return Ok(sum);
        };
        for (half, sent) in halves.into_iter().enumerate() {
            self.of_half(rows, half, |step| {
                ranks.sum_sent(sent, step.rows(step.act.delta, width))
            })?;
        }
        Ok(DeltaSum::Done)
    }

    /// Sums what is to be added to the residual stream over experts or ranks, unless that was done.
    pub(super) fn sum_delta(&mut self) -> Result<(), GpuError> {
        let width = self.decoder.weights.spec.hidden_size;
        match (self.take_sum()?, self.decoder.all_reduce()) {
            (DeltaSum::Experts(outputs), _) => {
                let experts = self.of_experts();
                experts
                    .kernels
                    .combine(&outputs, self.rows(self.act.delta, width))
            }
            (DeltaSum::Rank, Some(ranks)) => ranks.sum(self.rows(self.act.delta, width)),
            (DeltaSum::Half(sent), Some(ranks)) => ranks.sum_sent(sent, self.rows(self.act.delta, width)),
            _ => Ok(()),
        }
    }

    /// The residual stream takes up what is to be added to it, and its norm goes to `normed`: in one kernel with the sum over experts or
    /// ranks, if that was not done.
    pub(super) fn add_and_norm(
        &mut self,
        hidden: GpuSlice<'a, bf16>,
        delta: GpuSlice<'a, bf16>,
        norm: GpuNorm<'_>,
        normed: GpuRows<'a>,
    ) -> Result<(), GpuError> {
        let fused = &self.decoder.fused;
        match (self.take_sum()?, self.decoder.all_reduce()) {
            (DeltaSum::Experts(outputs), _) => {
                let experts = self.of_experts();
                experts
                    .kernels
                    .add_rms_norm(&outputs, [hidden, delta], norm, normed)
            }
            (DeltaSum::Rank, Some(ranks)) => ranks.add_rms_norm(fused, hidden, delta, norm, normed),
            (DeltaSum::Half(sent), Some(ranks)) => ranks.add_rms_norm_sent(sent, hidden, delta, norm, normed),
            _ => fused.add_rms_norm(hidden, delta, norm, normed),
        }
    }

    /// The same where what is added has a norm of its own.
    pub(super) fn sandwich(
        &mut self,
        hidden: GpuSlice<'a, bf16>,
        added: GpuAdded<'_>,
        norm: GpuNorm<'_>,
        normed: GpuRows<'a>,
    ) -> Result<(), GpuError> {
        // No family has experts whose sum has a norm of its own yet.
        if let DeltaSum::Experts(_) = self.sum {
            self.sum_delta()?;
        }
        let fused = &self.decoder.fused;
        match (self.take_sum()?, self.decoder.all_reduce()) {
            (DeltaSum::Rank, Some(ranks)) => ranks.sandwich_norm(fused, hidden, added, norm, normed),
            (DeltaSum::Half(sent), Some(ranks)) => {
                ranks.sandwich_norm_sent(sent, hidden, added, norm, normed)
            }
            _ => {
                let GpuAdded {
                    delta,
                    weight,
                    scalar,
                } = added;
                fused.sandwich_norm(hidden, delta, weight, scalar, norm, normed)
            }
        }
    }
}
