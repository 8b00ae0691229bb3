use plimsoll_core::{Constraints, Progress, mask};
use serde_json::json;

use super::*;
use crate::Tokenizer;

const EOS: u32 = 256;

fn compiler() -> GrammarCompiler {
    GrammarCompiler::new(Tokenizer::bytes(), &[EOS])
}

fn schema(schema: Value) -> GrammarSpec {
    GrammarSpec::JsonSchema { schema, strict: true }
}

fn begin(grammar: impl Into<Grammar>) -> Constraints {
    let compiled = compiler().compile(&grammar.into()).unwrap();
    Constraints::new(vec![compiled.constraint(&[EOS])])
}

fn refusal(grammar: impl Into<Grammar>) -> String {
    compiler().compile(&grammar.into()).unwrap_err().to_string()
}

fn token(byte: u8) -> u32 {
    byte.into()
}

fn allowed(constraints: &mut Constraints) -> Vec<u32> {
    let mut mask = [0; 9];
    constraints.fill(&mut mask);
    (0..288).filter(|&token| mask::allows(&mask, token)).collect()
}

/// Follows `text` byte by byte; whether it may end behind it, and must. `None` where some byte is not allowed.
fn follow(grammar: impl Into<Grammar>, text: &str) -> Option<(bool, bool)> {
    let mut constraints = begin(grammar);
    let mut progress = Progress::Open;
    for byte in text.bytes() {
        if progress == Progress::Complete || !allowed(&mut constraints).contains(&byte.into()) {
            return None;
        }
        progress = constraints.accept(byte.into()).unwrap();
    }
    let must = progress == Progress::Complete;
    Some((must || allowed(&mut constraints).contains(&EOS), must))
}

#[test]
fn each_kind_of_grammar_allows_its_texts_alone() {
    let person = json!({
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0, "maximum": 150}},
        "required": ["name", "age"],
        "additionalProperties": false,
    });
    let lark = "start: \"a\" (\"+\" \"a\")*";
    let ebnf = "root ::= sum-of # the whole\nsum-of ::= [a-c] (\"+\" [a-c]){0,2} | \"\\\"\"";
    let choice = || GrammarSpec::Choice(vec!["red".into(), "green \"x\"".into()]);
    // A grammar, a text, and whether it may and must end there, if it is a beginning at all.
    type Case = (GrammarSpec, &'static str, Option<(bool, bool)>);
    let cases: Vec<Case> = vec![
        (GrammarSpec::JsonObject, r#"{"a": [1, null]}"#, Some((true, true))),
        (GrammarSpec::JsonObject, r#"{"a""#, Some((false, false))),
        (GrammarSpec::JsonObject, "[", None),
        (
            schema(person.clone()),
            r#"{"name": "x", "age": 42}"#,
            Some((true, true)),
        ),
        (
            schema(person.clone()),
            r#"{"name": "x", "age": 42"#,
            Some((false, false)),
        ),
        (schema(person.clone()), r#"{"name": "x", "age": 151"#, None),
        (schema(person), r#"{"name": "x", "pet""#, None),
        (schema(json!(true)), "1", Some((true, false))),
        (
            GrammarSpec::Regex(r"\d{2}-[a-z/]+".into()),
            "12-a/",
            Some((true, false)),
        ),
        (GrammarSpec::Regex(r"\d{2}".into()), "1", Some((false, false))),
        (GrammarSpec::Regex(r"\d{2}".into()), "12", Some((true, true))),
        (GrammarSpec::Regex(r"\d{2}".into()), "x", None),
        (choice(), "red", Some((true, true))),
        (choice(), "green \"x\"", Some((true, true))),
        (choice(), "grey", None),
        (GrammarSpec::Lark(lark.into()), "a+a", Some((true, false))),
        (GrammarSpec::Lark(lark.into()), "a+", Some((false, false))),
        (GrammarSpec::Ebnf(ebnf.into()), "a+c+b", Some((true, true))),
        (GrammarSpec::Ebnf(ebnf.into()), "a+d", None),
        (GrammarSpec::Ebnf(ebnf.into()), "\"", Some((true, true))),
    ];
    for (spec, text, expected) in cases {
        assert_eq!(follow(spec.clone(), text), expected, "{text} by {spec:?}");
    }
}

#[test]
fn whitespace_is_bounded_and_can_be_chosen() {
    let spaced = |spaces: usize| format!("{{{}\"a\"", " ".repeat(spaces));
    assert!(follow(GrammarSpec::JsonObject, &spaced(32)).is_some());
    assert_eq!(follow(GrammarSpec::JsonObject, &spaced(33)), None);
    let tight = Grammar {
        whitespace: Some("[ ]?".into()),
        ..GrammarSpec::JsonObject.into()
    };
    assert!(follow(tight.clone(), &spaced(1)).is_some());
    assert_eq!(follow(tight, &spaced(2)), None);
    for wrong in ["(", "[a", "a{2,1}"] {
        for spec in [GrammarSpec::JsonObject, schema(json!({"type": "integer"}))] {
            let grammar = Grammar {
                whitespace: Some(wrong.into()),
                ..spec.into()
            };
            let error = compiler().compile(&grammar).unwrap_err();
            assert!(matches!(error, GrammarError::Whitespace(_)), "{wrong}: {error:?}");
        }
    }
    let wrong_schema = Grammar {
        whitespace: Some(" ?".into()),
        ..schema(json!({"type": "string", "pattern": "("})).into()
    };
    let error = compiler().compile(&wrong_schema).unwrap_err();
    assert!(matches!(error, GrammarError::Invalid(_)), "{error:?}");
    // A client's own options are not llguidance's.
    let sneaky = json!({"type": "object", "x-guidance": {"whitespace_pattern": "x+"}});
    assert_eq!(follow(schema(sneaky), "{x"), None);
}

#[test]
fn a_grammar_may_apply_behind_a_marker() {
    let grammar = || Grammar {
        leads: vec![Lead::UpTo("</think>".into())],
        ..GrammarSpec::Regex("[0-9]+".into()).into()
    };
    assert_eq!(follow(grammar(), "so </thin </think>12"), Some((true, false)));
    assert_eq!(follow(grammar(), "so </think>x"), None);
    assert!(follow(grammar(), "anything").is_some());
}

#[test]
fn a_text_may_begin_with_a_free_part() {
    let thinking = |regex: &str| Grammar {
        leads: vec![Lead::Between(["<think>".into(), "</think>".into()])],
        ..GrammarSpec::Regex(regex.into()).into()
    };
    for right in ["12", "<think>so <b> 1</think>12"] {
        assert_eq!(follow(thinking("[0-9]+"), right), Some((true, false)), "{right}");
    }
    for wrong in [
        "x",
        "so <think></think>1",
        "<thing>",
        "1<think></think>1",
        "<think></think>x",
    ] {
        assert_eq!(follow(thinking("[0-9]+"), wrong), None, "{wrong}");
    }
    // A text that begins as the mark does may still be the grammar's.
    for right in ["<b>", "<thin>", "<think></think><b>"] {
        assert_eq!(follow(thinking("<[a-z]+>"), right), Some((true, true)), "{right}");
    }
    assert!(follow(thinking("<[a-z]+>"), "<think>1").is_some());
}

#[test]
fn free_parts_may_follow_each_other() {
    let marked = |thought: Lead| Grammar {
        leads: vec![thought, Lead::Once("<call>".into())],
        ..GrammarSpec::Regex("[0-9]+".into()).into()
    };
    let possible = || marked(Lead::Between(["<think>".into(), "</think>".into()]));
    let open = || marked(Lead::UpTo("</think>".into()));
    for right in [
        "<think>a <call> b</think>so <call>12",
        "\n <think><call></think><call>1",
        "so <think>: <call>1",
        "<thin<call>1",
    ] {
        assert_eq!(follow(possible(), right), Some((true, false)), "{right}");
    }
    assert_eq!(follow(open(), "a <call> b</think><call>1"), Some((true, false)));
    for wrong in ["<call>x", "so <think> <call>x", "<think>a</think><call>x"] {
        assert_eq!(follow(possible(), wrong), None, "{wrong}");
    }
    assert!(follow(possible(), "<think><call>x").is_some());
    assert_eq!(follow(open(), "</think><call>x"), None);
    assert!(follow(open(), "<call>x").is_some());
}

#[test]
fn a_text_does_not_end_before_what_must_follow() {
    let thought = || Lead::UpTo("</think>".into());
    let possible = || Lead::Between(["<think>".into(), "</think>".into()]);
    let call = || Lead::Once("<call>".into());
    for (leads, said, may_end) in [
        (vec![thought()], "so", false),
        (vec![possible()], "<think>so", false),
        (vec![call()], "so", true),
        (vec![thought(), call()], "so", true),
        (vec![possible(), call()], "<think>so</think>so", true),
        (vec![call()], "so <call>", false),
        (vec![thought()], "so</think>1", true),
    ] {
        let grammar = Grammar {
            leads,
            ..GrammarSpec::Regex("[0-9]+".into()).into()
        };
        let compiled = compiler().compile(&grammar).unwrap();
        let mut constraints = Constraints::new(vec![compiled.constraint(&[EOS])]);
        for byte in said.bytes() {
            constraints.accept(token(byte)).unwrap();
        }
        assert_eq!(
            allowed(&mut constraints).contains(&EOS),
            may_end,
            "{grammar:?}: {said}"
        );
    }
}

#[test]
fn stop_tokens_that_are_no_text_are_allowed_where_the_grammar_may_end() {
    let compiled = compiler()
        .compile(&GrammarSpec::Regex("a+".into()).into())
        .unwrap();
    let mut ignoring_eos = Constraints::new(vec![compiled.constraint(&[])]);
    ignoring_eos.accept(token(b'a')).unwrap();
    assert_eq!(allowed(&mut ignoring_eos), [token(b'a')]);
    let mut text = Constraints::new(vec![compiled.constraint(&[EOS, token(b'b')])]);
    assert_eq!(allowed(&mut text), [token(b'a')]);
    text.accept(token(b'a')).unwrap();
    assert_eq!(allowed(&mut text), [token(b'a'), EOS]);
}

#[test]
fn sequences_of_one_grammar_do_not_know_of_each_other() {
    let compiled = compiler()
        .compile(&GrammarSpec::Regex("ab|cd".into()).into())
        .unwrap();
    let mut one = Constraints::new(vec![compiled.constraint(&[EOS])]);
    let mut other = Constraints::new(vec![compiled.constraint(&[EOS])]);
    one.accept(token(b'a')).unwrap();
    other.accept(token(b'c')).unwrap();
    let mut third = one.clone();
    assert_eq!(one.accept(token(b'b')), Ok(Progress::Complete));
    assert_eq!(allowed(&mut other), [token(b'd')]);
    assert_eq!(allowed(&mut third), [token(b'b')]);
    assert!(third.accept(token(b'x')).is_err());
}

#[test]
fn a_sequence_without_tokens_takes_nothing() {
    let compiled = compiler()
        .compile(&GrammarSpec::Regex("ab".into()).into())
        .unwrap();
    // Whoever takes a copy has to wait meanwhile.
    let copying = compiled.hold();
    let (told, hears) = std::sync::mpsc::channel();
    let theirs = compiled.clone();
    let sequence = std::thread::spawn(move || {
        let mut constraints = Constraints::new(vec![theirs.constraint(&[EOS])]);
        let mut again = constraints.clone();
        told.send([
            allowed(&mut constraints),
            allowed(&mut constraints),
            allowed(&mut again),
        ])
        .unwrap();
        constraints.accept(token(b'a')).unwrap();
        (allowed(&mut constraints), allowed(&mut again))
    });
    let first = hears.recv_timeout(std::time::Duration::from_secs(30));
    assert_eq!(first.unwrap(), [[token(b'a')], [token(b'a')], [token(b'a')]]);
    drop(copying);
    assert_eq!(sequence.join().unwrap(), (vec![token(b'b')], vec![token(b'a')]));
}

#[test]
fn unsupported_keywords_are_named_with_their_place() {
    let bad = json!({
        "type": "object",
        "properties": {
            "tags": {"type": "array", "items": {"type": "string"}, "uniqueItems": true},
            "a/b": {"not": {"type": "null"}},
        },
    });
    let error = compiler().compile(&schema(bad.clone()).into()).unwrap_err();
    assert_eq!(
        error.to_string(),
        "JSON schema keywords that cannot be enforced: `uniqueItems` at /properties/tags, `not` at /properties/a~1b; \
         leave them out"
    );
    // A property may have any name.
    assert!(follow(schema(json!({"properties": {"not": {"type": "null"}}})), "{").is_some());
    let lenient = GrammarSpec::JsonSchema {
        schema: bad,
        strict: false,
    };
    assert!(follow(lenient, r#"{"tags": ["x", "x"]"#).is_some());
}

#[test]
fn refusals_say_what_is_wrong() {
    let format = json!({"type": "string", "format": "morse"});
    let overlapping = json!({"oneOf": [{"type": "object"}, {"type": "object", "required": ["a"]}]});
    let cases = [
        (schema(json!([])), "a JSON schema is an object"),
        (schema(json!({"type": "strin"})), "strin"),
        (schema(format), "Unknown format: morse"),
        (schema(overlapping), "use anyOf"),
        (schema(json!({"$ref": "#/$defs/missing"})), "missing"),
        (
            schema(json!({"$ref": "https://example.com/schema"})),
            "https://example.com/schema",
        ),
        (
            schema(json!({"type": "string", "minLength": 3, "maxLength": 2})),
            "Unsatisfiable",
        ),
        (GrammarSpec::Regex("a(".into()), "unclosed group"),
        (GrammarSpec::Regex(String::new()), "must not be empty"),
        (GrammarSpec::Choice(vec![]), "must not be empty"),
        (GrammarSpec::Choice(vec![String::new()]), "must not be empty"),
        (GrammarSpec::Lark("start: unknown".into()), "unknown"),
        (GrammarSpec::Lark("start: \"a".into()), "1"),
        (
            GrammarSpec::Ebnf("root ::= other".into()),
            "line 1 of the grammar: there is no rule `other`",
        ),
        (GrammarSpec::Ebnf("rule ::= \"a\"".into()), "no rule `root"),
        (GrammarSpec::Ebnf("root ::= \"a\nb ::= \"c\"".into()), "line"),
        (
            GrammarSpec::Ebnf("root ::= [z-a]".into()),
            "the range 'z' to 'a' is empty",
        ),
        (GrammarSpec::Regex("a".repeat(300 << 10)), "at most"),
    ];
    for (spec, expected) in cases {
        let kind = format!("{spec:.60?}");
        let error = refusal(spec);
        assert!(error.contains(expected), "{error:?} by {kind}");
    }
    let marker = Grammar {
        leads: vec![Lead::UpTo(String::new())],
        ..GrammarSpec::JsonObject.into()
    };
    assert!(refusal(marker).contains("marker"));
}

#[test]
fn a_grammar_is_compiled_once() {
    let compiler = compiler();
    let grammar = schema(json!({"enum": ["a", "b"]})).into();
    let (one, two) = (
        compiler.compile(&grammar).unwrap(),
        compiler.compile(&grammar).unwrap(),
    );
    assert!(one.is(&two));
    for number in 0..100 {
        compiler
            .compile(&schema(json!({"const": number})).into())
            .unwrap();
    }
    assert!(
        !compiler.compile(&grammar).unwrap().is(&one),
        "the cache is bounded"
    );
}

/// As pydantic and others write the bounds of 64-bit integers, and beyond.
#[test]
fn bounds_of_numbers_may_be_as_wide_as_64_bits_and_wider() {
    for (least, most) in [
        (json!(i64::MIN), json!(i64::MAX)),
        (json!(-1e30), json!(1e30)),
        (json!(0), json!(u64::MAX)),
    ] {
        for (low, high) in [("minimum", "maximum"), ("exclusiveMinimum", "exclusiveMaximum")] {
            let bounds = json!({low: least, high: most});
            let mut grammars = ["integer", "number"].map(|kind| {
                let mut bounded = bounds.clone();
                bounded["type"] = json!(kind);
                bounded
            });
            let merged = json!({"allOf": [{"type": "integer"}, bounds]});
            let named = json!({"$defs": {"const": grammars[0].take()}, "$ref": "#/$defs/const"});
            let aside = json!({"default": grammars[1].clone(), "$ref": "#/default"});
            let number = grammars[1].take();
            let lark = GrammarSpec::Lark(format!("start: %json {named}"));
            for grammar in [schema(merged), schema(named), schema(aside), schema(number), lark] {
                let ends = |text| follow(grammar.clone(), text).is_some_and(|(may_end, _)| may_end);
                assert!(ends("7") && ends("9223372036854760000"), "{grammar:?}");
                assert_eq!(ends("-9223372036854760000"), least != json!(0), "{grammar:?}");
                assert!(
                    !ends("-9223372036854775809") && !ends("1000000000000000000000000000000"),
                    "{grammar:?}"
                );
            }
        }
    }
}

/// A release build of llguidance looked for the negative of `i64::MIN` until the stack was full, which ended the process.
#[test]
fn numbers_that_cannot_be_counted_to_are_refused() {
    for (bad, where_) in [
        (json!({"enum": [i64::MIN, "y"]}), "enum"),
        (json!({"type": "integer", "enum": [1, 1e30]}), "enum"),
        (json!({"properties": {"a": {"const": i64::MIN}}}), "const"),
        (json!({"const": {"a": [-1e30]}}), "const"),
        (
            json!({"anyOf": [{"type": "string"}, {"maximum": -1e30}]}),
            "maximum",
        ),
        (
            json!({"items": {"type": "integer", "exclusiveMinimum": 1e30}}),
            "exclusiveMinimum",
        ),
        // Reached by nothing but a reference.
        (
            json!({"default": {"type": "integer", "maximum": -1e30}, "$ref": "#/default"}),
            "maximum",
        ),
        (
            json!({"examples": [0, {"const": [i64::MIN]}], "items": {"$ref": "#/examples/1"}}),
            "const",
        ),
        (
            json!({"components": {"schemas": {"default": {"enum": [i64::MIN]}}},
                "properties": {"a": {"$ref": "#/components/schemas/default"}}}),
            "enum",
        ),
        (
            json!({"x": {"properties": {"const": {"a~1b": i64::MIN}}}, "$ref": "#/x/properties"}),
            "const",
        ),
        (
            json!({"default": {"a~1b": {"anyOf": [{"$ref": "#/examples"}]}},
                "examples": {"type": "integer", "minimum": 1e30}, "$ref": "#/default/a~1b"}),
            "minimum",
        ),
    ] {
        let wanted = format!("`{where_}`: ");
        let said = refusal(schema(bad.clone()));
        assert!(
            said.contains(&wanted) && said.contains("is outside"),
            "{bad}: {said}"
        );
        let lark = GrammarSpec::Lark(format!("start: \"x\" %json {bad} | %json{bad}"));
        let said = refusal(lark);
        assert!(
            said.contains(&wanted) && said.contains("is outside"),
            "{bad} in lark: {said}"
        );
    }
    // What is not in force may say anything.
    let grammar = schema(json!({"type": "integer", "default": i64::MIN, "examples": [1e30], "maximum": 9}));
    assert!(follow(grammar, "7").is_some());
    let unused = json!({"default": {"minimum": 1e30}, "$defs": {"a": {"const": 7}}, "$ref": "#/$defs/a"});
    assert!(follow(schema(unused), "7").is_some());
}
