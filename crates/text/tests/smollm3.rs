//! SmolLM3's way with tools. Its template is in no package that tests could fetch, and llama.cpp's copy of it shows no tools, so this one of
//! our own does what sets that one apart: tools in two variables, each as Python writes a value, answers behind `{% generation %}`, and
//! calls of earlier turns left out.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use plimsoll_text::{
    ChatInput, ChatTemplate, Function, ReasoningFormat, Renderer, SpecialTokens, ToolFormat,
};
use serde_json::{Value, json};

const TEMPLATE: &str = r#"
{%- set mode = "/no_think" if enable_thinking is defined and not enable_thinking else "/think" -%}
{%- if messages[0].role == "system" -%}{%- set system = messages[0].content -%}{%- endif -%}
{{- "<|im_start|>system\n" -}}
{%- if "/bare" in system -%}{{- system.replace("/bare", "").rstrip() -}}
{%- else -%}{{- "Date: " ~ strftime_now("%d %B %Y") ~ "\nMode: " + mode + "\n" ~ (system or "") -}}
{%- endif -%}
{%- if xml_tools or python_tools -%}
{%- set ns = namespace(text="") -%}
{%- if xml_tools -%}
{%- for tool in xml_tools[:] -%}{%- set ns.text = ns.text ~ (tool | string) ~ "\n" -%}{%- endfor -%}
{%- set ns.text = ns.text + "Write <tool_call>\n{\"name\": <function>, \"arguments\": <object>}\n</tool_call>\n" -%}
{%- endif -%}
{%- if python_tools -%}
{%- for tool in python_tools[:] -%}{%- set ns.text = ns.text ~ (tool | string) ~ "\n" -%}{%- endfor -%}
{%- set ns.text = ns.text + "Write <code>..</code>\n" -%}
{%- endif -%}
{{- ns.text -}}
{%- endif -%}
{%- for message in messages -%}
{%- set content = message.content if message.content is string else "" -%}
{%- if message.role == "user" -%}
    {{ "<|im_start|>user\n" + content + "<|im_end|>\n" }}
{%- elif message.role == "assistant" -%}
    {%- generation -%}
    {{ "<|im_start|>assistant\n" + content.lstrip("\n") + "<|im_end|>\n" }}
    {%- endgeneration -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{ "<|im_start|>assistant\n" + ("" if mode == "/think" else "<think>\n\n</think>\n") }}
{%- endif -%}
"#;

fn template() -> ChatTemplate {
    // 2026-02-03 04:05:06 UTC.
    let clock = || SystemTime::UNIX_EPOCH + Duration::from_secs(1_770_091_506);
    ChatTemplate::new(
        TEMPLATE.trim(),
        &SpecialTokens::new(),
        &Renderer::in_process_at(clock),
    )
    .unwrap()
}

fn tool() -> Value {
    let parameters = json!({"type": "object", "properties": {"a": {"enum": ["x", null, 1.5]}}, "additionalProperties": false});
    let function = json!({"name": "f", "description": "it's", "parameters": parameters});
    json!({"type": "function", "function": function})
}

/// The expected texts are what Jinja2 3.1 renders, with the variables set by hand.
#[test]
fn tools_are_shown_in_both_variables() {
    let call =
        json!({"id": "c", "type": "function", "function": {"name": "f", "arguments": "{\"a\": \"x\"}"}});
    let messages = [
        json!({"role": "user", "content": "Hi"}),
        json!({"role": "assistant", "content": null, "tool_calls": [call]}),
    ];
    let template = template();
    let rendered = template.render(&ChatInput {
        messages: &messages,
        tools: Some(&[tool()]),
        add_generation_prompt: true,
        ..ChatInput::default()
    });
    let expected = "<|im_start|>system\nDate: 03 February 2026\nMode: /think\n\
        {'type': 'function', 'function': {'name': 'f', 'description': \"it's\", 'parameters': {'type': 'object', \
        'properties': {'a': {'enum': ['x', None, 1.5]}}, 'additionalProperties': False}}}\n\
        Write <tool_call>\n{\"name\": <function>, \"arguments\": <object>}\n</tool_call>\n\
        <|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<|im_end|>\n<|im_start|>assistant\n";
    assert_eq!(rendered.unwrap(), expected);

    // Those of Python come with `chat_template_kwargs`, and need no others.
    let kwargs = json!({"python_tools": ["def g(): ..."], "enable_thinking": false});
    let rendered = template.render(&ChatInput {
        messages: &[
            json!({"role": "system", "content": "Brief. /bare"}),
            messages[0].clone(),
        ],
        kwargs: kwargs.as_object(),
        add_generation_prompt: true,
        ..ChatInput::default()
    });
    let expected = "<|im_start|>system\nBrief.def g(): ...\nWrite <code>..</code>\n\
        <|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n";
    assert_eq!(rendered.unwrap(), expected);
}

/// A call is one of Hermes' format; Python is text, which nobody here runs.
#[test]
fn its_calls_are_read() {
    let template = template();
    assert!(template.takes_tools() && template.shows_system() && !template.shows_calls());
    let format = ToolFormat::detect(template.tool_source()).unwrap();
    assert_eq!(format, ToolFormat::Hermes);
    assert_eq!(
        ReasoningFormat::detect(template.source()),
        Some(ReasoningFormat::Think)
    );

    let functions: Arc<[Function]> = Arc::new([Function {
        name: "f".to_owned(),
        parameters: tool()["function"]["parameters"].as_object().unwrap().clone(),
        strict: false,
    }]);
    let read = |text: &str| crate::common::read(format, &functions, text);
    let answer = "Well.\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": \"x\"}}\n</tool_call>";
    let (content, calls) = read(answer);
    assert_eq!(content.trim(), "Well.");
    assert_eq!(calls, [("f".to_owned(), json!({"a": "x"}))]);
    let code = "<code>\nprint(f(a=\"x\"))\n</code>";
    assert_eq!(read(code), (code.to_owned(), vec![]));
}
