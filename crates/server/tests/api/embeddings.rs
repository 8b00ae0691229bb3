//! `/v1/embeddings` over a simulated model.

use std::time::Duration;

use axum::http::StatusCode;
use plimsoll_core::{Limits, Matryoshka, Pooling, Request, RequestId, RequestOptions};
use plimsoll_server::EmbeddingInfo;
use plimsoll_sim::{SimModel, pooled_oracle};
use serde_json::{Value, json};

use crate::rig::{Rig, Setup};
use crate::{CHAT, COMPLETIONS, chat};

const EMBEDDINGS: &str = "/v1/embeddings";

fn setup(pooling: Pooling) -> Setup {
    Setup {
        embedding: Some(EmbeddingInfo {
            pooling,
            normalize: false,
            size: SimModel::WIDTH,
            matryoshka: Matryoshka::Sizes(vec![4]),
            scorer: None,
        }),
        ..Setup::default()
    }
}

/// The vector of a text, by definition.
fn expected(text: &str, pooling: Pooling) -> Vec<f32> {
    let options = RequestOptions {
        prompt: text.bytes().map(u32::from).collect(),
        pooling: Some(pooling),
        ..Default::default()
    };
    let limits = Limits {
        max_model_len: 1 << 20,
        kv_capacity_tokens: 1 << 20,
        vocab_size: 257,
        images: None,
    };
    pooled_oracle(&Request::new(RequestId(0), options, &limits).unwrap()).unwrap()
}

fn vectors(answer: &Value) -> Vec<Vec<f32>> {
    let data = answer["data"].as_array().unwrap();
    let vector = |(index, item): (usize, &Value)| {
        assert_eq!(item["index"], json!(index));
        serde_json::from_value(item["embedding"].clone()).unwrap()
    };
    data.iter().enumerate().map(vector).collect()
}

/// Many more inputs than the engine's capacity, each of a different length.
#[tokio::test]
async fn inputs_beyond_the_engines_capacity_are_queued() {
    for pooling in [Pooling::Last, Pooling::Mean] {
        let rig = Rig::new(Setup {
            max_num_seqs: 2,
            max_queue: 3,
            ..setup(pooling)
        });
        let texts: Vec<String> = (0..40)
            .map(|i| format!("text {i} {}", "x".repeat(7 * i % 90)))
            .collect();
        let answer = rig.post(EMBEDDINGS, json!({ "input": texts })).await;
        assert_eq!(answer.status, StatusCode::OK, "{}", answer.text);
        let answer: Value = serde_json::from_str(&answer.text).unwrap();
        let wanted: Vec<_> = texts.iter().map(|text| expected(text, pooling)).collect();
        assert_eq!(vectors(&answer), wanted, "{pooling:?}");
        let tokens: usize = texts.iter().map(String::len).sum();
        assert_eq!(
            answer["usage"],
            json!({ "prompt_tokens": tokens, "total_tokens": tokens })
        );
        assert_eq!(rig.state.engine().stats().scheduler.finished_pooled, 40);
    }
}

/// An input that waits within its request does not count as refused: an alert watches that metric.
#[tokio::test]
async fn only_refused_requests_count_as_refused() {
    let rig = Rig::new(Setup {
        max_num_seqs: 1,
        max_queue: 1,
        ..setup(Pooling::Last)
    });
    rig.set_step(Duration::from_millis(2));
    let texts: Vec<String> = (0..20).map(|i| format!("text {i}")).collect();
    let all = (0..6).map(|_| rig.post(EMBEDDINGS, json!({ "input": texts })));
    let answers = futures::future::join_all(all).await;
    let refused = answers.iter().filter(|answer| answer.status == 429).count();
    assert!(refused < 6, "{answers:?}");
    assert_eq!(rig.state.engine().stats().refused, refused as u64);
}

#[tokio::test]
async fn a_disconnected_client_cancels_its_inputs() {
    let rig = Rig::new(setup(Pooling::Last));
    rig.set_step(Duration::from_millis(20));
    let texts: Vec<String> = (0..500).map(|i| format!("text {i}")).collect();
    let slow = rig.post(EMBEDDINGS, json!({ "input": texts }));
    assert!(
        tokio::time::timeout(Duration::from_millis(200), slow)
            .await
            .is_err()
    );
    rig.until_in_flight(0).await;
}

#[tokio::test]
async fn vectors_and_inputs_are_truncated() {
    let rig = Rig::new(setup(Pooling::Last));
    let answer = |body: Value| async {
        let answer = rig.post(EMBEDDINGS, body).await;
        assert_eq!(answer.status, StatusCode::OK, "{}", answer.text);
        vectors(&serde_json::from_str(&answer.text).unwrap()).swap_remove(0)
    };
    let whole = expected("abcdef", Pooling::Last);
    assert_eq!(
        answer(json!({ "input": "abcdef", "dimensions": 4 })).await,
        whole[..4]
    );
    let short = json!({ "input": "abcdef", "truncate_prompt_tokens": 3, "user": "u" });
    assert_eq!(answer(short).await, expected("abc", Pooling::Last));
    let tokens = json!({ "input": [[97, 98]], "truncate_prompt_tokens": -1 });
    assert_eq!(answer(tokens).await, expected("ab", Pooling::Last));
}

/// The template of the rig shows each message as `<role>content</>`.
#[tokio::test]
async fn a_conversation_has_a_vector() {
    let rig = Rig::new(setup(Pooling::Last));
    let messages = json!([{ "role": "user", "content": "ab" }, { "role": "assistant", "content": "c" }]);
    let cases = [
        (json!({ "messages": messages }), "<user>ab</><assistant>c</>"),
        (
            json!({ "messages": messages, "add_generation_prompt": true, "chat_template_kwargs": { "suffix": "!" } }),
            "<user>ab</><assistant>c</><assistant>!",
        ),
        (
            json!({ "messages": messages, "truncate_prompt_tokens": 4 }),
            "<use",
        ),
        (
            json!({ "messages": messages, "truncate_prompt_tokens": 4, "truncation_side": "left" }),
            "c</>",
        ),
    ];
    for (body, text) in cases {
        let answer = rig.post(EMBEDDINGS, body.clone()).await;
        assert_eq!(answer.status, StatusCode::OK, "{}", answer.text);
        let answer = answer.json();
        assert_eq!(vectors(&answer), [expected(text, Pooling::Last)], "{body}");
        assert_eq!(answer["usage"]["prompt_tokens"], text.len());
    }
}

#[tokio::test]
async fn texts_are_compared_by_the_cosine_of_their_vectors() {
    let rig = Rig::new(setup(Pooling::Mean));
    let cosine = |a: &str, b: &str| {
        let (a, b) = (expected(a, Pooling::Mean), expected(b, Pooling::Mean));
        let dot = |a: &[f32], b: &[f32]| {
            a.iter()
                .zip(b)
                .map(|(&a, &b)| f64::from(a) * f64::from(b))
                .sum::<f64>()
        };
        dot(&a, &b) / (dot(&a, &a) * dot(&b, &b)).sqrt()
    };
    let close = |value: &Value, wanted: f64| (value.as_f64().unwrap() - wanted).abs() < 1e-6;
    let documents = ["a mark", "on a hull", "of a ship"];
    for path in ["/score", "/v1/score"] {
        for (body, pairs) in [
            (
                json!({ "text_1": "line", "text_2": documents }),
                documents.map(|text| ("line", text)),
            ),
            (
                json!({ "queries": ["line"], "documents": documents }),
                documents.map(|text| ("line", text)),
            ),
            (
                json!({ "data_1": documents, "data_2": documents }),
                documents.map(|text| (text, text)),
            ),
        ] {
            let answer = rig.post(path, body.clone()).await.json();
            assert_eq!(answer["object"], "list");
            let data = answer["data"].as_array().unwrap();
            assert_eq!(data.len(), 3, "{body}");
            for (index, (score, (a, b))) in data.iter().zip(pairs).enumerate() {
                assert_eq!(
                    (&score["index"], &score["object"]),
                    (&json!(index), &json!("score"))
                );
                assert!(close(&score["score"], cosine(a, b)), "{body}: {score}");
            }
        }
    }
    let mut best: Vec<_> = documents
        .iter()
        .map(|text| (cosine("line", text), *text))
        .collect();
    best.sort_by(|a, b| b.0.total_cmp(&a.0));
    for path in ["/rerank", "/v1/rerank", "/v2/rerank"] {
        let listed = json!([documents[0], { "text": documents[1] }, documents[2]]);
        let body = json!({ "query": "line", "documents": listed, "top_n": 2, "model": "sim" });
        let answer = rig.post(path, body).await.json();
        let tokens = "line".len() + documents.iter().map(|text| text.len()).sum::<usize>();
        assert_eq!(
            answer["usage"],
            json!({ "prompt_tokens": tokens, "total_tokens": tokens })
        );
        let results = answer["results"].as_array().unwrap();
        assert_eq!(results.len(), 2, "{answer}");
        for (result, (score, text)) in results.iter().zip(&best) {
            assert!(close(&result["relevance_score"], *score), "{result}");
            assert_eq!(result["document"], json!({ "text": text }));
            assert_eq!(documents[result["index"].as_u64().unwrap() as usize], *text);
        }
    }
    // Without texts, and each document truncated to one letter.
    let short =
        json!({ "query": "o", "documents": documents, "return_documents": false, "max_tokens_per_doc": 1 });
    let answer = rig.post("/rerank", short).await.json();
    assert_eq!(answer["usage"]["total_tokens"], 4);
    let first = &answer["results"][0];
    assert!(
        close(&first["relevance_score"], 1.0) && first.get("document").is_none(),
        "{first}"
    );
}

#[tokio::test]
async fn wrong_texts_to_compare_are_named() {
    let rig = Rig::new(setup(Pooling::Last));
    let long = "x".repeat(2000);
    for (path, body, param, message) in [
        ("/score", json!({ "text_2": "a" }), "text_1", "missing field"),
        (
            "/score",
            json!({ "text_1": "a", "queries": "b", "text_2": "c" }),
            "queries",
            "names of the same",
        ),
        (
            "/score",
            json!({ "text_1": ["a", "b"], "text_2": "c" }),
            "text_1",
            "there must be as many",
        ),
        (
            "/score",
            json!({ "text_1": "a", "text_2": [] }),
            "text_2",
            "no texts",
        ),
        (
            "/score",
            json!({ "text_1": "", "text_2": "b" }),
            "text_1",
            "text_1: the prompt is empty",
        ),
        (
            "/score",
            json!({ "text_1": "a", "text_2": ["b", long] }),
            "text_2",
            "text_2[1]: ",
        ),
        ("/rerank", json!({ "query": "a" }), "documents", "missing field"),
        (
            "/rerank",
            json!({ "query": "a", "documents": 1 }),
            "documents",
            "expected a string, or a list",
        ),
        (
            "/rerank",
            json!({ "query": "a", "documents": ["b", 1] }),
            "documents[1]",
            "expected a string or an object with `text`",
        ),
        (
            "/rerank",
            json!({ "query": "a", "documents": ["b", { "text": 1 }] }),
            "documents[1].text",
            "expected a string",
        ),
        (
            "/score",
            json!({ "text_1": "a", "text_2": ["b", 1] }),
            "text_2[1]",
            "expected a string",
        ),
        (
            "/rerank",
            json!({ "query": "a", "documents": ["b"], "max_tokens_per_doc": -1 }),
            "max_tokens_per_doc",
            "-1",
        ),
        (
            "/rerank",
            json!({ "query": "a", "documents": ["b"], "rank": 1 }),
            "rank",
            "unknown field",
        ),
    ] {
        let error = rig.post(path, body.clone()).await.error(400);
        assert_eq!(error["param"], param, "{body}: {error}");
        assert!(
            error["message"].as_str().unwrap().contains(message),
            "{body}: {error}"
        );
    }
    assert_eq!(rig.state.engine().stats().submitted, 0);
    let generator = Rig::new(Setup::default());
    let error = generator
        .post("/v1/rerank", json!({ "query": "a", "documents": ["b"] }))
        .await
        .error(404);
    assert_eq!(error["code"], "unknown_url");
    assert!(
        error["message"].as_str().unwrap().contains("--runner pooling"),
        "{error}"
    );
}

#[tokio::test]
async fn wrong_requests_name_field_and_input() {
    let rig = Rig::new(setup(Pooling::Last));
    let long = "x".repeat(1025);
    let cases = [
        (json!({}), "input", "missing field"),
        (json!({ "input": [] }), "input", "input has no texts"),
        (json!({ "input": "" }), "input", "input[0]: the text is empty"),
        (json!({ "messages": [] }), "messages", "must not be empty"),
        (
            json!({ "input": ["a", ""] }),
            "input",
            "input[1]: the text is empty",
        ),
        (
            json!({ "input": [[1], []] }),
            "input",
            "input[1]: the prompt is empty",
        ),
        (json!({ "input": { "a": 1 } }), "input", "expected a string"),
        (json!({ "input": ["a", "b", long] }), "input", "input[2]: "),
        (
            json!({ "input": [[1], [257]] }),
            "input",
            "input[1]: token id 257",
        ),
        (json!({ "input": vec!["a"; 2049] }), "input", "has 2049 texts"),
        (
            json!({ "input": "a", "dimensions": 0 }),
            "dimensions",
            "between 1 and 16",
        ),
        (json!({ "input": "a", "dimensions": 5 }), "dimensions", "[4]"),
        (
            json!({ "input": "a", "encoding_format": "binary" }),
            "encoding_format",
            "binary",
        ),
        (
            json!({ "input": "a", "truncate_prompt_tokens": 0 }),
            "truncate_prompt_tokens",
            "between 1 and 1024",
        ),
        (
            json!({ "input": "a", "messages": [] }),
            "messages",
            "cannot both be set",
        ),
        (json!({ "input": "a", "inputs": "b" }), "inputs", "unknown field"),
    ];
    for (body, param, message) in cases {
        let answer = rig.post(EMBEDDINGS, body.clone()).await;
        assert_eq!(answer.status, StatusCode::BAD_REQUEST, "{body}");
        let error: Value = serde_json::from_str(&answer.text).unwrap();
        assert_eq!(error["error"]["param"], json!(param), "{}", answer.text);
        let said = error["error"]["message"].as_str().unwrap();
        assert!(said.contains(message), "{said} does not say {message}");
    }
    assert_eq!(
        rig.state.engine().stats().submitted,
        0,
        "all are found wrong before any is computed"
    );
}

#[tokio::test]
async fn each_kind_of_model_names_its_endpoint() {
    let embedder = Rig::new(setup(Pooling::Mean));
    for (path, body) in [(CHAT, chat("x")), (COMPLETIONS, json!({ "prompt": "x" }))] {
        let answer = embedder.post(path, body).await;
        assert_eq!(answer.status, StatusCode::BAD_REQUEST, "{}", answer.text);
        assert!(answer.text.contains("use /v1/embeddings"), "{}", answer.text);
    }
    let tokens = embedder.post("/tokenize", json!({ "prompt": "ab" })).await;
    assert_eq!(tokens.status, StatusCode::OK);
    let generator = Rig::new(Setup::default());
    let answer = generator.post(EMBEDDINGS, json!({ "input": "x" })).await;
    assert_eq!(answer.status, StatusCode::BAD_REQUEST, "{}", answer.text);
    assert!(answer.text.contains("--runner pooling"), "{}", answer.text);
}
