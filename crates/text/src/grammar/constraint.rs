use std::fmt;
use std::sync::Arc;

use llguidance::Matcher;
use plimsoll_core::{Constraint, ConstraintError, Progress, TokenId};

use super::CompiledGrammar;
use super::compiler::complaint;

/// One sequence under a grammar.
pub(super) struct Grammatical {
    pub(super) grammar: CompiledGrammar,
    /// Lexer and parser of its own, from the first token on: sequences that wait hold none, and those that shared a lexer would
    /// wait for each other.
    pub(super) matcher: Option<Box<Matcher>>,
    /// Tokens that end the sequence where the grammar may end.
    pub(super) ends: Arc<[TokenId]>,
}

/// Tokens that may come next.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Allowed {
    /// Without those that end the sequence.
    pub(super) words: Vec<u32>,
    /// The sequence may end here.
    pub(super) may_end: bool,
}

impl Allowed {
    /// Asks `matcher`, of a tokenizer of `vocab_size` tokens.
    pub(super) fn compute(
        matcher: &mut Matcher,
        vocab_size: usize,
        all_ends: &[TokenId],
    ) -> Result<Self, ConstraintError> {
        let failed = |error| ConstraintError(complaint(&error));
        let mask = matcher.compute_mask().map_err(failed)?;
        let may_end = matcher.is_accepting().map_err(failed)?;
        let mut words = mask.as_slice().to_vec();
        words.resize(vocab_size.div_ceil(32), 0);
        if let Some(last) = words.last_mut()
            && !vocab_size.is_multiple_of(32)
        {
            *last &= (1 << (vocab_size % 32)) - 1;
        }
        for &end in all_ends {
            if let Some(word) = words.get_mut(end as usize / 32) {
                *word &= !(1 << (end % 32));
            }
        }
        Ok(Self { words, may_end })
    }
}

impl Constraint for Grammatical {
    fn restrict(&mut self, mask: &mut [u32]) -> Result<(), ConstraintError> {
        let computed;
        let allowed = match &mut self.matcher {
            None => self.grammar.first(),
            Some(matcher) => {
                computed = self.grammar.allowed(matcher)?;
                &computed
            }
        };
        let bit = |mask: &[u32], token: TokenId| {
            mask.get(token as usize / 32).copied().unwrap_or(0) >> (token % 32) & 1
        };
        let ends = self.ends.iter().map(|&end| (end, bit(mask, end)));
        let ends: Vec<_> = ends.filter(|_| allowed.may_end).collect();
        for (index, word) in mask.iter_mut().enumerate() {
            *word &= allowed.words.get(index).copied().unwrap_or(0);
        }
        for (end, bit) in ends.into_iter().filter(|&(_, bit)| bit == 1) {
            mask[end as usize / 32] |= bit << (end % 32);
        }
        Ok(())
    }

    fn accept(&mut self, token: TokenId) -> Result<Progress, ConstraintError> {
        let matcher = self
            .matcher
            .get_or_insert_with(|| Box::new(self.grammar.matcher()));
        matcher
            .consume_token(token)
            .map_err(|error| ConstraintError(complaint(&error.to_string())))?;
        Ok(match matcher.is_stopped() {
            true => Progress::Complete,
            false => Progress::Open,
        })
    }

    fn boxed_clone(&self) -> Box<dyn Constraint> {
        Box::new(Self {
            grammar: self.grammar.clone(),
            matcher: self
                .matcher
                .as_ref()
                .map(|matcher| Box::new(matcher.deep_clone())),
            ends: Arc::clone(&self.ends),
        })
    }
}

impl fmt::Debug for Grammatical {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Grammatical")
            .field(
                "stop_reason",
                &self.matcher.as_ref().map(|matcher| matcher.stop_reason()),
            )
            .field("ends", &self.ends)
            .finish_non_exhaustive()
    }
}
