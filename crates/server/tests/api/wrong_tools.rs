//! Requests with tools that are refused, by the name of what is wrong.

use serde_json::{Value, json};

use crate::tools::{ask, hermes, rig, say, tool};
use crate::{CHAT, with};

#[tokio::test]
async fn wrong_tools_are_named() {
    let rig = hermes();
    let function = |function: Value| {
        with(
            say("x"),
            "tools",
            json!([{ "type": "function", "function": function }]),
        )
    };
    let choice = |choice: Value| with(ask("x"), "tool_choice", choice);
    let message = |message: Value| json!({ "messages": [{ "role": "user", "content": "x" }, message] });
    let call = |call: Value| message(json!({ "role": "assistant", "tool_calls": [call] }));
    let cases = [
        (function(json!({ "name": "a b" })), "tools[0].function", "a-z"),
        (function(json!({ "name": "" })), "tools[0].function", "1 to 128"),
        (
            function(json!({ "name": "f", "parameters": [] })),
            "tools[0].function.parameters",
            "list, expected an object",
        ),
        (
            function(json!({ "name": "f", "parameters": { "type": "string" } })),
            "tools[0].function",
            "object",
        ),
        (
            function(json!({ "name": "f", "extra": 1 })),
            "tools[0].function.extra",
            "unknown field",
        ),
        (
            with(say("x"), "tools", json!([tool("f"), tool("f")])),
            "tools",
            "two functions called f",
        ),
        (
            with(say("x"), "tools", json!([{ "type": "custom" }])),
            "tools[0].type",
            "only functions",
        ),
        (
            with(say("x"), "tool_choice", json!("required")),
            "tool_choice",
            "needs tools",
        ),
        (choice(json!("sometimes")), "tool_choice", "none, auto, required"),
        (
            choice(json!({ "type": "function", "function": { "name": "h" } })),
            "tool_choice",
            "names h",
        ),
        (
            choice(json!({ "type": "custom" })),
            "tool_choice.type",
            "allowed_tools",
        ),
        (
            choice(
                json!({ "type": "allowed_tools", "allowed_tools": { "mode": "auto", "tools": [
                { "type": "function", "function": { "name": "h" } }] } }),
            ),
            "tool_choice",
            "allows h",
        ),
        (
            with(say("x"), "functions", json!([{ "name": "f" }])),
            "functions",
            "send tools",
        ),
        (
            with(say("x"), "function_call", json!({ "name": "f" })),
            "function_call",
            "send tool_choice",
        ),
        (
            message(json!({ "role": "tool", "content": "7" })),
            "messages[1].tool_call_id",
            "needs the id",
        ),
        (
            message(json!({ "role": "user", "content": "", "tool_calls": [] })),
            "messages[1].tool_calls",
            "belongs to",
        ),
        (
            with(
                say("x"),
                "tools",
                json!([{ "type": "custom", "custom": { "name": "f" } }]),
            ),
            "tools[0].type",
            "tools[0].type = custom",
        ),
        (
            choice(json!({ "type": "custom", "custom": { "name": "f" } })),
            "tool_choice.type",
            "tool_choice.type = custom",
        ),
        (
            with(say("x"), "prompt_cache_options", json!({ "mode": "implicit" })),
            "prompt_cache_options",
            "not supported",
        ),
        (
            with(say("x"), "chat_template_kwargs", json!({ "tools": [] })),
            "chat_template_kwargs.tools",
            "field of this name",
        ),
        (
            call(json!({ "type": "custom" })),
            "messages[1].tool_calls[0].type",
            "only functions",
        ),
        (
            with(
                with(say("x"), "continue_final_message", json!(true)),
                "add_generation_prompt",
                json!(true),
            ),
            "continue_final_message",
            "mutually exclusive",
        ),
        (
            with(say("x"), "documents", json!([{ "text": "x" }])),
            "documents",
            "does not use documents",
        ),
    ];
    for (body, param, message) in cases {
        let error = rig.post(CHAT, body.clone()).await.error(400);
        assert_eq!(error["param"], param, "{body}: {error}");
        assert!(
            error["message"].as_str().unwrap().contains(message),
            "{body}: {error}"
        );
    }
    assert_eq!(rig.state.engine().stats().submitted, 0);
    // The model only sees the allowed tools.
    let allowed = json!({ "type": "allowed_tools", "allowed_tools": { "mode": "auto", "tools": [
        { "type": "function", "function": { "name": "g" } }] } });
    let mut tokens = Vec::new();
    for body in [ask("x"), choice(allowed)] {
        let answer = rig.post(CHAT, body).await.json();
        tokens.push(answer["usage"]["prompt_tokens"].as_u64().unwrap());
    }
    assert_eq!(tokens[0] - tokens[1], "[f]".len() as u64);
}

#[tokio::test]
async fn an_unknown_call_format_is_reported() {
    let rig = rig(None, None);
    let error = rig.post(CHAT, ask("x")).await.error(400);
    assert!(
        error["message"].as_str().unwrap().contains("--tool-call-parser"),
        "{error}"
    );
    assert_eq!(
        rig.post(CHAT, with(ask("x"), "tool_choice", json!("none")))
            .await
            .status,
        200
    );
}
