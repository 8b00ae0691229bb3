use llguidance::toktrie::{INVALID_TOKEN, TokEnv, TokRxInfo, TokTrie, TokenizerEnv};
use plimsoll_core::TokenId;

use crate::Tokenizer;

/// A tokenizer as llguidance sees it: the bytes of all tokens as a trie, and how text is cut into tokens.
struct Tokens {
    trie: TokTrie,
    tokenizer: Tokenizer,
    /// Tokenization does not depend on the position in a text, so that text which the grammar forces gets the tokens that the
    /// model would choose.
    canonical: bool,
}

/// The tokens of `tokenizer`, of which `ends` end a text.
pub(super) fn environment(tokenizer: &Tokenizer, ends: &[TokenId]) -> TokEnv {
    let vocab = tokenizer.vocab();
    let words: Vec<Vec<u8>> = (0..vocab.len() as TokenId)
        .map(|id| match vocab.is_special(id) || ends.contains(&id) {
            // Text of a grammar never matches a special token.
            true => [&[TokTrie::SPECIAL_TOKEN_MARKER], vocab.bytes(id)].concat(),
            false => vocab.bytes(id).to_vec(),
        })
        .collect();
    let known: Vec<TokenId> = ends
        .iter()
        .copied()
        .filter(|&id| (id as usize) < words.len())
        .collect();
    let first = known.first().copied().unwrap_or(INVALID_TOKEN);
    let mut trie = TokTrie::from(&TokRxInfo::new(words.len() as u32, first), &words);
    if !known.is_empty() {
        trie = trie.with_eos_tokens(&known);
    }
    std::sync::Arc::new(Tokens {
        trie,
        canonical: !vocab.strip_leading_space,
        tokenizer: tokenizer.clone(),
    })
}

impl TokenizerEnv for Tokens {
    fn tok_trie(&self) -> &TokTrie {
        &self.trie
    }

    fn tokenize_bytes(&self, bytes: &[u8]) -> Vec<TokenId> {
        self.trie.tokenize_with_greedy_fallback(bytes, |text| {
            let tokens = self.tokenizer.encode_literal(text).unwrap_or_default();
            // Not if the tokenizer normalizes the text, or replaces parts by the unknown token.
            let bytes = tokens.iter().flat_map(|&token| self.tokenizer.token_bytes(token));
            match bytes.eq(text.as_bytes()) {
                true => tokens,
                false => self.trie.greedy_tokenize(text.as_bytes()),
            }
        })
    }

    fn tokenize_is_canonical(&self) -> bool {
        self.canonical
    }
}
