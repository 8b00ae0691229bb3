//! Successful requests: texts, templates, defaults, streams, stop strings.

use plimsoll_server::GenerationDefaults;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use serde_json::{Value, json};

use crate::rig::{Rig, Setup};
use crate::{CHAT, COMPLETIONS, chat, oracle_text, streamed, with};

#[tokio::test]
async fn answers_have_the_models_text() {
    let rig = Rig::new(Setup::default());
    let answer = rig.post(CHAT, with(chat("Hi"), "n", json!(2))).await.json();
    for (i, seed) in [(0, 1), (1, 2)] {
        let expected = oracle_text("<user>Hi</><assistant>", 20, seed);
        assert_eq!(answer["choices"][i]["message"]["content"], expected);
    }
    let body = json!({ "prompt": ["ab", "cd"], "max_tokens": 30, "seed": 9, "ignore_eos": true });
    let answer = rig.post(COMPLETIONS, body).await.json();
    assert_eq!(answer["choices"][0]["text"], oracle_text("ab", 30, 9));
    assert_eq!(answer["choices"][1]["text"], oracle_text("cd", 30, 9));
    assert_eq!(
        answer["usage"],
        json!({
            "prompt_tokens": 4, "completion_tokens": 60, "total_tokens": 64, "prompt_tokens_details": {"cached_tokens": 0}
        })
    );
}

#[tokio::test]
async fn templates_get_text_roles_and_variables() {
    let rig = Rig::new(Setup::default());
    let body = json!({
        "messages": [
            { "role": "developer", "content": "a" },
            { "role": "user", "content": [{ "type": "text", "text": "b" }, { "type": "text", "text": "c" }] },
        ],
        "add_generation_prompt": false, "chat_template_kwargs": { "suffix": "!" },
    });
    let tokens = rig.post("/tokenize", body).await.json()["tokens"].clone();
    let text = rig.post("/detokenize", json!({ "tokens": tokens })).await.json()["prompt"].clone();
    assert_eq!(text, "<system>a</><user>b\nc</>!");
}

#[tokio::test]
async fn a_model_without_template_only_has_completions() {
    let rig = Rig::new(Setup {
        template: None,
        ..Default::default()
    });
    let error = rig.post(CHAT, chat("Hi")).await.error(400);
    assert!(
        error["message"].as_str().unwrap().contains("no chat template"),
        "{error}"
    );
    assert_eq!(rig.post(COMPLETIONS, json!({ "prompt": "x" })).await.status, 200);
}

#[tokio::test]
async fn the_models_defaults_apply_unless_set() {
    let defaults = GenerationDefaults {
        temperature: Some(0.0),
        max_new_tokens: Some(7),
        ..Default::default()
    };
    let rig = Rig::new(Setup {
        defaults,
        ..Default::default()
    });
    let greedy = |seed: u64| json!({ "messages": [{ "role": "user", "content": "x" }], "ignore_eos": true, "seed": seed });
    let [a, b] = [
        rig.post(CHAT, greedy(1)).await.json(),
        rig.post(CHAT, greedy(2)).await.json(),
    ];
    assert_eq!(a["choices"][0]["message"], b["choices"][0]["message"]);
    assert_eq!(a["usage"]["completion_tokens"], 7);
    let warm = rig
        .post(CHAT, with(greedy(2), "temperature", json!(1)))
        .await
        .json();
    assert_ne!(warm["choices"][0]["message"], a["choices"][0]["message"]);
}

#[tokio::test]
async fn chat_streams_in_openais_format() {
    let rig = Rig::new(Setup::default());
    let whole = rig.post(CHAT, with(chat("Hi"), "n", json!(3))).await.json();
    let mut body = with(with(chat("Hi"), "n", json!(3)), "stream", json!(true));
    body["stream_options"] = json!({ "include_usage": true });
    let mut events = rig.post(CHAT, body).await.events();
    let usage = events.pop().unwrap();
    assert_eq!(
        (&usage["choices"], &usage["usage"]),
        (&json!([]), &with_cached(&whole["usage"], &usage["usage"]))
    );
    assert!(
        events
            .iter()
            .all(|event| event["usage"].is_null() && event["object"] == "chat.completion.chunk")
    );
    for i in 0..3 {
        let own: Vec<_> = events
            .iter()
            .map(|event| &event["choices"][0])
            .filter(|c| c["index"] == i)
            .collect();
        assert_eq!(own[0]["delta"], json!({ "role": "assistant", "content": "" }));
        assert_eq!(own.last().unwrap()["delta"], json!({}));
        assert_eq!(own.last().unwrap()["finish_reason"], "length");
        assert!(
            own[..own.len() - 1]
                .iter()
                .all(|choice| choice["finish_reason"].is_null())
        );
        assert_eq!(
            streamed(&events, 3)[i],
            whole["choices"][i]["message"]["content"].as_str().unwrap()
        );
    }
}

/// `usage` with the cached tokens of `other`: the second request hits the prefix cache.
fn with_cached(usage: &Value, other: &Value) -> Value {
    with(
        usage.clone(),
        "prompt_tokens_details",
        other["prompt_tokens_details"].clone(),
    )
}

/// An offset is a position in the text, also behind characters of several tokens.
#[tokio::test]
async fn offsets_count_the_texts_characters() {
    let rig = Rig::new(Setup::default());
    let said = "é<say>a😀b</say>";
    let body = json!({ "prompt": said, "max_tokens": 20, "logprobs": 0, "echo": true });
    let whole = rig.post(COMPLETIONS, body.clone()).await.json()["choices"][0].take();
    assert_eq!(whole["text"], format!("{said}a😀b"));
    let text: Vec<char> = whole["text"].as_str().unwrap().chars().collect();
    let logprobs = &whole["logprobs"];
    let offsets = logprobs["text_offset"].as_array().unwrap();
    for (token, offset) in logprobs["tokens"].as_array().unwrap().iter().zip(offsets) {
        let at = text[usize::try_from(offset.as_u64().unwrap()).unwrap()];
        match token.as_str().unwrap().strip_prefix("bytes:") {
            None => assert_eq!(token, &json!(at.to_string())),
            Some(_) => assert!(!at.is_ascii(), "{token} at {offset}: {at}"),
        }
    }
    assert_eq!(offsets.len(), whole["text"].as_str().unwrap().len());
    let events = rig
        .post(COMPLETIONS, with(body, "stream", json!(true)))
        .await
        .events();
    let streamed = events.iter().flat_map(|event| {
        let logprobs = &event["choices"][0]["logprobs"];
        logprobs["text_offset"].as_array().unwrap().clone()
    });
    assert_eq!(&streamed.collect::<Vec<_>>(), offsets);
}

#[tokio::test]
async fn stop_strings_end_the_text_at_any_position() {
    let rig = Rig::new(Setup::default());
    let seed = rand::random::<u64>();
    let mut random = StdRng::seed_from_u64(seed);
    for _ in 0..30 {
        let request_seed = random.random_range(0..1000);
        let text = oracle_text("<user>x</><assistant>", 80, request_seed);
        // End-of-sequence tokens have no text, so it is shorter than 80 for some seeds.
        let start = random.random_range(0..text.len() - 8);
        let stop = &text[start..start + random.random_range(1..8)];
        let expected = &text[..text.find(stop).unwrap()];
        let mut body = chat("x");
        body["max_tokens"] = json!(80);
        body["seed"] = json!(request_seed);
        body["stop"] = json!([stop, "never"]);
        let choice = rig.post(CHAT, body.clone()).await.json()["choices"][0].clone();
        assert_eq!(choice["message"]["content"], expected, "seed {seed}");
        assert_eq!(choice["finish_reason"], "stop");
        let events = rig.post(CHAT, with(body, "stream", json!(true))).await.events();
        assert_eq!(streamed(&events, 1)[0], expected, "seed {seed}");
    }
    rig.until_in_flight(0).await;
}
