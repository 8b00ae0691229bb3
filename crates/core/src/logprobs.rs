use crate::TokenId;

/// Log-probability of a prompt token by the model's own distribution: no penalty, bias, temperature or truncation.
#[derive(Clone, Debug, PartialEq)]
pub struct PromptLogprob {
    /// The token.
    pub token: TokenId,
    /// Natural logarithm of its probability.
    pub logprob: f32,
    /// Rank in the vocabulary, 1 for the most likely token. Ties rank by token id.
    pub rank: u32,
    /// The most likely tokens, best first, as many as requested.
    pub top: Vec<TokenLogprob>,
}

/// Log-probabilities at one position, after penalties and bias, before temperature and truncation.
#[derive(Clone, Debug, PartialEq)]
pub struct Logprobs {
    /// Of the sampled token.
    pub sampled: f32,
    /// The most likely tokens, best first, as many as requested.
    pub top: Vec<TokenLogprob>,
}

/// One candidate.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TokenLogprob {
    /// The token.
    pub token: TokenId,
    /// Natural logarithm of its probability.
    pub logprob: f32,
}
