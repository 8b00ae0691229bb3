//! Parses one choice while it is generated.

use futures::{Stream, stream};
use plimsoll_core::{FinishReason, PromptLogprob, TokenId};
use plimsoll_text::{AnswerFormat, AnswerParser, Part, ToolFormat};
use rand::Rng;
use rand::distr::Alphanumeric;

use super::update::{Delta, End, EndReason, Update};
use crate::error::ApiError;
use crate::generate::{Choice, Output, TokenLogprobs};
use crate::wire::common::StopReason;

/// How the answers of one conversation are parsed.
#[derive(Clone, Debug)]
pub(super) struct Style {
    pub(super) format: AnswerFormat,
    /// Report reasoning.
    pub(super) include_reasoning: bool,
    /// Tool calls are required: the answer has nothing else.
    pub(super) must_call: bool,
}

/// Parses the text of one choice into deltas.
#[derive(Debug)]
pub(super) struct Reader {
    index: usize,
    choice: Choice,
    parser: AnswerParser,
    /// Mistral's templates require ids of nine characters.
    short_ids: bool,
    include_reasoning: bool,
    must_call: bool,
    reasoning_tokens: usize,
    /// Calls so far.
    calls: usize,
    /// Of tokens whose text was not emitted yet.
    logprobs: Vec<TokenLogprobs>,
    /// Likewise.
    tokens: Vec<TokenId>,
    /// Until emitted.
    prompt: Vec<PromptLogprob>,
}

impl Reader {
    pub(super) fn new(index: usize, choice: Choice, style: &Style) -> Self {
        Self {
            index,
            choice,
            parser: AnswerParser::new(&style.format),
            short_ids: style.format.tools == Some(ToolFormat::Mistral),
            include_reasoning: style.include_reasoning,
            must_call: style.must_call,
            reasoning_tokens: 0,
            calls: 0,
            logprobs: Vec::new(),
            tokens: Vec::new(),
            prompt: Vec::new(),
        }
    }

    /// As [`Choice::prompt_tokens`].
    pub(super) fn prompt_tokens(&self) -> usize {
        self.choice.prompt_tokens()
    }

    /// Updates as they come; an error is the last item.
    pub(super) fn updates(self) -> impl Stream<Item = Result<Update, ApiError>> + Send {
        stream::unfold(self, |mut reader| async {
            reader.next().await.map(|update| (update, reader))
        })
    }

    /// The next update with new deltas or the end.
    async fn next(&mut self) -> Option<Result<Update, ApiError>> {
        loop {
            match self.choice.next().await? {
                Ok(output) => {
                    let update = self.read(output);
                    if !update.deltas.is_empty() || update.end.is_some() {
                        return Some(Ok(update));
                    }
                }
                Err(error) => return Some(Err(error)),
            }
        }
    }

    fn read(&mut self, output: Output) -> Update {
        let mut update = Update::default();
        let held = self.logprobs.len();
        let mut from = 0;
        for (&to, &scored) in output.ends.iter().zip(&output.scored) {
            let before = self.parser.in_reasoning();
            let parts = self.parser.push(&output.text[from..to]);
            self.add(parts, held + scored, &mut update);
            from = to;
            self.reasoning_tokens += usize::from(before || self.parser.in_reasoning());
        }
        let mut end = output.finish.map(|reason| End {
            reason: match reason {
                FinishReason::Stop | FinishReason::Complete => EndReason::Stop,
                FinishReason::Length => EndReason::Length,
            },
            stop: output.stop,
            usage: output.usage,
        });
        if self.parser.is_full() {
            // The maximum number of calls is reached.
            end = Some(End {
                reason: EndReason::Stop,
                stop: None,
                usage: self.choice.end(FinishReason::Stop),
            });
        }
        if let Some(end) = &mut end {
            let is_cut = end.reason == EndReason::Length || matches!(end.stop, Some(StopReason::Text(_)));
            let mut parts = match is_cut {
                true => self.parser.cut_off(),
                false => self.parser.finish(),
            };
            // The beginning of an incomplete call is not content.
            parts.retain(|part| !(is_cut && self.must_call && matches!(part, Part::Content(_))));
            self.add(parts, held + output.logprobs.len(), &mut update);
            end.usage = end.usage.with_reasoning(self.reasoning_tokens);
            if end.reason == EndReason::Stop && self.calls > 0 {
                end.reason = EndReason::ToolCalls;
            }
        }
        self.logprobs.extend(output.logprobs);
        self.tokens.extend(output.tokens);
        self.prompt.extend(output.prompt);
        (update.choice, update.so_far, update.end) = (self.index, output.so_far, end);
        if update.end.is_some() || !update.deltas.is_empty() {
            update.logprobs = std::mem::take(&mut self.logprobs);
            update.tokens = std::mem::take(&mut self.tokens);
            update.prompt = std::mem::take(&mut self.prompt);
        }
        update
    }

    /// Appends deltas, merging adjacent ones of the same kind. Of the log-probabilities, `scored` are those up to the token that ended
    /// these parts.
    fn add(&mut self, parts: Vec<Part>, scored: usize, update: &mut Update) {
        let deltas = &mut update.deltas;
        for part in parts {
            match (part, deltas.last_mut()) {
                (Part::Reasoning(_), _) if !self.include_reasoning => continue,
                (Part::Reasoning(more), Some(Delta::Reasoning(text)))
                | (Part::Content(more), Some(Delta::Content(text))) => text.push_str(&more),
                (Part::Arguments(more), Some(Delta::ToolArguments { fragment, .. })) => {
                    fragment.push_str(&more)
                }
                (Part::Reasoning(text), _) => deltas.push(Delta::Reasoning(text)),
                (Part::Content(text), _) => deltas.push(Delta::Content(text)),
                (Part::Call { name }, _) => {
                    deltas.push(Delta::ToolCall {
                        index: self.calls,
                        id: self.call_id(),
                        name,
                    });
                    self.calls += 1;
                }
                (Part::Arguments(fragment), _) => deltas.push(Delta::ToolArguments {
                    index: self.calls.saturating_sub(1),
                    fragment,
                }),
            }
            update.ends.truncate(deltas.len() - 1);
            update.ends.push(scored);
        }
    }

    fn call_id(&self) -> String {
        let random = |length: usize| rand::rng().sample_iter(Alphanumeric).take(length).map(char::from);
        match self.short_ids {
            true => random(9).collect(),
            false => "call_".chars().chain(random(24)).collect(),
        }
    }
}
