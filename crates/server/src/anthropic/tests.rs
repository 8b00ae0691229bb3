use serde_json::{Value, json};

use super::error;
use super::request::{Prompted, transcript};
use super::writer::{Shown, Writer};
use crate::conversation::{Delta, End, EndReason, Update};
use crate::error::ApiError;
use crate::respond::testing::events;
use crate::respond::{EventFormat, SseEvent};
use crate::sealed::seal;
use crate::wire::anthropic::MessagesRequest;
use crate::wire::common::{StopReason as StoppedBy, Usage};
use crate::wire::known::UnknownFields;
use crate::wire::request::parse;

fn messages(system: Value, messages: Value) -> Result<Value, String> {
    let prompted = Prompted {
        system: serde_json::from_value(system).unwrap(),
        messages: serde_json::from_value(messages).unwrap(),
    };
    let transcript = transcript(prompted).map_err(|error| error.to_string())?;
    Ok(json!(transcript.into_messages()))
}

#[test]
fn blocks_become_the_messages_of_a_template() {
    let system = json!([
        { "type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=fa690;" },
        { "type": "text", "text": "Be brief.", "cache_control": { "type": "ephemeral" } },
        { "type": "text", "text": "Be kind." },
    ]);
    let conversation = json!([
        { "role": "user", "content": "Weather" },
        { "role": "user", "content": [{ "type": "text", "text": "in Paris?", "cache_control": { "type": "ephemeral" } }] },
        { "role": "assistant", "content": [
            { "type": "thinking", "thinking": "Let me look.", "signature": "of another server" },
            { "type": "redacted_thinking", "data": "?" },
            { "type": "text", "text": "Looking." },
            { "type": "tool_use", "id": "toolu_1", "name": "weather", "input": { "city": "Paris" } },
        ]},
        { "role": "user", "content": [
            { "type": "tool_result", "tool_use_id": "toolu_1", "is_error": true, "content": [
                { "type": "text", "text": "no such city" },
            ]},
            { "type": "text", "text": "Try again." },
        ]},
        { "role": "assistant", "content": [{ "type": "thinking", "thinking": "", "signature": seal("Again.") }] },
        { "role": "system", "content": "100 tokens left" },
    ]);
    let call = json!({ "name": "weather", "arguments": { "city": "Paris" } });
    let expected = json!([
        { "role": "system", "content": "Be brief.\nBe kind." },
        { "role": "user", "content": "Weather\nin Paris?" },
        { "role": "assistant", "content": "Looking.", "reasoning_content": "Let me look.", "tool_calls": [
            { "id": "toolu_1", "type": "function", "function": call },
        ]},
        { "role": "tool", "tool_call_id": "toolu_1", "name": "weather", "content": "Error: no such city" },
        { "role": "user", "content": "Try again." },
        { "role": "assistant", "content": "", "reasoning_content": "Again." },
        { "role": "system", "content": "100 tokens left" },
    ]);
    assert_eq!(messages(system, conversation).unwrap(), expected);
}

#[test]
fn a_line_for_the_books_is_not_for_the_model() {
    let text = json!("x-anthropic-billing-header: cch=1;\nBe brief.");
    let hello = json!([{ "role": "user", "content": "Hi" }]);
    assert_eq!(messages(text, hello.clone()).unwrap()[0]["content"], "Be brief.");
    let only = json!("x-anthropic-billing-header: cch=1;");
    assert_eq!(messages(only, hello).unwrap()[0]["role"], "user");
}

#[test]
fn errors_name_the_block() {
    let cases = json!([
        ["user", { "type": "document" }, ".type = document` is not supported"],
        ["user", { "type": "image" }, ".source`: missing field"],
        ["user", { "type": "image", "source": { "type": "file", "file_id": "x" } }, ".source.type`: unknown variant `file`"],
        ["user", { "type": "image", "source": { "type": "base64", "media_type": "image/png", "data": 5 } }, ".source.data`: invalid type"],
        ["user", { "type": "image", "source": { "type": "url" } }, ".source`: missing field `url`"],
        ["user", { "type": "text" }, ".text`: missing field"],
        ["user", { "text": "x" }, ".type` must be a string"],
        ["user", { "type": "text", "text": "x", "colour": 1 }, ".colour`: unknown field"],
        ["user", { "type": "tool_use", "id": "a", "name": "b", "input": {} }, "`: a message of the role `user`"],
        ["user", { "type": "tool_result", "tool_use_id": "x" }, ".tool_use_id`: no tool_use block"],
        ["assistant", { "type": "tool_use", "id": "a", "name": "b", "input": "{}" }, ".input`: invalid type"],
    ]);
    for case in cases.as_array().unwrap() {
        let error = messages(Value::Null, json!([{ "role": case[0], "content": [case[1]] }])).unwrap_err();
        let message = format!("`messages[0].content[0]{}", case[2].as_str().unwrap());
        assert!(error.starts_with(&message), "{error}");
    }
}

#[test]
fn errors_name_the_field_in_objects_of_several_types() {
    for (field, value, message) in [
        (
            "thinking",
            json!({ "type": "enabled", "budget_tokens": "many" }),
            "`thinking.budget_tokens`: invalid type: string \"many\", expected a whole number",
        ),
        (
            "thinking",
            json!({ "type": "adaptive", "budget_tokens": 5 }),
            "unknown field `thinking.budget_tokens`",
        ),
        (
            "tool_choice",
            json!({ "type": "tool", "name": 5 }),
            "`tool_choice.name`: invalid type: integer `5`, expected a string",
        ),
        (
            "tool_choice",
            json!({ "type": "tool" }),
            "`tool_choice`: missing field `name`",
        ),
    ] {
        let mut body = json!({ "max_tokens": 9, "messages": [{ "role": "user", "content": "x" }] });
        body[field] = value;
        let parsed = parse::<MessagesRequest>(body.to_string().as_bytes(), UnknownFields::Error);
        let error = parsed.unwrap_err().to_string();
        assert!(error.starts_with(message), "{error}");
    }
}

fn writer(shown: Shown) -> Writer {
    Writer::new("m".into(), 10, shown, 5, true).answering("req_1")
}

fn update(deltas: Vec<Delta>, end: Option<(EndReason, usize)>) -> Update {
    Update {
        deltas,
        end: end.map(|(reason, tokens)| End {
            reason,
            stop: None,
            usage: Usage::new(10, tokens, 4),
        }),
        ..Default::default()
    }
}

fn rendered(written: Vec<SseEvent>) -> Vec<String> {
    let events = events(written).into_iter();
    events
        .map(|(name, mut data)| {
            assert_eq!(data["type"], name);
            let object = data.as_object_mut().unwrap();
            object.shift_remove("type");
            if let Some(message) = object.get_mut("message").and_then(Value::as_object_mut) {
                let id = message.shift_remove("id").unwrap();
                assert!(id.as_str().unwrap().starts_with("msg_"));
            }
            format!("{name} {data}")
        })
        .collect()
}

fn call() -> Delta {
    Delta::ToolCall {
        index: 0,
        id: "call_1".into(),
        name: "find".into(),
    }
}

fn argument(fragment: &str) -> Delta {
    Delta::ToolArguments {
        index: 0,
        fragment: fragment.into(),
    }
}

#[test]
fn events_have_anthropics_order() {
    let mut writer = writer(Shown::All);
    let mut written = EventFormat::begin(&mut writer);
    for deltas in [
        vec![Delta::Reasoning("Let".into())],
        vec![Delta::Reasoning(" me".into()), Delta::Content("Hi".into())],
        vec![Delta::Content("!".into()), call(), argument("{\"a\"")],
        vec![argument(":1}")],
    ] {
        written.extend(writer.item(update(deltas, None)));
    }
    written.extend(writer.item(update(Vec::new(), Some((EndReason::ToolCalls, 5)))));
    written.extend(EventFormat::end(&mut writer));
    let expected = [
        r#"message_start {"message":{"type":"message","role":"assistant","model":"m","content":[],"stop_reason":null,"stop_sequence":null,"usage":{"input_tokens":10,"cache_creation_input_tokens":0,"cache_read_input_tokens":0,"output_tokens":0}}}"#,
        r#"ping {}"#,
        r#"content_block_start {"index":0,"content_block":{"type":"thinking","thinking":"","signature":""}}"#,
        r#"content_block_delta {"index":0,"delta":{"type":"thinking_delta","thinking":"Let"}}"#,
        r#"content_block_delta {"index":0,"delta":{"type":"thinking_delta","thinking":" me"}}"#,
        r#"content_block_delta {"index":0,"delta":{"type":"signature_delta","signature":"plimsoll1:"}}"#,
        r#"content_block_stop {"index":0}"#,
        r#"content_block_start {"index":1,"content_block":{"type":"text","text":""}}"#,
        r#"content_block_delta {"index":1,"delta":{"type":"text_delta","text":"Hi"}}"#,
        r#"content_block_delta {"index":1,"delta":{"type":"text_delta","text":"!"}}"#,
        r#"content_block_stop {"index":1}"#,
        r#"content_block_start {"index":2,"content_block":{"type":"tool_use","id":"call_1","name":"find","input":{}}}"#,
        r#"content_block_delta {"index":2,"delta":{"type":"input_json_delta","partial_json":"{\"a\""}}"#,
        r#"content_block_delta {"index":2,"delta":{"type":"input_json_delta","partial_json":":1}"}}"#,
        r#"content_block_stop {"index":2}"#,
        r#"message_delta {"delta":{"stop_reason":"tool_use","stop_sequence":null},"usage":{"input_tokens":6,"cache_creation_input_tokens":0,"cache_read_input_tokens":4,"output_tokens":5}}"#,
        r#"message_stop {}"#,
    ];
    assert_eq!(rendered(written), expected);
    let message = json!(writer.into_message());
    assert_eq!(message["content"][0]["thinking"], "Let me");
    assert_eq!(message["content"][1]["text"], "Hi!");
    assert_eq!(message["content"][2]["input"], json!({ "a": 1 }));
}

#[test]
fn thinking_is_shown_as_asked() {
    let content = |shown| {
        let mut writer = writer(shown);
        writer.write(update(vec![Delta::Reasoning("Hm".into())], None));
        writer.write(update(vec![Delta::Reasoning(".".into())], None));
        let said = vec![Delta::Content("Hi".into())];
        writer.write(update(said, Some((EndReason::Stop, 3))));
        json!(writer.into_message().content)
    };
    let text = json!({ "type": "text", "text": "Hi" });
    let sealed = json!({ "type": "thinking", "thinking": "", "signature": seal("Hm.") });
    assert_eq!(content(Shown::Sealed), json!([sealed, text]));
    assert_eq!(content(Shown::All)[0]["thinking"], "Hm.");
}

#[test]
fn every_end_has_its_reason() {
    let end = |reason, tokens, stop: Option<&str>| {
        let mut writer = writer(Shown::All);
        let mut update = update(vec![Delta::Content("Hi".into())], Some((reason, tokens)));
        update.end.as_mut().unwrap().stop = stop.map(|text| StoppedBy::Text(text.to_owned()));
        writer.write(update);
        let message = json!(writer.into_message());
        (message["stop_reason"].clone(), message["stop_sequence"].clone())
    };
    for (reason, tokens, stop, expected) in [
        (EndReason::Stop, 3, None, "end_turn"),
        (EndReason::Stop, 3, Some("END"), "stop_sequence"),
        (EndReason::Length, 5, None, "max_tokens"),
        (EndReason::Length, 3, None, "model_context_window_exceeded"),
        (EndReason::ToolCalls, 3, None, "tool_use"),
    ] {
        assert_eq!(end(reason, tokens, stop), (json!(expected), json!(stop)));
    }
}

#[test]
fn a_call_that_was_cut_off_says_so() {
    let mut writer = writer(Shown::All);
    let begun = vec![call(), argument("{\"a\": ")];
    writer.write(update(begun, Some((EndReason::Length, 5))));
    let message = json!(writer.into_message());
    let input = json!({ "INVALID_JSON": "{\"a\":" });
    assert_eq!(message["content"][0]["input"], input);
    assert_eq!(message["stop_reason"], "max_tokens");
}

#[test]
fn errors_are_in_anthropics_words() {
    let mut writer = writer(Shown::All);
    let events = events(writer.fail(ApiError::Internal("broken".into())));
    assert_eq!(events.len(), 1);
    let expected = json!({
        "type": "error", "error": { "type": "api_error", "message": "internal error: broken" }, "request_id": "req_1",
    });
    assert_eq!(events[0], ("error".to_owned(), expected));
    let long = |prompt| ApiError::ContextLength {
        message: "all the numbers".into(),
        param: "messages",
        prompt,
        limit: 100,
    };
    let told = "prompt is too long: 100 tokens > 100 maximum";
    assert_eq!(error::body(&long(100), None).error.message, told);
    assert_eq!(error::body(&long(99), None).error.message, "all the numbers");
}
