//! From OpenAI's messages to those that a template reads.

use serde_json::{Map, Value, json};

use super::{ChatInput, ChatTemplate, unless_refused};
use crate::TextError;

/// How a template reads `message.content`. Determined by test renderings, as templates do not declare it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ContentFormat {
    /// Only as a text: parts are joined.
    Text,
    /// Only as a list of parts: a text becomes one part.
    Parts,
    /// As either: content stays as it came.
    Both,
}

impl ContentFormat {
    pub(super) fn detect(template: &ChatTemplate) -> Result<Self, TextError> {
        const PROBE: &str = "plimsoll-probe";
        let parts = json!([{"type": "text", "text": PROBE}]);
        // A template that reads texts alone may fail on a list, ignore it, or print it as Python would.
        let reads = |content: Value| {
            let messages = [json!({"role": "user", "content": content})];
            let input = ChatInput {
                messages: &messages,
                add_generation_prompt: true,
                ..Default::default()
            };
            let text = unless_refused(template.render_as_given(&input))?;
            Ok(text.is_some_and(|text| {
                text.contains(PROBE) && !text.contains("'type'") && !text.contains("\"type\"")
            }))
        };
        Ok(match (reads(PROBE.into())?, reads(parts)?) {
            (true, true) => Self::Both,
            (false, true) => Self::Parts,
            (_, false) => Self::Text,
        })
    }
}

pub(super) fn normalize(messages: &[Value], format: ContentFormat) -> Result<Vec<Value>, TextError> {
    messages
        .iter()
        .enumerate()
        .map(|(index, message)| normalize_one(index, message, format))
        .collect()
}

/// Gives the first message, a system message, the functions as `tools`, in JSON text as `json.dumps` writes it.
pub(super) fn add_tools(
    messages: &mut Vec<Value>,
    tools: &[Value],
    format: ContentFormat,
) -> Result<(), TextError> {
    if messages.first().is_none_or(|first| first["role"] != "system") {
        // What Phi-4-mini's model card says here.
        let system = json!({"role": "system", "content": "You are a helpful assistant with some tools."});
        messages.insert(0, normalize_one(0, &system, format)?);
    }
    let functions = tools.iter().map(|tool| tool["function"].clone()).collect();
    messages[0]["tools"] = super::json::dumps(&functions).into();
    Ok(())
}

/// Stands for the end of the final message's content; no text has it but by malice, which gains nothing.
pub(super) const END: &str = "\u{2}plimsoll-end-of-final-message\u{3}";

/// Appends [`END`] to the content of the final message.
pub(super) fn mark_end(messages: &mut [Value]) {
    let Some(content) = messages.last_mut().and_then(|message| message.get_mut("content")) else {
        return;
    };
    match content {
        Value::String(text) => text.push_str(END),
        Value::Array(parts) => match parts.last_mut().and_then(|part| part.get_mut("text")) {
            Some(Value::String(text)) => text.push_str(END),
            _ => parts.push(json!({"type": "text", "text": END})),
        },
        _ => {}
    }
}

fn normalize_one(index: usize, message: &Value, format: ContentFormat) -> Result<Value, TextError> {
    let wrong = |problem: String| TextError::Render(format!("messages[{index}]: {problem}"));
    let Value::Object(message) = message else {
        return Err(wrong("not an object".to_owned()));
    };
    let mut message = message.clone();
    let content = content(message.get("content").unwrap_or(&Value::Null), format).map_err(wrong)?;
    message.insert("content".to_owned(), content);
    if let Some(calls) = message.get_mut("tool_calls").and_then(Value::as_array_mut) {
        for call in calls {
            if let Some(function) = call.get_mut("function").and_then(Value::as_object_mut) {
                parse_arguments(function).map_err(wrong)?;
            }
        }
    }
    Ok(Value::Object(message))
}

fn content(content: &Value, format: ContentFormat) -> Result<Value, String> {
    match content {
        // An assistant's message that only calls tools.
        Value::Null => Ok(if format == ContentFormat::Parts {
            json!([])
        } else {
            "".into()
        }),
        Value::String(text) if format == ContentFormat::Parts => Ok(json!([{"type": "text", "text": text}])),
        Value::String(_) => Ok(content.clone()),
        Value::Array(parts) => {
            if format == ContentFormat::Text {
                let texts = parts.iter().map(part_text).collect::<Result<Vec<_>, _>>()?;
                return Ok(texts.join("\n").into());
            }
            let part = |part: &Value| match part["type"] == "image" {
                true => Ok(json!({"type": "image"})),
                false => part_text(part).map(|text| json!({"type": "text", "text": text})),
            };
            parts.iter().map(part).collect()
        }
        _ => Err("content must be a string or a list of parts".to_owned()),
    }
}

fn part_text(part: &Value) -> Result<&str, String> {
    match (part, part["type"].as_str()) {
        (Value::String(text), _) => Ok(text),
        (_, Some("text")) => part["text"]
            .as_str()
            .ok_or_else(|| "a part of type \"text\" has no text".to_owned()),
        (_, Some("image")) => {
            Err("this chat template takes no images: it reads content only as text".to_owned())
        }
        (_, Some(kind)) => Err(format!(
            "content of type {kind:?} is not supported; supported is \"text\""
        )),
        (_, None) => Err("a part of the content has no type".to_owned()),
    }
}

/// Arguments travel as JSON in a string, but templates read them as an object.
fn parse_arguments(function: &mut Map<String, Value>) -> Result<(), String> {
    let Some(Value::String(text)) = function.get("arguments") else {
        return Ok(());
    };
    let arguments = match text.trim() {
        "" => Ok(json!({})),
        text => serde_json::from_str::<Map<String, Value>>(text).map(Value::Object),
    };
    let arguments =
        arguments.map_err(|e| format!("the arguments of a tool call are not a JSON object: {e}"))?;
    function.insert("arguments".to_owned(), arguments);
    Ok(())
}
