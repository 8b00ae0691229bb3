//! Builds a message while it is generated, and its stream of events.

use super::error;
use crate::conversation::{Delta, End, EndReason, Update};
use crate::error::ApiError;
use crate::respond::{EventFormat, Log, SseEvent, fresh_id, named};
use crate::sealed;
use crate::transcript::arguments;
use crate::wire::anthropic::{Block, BlockDelta, Event, Message, MessageEnd, MessageUsage, StopReason};
use crate::wire::common::{StopReason as StoppedBy, Usage};

/// How reasoning is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Shown {
    /// As text.
    All,
    /// Only as a signature to send back.
    Sealed,
}

/// A message that is being built.
pub(super) struct Writer {
    message: Message,
    shown: Shown,
    max_tokens: usize,
    /// For errors.
    request_id: Option<String>,
    /// Content of the current block that is added at its end: hidden reasoning, or the JSON text of a call's input.
    open: Option<String>,
    log: Log,
}

impl Log {
    fn event(&mut self, event: &Event<'_>) {
        self.push(event.into(), event);
    }
}

impl Writer {
    /// A message without content. `max_tokens` is the client's; `streamed`: record events.
    pub(super) fn new(
        model: String,
        prompt_tokens: usize,
        shown: Shown,
        max_tokens: usize,
        streamed: bool,
    ) -> Self {
        let usage = MessageUsage {
            input_tokens: prompt_tokens,
            ..Default::default()
        };
        Self {
            message: Message {
                id: fresh_id("msg"),
                r#type: "message",
                role: "assistant",
                model,
                content: Vec::new(),
                stop_reason: None,
                stop_sequence: None,
                usage,
            },
            shown,
            max_tokens,
            request_id: None,
            open: None,
            log: Log::new(streamed),
        }
    }

    /// Sets the request's id.
    pub(super) fn answering(mut self, request_id: &str) -> Self {
        self.request_id = Some(request_id.to_owned());
        self
    }

    /// The message so far.
    pub(super) fn into_message(self) -> Message {
        self.message
    }

    /// Adds an update.
    pub(super) fn write(&mut self, update: Update) {
        for delta in update.deltas {
            match delta {
                Delta::Reasoning(text) => self.think(text),
                Delta::Content(text) => self.say(&text),
                Delta::ToolCall { id, name, .. } => self.start(Block::ToolUse {
                    id,
                    name,
                    input: serde_json::Map::new(),
                }),
                Delta::ToolArguments { fragment, .. } => {
                    let delta = BlockDelta::InputJsonDelta {
                        partial_json: &fragment,
                    };
                    Self::push(&mut self.log, &self.message, delta);
                    self.open.get_or_insert_default().push_str(&fragment);
                }
            }
        }
        if let Some(end) = update.end {
            self.finish(end);
        }
    }

    fn think(&mut self, text: String) {
        if self.open.is_none() || !matches!(self.message.content.last(), Some(Block::Thinking { .. })) {
            self.start(Block::Thinking {
                thinking: String::new(),
                signature: String::new(),
            });
        }
        if self.shown == Shown::Sealed {
            self.open.get_or_insert_default().push_str(&text);
            return;
        }
        Self::push(
            &mut self.log,
            &self.message,
            BlockDelta::ThinkingDelta { thinking: &text },
        );
        if let Some(Block::Thinking { thinking, .. }) = self.message.content.last_mut() {
            thinking.push_str(&text);
        }
    }

    fn say(&mut self, text: &str) {
        if self.open.is_none() || !matches!(self.message.content.last(), Some(Block::Text { .. })) {
            self.start(Block::Text { text: String::new() });
        }
        Self::push(&mut self.log, &self.message, BlockDelta::TextDelta { text });
        if let Some(Block::Text { text: all }) = self.message.content.last_mut() {
            all.push_str(text);
        }
    }

    /// Ends the current block and starts a new one.
    fn start(&mut self, block: Block) {
        self.close();
        let event = Event::ContentBlockStart {
            index: self.message.content.len(),
            content_block: &block,
        };
        self.log.event(&event);
        self.message.content.push(block);
        self.open = Some(String::new());
    }

    /// Ends the current block.
    fn close(&mut self) {
        let Some(held) = self.open.take() else { return };
        match self.message.content.last_mut() {
            Some(Block::Thinking { signature, .. }) => {
                *signature = sealed::seal(&held);
                let signature = signature.clone();
                let delta = BlockDelta::SignatureDelta {
                    signature: &signature,
                };
                Self::push(&mut self.log, &self.message, delta);
            }
            Some(Block::ToolUse { input, .. }) => *input = arguments(&held),
            Some(Block::Text { .. }) | None => {}
        }
        self.log.event(&Event::ContentBlockStop {
            index: self.message.content.len().saturating_sub(1),
        });
    }

    /// Records a delta of the current block.
    fn push(log: &mut Log, message: &Message, delta: BlockDelta<'_>) {
        let index = message.content.len().saturating_sub(1);
        log.event(&Event::ContentBlockDelta { index, delta });
    }

    fn finish(&mut self, end: End) {
        self.close();
        let sequence = end.stop.and_then(StoppedBy::into_text);
        let message = &mut self.message;
        message.usage = usage(&end.usage);
        message.stop_reason = Some(match end.reason {
            EndReason::ToolCalls => StopReason::ToolUse,
            EndReason::Stop if sequence.is_some() => StopReason::StopSequence,
            EndReason::Stop => StopReason::EndTurn,
            EndReason::Length if message.usage.output_tokens < self.max_tokens => {
                StopReason::ModelContextWindowExceeded
            }
            EndReason::Length => StopReason::MaxTokens,
        });
        message.stop_sequence = sequence;
        let delta = MessageEnd {
            stop_reason: message.stop_reason,
            stop_sequence: message.stop_sequence.as_deref(),
        };
        let usage = message.usage;
        self.log.event(&Event::MessageDelta { delta, usage });
        self.log.event(&Event::MessageStop);
    }
}

impl EventFormat for Writer {
    type Item = Update;

    fn begin(&mut self) -> Vec<SseEvent> {
        self.log.event(&Event::MessageStart {
            message: &self.message,
        });
        self.log.event(&Event::Ping);
        self.log.take()
    }

    fn item(&mut self, update: Update) -> Vec<SseEvent> {
        self.write(update);
        self.log.take()
    }

    /// `message_stop` was already sent.
    fn end(&mut self) -> Vec<SseEvent> {
        Vec::new()
    }

    fn fail(&mut self, error: ApiError) -> Vec<SseEvent> {
        vec![named("error", &error::body(&error, self.request_id.take()))]
    }
}

/// Anthropic counts cached tokens separately.
fn usage(usage: &Usage) -> MessageUsage {
    let cached = usage.prompt_tokens_details.cached_tokens;
    MessageUsage {
        input_tokens: usage.prompt_tokens - cached,
        cache_creation_input_tokens: 0,
        cache_read_input_tokens: cached,
        output_tokens: usage.completion_tokens,
    }
}
