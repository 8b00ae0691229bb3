//! Masks of tokens: bit `t % 32` of word `t / 32` is 1 where token `t` is allowed.

use crate::TokenId;

/// Words of the mask of a vocabulary.
pub fn words(vocab_size: usize) -> usize {
    vocab_size.div_ceil(32)
}

/// Whether a mask allows this token; none beyond its end is allowed.
pub fn allows(mask: &[u32], token: TokenId) -> bool {
    let word = mask.get(token as usize / 32);
    word.is_some_and(|word| word >> (token % 32) & 1 == 1)
}

/// Allows this token; one beyond the end stays forbidden.
pub fn allow(mask: &mut [u32], token: TokenId) {
    if let Some(word) = mask.get_mut(token as usize / 32) {
        *word |= 1 << (token % 32);
    }
}

/// Forbids this token.
pub fn forbid(mask: &mut [u32], token: TokenId) {
    if let Some(word) = mask.get_mut(token as usize / 32) {
        *word &= !(1 << (token % 32));
    }
}
