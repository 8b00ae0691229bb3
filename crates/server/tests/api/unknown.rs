//! Fields that the API does not have, with `--unknown-fields error` and `warn`.

use plimsoll_server::{ServerOptions, UnknownFields};
use serde_json::{Value, json};

use crate::fuzz::valid;
use crate::rig::{Rig, Setup};
use crate::{CHAT, chat, with};

const HEADER: &str = "x-ignored-fields";
/// No field is called so.
const ODD: &str = "zzz_field";

fn rig(unknown_fields: UnknownFields) -> Rig {
    Rig::new(Setup {
        options: ServerOptions {
            unknown_fields,
            ..Setup::default().options
        },
        ..Setup::default()
    })
}

fn ignored(answer: &crate::rig::Answer) -> Option<&str> {
    Some(answer.headers.get(HEADER)?.to_str().unwrap())
}

/// Every object in `value`, by its path as errors write it.
fn objects(value: &Value, path: &str, found: &mut Vec<(String, String)>, pointer: &str) {
    match value {
        Value::Object(fields) => {
            found.push((path.to_owned(), pointer.to_owned()));
            for (name, value) in fields {
                let path = if path.is_empty() {
                    name.clone()
                } else {
                    format!("{path}.{name}")
                };
                objects(value, &path, found, &format!("{pointer}/{name}"));
            }
        }
        Value::Array(items) => {
            for (i, item) in items.iter().enumerate() {
                objects(item, &format!("{path}[{i}]"), found, &format!("{pointer}/{i}"));
            }
        }
        _ => {}
    }
}

/// An unknown field in any object of any known request is refused by its path, or ignored and named; or it is no field of the
/// API's at all, such as a property of a schema, and nothing is said of it. `null` is no field.
#[tokio::test]
async fn unknown_fields_are_found_in_every_object() {
    let (strict, lenient) = (rig(UnknownFields::Error), rig(UnknownFields::Warn));
    let (mut refused, mut open) = (Vec::new(), Vec::new());
    for (path, bodies) in valid() {
        for body in bodies.as_array().unwrap() {
            let plain = lenient.post(&path, body.clone()).await;
            assert_eq!(ignored(&plain), None, "{path}: {body}");
            let mut places = Vec::new();
            objects(body, "", &mut places, "");
            for (place, pointer) in places {
                let mut odd = body.clone();
                let object = odd.pointer_mut(&pointer).unwrap();
                object[ODD] = json!({ "a": [1] });
                let name = if place.is_empty() {
                    ODD.to_owned()
                } else {
                    format!("{place}.{ODD}")
                };
                let (no, yes) = (
                    strict.post(&path, odd.clone()).await,
                    lenient.post(&path, odd).await,
                );
                // A stream that is accepted is no JSON.
                let error = match no.status.as_u16() {
                    200 => Value::Null,
                    _ => no.json()["error"].take(),
                };
                let plain_name: String = name.chars().filter(|c| !c.is_ascii_digit()).collect();
                match ignored(&yes) {
                    Some(header) => {
                        assert_eq!(header, plain_name, "{path} {place}");
                        assert_eq!(yes.status, plain.status, "{path} {place}: {}", yes.text);
                        assert_eq!(no.status, 400, "{path} {place}: {}", no.text);
                        let message = error["message"].as_str().unwrap();
                        assert!(
                            message.contains(&format!("unknown field `{name}`")),
                            "{path}: {error}"
                        );
                        if !path.starts_with("/v1/messages") {
                            assert_eq!(
                                (&error["code"], &error["param"]),
                                (&json!("unknown_parameter"), &json!(name))
                            );
                        }
                        refused.push((path.clone(), plain_name));
                    }
                    None => {
                        let message = error["message"].as_str().unwrap_or_default();
                        assert!(!message.contains("unknown field"), "{path} {place}: {error}");
                        open.push((path.clone(), plain_name));
                    }
                }
            }
        }
    }
    let has = |list: &[(String, String)], path: &str, name: &str| {
        let name = format!("{name}.{ODD}");
        assert!(
            list.contains(&(path.to_owned(), name.clone())),
            "{path} {name}: {list:?}"
        );
    };
    has(&refused, CHAT, "messages[]");
    has(&refused, CHAT, "tools[].function");
    has(&refused, CHAT, "response_format.json_schema");
    has(&refused, CHAT, "tool_choice");
    has(&refused, CHAT, "structured_outputs");
    has(&refused, "/v1/responses", "input[]");
    has(&refused, "/v1/responses", "tools[].tools[]");
    has(&refused, "/v1/responses", "text.format");
    has(&refused, "/v1/messages", "messages[].content[].content[]");
    has(&refused, "/v1/messages", "thinking");
    has(&open, CHAT, "tools[].function.parameters");
    has(&open, CHAT, "messages[].content[]");
}

#[tokio::test]
async fn ignored_fields_are_named_and_counted() {
    let rig = rig(UnknownFields::Warn);
    let mut body = with(with(chat("x"), "keep_alive", json!(5)), "think", json!(false));
    body["messages"][0]["mood"] = json!("good");
    let answer = rig.post(CHAT, body.clone()).await;
    assert_eq!(answer.status, 200, "{}", answer.text);
    assert_eq!(ignored(&answer), Some("keep_alive, messages[].mood, think"));
    // Streams name them before the first event.
    let stream = rig.post(CHAT, with(body, "stream", json!(true))).await;
    assert_eq!(ignored(&stream), Some("keep_alive, messages[].mood, think"));
    let page = rig.get("/metrics").await.text;
    let count = |field: &str| {
        let label = format!("field=\"{field}\"");
        let line = page
            .lines()
            .find(|line| line.starts_with("plimsoll_ignored_fields_total") && line.contains(&label));
        line.and_then(|line| line.rsplit_once(' '))
            .map(|(_, value)| value.to_owned())
    };
    assert_eq!(count("messages[].mood").as_deref(), Some("2"), "{page}");
    assert_eq!(count("other").as_deref(), Some("0"));
    // What is known and not supported is refused all the same, and so are wrong values.
    for (field, value) in [
        ("audio", json!({})),
        ("functions", json!([{ "name": "f" }])),
        ("temperature", json!("x")),
    ] {
        let error = rig.post(CHAT, with(chat("x"), field, value)).await.error(400);
        assert_eq!(error["param"], field);
    }
}

/// Clients choose the names: they cannot fill the metrics, nor write headers.
#[tokio::test]
async fn names_of_ignored_fields_are_bounded() {
    let rig = rig(UnknownFields::Warn);
    let answer = rig
        .post(CHAT, with(chat("x"), "a\r\nx-evil: 1, é", json!(1)))
        .await;
    assert_eq!(ignored(&answer), Some("a??x-evil??1???"));
    for i in 0..40 {
        let mut body = chat("x");
        for j in 0..30 {
            body[format!("field_{i}_{j}_{}", "x".repeat(200))] = json!(1);
        }
        let answer = rig.post(CHAT, body).await;
        let names: Vec<_> = ignored(&answer).unwrap().split(", ").collect();
        assert_eq!(names.len(), 16);
        assert!(names.iter().all(|name| name.len() == 64));
    }
    let page = rig.get("/metrics").await.text;
    let lines: Vec<_> = page
        .lines()
        .filter(|line| line.starts_with("plimsoll_ignored_fields_total{"))
        .collect();
    assert_eq!(lines.len(), 65, "64 names, and the others");
    let other = lines
        .iter()
        .find(|line| line.contains("field=\"other\""))
        .unwrap();
    assert!(
        other.rsplit_once(' ').unwrap().1.parse::<u64>().unwrap() > 500,
        "{other}"
    );
}

#[tokio::test]
async fn a_reasoning_effort_may_be_ignored_by_a_model_that_does_not_reason() {
    let rig = rig(UnknownFields::Warn);
    let answer = rig
        .post(CHAT, with(chat("x"), "reasoning_effort", json!("high")))
        .await;
    assert_eq!(
        (answer.status.as_u16(), ignored(&answer)),
        (200, Some("reasoning_effort"))
    );
    let body = json!({ "input": "x", "reasoning": { "effort": "low" }, "max_output_tokens": 2 });
    let answer = rig.post("/v1/responses", body).await;
    assert_eq!(
        (answer.status.as_u16(), ignored(&answer)),
        (200, Some("reasoning.effort"))
    );
}

/// A model that reasons, by a template without a switch.
#[tokio::test]
async fn a_model_that_reasons_takes_any_effort_but_none() {
    let rig = Rig::new(Setup {
        template: Some("{% for m in messages %}{{ m.content.split('</think>')[-1] }}{% endfor %}"),
        ..Setup::default()
    });
    for effort in ["minimal", "low", "high"] {
        let answer = rig
            .post(CHAT, with(chat("x"), "reasoning_effort", json!(effort)))
            .await;
        assert_eq!(
            (answer.status.as_u16(), ignored(&answer)),
            (200, None),
            "{}",
            answer.text
        );
    }
    let error = rig
        .post(CHAT, with(chat("x"), "reasoning_effort", json!("none")))
        .await
        .error(400);
    assert_eq!(error["param"], "reasoning_effort");
    assert!(
        error["message"].as_str().unwrap().contains("always reasons"),
        "{error}"
    );
}

#[tokio::test]
async fn known_synonyms_work() {
    let rig = Rig::new(Setup {
        template: Some(
            "{% for m in messages %}{{ m.content }}{% endfor %}{% if enable_thinking is false %}!{% endif %}",
        ),
        ..Setup::default()
    });
    let text =
        async |body: Value| rig.post(CHAT, body).await.json()["choices"][0]["message"]["content"].clone();
    let thinking = text(with(chat("abc"), "enable_thinking", json!(false))).await;
    assert_eq!(thinking, crate::oracle_text("abc!", 20, 1));
    let usage = rig
        .post(CHAT, with(chat("abc"), "max_tokens", json!(-1)))
        .await
        .json()["usage"]
        .clone();
    assert_eq!(usage["total_tokens"], 1024, "as many as fit");
    let body = json!({ "prompt": "abc", "max_tokens": -1, "ignore_eos": true });
    let usage = rig.post(crate::COMPLETIONS, body).await.json()["usage"].clone();
    assert_eq!(usage["total_tokens"], 1024, "not the default of 16");
    let penalised = async |name: &str| text(with(chat("abc"), name, json!(50))).await;
    assert_eq!(
        penalised("repeat_penalty").await,
        penalised("repetition_penalty").await
    );
}

/// What other vendors' clients add to messages.
#[tokio::test]
async fn harmless_fields_of_messages_have_no_effect() {
    let rig = Rig::new(Setup::default());
    let plain = rig.post("/tokenize", chat_alone(json!({}))).await.json();
    let extra = json!({ "cache_control": { "type": "ephemeral" }, "id": "msg_1", "metadata": { "a": 1 } });
    assert_eq!(rig.post("/tokenize", chat_alone(extra)).await.json(), plain);
}

fn chat_alone(extra: Value) -> Value {
    let mut message = json!({ "role": "user", "content": "x" });
    message
        .as_object_mut()
        .unwrap()
        .extend(extra.as_object().unwrap().clone());
    json!({ "messages": [message] })
}

#[tokio::test]
async fn an_answer_may_begin_with_the_message_that_it_continues() {
    let rig = Rig::new(Setup::default());
    let body = json!({
        "messages": [{ "role": "user", "content": "x" }, { "role": "assistant", "content": "Once " }],
        "continue_final_message": true, "max_tokens": 5, "seed": 1, "ignore_eos": true, "n": 2,
    });
    let texts = |answer: &Value| -> Vec<String> {
        let choices = answer["choices"].as_array().unwrap().iter();
        choices
            .map(|choice| choice["message"]["content"].as_str().unwrap().to_owned())
            .collect()
    };
    let plain = texts(&rig.post(CHAT, body.clone()).await.json());
    let echoed = texts(
        &rig.post(CHAT, with(body.clone(), "echo", json!(true)))
            .await
            .json(),
    );
    let expected: Vec<_> = plain.iter().map(|text| format!("Once {text}")).collect();
    assert_eq!(echoed, expected);
    let stream = with(with(body, "echo", json!(true)), "stream", json!(true));
    assert_eq!(
        crate::streamed(&rig.post(CHAT, stream).await.events(), 2),
        expected
    );
    // Only the assistant's own words are its answer's.
    let alone = texts(&rig.post(CHAT, with(chat("x"), "echo", json!(true))).await.json());
    assert_eq!(alone, texts(&rig.post(CHAT, chat("x")).await.json()));
}

#[tokio::test]
async fn prompts_are_truncated_at_either_end() {
    let rig = Rig::new(Setup::default());
    for (side, kept) in [(json!(null), "ef"), (json!("left"), "ef"), (json!("right"), "ab")] {
        let body = json!({
            "prompt": "abcdef", "truncate_prompt_tokens": 2, "truncation_side": side, "return_token_ids": true, "max_tokens": 1,
        });
        let answer = rig.post(crate::COMPLETIONS, body).await.json();
        assert_eq!(
            answer["choices"][0]["prompt_token_ids"],
            json!(kept.as_bytes()),
            "{side}"
        );
    }
}
