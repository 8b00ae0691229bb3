use std::borrow::Cow;

use plimsoll_core::TokenId;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::openapi::schema::{AnyOfBuilder, Type};
use utoipa::openapi::{ObjectBuilder, RefOr, Schema};
use utoipa::{PartialSchema, ToSchema};

use super::common::{Common, MaybeUsage, StopReason, Usage};
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
    /// What the model may call.
    #[schema(max_items = 1024)]
    pub(crate) tools: Option<Vec<ChatTool>>,
    /// Ends the prompt with what begins an answer. Default: true, unless the final message is continued.
    pub(crate) add_generation_prompt: Option<bool>,
    /// Continues the final message in place of answering it.
    #[serde(default)]
    pub(crate) continue_final_message: bool,
    /// Further variables for the model's chat template.
    #[serde(default)]
    pub(crate) chat_template_kwargs: Map<String, Value>,
    /// A Jinja template in place of the model's own. Needs a server with `--trust-request-chat-template`.
    pub(crate) chat_template: Option<String>,
    /// For templates that take documents.
    pub(crate) documents: Option<Vec<Map<String, Value>>>,
    /// For templates that know it, or that can switch reasoning off.
    pub(crate) reasoning_effort: Option<ReasoningEffort>,
}

/// How much to think.
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

/// Something the model may call: a function.
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct ChatTool {
    pub(crate) r#type: String,
    pub(crate) function: Option<FunctionDefinition>,
    /// Of a tool that takes text, and is refused.
    #[serde(rename = "custom")]
    _custom: Option<Value>,
}

/// A function that the model may call.
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct FunctionDefinition {
    pub(crate) name: String,
    pub(crate) description: Option<String>,
    /// JSON schema of the arguments, which are an object; without it there are none.
    pub(crate) parameters: Option<Map<String, Value>>,
    /// The arguments shall follow the schema.
    pub(crate) strict: Option<bool>,
}

/// `none`, `auto`, `required`, or what must or may be called.
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[serde(
    untagged,
    expecting = "expected none, auto, required, or an object with a type"
)]
pub(crate) enum ChatToolChoice {
    Mode(ToolMode),
    Particular(ParticularTool),
}

/// Whether the model calls.
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
    /// Of a tool that takes text, and is refused.
    #[serde(rename = "custom")]
    _custom: Option<Value>,
}

/// A function by its name.
#[derive(Clone, Debug, Deserialize, ToSchema)]
pub(crate) struct FunctionName {
    pub(crate) name: String,
}

/// Those of the tools that may be called.
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct AllowedTools {
    pub(crate) mode: ToolMode,
    pub(crate) tools: Vec<AllowedTool>,
}

/// One of those that may be called.
#[derive(Clone, Debug, Deserialize, ToSchema)]
pub(crate) struct AllowedTool {
    pub(crate) r#type: String,
    pub(crate) function: Option<FunctionName>,
}

/// The fields that only chat has.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct ChatFields {
    /// Most tokens to generate; `max_tokens` by its newer name.
    #[schema(minimum = 1)]
    pub(crate) max_completion_tokens: Option<usize>,
    /// Reports the log probability of each token.
    #[serde(default)]
    pub(crate) logprobs: bool,
    /// And those of this many of the likeliest tokens; needs `logprobs`.
    #[schema(maximum = 20)]
    pub(crate) top_logprobs: Option<u32>,
    pub(crate) tool_choice: Option<ChatToolChoice>,
    pub(crate) parallel_tool_calls: Option<bool>,
    /// vLLM's: false leaves reasoning out of the answer.
    pub(crate) include_reasoning: Option<bool>,
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
    /// Takes these fields out of `object`. Clients add to an answer what they made of it, and send that back: no field of an
    /// assistant's message asks for anything, so what is unknown there is left out, and `null` in any message.
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

/// A message as the document describes it: with further fields where it is an answer sent back.
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
        let description = "A message; one of the assistant's may have further fields, which say nothing.";
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
    /// What is said.
    pub(crate) content: Option<Content>,
    /// Tells speakers of one role apart.
    pub(crate) name: Option<String>,
    /// The call that a `tool` message answers.
    pub(crate) tool_call_id: Option<String>,
    /// Only as part of an answer sent back; a refusal has no text for the model.
    pub(crate) refusal: Option<String>,
    pub(crate) tool_calls: Option<Vec<SentToolCall>>,
    /// What the model thought, as part of an answer sent back.
    pub(crate) reasoning_content: Option<String>,
    /// The same by its newer name.
    pub(crate) reasoning: Option<String>,
    /// Part of answers of older servers, sent back by their clients.
    pub(crate) function_call: Option<Value>,
    pub(crate) audio: Option<Value>,
}

/// A call as part of an answer sent back.
#[derive(Clone, Debug, Deserialize, ToSchema)]
pub(crate) struct SentToolCall {
    pub(crate) id: Option<String>,
    pub(crate) r#type: Option<String>,
    pub(crate) function: Option<SentFunctionCall>,
}

/// The function called, and with what.
#[derive(Clone, Debug, Deserialize, ToSchema)]
pub(crate) struct SentFunctionCall {
    pub(crate) name: String,
    /// JSON text; what is none, since the answer was cut off, is told to the model as it stands.
    pub(crate) arguments: Option<String>,
}

/// Who speaks.
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
    /// What the model thinks before it answers, by DeepSeek's name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) reasoning_content: Option<String>,
    /// The same by vLLM's newer name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) reasoning: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) tool_calls: Vec<ChatToolCall>,
}

/// A call the model wants made.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ChatToolCall {
    pub(crate) id: String,
    pub(crate) r#type: &'static str,
    pub(crate) function: ChatFunctionCall,
}

/// The function called, and with what.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ChatFunctionCall {
    pub(crate) name: String,
    /// JSON text.
    pub(crate) arguments: String,
}

/// A piece of a call: the first has everything but the arguments, the others arguments alone.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ChatToolCallDelta {
    pub(crate) index: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) r#type: Option<&'static str>,
    pub(crate) function: ChatFunctionDelta,
}

/// What is new of the function called.
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
    /// Where `stream_options.include_usage` asks for it: `null`, but for the last chunk.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Usage>)]
    pub(crate) usage: MaybeUsage,
    pub(crate) system_fingerprint: &'static str,
    /// With the first chunk.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Vec<u32>>)]
    pub(crate) prompt_token_ids: Option<Vec<TokenId>>,
}

/// What one chunk adds to one of the answers.
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
    /// As with logprobs: with the first chunk that holds some of their text.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Vec<u32>>)]
    pub(crate) token_ids: Option<Vec<TokenId>>,
}

/// What is new in a message.
#[derive(Debug, Default, Serialize, ToSchema)]
pub(crate) struct ChatDelta {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) content: Option<String>,
    /// What the model thinks before it answers, by DeepSeek's name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) reasoning_content: Option<String>,
    /// The same by vLLM's newer name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) reasoning: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) tool_calls: Option<Vec<ChatToolCallDelta>>,
}

/// Log probabilities of the answer's tokens.
#[derive(Debug, Default, Serialize, ToSchema)]
pub(crate) struct ChatLogprobs {
    pub(crate) content: Vec<ChatTokenLogprob>,
    #[schema(value_type = Option<String>)]
    pub(crate) refusal: Option<()>,
}

/// A sampled token, and the likeliest ones at its place.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct ChatTokenLogprob {
    #[serde(flatten)]
    pub(crate) token: ChatLogprob,
    pub(crate) top_logprobs: Vec<ChatLogprob>,
}

/// A token's text, bytes and log probability (-9999: never).
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct ChatLogprob {
    pub(crate) token: String,
    pub(crate) logprob: f64,
    pub(crate) bytes: Vec<u8>,
}
