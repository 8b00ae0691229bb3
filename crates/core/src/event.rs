use crate::{Logprobs, PromptLogprob, StepError, TokenId};

/// What a client of the engine hears about its request, in this order: `Admitted`, then `Prompt`s if it asked for them, then
/// `Token`s, or `Pooled`. The last event is a `Token` or `Prompt` with `finish`, `Pooled`, or `Failed`.
#[derive(Clone, Debug)]
pub enum Event {
    /// The request got KV and its first step is about to begin. Repeated after a preemption.
    Admitted {
        /// Prompt tokens that need not be computed because the prefix cache holds them.
        cached_tokens: usize,
    },
    /// The log-probabilities of the prompt's next tokens.
    Prompt(PromptEvent),
    /// One more token.
    Token(TokenEvent),
    /// The vector of a request that is pooled, not normalised.
    Pooled(Vec<f32>),
    /// The step that worked on this request failed; nothing more will come.
    Failed(StepError),
}

/// Some of the prompt is scored.
#[derive(Clone, Debug, PartialEq)]
pub struct PromptEvent {
    /// Of the tokens after those told before; the first event begins with the prompt's second token, as nothing predicts the
    /// first. Every token is told once, whatever had to be computed again.
    pub logprobs: Vec<PromptLogprob>,
    /// Present on the last event of a request for no output.
    pub finish: Option<FinishReason>,
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
    /// The request's constraints allow no further token. The last one is text.
    Complete,
    /// `max_tokens` were generated.
    Length,
}
