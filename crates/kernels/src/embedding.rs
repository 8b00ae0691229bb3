use std::sync::Arc;

use plimsoll_core::TokenId;
use plimsoll_device::Budget;

use crate::dtype::{Matrix, WeightError};
use crate::linear::Linear;
use crate::parallel::{Disjoint, run_ranges};

/// A table of one row per token. It may be the same memory as a tied output projection: see [`Embedding::tied`].
#[derive(Clone, Debug)]
pub struct Embedding {
    table: Arc<Linear>,
}

impl Embedding {
    /// Packs `table`, `[vocab, hidden]`.
    ///
    /// # Errors
    /// [`WeightError`] if memory runs out.
    pub fn new(table: Matrix<'_>, budget: &Budget) -> Result<Self, WeightError> {
        Ok(Self {
            table: Arc::new(Linear::new(&[table], None, budget)?),
        })
    }

    /// The table seen as a projection from hidden states to logits; shares the memory.
    pub fn tied(&self) -> Arc<Linear> {
        Arc::clone(&self.table)
    }

    /// Rows.
    pub fn vocab_size(&self) -> usize {
        self.table.outputs()
    }

    /// Elements of a row.
    pub fn hidden_size(&self) -> usize {
        self.table.inputs()
    }

    /// Writes the rows of `tokens`, times `scale`, into `out`, `[tokens, hidden]`.
    ///
    /// # Panics
    /// If a token is outside the vocabulary.
    pub fn forward(&self, tokens: &[TokenId], scale: f32, out: &mut [f32]) {
        let is_known = |&token: &TokenId| (token as usize) < self.vocab_size();
        assert!(tokens.iter().all(is_known), "a token outside the vocabulary");
        self.forward_part(tokens, 0, scale, out);
    }

    /// As [`Self::forward`], where the table has the rows of tokens from `first` on: those of others become zeros.
    pub fn forward_part(&self, tokens: &[TokenId], first: usize, scale: f32, out: &mut [f32]) {
        let hidden = self.hidden_size();
        assert_eq!(out.len(), tokens.len() * hidden, "out is not [tokens, {hidden}]");
        let out = Disjoint::new(out);
        run_ranges(tokens.len(), 8, &|rows| {
            for row in rows {
                // SAFETY: rows are disjoint.
                let out = unsafe { out.part(row * hidden, hidden) };
                let own = (tokens[row] as usize).checked_sub(first);
                let Some(own) = own.filter(|&own| own < self.vocab_size()) else {
                    out.fill(0.0);
                    continue;
                };
                self.table.weight_row(own, out);
                if scale != 1.0 {
                    out.iter_mut().for_each(|x| *x *= scale);
                }
            }
        });
    }
}
