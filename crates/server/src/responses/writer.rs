//! Builds a response while it is generated, and its stream of events.

use std::sync::Arc;

use plimsoll_core::TenantId;
use plimsoll_text::Tokenizer;

use super::tools::Functions;
use crate::conversation::{Delta, End, EndReason, Update};
use crate::error::ApiError;
use crate::generate::TokenLogprobs;
use crate::respond::{EventFormat, Log, SseEvent, fresh_id};
use crate::response_store::Turn;
use crate::scores;
use crate::sealed;
use crate::state::AppState;
use crate::time::unix_seconds;
use crate::wire::common::Usage;
use crate::wire::responses::{
    Event, FunctionCall, IncompleteDetails, InputTokensDetails, Item, ItemStatus, Logprob, MessageItem,
    OutputTokensDetails, Part, Payload, Reasoning, ReasoningText, ResponseError, ResponseObject,
    ResponseStatus, ResponseUsage, Role, TokenLogprob,
};

/// A response that is being built.
pub(crate) struct Writer {
    response: ResponseObject,
    functions: Functions,
    tokenizer: Tokenizer,
    shown: Shown,
    keep: Option<Keep>,
    /// The last item of the output is not complete.
    open: bool,
    /// Log-probabilities of tokens whose text has not come, such as the beginning of markup.
    unclaimed: Vec<TokenLogprobs>,
    log: Numbered,
}

/// What `include` adds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Shown {
    /// Log-probabilities of the text's tokens.
    pub(crate) logprobs: bool,
    /// Reasoning also as `encrypted_content`.
    pub(crate) sealed_reasoning: bool,
}

/// Where the response is stored when complete.
pub(crate) struct Keep {
    pub(crate) state: AppState,
    pub(crate) owner: TenantId,
    pub(crate) previous: Option<Arc<Turn>>,
    pub(crate) input: Vec<Item>,
}

/// Events that were not sent yet, numbered.
struct Numbered {
    sequence_number: u64,
    log: Log,
}

impl Numbered {
    fn push(&mut self, r#type: &'static str, payload: Payload<'_>) {
        let sequence_number = self.sequence_number;
        let event = Event {
            r#type,
            sequence_number,
            payload,
        };
        self.log.push(r#type, &event);
        self.sequence_number += 1;
    }
}

impl Writer {
    /// Starts from a response without output. `streamed`: record events.
    pub(crate) fn new(
        response: ResponseObject,
        functions: Functions,
        tokenizer: Tokenizer,
        shown: Shown,
        streamed: bool,
    ) -> Self {
        Self {
            response,
            functions,
            tokenizer,
            shown,
            keep: None,
            open: false,
            unclaimed: Vec::new(),
            log: Numbered {
                sequence_number: 0,
                log: Log::new(streamed),
            },
        }
    }

    /// Stores the response when complete.
    pub(crate) fn keep(mut self, keep: Option<Keep>) -> Self {
        self.keep = keep;
        self
    }

    /// The response so far.
    pub(crate) fn into_response(self) -> ResponseObject {
        self.response
    }

    /// Adds an update.
    pub(crate) fn write(&mut self, update: Update) {
        let held = self.unclaimed.len();
        self.unclaimed.extend(update.logprobs);
        let mut claimed = 0;
        for (delta, end) in update.deltas.into_iter().zip(update.ends) {
            let logprobs: Vec<_> = self.unclaimed.drain(..held + end - claimed).collect();
            claimed += logprobs.len();
            match delta {
                Delta::Reasoning(text) => self.reason(&text),
                Delta::Content(text) => self.say(&text, logprobs),
                Delta::ToolCall { id, name, .. } => self.call(id, name),
                Delta::ToolArguments { fragment, .. } => self.argue(&fragment),
            }
        }
        if let Some(end) = update.end {
            self.finish(&end);
        }
    }

    fn reason(&mut self, text: &str) {
        if !(self.open && matches!(self.response.output.last(), Some(Item::Reasoning(_)))) {
            self.start(Item::Reasoning(Reasoning {
                id: fresh_id("rs"),
                summary: Vec::new(),
                content: Vec::new(),
                encrypted_content: None,
                status: ItemStatus::InProgress,
            }));
            if let (output_index, Some(Item::Reasoning(item))) = last(&mut self.response.output) {
                item.content.push(ReasoningText { text: String::new() });
                let part = Part::ReasoningText { text: String::new() };
                let payload = part_of(&item.id, output_index, &part);
                self.log.push("response.content_part.added", payload);
            }
        }
        if let (output_index, Some(Item::Reasoning(item))) = last(&mut self.response.output) {
            item.content[0].text += text;
            let payload = Payload::ReasoningDelta {
                item_id: &item.id,
                output_index,
                content_index: 0,
                delta: text,
            };
            self.log.push("response.reasoning_text.delta", payload);
        }
    }

    fn say(&mut self, text: &str, mut logprobs: Vec<TokenLogprobs>) {
        if !(self.open && matches!(self.response.output.last(), Some(Item::Message(_)))) {
            self.start(Item::Message(MessageItem {
                id: fresh_id("msg"),
                status: ItemStatus::InProgress,
                role: Role::Assistant,
                content: Vec::new(),
            }));
            if let (output_index, Some(Item::Message(item))) = last(&mut self.response.output) {
                let part = Part::OutputText {
                    text: String::new(),
                    annotations: Vec::new(),
                    logprobs: Vec::new(),
                };
                let payload = part_of(&item.id, output_index, &part);
                self.log.push("response.content_part.added", payload);
                item.content.push(part);
            }
            // Reasoning and markup before the text have log-probabilities too, which are not reported.
            logprobs.drain(..before(text, &logprobs, &self.tokenizer));
        }
        let new = match self.shown.logprobs {
            true => wire_logprobs(&logprobs, &self.tokenizer),
            false => Vec::new(),
        };
        let (output_index, item) = last(&mut self.response.output);
        let Some(Item::Message(item)) = item else { return };
        let Some(Part::OutputText {
            text: all, logprobs, ..
        }) = item.content.last_mut()
        else {
            return;
        };
        *all += text;
        if !text.is_empty() {
            let payload = Payload::TextDelta {
                item_id: &item.id,
                output_index,
                content_index: 0,
                delta: text,
                logprobs: &new,
            };
            self.log.push("response.output_text.delta", payload);
        }
        logprobs.extend(new);
    }

    fn call(&mut self, call_id: String, called: String) {
        let (namespace, name) = self.functions.named(called);
        self.start(Item::FunctionCall(FunctionCall {
            id: fresh_id("fc"),
            call_id,
            name,
            namespace,
            arguments: String::new(),
            status: ItemStatus::InProgress,
        }));
    }

    fn argue(&mut self, fragment: &str) {
        if let (output_index, Some(Item::FunctionCall(item))) = last(&mut self.response.output) {
            item.arguments += fragment;
            let payload = Payload::ArgumentsDelta {
                item_id: &item.id,
                output_index,
                delta: fragment,
            };
            self.log.push("response.function_call_arguments.delta", payload);
        }
    }

    /// Ends the current item and starts a new one.
    fn start(&mut self, item: Item) {
        self.close(ItemStatus::Completed);
        let payload = Payload::Item {
            output_index: self.response.output.len(),
            item: &item,
        };
        self.log.push("response.output_item.added", payload);
        self.response.output.push(item);
        self.open = true;
    }

    /// Ends the current item.
    fn close(&mut self, status: ItemStatus) {
        if !std::mem::replace(&mut self.open, false) {
            return;
        }
        let (output_index, Some(item)) = last(&mut self.response.output) else {
            return;
        };
        let log = &mut self.log;
        match item {
            Item::Reasoning(item) => {
                item.status = status;
                let text = item.content[0].text.clone();
                item.encrypted_content = self.shown.sealed_reasoning.then(|| sealed::seal(&text));
                let payload = Payload::ReasoningDone {
                    item_id: &item.id,
                    output_index,
                    content_index: 0,
                    text: &text,
                };
                log.push("response.reasoning_text.done", payload);
                let part = Part::ReasoningText { text };
                let payload = part_of(&item.id, output_index, &part);
                log.push("response.content_part.done", payload);
            }
            Item::Message(item) => {
                item.status = status;
                if let Some(part) = item.content.last() {
                    if let Part::OutputText { text, logprobs, .. } = part {
                        let payload = Payload::TextDone {
                            item_id: &item.id,
                            output_index,
                            content_index: 0,
                            text,
                            logprobs,
                        };
                        log.push("response.output_text.done", payload);
                    }
                    let payload = part_of(&item.id, output_index, part);
                    log.push("response.content_part.done", payload);
                }
            }
            Item::FunctionCall(item) => {
                item.status = status;
                let payload = Payload::ArgumentsDone {
                    item_id: &item.id,
                    output_index,
                    name: &item.name,
                    arguments: &item.arguments,
                };
                log.push("response.function_call_arguments.done", payload);
            }
            Item::FunctionCallOutput(_) => {}
        }
        log.push("response.output_item.done", Payload::Item { output_index, item });
    }

    fn finish(&mut self, end: &End) {
        let complete = end.reason != EndReason::Length;
        if complete && self.response.output.is_empty() {
            self.say("", Vec::new());
        }
        self.close(match complete {
            true => ItemStatus::Completed,
            false => ItemStatus::Incomplete,
        });
        let response = &mut self.response;
        response.usage = Some(usage(&end.usage));
        let event = if complete {
            response.status = ResponseStatus::Completed;
            response.completed_at = Some(unix_seconds());
            "response.completed"
        } else {
            response.status = ResponseStatus::Incomplete;
            response.incomplete_details = Some(IncompleteDetails {
                reason: "max_output_tokens",
            });
            "response.incomplete"
        };
        self.ended(event);
    }

    fn ended(&mut self, event: &'static str) {
        let response = &self.response;
        self.log.push(event, Payload::Response { response });
        if let Some(keep) = self.keep.take() {
            let store = keep.state.responses();
            store.keep(keep.owner, keep.previous, keep.input, response.clone());
        }
    }
}

impl EventFormat for Writer {
    type Item = Update;

    fn begin(&mut self) -> Vec<SseEvent> {
        for event in ["response.created", "response.in_progress"] {
            let response = &self.response;
            self.log.push(event, Payload::Response { response });
        }
        self.log.log.take()
    }

    fn item(&mut self, update: Update) -> Vec<SseEvent> {
        self.write(update);
        self.log.log.take()
    }

    /// The last event was already sent.
    fn end(&mut self) -> Vec<SseEvent> {
        Vec::new()
    }

    fn fail(&mut self, error: ApiError) -> Vec<SseEvent> {
        // Failed responses are not stored: they cannot be continued.
        self.keep = None;
        self.close(ItemStatus::Incomplete);
        self.response.status = ResponseStatus::Failed;
        self.response.error = Some(ResponseError {
            code: "server_error",
            message: error.to_string(),
        });
        self.ended("response.failed");
        self.log.log.take()
    }
}

/// The last item, and its index.
fn last(output: &mut [Item]) -> (usize, Option<&mut Item>) {
    (output.len().saturating_sub(1), output.last_mut())
}

fn part_of<'a>(item_id: &'a str, output_index: usize, part: &'a Part) -> Payload<'a> {
    Payload::Part {
        item_id,
        output_index,
        content_index: 0,
        part,
    }
}

fn usage(usage: &Usage) -> ResponseUsage {
    ResponseUsage {
        input_tokens: usage.prompt_tokens,
        input_tokens_details: InputTokensDetails {
            cached_tokens: usage.prompt_tokens_details.cached_tokens,
            cache_write_tokens: 0,
        },
        output_tokens: usage.completion_tokens,
        output_tokens_details: OutputTokensDetails {
            reasoning_tokens: usage
                .completion_tokens_details
                .map_or(0, |details| details.reasoning_tokens),
        },
        total_tokens: usage.total_tokens,
    }
}

/// How many of `tokens` come before `text`, which they spell at the end, or nearly there.
fn before(text: &str, tokens: &[TokenLogprobs], tokenizer: &Tokenizer) -> usize {
    let mut bytes = Vec::new();
    let ends: Vec<usize> = tokens
        .iter()
        .map(|token| {
            bytes.extend_from_slice(tokenizer.token_bytes(token.token));
            bytes.len()
        })
        .collect();
    let found = (0..=bytes.len())
        .rev()
        .find(|&at| bytes[at..].starts_with(text.as_bytes()));
    // Text that is not written so, such as an incomplete character, is taken to have all of them.
    found.map_or(0, |at| ends.partition_point(|&end| end <= at))
}

fn wire_logprobs(tokens: &[TokenLogprobs], tokenizer: &Tokenizer) -> Vec<TokenLogprob> {
    let one = |token, logprob| Logprob {
        token: tokenizer.token_str(token),
        bytes: tokenizer.token_bytes(token).to_vec(),
        logprob: scores::number(logprob),
    };
    let tokens = tokens.iter().map(|t| TokenLogprob {
        token: one(t.token, t.logprobs.sampled),
        top_logprobs: t
            .logprobs
            .top
            .iter()
            .map(|top| one(top.token, top.logprob))
            .collect(),
    });
    tokens.collect()
}
