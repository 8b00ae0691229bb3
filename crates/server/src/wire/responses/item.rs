use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::ToSchema;

use crate::wire::content::Content;

/// An input item.
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[schema(as = responses::InputItem)]
#[serde(untagged)]
pub(crate) enum InputItem {
    Message(InputMessage),
    FunctionCall(InputFunctionCall),
    FunctionCallOutput(InputFunctionCallOutput),
    Reasoning(InputReasoning),
    ItemReference(ItemReference),
}

/// A message.
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[schema(as = responses::InputMessage)]
#[serde(deny_unknown_fields)]
pub(crate) struct InputMessage {
    #[schema(pattern = "^message$")]
    #[serde(rename = "type")]
    _type: Option<String>,
    pub(crate) id: Option<String>,
    pub(crate) role: Role,
    pub(crate) content: Content,
    #[serde(rename = "status")]
    _status: Option<Value>,
    /// Only in answers of other servers; ignored.
    #[serde(rename = "phase")]
    _phase: Option<Value>,
}

/// The author of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, ToSchema)]
#[schema(as = responses::Role)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Role {
    User,
    Assistant,
    System,
    Developer,
}

/// A tool call. Additional fields are ignored: clients send items back with fields of their own.
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[schema(as = responses::InputFunctionCall)]
pub(crate) struct InputFunctionCall {
    #[schema(pattern = "^function_call$")]
    #[serde(rename = "type")]
    _type: String,
    pub(crate) id: Option<String>,
    pub(crate) call_id: String,
    pub(crate) name: String,
    pub(crate) namespace: Option<String>,
    /// JSON text; invalid JSON of a truncated answer is passed to the model as it is.
    pub(crate) arguments: String,
}

/// The result of a tool call. Additional fields are ignored.
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[schema(as = responses::InputFunctionCallOutput)]
pub(crate) struct InputFunctionCallOutput {
    #[schema(pattern = "^function_call_output$")]
    #[serde(rename = "type")]
    _type: String,
    pub(crate) id: Option<String>,
    /// The id of the call.
    pub(crate) call_id: String,
    pub(crate) output: Content,
}

/// Reasoning. Additional fields are ignored.
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[schema(as = responses::InputReasoning)]
pub(crate) struct InputReasoning {
    #[schema(pattern = "^reasoning$")]
    #[serde(rename = "type")]
    _type: String,
    pub(crate) id: Option<String>,
    pub(crate) content: Option<Vec<ReasoningText>>,
    /// Replaces `content`, if this server created it; otherwise ignored.
    pub(crate) encrypted_content: Option<String>,
}

/// An item of a stored response.
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[schema(as = responses::ItemReference)]
#[serde(deny_unknown_fields)]
pub(crate) struct ItemReference {
    #[schema(pattern = "^item_reference$")]
    #[serde(rename = "type")]
    _type: Option<String>,
    pub(crate) id: String,
}

/// An item in a response.
#[derive(Clone, Debug, PartialEq, Serialize, ToSchema)]
#[schema(as = responses::Item)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(crate) enum Item {
    Message(MessageItem),
    FunctionCall(FunctionCall),
    FunctionCallOutput(FunctionCallOutput),
    Reasoning(Reasoning),
}

/// Status of an item.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ToSchema)]
#[schema(as = responses::ItemStatus)]
#[serde(rename_all = "snake_case")]
pub(crate) enum ItemStatus {
    InProgress,
    Completed,
    Incomplete,
}

/// A message.
#[derive(Clone, Debug, PartialEq, Serialize, ToSchema)]
#[schema(as = responses::MessageItem)]
pub(crate) struct MessageItem {
    pub(crate) id: String,
    pub(crate) status: ItemStatus,
    pub(crate) role: Role,
    pub(crate) content: Vec<Part>,
}

/// A part of an item.
#[derive(Clone, Debug, PartialEq, Serialize, ToSchema)]
#[schema(as = responses::Part)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(crate) enum Part {
    InputText {
        text: String,
    },
    InputImage {
        /// A data URL, or an address that the server may fetch.
        image_url: String,
        /// The path of the part in its request.
        #[serde(skip)]
        field: String,
    },
    OutputText {
        text: String,
        /// Always empty.
        annotations: Vec<Value>,
        logprobs: Vec<TokenLogprob>,
    },
    ReasoningText {
        text: String,
    },
}

/// A generated token and the likeliest ones at its position.
#[derive(Clone, Debug, PartialEq, Serialize, ToSchema)]
#[schema(as = responses::TokenLogprob)]
pub(crate) struct TokenLogprob {
    #[serde(flatten)]
    pub(crate) token: Logprob,
    pub(crate) top_logprobs: Vec<Logprob>,
}

/// A token with its log-probability.
#[derive(Clone, Debug, PartialEq, Serialize, ToSchema)]
#[schema(as = responses::Logprob)]
pub(crate) struct Logprob {
    pub(crate) token: String,
    pub(crate) bytes: Vec<u8>,
    /// -9999: probability 0.
    pub(crate) logprob: f64,
}

/// A tool call.
#[derive(Clone, Debug, PartialEq, Serialize, ToSchema)]
#[schema(as = responses::FunctionCall)]
pub(crate) struct FunctionCall {
    pub(crate) id: String,
    pub(crate) call_id: String,
    pub(crate) name: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) namespace: Option<String>,
    /// JSON text as the model wrote it.
    pub(crate) arguments: String,
    pub(crate) status: ItemStatus,
}

/// What a tool returned: text, or parts where there are images.
#[derive(Clone, Debug, PartialEq, Serialize, ToSchema)]
#[schema(as = responses::Output)]
#[serde(untagged)]
pub(crate) enum Output {
    Text(String),
    Parts(Vec<Part>),
}

impl Output {
    /// Bytes of its text.
    pub(crate) fn text_len(&self) -> usize {
        match self {
            Self::Text(text) => text.len(),
            Self::Parts(parts) => parts.iter().map(|part| part.text().len()).sum(),
        }
    }
}

/// The result of a tool call.
#[derive(Clone, Debug, PartialEq, Serialize, ToSchema)]
#[schema(as = responses::FunctionCallOutput)]
pub(crate) struct FunctionCallOutput {
    pub(crate) id: String,
    pub(crate) call_id: String,
    pub(crate) output: Output,
    pub(crate) status: ItemStatus,
}

/// Reasoning.
#[derive(Clone, Debug, PartialEq, Serialize, ToSchema)]
#[schema(as = responses::Reasoning)]
pub(crate) struct Reasoning {
    pub(crate) id: String,
    /// Always empty.
    pub(crate) summary: Vec<Value>,
    pub(crate) content: Vec<ReasoningText>,
    /// The text as an opaque string for clients that only send that back, if requested by `include`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) encrypted_content: Option<String>,
    pub(crate) status: ItemStatus,
}

/// A part of the reasoning.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize, ToSchema)]
#[schema(as = responses::ReasoningText)]
#[serde(tag = "type", rename = "reasoning_text")]
pub(crate) struct ReasoningText {
    pub(crate) text: String,
}

impl Item {
    /// Its id, unique in the store.
    pub(crate) fn id(&self) -> &str {
        match self {
            Self::Message(item) => &item.id,
            Self::FunctionCall(item) => &item.id,
            Self::FunctionCallOutput(item) => &item.id,
            Self::Reasoning(item) => &item.id,
        }
    }
}

impl Part {
    /// Its text; none of an image.
    pub(crate) fn text(&self) -> &str {
        match self {
            Self::InputText { text } | Self::OutputText { text, .. } | Self::ReasoningText { text } => text,
            Self::InputImage { .. } => "",
        }
    }
}
