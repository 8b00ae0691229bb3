use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::common::{Common, MaybeUsage};
use crate::body::{Wire, take};
use crate::error::ApiError;
use crate::fields::{CHAT_UNSUPPORTED, UNSUPPORTED, Unsupported};

/// `POST /v1/chat/completions`.
#[derive(Debug)]
pub(crate) struct ChatRequest {
    pub(crate) common: Common,
    pub(crate) prompt: ChatPrompt,
    pub(crate) own: ChatFields,
}

/// The fields that make the prompt; `/tokenize` has them too.
#[derive(Debug, Deserialize)]
pub(crate) struct ChatPrompt {
    pub(crate) messages: Vec<Message>,
    pub(crate) add_generation_prompt: Option<bool>,
    #[serde(default)]
    pub(crate) chat_template_kwargs: Map<String, Value>,
}

/// The fields that only chat has.
#[derive(Debug, Deserialize)]
pub(crate) struct ChatFields {
    pub(crate) max_completion_tokens: Option<usize>,
    #[serde(default)]
    pub(crate) logprobs: bool,
    pub(crate) top_logprobs: Option<u32>,
}

impl Wire for ChatRequest {
    const UNSUPPORTED: &[&[Unsupported]] = &[UNSUPPORTED, CHAT_UNSUPPORTED];

    fn take_from(object: &mut Map<String, Value>) -> Result<Self, ApiError> {
        Ok(Self {
            common: take(object)?,
            prompt: take(object)?,
            own: take(object)?,
        })
    }
}

/// One message of the conversation.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Message {
    pub(crate) role: Role,
    pub(crate) content: Option<Content>,
    pub(crate) name: Option<String>,
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
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Role {
    System,
    Developer,
    User,
    Assistant,
    Tool,
}

/// A message's content: text, or parts of which this server takes those of text.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
pub(crate) enum Content {
    Text(String),
    Parts(Vec<Part>),
}

/// One part; only `text` parts are supported.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Part {
    pub(crate) r#type: String,
    pub(crate) text: Option<String>,
}

/// The response, whole.
#[derive(Debug, Serialize)]
pub(crate) struct ChatCompletion<'a> {
    pub(crate) id: &'a str,
    pub(crate) object: &'static str,
    pub(crate) created: u64,
    pub(crate) model: &'a str,
    pub(crate) choices: Vec<ChatChoice>,
    pub(crate) usage: super::common::Usage,
    pub(crate) system_fingerprint: &'static str,
}

#[derive(Debug, Serialize)]
pub(crate) struct ChatChoice {
    pub(crate) index: usize,
    pub(crate) message: ChatAnswer,
    pub(crate) logprobs: Option<ChatLogprobs>,
    pub(crate) finish_reason: &'static str,
}

#[derive(Debug, Serialize)]
pub(crate) struct ChatAnswer {
    pub(crate) role: &'static str,
    pub(crate) content: String,
    pub(crate) refusal: Option<String>,
}

/// One chunk of a stream.
#[derive(Debug, Serialize)]
pub(crate) struct ChatChunk {
    pub(crate) id: String,
    pub(crate) object: &'static str,
    pub(crate) created: u64,
    pub(crate) model: String,
    pub(crate) choices: Vec<ChatChunkChoice>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) usage: MaybeUsage,
    pub(crate) system_fingerprint: &'static str,
}

#[derive(Debug, Serialize)]
pub(crate) struct ChatChunkChoice {
    pub(crate) index: usize,
    pub(crate) delta: Delta,
    pub(crate) logprobs: Option<ChatLogprobs>,
    pub(crate) finish_reason: Option<&'static str>,
}

#[derive(Debug, Default, Serialize)]
pub(crate) struct Delta {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) content: Option<String>,
}

#[derive(Debug, Default, Serialize)]
pub(crate) struct ChatLogprobs {
    pub(crate) content: Vec<ChatTokenLogprob>,
    pub(crate) refusal: Option<()>,
}

#[derive(Clone, Debug, Serialize)]
pub(crate) struct ChatTokenLogprob {
    #[serde(flatten)]
    pub(crate) token: ChatLogprob,
    pub(crate) top_logprobs: Vec<ChatLogprob>,
}

#[derive(Clone, Debug, Serialize)]
pub(crate) struct ChatLogprob {
    pub(crate) token: String,
    pub(crate) logprob: f32,
    pub(crate) bytes: Vec<u8>,
}
