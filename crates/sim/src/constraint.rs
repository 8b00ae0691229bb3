use plimsoll_core::{Constraint, ConstraintError, Progress, TokenId, mask};

use crate::model::Context;

/// A made-up grammar: which tokens may come next, and whether any may, depends on all tokens before.
#[derive(Clone, Debug)]
pub struct SimConstraint {
    said: Context,
    left: usize,
    vocab_size: usize,
}

impl SimConstraint {
    /// A text of exactly `length` tokens, where `seed` decides which.
    pub fn new(seed: u64, length: usize, vocab_size: usize) -> Self {
        Self {
            said: Context::EMPTY.then(seed as TokenId),
            left: length,
            vocab_size,
        }
    }

    fn allows(&self, token: TokenId) -> bool {
        let favourite = self.said.draw() % self.vocab_size as u64;
        u64::from(token) == favourite || self.said.then(token).draw().is_multiple_of(3)
    }
}

impl Constraint for SimConstraint {
    fn restrict(&mut self, mask: &mut [u32]) -> Result<(), ConstraintError> {
        for token in (0..32 * mask.len() as TokenId).filter(|&token| !self.allows(token)) {
            mask::forbid(mask, token);
        }
        Ok(())
    }

    fn accept(&mut self, token: TokenId) -> Result<Progress, ConstraintError> {
        if !self.allows(token) {
            return Err(ConstraintError(format!("token {token} is not allowed")));
        }
        self.said = self.said.then(token);
        self.left -= 1;
        Ok(match self.left {
            0 => Progress::Complete,
            _ => Progress::Open,
        })
    }

    fn boxed_clone(&self) -> Box<dyn Constraint> {
        Box::new(self.clone())
    }
}
