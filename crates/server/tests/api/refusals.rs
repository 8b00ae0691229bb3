//! Refused requests and their errors.

use std::time::Duration;

use axum::body::{Body, Bytes};
use plimsoll_server::ServerOptions;
use serde_json::{Value, json};

use crate::rig::{Rig, Setup, post};
use crate::{CHAT, COMPLETIONS, chat, with};

#[tokio::test]
async fn wrong_requests_name_the_field() {
    let rig = Rig::new(Setup::default());
    let cases = [
        (CHAT, json!({}), "messages", "missing field `messages`"),
        (CHAT, json!({ "messages": [] }), "messages", "must not be empty"),
        (
            CHAT,
            with(chat("x"), "temprature", json!(1)),
            "temprature",
            "unknown field `temprature` (did you mean `temperature`?)",
        ),
        (
            CHAT,
            json!({ "mesages": [], "temperature": "hot", "audio": {} }),
            "mesages",
            "unknown field `mesages` (did you mean `messages`?)",
        ),
        (
            CHAT,
            json!({
                "messages": [{ "role": "user", "content": "x" }, { "role": "user", "contnet": "x" }],
                "foo": 1,
                "stream_optoins": {},
            }),
            "messages[1].contnet",
            "unknown fields `messages[1].contnet` (did you mean `content`?), `foo`, `stream_optoins` (did you mean \
             `stream_options`?); a server started with --unknown-fields warn ignores them",
        ),
        (
            CHAT,
            with(chat("x"), "tools", json!([{}])),
            "tools[0]",
            "missing field `type`",
        ),
        (CHAT, with(chat("x"), "max_tokens", json!(-2)), "max_tokens", "-2"),
        (
            CHAT,
            with(chat("x"), "max_tokens", json!(1e20)),
            "max_tokens",
            "must be at most 18446744073709551615, not 1e",
        ),
        (
            CHAT,
            with(chat("x"), "stop_token_ids", json!([5_000_000_000_u64])),
            "stop_token_ids[0]",
            "expected a whole number of at most 4294967295",
        ),
        (
            CHAT,
            with(
                with(chat("x"), "repeat_penalty", json!(1.1)),
                "repetition_penalty",
                json!(1.2),
            ),
            "repeat_penalty",
            "another name",
        ),
        (
            CHAT,
            with(
                with(chat("x"), "enable_thinking", json!(true)),
                "chat_template_kwargs",
                json!({ "enable_thinking": false }),
            ),
            "enable_thinking",
            "another name",
        ),
        (
            CHAT,
            with(chat("x"), "temperature", json!(-1)),
            "temperature",
            "between 0 and 100",
        ),
        (
            CHAT,
            with(chat("x"), "logit_bias", json!({ "a": 1 })),
            "logit_bias",
            "not a token id",
        ),
        (
            CHAT,
            with(chat("x"), "stop", json!([""])),
            "stop",
            "must not be empty",
        ),
        (
            CHAT,
            with(chat("x"), "top_logprobs", json!(3)),
            "top_logprobs",
            "needs logprobs",
        ),
        (CHAT, with(chat("x"), "n", json!(100)), "n", "at most 80 at once"),
        (
            CHAT,
            with(chat("x"), "stream_options", json!({ "include_usage": true })),
            "stream_options",
            "stream = true",
        ),
        (
            CHAT,
            json!({ "messages": [{ "role": "user", "content": null }] }),
            "messages[0].content",
            "needs content",
        ),
        (
            CHAT,
            json!({ "messages": [{ "role": "user", "content": "x", "mood": 1 }] }),
            "messages[0].mood",
            "unknown field",
        ),
        (
            CHAT,
            json!({ "messages": [{ "role": "user", "content": [{ "type": "text", "text": "x" }, { "type": "text", "text": 5 }] }] }),
            "messages[0].content[1].text",
            "invalid type: integer `5`, expected a string",
        ),
        (
            CHAT,
            json!({ "messages": [{ "role": "user", "content": 5 }] }),
            "messages[0].content",
            "expected a string or a list of parts",
        ),
        (
            "/v1/responses",
            json!({ "input": [{ "role": "user", "content": [{ "type": "input_text", "text": 5 }] }] }),
            "input[0].content[0].text",
            "invalid type: integer `5`, expected a string",
        ),
        (
            CHAT,
            with(chat("x"), "response_format", json!({ "type": "json" })),
            "response_format.type",
            "unknown variant `json`",
        ),
        (
            CHAT,
            with(
                chat("x"),
                "response_format",
                json!({ "json_schema": { "schema": {}, "strict": "yes" }, "type": "json_schema" }),
            ),
            "response_format.json_schema.strict",
            "expected true or false",
        ),
        (
            CHAT,
            with(chat("x"), "response_format", json!({ "type": "json_schema" })),
            "response_format",
            "missing field `json_schema`",
        ),
        (
            "/v1/responses",
            json!({ "input": "x", "text": { "format": { "type": "json_schema", "name": 5, "schema": {} } } }),
            "text.format.name",
            "expected a string",
        ),
        (
            CHAT,
            with(
                chat("x"),
                "structured_outputs",
                json!({ "json": { "type": "integer" }, "whitespace_pattern": "(" }),
            ),
            "structured_outputs.whitespace_pattern",
            "structured_outputs.whitespace_pattern: ",
        ),
        (
            CHAT,
            with(
                with(chat("x"), "guided_json", json!({ "type": "integer" })),
                "guided_whitespace_pattern",
                json!("[a"),
            ),
            "guided_whitespace_pattern",
            "guided_whitespace_pattern: ",
        ),
        (COMPLETIONS, json!({ "prompt": "" }), "prompt", "empty"),
        (
            COMPLETIONS,
            json!({ "prompt": ["x", ""] }),
            "prompt",
            "prompt[1]: the prompt is empty",
        ),
        (
            COMPLETIONS,
            json!({ "prompt": [[1], [2], [400]] }),
            "prompt",
            "prompt[2]: token id 400",
        ),
        (
            COMPLETIONS,
            json!({ "prompt": vec!["x"; 100] }),
            "prompt",
            "at most 80 at once",
        ),
        (
            CHAT,
            json!({ "messages": [{ "role": "user", "content": "x" }], "max_completion_tokens": 0 }),
            "max_completion_tokens",
            "max_completion_tokens must be at least 1",
        ),
        (
            COMPLETIONS,
            json!({ "prompt": [400] }),
            "prompt",
            "outside the vocabulary",
        ),
        (
            COMPLETIONS,
            json!({ "prompt": "x", "n": 3, "best_of": 2 }),
            "best_of",
            "between n, which is 3,",
        ),
        (
            COMPLETIONS,
            json!({ "prompt": "x", "logprobs": 30 }),
            "logprobs",
            "at most 20",
        ),
        (
            "/v1/responses",
            json!({ "input": "x", "reasoning": { "context": "all_turns" } }),
            "reasoning.context",
            "only `auto` is",
        ),
        ("/tokenize", json!({ "messages": "x" }), "messages", "`messages`"),
        (
            "/detokenize",
            json!({ "tokens": [999] }),
            "tokens",
            "outside the vocabulary",
        ),
    ];
    for (path, body, param, message) in cases {
        let error = rig.post(path, body.clone()).await.error(400);
        assert_eq!(error["param"], param, "{body}: {error}");
        assert_eq!(error["type"], "invalid_request_error");
        assert!(
            error["message"].as_str().unwrap().contains(message),
            "{body}: {error}"
        );
    }
    assert_eq!(
        rig.state.engine().stats().submitted,
        0,
        "nothing wrong reaches the engine"
    );
}

/// Tokens of the simulated model are single bytes, and one special token of seven bytes.
#[tokio::test]
async fn a_text_far_beyond_the_context_is_not_tokenized() {
    let rig = Rig::new(Setup::default());
    let long = "x".repeat(50_000);
    for (path, body, param) in [
        (CHAT, chat(&long), "messages"),
        (COMPLETIONS, json!({ "prompt": ["x", long] }), "prompt"),
        ("/v1/responses", json!({ "input": long }), "input"),
        (
            "/v1/responses",
            json!({ "input": long, "truncation": "auto" }),
            "input",
        ),
    ] {
        let error = rig.post(path, body).await.error(400);
        assert_eq!(
            (&error["param"], &error["code"]),
            (&json!(param), &json!("context_length_exceeded"))
        );
        let message = error["message"].as_str().unwrap();
        assert!(
            message.contains("maximum context length is 1024 tokens") && message.contains("at least 714"),
            "{message}"
        );
    }
    // Truncated, it fits.
    let cut = json!({ "prompt": long, "max_tokens": 2, "truncate_prompt_tokens": -1 });
    assert_eq!(
        rig.post(COMPLETIONS, cut).await.json()["usage"]["prompt_tokens"],
        1022
    );
    let dropped = json!({ "truncation": "auto", "max_output_tokens": 2, "input": [
        { "role": "user", "content": long }, { "role": "user", "content": "x" },
    ] });
    assert_eq!(rig.post("/v1/responses", dropped).await.status, 200);
}

#[tokio::test]
async fn conversations_have_limits() {
    let rig = Rig::new(Setup::default());
    let many = |n: usize, item: Value| Value::Array(vec![item; n]);
    let message = json!({ "role": "user", "content": "x" });
    let tools: Vec<Value> = (0..1025)
        .map(|i| json!({ "type": "function", "function": { "name": format!("f{i}") } }))
        .collect();
    for (path, body, param) in [
        (
            CHAT,
            json!({ "messages": many(16_385, message.clone()) }),
            "messages",
        ),
        (
            "/v1/responses",
            json!({ "input": many(16_385, message.clone()) }),
            "input",
        ),
        (CHAT, with(chat("x"), "tools", json!(tools)), "tools"),
    ] {
        let error = rig.post(path, body).await.error(400);
        assert_eq!(error["param"], param, "{error}");
        assert!(
            error["message"].as_str().unwrap().contains("at most 1"),
            "{error}"
        );
    }
}

#[tokio::test]
async fn reasoning_effort_errors_name_the_endpoints_field() {
    let rig = Rig::new(Setup::default());
    for (path, body, param) in [
        (
            CHAT,
            with(chat("x"), "reasoning_effort", json!("high")),
            "reasoning_effort",
        ),
        (
            "/v1/responses",
            json!({ "input": "x", "reasoning": { "effort": "high" } }),
            "reasoning.effort",
        ),
    ] {
        let error = rig.post(path, body).await.error(400);
        assert_eq!(error["param"], param, "{error}");
        assert!(error["message"].as_str().unwrap().contains(param), "{error}");
    }
}

#[tokio::test]
async fn request_templates_need_the_trust_flag() {
    let ask = |template: &str| with(chat("abc"), "chat_template", json!(template));
    let wary = Rig::new(Setup::default());
    let error = wary.post(CHAT, ask("x")).await.error(400);
    assert_eq!(
        (&error["param"], &error["code"]),
        (&json!("chat_template"), &json!("unsupported_parameter"))
    );
    assert!(
        error["message"]
            .as_str()
            .unwrap()
            .contains("--trust-request-chat-template"),
        "{error}"
    );

    let rig = Rig::new(Setup {
        options: ServerOptions {
            trust_request_chat_template: true,
            ..Default::default()
        },
        ..Default::default()
    });
    let own = ask("{{ messages[0].content }}{{ messages[0].content }}");
    let answer = rig.post(CHAT, own).await.json();
    assert_eq!(answer["usage"]["prompt_tokens"], 6);
    assert_eq!(
        answer["choices"][0]["message"]["content"],
        crate::oracle_text("abcabc", 20, 1)
    );
    for (template, message) in [
        ("{% if %}", "not valid Jinja"),
        ("{{ raise_exception('no') }}", "no"),
        ("{{ 1 // 0 }}", "cannot render"),
    ] {
        let error = rig.post(CHAT, ask(template)).await.error(400);
        assert_eq!(error["param"], "chat_template", "{error}");
        assert!(error["message"].as_str().unwrap().contains(message), "{error}");
    }
}

#[tokio::test]
async fn non_text_parts_are_refused_by_name() {
    let rig = Rig::new(Setup::default());
    let part = json!({ "type": "image_url", "image_url": { "url": "http://x/y.png" } });
    let body = json!({ "messages": [{ "role": "user", "content": [part] }] });
    let error = rig.post(CHAT, body).await.error(400);
    assert!(
        error["message"].as_str().unwrap().contains("image_url"),
        "{error}"
    );
}

#[tokio::test]
async fn bodies_that_are_no_requests_get_a_4xx() {
    let rig = Rig::new(Setup::default());
    let bodies: [&[u8]; 9] = [
        b"",
        b"{",
        b"[]",
        b"null",
        b"{\"prompt\": NaN}",
        b"{\"prompt\": \"\xff\"}",
        b"\x00",
        b"{} {}",
        &[b'['; 5000],
    ];
    for body in bodies {
        for path in [CHAT, COMPLETIONS, "/tokenize", "/detokenize"] {
            let error = rig.post_raw(path, body.to_vec()).await.error(400);
            assert_eq!(error["type"], "invalid_request_error", "{body:?}");
        }
    }
    let error = rig
        .post_raw(COMPLETIONS, vec![b' '; (1 << 20) + 1])
        .await
        .error(413);
    assert_eq!(error["code"], "request_too_large");
    let text = axum::http::Request::post(CHAT)
        .header("content-type", "text/plain")
        .body(Body::from("{}"))
        .unwrap();
    assert_eq!(rig.send(text).await.status(), 415);
    let coded = |coding: &str| {
        let request = axum::http::Request::post("/tokenize").header("content-encoding", coding);
        request.body(Body::from("{\"prompt\": \"x\"}")).unwrap()
    };
    assert_eq!(rig.send(coded("Identity")).await.status(), 200);
    assert_eq!(rig.send(coded("gzip")).await.status(), 415);
    assert_eq!(rig.get("/nothing").await.error(404)["code"], "unknown_url");
    let error = rig.get(CHAT).await.error(405);
    assert_eq!(error["code"], "method_not_supported");
    let message = "GET is not allowed here; /v1/chat/completions only takes POST";
    assert_eq!(error["message"], message);
    let error = rig.post("/v1/models/sim", json!({})).await.error(405);
    let message = "POST is not allowed here; /v1/models/{id} only takes GET and HEAD";
    assert_eq!(error["message"], message);
    let error = rig
        .post(CHAT, with(chat("x"), "model", json!("gpt")))
        .await
        .error(404);
    assert_eq!(
        (&error["code"], &error["param"]),
        (&json!("model_not_found"), &json!("model"))
    );
    for name in ["org/sim", ""] {
        let answer = rig.post(CHAT, with(chat("x"), "model", json!(name))).await;
        assert_eq!(answer.status, 200, "{name}");
    }
    assert_eq!(rig.get("/v1/models/org/sim").await.json()["id"], "org/sim");
}

#[tokio::test]
async fn a_body_that_does_not_arrive_is_408() {
    let options = ServerOptions {
        body_timeout: Duration::from_millis(50),
        ..Default::default()
    };
    let rig = Rig::new(Setup {
        options,
        ..Default::default()
    });
    let never = futures::stream::pending::<Result<Bytes, std::io::Error>>();
    assert_eq!(
        rig.post_raw(CHAT, Body::from_stream(never)).await.error(408)["code"],
        "request_timeout"
    );
}

#[tokio::test]
async fn a_request_that_cannot_fit_is_refused() {
    let rig = Rig::new(Setup::default());
    for (path, body, param) in [
        (COMPLETIONS, json!({ "prompt": "x".repeat(1024) }), "prompt"),
        (
            COMPLETIONS,
            json!({ "prompt": "x".repeat(1000), "max_tokens": 25 }),
            "max_tokens",
        ),
        (
            CHAT,
            json!({ "messages": [{ "role": "user", "content": "x" }], "max_completion_tokens": 2000 }),
            "max_completion_tokens",
        ),
        (
            "/v1/responses",
            json!({ "input": "x", "max_output_tokens": 2000 }),
            "max_output_tokens",
        ),
        (CHAT, chat(&"x".repeat(2000)), "messages"),
    ] {
        let error = rig.post(path, body).await.error(400);
        assert_eq!(
            (&error["code"], &error["param"]),
            (&json!("context_length_exceeded"), &json!(param))
        );
    }
    // Without max_tokens a completion uses what fits.
    let usage = rig
        .post(
            COMPLETIONS,
            json!({ "prompt": "x".repeat(1020), "ignore_eos": true }),
        )
        .await
        .json();
    assert_eq!(usage["usage"]["completion_tokens"], 4);
}

#[tokio::test]
async fn what_is_turned_off_names_its_flag() {
    let rig = Rig::new(Setup::default());
    for (path, flag) in [
        ("/v1/files", "--file-store-max-count above 0"),
        ("/v1/files/file-1/content", "--file-store-max-count above 0"),
        ("/v1/batches", "--file-store-max-count above 0"),
        ("/v1/batches/batch-1/cancel", "--file-store-max-count above 0"),
        ("/sleep", "--enable-sleep-mode"),
        ("/load", "--enable-server-load-tracking"),
    ] {
        for answer in [rig.get(path).await, rig.post(path, json!({})).await] {
            let error = answer.error(404);
            assert_eq!(error["code"], "unknown_url", "{error}");
            let message = format!("{path} is turned off: start the server with {flag}");
            assert_eq!(error["message"], message);
        }
    }
    assert_eq!(
        rig.get("/v1/nothing").await.error(404)["message"],
        "no such path: /v1/nothing"
    );
}

#[tokio::test]
async fn a_full_queue_is_429_with_retry_after() {
    let rig = Rig::new(Setup {
        max_num_seqs: 1,
        max_queue: 2,
        ..Default::default()
    });
    rig.set_step(Duration::from_millis(5));
    let body = with(with(chat("x"), "stream", json!(true)), "max_tokens", json!(500));
    let first = rig
        .send(post(CHAT, with(body.clone(), "n", json!(2)).to_string()))
        .await;
    assert_eq!(first.status(), 200);
    // Two are in flight, one more fits: a request for two is refused as a whole.
    let refused = rig.post(CHAT, with(body.clone(), "n", json!(2))).await;
    assert_eq!(refused.error(429)["code"], "queue_full");
    let retry_after: u64 = refused.headers["retry-after"].to_str().unwrap().parse().unwrap();
    assert!((1..=60).contains(&retry_after));
    rig.until_in_flight(2).await;
    let third = rig.send(post(CHAT, body.to_string())).await;
    assert_eq!(third.status(), 200);
    // Dropping unread responses cancels them.
    drop((first, third));
    rig.until_in_flight(0).await;
}
