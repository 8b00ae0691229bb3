//! `/v1/responses`.

mod event;
mod item;
mod tool;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::{IntoParams, ToSchema};

use super::chat::ReasoningEffort;
use super::common::Common;
use super::error::FieldError;
use super::extra::Extra;
use super::fields::{NO_REPORTS, RESPONSES_UNSUPPORTED, UNSUPPORTED, Unsupported};
use super::request::{RequestBody, take};
use super::schema::body;

pub(crate) use super::chat::ToolMode;
pub(crate) use event::{Event, Payload};
pub(crate) use item::{
    FunctionCall, FunctionCallOutput, InputFunctionCall, InputFunctionCallOutput, InputItem, InputMessage,
    InputReasoning, Item, ItemReference, ItemStatus, Logprob, MessageItem, Part, Reasoning, ReasoningText,
    Role, TokenLogprob,
};
pub(crate) use tool::{AllowedTools, FunctionTool, NamedTool, Tool};

/// `POST /v1/responses`.
#[derive(Debug)]
pub(crate) struct ResponsesRequest {
    pub(crate) common: Common,
    pub(crate) own: ResponsesFields,
}

/// The fields that only this endpoint has.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct ResponsesFields {
    /// What is new in the conversation: text of the user, or items.
    pub(crate) input: Option<Input>,
    /// The first system message; not carried over by `previous_response_id`.
    pub(crate) instructions: Option<String>,
    /// Continues the conversation of a stored response.
    pub(crate) previous_response_id: Option<String>,
    /// Most tokens to generate, reasoning included; as many as fit if absent.
    #[schema(minimum = 1)]
    pub(crate) max_output_tokens: Option<usize>,
    /// Bounds the calls of built-in tools, of which this server has none.
    pub(crate) max_tool_calls: Option<u64>,
    /// What the model may call: functions, also grouped in namespaces.
    #[schema(value_type = Vec<Tool>)]
    #[serde(default)]
    pub(crate) tools: Vec<Value>,
    /// `auto`, `none`, `required`, a function or a list of allowed ones.
    pub(crate) tool_choice: Option<ToolChoice>,
    /// Allows several calls in one answer. Default: true.
    pub(crate) parallel_tool_calls: Option<bool>,
    /// The format of the text.
    pub(crate) text: Option<TextConfig>,
    /// How the model reasons.
    pub(crate) reasoning: Option<ReasoningConfig>,
    /// `message.output_text.logprobs` and `reasoning.encrypted_content` add these; what belongs to built-in tools adds nothing.
    #[serde(default)]
    pub(crate) include: Vec<String>,
    /// Reports this many of the likeliest tokens; needs `message.output_text.logprobs` in `include`.
    #[schema(maximum = 20)]
    pub(crate) top_logprobs: Option<u32>,
    /// What to do with a conversation that is too long: `disabled` (the default) refuses it, `auto` leaves out its oldest
    /// items.
    pub(crate) truncation: Option<Truncation>,
    /// Up to 16 pairs that come back with the response.
    #[serde(default)]
    pub(crate) metadata: Map<String, Value>,
    /// Keeps the response for `previous_response_id` and retrieval, in memory and bounded. Default: true.
    pub(crate) store: Option<bool>,
    /// Comes back with the response.
    pub(crate) prompt_cache_key: Option<String>,
    /// Comes back with the response.
    pub(crate) safety_identifier: Option<String>,
    /// Comes back with the response.
    pub(crate) user: Option<String>,
    /// Further variables for the model's chat template.
    #[serde(default)]
    pub(crate) chat_template_kwargs: Map<String, Value>,
}

impl RequestBody for ResponsesRequest {
    const UNSUPPORTED: &[&[Unsupported]] = &[UNSUPPORTED, RESPONSES_UNSUPPORTED, NO_REPORTS];
    // Chat's field of the same meaning, and one that responses do not have.
    const FOREIGN: &[&str] = &["max_tokens", "n"];

    fn take_from(object: &mut Map<String, Value>) -> Result<Self, FieldError> {
        Ok(Self {
            common: Common::take_from(object)?,
            own: take(object)?,
        })
    }
}

body!(
    ResponsesRequest,
    "A conversation, or what is new in a stored one, and how to answer it.",
    Common,
    Extra,
    ResponsesFields
);

/// Text of the user, or items.
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[schema(as = responses::Input)]
#[serde(untagged, expecting = "expected a string or a list of items")]
pub(crate) enum Input {
    Text(String),
    Items(InputItems),
}

/// Items of which each has a type.
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[schema(as = responses::InputItems, value_type = Vec<InputItem>)]
#[serde(transparent)]
pub(crate) struct InputItems(pub(crate) Vec<Value>);

/// Which tools may or must be called.
#[derive(Clone, Debug, Deserialize, Serialize, ToSchema)]
#[schema(as = responses::ToolChoice)]
#[serde(
    untagged,
    expecting = "expected `auto`, `none`, `required`, or an object with a `type`"
)]
pub(crate) enum ToolChoice {
    Mode(ToolMode),
    Object(ToolChoiceObject),
}

/// A function, or those that are allowed.
#[derive(Clone, Debug, Deserialize, Serialize, ToSchema)]
#[schema(as = responses::ToolChoiceObject, value_type = NamedTool)]
#[serde(transparent)]
pub(crate) struct ToolChoiceObject(pub(crate) Map<String, Value>);

/// The format of the text.
#[derive(Clone, Debug, Default, Deserialize, Serialize, ToSchema)]
#[schema(as = responses::TextConfig)]
#[serde(deny_unknown_fields)]
pub(crate) struct TextConfig {
    /// Text where absent.
    pub(crate) format: Option<TextFormat>,
    /// Only `medium`, which asks for nothing, is supported.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) verbosity: Option<String>,
}

/// What the text has to be.
#[derive(Clone, Debug, Deserialize, Serialize, ToSchema)]
#[schema(as = responses::TextFormat)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
pub(crate) enum TextFormat {
    /// Anything.
    Text {},
    /// Some JSON object.
    JsonObject {},
    /// JSON of this schema.
    JsonSchema {
        /// The format's name.
        name: String,
        /// What the format is for.
        #[serde(skip_serializing_if = "Option::is_none")]
        description: Option<String>,
        /// A JSON schema.
        schema: Value,
        /// Schemas are always enforced.
        #[serde(skip_serializing_if = "Option::is_none")]
        strict: Option<bool>,
    },
}

/// How the model reasons.
#[derive(Clone, Debug, Default, Deserialize, Serialize, ToSchema)]
#[schema(as = responses::ReasoningConfig)]
#[serde(deny_unknown_fields)]
pub(crate) struct ReasoningConfig {
    /// As in chat: refused where the model's chat template cannot change how much it thinks.
    pub(crate) effort: Option<ReasoningEffort>,
    /// `auto` alone: the reasoning itself is in the answer, there is no summary of it.
    pub(crate) summary: Option<String>,
    #[serde(skip_serializing)]
    pub(crate) generate_summary: Option<String>,
    /// `auto` alone: the chat template decides.
    #[serde(skip_serializing)]
    pub(crate) context: Option<String>,
    /// `standard` alone.
    #[serde(skip_serializing)]
    pub(crate) mode: Option<String>,
}

/// What to do with a conversation that is too long.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, ToSchema)]
#[schema(as = responses::Truncation)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Truncation {
    /// Leave out its oldest items.
    Auto,
    /// Refuse it.
    #[default]
    Disabled,
}

/// A response, in any state.
#[derive(Clone, Debug, Serialize, ToSchema)]
#[schema(as = responses::ResponseObject)]
pub(crate) struct ResponseObject {
    pub(crate) id: String,
    /// `response`.
    pub(crate) object: &'static str,
    /// Seconds since 1970.
    pub(crate) created_at: u64,
    pub(crate) status: ResponseStatus,
    /// Always false.
    pub(crate) background: bool,
    /// Seconds since 1970.
    pub(crate) completed_at: Option<u64>,
    pub(crate) error: Option<ResponseError>,
    pub(crate) incomplete_details: Option<IncompleteDetails>,
    pub(crate) instructions: Option<String>,
    pub(crate) max_output_tokens: Option<usize>,
    pub(crate) max_tool_calls: Option<u64>,
    pub(crate) model: String,
    pub(crate) output: Vec<Item>,
    pub(crate) parallel_tool_calls: bool,
    pub(crate) previous_response_id: Option<String>,
    pub(crate) prompt_cache_key: Option<String>,
    pub(crate) reasoning: ReasoningConfig,
    pub(crate) safety_identifier: Option<String>,
    /// `default`.
    pub(crate) service_tier: &'static str,
    pub(crate) store: bool,
    pub(crate) temperature: f64,
    pub(crate) text: TextConfig,
    pub(crate) tool_choice: ToolChoice,
    #[schema(value_type = Vec<Tool>)]
    pub(crate) tools: Vec<Value>,
    pub(crate) top_logprobs: u32,
    pub(crate) top_p: f64,
    pub(crate) truncation: Truncation,
    /// Once it ended.
    pub(crate) usage: Option<ResponseUsage>,
    pub(crate) user: Option<String>,
    pub(crate) metadata: Map<String, Value>,
}

/// Where a response stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ToSchema)]
#[schema(as = responses::ResponseStatus)]
#[serde(rename_all = "snake_case")]
pub(crate) enum ResponseStatus {
    InProgress,
    Completed,
    Incomplete,
    Failed,
}

/// Why a response failed.
#[derive(Clone, Debug, Serialize, ToSchema)]
#[schema(as = responses::ResponseError)]
pub(crate) struct ResponseError {
    /// `server_error`.
    pub(crate) code: &'static str,
    pub(crate) message: String,
}

/// Why a response is incomplete.
#[derive(Clone, Copy, Debug, Serialize, ToSchema)]
#[schema(as = responses::IncompleteDetails)]
pub(crate) struct IncompleteDetails {
    /// `max_output_tokens`.
    pub(crate) reason: &'static str,
}

/// Tokens read and written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ToSchema)]
#[schema(as = responses::ResponseUsage)]
pub(crate) struct ResponseUsage {
    pub(crate) input_tokens: usize,
    pub(crate) input_tokens_details: InputTokensDetails,
    pub(crate) output_tokens: usize,
    pub(crate) output_tokens_details: OutputTokensDetails,
    pub(crate) total_tokens: usize,
}

/// Of the tokens read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ToSchema)]
#[schema(as = responses::InputTokensDetails)]
pub(crate) struct InputTokensDetails {
    /// Found in the prefix cache.
    pub(crate) cached_tokens: usize,
    /// Always 0: nothing is paid for what the cache keeps.
    pub(crate) cache_write_tokens: usize,
}

/// Of the tokens written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ToSchema)]
#[schema(as = responses::OutputTokensDetails)]
pub(crate) struct OutputTokensDetails {
    pub(crate) reasoning_tokens: usize,
}

/// What `DELETE /v1/responses/{id}` answers.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = responses::DeletedResponse)]
pub(crate) struct DeletedResponse {
    pub(crate) id: String,
    /// `response`.
    pub(crate) object: &'static str,
    pub(crate) deleted: bool,
}

/// What `GET /v1/responses/{id}/input_items` asks for.
#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub(crate) struct ItemsQuery {
    /// Begin behind this item.
    pub(crate) after: Option<String>,
    /// Most items, up to 100. Default: 20.
    pub(crate) limit: Option<usize>,
    /// Newest first unless `asc`.
    #[param(inline)]
    pub(crate) order: Option<Order>,
    /// What was asked for when the response was made is there; nothing can be added later.
    #[serde(default, rename = "include[]")]
    _include: Vec<String>,
}

/// How many tokens of prompt a response would have.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = responses::InputTokens)]
pub(crate) struct InputTokens {
    /// `response.input_tokens`.
    pub(crate) object: &'static str,
    pub(crate) input_tokens: usize,
}

/// The order of a list.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, ToSchema)]
#[schema(as = responses::Order)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Order {
    /// Oldest first.
    Asc,
    /// Newest first.
    #[default]
    Desc,
}

/// What the model was given for a response, a page of it.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = responses::ItemList)]
pub(crate) struct ItemList {
    /// `list`.
    pub(crate) object: &'static str,
    pub(crate) data: Vec<Item>,
    pub(crate) first_id: Option<String>,
    pub(crate) last_id: Option<String>,
    pub(crate) has_more: bool,
}
