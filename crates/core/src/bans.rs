use std::sync::Arc;

use crate::{Constraint, ConstraintError, ParamError, Progress, TokenId, mask};

/// Tokens that a request bans, for good or until enough tokens came. If every other token is masked out, a banned one is
/// chosen nevertheless, except those outside the allowed list.
#[derive(Clone, Debug, Default)]
pub struct Bans {
    /// Minimum number of output tokens before a stop token (`min_tokens`).
    pub min_tokens: usize,
    /// Only these tokens are allowed (`allowed_token_ids`); `None`: all.
    pub allowed: Option<Vec<TokenId>>,
    /// Banned sequences (`bad_words`): the last token of each must not follow the others.
    pub words: Arc<[Vec<TokenId>]>,
}

impl Bans {
    /// Whether a request of at most `max_tokens` output tokens can have them.
    pub(crate) fn check(&self, max_tokens: usize, vocab_size: usize) -> Result<(), ParamError> {
        if self.min_tokens > max_tokens {
            let message = format!(
                "min_tokens is {}, but the answer has at most {max_tokens} tokens (the request's own limit, or what the \
                 context has room for)",
                self.min_tokens
            );
            return Err(ParamError::new("min_tokens", message));
        }
        let words = self.words.iter().flatten().map(|&token| ("bad_words", token));
        let allowed = self.allowed.iter().flatten();
        let mut named = words.chain(allowed.map(|&token| ("allowed_token_ids", token)));
        if let Some((param, token)) = named.find(|&(_, token)| token as usize >= vocab_size) {
            let message = format!("{param} names token {token}, but the vocabulary has {vocab_size} tokens");
            return Err(ParamError::new(param, message));
        }
        if self.allowed.as_ref().is_some_and(Vec::is_empty) {
            let message = "allowed_token_ids must not be empty";
            return Err(ParamError::new("allowed_token_ids", message));
        }
        Ok(())
    }

    /// A mask of the allowed tokens: a list of all banned ones would be sent to the device with each step.
    pub(crate) fn only_allowed(&self, vocab_size: usize) -> Option<Box<dyn Constraint>> {
        let allowed = self.allowed.as_ref()?;
        let mut mask = vec![0; mask::words(vocab_size)];
        for &token in allowed {
            mask::allow(&mut mask, token);
        }
        Some(Box::new(AllowedTokens(mask.into())))
    }

    /// Banned words of several tokens, and those of a single token.
    pub(crate) fn words(&self) -> (Arc<[Vec<TokenId>]>, Vec<TokenId>) {
        let (several, single): (Vec<_>, Vec<_>) = self.words.iter().cloned().partition(|word| word.len() > 1);
        (several.into(), single.concat())
    }
}

/// One fixed set of allowed tokens, as a mask.
#[derive(Clone, Debug)]
struct AllowedTokens(Arc<[u32]>);

impl Constraint for AllowedTokens {
    fn restrict(&mut self, mask: &mut [u32]) -> Result<(), ConstraintError> {
        for (word, allowed) in mask.iter_mut().zip(&*self.0) {
            *word &= allowed;
        }
        Ok(())
    }

    fn accept(&mut self, _: TokenId) -> Result<Progress, ConstraintError> {
        Ok(Progress::Open)
    }

    fn boxed_clone(&self) -> Box<dyn Constraint> {
        Box::new(self.clone())
    }
}
