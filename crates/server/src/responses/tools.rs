//! The functions of a response. The model knows each by one flat name.

use std::collections::{HashMap, HashSet};

use serde_json::Value;

use crate::conversation::{Tool, ToolChoice as Chosen, Tools, check_offered};
use crate::error::ApiError;
use crate::wire::request::typed;
use crate::wire::responses::{
    self as wire, AllowedTools, FunctionTool, NamedTool, ToolChoice, ToolChoiceObject,
};

/// The offered functions, and the client's names for them.
#[derive(Debug, Default)]
pub(crate) struct Functions {
    /// Namespace and name of namespaced functions, by flat name.
    spaces: HashMap<String, (String, String)>,
}

/// The flat name of a function.
pub(crate) fn flat_name(namespace: Option<&str>, name: &str) -> String {
    match namespace {
        Some(namespace) => format!("{namespace}__{name}"),
        None => name.to_owned(),
    }
}

impl Functions {
    /// Parses the request's functions and the tools for the model.
    pub(crate) fn new(
        tools: &[Value],
        choice: Option<&ToolChoice>,
        parallel: bool,
    ) -> Result<(Self, Tools), ApiError> {
        let mut functions = Self::default();
        let mut list = Vec::new();
        for (i, tool) in tools.iter().enumerate() {
            functions.add(tool, &format!("tools[{i}]"), &mut list)?;
        }
        let (choice, allowed) = self::choice(choice)?;
        if let Some(allowed) = allowed {
            list = Tools::allow(list, &allowed)?;
        }
        Ok((functions, Tools::new(list, choice, parallel)?))
    }

    /// Namespace and name of a function by its flat name.
    pub(crate) fn named(&self, called: String) -> (Option<String>, String) {
        match self.spaces.get(&called) {
            Some((namespace, name)) => (Some(namespace.clone()), name.clone()),
            None => (None, called),
        }
    }

    fn add(&mut self, tool: &Value, field: &str, list: &mut Vec<Tool>) -> Result<(), ApiError> {
        match parsed(tool, field)? {
            wire::Tool::Function(tool) => list.push(function(tool, None, field)?),
            wire::Tool::Namespace(namespace) => {
                for (i, tool) in namespace.tools.iter().enumerate() {
                    let field = format!("{field}.tools[{i}]");
                    let wire::Tool::Function(tool) = parsed(tool, &field)? else {
                        return Err(unsupported("namespace", &field));
                    };
                    let name = tool.name.clone();
                    let tool = function(tool, Some(&namespace.name), &field)?;
                    self.spaces
                        .insert(tool.name().to_owned(), (namespace.name.clone(), name));
                    list.push(tool);
                }
            }
        }
        Ok(())
    }
}

fn parsed(tool: &Value, field: &str) -> Result<wire::Tool, ApiError> {
    match tool.get("type").and_then(Value::as_str) {
        Some("function") => Ok(wire::Tool::Function(typed(tool.clone(), field)?)),
        Some("namespace") => Ok(wire::Tool::Namespace(typed(tool.clone(), field)?)),
        Some(kind) => Err(unsupported(kind, field)),
        None => {
            let field = format!("{field}.type");
            Err(ApiError::invalid(&field, format!("`{field}` must be a string")))
        }
    }
}

fn unsupported(kind: &str, field: &str) -> ApiError {
    ApiError::unsupported(
        format!("{field}.type = {kind}"),
        "only the types `function` and `namespace` are; disable this tool in the client",
    )
}

fn function(tool: FunctionTool, namespace: Option<&str>, field: &str) -> Result<Tool, ApiError> {
    check_offered(field, tool.defer_loading, tool.allowed_callers.as_deref())?;
    let (name, strict) = (flat_name(namespace, &tool.name), tool.strict.unwrap_or(false));
    Tool::new(name, tool.description, tool.parameters, strict)
        .map_err(|message| ApiError::invalid(format!("{field}.name"), format!("{field}: {message}")))
}

/// The choice, and the allowed functions if it lists some.
fn choice(choice: Option<&ToolChoice>) -> Result<(Chosen, Option<HashSet<String>>), ApiError> {
    let unsupported = |other: &str| {
        let field = format!("tool_choice.type = {other}");
        ApiError::unsupported(field, "only functions can be chosen")
    };
    let flat = |tool: &NamedTool| match tool.r#type.as_str() {
        "function" => Ok(flat_name(tool.namespace.as_deref(), &tool.name)),
        other => Err(unsupported(other)),
    };
    let object = match choice {
        None => return Ok((Chosen::Auto, None)),
        Some(ToolChoice::Mode(mode)) => return Ok(((*mode).into(), None)),
        Some(ToolChoice::Object(ToolChoiceObject(object))) => object,
    };
    let value = Value::Object(object.clone());
    match object.get("type").and_then(Value::as_str) {
        Some("function") => {
            let named: NamedTool = typed(value, "tool_choice")?;
            Ok((Chosen::Named(flat(&named)?), None))
        }
        Some("allowed_tools") => {
            let allowed: AllowedTools = typed(value, "tool_choice")?;
            let names = allowed.tools.iter().map(flat).collect::<Result<_, _>>()?;
            Ok((allowed.mode.into(), Some(names)))
        }
        Some(other) => Err(unsupported(other)),
        None => Err(ApiError::invalid(
            "tool_choice.type",
            "`tool_choice.type` must be a string",
        )),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn names(tools: Value, choice: Value) -> Result<Vec<String>, String> {
        let choice: Option<ToolChoice> = serde_json::from_value(choice).map_err(|e| e.to_string())?;
        let (_, tools) = Functions::new(tools.as_array().unwrap(), choice.as_ref(), true)
            .map_err(|error| error.to_string())?;
        let tools = tools.as_template().into_iter();
        Ok(tools
            .map(|tool| tool["function"]["name"].as_str().unwrap().to_owned())
            .collect())
    }

    #[test]
    fn functions_of_a_namespace_go_by_one_flat_name() {
        let tools = json!([
            { "type": "function", "name": "now" },
            { "type": "namespace", "name": "crm", "description": "customers", "tools": [
                { "type": "function", "name": "find", "strict": false, "parameters": { "type": "object" } },
            ]},
        ]);
        assert_eq!(names(tools.clone(), json!("auto")).unwrap(), ["now", "crm__find"]);
        let (functions, _) = Functions::new(tools.as_array().unwrap(), None, true).unwrap();
        assert_eq!(
            functions.named("crm__find".into()),
            (Some("crm".into()), "find".into())
        );
        assert_eq!(functions.named("now".into()), (None, "now".into()));
    }

    #[test]
    fn a_choice_leaves_the_allowed_ones() {
        let tools = json!([{ "type": "function", "name": "a" }, { "type": "function", "name": "b" }]);
        let allowed = |name: &str| json!({ "type": "allowed_tools", "mode": "required", "tools": [{ "type": "function", "name": name }] });
        assert_eq!(names(tools.clone(), allowed("b")).unwrap(), ["b"]);
        let error = names(tools.clone(), allowed("c")).unwrap_err();
        assert!(error.contains("allows c"), "{error}");
        let name = |name: &str| json!({ "type": "function", "name": name });
        let twice =
            json!({ "type": "allowed_tools", "mode": "auto", "tools": [name("b"), name("a"), name("b")] });
        assert_eq!(names(tools.clone(), twice).unwrap(), ["a", "b"]);
        assert_eq!(names(tools.clone(), json!("none")).unwrap(), [""; 0]);
        let named = json!({ "type": "function", "name": "c" });
        assert!(names(tools, named).unwrap_err().contains('c'));
    }

    #[test]
    fn others_are_refused_by_name() {
        let space = json!({ "type": "namespace", "name": "n", "tools": [{ "type": "custom", "name": "c" }] });
        let cases = json!([
            [{ "type": "web_search" }, "tools[0].type = web_search"],
            [{ "type": "custom", "name": "apply_patch" }, "tools[0].type = custom"],
            [{ "type": "function", "name": "f", "defer_loading": true }, "tools[0].defer_loading"],
            [space, "tools[0].tools[0].type = custom"],
        ]);
        for case in cases.as_array().unwrap() {
            let error = names(json!([case[0]]), Value::Null).unwrap_err();
            let refused = format!("`{}` is not supported", case[1].as_str().unwrap());
            assert!(error.starts_with(&refused), "{error}");
        }
        let error = names(json!([]), json!({ "type": "file_search" })).unwrap_err();
        assert!(error.contains("tool_choice.type = file_search"), "{error}");
    }
}
