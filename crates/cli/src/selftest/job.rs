//! One request of the load.

use serde_json::Value;

use super::answer::Expected;
use super::pictures::Kind;
use super::stage::Stage;

/// How a client goes away before it has its answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Leave {
    /// After so many events of a stream.
    Events(usize),
    /// After so many milliseconds.
    Millis(u64),
}

/// One request.
#[derive(Clone, Debug)]
pub(super) struct Job {
    pub(super) stage: Stage,
    /// What is special about it.
    pub(super) label: &'static str,
    pub(super) path: &'static str,
    pub(super) body: Value,
    pub(super) expected: Expected,
    pub(super) leave: Option<Leave>,
    /// Pictures that it has.
    pub(super) pictures: usize,
    /// Tokens of its prompt, with those of pictures. The few that a chat's words and template come to are not known, and not in it.
    pub(super) tokens: usize,
    /// Of these, how many are a beginning that other requests have too.
    pub(super) shared: usize,
}

impl Job {
    pub(super) fn streams(&self) -> bool {
        self.body["stream"] == true
    }

    /// Whether it waits until the server has time for its prompt ([`Backlog`](super::plan::Backlog)). Not where many requests at once are the
    /// goal, where prompts are short, and in the last stage.
    pub(super) fn is_measured(&self) -> bool {
        match self.stage {
            Stage::Longest | Stage::Mixed | Stage::Prefixes | Stage::Disconnects => true,
            Stage::Pictures => self.label != Kind::Largest.label(),
            Stage::Features | Stage::Full | Stage::Rows | Stage::Mix => false,
        }
    }

    /// Tokens of its prompt that the server computes, if it keeps common beginnings or not.
    pub(super) fn computed(&self, keeps_prefixes: bool) -> usize {
        self.tokens - if keeps_prefixes { self.shared } else { 0 }
    }

    /// The request, for people who want to send it again.
    pub(super) fn describe(&self) -> String {
        let kind = if self.streams() { "streamed" } else { "whole" };
        let (stage, label, expected) = (self.stage.name(), self.label, &self.expected);
        let prompt = expected
            .prompt_tokens
            .map(|tokens| format!("{tokens} prompt tokens"));
        let prompt = prompt.unwrap_or_else(|| "a chat".to_owned());
        format!(
            "{stage} ({label}, {kind}, {prompt}, {} to generate)",
            expected.max_tokens
        )
    }
}
