//! Arguments that are written one by one, in Python or in tags: what is read, and what grammars allow.

use std::sync::{Arc, LazyLock};

use crate::common::{follow, read, told};
use plimsoll_text::grammar::{GrammarCompiler, GrammarSpec};
use plimsoll_text::{CallGrammar, Function, Position, Tokenizer, ToolFormat};
use serde_json::{Value, json};

static COMPILER: LazyLock<GrammarCompiler> = LazyLock::new(|| {
    let tokenizer = Tokenizer::bytes();
    GrammarCompiler::new(tokenizer.clone(), tokenizer.eos_ids())
});

const FORMATS: [ToolFormat; 2] = [ToolFormat::Pythonic, ToolFormat::QwenCoder];

fn functions(parameters: Value, strict: bool) -> Arc<[Function]> {
    let Value::Object(parameters) = parameters else {
        panic!("a schema is an object");
    };
    Arc::new([Function {
        name: "f".to_owned(),
        parameters,
        strict,
    }])
}

/// The grammar of one call.
fn grammar(format: ToolFormat, functions: &[Function]) -> Result<String, String> {
    let calls = CallGrammar {
        functions,
        several: false,
        is_begun: false,
        or_json: None,
        position: Position::Before,
        token: &|_| None,
    };
    format.grammar(&calls).map_err(|error| error.to_string())
}

fn refusal(format: ToolFormat, parameters: &Value, strict: bool) -> String {
    let lark = match grammar(format, &functions(parameters.clone(), strict)) {
        Ok(lark) => lark,
        Err(error) => return error,
    };
    let compiled = COMPILER.compile(&GrammarSpec::Lark(lark.clone()).into());
    compiled.expect_err(&lark).to_string()
}

/// Whether a grammar of strict calls allows one with these arguments, as the format writes it. What it allows is read back.
fn allows(format: ToolFormat, parameters: &Value, arguments: &Value) -> bool {
    let functions = functions(parameters.clone(), true);
    let lark = grammar(format, &functions).unwrap();
    let text = format.call("f", arguments);
    let allowed = follow(&COMPILER, &lark, &text) == (text.len(), true);
    if allowed {
        let (content, calls) = read(format, &functions, &text);
        let expected = [("f".to_owned(), arguments.clone())];
        assert_eq!(
            (content.as_str(), calls.as_slice()),
            ("", &expected[..]),
            "{text}"
        );
    }
    allowed
}

#[test]
fn json_among_arguments_means_what_it_means_in_json() {
    let emoji = json!({ "text": "\u{1f600}/" });
    let functions = functions(
        json!({ "properties": { "text": { "type": "string" }, "list": { "type": "array" } } }),
        false,
    );
    let cases = [
        (r#"[f(text="\ud83d\ude00\/")]"#, &emoji),
        (r#"[f(text='\ud83d\ude00/')]"#, &emoji),
        (
            r#"[f(list=[True, "\ud83d\ude00"])]"#,
            &json!({ "list": [true, "\u{1f600}"] }),
        ),
        (r#"[f(list=["\d", null])]"#, &json!({ "list": ["\\d", null] })),
    ];
    for (text, expected) in cases {
        let (content, calls) = read(ToolFormat::Pythonic, &functions, text);
        assert_eq!((content.as_str(), &calls[0].1), ("", expected), "{text}");
    }
    let xml = "<function=f><parameter=list>[\"\\ud83d\\ude00\"]</parameter></function>";
    let (_, calls) = read(ToolFormat::QwenCoder, &functions, xml);
    assert_eq!(calls[0].1, json!({ "list": ["\u{1f600}"] }));
}

#[test]
fn texts_that_look_like_something_else_stay_texts() {
    let schemas = [
        json!({ "enum": ["1", "2"] }),
        json!({ "const": "1" }),
        json!({ "type": ["string"], "maxLength": 3 }),
        json!({ "type": ["string", "null"], "enum": ["1"] }),
        json!({ "$ref": "#/$defs/digit" }),
        json!({ "description": "anything" }),
    ];
    for schema in schemas {
        let whole = json!({ "properties": { "a": schema }, "$defs": { "digit": { "enum": ["1", "2"] } } });
        assert!(
            allows(ToolFormat::QwenCoder, &whole, &json!({ "a": "1" })),
            "{schema}"
        );
        assert!(
            allows(ToolFormat::Pythonic, &whole, &json!({ "a": "1" })),
            "{schema}"
        );
    }
    for schema in [
        json!({ "enum": ["1", 1] }),
        json!({ "minimum": 1 }),
        json!({ "type": "integer" }),
    ] {
        let whole = json!({ "properties": { "a": schema } });
        assert!(
            allows(ToolFormat::QwenCoder, &whole, &json!({ "a": 1 })),
            "{schema}"
        );
    }
}

#[test]
fn what_a_schema_says_of_text_is_enforced() {
    let long = json!({ "type": "string", "minLength": 2, "maxLength": 3 });
    let cases = [
        (json!({ "type": "string", "pattern": "^[a-z]+$" }), "abc", "ab1"),
        (json!({ "type": "string", "pattern": "^[a-z]+$" }), "abc", "ab\n"),
        (json!({ "type": "string", "pattern": "\\d/" }), "ab\n1/c", "ab/1"),
        (json!({ "type": "string", "pattern": "^a|b$" }), "a1", "1a"),
        (json!({ "type": "string", "pattern": "^a|b$" }), "1b", "b1"),
        (json!({ "pattern": "^(x|[|])\\$$" }), "|$", "|"),
        (json!({ "type": "string", "const": "yes" }), "yes", "yes!"),
        (
            json!({ "type": "string", "enum": ["a", "ab"], "minLength": 2 }),
            "ab",
            "a",
        ),
        (long.clone(), "é\n", "é"),
        (long, "abc", "abcd"),
        (
            json!({ "type": "string", "maxLength": 2, "pattern": "b" }),
            "ab",
            "abb",
        ),
    ];
    for (schema, right, wrong) in cases {
        let whole = json!({ "properties": { "a": schema }, "required": ["a"] });
        for format in FORMATS {
            let says = |text: &str| allows(format, &whole, &json!({ "a": text }));
            assert!(says(right), "{format:?} {schema} {right:?}");
            assert!(!says(wrong), "{format:?} {schema} {wrong:?}");
        }
    }
    // The first end of a text is its end.
    let free = json!({ "properties": { "a": { "type": "string" } } });
    assert!(allows(
        ToolFormat::QwenCoder,
        &free,
        &json!({ "a": "a\n\n</param>\n" })
    ));
    assert!(!allows(
        ToolFormat::QwenCoder,
        &free,
        &json!({ "a": "</parameter>x" })
    ));
}

#[test]
fn what_no_text_can_be_held_to_is_refused_by_name() {
    let of = |schema: Value| json!({ "properties": { "when": schema } });
    let cases = [
        (
            of(json!({ "type": "string", "format": "date" })),
            "`format` of when",
        ),
        (
            of(json!({ "type": "string", "anyOf": [{ "minLength": 1 }] })),
            "`anyOf` of when",
        ),
        (
            of(json!({ "type": "string", "allOf": [{ "$ref": "#/$defs/a" }] })),
            "`allOf` of when",
        ),
    ];
    for (schema, expected) in cases {
        let error = refusal(ToolFormat::QwenCoder, &schema, true);
        assert!(
            error.contains("parameters of f") && error.contains(expected),
            "{error}"
        );
        let lenient = grammar(ToolFormat::QwenCoder, &functions(schema, false)).unwrap();
        let call = ToolFormat::QwenCoder.call("f", &json!({ "when": "x" }));
        assert_eq!(follow(&COMPILER, &lenient, &call), (call.len(), true));
    }
    // Nothing at all would be left to say.
    for (schema, expected) in [
        (
            json!({ "type": "string", "minLength": 2, "maxLength": 1 }),
            "allows no string",
        ),
        (
            json!({ "type": "string", "enum": ["</parameter>"] }),
            "allows no string",
        ),
        (
            json!({ "type": "string", "maxLength": "1" }),
            "`maxLength` of when",
        ),
    ] {
        for strict in [false, true] {
            let error = refusal(ToolFormat::QwenCoder, &of(schema.clone()), strict);
            assert!(error.contains(expected), "{error}");
        }
    }
}

#[test]
fn schemas_without_properties_of_their_own_are_followed() {
    let point = json!({
        "type": "object", "properties": { "x": { "type": "integer" }, "y": { "type": "integer" } }, "required": ["x"],
    });
    let named = json!({ "properties": { "name": { "type": "string" } }, "required": ["name"] });
    let xy = json!({ "x": 1, "y": 2 });
    let cases = [
        (
            json!({ "$ref": "#/$defs/point", "$defs": { "point": point } }),
            vec![xy.clone(), json!({ "x": 1 })],
            vec![json!({}), json!({ "x": "a" }), json!({ "y": 1 })],
        ),
        (
            json!({ "type": "object", "allOf": [point, named] }),
            vec![json!({ "x": 1, "name": "1" })],
            vec![xy.clone(), json!({ "name": "a" })],
        ),
        (
            json!({ "anyOf": [point, { "$ref": "#/$defs/n" }], "$defs": { "n": named } }),
            vec![xy.clone(), json!({ "name": "n" })],
            vec![json!({}), json!({ "x": 1, "name": "n" })],
        ),
        (
            json!({ "properties": { "x": {}, "y": {} }, "anyOf": [{ "required": ["x"] }, { "required": ["y"] }] }),
            vec![json!({ "x": "1" }), json!({ "y": "1" })],
            vec![json!({})],
        ),
        (
            json!({ "properties": { "b": { "type": "null" } }, "additionalProperties": { "type": "integer" } }),
            vec![
                json!({}),
                json!({ "a": 1 }),
                json!({ "b": null, "bc": 1, "a": 2 }),
            ],
            vec![json!({ "a": "x" }), json!({ "b": 1 })],
        ),
        (
            json!({ "additionalProperties": true, "required": ["q"] }),
            vec![json!({ "q": "1", "a": "b" })],
            vec![json!({ "a": "b" })],
        ),
        // References are to the whole.
        (
            json!({
                "properties": { "x": { "type": "integer" }, "l": { "type": "array", "items": { "$ref": "#/properties/x" } } },
            }),
            vec![json!({ "l": [1] })],
            vec![json!({ "l": ["a"] })],
        ),
        (
            json!({
                "type": "object", "properties": { "x": { "type": "integer" }, "more": { "type": "array", "items": { "$ref": "#" } } },
                "additionalProperties": false,
            }),
            vec![json!({ "more": [{ "more": [{ "x": 1 }] }] })],
            vec![json!({ "more": [[]] }), json!({ "more": [{ "z": 1 }] })],
        ),
        (
            json!({ "allOf": [{ "properties": { "a": { "minimum": 3 } } }, { "properties": { "a": { "type": "integer" } } }] }),
            vec![json!({ "a": 3 })],
            vec![json!({ "a": 2 }), json!({ "a": "x" })],
        ),
    ];
    for (schema, right, wrong) in cases {
        for format in FORMATS {
            for arguments in &right {
                assert!(
                    allows(format, &schema, arguments),
                    "{format:?} {schema} {arguments}"
                );
            }
            for arguments in &wrong {
                assert!(
                    !allows(format, &schema, arguments),
                    "{format:?} {schema} {arguments}"
                );
            }
        }
    }
}

#[test]
fn schemas_that_say_more_than_arguments_can_are_refused_or_left_to_the_model() {
    let cases = [
        (
            json!({ "patternProperties": { "^a": {} } }),
            "`patternProperties`",
        ),
        (json!({ "minProperties": 1 }), "`minProperties`"),
        (
            json!({ "oneOf": [{ "required": ["a"] }, { "required": ["b"] }] }),
            "`oneOf`",
        ),
        (
            json!({ "allOf": [{ "not": { "required": ["a"] } }] }),
            "`not` at /allOf/0",
        ),
        (json!({ "$ref": "https://example.com/a" }), "`$ref`"),
        (
            json!({ "$ref": "#/$defs/a", "$defs": { "a": { "$ref": "#/$defs/a" } } }),
            "the schema at /$ref",
        ),
        (json!({ "anyOf": [] }), "`anyOf`"),
        (
            json!({ "properties": {}, "required": ["a"], "additionalProperties": false }),
            "`required`",
        ),
    ];
    for (schema, expected) in cases {
        for format in FORMATS {
            let error = refusal(format, &schema, true);
            assert!(error.contains(expected), "{format:?} {error}");
            assert!(
                grammar(format, &functions(schema.clone(), false)).is_ok(),
                "{schema}"
            );
        }
    }
    // Not forced to be nothing.
    let lenient = grammar(
        ToolFormat::Pythonic,
        &functions(json!({ "patternProperties": { "^a": {} } }), false),
    );
    let call = "[f(a1=[2])]";
    assert_eq!(follow(&COMPILER, &lenient.unwrap(), call), (call.len(), true));
    // A whole that comes along with each of its parts has an end.
    let part = json!({ "type": "array", "items": { "$ref": "#/properties/a0" } });
    let parts: serde_json::Map<_, _> = (0..2000).map(|i| (format!("a{i}"), part.clone())).collect();
    let error = refusal(ToolFormat::Pythonic, &json!({ "properties": parts }), false);
    assert!(error.contains("at most"), "{error}");
    // References that lead to each other take no time.
    let twice = json!({ "allOf": vec![json!({ "$ref": "#/$defs/a" }); 50] });
    let schema = json!({ "$ref": "#/$defs/a", "$defs": { "a": twice } });
    assert!(refusal(ToolFormat::Pythonic, &schema, true).contains("the schema at"));
}

#[test]
fn any_name_that_a_grammar_allows_is_read() {
    let schema = json!({
        "properties": { "$filter": { "type": "integer" }, "a b": {}, "c,d": {}, "e)": {}, "\"q\"": {} },
        "required": ["$filter"],
    });
    let arguments = json!({ "$filter": 1, "a b": "x", "c,d": "y", "e)": "z", "\"q\"": "!" });
    for format in FORMATS {
        assert!(allows(format, &schema, &arguments), "{format:?}");
    }
    let bad =
        |required: Value| json!({ "properties": { "a=b": {}, "a>b": {}, " c": {} }, "required": required });
    assert!(allows(
        ToolFormat::Pythonic,
        &bad(json!([])),
        &json!({ "a>b": "1" })
    ));
    assert!(!allows(
        ToolFormat::Pythonic,
        &bad(json!([])),
        &json!({ "a=b": "1" })
    ));
    assert!(!allows(
        ToolFormat::QwenCoder,
        &bad(json!([])),
        &json!({ "a>b": "1" })
    ));
    for (format, name) in [(ToolFormat::Pythonic, "a=b"), (ToolFormat::QwenCoder, "a>b")] {
        for name in [name, " c"] {
            let error = refusal(format, &bad(json!([name])), false);
            assert!(
                error.contains(name) && error.contains("cannot be written"),
                "{error}"
            );
        }
    }
    // Behind what is certain to be a call, a name may be unknown too.
    let unknown = functions(json!({}), false);
    assert_eq!(
        told(ToolFormat::Pythonic, &unknown, "[f(a=1, $b=2)]"),
        (String::new(), vec![("f".into(), r#"{"a": 1, "$b": 2}"#.into())])
    );
    assert_eq!(
        told(ToolFormat::Pythonic, &unknown, "[f($b=2)]"),
        ("[f($b=2)]".into(), vec![])
    );
}

#[test]
fn nothing_is_lost_of_calls_that_break_off() {
    let functions = functions(json!({}), false);
    let call = |arguments: &str| ("f".to_owned(), arguments.to_owned());
    let cases = [
        ("[f(a=1, 2)]", ", 2)]", vec![call(r#"{"a": 1}"#)]),
        ("[f(a=1, \"x=y\")]", ", \"x=y\")]", vec![call(r#"{"a": 1}"#)]),
        ("[f(a=1,, b=2)]", ",, b=2)]", vec![call(r#"{"a": 1}"#)]),
        ("[f(a=1), 2]", ", 2]", vec![call(r#"{"a": 1}"#)]),
        ("[f(a=1), g(2)]", ", g(2)]", vec![call(r#"{"a": 1}"#)]),
        ("[f(a=1), f(2)]", ", f(2)]", vec![call(r#"{"a": 1}"#)]),
        ("[f(a=1) and more", " and more", vec![call(r#"{"a": 1}"#)]),
        ("[f(), f(b=2), 3]", ", 3]", vec![call("{}"), call(r#"{"b": 2}"#)]),
        ("[f(2, a=1)]", "[f(2, a=1)]", vec![]),
        // Cut off: open where it was, and a separator is none.
        ("[f(a=1,", "", vec![call(r#"{"a": 1"#)]),
        ("[f(a=1, b", "", vec![call(r#"{"a": 1"#)]),
        ("[f(a=1), ", "", vec![call(r#"{"a": 1}"#)]),
        ("[f(a=1), g", ", g", vec![call(r#"{"a": 1}"#)]),
        ("[f(a=1, )] done", " done", vec![call(r#"{"a": 1}"#)]),
    ];
    for (text, content, calls) in cases {
        assert_eq!(
            told(ToolFormat::Pythonic, &functions, text),
            (content.to_owned(), calls),
            "{text}"
        );
    }
}
