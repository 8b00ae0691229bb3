//! The OpenAPI document matches the server.

use std::collections::BTreeSet;

use serde_json::{Map, Value, json};

use crate::fuzz::valid;
use crate::rig::{Rig, Setup};
use crate::with;

async fn document(rig: &Rig) -> Value {
    let answer = rig.get("/openapi.json").await;
    assert_eq!(answer.status, 200);
    assert_eq!(answer.headers["content-type"], "application/json");
    answer.json()
}

/// Every `$ref` below `value`.
fn references<'a>(value: &'a Value, found: &mut Vec<&'a str>) {
    match value {
        Value::Object(map) => {
            found.extend(map.get("$ref").and_then(Value::as_str));
            map.values().for_each(|inner| references(inner, found));
        }
        Value::Array(list) => list.iter().for_each(|inner| references(inner, found)),
        _ => {}
    }
}

#[tokio::test]
async fn every_reference_resolves() {
    let rig = Rig::new(Setup::default());
    let document = document(&rig).await;
    assert_eq!(document["openapi"], "3.1.0");
    let mut found = Vec::new();
    references(&document, &mut found);
    assert!(found.len() > 20, "{found:?}");
    for reference in found {
        let pointer = reference.strip_prefix('#').expect("all is in the document");
        assert!(document.pointer(pointer).is_some(), "{reference}");
    }
}

#[tokio::test]
async fn schemas_list_supported_fields_and_no_others() {
    let rig = Rig::new(Setup::default());
    let document = document(&rig).await;
    let chat = &document["components"]["schemas"]["ChatRequest"];
    assert_eq!(chat["additionalProperties"], false);
    assert_eq!(chat["required"], serde_json::json!(["messages"]));
    let fields = &chat["properties"];
    assert_eq!(
        fields["temperature"]["type"],
        serde_json::json!(["number", "null"])
    );
    assert!(fields["temperature"]["description"].is_string());
    // Not implemented; only its harmless value is listed.
    assert_eq!(
        fields["use_beam_search"]["enum"],
        serde_json::json!([false, null])
    );
    assert!(fields["user"].is_object() && fields["kv_transfer_params"].is_null());
    assert!(fields["prompt"].is_null() && fields["messages"].is_object());
}

/// The schema of a reference.
fn resolved<'a>(document: &'a Value, schema: &'a Value) -> &'a Value {
    match schema["$ref"].as_str() {
        Some(reference) => document.pointer(&reference[1..]).expect("it leads somewhere"),
        None => schema,
    }
}

/// The fields of the kinds of bodies that an endpoint takes.
fn kinds<'a>(document: &'a Value, path: &str) -> Vec<&'a Map<String, Value>> {
    let content = &document["paths"][path]["post"]["requestBody"]["content"];
    let schema = resolved(document, &content["application/json"]["schema"]);
    let several = schema["oneOf"].as_array().into_iter().flatten();
    let kinds = several.chain([schema]).map(|kind| resolved(document, kind));
    kinds.filter_map(|kind| kind["properties"].as_object()).collect()
}

/// Every example request with every field of every endpoint: the server knows exactly the fields in the document.
#[tokio::test]
async fn documented_fields_are_accepted_fields() {
    let rig = Rig::new(Setup::default());
    let document = document(&rig).await;
    let requests = valid();
    let of = |path: &str| requests[path].as_array().unwrap().clone();
    let bodies: Vec<_> = requests
        .keys()
        .flat_map(|path| of(path).into_iter().map(move |body| (path, body)))
        .collect();
    let names: BTreeSet<&String> = requests
        .keys()
        .flat_map(|path| kinds(&document, path))
        .flat_map(Map::keys)
        .collect();
    assert!(names.len() > 80, "{names:?}");
    let odd = json!({ "no": "such value" });
    let (mut seen, mut wrong) = (BTreeSet::new(), Vec::new());
    for (path, body) in &bodies {
        let kinds = kinds(&document, path);
        let is_described = |kind: &&&Map<_, _>| {
            body.as_object()
                .unwrap()
                .keys()
                .all(|name| kind.contains_key(name))
        };
        let listed = *kinds
            .iter()
            .find(is_described)
            .expect("all that is taken is described");
        // One of each kind will do.
        if !seen.insert((*path, listed.len())) {
            continue;
        }
        // A field of another kind is one that this is not.
        let others =
            |name: &str| kinds.iter().any(|kind| kind.contains_key(name)) && !listed.contains_key(name);
        for &name in names.iter().filter(|name| !others(name)) {
            let value = match listed.get(name) {
                Some(schema) if schema["enum"].is_array() => schema["enum"][0].clone(),
                Some(schema) if schema["items"]["enum"].is_array() => json!([schema["items"]["enum"][0]]),
                _ => odd.clone(),
            };
            let answer = rig.post(path, with(body.clone(), name, value)).await;
            let refused = answer.text.contains(&format!("unknown field `{name}`"))
                || answer.text.contains(&format!("`{name}` is not supported"));
            if refused == listed.contains_key(name) {
                wrong.push(format!("{path} {name}: {}", answer.text));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    assert!(seen.len() > requests.len(), "{seen:?}");
}

/// The examples are requests that the server accepts.
#[tokio::test]
async fn examples_work() {
    let rig = Rig::new(Setup::default());
    let document = document(&rig).await;
    let mut tried = 0;
    for (path, item) in document["paths"].as_object().unwrap() {
        let content = &item["post"]["requestBody"]["content"]["application/json"];
        let several = content["examples"].as_object().into_iter().flatten();
        let several = several.map(|(_, example)| &example["value"]);
        for example in several.chain(content.get("example")) {
            let answer = rig.post(path, example.clone()).await;
            tried += 1;
            // Valid; refused only because of the kind of model.
            if path == "/v1/embeddings" {
                assert_eq!(answer.error(400)["param"], "model");
                continue;
            }
            if path.ends_with("/rerank") || path.ends_with("/score") {
                assert_eq!(answer.error(404)["code"], "unknown_url");
                continue;
            }
            if example.get("previous_response_id").is_some() {
                // Valid, but the example's id is not stored.
                assert_eq!(answer.error(404)["param"], "previous_response_id");
                continue;
            }
            assert_eq!(answer.status, 200, "{path} {example}: {}", answer.text);
        }
        let has_body = !item["post"]["requestBody"].is_null();
        assert_eq!(has_body, !content.is_null(), "{path}");
    }
    assert!(tried >= 6, "{tried} examples");
}
