//! Answers taken apart: every format, however the text is cut.

#[path = "../common/mod.rs"]
mod common;
mod gemma4;
mod write;

use std::sync::Arc;

use common::Whole;
use plimsoll_text::{AnswerFormat, AnswerParser, Function, Part, Position, ReasoningFormat, ToolFormat};
use proptest::prelude::*;
use serde_json::{Map, Value, json};
use write::write_calls;

/// Name and arguments.
type Call = (String, Map<String, Value>);

fn read(format: &AnswerFormat, pieces: &[&str]) -> Whole {
    let mut parser = AnswerParser::new(format);
    let mut whole = Whole::default();
    for piece in pieces {
        whole.add(parser.push(piece));
    }
    whole.add(parser.finish());
    assert!(format.max_calls.is_none_or(|most| whole.calls.len() <= most));
    whole
}

const FORMATS: &[ToolFormat] = &[
    ToolFormat::Hermes,
    ToolFormat::QwenCoder,
    ToolFormat::LlamaJson,
    ToolFormat::Pythonic,
    ToolFormat::Mistral,
    ToolFormat::Phi4Mini,
    ToolFormat::Json,
    ToolFormat::Gemma4,
    ToolFormat::Harmony,
];

fn functions(names: &[&str]) -> Arc<[Function]> {
    let function = |name: &&str| Function {
        name: (*name).to_owned(),
        parameters: Map::new(),
        strict: false,
    };
    names.iter().map(function).collect()
}

fn tools(format: ToolFormat, names: &[&str]) -> AnswerFormat {
    AnswerFormat {
        tools: Some(format),
        functions: functions(names),
        ..AnswerFormat::default()
    }
}

fn value() -> impl Strategy<Value = Value> {
    let text = prop_oneof![
        "[a-zé\"'\\\\\n\t {}\\[\\](),;=<>]{0,12}",
        Just("</tool_call> [TOOL_CALLS] <think>".to_owned()),
        any::<String>().prop_map(|text| text.replace("</parameter>", "").replace("<|\"|>", "")),
    ];
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i32>().prop_map(Value::from),
        // What serde_json reads back bit by bit.
        any::<i32>().prop_map(|eighths| Value::from(f64::from(eighths) / 8.0)),
        text.prop_map(Value::from),
    ];
    leaf.prop_recursive(3, 12, 4, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::btree_map("[a-z]{1,4}", inner, 0..4)
                .prop_map(|fields| Value::Object(fields.into_iter().collect())),
        ]
    })
}

fn calls() -> impl Strategy<Value = Vec<Call>> {
    let arguments = prop::collection::btree_map("[a-z_]{1,6}", value(), 0..4);
    let arguments = arguments.prop_map(|fields| fields.into_iter().collect::<Map<_, _>>());
    prop::collection::vec(("[a-z_]{1,8}", arguments), 1..4)
}

/// What the functions of `calls` take, by the types of their arguments.
fn described(calls: &[Call]) -> Arc<[Function]> {
    let kind = |value: &Value| match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(_) => "number",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    };
    let function = |(name, arguments): &Call| {
        let properties: Map<_, _> = arguments
            .iter()
            .map(|(key, value)| (key.clone(), json!({ "type": kind(value) })))
            .collect();
        Function {
            name: name.clone(),
            parameters: Map::from_iter([("properties".to_owned(), Value::Object(properties))]),
            strict: false,
        }
    };
    calls.iter().map(function).collect()
}

/// `text` in pieces that end at `cuts`, each in thousandths of its length.
fn cut<'a>(text: &'a str, cuts: &[usize]) -> Vec<&'a str> {
    let mut at: Vec<_> = cuts
        .iter()
        .map(|cut| {
            let mut at = cut * text.len() / 1000;
            while !text.is_char_boundary(at) {
                at -= 1;
            }
            at
        })
        .chain([0, text.len()])
        .collect();
    at.sort_unstable();
    at.windows(2).map(|pair| &text[pair[0]..pair[1]]).collect()
}

fn position(is_open: bool) -> Position {
    match is_open {
        true => Position::Reasoning,
        false => Position::Before,
    }
}

fn cuts() -> impl Strategy<Value = Vec<usize>> {
    prop::collection::vec(0..=1000usize, 0..12)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(600))]

    #[test]
    fn calls_are_read_back(
        calls in calls(),
        format in prop::sample::select(FORMATS),
        style: bool,
        before in "[a-z][a-z \n]{0,8}",
        has_before: bool,
        cuts in cuts(),
    ) {
        // Two functions of one name have one schema.
        let mut names = std::collections::HashSet::new();
        let calls: Vec<_> = calls.into_iter().filter(|(name, _)| names.insert(name.clone())).collect();
        let marked = style || format.opening().is_some() || format == ToolFormat::Harmony;
        let before = if has_before && marked && format != ToolFormat::Json { before } else { String::new() };
        let text = format!("{before}{}", write_calls(format, &calls, style));
        let format = AnswerFormat { functions: described(&calls), ..tools(format, &[]) };
        let whole = read(&format, &[&text]);
        let expected: Vec<_> = calls.iter().map(|(name, value)| (name.as_str(), json!(value))).collect();
        prop_assert_eq!(whole.parsed(), expected, "{}", text);
        prop_assert_eq!(&whole.content, before.trim_end(), "{}", text);
        prop_assert_eq!(read(&format, &cut(&text, &cuts)), whole, "{}", text);
    }

    #[test]
    fn cuts_do_not_matter(
        pieces in prop::collection::vec(prop_oneof![
            Just("<tool_call>"), Just("</tool_call>"), Just("{\"name\": \"f\", \"arguments\": {\"a\": 1}}"),
            Just("{\"name\": \"f\""), Just(", \"arguments\": "), Just("{\"a\": \"}"), Just("}"), Just("\""), Just("["), Just("]"),
            Just("[TOOL_CALLS]"), Just("f[ARGS]{"), Just("[CALL_ID]"), Just("<|python_tag|>"), Just(";"), Just("f(a=1"),
            Just(", b='x')"), Just("<function=f>"), Just("<parameter=a>"), Just("</parameter>"), Just("</function>"),
            Just("<|start|>assistant"), Just("<|channel|>"), Just("analysis"), Just("commentary to=functions.f"), Just("<|constrain|>json"),
            Just("<|message|>"), Just("<|end|>"), Just("<|call|>"), Just(" to=f"), Just("<think>"), Just("</think>"), Just("<|python_start|>"), Just("functools"), Just("<|/tool_call|>"), Just("<|tool_call>"), Just("call:f{"), Just("a:"), Just("<|\"|>"), Just("<tool_call|>"), Just(","), Just("\n"), Just(" "), Just("word"), Just("é"), Just("<"),
        ], 0..16),
        format in prop::sample::select(FORMATS),
        reasons: bool,
        open: bool,
        cuts in cuts(),
    ) {
        let text = pieces.concat();
        let format = AnswerFormat {
            reasoning: reasons.then_some(ReasoningFormat::Think),
            position: position(open),
            ..tools(format, &["f"])
        };
        prop_assert_eq!(read(&format, &cut(&text, &cuts)), read(&format, &[&text]), "{}", text);
    }

    #[test]
    fn text_without_marks_stays_as_it_is(text in "[a-z .,!?\n]{0,40}", format in prop::sample::select(FORMATS)) {
        let whole = read(&tools(format, &["f"]), &[&text]);
        prop_assert_eq!(whole, Whole { content: text, ..Whole::default() });
    }
}

#[test]
fn what_is_no_call_is_content() {
    let cases = [
        (ToolFormat::Hermes, "<tool_call>oops</tool_call>"),
        (ToolFormat::Hermes, "<tool_call>{\"nome\": 1}</tool_call>"),
        (
            ToolFormat::Hermes,
            "<tool_call>{\"name\": 1, \"arguments\": {}}</tool_call>",
        ),
        (ToolFormat::Hermes, "a <tool_call>{\"name\": \"f\""),
        (ToolFormat::Hermes, "a < b <tool"),
        (ToolFormat::LlamaJson, "{\"name\": \"Bob\", \"parameters\": {}}"),
        (ToolFormat::LlamaJson, "{\"name\": \"f\", \"age\": 3}x{"),
        (
            ToolFormat::LlamaJson,
            "see {\"name\": \"f\", \"parameters\": {\"a\"}}",
        ),
        (
            ToolFormat::LlamaJson,
            "{\"name\": \"f\", \"parameters\": {\"a\": tru}}",
        ),
        (
            ToolFormat::LlamaJson,
            "{\"name\": \"f\", \"parameters\": {\"a\": 1",
        ),
        (
            ToolFormat::LlamaJson,
            "fn f() { {\"a\": {\"name\": \"f\", \"parameters\": {}}} }",
        ),
        (ToolFormat::Json, "see {\"name\": \"f\", \"arguments\": {}}"),
        (ToolFormat::LlamaJson, "<|python_tag|>import math"),
        (ToolFormat::Json, "[1, 2]"),
        (ToolFormat::Json, "{\"answer\": 42}"),
        (ToolFormat::Pythonic, "[link](http://x)"),
        (ToolFormat::Pythonic, "[g(a=1)]"),
        (ToolFormat::Pythonic, "[f(1)]"),
        (ToolFormat::Mistral, "[TOOL_CALLS] none"),
        (ToolFormat::Mistral, "[TOOL_CALLS]f[ARG"),
        (ToolFormat::Mistral, "[TOOL_CALLS][1]"),
        (ToolFormat::Phi4Mini, "functools[] is no call"),
        (ToolFormat::Phi4Mini, "functools.partial(f)[0]"),
        (ToolFormat::Phi4Mini, "<|tool_call|> none <|/tool_call|>"),
        // Arguments are an object.
        (
            ToolFormat::Phi4Mini,
            "functools[{\"name\": \"f\", \"arguments\": \"none\"}]",
        ),
        (ToolFormat::LlamaJson, "{\"name\": \"f\", \"parameters\": 5}"),
        (ToolFormat::Json, "{\"name\": \"f\", \"arguments\": [1]}"),
        (ToolFormat::Gemma4, "<|tool_call>f{}"),
        (ToolFormat::Gemma4, "a <|tool_call>call:<tool_call|>"),
        (ToolFormat::Gemma4, "a <|tool"),
        (ToolFormat::QwenCoder, "<tool_call>\n<func=f>"),
        (ToolFormat::QwenCoder, "<function=\n"),
        (ToolFormat::QwenCoder, "<tool_call> <function=f"),
    ];
    for (format, text) in cases {
        let whole = read(&tools(format, &["f"]), &[text]);
        let expected = Whole {
            content: text.to_owned(),
            ..Whole::default()
        };
        // `f` with an unknown field and no arguments is a call of a function without arguments.
        if text.contains("age") {
            assert_eq!(whole.calls, [("f".to_owned(), "{}".to_owned())], "{format:?}");
            assert_eq!(whole.content, "x{");
        } else {
            assert_eq!(whole, expected, "{format:?}");
        }
    }
}

#[test]
fn models_write_in_many_ways() {
    let call = |arguments: &str| vec![("f".to_owned(), arguments.to_owned())];
    let cases = [
        // No closing tag; text behind.
        (
            ToolFormat::Hermes,
            "<tool_call>{\"name\": \"f\", \"arguments\": {}}",
            "",
            call("{}"),
        ),
        (
            ToolFormat::Hermes,
            "<tool_call>{\"name\": \"f\"}</tool_call> and",
            " and",
            call("{}"),
        ),
        // Arguments first, as a string, as nothing, with line breaks, among other fields.
        (
            ToolFormat::Hermes,
            "<tool_call>{\"arguments\": {\"a\":1}, \"name\": \"f\"}</tool_call>",
            "",
            call("{\"a\":1}"),
        ),
        (
            ToolFormat::Hermes,
            "<tool_call>{\"name\": \"f\", \"arguments\": \"{\\\"a\\\": 1}\"}</tool_call>",
            "",
            call("{\"a\": 1}"),
        ),
        (
            ToolFormat::Hermes,
            "<tool_call>{\"name\": \"f\", \"arguments\": null}</tool_call>",
            "",
            call("{}"),
        ),
        (
            ToolFormat::Hermes,
            "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": \"x\ny\"}}</tool_call>",
            "",
            call("{\"a\": \"x\\ny\"}"),
        ),
        (
            ToolFormat::LlamaJson,
            "{\"type\": \"function\", \"name\": \"f\", \"parameters\": {}}",
            "",
            call("{}"),
        ),
        // Text before a call, and behind.
        (
            ToolFormat::LlamaJson,
            "see {\"x\": {}}: {\"name\": \"f\", \"parameters\": {\"a\": 1}} so",
            "see {\"x\": {}}: so",
            call("{\"a\": 1}"),
        ),
        // Broken off: what was told stays, the rest is content.
        (
            ToolFormat::Hermes,
            "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": 1</tool_call>x",
            "x",
            call("{\"a\": 1"),
        ),
        (
            ToolFormat::Hermes,
            "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": \"b",
            "",
            call("{\"a\": \"b"),
        ),
        (
            ToolFormat::Mistral,
            "[TOOL_CALLS]f{\"a\": 1}",
            "",
            call("{\"a\": 1}"),
        ),
        (
            ToolFormat::Mistral,
            "[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{\"a\": 1}",
            "",
            call("{\"a\": 1}"),
        ),
        (
            ToolFormat::Phi4Mini,
            "Now.\nfunctools[\n  {\"name\": \"f\", \"arguments\": {\"a\": [1]}}\n]\nDone",
            "Now.\nDone",
            call("{\"a\": [1]}"),
        ),
        (
            ToolFormat::Phi4Mini,
            "<|tool_call|>{\"name\": \"f\"} <|/tool_call|>!",
            "!",
            call("{}"),
        ),
        (
            ToolFormat::QwenCoder,
            "<function=f>\n<parameter=a>\n1\n</parameter>\n</function>",
            "",
            call("{\"a\": \"1\"}"),
        ),
        // Closing tags are forgotten; in the middle of a line they are text.
        (
            ToolFormat::QwenCoder,
            "<function=f>\n<parameter=a>\nx <parameter=y>\n<parameter=b>\n2\n</parameter>\n<parameter=c>\n3\n</function>!",
            "!",
            call("{\"a\": \"x <parameter=y>\", \"b\": \"2\", \"c\": \"3\"}"),
        ),
        (
            ToolFormat::QwenCoder,
            "<tool_call><function=f></tool_call>!",
            "!",
            call("{}"),
        ),
        (
            ToolFormat::Pythonic,
            "[f(a='x', b=None, c=[1, {\"k\": (True,)}])]",
            "",
            call("{\"a\": \"x\", \"b\": null, \"c\": [1, {\"k\": [true]}]}"),
        ),
        (ToolFormat::Pythonic, "[ f ( ) ]", "[ f ( ) ]", vec![]),
        (
            ToolFormat::Pythonic,
            "<|python_start|>[h()]<|python_end|>ok",
            "ok",
            vec![("h".into(), "{}".into())],
        ),
        (ToolFormat::Pythonic, "[f(a=x y)]", "", call("{\"a\": \"x y\"}")),
    ];
    for (format, text, content, calls) in cases {
        let whole = read(&tools(format, &["f"]), &[text]);
        assert_eq!(
            (whole.content.as_str(), &whole.calls),
            (content, &calls),
            "{format:?} {text}"
        );
    }
}

#[test]
fn one_call_too_many_ends_the_answer() {
    let format = AnswerFormat {
        max_calls: Some(1),
        ..tools(ToolFormat::Hermes, &["f"])
    };
    let call = "<tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call>";
    let mut parser = AnswerParser::new(&format);
    assert_eq!(parser.push(call).len(), 2);
    assert!(!parser.is_full());
    assert_eq!(parser.push(call), []);
    assert!(parser.is_full());
    assert_eq!((parser.push("x"), parser.finish()), (vec![], vec![]));
}

#[test]
fn reasoning_is_split_off() {
    let cases = [
        (
            ReasoningFormat::Think,
            false,
            "<think>\nHm.\n\n2?\n</think>\n\nFour.",
            "Hm.\n\n2?",
            "Four.",
        ),
        (
            ReasoningFormat::Think,
            true,
            "\nHm.</think>Four. </think>",
            "Hm.",
            "Four. </think>",
        ),
        (ReasoningFormat::Think, true, "<think>Hm.</think>", "Hm.", ""),
        (ReasoningFormat::Think, false, "Four <think>", "", "Four <think>"),
        (ReasoningFormat::Think, false, " \n<thi", "", " \n<thi"),
        (ReasoningFormat::Think, false, "<think>Hm", "Hm", ""),
        (
            ReasoningFormat::Think,
            false,
            "<think>\n\n</think>\n\nFour",
            "",
            "Four",
        ),
        (ReasoningFormat::DeepseekR1, true, "Hm <b", "Hm <b", ""),
        (
            ReasoningFormat::Mistral,
            false,
            "[THINK]a <think>[/THINK]b",
            "a <think>",
            "b",
        ),
        (
            ReasoningFormat::SeedOss,
            false,
            "<seed:think>a</seed:think>b",
            "a",
            "b",
        ),
    ];
    for (format, open, text, reasoning, content) in cases {
        let format = AnswerFormat {
            reasoning: Some(format),
            position: position(open),
            ..AnswerFormat::default()
        };
        let whole = read(&format, &[text]);
        assert_eq!(
            (whole.reasoning.as_str(), whole.content.as_str()),
            (reasoning, content),
            "{text}"
        );
    }
}

#[test]
fn calls_among_reasoning_count_if_it_is_never_closed() {
    let call = "<tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call>";
    let format = AnswerFormat {
        reasoning: Some(ReasoningFormat::Think),
        ..tools(ToolFormat::Hermes, &["f"])
    };
    let cases = [
        // Only thought of.
        (format!("<think>{call}</think>\n\n{call}"), call, "", 1),
        (
            format!("<think>a\n{call} b</think>c"),
            &format!("a\n{call} b"),
            "c",
            0,
        ),
        // `</think>` is missing.
        (format!("<think>\nHm.\n{call}\n{call}"), "Hm.", "", 2),
        (
            "<think>Hm. <tool_call>oops".to_owned(),
            "Hm.",
            "<tool_call>oops",
            0,
        ),
        (format!("<think>{call} <think> so"), "", " <think> so", 1),
    ];
    for (text, reasoning, content, calls) in cases {
        let whole = read(&format, &[&text]);
        let found = (
            whole.reasoning.as_str(),
            whole.content.as_str(),
            whole.calls.len(),
        );
        assert_eq!(found, (reasoning, content, calls), "{text}");
        assert_eq!(read(&format, &cut(&text, &[100, 350, 600, 901])), whole, "{text}");
    }
}

#[test]
fn prompts_open_reasoning() {
    use Position::{Answer, Before, Reasoning};
    use ReasoningFormat::{DeepseekR1, Think};
    for (format, prompt, position) in [
        (Think, "<|im_start|>assistant\n<think>\n", Reasoning),
        (Think, "<|im_start|>assistant\n", Before),
        (Think, "<|im_start|>assistant\n<think>\n\n</think>\n\n", Answer),
        (DeepseekR1, "<|Assistant|>", Reasoning),
        (DeepseekR1, "<|Assistant|></think>", Answer),
    ] {
        assert_eq!(format.position_after(prompt), position, "{prompt}");
    }
}

#[test]
fn what_is_cut_off_behind_a_mark_is_no_text() {
    let mut arguments = Map::new();
    arguments.insert("a".to_owned(), json!(1));
    let calls: Vec<Call> = ["f", "g"].map(|name| (name.to_owned(), arguments.clone())).into();
    for (format, style) in FORMATS
        .iter()
        .flat_map(|&format| [(format, true), (format, false)])
    {
        let text = write_calls(format, &calls, style);
        let is_marked = format.opening().is_some() || style && format != ToolFormat::Json;
        for end in 0..=text.len() {
            let mut parser = AnswerParser::new(&tools(format, &["f", "g"]));
            let mut whole = Whole::default();
            whole.add(parser.push(&text[..end]));
            whole.add(parser.cut_off());
            let has_mark = |content: &str| format.marks().iter().any(|mark| content.contains(mark));
            let leaked = whole.content.contains(['{', '(']) || has_mark(&whole.content);
            let is_certain = is_marked || !whole.calls.is_empty();
            assert!(
                !(leaked && is_certain),
                "{format:?}: {:?}: {whole:?}",
                &text[..end]
            );
        }
    }
    let mut parser = AnswerParser::new(&tools(ToolFormat::Hermes, &["f"]));
    assert_eq!(
        parser.push("Hi.\n<tool_call>\n{"),
        [Part::Content("Hi.".to_owned())]
    );
    assert_eq!(parser.cut_off(), []);
    // What only looks like a call may be an answer.
    let mut parser = AnswerParser::new(&tools(ToolFormat::Json, &["f"]));
    let text = "{\"name\": \"f\"";
    assert_eq!(parser.push(text), []);
    assert_eq!(parser.cut_off(), [Part::Content(text.to_owned())]);
}
