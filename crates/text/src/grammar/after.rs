use plimsoll_core::{Constraint, ConstraintError, Progress, TokenId};

use crate::Tokenizer;

/// A constraint of what comes behind a marker: before it, everything is allowed.
///
/// What the token that ends the marker holds behind it is not checked: models that have such markers have tokens for them.
#[derive(Clone, Debug)]
pub(super) struct After {
    marker: Vec<u8>,
    tokenizer: Tokenizer,
    /// The last bytes of the text, as far as the marker may begin there; `None` behind it.
    before: Option<Vec<u8>>,
    inner: Box<dyn Constraint>,
}

impl After {
    pub(super) fn new(marker: &str, tokenizer: Tokenizer, inner: Box<dyn Constraint>) -> Self {
        Self {
            marker: marker.into(),
            tokenizer,
            before: Some(Vec::new()),
            inner,
        }
    }
}

impl Constraint for After {
    fn restrict(&mut self, mask: &mut [u32]) -> Result<(), ConstraintError> {
        match self.before {
            Some(_) => Ok(()),
            None => self.inner.restrict(mask),
        }
    }

    fn accept(&mut self, token: TokenId) -> Result<Progress, ConstraintError> {
        let Some(before) = &mut self.before else {
            return self.inner.accept(token);
        };
        before.extend_from_slice(self.tokenizer.token_bytes(token));
        if before
            .windows(self.marker.len())
            .any(|bytes| bytes == self.marker)
        {
            self.before = None;
        } else {
            let useless = (before.len() + 1).saturating_sub(self.marker.len());
            before.drain(..useless);
        }
        Ok(Progress::Open)
    }

    fn boxed_clone(&self) -> Box<dyn Constraint> {
        Box::new(self.clone())
    }
}
