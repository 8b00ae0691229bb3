//! The fuzz target of the parsers of reasoning and tool calls.

use std::sync::Arc;

use plimsoll_text::{AnswerFormat, AnswerParser, Function, Part, Position, ReasoningFormat, ToolFormat};
use serde_json::{Map, Value, json};

/// The first byte chooses the format of calls and reasoning, the second how the text is cut; the rest is a model's text. What
/// it is taken for does not depend on the cuts, and all of it is told where nothing in it can be markup. Where it is a JSON
/// object, a call with these arguments is read back as it was written.
pub(crate) fn answer(data: &[u8]) {
    let [format, cut, text @ ..] = data else {
        return;
    };
    let text = String::from_utf8_lossy(text);
    let format = format_of(*format);
    let whole = joined(read(&format, [&*text]));
    let chars: Vec<char> = text.chars().collect();
    let pieces: Vec<String> = chars
        .chunks(usize::from(*cut) % 9 + 1)
        .map(|piece| piece.iter().collect())
        .collect();
    let cut = joined(read(&format, pieces.iter().map(String::as_str)));
    assert_eq!(whole, cut, "{format:?}");
    if format.tools.is_none() && format.reasoning.is_none() {
        let expected: Vec<_> = (!text.is_empty())
            .then(|| Part::Content(text.to_string()))
            .into_iter()
            .collect();
        assert_eq!(whole, expected);
    }
    if let (Some(tools), Ok(arguments)) = (format.tools, serde_json::from_str(&text)) {
        read_back(tools, &format.functions, &arguments);
    }
}

/// Formats that hold arguments as JSON take any; the others know only what Python, or a tag, can name.
fn read_back(tools: ToolFormat, functions: &Arc<[Function]>, arguments: &Map<String, Value>) {
    if matches!(tools, ToolFormat::Pythonic | ToolFormat::QwenCoder) {
        return;
    }
    let format = AnswerFormat {
        tools: Some(tools),
        functions: Arc::clone(functions),
        ..AnswerFormat::default()
    };
    let text = tools.call("f", &json!(arguments));
    let parts = joined(read(&format, [&*text]));
    let [Part::Call { name }, Part::Arguments(read)] = parts.as_slice() else {
        panic!("{tools:?}: {text} is read as {parts:?}");
    };
    let read: Map<String, Value> = serde_json::from_str(read).unwrap_or_else(|e| panic!("{e}: {read}"));
    assert_eq!((name.as_str(), &read), ("f", arguments), "{tools:?}");
}

fn format_of(byte: u8) -> AnswerFormat {
    let parameters = json!({
        "type": "object",
        "properties": { "city": { "type": "string" }, "days": { "type": "integer" }, "deep": { "type": "object" } },
    });
    let function = |name: &str| Function {
        name: name.to_owned(),
        parameters: parameters.as_object().cloned().unwrap_or_default(),
        strict: false,
    };
    let tools = ToolFormat::NAMES.get(usize::from(byte & 15));
    let reasoning = ReasoningFormat::NAMES.get(usize::from(byte >> 4 & 7));
    AnswerFormat {
        reasoning: reasoning.map(|&(_, format)| format),
        position: match byte >> 7 {
            1 => Position::Reasoning,
            _ => Position::Before,
        },
        tools: tools.map(|&(_, format)| format),
        functions: Arc::new([function("weather"), function("f")]),
        max_calls: byte.is_multiple_of(3).then_some(1),
    }
}

fn read<'a>(format: &AnswerFormat, pieces: impl IntoIterator<Item = &'a str>) -> Vec<Part> {
    let mut parser = AnswerParser::new(format);
    let mut parts: Vec<Part> = pieces.into_iter().flat_map(|piece| parser.push(piece)).collect();
    parts.extend(parser.finish());
    let calls = parts
        .iter()
        .filter(|part| matches!(part, Part::Call { .. }))
        .count();
    assert!(format.max_calls.is_none_or(|most| calls <= most));
    parts
}

/// Parts of the same kind that follow each other as one.
fn joined(parts: Vec<Part>) -> Vec<Part> {
    let mut joined: Vec<Part> = Vec::new();
    for part in parts {
        match (joined.last_mut(), part) {
            (Some(Part::Content(text)), Part::Content(more))
            | (Some(Part::Reasoning(text)), Part::Reasoning(more))
            | (Some(Part::Arguments(text)), Part::Arguments(more)) => *text += &more,
            (_, part) => joined.push(part),
        }
    }
    joined
}
