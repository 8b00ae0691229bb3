//! Tools for models whose chat template takes none: described in a system message, calls and results as text.

use std::borrow::Cow;

use plimsoll_text::ToolFormat;
use serde_json::{Value, json};

/// Adds the tools to the messages; unchanged where there are no tools, calls or results.
pub(super) fn with_tools<'a>(messages: &'a [Value], tools: &[Value], format: ToolFormat) -> Cow<'a, [Value]> {
    let is_about_tools = |message: &Value| message["role"] == "tool" || message.get("tool_calls").is_some();
    if tools.is_empty() && !messages.iter().any(is_about_tools) {
        return Cow::Borrowed(messages);
    }
    let mut described: Vec<Value> = messages.iter().map(|message| as_text(message, format)).collect();
    if !tools.is_empty() {
        let list: String = tools
            .iter()
            .map(|tool| format!("{}\n", tool["function"]))
            .collect();
        let text = format!(
            "You can call these functions, given as JSON:\n{list}To call one, answer with nothing but\n{}",
            format.call("function_name", &json!({ "argument": "value" }))
        );
        match described.first_mut().filter(|first| first["role"] == "system") {
            Some(system) => {
                let before = system["content"].as_str().unwrap_or_default();
                system["content"] = json!(format!("{before}\n\n{text}"));
            }
            None => described.insert(0, json!({ "role": "system", "content": text })),
        }
    }
    Cow::Owned(described)
}

/// A call as the model would write it; a result as a user message.
fn as_text(message: &Value, format: ToolFormat) -> Value {
    let content = message["content"].as_str().unwrap_or_default();
    let text = |field: &str| message[field].as_str().unwrap_or_default();
    if message["role"] == "tool" {
        let of = match text("name") {
            "" => text("tool_call_id"),
            name => name,
        };
        return json!({ "role": "user", "content": format!("Result of {of}: {content}") });
    }
    let Some(calls) = message["tool_calls"].as_array() else {
        return message.clone();
    };
    let written = calls.iter().map(|call| {
        let function = &call["function"];
        format.call(
            function["name"].as_str().unwrap_or_default(),
            &function["arguments"],
        )
    });
    let content = [content.to_owned()]
        .into_iter()
        .filter(|text| !text.is_empty())
        .chain(written);
    json!({ "role": "assistant", "content": content.collect::<Vec<_>>().join("\n") })
}
