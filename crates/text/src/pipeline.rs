use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::OnceLock;

use plimsoll_core::TokenId;

use crate::TextError;
use crate::tokenizer::Encode;

/// The `tokenizers` crate as an encoder.
pub(crate) struct Pipeline {
    inner: tokenizers::Tokenizer,
    /// `inner` with special tokens taken as text; made when first asked for.
    literal: OnceLock<tokenizers::Tokenizer>,
}

impl Pipeline {
    pub(crate) fn new(inner: tokenizers::Tokenizer) -> Self {
        Self {
            inner,
            literal: OnceLock::new(),
        }
    }

    /// Encodes texts on which a regular expression takes exponential time, if it ever does.
    pub(crate) fn try_out(&self) -> Result<(), TextError> {
        const REPEATED: usize = 64;
        for (repeated, last) in [
            ("a", "!"),
            (" ", "x"),
            ("1", "x"),
            ("\n", "x"),
            ("!", "x"),
            ("é", " "),
        ] {
            self.encode(&(repeated.repeat(REPEATED) + last), false, true)?;
        }
        Ok(())
    }
}

impl Encode for Pipeline {
    fn encode(&self, text: &str, add_special: bool, parse_special: bool) -> Result<Vec<TokenId>, TextError> {
        let inner = match parse_special {
            true => &self.inner,
            false => self.literal.get_or_init(|| {
                let mut literal = self.inner.clone();
                literal.set_encode_special_tokens(true);
                literal
            }),
        };
        let encoding = guarded(|| inner.encode_fast(text, add_special)).map_err(TextError::Encode)?;
        Ok(encoding.get_ids().to_vec())
    }
}

/// The `tokenizers` crate panics on some files, and where a regular expression backtracks ten million times.
pub(crate) fn guarded<T>(work: impl FnOnce() -> tokenizers::Result<T>) -> Result<T, String> {
    let panicked = |panic: Box<dyn std::any::Any + Send>| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        match text.or_else(|| panic.downcast_ref::<&str>().copied()) {
            Some(text) if text.contains("retry-limit") => {
                "a regular expression of the tokenizer takes too long on it".to_owned()
            }
            _ => "the tokenizer cannot be used".to_owned(),
        }
    };
    let result = catch_unwind(AssertUnwindSafe(work)).map_err(panicked)?;
    result.map_err(|error| error.to_string())
}
