use crate::TokenId;

/// How likely a token of the prompt was, by the model's own distribution: no penalty, bias, temperature or truncation.
#[derive(Clone, Debug, PartialEq)]
pub struct PromptLogprob {
    /// The token.
    pub token: TokenId,
    /// Natural logarithm of its probability.
    pub logprob: f32,
    /// 1 for the likeliest of all. Equal ones rank by lower token id.
    pub rank: u32,
    /// The likeliest tokens, best first, as many as were asked for.
    pub top: Vec<TokenLogprob>,
}

/// Log-probabilities at one position, after penalties and bias, before temperature and truncation.
#[derive(Clone, Debug, PartialEq)]
pub struct Logprobs {
    /// Of the sampled token.
    pub sampled: f32,
    /// The likeliest tokens, best first, as many as were asked for.
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
