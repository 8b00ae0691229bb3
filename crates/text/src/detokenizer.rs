use std::sync::Arc;

use plimsoll_core::TokenId;

use crate::Tokenizer;

/// Decodes tokens incrementally: all text returned plus [`Detokenizer::flush`] always equals [`Tokenizer::decode`] of all
/// tokens. Holds back at most an incomplete UTF-8 character.
#[derive(Clone, Debug)]
pub struct Detokenizer {
    tokenizer: Tokenizer,
    skip_special: bool,
    /// Special tokens that are not skipped.
    shown: Arc<[TokenId]>,
    /// The next byte is the first of a text.
    at_start: bool,
    /// Bytes not given out: the beginning of a character, at most 3 between two calls.
    pending: Vec<u8>,
}

impl Tokenizer {
    /// Text of `tokens`; invalid UTF-8 becomes U+FFFD, ids outside the vocabulary nothing.
    pub fn decode(&self, tokens: &[TokenId], skip_special: bool) -> String {
        let mut detokenizer = self.detokenizer(skip_special);
        let mut text = String::new();
        tokens
            .iter()
            .for_each(|&token| detokenizer.push_to(token, &mut text));
        text + &detokenizer.flush()
    }

    /// Decodes token by token.
    pub fn detokenizer(&self, skip_special: bool) -> Detokenizer {
        Detokenizer::new(self.clone(), skip_special)
    }
}

impl Detokenizer {
    fn new(tokenizer: Tokenizer, skip_special: bool) -> Self {
        Self {
            tokenizer,
            skip_special,
            shown: Arc::default(),
            at_start: true,
            pending: Vec::new(),
        }
    }

    /// The tokens continue a text, as a model's output continues its prompt: a space before the first word is kept.
    #[must_use]
    pub fn continuing(mut self) -> Self {
        self.at_start = false;
        self
    }

    /// Shows these special tokens even if others are skipped: parsers of the text need them.
    #[must_use]
    pub fn showing(mut self, tokens: Arc<[TokenId]>) -> Self {
        self.shown = tokens;
        self
    }

    /// Adds a token; returns the text that it completes, which may be empty.
    pub fn push(&mut self, token: TokenId) -> String {
        let mut text = String::new();
        self.push_to(token, &mut text);
        text
    }

    /// Ends the text: an unfinished character becomes U+FFFD.
    pub fn flush(&mut self) -> String {
        let text = String::from_utf8_lossy(&self.pending).into_owned();
        self.pending.clear();
        text
    }

    /// [`Detokenizer::push`] onto the end of `text`.
    fn push_to(&mut self, token: TokenId, text: &mut String) {
        let vocab = self.tokenizer.vocab();
        if self.skip_special && vocab.is_special(token) && !self.shown.contains(&token) {
            return;
        }
        let mut bytes = vocab.bytes(token);
        if self.at_start && !bytes.is_empty() {
            self.at_start = false;
            if vocab.strip_leading_space {
                bytes = bytes.strip_prefix(b" ").unwrap_or(bytes);
            }
        }
        self.pending.extend_from_slice(bytes);
        let complete = self.pending.len() - unfinished(&self.pending);
        text.push_str(&String::from_utf8_lossy(&self.pending[..complete]));
        self.pending.drain(..complete);
    }
}

/// Bytes at the end that may yet become a character.
fn unfinished(bytes: &[u8]) -> usize {
    // A character is at most 4 bytes: only its first 1 to 3 can be unfinished.
    let tails = (1..=bytes.len().min(3)).rev().map(|n| &bytes[bytes.len() - n..]);
    let mut tails = tails.filter(|tail| tail[0] >= 0xC0);
    let unfinished = tails.find(|tail| {
        std::str::from_utf8(tail).is_err_and(|e| e.valid_up_to() == 0 && e.error_len().is_none())
    });
    unfinished.map_or(0, <[u8]>::len)
}
