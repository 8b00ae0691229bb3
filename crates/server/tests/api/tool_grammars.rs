//! Tool calls enforced by grammars.

use plimsoll_text::{ReasoningFormat, ToolFormat};
use serde_json::{Value, json};

use crate::tools::{ask, hermes, rig, say};
use crate::{CHAT, with};

fn strict_tool(name: &str) -> Value {
    let parameters = json!({
        "type": "object", "properties": { "a": { "type": "integer" } }, "required": ["a"], "additionalProperties": false,
    });
    json!({ "type": "function", "function": { "name": name, "parameters": parameters, "strict": true } })
}

#[tokio::test]
async fn required_calls_are_made() {
    // What else an answer may have, the simulated model would not end.
    for (_, format) in ToolFormat::NAMES
        .iter()
        .filter(|(_, format)| !format.holds_reasoning())
    {
        let rig = rig(Some(*format), Some(ReasoningFormat::Think));
        let named = json!({ "type": "function", "function": { "name": "g" } });
        for choice in [json!("required"), named] {
            let mut body = with(
                say("<think>Hm.</think>I would rather not."),
                "tool_choice",
                choice.clone(),
            );
            body["tools"] = json!([strict_tool("f"), strict_tool("g")]);
            body["parallel_tool_calls"] = json!(false);
            let answer = rig.post(CHAT, body).await.json();
            let answer = &answer["choices"][0];
            let context = format!("{format:?} {choice}: {answer}");
            assert_eq!(answer["finish_reason"], "tool_calls", "{context}");
            let calls = answer["message"]["tool_calls"].as_array().unwrap();
            assert_eq!(
                (calls.len(), &answer["message"]["content"]),
                (1, &Value::Null),
                "{context}"
            );
            let name = calls[0]["function"]["name"].as_str().unwrap();
            assert!(name == "g" || name == "f" && choice == "required", "{context}");
            let arguments: Value =
                serde_json::from_str(calls[0]["function"]["arguments"].as_str().unwrap()).unwrap();
            assert!(
                arguments["a"].is_number() && arguments.as_object().unwrap().len() == 1,
                "{context}"
            );
        }
    }
}

#[tokio::test]
async fn strict_arguments_follow_their_schema() {
    let rig = hermes();
    let wrong = "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": \"x\"}}\n</tool_call>";
    let free = rig.post(CHAT, ask(wrong)).await.json()["choices"][0].take();
    assert_eq!(
        free["message"]["tool_calls"][0]["function"]["arguments"],
        "{\"a\": \"x\"}"
    );
    let held = rig
        .post(CHAT, with(say(wrong), "tools", json!([strict_tool("f")])))
        .await
        .json();
    let arguments = &held["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"];
    let arguments: Value = serde_json::from_str(arguments.as_str().unwrap()).unwrap();
    assert!(arguments["a"].is_number(), "{held}");
    // Plain text is not constrained.
    let text = rig
        .post(CHAT, with(say("No."), "tools", json!([strict_tool("f")])))
        .await
        .json();
    assert_eq!(text["choices"][0]["message"]["content"], "No.");
}

#[tokio::test]
async fn reasoning_before_a_grammar_is_allowed() {
    let rig = hermes();
    let format =
        json!({ "type": "json_schema", "json_schema": { "name": "n", "schema": { "type": "boolean" } } });
    for (field, value, right) in [
        ("response_format", format, "true"),
        ("guided_regex", json!("[0-9]+"), "42"),
        ("guided_choice", json!(["<b>", "<i>"]), "<i>"),
    ] {
        for thought in ["", "<think>Two and\n<b>two</b>.</think>"] {
            let body = with(say(&format!("{thought}{right}")), field, value.clone());
            let message = rig.post(CHAT, body).await.json()["choices"][0]["message"].take();
            let reasoning = (!thought.is_empty()).then_some("Two and\n<b>two</b>.");
            assert_eq!(
                (message["content"].as_str(), message["reasoning"].as_str()),
                (Some(right), reasoning),
                "{field}"
            );
        }
    }
}

#[tokio::test]
async fn calls_within_reasoning_are_not_constrained() {
    let rig = hermes();
    let call = "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": \"x\"}}\n</tool_call>";
    let thought = "I could write <tool_call> and mean nothing.";
    for think in [false, true] {
        let open = if think { "" } else { "<think>" };
        let ask = |answer: &str| {
            let body = with(
                say(&format!("{open}{thought}</think>{answer}")),
                "tools",
                json!([strict_tool("f")]),
            );
            with(body, "chat_template_kwargs", json!({ "think": think }))
        };
        let free = rig.post(CHAT, ask("No.")).await.json();
        let message = &free["choices"][0]["message"];
        assert_eq!(
            (message["reasoning"].as_str(), message["content"].as_str()),
            (Some(thought), Some("No.")),
            "{free}"
        );
        // The schema applies after it.
        let held = rig.post(CHAT, ask(call)).await.json();
        let arguments = &held["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"];
        let arguments: Value = serde_json::from_str(arguments.as_str().unwrap()).unwrap();
        assert!(arguments["a"].is_number(), "{held}");
    }
}

/// A schema that the model's call format cannot express is a client error.
#[tokio::test]
async fn unenforceable_schemas_are_refused_by_name() {
    let rig = rig(Some(ToolFormat::QwenCoder), None);
    let mut tool = strict_tool("f");
    tool["function"]["parameters"]["properties"]["a"] = json!({ "type": "string", "format": "date" });
    let error = rig
        .post(CHAT, with(say("x"), "tools", json!([tool])))
        .await
        .error(400);
    assert_eq!(error["param"], "tools");
    assert!(
        error["message"].as_str().unwrap().contains("`format` of a"),
        "{error}"
    );
}

/// Of several schemas in a grammar, the one that is wrong is named, and nothing of the grammar is shown.
#[tokio::test]
async fn a_schema_that_cannot_be_compiled_is_named() {
    let rig = hermes();
    let odd = |schema: Value, strict: bool| {
        let mut tool = strict_tool("odd");
        tool["function"]["parameters"]["properties"]["a"] = schema;
        tool["function"]["strict"] = json!(strict);
        json!([strict_tool("f"), tool])
    };
    let format =
        |schema: Value| json!({ "type": "json_schema", "json_schema": { "name": "n", "schema": schema } });
    let fine = json!({ "type": "integer" });
    for (tools, choice, format, param, message) in [
        (
            odd(json!({ "not": {} }), true),
            "auto",
            None,
            "tools",
            "tools: the parameters of odd: JSON schema keywords that cannot be enforced: `not` at /properties/a; leave them out",
        ),
        (
            odd(json!({ "type": "file" }), false),
            "required",
            None,
            "tools",
            "tools: the parameters of odd: Invalid type: file",
        ),
        (
            odd(json!({ "type": "file" }), true),
            "auto",
            Some(format(json!({ "type": "object" }))),
            "tools",
            "tools: the parameters of odd: Invalid type: file",
        ),
        (
            odd(fine, true),
            "auto",
            Some(format(json!({ "type": "file" }))),
            "response_format.json_schema.schema",
            "response_format.json_schema.schema: Invalid type: file",
        ),
    ] {
        let mut body = with(with(say("x"), "tools", tools), "tool_choice", json!(choice));
        if let Some(format) = format {
            body["response_format"] = format;
        }
        let error = rig.post(CHAT, body).await.error(400);
        assert_eq!(
            (&error["param"], &error["message"]),
            (&json!(param), &json!(message))
        );
    }
}

#[tokio::test]
async fn structured_output_works_with_calls() {
    let rig = hermes();
    let schema = json!({ "type": "object", "properties": { "c": { "type": "null" } }, "required": ["c"] });
    let format =
        json!({ "type": "json_schema", "json_schema": { "name": "n", "schema": schema, "strict": true } });
    let answer = |text: &str| with(ask(text), "response_format", format.clone());
    let json = rig.post(CHAT, answer("{\"c\": null}")).await.json()["choices"][0].take();
    assert_eq!(json["message"]["content"], "{\"c\": null}");
    let call = "<tool_call>\n{\"name\": \"g\", \"arguments\": {}}\n</tool_call>";
    let called = rig.post(CHAT, answer(call)).await.json()["choices"][0].take();
    assert_eq!(called["message"]["tool_calls"][0]["function"]["name"], "g");
    let error = rig
        .post(CHAT, with(ask("x"), "guided_regex", json!("a+")))
        .await
        .error(400);
    assert!(
        error["message"].as_str().unwrap().contains("only JSON"),
        "{error}"
    );
    let spaced = |pattern: &str| {
        with(
            answer("{\"c\":\tnull}"),
            "guided_whitespace_pattern",
            json!(pattern),
        )
    };
    for (pattern, content) in [("[ \t]?", "{\"c\":\tnull}"), ("", "{\"c\":null}")] {
        let json = rig.post(CHAT, spaced(pattern)).await.json()["choices"][0].take();
        assert_eq!(json["message"]["content"], content, "{pattern:?}");
    }
    let error = rig.post(CHAT, spaced("(")).await.error(400);
    assert_eq!(error["param"], "guided_whitespace_pattern", "{error}");
}
