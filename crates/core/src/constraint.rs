use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::TokenId;

/// Restricts the next token of one sequence: a grammar, a list of tokens, a minimum length. It is advanced token by token.
///
/// A [mask](crate::mask) has bits for all tokens of the vocabulary, which is the model's, whose output layer may be padded
/// beyond the tokenizer's.
pub trait Constraint: Send + Sync + fmt::Debug {
    /// Clears the bits of the tokens that are not allowed next; sets none.
    ///
    /// # Errors
    /// [`ConstraintError`] if the mask takes more time or memory than allowed.
    fn restrict(&mut self, mask: &mut [u32]) -> Result<(), ConstraintError>;

    /// Advances by one token. Never called with the request's stop tokens.
    ///
    /// # Errors
    /// [`ConstraintError`] if `token` was not allowed.
    fn accept(&mut self, token: TokenId) -> Result<Progress, ConstraintError>;

    /// A copy of the state, for another sequence.
    fn boxed_clone(&self) -> Box<dyn Constraint>;
}

impl Clone for Box<dyn Constraint> {
    fn clone(&self) -> Self {
        self.boxed_clone()
    }
}

/// Whether a sequence goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// More tokens may follow.
    Open,
    /// Nothing may follow: the sequence ends here, without an end-of-sequence token.
    Complete,
}

/// Why a constraint failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct ConstraintError(pub String);

/// The constraints of one sequence, all of which hold. Without any, everything is allowed.
///
/// A constraint that fails is not asked again: its mask allows everything, and the next token ends the request with the error.
#[derive(Clone, Debug, Default)]
pub struct Constraints {
    constraints: Vec<Box<dyn Constraint>>,
    /// Result for a token that was accepted ahead of time, until the scheduler asks for it.
    foreseen: Option<(TokenId, Progress)>,
    failure: Option<ConstraintError>,
}

impl Constraints {
    /// All constraints of a new sequence.
    pub fn new(constraints: Vec<Box<dyn Constraint>>) -> Self {
        Self {
            constraints,
            ..Self::default()
        }
    }

    /// True if there are no constraints.
    pub fn is_free(&self) -> bool {
        self.constraints.is_empty()
    }

    /// Writes the mask of the next token; `mask` may hold anything.
    pub fn fill(&mut self, mask: &mut [u32]) {
        mask.fill(u32::MAX);
        if self.failure.is_some() {
            return;
        }
        let constraints = &mut self.constraints;
        let restricted = guard(|| constraints.iter_mut().try_for_each(|c| c.restrict(mask)));
        let failure = match restricted {
            Ok(()) if mask.iter().any(|&word| word != 0) => return,
            Ok(()) => ConstraintError("no token satisfies all constraints of the request".into()),
            Err(error) => error,
        };
        self.failure = Some(failure);
        mask.fill(u32::MAX);
    }

    /// Why the constraints failed, if they did: tokens sampled since then are invalid.
    pub fn failure(&self) -> Option<&ConstraintError> {
        self.failure.as_ref()
    }

    /// Advances by `token` ahead of [`Self::accept`], which is then free.
    pub fn foresee(&mut self, token: TokenId) {
        if self.foreseen.is_none() && self.failure.is_none() {
            match self.advance(token) {
                Ok(progress) => self.foreseen = Some((token, progress)),
                Err(error) => self.failure = Some(error),
            }
        }
    }

    /// Advances by `token`.
    ///
    /// # Errors
    /// The first failure, of this token or of the mask before it.
    pub fn accept(&mut self, token: TokenId) -> Result<Progress, ConstraintError> {
        if let Some(failure) = self.failure() {
            return Err(failure.clone());
        }
        match self.foreseen.take() {
            Some((foreseen, progress)) => {
                debug_assert_eq!(foreseen, token, "another token was foreseen");
                Ok(progress)
            }
            None => self.advance(token),
        }
    }

    fn advance(&mut self, token: TokenId) -> Result<Progress, ConstraintError> {
        guard(|| {
            let mut all = Progress::Open;
            for constraint in &mut self.constraints {
                if constraint.accept(token)? == Progress::Complete {
                    all = Progress::Complete;
                }
            }
            Ok(all)
        })
    }
}

/// A panic of a constraint fails its own request only.
fn guard<T>(work: impl FnOnce() -> Result<T, ConstraintError>) -> Result<T, ConstraintError> {
    catch_unwind(AssertUnwindSafe(work))
        .unwrap_or_else(|_| Err(ConstraintError("a constraint panicked".into())))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Allows multiples of a number, so many of them.
    #[derive(Clone, Debug)]
    struct Multiples {
        of: u32,
        left: usize,
    }

    impl Constraint for Multiples {
        fn restrict(&mut self, mask: &mut [u32]) -> Result<(), ConstraintError> {
            let tokens = 32 * mask.len() as u32;
            for token in (0..tokens).filter(|token| token % self.of != 0) {
                crate::mask::forbid(mask, token);
            }
            Ok(())
        }

        fn accept(&mut self, token: TokenId) -> Result<Progress, ConstraintError> {
            if !token.is_multiple_of(self.of) {
                return Err(ConstraintError(format!("{token} is no multiple of {}", self.of)));
            }
            self.left -= 1;
            Ok(if self.left == 0 {
                Progress::Complete
            } else {
                Progress::Open
            })
        }

        fn boxed_clone(&self) -> Box<dyn Constraint> {
            Box::new(self.clone())
        }
    }

    fn constraints(of: &[(u32, usize)]) -> Constraints {
        let constraints = of
            .iter()
            .map(|&(of, left)| Box::new(Multiples { of, left }) as Box<dyn Constraint>);
        Constraints::new(constraints.collect())
    }

    fn allowed(constraints: &mut Constraints) -> Vec<u32> {
        let mut mask = [0; 1];
        constraints.fill(&mut mask);
        (0..32).filter(|token| mask[0] >> token & 1 == 1).collect()
    }

    #[test]
    fn all_constraints_hold_and_the_first_to_end_ends_the_sequence() {
        let mut constraints = constraints(&[(4, 9), (6, 2)]);
        assert_eq!(allowed(&mut constraints), [0, 12, 24]);
        assert_eq!(constraints.accept(12), Ok(Progress::Open));
        assert_eq!(constraints.accept(24), Ok(Progress::Complete));
        assert!(Constraints::default().is_free());
        assert_eq!(allowed(&mut Constraints::default()).len(), 32);
    }

    #[test]
    fn what_was_foreseen_is_not_counted_twice() {
        let mut constraints = constraints(&[(3, 2)]);
        constraints.foresee(3);
        assert_eq!(constraints.accept(3), Ok(Progress::Open));
        constraints.foresee(6);
        assert_eq!(constraints.accept(6), Ok(Progress::Complete));
    }

    #[test]
    fn a_failure_allows_everything_until_it_is_heard() {
        let mut constraints = constraints(&[(3, 9)]);
        constraints.foresee(4);
        assert_eq!(allowed(&mut constraints).len(), 32);
        assert!(
            constraints
                .accept(4)
                .unwrap_err()
                .to_string()
                .contains("no multiple")
        );
        assert!(constraints.accept(3).is_err(), "it does not recover");
    }

    #[test]
    fn constraints_that_leave_nothing_fail() {
        #[derive(Clone, Debug)]
        struct Nothing;
        impl Constraint for Nothing {
            fn restrict(&mut self, mask: &mut [u32]) -> Result<(), ConstraintError> {
                mask.fill(0);
                Ok(())
            }
            fn accept(&mut self, _: TokenId) -> Result<Progress, ConstraintError> {
                Ok(Progress::Open)
            }
            fn boxed_clone(&self) -> Box<dyn Constraint> {
                Box::new(self.clone())
            }
        }
        let mut constraints = Constraints::new(vec![Box::new(Nothing)]);
        assert_eq!(
            allowed(&mut constraints).len(),
            32,
            "the sampler always has a choice"
        );
        assert!(
            constraints
                .accept(0)
                .unwrap_err()
                .to_string()
                .contains("no token")
        );
    }
}
