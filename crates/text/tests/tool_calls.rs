//! Real functions and right calls of them (Berkeley Function Calling Leaderboard): written in each format and read back.

use std::fs;
use std::sync::Arc;

use crate::common::{follow, read};
use plimsoll_text::grammar::GrammarCompiler;
use plimsoll_text::{CallGrammar, Function, JsonAnswer, Position, Tokenizer, ToolFormat};
use serde_json::{Map, Value};

const FORMATS: &[(ToolFormat, &str)] = &[
    (ToolFormat::Hermes, "\n"),
    (ToolFormat::QwenCoder, "\n"),
    (ToolFormat::LlamaJson, "; "),
    (ToolFormat::Mistral, ""),
    (ToolFormat::Phi4Mini, ""),
    (ToolFormat::Json, "\n"),
    (ToolFormat::Pythonic, ""),
    (ToolFormat::Gemma4, ""),
];

struct Case {
    id: String,
    functions: Arc<[Function]>,
    calls: Vec<(String, Value)>,
}

fn cases() -> Vec<Case> {
    let path = crate::common::cached("test-data/tool-calls.json", "scripts/fetch-tool-calls");
    let data: Value = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let case = |case: &Value| Case {
        id: text(&case["id"]),
        functions: (case["functions"].as_array().unwrap().iter())
            .map(|function| Function {
                name: text(&function["name"]),
                parameters: function["parameters"].as_object().unwrap().clone(),
                strict: false,
            })
            .collect(),
        calls: (case["calls"].as_array().unwrap().iter())
            .map(|call| (text(&call["name"]), call["arguments"].clone()))
            .collect(),
    };
    data["cases"].as_array().unwrap().iter().map(case).collect()
}

#[test]
fn real_calls_are_read_back() {
    let cases = cases();
    assert!(cases.len() > 1000, "{} cases", cases.len());
    for case in &cases {
        for &(format, separator) in FORMATS {
            // A Python list holds several calls; these are lists of one.
            let calls = match format {
                ToolFormat::Pythonic => &case.calls[..1],
                _ => &case.calls,
            };
            let texts: Vec<_> = calls
                .iter()
                .map(|(name, arguments)| format.call(name, arguments))
                .collect();
            let text = texts.join(separator);
            let (content, found) = read(format, &case.functions, &text);
            assert_eq!(
                (content.as_str(), found.as_slice()),
                ("", calls),
                "{} {format:?}\n{text}",
                case.id
            );
        }
    }
}

/// Whether `value` is what a schema of these tests says.
fn fits(schema: &Value, value: &Value) -> bool {
    let items = |items: &[Value]| {
        schema
            .get("items")
            .is_none_or(|inner| items.iter().all(|item| fits(inner, item)))
    };
    let of_enum = schema["enum"].as_array().is_none_or(|list| list.contains(value));
    of_enum
        && match schema["type"].as_str() {
            Some("string") => value.is_string(),
            Some("integer") => value.is_i64(),
            Some("number") => value.is_number(),
            Some("boolean") => value.is_boolean(),
            Some("array") => value.as_array().is_some_and(|list| items(list)),
            Some("object") => value
                .as_object()
                .is_some_and(|fields| in_order(schema, fields).len() == fields.len()),
            _ => true,
        }
}

/// The arguments that fit, in the order of the schema, which a grammar keeps.
fn in_order(schema: &Value, fields: &Map<String, Value>) -> Map<String, Value> {
    let properties = schema["properties"].as_object().into_iter().flatten();
    let fitting = properties.filter_map(|(key, schema)| Some((key, schema, fields.get(key)?)));
    fitting
        .filter(|(_, schema, value)| fits(schema, value))
        .map(|(key, schema, value)| {
            let value = value
                .as_object()
                .map_or(value.clone(), |fields| in_order(schema, fields).into());
            (key.clone(), value)
        })
        .collect()
}

#[test]
fn grammars_allow_right_calls_alone() {
    let tokenizer = Tokenizer::bytes();
    let compiler = GrammarCompiler::new(tokenizer.clone(), tokenizer.eos_ids());
    let mut followed = 0;
    for case in cases().iter().step_by(40) {
        let (name, arguments) = &case.calls[0];
        let function = case
            .functions
            .iter()
            .find(|function| function.name == *name)
            .unwrap();
        let schema = Value::Object(function.parameters.clone());
        let given = arguments.as_object().unwrap();
        let arguments = in_order(&schema, given);
        let required = schema["required"].as_array().into_iter().flatten();
        let whole = required
            .filter_map(Value::as_str)
            .all(|key| given.contains_key(key));
        if !whole || arguments.len() != given.len() {
            continue;
        }
        followed += 1;
        for &(format, _) in FORMATS {
            let lark = format.grammar(&CallGrammar {
                functions: &case.functions,
                several: false,
                is_begun: false,
                or_json: None,
                position: Position::Before,
                token: &|_| None,
            });
            let lark = lark.unwrap();
            let text = format.call(name, &Value::Object(arguments.clone()));
            assert_eq!(
                follow(&compiler, &lark, &text),
                (text.len(), true),
                "{} {format:?}\n{text}\n{lark}",
                case.id
            );
            let other = format.call("no_such_function", &Value::Object(arguments.clone()));
            assert!(follow(&compiler, &lark, &other).0 < other.len(), "{other}");
        }
    }
    assert!(followed > 15, "{followed}");
}

#[test]
fn grammars_of_calls_leave_room() {
    let tokenizer = Tokenizer::bytes();
    let compiler = GrammarCompiler::new(tokenizer.clone(), tokenizer.eos_ids());
    let parameters =
        serde_json::json!({ "properties": { "a": { "type": "integer" }, "b": { "type": "string" } } });
    let functions = [Function {
        name: "f".to_owned(),
        parameters: parameters.as_object().unwrap().clone(),
        strict: true,
    }];
    let base = CallGrammar {
        functions: &functions,
        several: true,
        is_begun: false,
        or_json: None,
        position: Position::Before,
        token: &|_| None,
    };
    let schema =
        serde_json::json!({ "type": "object", "properties": { "c": { "type": "null" } }, "required": ["c"] });
    let or_spaced = |whitespace| CallGrammar {
        or_json: Some(JsonAnswer {
            schema: schema.as_object().unwrap(),
            strict: true,
            whitespace,
        }),
        ..base
    };
    let (or_json, or_tight) = (or_spaced(None), or_spaced(Some("")));
    let begun = CallGrammar {
        is_begun: true,
        ..base
    };
    let call = ToolFormat::Hermes.call("f", &serde_json::json!({ "a": 1 }));
    let behind = call.strip_prefix("<tool_call>").unwrap();
    let cases = [
        (ToolFormat::Hermes, base, format!("\n\n{call}\n{call}"), true),
        (ToolFormat::Hermes, base, "So.".to_owned(), false),
        (ToolFormat::Hermes, base, format!("{call} so"), false),
        (ToolFormat::Hermes, or_json, "{\"c\": null}".to_owned(), true),
        (ToolFormat::Hermes, or_json, call.clone(), true),
        (ToolFormat::Hermes, or_tight, "{\"c\": null}".to_owned(), false),
        (ToolFormat::Hermes, or_tight, "{\"c\":null}".to_owned(), true),
        (ToolFormat::Hermes, or_tight, call.clone(), true),
        (ToolFormat::Hermes, begun, behind.to_owned(), true),
        (ToolFormat::Hermes, begun, format!("{behind}\n{call}"), true),
        (ToolFormat::Hermes, begun, call.clone(), false),
        (
            ToolFormat::Pythonic,
            base,
            "[f(b=\"x\"), f(), f(a=1, b=\"\")]".to_owned(),
            true,
        ),
        (ToolFormat::Pythonic, base, "[f(a=\"x\")]".to_owned(), false),
        (
            ToolFormat::Json,
            base,
            "[{\"name\": \"f\", \"arguments\": {}}, {\"name\": \"f\", \"arguments\": {}}]".to_owned(),
            true,
        ),
        (
            ToolFormat::LlamaJson,
            base,
            "{\"name\": \"f\", \"parameters\": {\"a\":1}}; {\"name\": \"f\", \"parameters\": {}}".to_owned(),
            true,
        ),
        (
            ToolFormat::Mistral,
            base,
            "[TOOL_CALLS][{\"name\": \"f\", \"arguments\": {\"a\": \"1".to_owned(),
            false,
        ),
    ];
    for (format, grammar, text, right) in cases {
        let lark = format.grammar(&grammar).unwrap();
        assert_eq!(
            follow(&compiler, &lark, &text) == (text.len(), true),
            right,
            "{format:?}\n{text}\n{lark}"
        );
    }
}
