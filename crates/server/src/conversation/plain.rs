//! Tools for models whose chat template does not show them: described in a system message, or in the user's first where the
//! template shows none; calls and results as text.

use std::borrow::Cow;

use plimsoll_text::{ChatTemplate, ToolFormat};
use serde_json::{Value, json};

/// Messages and tools as `template` shows them: what it has no place for becomes text.
pub(super) fn for_template<'a>(
    template: &ChatTemplate,
    messages: &'a [Value],
    tools: &'a [Value],
    format: ToolFormat,
) -> (Cow<'a, [Value]>, &'a [Value]) {
    let is_call = |message: &Value| message.get("tool_calls").is_some();
    let is_result = |message: &Value| message["role"] == "tool";
    let has_calls = messages.iter().any(is_call);
    if template.takes_tools() {
        let messages = match has_calls && !template.shows_calls() {
            true => messages
                .iter()
                .map(|message| with_calls(message, format))
                .collect(),
            false => Cow::Borrowed(messages),
        };
        return (messages, tools);
    }
    if tools.is_empty() && !has_calls && !messages.iter().any(is_result) {
        return (Cow::Borrowed(messages), &[]);
    }
    let mut described: Vec<Value> = Vec::new();
    for (index, message) in messages.iter().enumerate() {
        if !is_result(message) {
            described.push(with_calls(message, format));
            continue;
        }
        let result = result(message);
        match described.last_mut() {
            // One message for all results of an answer: many templates want roles to alternate.
            Some(last) if index > 0 && is_result(&messages[index - 1]) => {
                last["content"] = joined(last["content"].take(), result);
            }
            _ => described.push(json!({ "role": "user", "content": result })),
        }
    }
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
            None if template.shows_system() => {
                described.insert(0, json!({ "role": "system", "content": text }));
            }
            None => match described.iter_mut().find(|message| message["role"] == "user") {
                Some(user) => put_before(&mut user["content"], &text),
                None => described.insert(0, json!({ "role": "user", "content": text })),
            },
        }
    }
    (Cow::Owned(described), &[])
}

/// Puts a text before a message's content, which is a text or a list of parts.
fn put_before(content: &mut Value, text: &str) {
    match content {
        Value::Array(parts) => parts.insert(0, json!({ "type": "text", "text": text })),
        other => *other = json!(format!("{text}\n\n{}", other.as_str().unwrap_or_default())),
    }
}

/// Two contents, which are texts or lists of parts, one after the other.
fn joined(first: Value, second: Value) -> Value {
    if let (Some(first), Some(second)) = (first.as_str(), second.as_str()) {
        return json!(format!("{first}\n{second}"));
    }
    let parts = |content: Value| match content {
        Value::Array(parts) => parts,
        text => vec![json!({ "type": "text", "text": text })],
    };
    [parts(first), parts(second)].concat().into()
}

/// A result as content of the user.
fn result(message: &Value) -> Value {
    let text = |field: &str| message[field].as_str().unwrap_or_default();
    let of = match text("name") {
        "" => text("tool_call_id"),
        name => name,
    };
    match &message["content"] {
        Value::Array(parts) => joined(json!(format!("Result of {of}: ")), json!(parts)),
        _ => json!(format!("Result of {of}: {}", text("content"))),
    }
}

/// A message whose calls are text, as the model would write them.
fn with_calls(message: &Value, format: ToolFormat) -> Value {
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
    let content = message["content"].as_str().filter(|text| !text.is_empty());
    let content = content.map(str::to_owned).into_iter().chain(written);
    json!({ "role": "assistant", "content": content.collect::<Vec<_>>().join("\n") })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_goes_before_any_content() {
        let mut text = json!("b");
        put_before(&mut text, "a");
        assert_eq!(text, json!("a\n\nb"));
        let mut parts = json!([{ "type": "text", "text": "b" }]);
        put_before(&mut parts, "a");
        assert_eq!(
            parts,
            json!([{ "type": "text", "text": "a" }, { "type": "text", "text": "b" }])
        );
    }
}
