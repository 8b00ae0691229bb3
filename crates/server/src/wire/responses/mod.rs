//! `/v1/responses`.

mod event;
mod item;
mod tool;

use std::borrow::Cow;

use serde::de::Error as _;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::openapi::{OneOfBuilder, RefOr, Schema};
use utoipa::{IntoParams, PartialSchema, ToSchema};

use super::chat::ReasoningEffort;
use super::common::Common;
use super::error::FieldError;
use super::extra::Extra;
use super::fields::{NO_REPORTS, RESPONSES_UNSUPPORTED, UNSUPPORTED, Unsupported};
use super::request::{RequestBody, take};
use super::schema::body;
use super::structured::FormatType;

pub(crate) use super::chat::ToolMode;
pub(crate) use event::{Event, Payload};
pub(crate) use item::{
    FunctionCall, FunctionCallOutput, InputFunctionCall, InputFunctionCallOutput, InputItem, InputMessage,
    InputReasoning, Item, ItemReference, ItemStatus, Logprob, MessageItem, Output, Part, Reasoning,
    ReasoningText, Role, TokenLogprob,
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
    /// New input: text of the user, or items.
    pub(crate) input: Option<Input>,
    /// System message; not inherited through `previous_response_id`.
    pub(crate) instructions: Option<String>,
    /// Continues the conversation of a stored response.
    pub(crate) previous_response_id: Option<String>,
    /// Maximum number of tokens to generate, including reasoning; as many as fit if absent.
    #[schema(minimum = 1)]
    pub(crate) max_output_tokens: Option<usize>,
    /// No effect: limits calls of built-in tools, which this server does not have.
    pub(crate) max_tool_calls: Option<u64>,
    /// Tools that the model may call: functions, also grouped in namespaces.
    #[schema(value_type = Vec<Tool>)]
    #[serde(default)]
    pub(crate) tools: Vec<Value>,
    /// `auto`, `none`, `required`, a function or a list of allowed ones.
    pub(crate) tool_choice: Option<ToolChoice>,
    /// Allows several calls in one answer. Default: true.
    pub(crate) parallel_tool_calls: Option<bool>,
    /// The format of the text.
    pub(crate) text: Option<TextConfig>,
    /// Reasoning options.
    pub(crate) reasoning: Option<ReasoningConfig>,
    /// `message.output_text.logprobs` and `reasoning.encrypted_content` are added; values for built-in tools have no effect.
    #[serde(default)]
    pub(crate) include: Vec<String>,
    /// Reports this many of the likeliest tokens; needs `message.output_text.logprobs` in `include`.
    #[schema(maximum = 20)]
    pub(crate) top_logprobs: Option<u32>,
    /// If the conversation is too long, `disabled` (the default) refuses it and `auto` drops its oldest items.
    pub(crate) truncation: Option<Truncation>,
    /// Up to 16 pairs, returned with the response.
    #[serde(default)]
    pub(crate) metadata: Map<String, Value>,
    /// Stores the response in memory, for `previous_response_id` and retrieval. Default: true.
    pub(crate) store: Option<bool>,
    /// Returned with the response.
    pub(crate) prompt_cache_key: Option<String>,
    /// Returned with the response.
    pub(crate) safety_identifier: Option<String>,
    /// Returned with the response.
    pub(crate) user: Option<String>,
    /// Additional variables for the chat template.
    #[serde(default)]
    pub(crate) chat_template_kwargs: Map<String, Value>,
}

impl RequestBody for ResponsesRequest {
    const UNSUPPORTED: &[&[Unsupported]] = &[UNSUPPORTED, RESPONSES_UNSUPPORTED, NO_REPORTS];
    // A field that has another name here, and one that responses do not have.
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
    "A conversation, or new input of a stored one, and how to answer it.",
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

/// Input items.
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

/// A function, or a list of allowed functions.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(transparent)]
pub(crate) struct ToolChoiceObject(pub(crate) Map<String, Value>);

impl PartialSchema for ToolChoiceObject {
    fn schema() -> RefOr<Schema> {
        OneOfBuilder::new()
            .item(NamedTool::schema())
            .item(AllowedTools::schema())
            .into()
    }
}

impl ToSchema for ToolChoiceObject {
    fn name() -> Cow<'static, str> {
        Cow::Borrowed("responses.ToolChoiceObject")
    }

    fn schemas(all: &mut Vec<(String, RefOr<Schema>)>) {
        NamedTool::schemas(all);
        AllowedTools::schemas(all);
    }
}

/// The format of the text.
#[derive(Clone, Debug, Default, Deserialize, Serialize, ToSchema)]
#[schema(as = responses::TextConfig)]
#[serde(deny_unknown_fields)]
pub(crate) struct TextConfig {
    /// Text where absent.
    pub(crate) format: Option<TextFormat>,
    /// Only `medium`, the default, is supported.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) verbosity: Option<String>,
}

/// The format of the text.
#[derive(Clone, Debug, Deserialize, Serialize, ToSchema)]
#[schema(as = responses::TextFormat)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
#[serde(try_from = "TextFormatFields")]
pub(crate) enum TextFormat {
    /// Anything.
    Text {},
    /// Any JSON object.
    JsonObject {},
    /// JSON that follows this schema.
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

/// A [`TextFormat`] as it is read: of an enum with a tag, serde forgets where in the value an error is.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct TextFormatFields {
    r#type: FormatType,
    name: Option<String>,
    description: Option<String>,
    schema: Option<Value>,
    strict: Option<bool>,
}

impl TryFrom<TextFormatFields> for TextFormat {
    type Error = serde::de::value::Error;

    fn try_from(fields: TextFormatFields) -> Result<Self, Self::Error> {
        Ok(match fields.r#type {
            FormatType::Text => Self::Text {},
            FormatType::JsonObject => Self::JsonObject {},
            FormatType::JsonSchema => Self::JsonSchema {
                name: fields.name.ok_or_else(|| Self::Error::missing_field("name"))?,
                description: fields.description,
                schema: fields
                    .schema
                    .ok_or_else(|| Self::Error::missing_field("schema"))?,
                strict: fields.strict,
            },
        })
    }
}

/// Reasoning options.
#[derive(Clone, Debug, Default, Deserialize, Serialize, ToSchema)]
#[schema(as = responses::ReasoningConfig)]
#[serde(deny_unknown_fields)]
pub(crate) struct ReasoningConfig {
    /// Reasoning effort, as in chat: refused by models that do not reason.
    pub(crate) effort: Option<ReasoningEffort>,
    /// Only `auto`: the response has the full reasoning and no summary.
    pub(crate) summary: Option<String>,
    /// The older name of `summary`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) generate_summary: Option<String>,
    /// Only `auto`: the chat template decides.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) context: Option<String>,
    /// Only `standard`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) mode: Option<String>,
}

/// What to do if a conversation is too long.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, ToSchema)]
#[schema(as = responses::Truncation)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Truncation {
    /// Drop its oldest items.
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
    /// Set when it has ended.
    pub(crate) usage: Option<ResponseUsage>,
    pub(crate) user: Option<String>,
    pub(crate) metadata: Map<String, Value>,
}

/// Status of a response.
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

/// Token counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ToSchema)]
#[schema(as = responses::ResponseUsage)]
pub(crate) struct ResponseUsage {
    pub(crate) input_tokens: usize,
    pub(crate) input_tokens_details: InputTokensDetails,
    pub(crate) output_tokens: usize,
    pub(crate) output_tokens_details: OutputTokensDetails,
    pub(crate) total_tokens: usize,
}

/// Details of the input tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ToSchema)]
#[schema(as = responses::InputTokensDetails)]
pub(crate) struct InputTokensDetails {
    /// Found in the prefix cache.
    pub(crate) cached_tokens: usize,
    /// Always 0.
    pub(crate) cache_write_tokens: usize,
}

/// Details of the output tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ToSchema)]
#[schema(as = responses::OutputTokensDetails)]
pub(crate) struct OutputTokensDetails {
    pub(crate) reasoning_tokens: usize,
}

/// Response of `DELETE /v1/responses/{id}`.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = responses::DeletedResponse)]
pub(crate) struct DeletedResponse {
    pub(crate) id: String,
    /// `response`.
    pub(crate) object: &'static str,
    pub(crate) deleted: bool,
}

/// Query of `GET /v1/responses/{id}/input_items`.
#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub(crate) struct ItemsQuery {
    /// Start after this item.
    pub(crate) after: Option<String>,
    /// Maximum number of items, up to 100. Default: 20.
    pub(crate) limit: Option<usize>,
    /// Newest first unless `asc`.
    #[param(inline)]
    pub(crate) order: Option<Order>,
    /// No effect: what the response was created with is included, and nothing can be added later.
    #[serde(default, rename = "include[]")]
    _include: Vec<String>,
}

/// Number of prompt tokens of a response.
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

/// A page of a response's input items.
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
