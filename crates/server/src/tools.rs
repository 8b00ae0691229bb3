//! Reads the tools of a chat request.

use std::collections::HashSet;

use crate::conversation::{Tool, ToolChoice, Tools};
use crate::error::ApiError;
use crate::wire::chat::{ChatTool, ChatToolChoice, FunctionName, ToolMode};

/// Checks `tools` and `tool_choice`. With `allowed_tools` the model sees only those.
pub(crate) fn read(
    tools: Option<Vec<ChatTool>>,
    choice: Option<ChatToolChoice>,
    parallel: bool,
) -> Result<Tools, ApiError> {
    let tools = tools.unwrap_or_default().into_iter().enumerate();
    let mut tools = tools
        .map(|(index, tool)| definition(index, tool))
        .collect::<Result<Vec<_>, _>>()?;
    let choice = match choice {
        None => ToolChoice::Auto,
        Some(ChatToolChoice::Mode(mode)) => mode.into(),
        Some(ChatToolChoice::Particular(particular)) => match particular.r#type.as_str() {
            "function" => ToolChoice::Named(name(&particular.r#type, particular.function)?),
            "allowed_tools" => {
                let field = "tool_choice.allowed_tools";
                let missing = || ApiError::invalid(field, "tool_choice needs allowed_tools = {mode, tools}");
                let allowed = particular.allowed_tools.ok_or_else(missing)?;
                let names = allowed.tools.into_iter();
                let names = names.map(|tool| name(&tool.r#type, tool.function));
                tools = Tools::allow(tools, &names.collect::<Result<HashSet<_>, _>>()?)?;
                allowed.mode.into()
            }
            other => {
                return Err(ApiError::unsupported(
                    format!("tool_choice.type = {other}"),
                    "function and allowed_tools are",
                ));
            }
        },
    };
    Tools::new(tools, choice, parallel)
}

fn definition(index: usize, tool: ChatTool) -> Result<Tool, ApiError> {
    if tool.r#type != "function" {
        return Err(ApiError::unsupported(
            format!("tools[{index}].type = {}", tool.r#type),
            "only functions are",
        ));
    }
    let field = format!("tools[{index}].function");
    let Some(function) = tool.function else {
        let message = format!("{field}: a tool of type function needs a function");
        return Err(ApiError::invalid(field, message));
    };
    let strict = function.strict.unwrap_or(false);
    Tool::new(function.name, function.description, function.parameters, strict)
        .map_err(|message| ApiError::invalid(field.clone(), format!("{field}: {message}")))
}

fn name(kind: &str, function: Option<FunctionName>) -> Result<String, ApiError> {
    match (kind, function) {
        ("function", Some(function)) => Ok(function.name),
        _ => {
            let message =
                "tool_choice names a function as {\"type\": \"function\", \"function\": {\"name\": ..}}";
            Err(ApiError::invalid("tool_choice", message))
        }
    }
}

impl From<ToolMode> for ToolChoice {
    fn from(mode: ToolMode) -> Self {
        match mode {
            ToolMode::None => Self::None,
            ToolMode::Auto => Self::Auto,
            ToolMode::Required => Self::Required,
        }
    }
}
