use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, OnceLock};

use plimsoll_core::TokenId;

use crate::TextError;
use crate::special_texts::SpecialTexts;
use crate::vocab::Vocab;

/// Special tokens by role (`bos_token`, `eos_token`, ...), as text, the way chat templates name them.
pub type SpecialTokens = BTreeMap<String, String>;

/// Turns text into the tokens of one model and back. Cheap to clone.
#[derive(Clone)]
pub struct Tokenizer(Arc<Loaded>);

struct Loaded {
    parts: Parts,
    /// Made when first asked for.
    special_texts: OnceLock<SpecialTexts>,
}

pub(crate) struct Parts {
    pub(crate) encoder: Box<dyn Encode>,
    pub(crate) wrap: Wrap,
    /// By which factor normalisation may at most shorten a text; `None` if any part of it may get lost.
    pub(crate) shrinks: Option<usize>,
    pub(crate) vocab: Vocab,
    pub(crate) special_tokens: SpecialTokens,
    pub(crate) bos: Option<TokenId>,
    /// Without duplicates, the tokenizer's own first.
    pub(crate) eos: Vec<TokenId>,
}

/// Special tokens that a model expects around a plain text.
pub(crate) enum Wrap {
    /// The encoder adds them.
    Encoder,
    /// These tokens.
    Explicit {
        bos: Option<TokenId>,
        eos: Option<TokenId>,
    },
}

/// The algorithm of one kind of tokenizer.
pub(crate) trait Encode: Send + Sync {
    /// With `parse_special` the text of a special token becomes that token, without it ordinary text. `add_special` is for
    /// encoders behind [`Wrap::Encoder`].
    fn encode(&self, text: &str, add_special: bool, parse_special: bool) -> Result<Vec<TokenId>, TextError>;

    /// Two texts with special tokens added, where the tokenizer knows of pairs.
    fn encode_pair(&self, first: &str, second: &str) -> Result<Vec<TokenId>, TextError> {
        let mut tokens = self.encode(first, true, true)?;
        tokens.extend(self.encode(second, false, true)?);
        Ok(tokens)
    }
}

impl Tokenizer {
    /// Ids 0 to 255 are bytes, 256 ends a text: the simulated model's tokenizer.
    pub fn bytes() -> Self {
        let mut vocab = Vocab::default();
        (0..=255).for_each(|byte| vocab.push(&[byte], false));
        vocab.push(Bytes::EOS_TEXT.as_bytes(), true);
        let special_tokens = [("eos_token".to_owned(), Bytes::EOS_TEXT.to_owned())].into();
        Self::new(Parts {
            encoder: Box::new(Bytes),
            wrap: Wrap::Encoder,
            shrinks: Some(1),
            vocab,
            special_tokens,
            bos: None,
            eos: vec![Bytes::EOS],
        })
    }

    pub(crate) fn new(parts: Parts) -> Self {
        Self(Arc::new(Loaded {
            parts,
            special_texts: OnceLock::new(),
        }))
    }

    /// Tokens of `text`; the text of a special token becomes that token, as prompts rendered by a chat template need.
    /// `add_special` adds what the model expects around a plain text, such as BOS; a chat template writes these itself.
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Vec<TokenId>, TextError> {
        self.encode_with(text, add_special, true)
    }

    /// Like [`Tokenizer::encode`] without what the model expects around a text, but the text of a special token is ordinary text: for
    /// text that must not be able to end a turn.
    pub fn encode_literal(&self, text: &str) -> Result<Vec<TokenId>, TextError> {
        self.encode_with(text, false, false)
    }

    /// Tokens of two texts that are read together, with what the model expects around and between them.
    ///
    /// # Errors
    /// As [`Self::encode`].
    pub fn encode_pair(&self, first: &str, second: &str) -> Result<Vec<TokenId>, TextError> {
        let Parts { encoder, wrap, .. } = self.parts();
        match *wrap {
            Wrap::Encoder => encoder.encode_pair(first, second),
            Wrap::Explicit { bos, eos } => {
                let (first, second) = (
                    encoder.encode(first, false, true)?,
                    encoder.encode(second, false, true)?,
                );
                Ok(bos.into_iter().chain(first).chain(second).chain(eos).collect())
            }
        }
    }

    fn encode_with(
        &self,
        text: &str,
        add_special: bool,
        parse_special: bool,
    ) -> Result<Vec<TokenId>, TextError> {
        let Parts { encoder, wrap, .. } = self.parts();
        match *wrap {
            Wrap::Explicit { bos, eos } if add_special => {
                let tokens = encoder.encode(text, false, parse_special)?;
                Ok(bos.into_iter().chain(tokens).chain(eos).collect())
            }
            _ => encoder.encode(text, add_special, parse_special),
        }
    }

    /// A lower bound of the number of tokens of `text`, a hundred times as fast as tokenizing; 0 if there is none.
    pub fn count_at_least(&self, text: &str) -> usize {
        let Parts { shrinks, vocab, .. } = self.parts();
        // Of a character of several bytes, all may get lost where one is unknown.
        let beyond_ascii = (0x80..=0xBF).chain(0xC2..=0xF4).all(|byte| vocab.has_byte(byte));
        let is_known = |byte: &u8| vocab.has_byte(*byte) && (byte.is_ascii() || beyond_ascii);
        let known = text.as_bytes().iter().filter(|byte| is_known(byte)).count();
        let most = match shrinks {
            // What is unknown may get lost, and nothing else does.
            Some(1) => vocab.longest(),
            Some(times) if known == text.len() => times * vocab.longest(),
            _ => return 0,
        };
        known.div_ceil(most.max(1))
    }

    /// Bytes of one token within a text (not at its start); empty outside the vocabulary.
    pub fn token_bytes(&self, id: TokenId) -> &[u8] {
        self.parts().vocab.bytes(id)
    }

    /// [`Tokenizer::token_bytes`] as text; bytes that are no UTF-8 on their own become U+FFFD.
    pub fn token_str(&self, id: TokenId) -> String {
        String::from_utf8_lossy(self.token_bytes(id)).into_owned()
    }

    /// Number of ids the tokenizer knows; the model's output layer may be padded beyond it.
    pub fn vocab_size(&self) -> usize {
        self.parts().vocab.len()
    }

    /// Tokens that end a text or a turn, without duplicates.
    pub fn eos_ids(&self) -> &[TokenId] {
        &self.parts().eos
    }

    /// The token that begins a text, if the model has one.
    pub fn bos_id(&self) -> Option<TokenId> {
        self.parts().bos
    }

    /// True for tokens that structure a text and are not part of it; decoding can skip them.
    pub fn is_special(&self, id: TokenId) -> bool {
        self.parts().vocab.is_special(id)
    }

    /// The special token that is written `text`, if there is one.
    pub fn special_token(&self, text: &str) -> Option<TokenId> {
        // Some encoders put a space before it.
        let tokens = self.encode(text, false).unwrap_or_default();
        tokens
            .into_iter()
            .find(|&token| self.is_special(token) && self.token_bytes(token) == text.as_bytes())
    }

    /// The token that is named `name` as a whole, special or not. Searches the vocabulary.
    pub(crate) fn token_named(&self, name: &str) -> Option<TokenId> {
        // Where it is no token of its own kind, `▁` in its name is read as a space.
        let spaced = name.replace('▁', " ");
        let is_it = |&id: &TokenId| {
            [name, &spaced]
                .iter()
                .any(|name| self.token_bytes(id) == name.as_bytes())
        };
        (0..self.vocab_size() as TokenId).find(is_it)
    }

    /// Special tokens by role, for chat templates.
    pub fn special_tokens(&self) -> &SpecialTokens {
        &self.parts().special_tokens
    }

    pub(crate) fn special_texts(&self) -> &SpecialTexts {
        let texts = || SpecialTexts::new(self.vocab().special());
        self.0.special_texts.get_or_init(texts)
    }

    fn parts(&self) -> &Parts {
        &self.0.parts
    }

    pub(crate) fn vocab(&self) -> &Vocab {
        &self.parts().vocab
    }
}

impl fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Parts {
            special_tokens,
            bos,
            eos,
            ..
        } = self.parts();
        let mut out = f.debug_struct("Tokenizer");
        out.field("vocab_size", &self.vocab_size())
            .field("special_tokens", special_tokens);
        out.field("bos", bos).field("eos", eos).finish_non_exhaustive()
    }
}

struct Bytes;

impl Bytes {
    const EOS: TokenId = 256;
    const EOS_TEXT: &str = "<|eos|>";
}

impl Encode for Bytes {
    fn encode(&self, text: &str, _add_special: bool, parse_special: bool) -> Result<Vec<TokenId>, TextError> {
        let bytes = |text: &str| text.bytes().map(TokenId::from).collect::<Vec<_>>();
        if !parse_special {
            return Ok(bytes(text));
        }
        let pieces: Vec<_> = text.split(Self::EOS_TEXT).map(bytes).collect();
        Ok(pieces.join(&Self::EOS))
    }
}
