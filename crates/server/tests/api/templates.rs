//! Real chat templates: the formats that are found in them serve plain answers, calls and reasoning.

use std::fs;
use std::path::Path;

use plimsoll_server::AnswerStyle;
use plimsoll_text::ToolFormat;
use serde_json::{Value, json};

use crate::CHAT;
use crate::rig::{Rig, Setup};
use crate::tools::{ask, prompt, say};

fn rig(name: &str, answers: Option<AnswerStyle>) -> Rig {
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.cache/test-data");
    let template = fs::read_to_string(data.join(format!("{name}.jinja")));
    let template = template
        .unwrap_or_else(|e| panic!("{name}: {e}: run scripts/fetch-test-data first (`make test` does)"));
    Rig::new(Setup {
        template: Some(template.leak()),
        answers,
        max_model_len: 8192,
        ..Default::default()
    })
}

async fn message(rig: &Rig, body: Value) -> Value {
    rig.post(CHAT, body).await.json()["choices"][0]["message"].take()
}

/// Plain text is content, with tools and without, and `call` is a call of `f`. Returns a prompt with tools.
async fn serves(rig: &Rig, call: &str) -> String {
    for body in [say("It rains."), ask("It rains.")] {
        let message = message(rig, body).await;
        assert_eq!(message["content"], "It rains.");
        assert!(message.get("tool_calls").is_none_or(Value::is_null), "{message}");
    }
    let message = message(rig, ask(call)).await;
    assert_eq!(message["content"], Value::Null, "{call}");
    let function = json!({ "name": "f", "arguments": "{\"a\": 1}" });
    assert_eq!(message["tool_calls"][0]["function"], function, "{call}");
    let mut body = ask("x");
    body.as_object_mut()
        .unwrap()
        .retain(|key, _| ["messages", "tools"].contains(&key.as_str()));
    prompt(rig, body).await
}

#[tokio::test]
async fn families_without_tools_answer_as_json() {
    for name in [
        "HuggingFaceTB-SmolLM3-3B",
        "microsoft-Phi-3.5-mini-instruct",
        "google-gemma-2-2b-it",
    ] {
        let rig = rig(&format!("llama.cpp/templates/{name}"), None);
        let text = serves(&rig, "{\"name\": \"f\", \"arguments\": {\"a\": 1}}").await;
        assert!(
            text.contains("You can call these functions") && text.contains("\"description\":\"Does f.\""),
            "{name}: {text}"
        );
    }
}

#[tokio::test]
async fn smollm3_reasons() {
    let rig = rig("llama.cpp/templates/HuggingFaceTB-SmolLM3-3B", None);
    let message = message(&rig, say("<think>\nHm.\n</think>\nIt rains.")).await;
    assert_eq!(
        (&message["reasoning_content"], &message["content"]),
        (&json!("Hm."), &json!("It rains."))
    );
}

/// vLLM's template asks Gemma 3 for Python: a format for which there is a flag.
#[tokio::test]
async fn gemma_3_calls_in_python_by_flag() {
    let name = "vllm-0.33.0/examples/tool_chat_template_gemma3_pythonic";
    let detected = rig(name, None);
    assert_eq!(message(&detected, say("It rains.")).await["content"], "It rains.");
    let error = detected.post(CHAT, ask("x")).await.error(400);
    let text = error["message"].as_str().unwrap();
    assert!(text.contains("--tool-call-parser"), "{text}");

    let by_flag = AnswerStyle {
        tools: Some(ToolFormat::Pythonic),
        reasoning: None,
        auto_tool_choice: true,
    };
    let text = serves(&rig(name, Some(by_flag)), "[f(a=1)]").await;
    assert!(
        text.contains("python list") && text.contains("\"Does f.\""),
        "{text}"
    );
}

#[tokio::test]
async fn phi_4_mini_calls_with_functools() {
    for version in ["0.9.2", "0.33.0"] {
        let rig = rig(
            &format!("vllm-{version}/examples/tool_chat_template_phi4_mini"),
            None,
        );
        let text = serves(&rig, "functools[{\"name\": \"f\", \"arguments\": {\"a\": 1}}]").await;
        assert!(
            text.contains("functools[") && text.contains("\"Does f.\""),
            "{text}"
        );
    }
}

#[tokio::test]
async fn mistral_3_calls_behind_its_mark() {
    let list = "[TOOL_CALLS] [{\"name\": \"f\", \"arguments\": {\"a\": 1}}]";
    let named = "[TOOL_CALLS]f[ARGS]{\"a\": 1}";
    for (name, call) in [
        (
            "llama.cpp/templates/mistralai-Ministral-3-14B-Reasoning-2512",
            named,
        ),
        ("llama.cpp/templates/Mistral-Small-3.2-24B-Instruct-2506", named),
        ("llama.cpp/templates/unsloth-mistral-Devstral-Small-2507", named),
        ("vllm-0.33.0/examples/tool_chat_template_mistral3", list),
    ] {
        let text = serves(&rig(name, None), call).await;
        assert!(
            text.contains("[AVAILABLE_TOOLS]") && text.contains("\"Does f.\""),
            "{text}"
        );
    }
    let rig = rig(
        "llama.cpp/templates/mistralai-Ministral-3-14B-Reasoning-2512",
        None,
    );
    let message = message(&rig, say("[THINK]Hm.[/THINK]It rains.")).await;
    assert_eq!(
        (&message["reasoning_content"], &message["content"]),
        (&json!("Hm."), &json!("It rains."))
    );
}
