use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::ToSchema;

use crate::wire::chat::ToolMode;

/// A tool that the model may call.
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[schema(as = responses::Tool)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(crate) enum Tool {
    Function(FunctionTool),
    Namespace(NamespaceTool),
}

/// A client-side function.
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[schema(as = responses::FunctionTool)]
#[serde(deny_unknown_fields)]
pub(crate) struct FunctionTool {
    #[serde(rename = "type")]
    _type: Option<String>,
    pub(crate) name: String,
    pub(crate) description: Option<String>,
    /// A JSON schema.
    pub(crate) parameters: Option<Map<String, Value>>,
    /// Enforces the schema.
    pub(crate) strict: Option<bool>,
    /// Only false is supported.
    pub(crate) defer_loading: Option<bool>,
    /// Only `direct` is supported.
    pub(crate) allowed_callers: Option<Vec<String>>,
    /// No effect: concerns only the client.
    #[serde(rename = "async")]
    _async: Option<bool>,
    /// No effect: chat templates do not use it.
    #[serde(rename = "output_schema")]
    _output_schema: Option<Value>,
}

/// Functions with a common prefix.
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[schema(as = responses::NamespaceTool)]
#[serde(deny_unknown_fields)]
pub(crate) struct NamespaceTool {
    #[serde(rename = "type")]
    _type: Option<String>,
    pub(crate) name: String,
    /// No effect: each function has its own description.
    #[serde(rename = "description")]
    _description: Option<String>,
    #[schema(value_type = Vec<FunctionTool>)]
    pub(crate) tools: Vec<Value>,
}

/// `tool_choice` that names a function, or those that are allowed.
#[derive(Clone, Debug, Deserialize, Serialize, ToSchema)]
#[schema(as = responses::NamedTool)]
#[serde(deny_unknown_fields)]
pub(crate) struct NamedTool {
    /// `function`.
    #[schema(pattern = "^function$")]
    pub(crate) r#type: String,
    pub(crate) name: String,
    pub(crate) namespace: Option<String>,
}

/// `tool_choice` that lists the functions that may be called.
#[derive(Clone, Debug, Deserialize, Serialize, ToSchema)]
#[schema(as = responses::AllowedTools)]
#[serde(deny_unknown_fields)]
pub(crate) struct AllowedTools {
    /// `allowed_tools`.
    #[schema(pattern = "^allowed_tools$")]
    #[serde(rename = "type")]
    _type: String,
    /// `auto` or `required`.
    pub(crate) mode: ToolMode,
    pub(crate) tools: Vec<NamedTool>,
}
