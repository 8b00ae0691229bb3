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
        let encoding = inner
            .encode_fast(text, add_special)
            .map_err(|e| TextError::Encode(e.to_string()))?;
        Ok(encoding.get_ids().to_vec())
    }
}
