//! Prompts.

use std::fs;
use std::path::Path;
use std::time::{Duration, SystemTime};

use plimsoll_text::{ChatInput, ChatTemplate, Position, ReasoningFormat, Renderer, ToolFormat};
use serde_json::{Value, json};

use crate::{common, recorded};

/// The 3rd of February 2026.
fn clock() -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_secs(1_770_091_506)
}

/// A model's directory, whose config.json alone says that it is gpt-oss.
fn template() -> ChatTemplate {
    let directory = tempfile::tempdir().unwrap();
    fs::write(
        directory.path().join("config.json"),
        "{\"model_type\": \"gpt_oss\"}",
    )
    .unwrap();
    read_template(directory.path()).unwrap()
}

fn read_template(directory: &Path) -> Option<ChatTemplate> {
    ChatTemplate::from_dir(directory, &Renderer::in_process_at(clock)).unwrap()
}

pub(crate) fn render(messages: &Value, more: ChatInput<'_>) -> String {
    let input = ChatInput {
        messages: messages.as_array().unwrap(),
        ..more
    };
    template().render(&input).unwrap()
}

#[test]
fn prompts_are_those_of_openai() {
    let template = template();
    for conversation in recorded("conversations") {
        let name = &conversation["name"];
        let input = ChatInput {
            messages: conversation["messages"].as_array().unwrap(),
            tools: conversation["tools"].as_array().map(Vec::as_slice),
            kwargs: conversation["kwargs"].as_object(),
            add_generation_prompt: true,
            ..ChatInput::default()
        };
        let text = template
            .render(&input)
            .unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(text, conversation["text"].as_str().unwrap(), "{name}");
    }
}

#[test]
fn the_models_own_template_is_recognised() {
    let source = common::cached(
        "test-data/llama.cpp/templates/openai-gpt-oss-120b.jinja",
        "scripts/fetch-test-data",
    );
    let directory = tempfile::tempdir().unwrap();
    fs::copy(source, directory.path().join("chat_template.jinja")).unwrap();
    let template = read_template(directory.path()).unwrap();
    assert_eq!(ToolFormat::detect(template.source()), Some(ToolFormat::Harmony));
    assert_eq!(
        ReasoningFormat::detect(template.source()),
        Some(ReasoningFormat::Harmony)
    );
    assert!(template.takes_tools() && template.shows_calls() && template.mentions("reasoning_effort"));
    assert!(!template.mentions("documents") && !template.mentions("enable_thinking"));
    // The file itself refuses this: reasoning, text and two calls in one answer.
    let call =
        |id: &str| json!({"id": id, "type": "function", "function": {"name": "f", "arguments": "{\"a\":1}"}});
    let messages = [
        json!({"role": "user", "content": "x"}),
        json!({"role": "assistant", "content": "I ask.", "reasoning_content": "Hm.", "tool_calls": [call("1"), call("2")]}),
    ];
    let input = ChatInput {
        messages: &messages,
        ..ChatInput::default()
    };
    let text = template.render(&input).unwrap();
    let call = "<|start|>assistant to=functions.f<|channel|>commentary <|constrain|>json<|message|>{\"a\":1}<|call|>";
    let answer = format!(
        "<|start|>assistant<|channel|>analysis<|message|>Hm.<|end|>\
         <|start|>assistant<|channel|>commentary<|message|>I ask.<|end|>{call}{call}"
    );
    assert!(text.ends_with(&answer), "{text}");

    fs::write(
        directory.path().join("config.json"),
        "{\"model_type\": \"llama\"}",
    )
    .unwrap();
    fs::remove_file(directory.path().join("chat_template.jinja")).unwrap();
    assert!(read_template(directory.path()).is_none());
}

#[test]
fn what_is_unfinished_goes_on() {
    let messages = json!([
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "Half", "reasoning_content": "Hm."},
    ]);
    let continued = ChatInput {
        continue_final_message: true,
        add_generation_prompt: true,
        ..ChatInput::default()
    };
    let text = render(&messages, continued);
    let last = "<|start|>assistant<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Half";
    assert!(text.ends_with(last), "{text}");
    assert_eq!(ReasoningFormat::Harmony.position_after(&text), Position::Answer);
    let ended = render(&messages, ChatInput::default());
    assert!(ended.ends_with("Half<|end|>"), "{ended}");
    // It is over: the model need not think of its reasoning again.
    let next = ChatInput {
        add_generation_prompt: true,
        ..ChatInput::default()
    };
    assert!(!render(&messages, next).contains("Hm."));
}

#[test]
fn what_cannot_be_shown_is_refused() {
    let user = json!([{"role": "user", "content": "x"}]);
    let lost = json!([{"role": "tool", "content": "x", "tool_call_id": "call_9"}]);
    for (messages, kwargs, problem) in [
        (
            &user,
            json!({"reasoning_effort": "minimal"}),
            "reasoning_effort must be one of low, medium, high",
        ),
        (&user, json!({"reasoning_effort": 3}), "reasoning_effort"),
        (&user, json!({"model_identity": 3}), "model_identity"),
        (&user, json!({"builtin_tools": ["browser"]}), "builtin_tools"),
        (&lost, json!({}), "call_9"),
        (&json!([{"role": "critic", "content": "x"}]), json!({}), "critic"),
    ] {
        let input = ChatInput {
            messages: messages.as_array().unwrap(),
            kwargs: kwargs.as_object(),
            ..ChatInput::default()
        };
        let error = template().render(&input).unwrap_err().to_string();
        assert!(error.contains(problem), "{error}");
    }
}
