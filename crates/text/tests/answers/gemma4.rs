//! Answers of Gemma 4.

use plimsoll_text::{AnswerFormat, Position, ReasoningFormat, ToolFormat};
use serde_json::json;

use crate::{read, tools};

/// As the chat template of Gemma 4 writes calls and thinking, and what models make of it.
#[test]
fn gemma_4_thinks_and_calls() {
    let format = AnswerFormat {
        reasoning: Some(ReasoningFormat::Gemma4),
        ..tools(ToolFormat::Gemma4, &["f"])
    };
    let cases = [
        (
            "<|channel>thought\nLet me see.\n<channel|>It is <|tool_call>call:f{city:<|\"|>Paris, {x}<|\"|>,n:[1,<|\"|>b<|\"|>]}<tool_call|>",
            "Let me see.",
            "It is",
            vec![("f", json!({"city": "Paris, {x}", "n": [1, "b"]}))],
        ),
        ("<|channel>thought\n<channel|>Hi", "", "Hi", vec![]),
        ("<|channel>thoughts\n<channel|>Hi", "thoughts", "Hi", vec![]),
        ("<|channel>though<channel|>Hi", "", "Hi", vec![]),
        (
            "<|tool_call>call:f{a:{<|\"|>k<|\"|>:true,b:null}}<tool_call|><|tool_call>call:g{}<tool_call|>",
            "",
            "",
            vec![("f", json!({"a": {"k": true, "b": null}})), ("g", json!({}))],
        ),
        // As JSON, and a word without marks.
        (
            "<|tool_call>call:f{\"a\":\"x\\n\", b: red}<tool_call|>",
            "",
            "",
            vec![("f", json!({"a": "x\n", "b": "red"}))],
        ),
        // What is no value ends the call; the rest is content.
        (
            "<|tool_call>call:f{a:}<tool_call|>",
            "",
            "}<tool_call|>",
            vec![("f", json!({"a": null}))],
        ),
    ];
    for (text, reasoning, content, calls) in cases {
        let whole = read(&format, &[text]);
        assert_eq!(whole.reasoning, reasoning, "{text}");
        assert_eq!(whole.content, content, "{text}");
        assert_eq!(whole.parsed(), calls, "{text}");
        let characters: Vec<String> = text.chars().map(String::from).collect();
        let pieces: Vec<&str> = characters.iter().map(String::as_str).collect();
        assert_eq!(read(&format, &pieces), whole, "{text}");
    }
    // The prompt may have begun or ended the thinking.
    let after = |prompt: &str| ReasoningFormat::Gemma4.position_after(prompt);
    assert_eq!(after("<|turn>model\n<|channel>thought\n"), Position::Reasoning);
    assert_eq!(
        after("<|turn>model\n<|channel>thought\n<channel|>"),
        Position::Answer
    );
    assert_eq!(after("<|turn>model\n"), Position::Before);
    let begun = AnswerFormat {
        position: Position::Reasoning,
        ..format
    };
    let whole = read(&begun, &["thought out<channel|>x"]);
    assert_eq!((&*whole.reasoning, &*whole.content), ("thought out", "x"));
}
