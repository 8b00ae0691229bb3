//! What ranks of a model do together: both ends of the vocabulary, and sums of what they add to the residual stream.

use half::bf16;
use plimsoll_device::cuda::{GpuError, GpuSlice};
use plimsoll_kernels::cuda::{
    AllReduce, GpuAdded, GpuLinear, GpuMatrix, GpuNorm, GpuRows, GpuTokens, GpuVocabulary,
};

use super::Decoder;
use super::layers::Step;

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
                gguf.embedding_part(table, vocabulary, tokens, scale, out)
            }
            _ => {
                let table = table.weight();
                self.fused.embedding_part(table, vocabulary, tokens, scale, out)
            }
        }
    }
}

impl<'a, 'b> Step<'a, 'b> {
    /// The ranks, if what is to be added to the residual stream is still this one's part: the caller sums it.
    fn unsummed(&mut self) -> Option<&'b AllReduce> {
        let decoder = self.decoder;
        decoder
            .all_reduce()
            .filter(|_| std::mem::take(&mut self.is_partial))
    }

    /// Sums what is to be added to the residual stream over the ranks, unless that was done.
    pub(super) fn sum_delta(&mut self) -> Result<(), GpuError> {
        let width = self.decoder.weights.spec.hidden_size;
        match self.unsummed() {
            Some(ranks) => ranks.sum(self.rows(self.act.delta, width)),
            None => Ok(()),
        }
    }

    /// The residual stream takes up what is to be added to it, and its norm goes to `normed`: in one kernel with the sum over the
    /// ranks, if there are any and that was not done.
    pub(super) fn add_and_norm(
        &mut self,
        hidden: GpuSlice<'a, bf16>,
        delta: GpuSlice<'a, bf16>,
        norm: GpuNorm<'_>,
        normed: GpuRows<'a>,
    ) -> Result<(), GpuError> {
        let fused = &self.decoder.fused;
        match self.unsummed() {
            Some(ranks) => ranks.add_rms_norm(fused, hidden, delta, norm, normed),
            None => fused.add_rms_norm(hidden, delta, norm, normed),
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
        let fused = &self.decoder.fused;
        match self.unsummed() {
            Some(ranks) => ranks.sandwich_norm(fused, hidden, added, norm, normed),
            None => {
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
