use crate::{StepError, TokenId};

/// What a client of the engine hears about its request, in this order: `Admitted`, then `Token`s. The last event is a
/// `Token` with `finish`, or `Failed`.
#[derive(Clone, Debug)]
pub enum Event {
    /// The request got KV and runs. Repeated after a preemption.
    Admitted {
        /// Prompt tokens that need not be computed because the prefix cache holds them.
        cached_tokens: usize,
    },
    /// One more token.
    Token(TokenEvent),
    /// The step that worked on this request failed; nothing more will come.
    Failed(StepError),
}

/// One generated token.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenEvent {
    /// The token.
    pub token: TokenId,
    /// Present where asked for.
    pub logprobs: Option<Logprobs>,
    /// Present on the last token.
    pub finish: Option<FinishReason>,
}

/// Why a request ended by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FinishReason {
    /// The last token is one of the request's stop tokens.
    Stop,
    /// `max_tokens` were generated.
    Length,
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
