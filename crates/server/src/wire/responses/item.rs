use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::ToSchema;

use crate::wire::content::Content;

/// An item that a client sends.
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

/// Somebody says something.
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[schema(as = responses::InputMessage)]
#[serde(deny_unknown_fields)]
pub(crate) struct InputMessage {
    #[serde(rename = "type")]
    _type: Option<String>,
    pub(crate) id: Option<String>,
    pub(crate) role: Role,
    pub(crate) content: Content,
    #[serde(rename = "status")]
    _status: Option<Value>,
    /// Labels of other models' answers.
    #[serde(rename = "phase")]
    _phase: Option<Value>,
}

/// Who speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, ToSchema)]
#[schema(as = responses::Role)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Role {
    User,
    Assistant,
    System,
    Developer,
}

/// A call that the model made. Clients send back what they added to it, which asks for nothing.
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
    /// JSON text; what is none, since the answer was cut off, is told to the model as it stands.
    pub(crate) arguments: String,
}

/// What a call gave. Clients send back what they added to it, which asks for nothing.
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[schema(as = responses::InputFunctionCallOutput)]
pub(crate) struct InputFunctionCallOutput {
    #[schema(pattern = "^function_call_output$")]
    #[serde(rename = "type")]
    _type: String,
    pub(crate) id: Option<String>,
    /// The call's.
    pub(crate) call_id: String,
    pub(crate) output: Content,
}

/// What the model thought. Clients send back what they added to it, which asks for nothing.
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[schema(as = responses::InputReasoning)]
pub(crate) struct InputReasoning {
    #[schema(pattern = "^reasoning$")]
    #[serde(rename = "type")]
    _type: String,
    pub(crate) id: Option<String>,
    pub(crate) content: Option<Vec<ReasoningText>>,
    /// Stands for `content`, where this server wrote it; that of others is left out.
    pub(crate) encrypted_content: Option<String>,
}

/// An item of a stored response.
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[schema(as = responses::ItemReference)]
#[serde(deny_unknown_fields)]
pub(crate) struct ItemReference {
    #[serde(rename = "type")]
    _type: Option<String>,
    pub(crate) id: String,
}

/// An item as this server keeps and shows it.
#[derive(Clone, Debug, PartialEq, Serialize, ToSchema)]
#[schema(as = responses::Item)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(crate) enum Item {
    Message(MessageItem),
    FunctionCall(FunctionCall),
    FunctionCallOutput(FunctionCallOutput),
    Reasoning(Reasoning),
}

/// Where an item stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ToSchema)]
#[schema(as = responses::ItemStatus)]
#[serde(rename_all = "snake_case")]
pub(crate) enum ItemStatus {
    InProgress,
    Completed,
    Incomplete,
}

/// Somebody says something.
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
#[expect(clippy::enum_variant_names, reason = "they are named as on the wire")]
pub(crate) enum Part {
    InputText {
        text: String,
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

/// A token that was generated.
#[derive(Clone, Debug, PartialEq, Serialize, ToSchema)]
#[schema(as = responses::TokenLogprob)]
pub(crate) struct TokenLogprob {
    #[serde(flatten)]
    pub(crate) token: Logprob,
    pub(crate) top_logprobs: Vec<Logprob>,
}

/// A token with its log probability.
#[derive(Clone, Debug, PartialEq, Serialize, ToSchema)]
#[schema(as = responses::Logprob)]
pub(crate) struct Logprob {
    pub(crate) token: String,
    pub(crate) bytes: Vec<u8>,
    /// -9999: never.
    pub(crate) logprob: f64,
}

/// A call that the model wants made.
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

/// What a call gave.
#[derive(Clone, Debug, PartialEq, Serialize, ToSchema)]
#[schema(as = responses::FunctionCallOutput)]
pub(crate) struct FunctionCallOutput {
    pub(crate) id: String,
    pub(crate) call_id: String,
    pub(crate) output: String,
    pub(crate) status: ItemStatus,
}

/// What the model thinks before it answers.
#[derive(Clone, Debug, PartialEq, Serialize, ToSchema)]
#[schema(as = responses::Reasoning)]
pub(crate) struct Reasoning {
    pub(crate) id: String,
    /// Always empty.
    pub(crate) summary: Vec<Value>,
    pub(crate) content: Vec<ReasoningText>,
    /// The text again for clients that send back nothing else, if asked for by `include`.
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
    /// Its name, unique in the store.
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
    /// What it says.
    pub(crate) fn text(&self) -> &str {
        match self {
            Self::InputText { text } | Self::OutputText { text, .. } | Self::ReasoningText { text } => text,
        }
    }
}
