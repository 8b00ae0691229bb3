//! Anthropic's `/v1/messages`.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use strum::IntoStaticStr;
use utoipa::ToSchema;

use crate::wire::common::Common;
use crate::wire::error::FieldError;
use crate::wire::extra::Extra;
use crate::wire::fields::{COUNTED_LATER, MESSAGES_UNSUPPORTED, NO_REPORTS, UNSUPPORTED, Unsupported};
use crate::wire::request::{RequestBody, take};
use crate::wire::schema::body;
pub(crate) use tagged::{ImageSource, Thinking, ToolChoice};

mod tagged;

/// `POST /v1/messages`.
#[derive(Debug)]
pub(crate) struct MessagesRequest {
    pub(crate) common: Common,
    pub(crate) prompt: MessagesPrompt,
    pub(crate) own: MessagesFields,
}

/// `POST /v1/messages/count_tokens`: takes all fields of a message request.
#[derive(Debug)]
pub(crate) struct CountRequest {
    pub(crate) model: Option<String>,
    pub(crate) prompt: MessagesPrompt,
}

/// The fields that make the prompt.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct MessagesPrompt {
    /// The conversation, oldest message first. If the last message is the assistant's, the answer continues it.
    pub(crate) messages: Vec<InputMessage>,
    /// System prompt.
    pub(crate) system: Option<Content>,
    /// Tools that the model may call.
    #[schema(value_type = Vec<ToolDefinition>)]
    #[serde(default)]
    pub(crate) tools: Vec<Value>,
    /// Which tools may or must be called.
    pub(crate) tool_choice: Option<ToolChoice>,
    /// Switches reasoning on or off; the chat template's default if absent.
    pub(crate) thinking: Option<Thinking>,
    /// Reasoning effort and format of the answer.
    pub(crate) output_config: Option<OutputConfig>,
    /// Older name of `output_config.format`.
    pub(crate) output_format: Option<OutputFormat>,
    /// Only edits that clear thinking, which chat templates do anyway.
    pub(crate) context_management: Option<ContextManagement>,
    /// Additional variables for the chat template.
    #[serde(default)]
    pub(crate) chat_template_kwargs: Map<String, Value>,
}

/// The fields that only generation has.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct MessagesFields {
    /// Maximum number of tokens to generate, including thinking. If fewer fit, the answer ends with the context.
    #[schema(minimum = 1)]
    pub(crate) max_tokens: usize,
    /// Stop strings; not part of the answer.
    #[serde(default)]
    pub(crate) stop_sequences: Vec<String>,
}

impl RequestBody for MessagesRequest {
    const UNSUPPORTED: &[&[Unsupported]] = &[UNSUPPORTED, MESSAGES_UNSUPPORTED, NO_REPORTS];
    // OpenAI's fields that have another name here, or that messages do not have.
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

/// The author of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, ToSchema, strum::Display)]
#[schema(as = messages::Role)]
#[serde(rename_all = "lowercase")]
#[strum(serialize_all = "lowercase")]
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

/// Content blocks.
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[schema(as = messages::Blocks, value_type = Vec<InputBlock>)]
#[serde(transparent)]
pub(crate) struct Blocks(pub(crate) Vec<Value>);

/// An input block.
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[schema(as = messages::InputBlock)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(crate) enum InputBlock {
    Text(TextBlock),
    Image(ImageBlock),
    ToolUse(ToolUse),
    ToolResult(ToolResult),
    Thinking(ThinkingBlock),
    /// Encrypted thinking of another provider; ignored.
    RedactedThinking {
        #[serde(rename = "data")]
        _data: Option<Value>,
    },
}

/// Text.
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[schema(as = messages::TextBlock)]
#[serde(deny_unknown_fields)]
pub(crate) struct TextBlock {
    #[serde(rename = "type")]
    _type: Option<String>,
    pub(crate) text: String,
    /// No effect: all prefixes are cached.
    #[serde(rename = "cache_control")]
    _cache_control: Option<Value>,
    /// Only in answers sent back; ignored.
    #[serde(rename = "citations")]
    _citations: Option<Value>,
}

/// An image.
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[schema(as = messages::ImageBlock)]
#[serde(deny_unknown_fields)]
pub(crate) struct ImageBlock {
    #[serde(rename = "type")]
    _type: Option<String>,
    pub(crate) source: ImageSource,
    /// No effect: all prefixes are cached.
    #[serde(rename = "cache_control")]
    _cache_control: Option<Value>,
}

/// A tool call of an answer sent back. Additional fields are ignored.
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[schema(as = messages::ToolUse)]
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

/// The result of a tool call.
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[schema(as = messages::ToolResult)]
#[serde(deny_unknown_fields)]
pub(crate) struct ToolResult {
    #[serde(rename = "type")]
    _type: Option<String>,
    /// The id of the call.
    pub(crate) tool_use_id: String,
    #[schema(no_recursion)]
    pub(crate) content: Option<Content>,
    /// The call failed: the content is prefixed with `Error: `.
    pub(crate) is_error: Option<bool>,
    #[serde(rename = "cache_control")]
    _cache_control: Option<Value>,
}

/// Thinking in an answer sent back. Additional fields are ignored.
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[schema(as = messages::ThinkingBlock)]
pub(crate) struct ThinkingBlock {
    #[serde(rename = "type")]
    _type: Option<String>,
    pub(crate) thinking: String,
    /// Replaces an omitted `thinking`, if this server created it.
    pub(crate) signature: Option<String>,
    #[serde(rename = "cache_control")]
    _cache_control: Option<Value>,
}

/// A client-side tool.
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[schema(as = messages::ToolDefinition)]
#[serde(deny_unknown_fields)]
pub(crate) struct ToolDefinition {
    /// `custom` or absent.
    #[serde(rename = "type")]
    _type: Option<String>,
    pub(crate) name: String,
    pub(crate) description: Option<String>,
    /// JSON schema of the input, an object.
    pub(crate) input_schema: Map<String, Value>,
    /// Enforces the schema.
    pub(crate) strict: Option<bool>,
    /// Only false is supported.
    pub(crate) defer_loading: Option<bool>,
    /// Only `direct` is supported.
    pub(crate) allowed_callers: Option<Vec<String>>,
    /// Appended to the description.
    pub(crate) input_examples: Option<Vec<Value>>,
    /// No effect: input is always streamed.
    #[serde(rename = "eager_input_streaming")]
    _eager_input_streaming: Option<bool>,
    #[serde(rename = "cache_control")]
    _cache_control: Option<Value>,
}

/// Whether thinking is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, ToSchema)]
#[schema(as = messages::Display)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Display {
    /// All of it.
    Summarized,
    /// Only as a signature to send back.
    Omitted,
}

/// Reasoning effort and format of the answer.
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[schema(as = messages::OutputConfig)]
#[serde(deny_unknown_fields)]
pub(crate) struct OutputConfig {
    /// `low`, `medium`, `high`, `xhigh` or `max`: a hint for chat templates that support levels.
    pub(crate) effort: Option<Effort>,
    /// JSON that follows a schema.
    pub(crate) format: Option<OutputFormat>,
}

/// Reasoning effort.
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
    /// JSON that follows a schema.
    JsonSchema {
        /// The schema.
        schema: Value,
    },
}

/// Edits of long conversations.
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
    /// Only `clear_thinking_20251015`.
    pub(crate) r#type: String,
}

/// The response, complete or as it starts.
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
    /// The stop string that ended the answer.
    pub(crate) stop_sequence: Option<String>,
    pub(crate) usage: MessageUsage,
}

/// Why the answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ToSchema)]
#[schema(as = messages::StopReason)]
#[serde(rename_all = "snake_case")]
pub(crate) enum StopReason {
    /// End of sequence.
    EndTurn,
    /// `max_tokens` reached.
    MaxTokens,
    /// A stop string.
    StopSequence,
    /// Tool calls.
    ToolUse,
    /// End of the context before `max_tokens`.
    ModelContextWindowExceeded,
}

/// A block of the answer.
#[derive(Clone, Debug, PartialEq, Serialize, ToSchema)]
#[schema(as = messages::Block)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(crate) enum Block {
    Thinking {
        thinking: String,
        /// Send back with the block.
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

/// Token counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, ToSchema)]
#[schema(as = messages::MessageUsage)]
pub(crate) struct MessageUsage {
    /// Prompt tokens that were computed.
    pub(crate) input_tokens: usize,
    /// Always 0.
    pub(crate) cache_creation_input_tokens: usize,
    /// Prompt tokens found in the prefix cache.
    pub(crate) cache_read_input_tokens: usize,
    pub(crate) output_tokens: usize,
}

/// Response of `/v1/messages/count_tokens`.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = messages::MessageTokens)]
pub(crate) struct MessageTokens {
    pub(crate) input_tokens: usize,
}

/// An event of a streamed response.
#[derive(Debug, Serialize, ToSchema, IntoStaticStr)]
#[schema(as = messages::Event)]
#[serde(tag = "type", rename_all = "snake_case")]
#[strum(serialize_all = "snake_case")]
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

/// New content of a block.
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
    /// A fragment of the input's JSON text.
    InputJsonDelta {
        partial_json: &'a str,
    },
}

/// The end of a message.
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
    /// Anthropic's error type.
    pub(crate) r#type: &'static str,
    pub(crate) message: String,
    /// For clients that handle it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) details: Option<ErrorDetails>,
}

/// An unsupported field that clients can do without.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = messages::ErrorDetails)]
pub(crate) struct ErrorDetails {
    /// `thread_unsupported_request`.
    pub(crate) error_code: &'static str,
    /// The field.
    pub(crate) unsupported: [&'static str; 1],
}
