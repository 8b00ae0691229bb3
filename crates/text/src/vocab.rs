use std::collections::HashMap;
use std::sync::LazyLock;

use plimsoll_core::TokenId;

/// The bytes of every token. A text is the concatenation of its tokens' bytes, read as UTF-8; if the tokenizer adds a space at
/// the start of a text, decoding removes it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Vocab {
    bytes: Vec<u8>,
    /// `bytes[ends[id - 1]..ends[id]]` is token `id`.
    ends: Vec<u32>,
    special: Vec<bool>,
    /// Bytes of the longest token.
    longest: usize,
    /// Bit `b` is 1 where the byte `b` is a token by itself.
    single: [u64; 4],
    /// The encoder puts a space before the text, so the decoder removes one from its start.
    pub(crate) strip_leading_space: bool,
}

impl Vocab {
    pub(crate) fn new(strip_leading_space: bool) -> Self {
        Self {
            strip_leading_space,
            ..Self::default()
        }
    }

    /// Appends the next id.
    pub(crate) fn push(&mut self, bytes: &[u8], special: bool) {
        self.bytes.extend_from_slice(bytes);
        self.ends
            .push(u32::try_from(self.bytes.len()).expect("a vocabulary is below 4 GiB"));
        self.special.push(special);
        self.longest = self.longest.max(bytes.len());
        if let [byte] = bytes {
            self.single[usize::from(byte / 64)] |= 1 << (byte % 64);
        }
    }

    /// Bytes of the longest token.
    pub(crate) fn longest(&self) -> usize {
        self.longest
    }

    /// Whether `byte` is a token by itself: others may be unknown.
    pub(crate) fn has_byte(&self, byte: u8) -> bool {
        self.single[usize::from(byte / 64)] >> (byte % 64) & 1 == 1
    }

    /// Number of ids.
    pub(crate) fn len(&self) -> usize {
        self.ends.len()
    }

    /// The token's bytes; none for an id outside the vocabulary (models pad their output layer).
    pub(crate) fn bytes(&self, id: TokenId) -> &[u8] {
        let id = id as usize;
        match self.ends.get(id) {
            Some(&end) => &self.bytes[if id == 0 { 0 } else { self.ends[id - 1] as usize }..end as usize],
            None => &[],
        }
    }

    /// True for tokens that structure a text (end of turn, ...) and are not part of it.
    /// The texts of special tokens.
    pub(crate) fn special(&self) -> impl Iterator<Item = &[u8]> {
        let ids = (0..self.len() as TokenId).filter(|&id| self.is_special(id));
        ids.map(|id| self.bytes(id))
    }

    pub(crate) fn is_special(&self, id: TokenId) -> bool {
        self.special.get(id as usize).copied().unwrap_or(false)
    }
}

/// GPT-2's printable stand-in for each byte (`bytes_to_unicode` in OpenAI's gpt-2 `encoder.py`).
static BYTE_OF_CHAR: LazyLock<HashMap<char, u8>> = LazyLock::new(|| {
    let printable = |b: u8| matches!(b, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    let rest = (0..=255u8).filter(|&b| !printable(b)).zip(256u32..);
    let direct = (0..=255u8).filter(|&b| printable(b)).map(|b| (b, u32::from(b)));
    direct
        .chain(rest)
        .map(|(b, code)| (char::from_u32(code).expect("below the surrogates"), b))
        .collect()
});

/// Bytes of a token of a byte-level vocabulary; its literal text where it is none.
pub(crate) fn byte_level(token: &str) -> Vec<u8> {
    token
        .chars()
        .map(|c| BYTE_OF_CHAR.get(&c).copied())
        .collect::<Option<_>>()
        .unwrap_or_else(|| token.into())
}

/// The byte that SentencePiece's `<0xNN>` stands for.
pub(crate) fn byte_fallback(token: &str) -> Option<u8> {
    let hex = token.strip_prefix("<0x")?.strip_suffix('>')?;
    (hex.len() == 2)
        .then(|| u8::from_str_radix(hex, 16).ok())
        .flatten()
}

/// Bytes of a token of a SentencePiece vocabulary: `▁` is a space.
pub(crate) fn sentencepiece(token: &str) -> Vec<u8> {
    token.replace('▁', " ").into_bytes()
}
