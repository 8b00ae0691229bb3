use crate::{Logprobs, PromptLogprob, StepError, TokenId};

/// Events of one request, in this order: `Admitted`, then `Prompt`s if it asked for them, then
/// `Token`s, or `Pooled`. The last event is a `Token` or `Prompt` with `finish`, `Pooled`, or `Failed`.
#[derive(Clone, Debug)]
pub enum Event {
    /// The request got KV blocks and its first step is about to begin. Repeated after a preemption.
    Admitted {
        /// Prompt tokens that need not be computed because the prefix cache holds them.
        cached_tokens: usize,
    },
    /// The log-probabilities of the prompt's next tokens.
    Prompt(PromptEvent),
    /// One more token.
    Token(TokenEvent),
    /// The embedding, not normalised.
    Pooled(Vec<f32>),
    /// The request failed; this is its last event.
    Failed(StepError),
}

/// Log-probabilities of a part of the prompt.
#[derive(Clone, Debug, PartialEq)]
pub struct PromptEvent {
    /// Those of the next prompt tokens. The first event begins with the second token, as nothing predicts the first. Each token
    /// is reported once, even if a preemption made the engine compute it again.
    pub logprobs: Vec<PromptLogprob>,
    /// Present on the last event of a request without output.
    pub finish: Option<FinishReason>,
}

/// One generated token.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenEvent {
    /// The token.
    pub token: TokenId,
    /// Present if requested.
    pub logprobs: Option<Logprobs>,
    /// Present on the last token.
    pub finish: Option<FinishReason>,
}

/// Why generation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FinishReason {
    /// The last token is one of the request's stop tokens.
    Stop,
    /// The request's constraints allow no further token. The last token is part of the text.
    Complete,
    /// `max_tokens` were generated.
    Length,
}
