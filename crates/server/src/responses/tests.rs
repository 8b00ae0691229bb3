use plimsoll_core::{Logprobs, TokenLogprob};
use plimsoll_text::Tokenizer;
use serde_json::{Value, json};

use super::tools::Functions;
use super::writer::{Shown, Writer};
use crate::conversation::{Delta, End, EndReason, Update};
use crate::error::ApiError;
use crate::generate::TokenLogprobs;
use crate::respond::testing::events;
use crate::respond::{EventFormat, SseEvent};
use crate::response_store::tests::empty;
use crate::wire::common::Usage;

fn writer(shown: Shown) -> Writer {
    let tools =
        [json!({ "type": "namespace", "name": "crm", "tools": [{ "type": "function", "name": "find" }] })];
    let (functions, _) = Functions::new(&tools, None, true).unwrap();
    Writer::new(empty("resp_1"), functions, Tokenizer::bytes(), shown, true)
}

fn update(deltas: Vec<Delta>, end: Option<EndReason>) -> Update {
    Update {
        ends: vec![0; deltas.len()],
        deltas,
        end: end.map(|reason| End {
            reason,
            stop: None,
            usage: Usage::new(10, 5, 4),
        }),
        ..Default::default()
    }
}

/// Name and data of each event, without ids and without the response's copies of request fields.
fn rendered(written: Vec<SseEvent>) -> Vec<String> {
    let events = events(written).into_iter();
    events
        .map(|(name, mut data)| {
            assert_eq!(data["type"], name);
            let object = data.as_object_mut().unwrap();
            object.shift_remove("type");
            object.shift_remove("sequence_number");
            object.shift_remove("item_id");
            if let Some(response) = object.get_mut("response") {
                *response = response["status"].clone();
            }
            if let Some(item) = object.get_mut("item").and_then(Value::as_object_mut) {
                item.shift_remove("id");
            }
            format!("{} {data}", name.trim_start_matches("response."))
        })
        .collect()
}

#[test]
fn events_have_openais_order() {
    let mut writer = writer(Shown {
        logprobs: false,
        sealed_reasoning: true,
    });
    let mut written = EventFormat::begin(&mut writer);
    for deltas in [
        vec![Delta::Reasoning("Let".into())],
        vec![Delta::Reasoning(" me".into()), Delta::Content("Hi".into())],
        vec![Delta::ToolCall {
            index: 0,
            id: "call_1".into(),
            name: "crm__find".into(),
        }],
        vec![Delta::ToolArguments {
            index: 0,
            fragment: "{}".into(),
        }],
    ] {
        written.extend(writer.item(update(deltas, None)));
    }
    written.extend(writer.item(update(Vec::new(), Some(EndReason::ToolCalls))));
    written.extend(EventFormat::end(&mut writer));

    let copies = written.iter().map(|event| Ok(event.as_ref().unwrap().clone()));
    for (number, (_, data)) in events(copies.collect()).into_iter().enumerate() {
        assert_eq!(data["sequence_number"], number);
    }
    let expected = [
        r#"created {"response":"in_progress"}"#,
        r#"in_progress {"response":"in_progress"}"#,
        r#"output_item.added {"output_index":0,"item":{"type":"reasoning","summary":[],"content":[],"status":"in_progress"}}"#,
        r#"content_part.added {"output_index":0,"content_index":0,"part":{"type":"reasoning_text","text":""}}"#,
        r#"reasoning_text.delta {"output_index":0,"content_index":0,"delta":"Let"}"#,
        r#"reasoning_text.delta {"output_index":0,"content_index":0,"delta":" me"}"#,
        r#"reasoning_text.done {"output_index":0,"content_index":0,"text":"Let me"}"#,
        r#"content_part.done {"output_index":0,"content_index":0,"part":{"type":"reasoning_text","text":"Let me"}}"#,
        r#"output_item.done {"output_index":0,"item":{"type":"reasoning","summary":[],"content":[{"type":"reasoning_text","text":"Let me"}],"encrypted_content":"plimsoll1:TGV0IG1l","status":"completed"}}"#,
        r#"output_item.added {"output_index":1,"item":{"type":"message","status":"in_progress","role":"assistant","content":[]}}"#,
        r#"content_part.added {"output_index":1,"content_index":0,"part":{"type":"output_text","text":"","annotations":[],"logprobs":[]}}"#,
        r#"output_text.delta {"output_index":1,"content_index":0,"delta":"Hi","logprobs":[]}"#,
        r#"output_text.done {"output_index":1,"content_index":0,"text":"Hi","logprobs":[]}"#,
        r#"content_part.done {"output_index":1,"content_index":0,"part":{"type":"output_text","text":"Hi","annotations":[],"logprobs":[]}}"#,
        r#"output_item.done {"output_index":1,"item":{"type":"message","status":"completed","role":"assistant","content":[{"type":"output_text","text":"Hi","annotations":[],"logprobs":[]}]}}"#,
        r#"output_item.added {"output_index":2,"item":{"type":"function_call","call_id":"call_1","name":"find","namespace":"crm","arguments":"","status":"in_progress"}}"#,
        r#"function_call_arguments.delta {"output_index":2,"delta":"{}"}"#,
        r#"function_call_arguments.done {"output_index":2,"name":"find","arguments":"{}"}"#,
        r#"output_item.done {"output_index":2,"item":{"type":"function_call","call_id":"call_1","name":"find","namespace":"crm","arguments":"{}","status":"completed"}}"#,
        r#"completed {"response":"completed"}"#,
    ];
    assert_eq!(rendered(written), expected);
    let response = writer.into_response();
    assert_eq!(response.output.len(), 3);
    let usage = json!(response.usage);
    assert_eq!(usage["input_tokens"], 10);
    assert_eq!(usage["input_tokens_details"]["cached_tokens"], 4);
}

#[test]
fn log_probabilities_come_with_the_text() {
    let mut writer = writer(Shown {
        logprobs: true,
        sealed_reasoning: false,
    });
    let token = |token: u8| TokenLogprobs {
        token: token.into(),
        logprobs: Logprobs {
            sampled: -0.5,
            top: vec![TokenLogprob {
                token: b'b'.into(),
                logprob: f32::NEG_INFINITY,
            }],
        },
    };
    for text in ["a", "b"] {
        let mut update = update(vec![Delta::Content(text.into())], None);
        update.logprobs = vec![token(text.as_bytes()[0])];
        update.ends = vec![1];
        writer.write(update);
    }
    writer.write(update(Vec::new(), Some(EndReason::Stop)));
    let part = json!(writer.into_response().output)[0]["content"][0].clone();
    assert_eq!(part["text"], "ab");
    assert_eq!(part["logprobs"].as_array().unwrap().len(), 2);
    let expected = json!({ "token": "a", "bytes": [97], "logprob": -0.5, "top_logprobs": [
        { "token": "b", "bytes": [98], "logprob": -9999.0 },
    ]});
    assert_eq!(part["logprobs"][0], expected);
}

#[test]
fn log_probabilities_begin_with_the_text() {
    let mut writer = writer(Shown {
        logprobs: true,
        sealed_reasoning: false,
    });
    // What the model writes, with the tokens up to the end of each delta that becomes of it.
    let mut write = |text: &str, deltas: Vec<(usize, Delta)>| {
        let token = |token: u8| TokenLogprobs {
            token: token.into(),
            logprobs: Logprobs {
                sampled: -0.5,
                top: Vec::new(),
            },
        };
        let (ends, deltas) = deltas.into_iter().unzip();
        let mut update = update(deltas, None);
        update.logprobs = text.bytes().map(token).collect();
        update.ends = ends;
        writer.write(update);
    };
    let call = |index| Delta::ToolCall {
        index,
        id: format!("call_{index}"),
        name: "f".into(),
    };
    let content = |text: &str| Delta::Content(text.into());
    write("<think>H", vec![(8, Delta::Reasoning("H".into()))]);
    write(
        "m\n</think>\n\nt",
        vec![(1, Delta::Reasoning("m".into())), (13, content("t"))],
    );
    write("\né", vec![(3, content("\né"))]);
    write(" <call>f", vec![(8, call(0))]);
    write("</call>\nah!", vec![(11, content("ah!"))]);
    // An unfinished character.
    write("\n", vec![(1, content("\u{fffd}"))]);
    // Text, and a call with the same text.
    write("ok <call>f(ok)", vec![(2, content("ok")), (10, call(1))]);
    // Space that comes with what follows it, once that is no markup.
    write("</call>a ", vec![(8, content("a"))]);
    write("b<call>f", vec![(1, content(" b")), (8, call(2))]);
    writer.write(update(Vec::new(), Some(EndReason::Stop)));
    let output = json!(writer.into_response().output);
    let tokens = |item: usize| -> Vec<u8> {
        let tokens = output[item]["content"][0]["logprobs"].as_array().unwrap();
        let bytes = tokens.iter().map(|token| token["bytes"][0].as_u64().unwrap());
        bytes.map(|byte| u8::try_from(byte).unwrap()).collect()
    };
    assert_eq!(tokens(1), "t\né".as_bytes());
    assert_eq!(tokens(3), b"ah!\nok");
    assert_eq!(tokens(5), b"a b");
}

#[test]
fn incomplete_responses_say_why() {
    let mut writer = self::writer(Shown::default());
    writer.write(update(vec![Delta::Content("Hi".into())], Some(EndReason::Length)));
    let response = json!(writer.into_response());
    assert_eq!(response["status"], "incomplete");
    assert_eq!(response["incomplete_details"]["reason"], "max_output_tokens");
    assert_eq!(response["output"][0]["status"], "incomplete");
    assert_eq!(response["completed_at"], Value::Null);

    // Who says nothing says it in a message.
    let mut writer = self::writer(Shown::default());
    writer.write(update(Vec::new(), Some(EndReason::Stop)));
    let response = json!(writer.into_response());
    assert_eq!(response["status"], "completed");
    assert_eq!(response["output"][0]["content"][0]["text"], "");
}

#[test]
fn a_failure_is_the_last_event() {
    let mut writer = writer(Shown::default());
    writer.item(update(vec![Delta::Content("Hi".into())], None));
    let events = events(writer.fail(ApiError::Internal("broken".into())));
    let (name, data) = events.last().unwrap();
    assert_eq!(name, "response.failed");
    assert_eq!(data["response"]["status"], "failed");
    assert_eq!(data["response"]["error"]["code"], "server_error");
    assert_eq!(data["response"]["output"][0]["status"], "incomplete");
}
