use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::ToSchema;

use super::common::{Common, MaybeUsage, Usage};
use super::structured::StructuredFields;
use crate::body::{Wire, take};
use crate::error::ApiError;
use crate::fields::{CHAT_UNSUPPORTED, UNSUPPORTED, Unsupported};
use crate::openapi::body::body;

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
    #[schema(min_items = 1)]
    pub(crate) messages: Vec<Message>,
    /// Ends the prompt with what begins an answer. Default: true.
    pub(crate) add_generation_prompt: Option<bool>,
    /// Further variables for the model's chat template.
    #[serde(default)]
    pub(crate) chat_template_kwargs: Map<String, Value>,
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
}

impl Wire for ChatRequest {
    const UNSUPPORTED: &[&[Unsupported]] = &[UNSUPPORTED, CHAT_UNSUPPORTED];

    fn take_from(object: &mut Map<String, Value>) -> Result<Self, ApiError> {
        Ok(Self {
            common: take(object)?,
            structured: take(object)?,
            prompt: take(object)?,
            own: take(object)?,
        })
    }
}

body!(
    ChatRequest,
    "A conversation, and how to answer it.",
    Common,
    StructuredFields,
    ChatPrompt,
    ChatFields
);

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
    pub(crate) tool_calls: Option<Vec<Value>>,
    /// Part of answers of older servers, sent back by their clients.
    pub(crate) function_call: Option<Value>,
    pub(crate) audio: Option<Value>,
    #[serde(rename = "annotations")]
    pub(crate) _annotations: Option<Value>,
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

/// A message's content: text, or parts of which this server takes those of text.
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[serde(untagged)]
pub(crate) enum Content {
    Text(String),
    Parts(Vec<Part>),
}

/// One part; only `text` parts are supported.
#[derive(Clone, Debug, Deserialize, ToSchema)]
pub(crate) struct Part {
    /// The part's kind.
    #[schema(example = "text")]
    pub(crate) r#type: String,
    /// The text of a `text` part.
    pub(crate) text: Option<String>,
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
}

/// One of the answers.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ChatChoice {
    pub(crate) index: usize,
    pub(crate) message: ChatAnswer,
    pub(crate) logprobs: Option<ChatLogprobs>,
    pub(crate) finish_reason: &'static str,
}

/// The message that answers.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ChatAnswer {
    pub(crate) role: &'static str,
    pub(crate) content: String,
    pub(crate) refusal: Option<String>,
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
}

/// What one chunk adds to one of the answers.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ChatChunkChoice {
    pub(crate) index: usize,
    pub(crate) delta: Delta,
    pub(crate) logprobs: Option<ChatLogprobs>,
    pub(crate) finish_reason: Option<&'static str>,
}

/// What is new in a message.
#[derive(Debug, Default, Serialize, ToSchema)]
pub(crate) struct Delta {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) content: Option<String>,
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
    pub(crate) logprob: f32,
    pub(crate) bytes: Vec<u8>,
}
