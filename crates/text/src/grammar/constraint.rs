use std::fmt::{self, Display};
use std::sync::{Arc, Mutex, PoisonError};

use llguidance::Matcher;
use plimsoll_core::{Constraint, ConstraintError, Progress, TokenId, mask};

use super::lead::SpelledLead;
use crate::Tokenizer;

/// A compiled grammar. Cheap to clone.
#[derive(Clone)]
pub struct CompiledGrammar(Arc<Compiled>);

pub(super) struct Compiled {
    /// In its initial state.
    pub(super) matcher: Mutex<Matcher>,
    /// Tokens allowed first.
    pub(super) first: Allowed,
    pub(super) leads: Vec<SpelledLead>,
    pub(super) tokenizer: Tokenizer,
    pub(super) ends: Arc<[TokenId]>,
}

impl From<Compiled> for CompiledGrammar {
    fn from(compiled: Compiled) -> Self {
        Self(Arc::new(compiled))
    }
}

impl CompiledGrammar {
    /// Whether both share one compilation.
    #[cfg(test)]
    pub(super) fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// Blocks copies of the initial state while it lives.
    #[cfg(test)]
    pub(super) fn hold(&self) -> std::sync::MutexGuard<'_, Matcher> {
        self.0.matcher.lock().unwrap()
    }

    /// A constraint for a new sequence, which `stop_token_ids` end. Those that are special tokens are allowed exactly where the
    /// grammar may end; others are ordinary text. It allocates memory from its first token on.
    pub fn constraint(&self, stop_token_ids: &[TokenId]) -> Box<dyn Constraint> {
        let Compiled {
            leads,
            tokenizer,
            ends,
            ..
        } = &*self.0;
        let is_end = |token: &TokenId| ends.contains(token) || tokenizer.is_special(*token);
        let ends: Arc<[TokenId]> = stop_token_ids.iter().copied().filter(is_end).collect();
        let mut barred = Arc::clone(&ends);
        let mut constraint: Box<dyn Constraint> = Box::new(Grammatical {
            grammar: self.clone(),
            matcher: None,
            ends,
        });
        for lead in leads.iter().rev() {
            if lead.is_optional() {
                barred = Arc::default();
            }
            constraint = lead.before(constraint, tokenizer, &barred);
        }
        constraint
    }

    /// Tokens allowed first, without those that end the sequence.
    fn first(&self) -> &Allowed {
        &self.0.first
    }

    /// Tokens that `matcher` (from [`Self::matcher`]) allows next.
    fn allowed(&self, matcher: &mut Matcher) -> Result<Allowed, ConstraintError> {
        Allowed::compute(matcher, self.0.tokenizer.vocab_size(), &self.0.ends)
    }

    /// A new lexer and parser in the initial state.
    fn matcher(&self) -> Matcher {
        let matcher = self.0.matcher.lock().unwrap_or_else(PoisonError::into_inner);
        matcher.deep_clone()
    }
}

/// A grammar's constraint of one sequence.
struct Grammatical {
    grammar: CompiledGrammar,
    /// Its own lexer and parser, from the first token on: waiting sequences need none, and sequences that shared a lexer would
    /// block each other.
    matcher: Option<Box<Matcher>>,
    /// Tokens that end the sequence where the grammar may end.
    ends: Arc<[TokenId]>,
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
    /// Tokens that `matcher` allows next, for a vocabulary of `vocab_size` tokens.
    pub(super) fn compute(
        matcher: &mut Matcher,
        vocab_size: usize,
        all_ends: &[TokenId],
    ) -> Result<Self, ConstraintError> {
        let failed = |error| ConstraintError(complaint(&error));
        let mask = matcher.compute_mask().map_err(failed)?;
        let may_end = matcher.is_accepting().map_err(failed)?;
        let mut words = mask.as_slice().to_vec();
        words.resize(mask::words(vocab_size), 0);
        if let Some(last) = words.last_mut()
            && !vocab_size.is_multiple_of(32)
        {
            *last &= (1 << (vocab_size % 32)) - 1;
        }
        for &end in all_ends {
            mask::forbid(&mut words, end);
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
        let is_allowed = |&end: &TokenId| allowed.may_end && mask::allows(mask, end);
        let ends: Vec<_> = self.ends.iter().copied().filter(is_allowed).collect();
        for (index, word) in mask.iter_mut().enumerate() {
            *word &= allowed.words.get(index).copied().unwrap_or(0);
        }
        for end in ends {
            mask::allow(mask, end);
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

impl fmt::Debug for CompiledGrammar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CompiledGrammar")
            .field("leads", &self.0.leads)
            .finish_non_exhaustive()
    }
}

/// llguidance's message, without its internal state and options that clients cannot set.
pub(super) fn complaint(error: &dyn Display) -> String {
    let text = error.to_string();
    let text = text.split("\n<").next().unwrap_or_default().trim();
    if text.contains("NoExtensionBias") {
        return "no token of this model's vocabulary can continue such a text".to_owned();
    }
    if let Some((_, reference)) = text.split_once("supported without 'referencing' feature; ref ") {
        return format!("only references within the schema are supported (`#/...`), not {reference}");
    }
    match text.split_once(". Enable 'coerce_one_of'") {
        Some((what, _)) => format!("{what} where more than one of the schemas may hold; use anyOf"),
        None => text.to_owned(),
    }
}
