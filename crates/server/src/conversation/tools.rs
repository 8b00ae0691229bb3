//! Tools.

use std::collections::HashSet;

use plimsoll_text::Function;
use serde_json::{Map, Value, json};

use crate::error::ApiError;

/// Maximum length of a function's name: Anthropic's limit, twice OpenAI's.
const MAX_NAME: usize = 128;

/// Maximum number of functions, eight times OpenAI's limit: each is part of the prompt and a rule of the grammar.
const MAX_TOOLS: usize = 1024;

/// A function that the model may call.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Tool {
    name: String,
    description: Option<String>,
    /// JSON schema of its arguments, an object.
    parameters: Option<Map<String, Value>>,
    strict: bool,
}

impl Tool {
    /// A function; `Err` says what is wrong with it. The arguments of a `strict` function follow its schema.
    pub(crate) fn new(
        name: String,
        description: Option<String>,
        parameters: Option<Map<String, Value>>,
        strict: bool,
    ) -> Result<Self, String> {
        let legal = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
        if name.is_empty() || name.len() > MAX_NAME || !name.chars().all(legal) {
            return Err(format!(
                "a function's name must have 1 to {MAX_NAME} characters of a-z, A-Z, 0-9, _ and -, not {name:?}"
            ));
        }
        let kind = parameters.as_ref().and_then(|schema| schema.get("type"));
        if kind.is_some_and(|kind| kind != "object") {
            return Err(format!(
                "the parameters of {name} are not the schema of an object: its `type` is not \"object\""
            ));
        }
        Ok(Self {
            name,
            description,
            parameters,
            strict,
        })
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// The format that chat templates expect: OpenAI's, without absent fields.
    fn as_template(&self) -> Value {
        let mut function = Map::new();
        function.insert("name".into(), json!(self.name));
        if let Some(description) = &self.description {
            function.insert("description".into(), json!(description));
        }
        let parameters = self.parameters.clone();
        let parameters =
            parameters.map_or_else(|| json!({ "type": "object", "properties": {} }), Value::Object);
        function.insert("parameters".into(), parameters);
        if self.strict {
            function.insert("strict".into(), json!(true));
        }
        json!({ "type": "function", "function": function })
    }
}

/// Refuses a definition (`field`) with deferred loading or with callers other than the model.
pub(crate) fn check_offered(
    field: &str,
    defer_loading: Option<bool>,
    allowed_callers: Option<&[String]>,
) -> Result<(), ApiError> {
    let refuse = |name, hint| ApiError::unsupported(format!("{field}.{name}"), hint);
    if defer_loading == Some(true) {
        return Err(refuse("defer_loading", "only false is"));
    }
    let mut callers = allowed_callers.into_iter().flatten();
    match callers.any(|caller| caller != "direct") {
        true => Err(refuse("allowed_callers", "only `direct` is")),
        false => Ok(()),
    }
}

/// Whether the model may or must call tools.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) enum ToolChoice {
    /// The model decides.
    #[default]
    Auto,
    /// It must not call any.
    None,
    /// It must call one or several.
    Required,
    /// It must call this one.
    Named(String),
}

/// The tools of one conversation.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Tools {
    list: Vec<Tool>,
    choice: ToolChoice,
    parallel: bool,
}

impl Tools {
    /// Filters `list` by `names`, for `allowed_tools`; an unknown name is an error.
    pub(crate) fn allow(mut list: Vec<Tool>, names: &HashSet<String>) -> Result<Vec<Tool>, ApiError> {
        let is_there = |name: &&String| list.iter().any(|tool| tool.name == **name);
        if let Some(unknown) = names.iter().find(|name| !is_there(name)) {
            let message = format!("tool_choice allows {unknown}, which is not among the tools");
            return Err(ApiError::invalid("tool_choice", message));
        }
        list.retain(|tool| names.contains(&tool.name));
        Ok(list)
    }

    /// Checks that names are unique and the choice is possible. `parallel`: allow several calls in one answer. Errors name the
    /// fields `tools` and `tool_choice`.
    pub(crate) fn new(list: Vec<Tool>, choice: ToolChoice, parallel: bool) -> Result<Self, ApiError> {
        if list.len() > MAX_TOOLS {
            let message = format!(
                "tools has {} functions; at most {MAX_TOOLS} are allowed",
                list.len()
            );
            return Err(ApiError::invalid("tools", message));
        }
        let mut names = HashSet::new();
        if let Some(twice) = list.iter().find(|tool| !names.insert(tool.name())) {
            let message = format!("tools: there are two functions called {}", twice.name());
            return Err(ApiError::invalid("tools", message));
        }
        let possible = match &choice {
            ToolChoice::Auto | ToolChoice::None => Ok(()),
            ToolChoice::Required if list.is_empty() => Err("tool_choice = required needs tools".to_owned()),
            ToolChoice::Required => Ok(()),
            ToolChoice::Named(name) if names.contains(name.as_str()) => Ok(()),
            ToolChoice::Named(name) => Err(format!("tool_choice names {name}, which is not among the tools")),
        };
        possible.map_err(|message| ApiError::invalid("tool_choice", message))?;
        Ok(Self {
            list,
            choice,
            parallel,
        })
    }

    /// Whether the model may call anything.
    pub(crate) fn may_call(&self) -> bool {
        self.choice != ToolChoice::None && !self.list.is_empty()
    }

    /// Whether the model must call something.
    pub(crate) fn must_call(&self) -> bool {
        matches!(self.choice, ToolChoice::Required | ToolChoice::Named(_))
    }

    /// Maximum calls in one answer, if limited.
    pub(crate) fn max_calls(&self) -> Option<usize> {
        (!self.parallel || matches!(self.choice, ToolChoice::Named(_))).then_some(1)
    }

    /// For the chat template; none if the model must not call any.
    pub(crate) fn as_template(&self) -> Vec<Value> {
        match self.choice {
            ToolChoice::None => Vec::new(),
            _ => self.list.iter().map(Tool::as_template).collect(),
        }
    }

    /// Functions that the model may call.
    pub(crate) fn functions(&self) -> Vec<Function> {
        let named = |tool: &&Tool| match &self.choice {
            ToolChoice::None => false,
            ToolChoice::Named(name) => tool.name == *name,
            ToolChoice::Auto | ToolChoice::Required => true,
        };
        let function = |tool: &Tool| Function {
            name: tool.name.clone(),
            parameters: tool.parameters.clone().unwrap_or_default(),
            strict: tool.strict,
        };
        self.list.iter().filter(named).map(function).collect()
    }
}
