//! What a choice gains while it is generated.

use plimsoll_core::{PromptLogprob, TokenId};

use crate::generate::TokenLogprobs;
use crate::wire::common::{StopReason, Usage};

/// What an answer gained. Tool calls come one after the other: the fragments that follow a `ToolCall` are its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Delta {
    /// What the model thinks before it answers.
    Reasoning(String),
    /// The answer's text.
    Content(String),
    /// A tool call begins.
    ToolCall {
        /// Counts the calls of this answer from 0.
        index: usize,
        /// Made up by this server.
        id: String,
        /// The function's name, whole.
        name: String,
    },
    /// More of the arguments of call `index`: a piece of JSON text.
    ToolArguments { index: usize, fragment: String },
}

/// What one choice gained since its last update; its last one has `end`.
#[derive(Debug, Default)]
pub(crate) struct Update {
    /// Which choice.
    pub(crate) choice: usize,
    pub(crate) deltas: Vec<Delta>,
    /// Of every token that was generated, in order, also those of markup and reasoning; they come with the first delta that
    /// holds some of their text, or with the end.
    pub(crate) logprobs: Vec<TokenLogprobs>,
    /// Of the prompt's tokens, from the second on, if they were asked for.
    pub(crate) prompt: Vec<PromptLogprob>,
    /// Tokens that were generated, the one that ends the choice included.
    pub(crate) tokens: Vec<TokenId>,
    /// Of the choice, so far.
    pub(crate) so_far: Usage,
    pub(crate) end: Option<End>,
}

/// How a choice ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct End {
    pub(crate) reason: EndReason,
    /// What the client named to end it, if that did.
    pub(crate) stop: Option<StopReason>,
    /// What the choice adds to the usage of the response.
    pub(crate) usage: Usage,
}

/// Why a choice ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EndReason {
    /// The model is done, or a stop string came.
    Stop,
    /// `max_tokens`, or the context is full.
    Length,
    /// The model is done and calls tools.
    ToolCalls,
}
