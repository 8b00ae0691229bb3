//! OpenAI's Harmony format: prompts and answers as its own library has them (scripts/record-harmony), and what models make of it.

#[path = "../common/mod.rs"]
mod common;
mod prompts;
mod tokens;

use std::sync::Arc;

use common::Whole;
use plimsoll_text::{AnswerFormat, AnswerParser, Function, Part, Position, ReasoningFormat, ToolFormat};
use proptest::prelude::*;
use serde_json::{Map, Value};

const MARKS: [&str; 8] = [
    "<|start|>",
    "<|channel|>",
    "<|constrain|>",
    "<|message|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|eos|>",
];

fn recorded(what: &str) -> Vec<Value> {
    let mut recorded: Value = serde_json::from_str(include_str!("recorded.json")).unwrap();
    serde_json::from_value(recorded[what].take()).unwrap()
}

fn format() -> AnswerFormat {
    let function = |name: &str| Function {
        name: name.to_owned(),
        parameters: Map::new(),
        strict: false,
    };
    AnswerFormat {
        reasoning: Some(ReasoningFormat::Harmony),
        tools: Some(ToolFormat::Harmony),
        functions: Arc::new([function("get_weather"), function("now")]),
        ..AnswerFormat::default()
    }
}

fn read<'a>(format: &AnswerFormat, pieces: impl IntoIterator<Item = &'a str>) -> Whole {
    let mut parser = AnswerParser::new(format);
    let mut whole = Whole::default();
    pieces.into_iter().for_each(|piece| whole.add(parser.push(piece)));
    whole.add(parser.finish());
    whole
}

fn whole(reasoning: &str, content: &str, calls: &[(&str, &str)]) -> Whole {
    Whole {
        reasoning: reasoning.to_owned(),
        content: content.to_owned(),
        calls: calls
            .iter()
            .map(|(name, text)| ((*name).to_owned(), (*text).to_owned()))
            .collect(),
    }
}

/// Messages as `(channel, function, text)`: what an answer of them is.
fn told<'a>(messages: impl IntoIterator<Item = (&'a str, Option<&'a str>, &'a str)>) -> Whole {
    let mut whole = Whole::default();
    let add = |into: &mut String, text: &str| {
        if !into.is_empty() && !text.is_empty() {
            *into += "\n\n";
        }
        *into += text;
    };
    for (channel, function, text) in messages {
        match (function, channel) {
            (Some(name), _) => whole.calls.push((name.to_owned(), text.to_owned())),
            (None, "analysis") => add(&mut whole.reasoning, text),
            (None, _) => add(&mut whole.content, text),
        }
    }
    whole
}

#[test]
fn answers_are_read_as_by_openai() {
    for answer in recorded("answers") {
        let text = answer["text"].as_str().unwrap();
        let messages = answer["messages"].as_array().unwrap().iter().map(|message| {
            let recipient = message["recipient"].as_str();
            (
                message["channel"].as_str().unwrap(),
                recipient.and_then(|name| name.strip_prefix("functions.")),
                message["text"].as_str().unwrap(),
            )
        });
        assert_eq!(read(&format(), [text]), told(messages), "{text}");
    }
}

#[test]
fn answers_of_loose_form_are_read() {
    let call = whole("", "", &[("now", "{}")]);
    for (text, expected) in [
        // Only a call, by its bare name, or without arguments.
        ("<|channel|>commentary to=now<|message|>{}<|call|>", call.clone()),
        (
            "<|channel|>commentary to=functions.now<|message|><|call|>",
            call.clone(),
        ),
        (
            "<|start|>assistant to=functions.now<|channel|>commentary<|constrain|>json<|message|>{}",
            call.clone(),
        ),
        (
            "<|channel|>analysis to=functions.now<|channel|>commentary<|message|>{}<|call|>",
            call.clone(),
        ),
        (" to=functions.now<|message|>{}", call),
        // Missing ends and beginnings.
        (
            "<|channel|>analysis<|message|>Hm.<|channel|>final<|message|>x",
            whole("Hm.", "x", &[]),
        ),
        (
            "<|channel|>analysis<|message|>Hm.<|end|>x",
            whole("Hm.", "x", &[]),
        ),
        (
            "<|channel|>analysis<|message|>Hm.<|start|>assistant<|message|>x<|end|>",
            whole("Hm.", "x", &[]),
        ),
        ("<|message|>x<|return|>", whole("", "x", &[])),
        ("x<|return|>", whole("", "x", &[])),
        ("to be or not", whole("", "to be or not", &[])),
        ("assistants", whole("", "assistants", &[])),
        ("assistant", whole("", "", &[])),
        ("a<|channel|>final<|message|>b", whole("", "ab", &[])),
        ("", whole("", "", &[])),
        (
            "<|channel|>analysis<|message|>Hm.<|end|>\n<|start|>assistant<|channel|>final<|message|>x<|return|>\n",
            whole("Hm.", "x", &[]),
        ),
        // What is not offered is no call; a tool that the model was trained on is part of its thoughts.
        (
            "<|channel|>analysis to=python code<|message|>1 + 1<|call|>",
            whole("1 + 1", "", &[]),
        ),
        (
            "<|channel|>commentary to=browser.open<|message|>{}<|call|>",
            whole("", "{}", &[]),
        ),
        (
            "<|channel|>commentary to=functions.later<|message|>{}",
            whole("", "", &[("later", "{}")]),
        ),
        // Marks without sense, and what is almost one.
        (
            "<|channel|>final<|message|>a<|message|>b<|constrain|>c",
            whole("", "abc", &[]),
        ),
        (
            "<|channel|>final<|message|>a <| b <|en",
            whole("", "a <| b <|en", &[]),
        ),
    ] {
        assert_eq!(read(&format(), [text]), expected, "{text}");
    }
}

#[test]
fn what_is_not_asked_for_is_content() {
    let text = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.now<|message|>{}<|call|>";
    let no_tools = AnswerFormat {
        tools: None,
        ..format()
    };
    assert_eq!(read(&no_tools, [text]), whole("Hm.", "{}", &[]));
    let no_reasoning = AnswerFormat {
        reasoning: None,
        ..format()
    };
    assert_eq!(read(&no_reasoning, [text]), whole("", "Hm.", &[("now", "{}")]));
    let in_reasoning = AnswerFormat {
        position: Position::Reasoning,
        ..format()
    };
    assert_eq!(read(&in_reasoning, ["So.<|end|>Yes."]), whole("So.", "Yes.", &[]));
    let in_answer = AnswerFormat {
        position: Position::Answer,
        ..format()
    };
    assert_eq!(
        read(&in_answer, ["assistant: yes"]),
        whole("", "assistant: yes", &[])
    );
}

#[test]
fn prompts_end_within_messages() {
    for (prompt, position) in [
        (
            "<|start|>user<|message|>x<|end|><|start|>assistant",
            Position::Before,
        ),
        ("<|start|>user<|message|>analysis<|end|>", Position::Before),
        (
            "<|end|><|start|>assistant<|channel|>analysis<|message|>So",
            Position::Reasoning,
        ),
        (
            "<|end|><|start|>assistant<|channel|>final<|message|>analysis",
            Position::Answer,
        ),
    ] {
        assert_eq!(
            ReasoningFormat::Harmony.position_after(prompt),
            position,
            "{prompt}"
        );
    }
}

#[test]
fn reasoning_is_told_while_it_comes() {
    let mut parser = AnswerParser::new(&format());
    assert_eq!(parser.push("<|channel|>analysis<|message|>"), []);
    assert!(parser.in_reasoning());
    assert_eq!(parser.push("Hm"), [Part::Reasoning("Hm".to_owned())]);
    assert_eq!(parser.push("<|end|>"), []);
    assert!(!parser.in_reasoning());
    assert_eq!(
        parser.push("<|start|>assistant<|channel|>commentary to=functions.now"),
        []
    );
    assert_eq!(
        parser.push("<|message|>{\"a\""),
        [
            Part::Call {
                name: "now".to_owned()
            },
            Part::Arguments("{\"a\"".to_owned()),
        ]
    );
    // Cut off: what began stays as it is.
    assert_eq!(parser.cut_off(), []);
}

/// A message: its channel, the function that it calls, and how the header is written.
fn message() -> impl Strategy<Value = (&'static str, Option<&'static str>, u8, String)> {
    let text = "[a-zé<|> {}\n\"]{0,12}";
    let call = prop_oneof![Just("get_weather"), Just("now")];
    prop_oneof![
        text.prop_map(|text| ("analysis", None, 0, text)),
        text.prop_map(|text| ("final", None, 0, text)),
        text.prop_map(|text| ("commentary", None, 0, text)),
        (call, 0..5u8, "\\{[a-z\": ]{0,8}\\}").prop_map(|(name, style, text)| (
            "commentary",
            Some(name),
            style,
            text
        )),
    ]
}

fn header(channel: &str, function: Option<&str>, style: u8) -> String {
    match (function, style) {
        (None, _) => format!("<|channel|>{channel}"),
        (Some(name), 0) => format!("<|channel|>{channel} to=functions.{name} <|constrain|>json"),
        (Some(name), 1) => format!("<|channel|>{channel} to=functions.{name}<|constrain|>json"),
        (Some(name), 2) => format!(" to=functions.{name}<|channel|>{channel} json"),
        (Some(name), 3) => format!("<|channel|>analysis to=functions.{name} code"),
        (Some(name), _) => format!(" to=functions.{name}<|channel|>{channel}"),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn any_cut_gives_the_messages(
        messages in prop::collection::vec(message(), 0..6),
        starts: bool,
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..8),
    ) {
        prop_assume!(messages.iter().all(|(.., text)| MARKS.iter().all(|mark| !text.contains(mark))));
        let texts = messages.iter().enumerate().map(|(index, (channel, function, style, text))| {
            let start = if index > 0 || starts { "<|start|>assistant" } else { "" };
            let end = if function.is_some() { "<|call|>" } else { "<|end|>" };
            format!("{start}{}<|message|>{text}{end}", header(channel, *function, *style))
        });
        let text = texts.collect::<String>();
        let mut expected = told(messages.iter().map(|(channel, function, _, text)| (*channel, *function, text.as_str())));
        let mut at: Vec<_> = cuts.iter().map(|cut| text.floor_char_boundary(cut.index(text.len() + 1))).chain([0, text.len()]).collect();
        at.sort_unstable();
        let pieces = at.windows(2).map(|pair| &text[pair[0]..pair[1]]);
        let whole = read(&format(), pieces);
        prop_assert_eq!(&whole, &read(&format(), [&*text]), "{}", &text);
        // Space around calls is dropped.
        let mut found = whole;
        if !found.calls.is_empty() {
            for content in [&mut found.content, &mut expected.content] {
                content.retain(|c| !c.is_whitespace());
            }
        }
        prop_assert_eq!(found, expected, "{}", &text);
    }
}
