//! Anthropic's `/v1/messages`.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::ToSchema;

use super::common::Common;
use super::error::FieldError;
use super::extra::Extra;
use super::fields::{COUNTED_LATER, MESSAGES_UNSUPPORTED, NO_REPORTS, UNSUPPORTED, Unsupported};
use super::request::{RequestBody, take};
use super::schema::body;

/// `POST /v1/messages`.
#[derive(Debug)]
pub(crate) struct MessagesRequest {
    pub(crate) common: Common,
    pub(crate) prompt: MessagesPrompt,
    pub(crate) own: MessagesFields,
}

/// `POST /v1/messages/count_tokens`: clients count what they are about to send, whole.
#[derive(Debug)]
pub(crate) struct CountRequest {
    pub(crate) model: Option<String>,
    pub(crate) prompt: MessagesPrompt,
}

/// The fields that make the prompt.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct MessagesPrompt {
    /// The conversation, oldest message first. An answer continues a last message of the assistant's.
    pub(crate) messages: Vec<InputMessage>,
    /// Instructions.
    pub(crate) system: Option<Content>,
    /// What the model may call.
    #[schema(value_type = Vec<ToolDefinition>)]
    #[serde(default)]
    pub(crate) tools: Vec<Value>,
    /// Which tools may or must be called.
    pub(crate) tool_choice: Option<ToolChoice>,
    /// Whether the model thinks before it answers; as its chat template has it if absent.
    pub(crate) thinking: Option<Thinking>,
    /// Effort and format of the answer.
    pub(crate) output_config: Option<OutputConfig>,
    /// `output_config.format` by an older name.
    pub(crate) output_format: Option<OutputFormat>,
    /// Only edits that clear thinking, which chat templates do by themselves.
    pub(crate) context_management: Option<ContextManagement>,
    /// Further variables for the model's chat template.
    #[serde(default)]
    pub(crate) chat_template_kwargs: Map<String, Value>,
}

/// The fields that only generation has.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct MessagesFields {
    /// Most tokens to generate, thinking included. Where fewer fit, the answer ends with the context.
    #[schema(minimum = 1)]
    pub(crate) max_tokens: usize,
    /// Texts that end the answer and are no part of it.
    #[serde(default)]
    pub(crate) stop_sequences: Vec<String>,
}

impl RequestBody for MessagesRequest {
    const UNSUPPORTED: &[&[Unsupported]] = &[UNSUPPORTED, MESSAGES_UNSUPPORTED, NO_REPORTS];
    // OpenAI's fields of the same meaning, and of one that messages do not have.
    const FOREIGN: &[&str] = &["stop", "n", "stream_options"];

    fn take_from(object: &mut Map<String, Value>) -> Result<Self, FieldError> {
        let own = take(object)?;
        Ok(Self {
            common: Common::take_from(object)?,
            prompt: take(object)?,
            own,
        })
    }
}

impl RequestBody for CountRequest {
    const UNSUPPORTED: &[&[Unsupported]] = &[UNSUPPORTED, MESSAGES_UNSUPPORTED, NO_REPORTS, COUNTED_LATER];
    const FOREIGN: &[&str] = MessagesRequest::FOREIGN;

    fn take_from(object: &mut Map<String, Value>) -> Result<Self, FieldError> {
        Ok(Self {
            model: Common::take_from(object)?.model,
            prompt: take(object)?,
        })
    }
}

body!(
    MessagesRequest,
    "A conversation, and how to answer it.",
    Common,
    Extra,
    MessagesPrompt,
    MessagesFields
);
body!(CountRequest, "A conversation.", Common, Extra, MessagesPrompt);

/// One message of the conversation.
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[schema(as = messages::InputMessage)]
#[serde(deny_unknown_fields)]
pub(crate) struct InputMessage {
    pub(crate) role: Role,
    pub(crate) content: Content,
}

/// Who speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, ToSchema)]
#[schema(as = messages::Role)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Role {
    User,
    Assistant,
    System,
}

/// Text, or blocks.
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[schema(as = messages::Content)]
#[serde(untagged, expecting = "expected a string or a list of blocks")]
pub(crate) enum Content {
    Text(String),
    Blocks(Blocks),
}

/// Blocks of which each has a type.
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[schema(as = messages::Blocks, value_type = Vec<InputBlock>)]
#[serde(transparent)]
pub(crate) struct Blocks(pub(crate) Vec<Value>);

/// A block that a client sends.
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[schema(as = messages::InputBlock)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(crate) enum InputBlock {
    Text(TextBlock),
    ToolUse(ToolUse),
    ToolResult(ToolResult),
    Thinking(ThinkingBlock),
    /// What another model thought; nobody can read it here, and it is left out.
    RedactedThinking {},
}

/// Text.
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[schema(as = messages::TextBlock)]
#[serde(deny_unknown_fields)]
pub(crate) struct TextBlock {
    #[serde(rename = "type")]
    _type: Option<String>,
    pub(crate) text: String,
    /// All prefixes are cached.
    #[serde(rename = "cache_control")]
    _cache_control: Option<Value>,
    /// Of answers that are sent back.
    #[serde(rename = "citations")]
    _citations: Option<Value>,
}

/// A call that the model made.
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[schema(as = messages::ToolUse)]
#[serde(deny_unknown_fields)]
pub(crate) struct ToolUse {
    #[serde(rename = "type")]
    _type: Option<String>,
    pub(crate) id: String,
    pub(crate) name: String,
    pub(crate) input: Map<String, Value>,
    #[serde(rename = "cache_control")]
    _cache_control: Option<Value>,
    #[serde(rename = "caller")]
    _caller: Option<Value>,
}

/// What a call gave.
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[schema(as = messages::ToolResult)]
#[serde(deny_unknown_fields)]
pub(crate) struct ToolResult {
    #[serde(rename = "type")]
    _type: Option<String>,
    /// The call's.
    pub(crate) tool_use_id: String,
    #[schema(no_recursion)]
    pub(crate) content: Option<Content>,
    /// The call failed: the model reads `Error: ` before the content.
    pub(crate) is_error: Option<bool>,
    #[serde(rename = "cache_control")]
    _cache_control: Option<Value>,
}

/// What the model thought.
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[schema(as = messages::ThinkingBlock)]
#[serde(deny_unknown_fields)]
pub(crate) struct ThinkingBlock {
    #[serde(rename = "type")]
    _type: Option<String>,
    pub(crate) thinking: String,
    /// Stands for `thinking` where that was omitted, if this server wrote it.
    pub(crate) signature: Option<String>,
    #[serde(rename = "cache_control")]
    _cache_control: Option<Value>,
}

/// A tool of the client's.
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[schema(as = messages::ToolDefinition)]
#[serde(deny_unknown_fields)]
pub(crate) struct ToolDefinition {
    /// `custom` or absent.
    #[serde(rename = "type")]
    _type: Option<String>,
    pub(crate) name: String,
    pub(crate) description: Option<String>,
    /// A JSON schema of an object.
    pub(crate) input_schema: Map<String, Value>,
    /// Holds the input to the schema.
    pub(crate) strict: Option<bool>,
    /// Only false is supported.
    pub(crate) defer_loading: Option<bool>,
    /// Only `direct` is supported.
    pub(crate) allowed_callers: Option<Vec<String>>,
    /// The model reads them with the description.
    pub(crate) input_examples: Option<Vec<Value>>,
    /// Input is always streamed while it is written.
    #[serde(rename = "eager_input_streaming")]
    _eager_input_streaming: Option<bool>,
    #[serde(rename = "cache_control")]
    _cache_control: Option<Value>,
}

/// Which tools may or must be called.
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[schema(as = messages::ToolChoice)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
pub(crate) enum ToolChoice {
    /// As the model sees fit.
    Auto {
        /// At most one call in an answer.
        disable_parallel_tool_use: Option<bool>,
    },
    /// At least one.
    Any {
        /// Exactly one call in an answer.
        disable_parallel_tool_use: Option<bool>,
    },
    /// This one.
    Tool {
        /// Its name.
        name: String,
        /// Exactly one call in an answer.
        disable_parallel_tool_use: Option<bool>,
    },
    /// None.
    None {},
}

/// Whether the model thinks before it answers.
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[schema(as = messages::Thinking)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
pub(crate) enum Thinking {
    /// It does, where its chat template has a switch for it.
    Enabled {
        /// A target of Anthropic's models. Here, `max_tokens` alone bounds thinking.
        #[serde(rename = "budget_tokens")]
        _budget_tokens: Option<u64>,
        /// Whether thinking is shown.
        display: Option<Display>,
    },
    /// As the model sees fit.
    Adaptive {
        /// Whether thinking is shown.
        display: Option<Display>,
    },
    /// It does not; what a model thinks that cannot stop is not shown.
    Disabled {},
}

/// Whether thinking is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, ToSchema)]
#[schema(as = messages::Display)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Display {
    /// All of it.
    Summarized,
    /// Only as a signature, to be sent back.
    Omitted,
}

/// Effort and format of the answer.
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[schema(as = messages::OutputConfig)]
#[serde(deny_unknown_fields)]
pub(crate) struct OutputConfig {
    /// `low`, `medium`, `high`, `xhigh` or `max`: a hint, for chat templates that know levels.
    pub(crate) effort: Option<Effort>,
    /// JSON of a schema.
    pub(crate) format: Option<OutputFormat>,
}

/// How much effort the model shall make.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, ToSchema)]
#[schema(as = messages::Effort)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Effort {
    Low,
    Medium,
    High,
    Xhigh,
    Max,
}

/// The format of the answer.
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[schema(as = messages::OutputFormat)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
pub(crate) enum OutputFormat {
    /// JSON of a schema.
    JsonSchema {
        /// The schema.
        schema: Value,
    },
}

/// What the server shall leave out of a long conversation.
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[schema(as = messages::ContextManagement)]
#[serde(deny_unknown_fields)]
pub(crate) struct ContextManagement {
    #[serde(default)]
    pub(crate) edits: Vec<Edit>,
}

/// One edit.
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[schema(as = messages::Edit)]
pub(crate) struct Edit {
    /// `clear_thinking_20251015` alone.
    pub(crate) r#type: String,
}

/// The response, whole or as it begins.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = messages::Message)]
pub(crate) struct Message {
    pub(crate) id: String,
    /// `message`.
    pub(crate) r#type: &'static str,
    /// `assistant`.
    pub(crate) role: &'static str,
    pub(crate) model: String,
    pub(crate) content: Vec<Block>,
    pub(crate) stop_reason: Option<StopReason>,
    /// The one that ended the answer.
    pub(crate) stop_sequence: Option<String>,
    pub(crate) usage: MessageUsage,
}

/// Why the answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ToSchema)]
#[schema(as = messages::StopReason)]
#[serde(rename_all = "snake_case")]
pub(crate) enum StopReason {
    /// The model is done.
    EndTurn,
    /// `max_tokens` were generated.
    MaxTokens,
    /// One of `stop_sequences` came.
    StopSequence,
    /// The model calls tools.
    ToolUse,
    /// The context is full, before `max_tokens` were generated.
    ModelContextWindowExceeded,
}

/// A block of the answer.
#[derive(Clone, Debug, PartialEq, Serialize, ToSchema)]
#[schema(as = messages::Block)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(crate) enum Block {
    Thinking {
        thinking: String,
        /// To be sent back with the block.
        signature: String,
    },
    Text {
        text: String,
    },
    ToolUse {
        id: String,
        name: String,
        input: Map<String, Value>,
    },
}

/// Tokens read and written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, ToSchema)]
#[schema(as = messages::MessageUsage)]
pub(crate) struct MessageUsage {
    /// Those of the prompt that were computed.
    pub(crate) input_tokens: usize,
    /// Always 0: nothing is paid for what the cache keeps.
    pub(crate) cache_creation_input_tokens: usize,
    /// Those of the prompt that were found in the prefix cache.
    pub(crate) cache_read_input_tokens: usize,
    pub(crate) output_tokens: usize,
}

/// What `/v1/messages/count_tokens` answers.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = messages::MessageTokens)]
pub(crate) struct MessageTokens {
    pub(crate) input_tokens: usize,
}

/// An event of a streamed response.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = messages::Event)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(crate) enum Event<'a> {
    MessageStart {
        message: &'a Message,
    },
    Ping,
    ContentBlockStart {
        index: usize,
        content_block: &'a Block,
    },
    ContentBlockDelta {
        index: usize,
        delta: BlockDelta<'a>,
    },
    ContentBlockStop {
        index: usize,
    },
    MessageDelta {
        delta: MessageEnd<'a>,
        usage: MessageUsage,
    },
    MessageStop,
}

/// What a block gained.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = messages::BlockDelta)]
#[serde(tag = "type", rename_all = "snake_case")]
#[expect(clippy::enum_variant_names, reason = "they are named as on the wire")]
pub(crate) enum BlockDelta<'a> {
    TextDelta {
        text: &'a str,
    },
    ThinkingDelta {
        thinking: &'a str,
    },
    SignatureDelta {
        signature: &'a str,
    },
    /// A piece of the input's JSON text.
    InputJsonDelta {
        partial_json: &'a str,
    },
}

/// How the message ended.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = messages::MessageEnd)]
pub(crate) struct MessageEnd<'a> {
    pub(crate) stop_reason: Option<StopReason>,
    pub(crate) stop_sequence: Option<&'a str>,
}

/// An error, as the body of a response and as an event.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = messages::ErrorBody)]
pub(crate) struct ErrorBody {
    /// `error`.
    pub(crate) r#type: &'static str,
    pub(crate) error: ErrorObject,
    /// The response's `request-id`.
    pub(crate) request_id: Option<String>,
}

/// What went wrong.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = messages::ErrorObject)]
pub(crate) struct ErrorObject {
    /// Anthropic's word for the kind of error.
    pub(crate) r#type: &'static str,
    pub(crate) message: String,
    /// For clients that know what to do about it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) details: Option<ErrorDetails>,
}

/// What a client can do without.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = messages::ErrorDetails)]
pub(crate) struct ErrorDetails {
    /// `thread_unsupported_request`.
    pub(crate) error_code: &'static str,
    /// The field.
    pub(crate) unsupported: [&'static str; 1],
}
