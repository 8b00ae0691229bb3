//! Writes a message while it is generated, and tells of it in events, if anybody wants them.

use super::error;
use crate::conversation::{Delta, End, EndReason, Update};
use crate::error::ApiError;
use crate::respond::{Wording, Written, fresh_id, named};
use crate::sealed;
use crate::transcript::arguments;
use crate::wire::anthropic::{Block, BlockDelta, Event, Message, MessageEnd, MessageUsage, StopReason};
use crate::wire::common::{StopReason as StoppedBy, Usage};

/// What is shown of the thinking.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Shown {
    /// All.
    All,
    /// That there was some, with a signature to send back.
    Sealed,
}

/// A message in the making.
pub(super) struct Writer {
    message: Message,
    shown: Shown,
    max_tokens: usize,
    /// Named where it fails.
    request_id: Option<String>,
    /// What belongs to the last block, which is being written, and is in it only once it is done: sealed thinking, or the
    /// JSON text of a call's input.
    open: Option<String>,
    log: Log,
}

/// Events that were not yet sent; `None` where nobody listens.
struct Log(Option<Vec<Written>>);

impl Log {
    fn tell(&mut self, event: &Event<'_>) {
        if let Some(events) = &mut self.0 {
            events.push(named(event.name(), event));
        }
    }

    fn take(&mut self) -> Vec<Written> {
        self.0.as_mut().map(std::mem::take).unwrap_or_default()
    }
}

impl Event<'_> {
    fn name(&self) -> &'static str {
        match self {
            Self::MessageStart { .. } => "message_start",
            Self::Ping => "ping",
            Self::ContentBlockStart { .. } => "content_block_start",
            Self::ContentBlockDelta { .. } => "content_block_delta",
            Self::ContentBlockStop { .. } => "content_block_stop",
            Self::MessageDelta { .. } => "message_delta",
            Self::MessageStop => "message_stop",
        }
    }
}

impl Writer {
    /// Begins with a message without content. `max_tokens` were asked for; `streamed`: somebody wants the events.
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
            log: Log(streamed.then(Vec::new)),
        }
    }

    /// The message answers the request of this id.
    pub(super) fn answering(mut self, request_id: &str) -> Self {
        self.request_id = Some(request_id.to_owned());
        self
    }

    /// The message as far as it is written.
    pub(super) fn into_message(self) -> Message {
        self.message
    }

    /// Writes what the answer gained.
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
                    Self::tell(&mut self.log, &self.message, delta);
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
        Self::tell(
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
        Self::tell(&mut self.log, &self.message, BlockDelta::TextDelta { text });
        if let Some(Block::Text { text: all }) = self.message.content.last_mut() {
            all.push_str(text);
        }
    }

    /// A new block, after the one before is done.
    fn start(&mut self, block: Block) {
        self.close();
        let event = Event::ContentBlockStart {
            index: self.message.content.len(),
            content_block: &block,
        };
        self.log.tell(&event);
        self.message.content.push(block);
        self.open = Some(String::new());
    }

    /// The block that is being written is done.
    fn close(&mut self) {
        let Some(held) = self.open.take() else { return };
        match self.message.content.last_mut() {
            Some(Block::Thinking { signature, .. }) => {
                *signature = sealed::seal(&held);
                let signature = signature.clone();
                let delta = BlockDelta::SignatureDelta {
                    signature: &signature,
                };
                Self::tell(&mut self.log, &self.message, delta);
            }
            Some(Block::ToolUse { input, .. }) => *input = arguments(&held),
            Some(Block::Text { .. }) | None => {}
        }
        self.log.tell(&Event::ContentBlockStop {
            index: self.message.content.len().saturating_sub(1),
        });
    }

    /// Tells what the last block gained.
    fn tell(log: &mut Log, message: &Message, delta: BlockDelta<'_>) {
        let index = message.content.len().saturating_sub(1);
        log.tell(&Event::ContentBlockDelta { index, delta });
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
        self.log.tell(&Event::MessageDelta { delta, usage });
        self.log.tell(&Event::MessageStop);
    }
}

impl Wording for Writer {
    type Item = Update;

    fn begin(&mut self) -> Vec<Written> {
        self.log.tell(&Event::MessageStart {
            message: &self.message,
        });
        self.log.tell(&Event::Ping);
        self.log.take()
    }

    fn word(&mut self, update: Update) -> Vec<Written> {
        self.write(update);
        self.log.take()
    }

    /// `message_stop` was the last.
    fn end(&mut self) -> Vec<Written> {
        Vec::new()
    }

    fn fail(&mut self, error: ApiError) -> Vec<Written> {
        vec![named("error", &error::body(&error, self.request_id.take()))]
    }
}

/// Anthropic counts what was cached apart.
fn usage(usage: &Usage) -> MessageUsage {
    let cached = usage.prompt_tokens_details.cached_tokens;
    MessageUsage {
        input_tokens: usage.prompt_tokens - cached,
        cache_creation_input_tokens: 0,
        cache_read_input_tokens: cached,
        output_tokens: usage.completion_tokens,
    }
}
