//! Tools and reasoning, end to end: the simulated model answers with the text that a test sets.

use plimsoll_server::AnswerStyle;
use plimsoll_text::{ReasoningFormat, ToolFormat};
use serde_json::{Value, json};

use crate::rig::{Rig, Setup};
use crate::{CHAT, chat, with};

/// A template that renders tools.
const TEMPLATE: &str = "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}\
    {% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}\
    ({{ c.function.name }}{{ c.function.arguments|tojson }}){% endfor %}{{ m.name }}</>{% endfor %}\
    {% if add_generation_prompt %}<assistant>{% if think %}<think>{% endif %}{% endif %}";

pub(crate) fn rig(tools: Option<ToolFormat>, reasoning: Option<ReasoningFormat>) -> Rig {
    Rig::new(Setup {
        template: Some(TEMPLATE),
        answers: Some(AnswerStyle {
            tools,
            reasoning,
            auto_tool_choice: true,
        }),
        ..Default::default()
    })
}

pub(crate) fn hermes() -> Rig {
    rig(Some(ToolFormat::Hermes), Some(ReasoningFormat::Think))
}

pub(crate) fn tool(name: &str) -> Value {
    let parameters = json!({ "type": "object", "properties": { "a": { "type": "integer" } } });
    json!({ "type": "function", "function": { "name": name, "description": "Does f.", "parameters": parameters } })
}

/// Makes the model answer `text` and stop.
pub(crate) fn say(text: &str) -> Value {
    let mut body = chat(&format!("<say>{text}</say>"));
    body["ignore_eos"] = json!(false);
    body["max_tokens"] = json!(400);
    body
}

pub(crate) fn ask(text: &str) -> Value {
    with(say(text), "tools", json!([tool("f"), tool("g")]))
}

const CALLS: &str = "Let me see.\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": 1}}\n</tool_call>\n\
                     <tool_call>\n{\"name\": \"g\", \"arguments\": {}}\n</tool_call>";

#[tokio::test]
async fn calls_have_openais_format() {
    let rig = hermes();
    let answer = rig.post(CHAT, ask(CALLS)).await.json();
    let choice = &answer["choices"][0];
    assert_eq!(choice["finish_reason"], "tool_calls");
    let message = &choice["message"];
    assert_eq!(message["content"], "Let me see.");
    let calls = message["tool_calls"].as_array().unwrap();
    assert_eq!(calls.len(), 2);
    assert_ne!(calls[0]["id"], calls[1]["id"]);
    assert!(calls[0]["id"].as_str().unwrap().starts_with("call_"));
    assert_eq!(calls[0]["type"], "function");
    assert_eq!(
        calls[0]["function"],
        json!({ "name": "f", "arguments": "{\"a\": 1}" })
    );
    assert_eq!(calls[1]["function"], json!({ "name": "g", "arguments": "{}" }));
    // No text: no content.
    let answer = rig
        .post(CHAT, ask(CALLS.trim_start_matches("Let me see.\n")))
        .await
        .json();
    assert_eq!(answer["choices"][0]["message"]["content"], Value::Null);
}

/// Id, type and name once, in the first delta of a call; then only arguments.
#[tokio::test]
async fn streamed_calls_have_openais_format() {
    let rig = hermes();
    let events = rig
        .post(CHAT, with(ask(CALLS), "stream", json!(true)))
        .await
        .events();
    let mut deltas: Vec<Value> = events
        .iter()
        .map(|event| event["choices"][0]["delta"].clone())
        .collect();
    assert_eq!(deltas.remove(0), json!({ "role": "assistant", "content": "" }));
    assert_eq!(deltas.pop(), Some(json!({})));
    assert_eq!(
        events.last().unwrap()["choices"][0]["finish_reason"],
        "tool_calls"
    );
    let mut content = String::new();
    let mut calls: Vec<(String, String)> = Vec::new();
    for delta in deltas {
        if let Some(text) = delta["content"].as_str() {
            assert!(
                calls.is_empty() && delta.as_object().unwrap().len() == 1,
                "{delta}"
            );
            content += text;
            continue;
        }
        assert_eq!(delta.as_object().unwrap().len(), 1, "{delta}");
        let [call] = delta["tool_calls"].as_array().unwrap().as_slice() else {
            panic!("one call at a time: {delta}");
        };
        let keys: Vec<_> = call.as_object().unwrap().keys().map(String::as_str).collect();
        let function = call["function"].as_object().unwrap();
        if call["index"] == calls.len() {
            assert_eq!(keys, ["index", "id", "type", "function"]);
            assert_eq!(
                (&call["type"], &function["arguments"]),
                (&json!("function"), &json!(""))
            );
            calls.push((function["name"].as_str().unwrap().to_owned(), String::new()));
        } else {
            assert_eq!(keys, ["index", "function"]);
            assert_eq!(call["index"], calls.len() - 1);
            assert_eq!(function.keys().collect::<Vec<_>>(), ["arguments"]);
            let fragment = function["arguments"].as_str().unwrap();
            assert!(!fragment.is_empty());
            calls.last_mut().unwrap().1 += fragment;
        }
    }
    assert_eq!(content, "Let me see.");
    assert_eq!(
        calls,
        [("f".into(), "{\"a\": 1}".into()), ("g".into(), "{}".to_owned())]
    );
}

#[tokio::test]
async fn every_format_is_parsed() {
    let cases = [
        (
            ToolFormat::LlamaJson,
            "{\"name\": \"f\", \"parameters\": {\"a\": 1}}",
        ),
        (ToolFormat::Pythonic, "[f(a=1)]"),
        (
            ToolFormat::Mistral,
            "[TOOL_CALLS] [{\"name\": \"f\", \"arguments\": {\"a\": 1}}]",
        ),
        (ToolFormat::Mistral, "[TOOL_CALLS]f[ARGS]{\"a\": 1}"),
        (ToolFormat::Json, "{\"name\": \"f\", \"arguments\": {\"a\": 1}}"),
        (
            ToolFormat::QwenCoder,
            "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
        ),
    ];
    for (format, text) in cases {
        let rig = rig(Some(format), None);
        let message = rig.post(CHAT, ask(text)).await.json()["choices"][0]["message"].take();
        assert_eq!(message["content"], Value::Null, "{format:?}");
        let call = &message["tool_calls"][0];
        assert_eq!(
            call["function"],
            json!({ "name": "f", "arguments": "{\"a\": 1}" }),
            "{format:?}"
        );
        let id = call["id"].as_str().unwrap();
        assert_eq!(id.len() == 9, format == ToolFormat::Mistral, "{id}");
    }
}

#[tokio::test]
async fn invalid_calls_stay_text() {
    let rig = hermes();
    let broken = "<tool_call>{\"nome\": 1}</tool_call>";
    for body in [
        ask(broken),
        say(CALLS),
        with(ask(CALLS), "tool_choice", json!("none")),
    ] {
        let text = if body["tools"].is_null() || body["tool_choice"] == "none" {
            CALLS
        } else {
            broken
        };
        let choice = rig.post(CHAT, body.clone()).await.json()["choices"][0].take();
        assert_eq!(
            (&choice["message"]["content"], &choice["finish_reason"]),
            (&json!(text), &json!("stop"))
        );
        assert!(choice["message"].get("tool_calls").is_none());
    }
    // Truncated arguments are returned as they are.
    let cut = with(ask(CALLS), "max_tokens", json!(CALLS.find(" 1}").unwrap()));
    let choice = rig.post(CHAT, cut).await.json()["choices"][0].take();
    assert_eq!(choice["finish_reason"], "length");
    assert_eq!(
        choice["message"]["tool_calls"][0]["function"]["arguments"],
        "{\"a\":"
    );
}

#[tokio::test]
async fn parallel_calls_can_be_disabled() {
    let rig = hermes();
    let body = with(ask(CALLS), "parallel_tool_calls", json!(false));
    let whole = rig.post(CHAT, with(body.clone(), "n", json!(2))).await.json();
    for choice in whole["choices"].as_array().unwrap() {
        assert_eq!(choice["message"]["tool_calls"].as_array().unwrap().len(), 1);
        assert_eq!(choice["finish_reason"], "tool_calls");
    }
    let events = rig.post(CHAT, with(body, "stream", json!(true))).await.events();
    assert_eq!(
        events.last().unwrap()["choices"][0]["finish_reason"],
        "tool_calls"
    );
    rig.until_in_flight(0).await;
}

#[tokio::test]
async fn conversations_with_tools_reach_the_template() {
    let rig = hermes();
    let call =
        json!({ "id": "c1", "type": "function", "function": { "name": "f", "arguments": "{\"a\":1}" } });
    let body = json!({
        "messages": [
            { "role": "user", "content": "x" },
            { "role": "assistant", "content": null, "tool_calls": [call] },
            { "role": "tool", "tool_call_id": "c1", "content": "7" },
        ],
        "tools": [tool("f")],
    });
    let tokens = rig.post("/tokenize", body.clone()).await.json()["tokens"].clone();
    let text = rig.post("/detokenize", json!({ "tokens": tokens })).await.json()["prompt"].clone();
    assert_eq!(
        text,
        "[f]<user>x</><assistant>(f{\"a\": 1})</><tool>7f</><assistant>"
    );
    let usage = rig.post(CHAT, with(body, "max_tokens", json!(1))).await.json()["usage"].clone();
    assert_eq!(usage["prompt_tokens"], text.as_str().unwrap().len());
    let mut body = chat("x");
    let begun = json!({ "role": "assistant", "content": "<b" });
    body["messages"].as_array_mut().unwrap().push(begun);
    body["continue_final_message"] = json!(true);
    let tokens = rig.post(
        "/tokenize",
        json!({ "messages": body["messages"], "continue_final_message": true }),
    );
    let text = rig
        .post("/detokenize", json!({ "tokens": tokens.await.json()["tokens"] }))
        .await;
    assert_eq!(text.json()["prompt"], "<user>x</><assistant><b");
    assert_eq!(rig.post(CHAT, body).await.status, 200);
}

/// The prompt of a conversation with tools, two calls and their results.
async fn prompt_of_calls(rig: &Rig) -> String {
    let call = |id: &str| json!({ "id": id, "type": "function", "function": { "name": "f", "arguments": "{\"a\":1}" } });
    let body = json!({
        "messages": [
            { "role": "system", "content": "Be brief." },
            { "role": "user", "content": "x" },
            { "role": "assistant", "tool_calls": [call("c1"), call("c2")] },
            { "role": "tool", "tool_call_id": "c1", "content": "7" },
            { "role": "tool", "tool_call_id": "c2", "content": "8" },
        ],
        "tools": [tool("f")],
    });
    prompt(rig, body).await
}

pub(crate) async fn prompt(rig: &Rig, body: Value) -> String {
    let tokens = rig.post("/tokenize", body).await.json()["tokens"].clone();
    let text = rig.post("/detokenize", json!({ "tokens": tokens })).await.json();
    text["prompt"].as_str().unwrap().to_owned()
}

#[tokio::test]
async fn calls_that_a_template_does_not_show_are_text() {
    // As Phi-4-mini's, and as SmolLM3's.
    let system = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if 'tools' in m %}<|tool|>{{ m.tools }}<|/tool|>{% endif %}</>{% endfor %}";
    let variable = "{{ xml_tools or '' }}<tool_call>\n{arguments}{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}";
    let call = "{\"name\": \"f\", \"arguments\": {\"a\":1}}";
    let cases = [
        (
            system,
            "<system>Be brief.<|tool|>[{\"name\": \"f\", ",
            format!("<|tool_call|>[{call}]<|/tool_call|>"),
        ),
        (
            variable,
            "[{'type': 'function', 'function': {'name': 'f', ",
            format!("<tool_call>\n{call}\n</tool_call>"),
        ),
    ];
    for (template, tools, call) in cases {
        let rig = Rig::new(Setup {
            template: Some(template),
            ..Default::default()
        });
        let text = prompt_of_calls(&rig).await;
        assert!(text.starts_with(tools), "{text}");
        let turns = format!("<user>x</><assistant>{call}\n{call}</><tool>7</><tool>8</>");
        assert!(text.ends_with(&turns), "{text}");
        let answer = rig.post(CHAT, ask(&call)).await.json();
        let called = &answer["choices"][0]["message"]["tool_calls"][0]["function"];
        assert_eq!(called["arguments"], "{\"a\":1}", "{answer}");
    }
}

#[tokio::test]
async fn templates_without_tools_get_them_as_text() {
    let rig = Rig::new(Setup::default());
    let text = prompt_of_calls(&rig).await;
    assert!(
        text.starts_with("<system>Be brief.\n\nYou can call these functions"),
        "{text}"
    );
    assert!(text.contains("\"description\":\"Does f.\""), "{text}");
    let call = "{\"name\": \"f\", \"arguments\": {\"a\":1}}";
    let turns = format!("<assistant>{call}\n{call}</><user>Result of f: 7\nResult of f: 8</><assistant>");
    assert!(text.ends_with(&turns), "{text}");
    let answer = rig
        .post(CHAT, ask("{\"name\": \"g\", \"arguments\": {}}"))
        .await
        .json();
    assert_eq!(
        answer["choices"][0]["message"]["tool_calls"][0]["function"]["name"],
        "g"
    );
}

/// As Gemma 2's.
#[tokio::test]
async fn templates_that_refuse_system_messages_get_tools_in_the_first_of_the_user() {
    let template = "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no') }}{% endif %}<{{ m.role }}>{{ m.content }}</>{% endfor %}";
    let rig = Rig::new(Setup {
        template: Some(template),
        ..Default::default()
    });
    let message = json!({ "role": "user", "content": "Now?" });
    let text = prompt(&rig, json!({ "messages": [message], "tools": [tool("f")] })).await;
    assert!(text.starts_with("<user>You can call these functions"));
}

#[tokio::test]
async fn reasoning_is_separated() {
    let rig = hermes();
    let text = "<think>\nTwo and two.\n</think>\n\nFour.";
    let answer = rig.post(CHAT, say(text)).await.json();
    let message = &answer["choices"][0]["message"];
    assert_eq!(
        (
            &message["reasoning_content"],
            &message["reasoning"],
            &message["content"]
        ),
        (&json!("Two and two."), &json!("Two and two."), &json!("Four."))
    );
    let reasoning_tokens = text.find("\n\nFour").unwrap();
    let usage = &answer["usage"];
    assert_eq!(
        usage["completion_tokens_details"]["reasoning_tokens"],
        reasoning_tokens - "<think>".len() + 1
    );
    assert_eq!(usage["completion_tokens"], text.len() + 1);
    let events = rig
        .post(CHAT, with(say(text), "stream", json!(true)))
        .await
        .events();
    let told = |name: &str| -> String {
        let deltas = events.iter().map(|event| &event["choices"][0]["delta"]);
        deltas.filter_map(|delta| delta[name].as_str()).collect()
    };
    assert_eq!(
        (told("reasoning_content").as_str(), told("content").as_str()),
        ("Two and two.", "Four.")
    );
    // The template begins it; the client excludes it.
    let mut body = with(
        say("Two.</think>Four."),
        "chat_template_kwargs",
        json!({ "think": true }),
    );
    assert_eq!(
        rig.post(CHAT, body.clone()).await.json()["choices"][0]["message"]["reasoning"],
        "Two."
    );
    body["include_reasoning"] = json!(false);
    let message = rig.post(CHAT, body).await.json()["choices"][0]["message"].take();
    assert_eq!(
        (&message["content"], message.get("reasoning")),
        (&json!("Four."), None)
    );
}

#[tokio::test]
async fn all_tokens_have_logprobs() {
    let rig = hermes();
    let text = format!("<think>Hm.</think>{CALLS}");
    let body = with(
        with(ask(&text), "logprobs", json!(true)),
        "top_logprobs",
        json!(1),
    );
    let said = |content: &Value| -> String {
        let tokens = content.as_array().unwrap().iter();
        tokens.map(|token| token["token"].as_str().unwrap()).collect()
    };
    let whole = rig.post(CHAT, body.clone()).await.json();
    assert_eq!(said(&whole["choices"][0]["logprobs"]["content"]), text);
    let events = rig.post(CHAT, with(body, "stream", json!(true))).await.events();
    let choices = events
        .iter()
        .map(|event| &event["choices"][0]["logprobs"]["content"]);
    assert_eq!(
        choices
            .filter(|content| !content.is_null())
            .map(said)
            .collect::<String>(),
        text
    );
}

/// However many tokens come at once: those of a call that has the same text are not the text's.
#[tokio::test]
async fn texts_of_responses_have_their_own_logprobs() {
    let rig = hermes();
    let call = "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": \"See.\"}}\n</tool_call>";
    let tool = json!({ "type": "function", "name": "f", "parameters": { "type": "object" } });
    let body = json!({
        "input": format!("<say><think>See.</think>\n\nSee.\n{call}</say>"),
        "tools": [tool],
        "include": ["message.output_text.logprobs"],
        "max_output_tokens": 400,
    });
    let output = rig.post("/v1/responses", body).await.json()["output"].take();
    let [_, message, called] = output.as_array().unwrap().as_slice() else {
        panic!("reasoning, text and a call: {output}");
    };
    assert_eq!(called["name"], "f");
    let part = &message["content"][0];
    let tokens = part["logprobs"].as_array().unwrap().iter();
    let said: String = tokens.map(|token| token["token"].as_str().unwrap()).collect();
    assert_eq!((part["text"].as_str().unwrap(), said.as_str()), ("See.", "See."));
}

#[tokio::test]
async fn stop_strings_end_calls_too() {
    let rig = hermes();
    let choice = rig
        .post(CHAT, with(ask(CALLS), "stop", json!("</tool_call>")))
        .await
        .json()["choices"][0]
        .take();
    assert_eq!(choice["message"]["tool_calls"].as_array().unwrap().len(), 1);
    assert_eq!(choice["finish_reason"], "tool_calls");
}
