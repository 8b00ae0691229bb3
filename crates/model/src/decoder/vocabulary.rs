//! Both ends of the vocabulary: embeddings of tokens, and logits of rows behind the last norm.

use plimsoll_core::StepError;
use plimsoll_device::Arena;
use plimsoll_kernels::{Embedding, Exchange, KvElement, Linear, soft_cap};

use super::Step;
use crate::DecoderSpec;

/// Rows whose logits exist at one time. Their memory, rows × vocabulary, would otherwise be the largest of the step.
pub(crate) const LOGIT_ROWS: usize = 32;

/// What makes logits.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Head<'a> {
    linear: &'a Linear,
    soft_cap: Option<f32>,
}

impl<'a> Head<'a> {
    pub(super) fn new(linear: &'a Linear, soft_cap: Option<f32>) -> Self {
        Self { linear, soft_cap }
    }

    /// From `[rows, hidden_size]` to `[rows, vocab_size]`. `part` is room for those of the rank's part of the vocabulary, empty where
    /// it has all of it.
    pub(crate) fn forward(
        &self,
        normed: &[f32],
        part: &mut [f32],
        logits: &mut [f32],
        arena: &Arena,
        exchange: Option<&mut Exchange>,
    ) -> Result<(), StepError> {
        match exchange {
            Some(exchange) if !part.is_empty() => {
                self.linear.forward(normed, part, arena)?;
                exchange.gather(part, normed.len() / self.linear.inputs(), logits)?;
            }
            _ => self.linear.forward(normed, logits, arena)?,
        }
        if let Some(cap) = self.soft_cap {
            soft_cap(logits, cap);
        }
        Ok(())
    }
}

/// Elements that the logits of so many rows take from the arena, which are made [`LOGIT_ROWS`] at a time, and those of a rank's part
/// of the vocabulary; `None` if no memory could hold them.
pub(crate) fn logit_elements(spec: &DecoderSpec, rows: usize) -> Option<[usize; 2]> {
    let rows = rows.min(LOGIT_ROWS);
    let part = match spec.vocab_shard.ranks {
        1 => 0,
        _ => rows.checked_mul(spec.vocab_rows())?,
    };
    Some([rows.checked_mul(spec.vocab_size)?, part])
}

impl<E: KvElement> Step<'_, '_, E> {
    /// The embeddings of all rows: of each rank those of its part of the vocabulary, and zeros of others.
    pub(super) fn embed(&mut self, table: &Embedding, spec: &DecoderSpec) -> Result<(), StepError> {
        let (tokens, scale, shard) = (self.batch.tokens, spec.embedding_scale, spec.vocab_shard);
        if shard.ranks == 1 {
            table.forward(tokens, scale, self.act.hidden);
            return Ok(());
        }
        let first = shard.rank * spec.vocab_rows();
        table.forward_part(tokens, first, scale, self.act.hidden);
        match &mut self.exchange {
            None => Ok(()),
            Some(exchange) => exchange.sum(self.act.hidden),
        }
    }
}
