use std::borrow::Cow;

use plimsoll_core::TokenId;
use plimsoll_images::Overrides;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::openapi::schema::{AnyOfBuilder, Type};
use utoipa::openapi::{ObjectBuilder, RefOr, Schema};
use utoipa::{PartialSchema, ToSchema};

use super::common::{Common, MaxTokens, MaybeUsage, StopReason, Usage};
use super::content::Content;
use super::error::FieldError;
use super::extra::{Extra, Reports};
use super::fields::{CHAT_UNSUPPORTED, UNSUPPORTED, Unsupported};
use super::request::{RequestBody, field_names, take};
use super::schema::body;
use super::structured::StructuredFields;

/// `POST /v1/chat/completions`.
#[derive(Debug)]
pub(crate) struct ChatRequest {
    pub(crate) common: Common,
    pub(crate) structured: StructuredFields,
    pub(crate) prompt: ChatPrompt,
    pub(crate) own: ChatFields,
}

/// The fields that make the prompt; `/tokenize` has them too.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct ChatPrompt {
    /// The conversation, oldest message first.
    #[schema(min_items = 1, max_items = 16384, value_type = Vec<AnyMessage>)]
    pub(crate) messages: Vec<Message>,
    /// Functions that the model may call.
    #[schema(max_items = 1024)]
    pub(crate) tools: Option<Vec<ChatTool>>,
    /// Ends the prompt with the start of an assistant message. Default: true, unless the final message is continued.
    pub(crate) add_generation_prompt: Option<bool>,
    /// Continues the final message instead of answering it.
    #[serde(default)]
    pub(crate) continue_final_message: bool,
    /// Additional variables for the chat template.
    #[serde(default)]
    pub(crate) chat_template_kwargs: Map<String, Value>,
    /// The variable of this name in `chat_template_kwargs`.
    pub(crate) enable_thinking: Option<bool>,
    /// A Jinja template that replaces the model's. Needs a server with `--trust-request-chat-template`.
    pub(crate) chat_template: Option<String>,
    /// vLLM's: how images are resized, within what the model's files allow.
    pub(crate) mm_processor_kwargs: Option<ProcessorKwargs>,
    /// Documents, for templates that use them.
    pub(crate) documents: Option<Vec<Map<String, Value>>>,
    /// Reasoning effort, for models that reason: a level if the chat template has them, or a switch.
    pub(crate) reasoning_effort: Option<ReasoningEffort>,
}

/// Bounds on the pixels of each image after resizing, for models that resize to an area (Qwen).
#[derive(Clone, Copy, Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct ProcessorKwargs {
    /// Fewest pixels.
    min_pixels: Option<usize>,
    /// Most pixels.
    max_pixels: Option<usize>,
}

impl From<ProcessorKwargs> for Overrides {
    fn from(
        ProcessorKwargs {
            min_pixels,
            max_pixels,
        }: ProcessorKwargs,
    ) -> Self {
        Self {
            min_pixels,
            max_pixels,
        }
    }
}

/// Reasoning effort.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub(crate) enum ReasoningEffort {
    None,
    Minimal,
    Low,
    Medium,
    High,
    Xhigh,
    Max,
}

/// A tool: a function.
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct ChatTool {
    pub(crate) r#type: String,
    pub(crate) function: Option<FunctionDefinition>,
    /// Custom tools with text input are refused.
    #[serde(rename = "custom")]
    _custom: Option<Value>,
    /// No effect: all prefixes are cached.
    #[serde(rename = "cache_control")]
    _cache_control: Option<Value>,
}

/// A function that the model may call.
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct FunctionDefinition {
    pub(crate) name: String,
    pub(crate) description: Option<String>,
    /// JSON schema of the arguments, an object; absent: no arguments.
    pub(crate) parameters: Option<Map<String, Value>>,
    /// Enforces the schema.
    pub(crate) strict: Option<bool>,
    /// No effect: all prefixes are cached.
    #[serde(rename = "cache_control")]
    _cache_control: Option<Value>,
}

/// `none`, `auto`, `required`, or the functions that must or may be called.
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[serde(
    untagged,
    expecting = "expected none, auto, required, or an object with a type"
)]
pub(crate) enum ChatToolChoice {
    Mode(ToolMode),
    Particular(ParticularTool),
}

/// Whether the model may or must call tools.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub(crate) enum ToolMode {
    None,
    Auto,
    Required,
}

/// `{"type": "function", "function": {"name": ..}}`, or `{"type": "allowed_tools", "allowed_tools": {..}}`.
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct ParticularTool {
    pub(crate) r#type: String,
    pub(crate) function: Option<FunctionName>,
    pub(crate) allowed_tools: Option<AllowedTools>,
    /// Custom tools with text input are refused.
    #[serde(rename = "custom")]
    _custom: Option<Value>,
}

/// A function's name.
#[derive(Clone, Debug, Deserialize, ToSchema)]
pub(crate) struct FunctionName {
    pub(crate) name: String,
}

/// The tools that may be called.
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct AllowedTools {
    pub(crate) mode: ToolMode,
    pub(crate) tools: Vec<AllowedTool>,
}

/// A tool that may be called.
#[derive(Clone, Debug, Deserialize, ToSchema)]
pub(crate) struct AllowedTool {
    pub(crate) r#type: String,
    pub(crate) function: Option<FunctionName>,
}

/// The fields that only chat has.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct ChatFields {
    /// Maximum number of tokens to generate; -1: as many as fit. The newer name of `max_tokens`.
    #[schema(minimum = -1, value_type = Option<i64>)]
    pub(crate) max_completion_tokens: Option<MaxTokens>,
    /// Reports the log-probability of each token.
    #[serde(default)]
    pub(crate) logprobs: bool,
    /// Also reports this many of the likeliest tokens; needs `logprobs`.
    #[schema(maximum = 20)]
    pub(crate) top_logprobs: Option<u32>,
    pub(crate) tool_choice: Option<ChatToolChoice>,
    pub(crate) parallel_tool_calls: Option<bool>,
    /// vLLM's: false omits reasoning from the answer.
    pub(crate) include_reasoning: Option<bool>,
    /// vLLM's: begins the answer with the content of the final message, if that is the assistant's.
    #[serde(default)]
    pub(crate) echo: bool,
    /// vLLM's: reasoning ends after this many tokens; -1: it has no limit.
    #[schema(minimum = -1)]
    pub(crate) thinking_token_budget: Option<i64>,
}

impl RequestBody for ChatRequest {
    const UNSUPPORTED: &[&[Unsupported]] = &[UNSUPPORTED, CHAT_UNSUPPORTED];

    fn take_from(object: &mut Map<String, Value>) -> Result<Self, FieldError> {
        Ok(Self {
            common: Common::take_with_reports(object)?,
            structured: take(object)?,
            prompt: ChatPrompt::take_from(object)?,
            own: take(object)?,
        })
    }
}

body!(
    ChatRequest,
    "A conversation, and how to answer it.",
    Common,
    Extra,
    Reports,
    StructuredFields,
    ChatPrompt,
    ChatFields
);

impl ChatPrompt {
    /// Removes these fields from `object`. Unknown fields of assistant messages are ignored: clients send answers back with
    /// fields of their own. So is `null` in any message.
    pub(crate) fn take_from(object: &mut Map<String, Value>) -> Result<Self, FieldError> {
        let known = field_names::<Message>();
        let messages = object.get_mut("messages").and_then(Value::as_array_mut);
        for message in messages.into_iter().flatten().filter_map(Value::as_object_mut) {
            let is_answer = message.get("role").is_some_and(|role| role == "assistant");
            message.retain(|name, value| !value.is_null() && (!is_answer || known.contains(&name.as_str())));
        }
        take(object)
    }
}

/// The schema of a message: assistant messages may have additional fields.
#[derive(Debug)]
pub(crate) struct AnyMessage;

impl PartialSchema for AnyMessage {
    fn schema() -> RefOr<Schema> {
        let closed = Message::schema();
        let mut open = closed.clone();
        if let RefOr::T(Schema::Object(object)) = &mut open {
            let role = ObjectBuilder::new()
                .schema_type(Type::String)
                .enum_values(Some(["assistant"]))
                .build();
            object.properties.insert("role".to_owned(), role.into());
            object.additional_properties = None;
        }
        let description = "A message; assistant messages may have additional fields, which are ignored.";
        AnyOfBuilder::new()
            .description(Some(description))
            .item(closed)
            .item(open)
            .into()
    }
}

impl ToSchema for AnyMessage {
    fn name() -> Cow<'static, str> {
        Message::name()
    }

    fn schemas(all: &mut Vec<(String, RefOr<Schema>)>) {
        Message::schemas(all);
    }
}

/// One message of the conversation.
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct Message {
    pub(crate) role: Role,
    /// The text.
    pub(crate) content: Option<Content>,
    /// Distinguishes participants with the same role.
    pub(crate) name: Option<String>,
    /// The call that a `tool` message answers.
    pub(crate) tool_call_id: Option<String>,
    /// Only in an answer sent back.
    pub(crate) refusal: Option<String>,
    pub(crate) tool_calls: Option<Vec<SentToolCall>>,
    /// Reasoning, in an answer sent back.
    pub(crate) reasoning_content: Option<String>,
    /// The same by its newer name.
    pub(crate) reasoning: Option<String>,
    /// Only in answers of older servers; refused.
    pub(crate) function_call: Option<Value>,
    pub(crate) audio: Option<Value>,
    /// No effect: all prefixes are cached.
    #[serde(rename = "cache_control")]
    _cache_control: Option<Value>,
    /// The client's; no effect.
    #[serde(rename = "id")]
    _id: Option<Value>,
    /// The client's; no effect.
    #[serde(rename = "metadata")]
    _metadata: Option<Value>,
}

/// A tool call in an answer sent back.
#[derive(Clone, Debug, Deserialize, ToSchema)]
pub(crate) struct SentToolCall {
    pub(crate) id: Option<String>,
    pub(crate) r#type: Option<String>,
    pub(crate) function: Option<SentFunctionCall>,
}

/// The called function and its arguments.
#[derive(Clone, Debug, Deserialize, ToSchema)]
pub(crate) struct SentFunctionCall {
    pub(crate) name: String,
    /// JSON text; invalid JSON of a truncated answer is passed to the model as it is.
    pub(crate) arguments: Option<String>,
}

/// The author of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Role {
    System,
    Developer,
    User,
    Assistant,
    Tool,
}

/// The response, whole.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ChatCompletion<'a> {
    pub(crate) id: &'a str,
    pub(crate) object: &'static str,
    pub(crate) created: u64,
    pub(crate) model: &'a str,
    pub(crate) choices: Vec<ChatChoice>,
    pub(crate) usage: Usage,
    pub(crate) system_fingerprint: &'static str,
    /// One entry per token of the prompt, the first `null`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Vec<Option<std::collections::BTreeMap<String, super::extra::ScoredToken>>>>)]
    pub(crate) prompt_logprobs: Option<Vec<Option<Map<String, Value>>>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Vec<u32>>)]
    pub(crate) prompt_token_ids: Option<Vec<TokenId>>,
}

/// One of the answers.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ChatChoice {
    pub(crate) index: usize,
    pub(crate) message: ChatAnswer,
    pub(crate) logprobs: Option<ChatLogprobs>,
    pub(crate) finish_reason: &'static str,
    /// vLLM's: the stop string, or the token of `stop_token_ids`, that ended the answer.
    pub(crate) stop_reason: Option<StopReason>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Vec<u32>>)]
    pub(crate) token_ids: Option<Vec<TokenId>>,
}

/// The message that answers.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ChatAnswer {
    pub(crate) role: &'static str,
    /// Absent text is `null`.
    pub(crate) content: Option<String>,
    pub(crate) refusal: Option<String>,
    /// Reasoning, by DeepSeek's name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) reasoning_content: Option<String>,
    /// The same by vLLM's newer name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) reasoning: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) tool_calls: Vec<ChatToolCall>,
}

/// A tool call.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ChatToolCall {
    pub(crate) id: String,
    pub(crate) r#type: &'static str,
    pub(crate) function: ChatFunctionCall,
}

/// The called function and its arguments.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ChatFunctionCall {
    pub(crate) name: String,
    /// JSON text.
    pub(crate) arguments: String,
}

/// A part of a tool call: the first has everything but the arguments, the others only arguments.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ChatToolCallDelta {
    pub(crate) index: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) r#type: Option<&'static str>,
    pub(crate) function: ChatFunctionDelta,
}

/// A part of the called function.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ChatFunctionDelta {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) name: Option<String>,
    pub(crate) arguments: String,
}

/// One chunk of a stream.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ChatChunk {
    pub(crate) id: String,
    pub(crate) object: &'static str,
    pub(crate) created: u64,
    pub(crate) model: String,
    pub(crate) choices: Vec<ChatChunkChoice>,
    /// With `stream_options.include_usage`: `null` except in the last chunk.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Usage>)]
    pub(crate) usage: MaybeUsage,
    pub(crate) system_fingerprint: &'static str,
    /// With the first chunk.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Vec<u32>>)]
    pub(crate) prompt_token_ids: Option<Vec<TokenId>>,
}

/// A part of one of the answers.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ChatChunkChoice {
    pub(crate) index: usize,
    pub(crate) delta: ChatDelta,
    pub(crate) logprobs: Option<ChatLogprobs>,
    pub(crate) finish_reason: Option<&'static str>,
    /// Beside `finish_reason`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<StopReason>)]
    pub(crate) stop_reason: Option<Option<StopReason>>,
    /// Like logprobs, in the first chunk with some of their text.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Vec<u32>>)]
    pub(crate) token_ids: Option<Vec<TokenId>>,
}

/// A part of a message.
#[derive(Debug, Default, Serialize, ToSchema)]
pub(crate) struct ChatDelta {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) content: Option<String>,
    /// Reasoning, by DeepSeek's name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) reasoning_content: Option<String>,
    /// The same by vLLM's newer name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) reasoning: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) tool_calls: Option<Vec<ChatToolCallDelta>>,
}

/// Log-probabilities of the answer's tokens.
#[derive(Debug, Default, Serialize, ToSchema)]
pub(crate) struct ChatLogprobs {
    pub(crate) content: Vec<ChatTokenLogprob>,
    #[schema(value_type = Option<String>)]
    pub(crate) refusal: Option<()>,
}

/// A sampled token and the likeliest ones at its position.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct ChatTokenLogprob {
    #[serde(flatten)]
    pub(crate) token: ChatLogprob,
    pub(crate) top_logprobs: Vec<ChatLogprob>,
}

/// A token's text, bytes and log-probability (-9999: probability 0).
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct ChatLogprob {
    pub(crate) token: String,
    pub(crate) logprob: f64,
    pub(crate) bytes: Vec<u8>,
}
