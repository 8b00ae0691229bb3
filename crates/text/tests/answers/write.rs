//! Writes calls in every format.

use plimsoll_text::ToolFormat;
use serde_json::{Value, json};

use crate::Call;

/// Calls as models of the family write them, in one of two styles.
pub(crate) fn write_calls(format: ToolFormat, calls: &[Call], style: bool) -> String {
    let object = |arguments: &str, (name, value): &Call| {
        format!("{{\"name\": {}, \"{arguments}\": {}}}", json!(name), json!(value))
    };
    let each = |one: &dyn Fn(&Call) -> String, separator: &str| {
        calls.iter().map(one).collect::<Vec<_>>().join(separator)
    };
    match (format, style) {
        (ToolFormat::Hermes, _) => each(
            &|call| format!("<tool_call>\n{}\n</tool_call>", object("arguments", call)),
            if style { "\n" } else { "" },
        ),
        (ToolFormat::QwenCoder, _) => each(&write_xml, "\n"),
        (ToolFormat::LlamaJson, true) => {
            format!("<|python_tag|>{}", each(&|call| object("parameters", call), "; "))
        }
        (ToolFormat::LlamaJson, false) => each(&|call| object("parameters", call), ";"),
        (ToolFormat::Pythonic, _) => {
            let list = format!("[{}]", each(&write_python, ", "));
            if style {
                format!("<|python_start|>{list}<|python_end|>")
            } else {
                list
            }
        }
        (ToolFormat::Mistral, true) => each(
            &|(name, value)| format!("[TOOL_CALLS]{name}[ARGS]{}", json!(value)),
            "",
        ),
        (ToolFormat::Mistral, false) => {
            format!("[TOOL_CALLS] [{}]", each(&|call| object("arguments", call), ", "))
        }
        (ToolFormat::Phi4Mini, _) => {
            let list = format!("[{}]", each(&|call| object("arguments", call), ", "));
            match style {
                true => format!("<|tool_call|>{list}<|/tool_call|>"),
                false => format!("functools{list}"),
            }
        }
        (ToolFormat::Gemma4, true) => each(
            &|(name, value)| {
                format!(
                    "<|tool_call>call:{name}{}<tool_call|>",
                    write_gemma4(&json!(value))
                )
            },
            "\n",
        ),
        (ToolFormat::Gemma4, false) => each(&|(name, value)| format.call(name, &json!(value)), ""),
        (ToolFormat::Harmony, true) => each(&|call| write_harmony(call, style), "<|start|>assistant"),
        (ToolFormat::Harmony, false) => each(&|call| write_harmony(call, style), ""),
        (ToolFormat::Json, true) => format!("[{}]", each(&|call| object("arguments", call), ", ")),
        (ToolFormat::Json, false) => each(&|call| object("arguments", call), "\n"),
    }
}

/// As the chat template writes values.
fn write_gemma4(value: &Value) -> String {
    match value {
        Value::String(text) => format!("<|\"|>{text}<|\"|>"),
        Value::Array(items) => {
            let items: Vec<_> = items.iter().map(write_gemma4).collect();
            format!("[{}]", items.join(","))
        }
        Value::Object(fields) => {
            let fields: Vec<_> = fields
                .iter()
                .map(|(key, value)| format!("{key}:{}", write_gemma4(value)))
                .collect();
            format!("{{{}}}", fields.join(","))
        }
        other => other.to_string(),
    }
}

fn write_xml((name, arguments): &Call) -> String {
    let value = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    let parameters: String = arguments
        .iter()
        .map(|(key, v)| format!("<parameter={key}>\n{}\n</parameter>\n", value(v)))
        .collect();
    format!("<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>")
}

fn write_harmony((name, arguments): &Call, style: bool) -> String {
    let header = match style {
        true => format!("<|channel|>commentary to=functions.{name} <|constrain|>json"),
        false => format!("<|start|>assistant to=functions.{name}<|channel|>commentary json"),
    };
    format!("{header}<|message|>{}<|call|>", json!(arguments))
}

fn write_python((name, arguments): &Call) -> String {
    let arguments: Vec<_> = arguments
        .iter()
        .map(|(key, value)| format!("{key}={}", python(value)))
        .collect();
    format!("{name}({})", arguments.join(", "))
}

fn python(value: &Value) -> String {
    let list = |items: Vec<String>| items.join(", ");
    match value {
        Value::Null => "None".to_owned(),
        Value::Bool(true) => "True".to_owned(),
        Value::Bool(false) => "False".to_owned(),
        Value::Number(_) | Value::String(_) => value.to_string(),
        Value::Array(items) => format!("[{}]", list(items.iter().map(python).collect())),
        Value::Object(fields) => {
            let fields = fields
                .iter()
                .map(|(key, value)| format!("{}: {}", json!(key), python(value)));
            format!("{{{}}}", list(fields.collect()))
        }
    }
}
