//! Answers while they are generated, and whole.

use futures::{Stream, StreamExt, stream};
use plimsoll_core::{PromptLogprob, TokenId};

use super::reader::{Reader, Style};
use super::update::{Delta, End, Update};
use crate::error::ApiError;
use crate::generate::{Choice, TokenLogprobs};

/// One choice, whole.
#[derive(Debug, Default)]
pub(crate) struct Answer {
    pub(crate) reasoning: String,
    pub(crate) content: String,
    pub(crate) tool_calls: Vec<ToolCall>,
    pub(crate) logprobs: Vec<TokenLogprobs>,
    /// As in [`Update`].
    pub(crate) prompt: Vec<PromptLogprob>,
    /// As in [`Update`].
    pub(crate) tokens: Vec<TokenId>,
}

impl Answer {
    fn add(&mut self, update: Update) {
        for delta in update.deltas {
            match delta {
                Delta::Reasoning(text) => self.reasoning += &text,
                Delta::Content(text) => self.content += &text,
                Delta::ToolCall { id, name, .. } => self.tool_calls.push(ToolCall {
                    id,
                    name,
                    arguments: String::new(),
                }),
                Delta::ToolArguments { index, fragment } => self.tool_calls[index].arguments += &fragment,
            }
        }
        self.logprobs.extend(update.logprobs);
        self.prompt.extend(update.prompt);
        self.tokens.extend(update.tokens);
    }

    /// Takes the content. Empty content is `None` if there are tool calls or reasoning.
    pub(crate) fn take_content(&mut self) -> Option<String> {
        let content = std::mem::take(&mut self.content);
        let alone = self.tool_calls.is_empty() && self.reasoning.is_empty();
        (alone || !content.is_empty()).then_some(content)
    }
}

/// A tool call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ToolCall {
    pub(crate) id: String,
    pub(crate) name: String,
    /// JSON text as the model wrote it; it may be invalid.
    pub(crate) arguments: String,
}

/// The answers to a conversation, `n` of them. Dropping them cancels.
#[derive(Debug)]
pub(crate) struct Answers {
    prompt: Vec<TokenId>,
    readers: Vec<Reader>,
}

impl Answers {
    pub(super) fn new(prompt: Vec<TokenId>, choices: Vec<Choice>, style: &Style) -> Self {
        let readers = choices
            .into_iter()
            .enumerate()
            .map(|(index, choice)| Reader::new(index, choice, style));
        Self {
            prompt,
            readers: readers.collect(),
        }
    }

    /// The prompt's tokens.
    pub(crate) fn prompt(&self) -> &[TokenId] {
        &self.prompt
    }

    /// Number of choices.
    pub(crate) fn len(&self) -> usize {
        self.readers.len()
    }

    /// Tokens of the prompt.
    pub(crate) fn prompt_tokens(&self) -> usize {
        self.readers.iter().map(Reader::prompt_tokens).sum()
    }

    /// Updates of all choices as they arrive; an error is the last item.
    pub(crate) fn updates(self) -> impl Stream<Item = Result<Update, ApiError>> + Send {
        stream::select_all(self.readers.into_iter().map(|reader| reader.updates().boxed()))
    }

    /// Waits for all choices, in order. The first error cancels the others.
    pub(crate) async fn whole(self) -> Result<Vec<(Answer, End)>, ApiError> {
        let mut answers: Vec<(Answer, Option<End>)> = Vec::new();
        answers.resize_with(self.len(), Default::default);
        let mut updates = std::pin::pin!(self.updates());
        while let Some(update) = updates.next().await {
            let mut update = update?;
            let (answer, end) = &mut answers[update.choice];
            *end = end.take().or(update.end.take());
            answer.add(update);
        }
        let ended = answers.into_iter().map(|(answer, end)| Some((answer, end?)));
        let ended: Option<_> = ended.collect();
        ended.ok_or_else(|| ApiError::Internal("a choice did not end".into()))
    }
}
