use serde_json::{Value, json};

use super::super::json::escape;
use super::super::mark::{Marks, Seen};
use super::super::sink::Sink;
use super::{Syntax, python};

pub(super) const MARKS: [&str; 3] = [OPEN, CLOSE, QUOTE];
pub(super) const OPEN: &str = "<|tool_call>";
pub(super) const CLOSE: &str = "<tool_call|>";
/// Around strings.
pub(super) const QUOTE: &str = "<|\"|>";
/// What the model writes where results of calls are to follow.
pub(super) const RESPONSE: &str = "<|tool_response>";
/// Before a name.
const CALL: &str = "call:";
/// Deepest nesting that is read.
const MAX_DEPTH: usize = 64;

/// `<|tool_call>call:name{key:value}<tool_call|>`, as the chat template of Gemma 4 writes it: strings between marks, keys without,
/// all else as in JSON. JSON's own strings are read too.
#[derive(Debug)]
pub(super) struct Gemma4 {
    state: State,
    /// Text that was not emitted: content unless it turns out to be a call.
    held: String,
    /// The call was emitted; its arguments are incomplete.
    emitted: bool,
    /// What is open, innermost last.
    open: Vec<Open>,
    /// Something precedes in what is innermost.
    has_some: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Open {
    Object,
    List,
}

#[derive(Debug)]
enum State {
    Text(Marks),
    /// `call:`, a name, and what opens the arguments.
    Head(String),
    /// A key of an object, or its end.
    Key(String),
    /// A value, or the end of a list.
    Value,
    /// The mark before a string, so far.
    Opening(String),
    /// A string up to the mark behind it, of a value or of a key.
    Quoted(Marks, Option<String>),
    /// A string as in JSON; the last character was a backslash.
    Json(String, bool, IsKey),
    /// Behind a key.
    Colon,
    /// A number or a word.
    Scalar(String),
    /// Behind a value.
    After,
    /// Behind the arguments.
    Close(Marks),
}

type IsKey = bool;

impl Gemma4 {
    pub(super) fn new() -> Self {
        Self {
            state: text(),
            held: String::new(),
            emitted: false,
            open: Vec::new(),
            has_some: false,
        }
    }

    /// Closes a call that was emitted; held text and all that follows is content.
    fn give_up(&mut self, sink: &mut Sink) {
        let held = std::mem::take(&mut self.held);
        if std::mem::take(&mut self.emitted) {
            if matches!(self.state, State::Value | State::Colon) && self.innermost(Open::Object) {
                sink.arguments("null");
            }
            while let Some(open) = self.open.pop() {
                sink.arguments(close(open));
            }
        }
        self.open.clear();
        self.state = text();
        sink.contents(&held);
    }

    /// What comes between two keys or elements.
    fn comma(&mut self, sink: &mut Sink) {
        if std::mem::replace(&mut self.has_some, true) {
            sink.arguments(", ");
        }
    }

    fn push(&mut self, open: Open, sink: &mut Sink) {
        sink.arguments(if open == Open::Object { "{" } else { "[" });
        self.open.push(open);
        self.has_some = false;
        self.state = match open {
            Open::Object => State::Key(String::new()),
            Open::List => State::Value,
        };
    }

    fn pop(&mut self, sink: &mut Sink) {
        if let Some(open) = self.open.pop() {
            sink.arguments(close(open));
        }
        self.has_some = true;
        self.state = match self.open.is_empty() {
            false => State::After,
            true => {
                self.emitted = false;
                State::Close(Marks::new(&[CLOSE]))
            }
        };
    }

    fn key(&mut self, key: &str, sink: &mut Sink) {
        self.comma(sink);
        sink.arguments(&format!("{}: ", json!(key)));
    }

    fn innermost(&self, open: Open) -> bool {
        self.open.last() == Some(&open)
    }

    /// A character behind which a value is over; false if it is something else.
    fn after(&mut self, c: char, sink: &mut Sink) -> bool {
        match c {
            ',' if self.innermost(Open::Object) => self.state = State::Key(String::new()),
            ',' => self.state = State::Value,
            '}' if self.innermost(Open::Object) => self.pop(sink),
            ']' if self.innermost(Open::List) => self.pop(sink),
            _ => return false,
        }
        true
    }

    /// The beginning of a value; false if it is none.
    fn value(&mut self, c: char, sink: &mut Sink) -> bool {
        let in_list = self.innermost(Open::List);
        if in_list && c == ']' {
            self.pop(sink);
            return true;
        }
        if matches!(c, ',' | ':' | '}' | ']') || self.open.len() >= MAX_DEPTH {
            return false;
        }
        if in_list {
            self.comma(sink);
        }
        match c {
            '{' => self.push(Open::Object, sink),
            '[' => self.push(Open::List, sink),
            '"' => self.state = State::Json("\"".to_owned(), false, false),
            '<' => self.state = State::Opening(c.to_string()),
            c => self.state = State::Scalar(c.to_string()),
        }
        true
    }
}

fn text() -> State {
    State::Text(Marks::new(&[OPEN]))
}

fn close(open: Open) -> &'static str {
    match open {
        Open::Object => "}",
        Open::List => "]",
    }
}

fn escaped(text: &str) -> String {
    let mut out = String::new();
    text.chars().for_each(|c| escape(c, &mut out));
    out
}

impl Syntax for Gemma4 {
    fn take(&mut self, c: char, sink: &mut Sink) {
        let space = c.is_whitespace();
        match &mut self.state {
            State::Text(marks) => match marks.take(c) {
                Seen::Text(text) => sink.contents(&text),
                Seen::Mark { text, .. } => {
                    sink.contents(&text);
                    OPEN.clone_into(&mut self.held);
                    self.state = State::Head(String::new());
                }
            },
            State::Head(head) => {
                self.held.push(c);
                if c == '{' {
                    let head = std::mem::take(head);
                    match head.trim().strip_prefix(CALL).map(str::trim) {
                        Some(name) if !name.is_empty() => {
                            self.held.clear();
                            sink.call(name);
                            self.emitted = true;
                            self.push(Open::Object, sink);
                        }
                        _ => self.give_up(sink),
                    }
                } else {
                    head.push(c);
                    let begun = head.trim_start();
                    if !CALL.starts_with(begun) && !begun.starts_with(CALL) || c == '<' {
                        self.held.pop();
                        self.give_up(sink);
                        self.take(c, sink);
                    }
                }
            }
            State::Key(key) if key.is_empty() && space => {}
            State::Key(key) if c == '}' && key.trim().is_empty() => self.pop(sink),
            State::Key(key) if c == '"' && key.is_empty() => {
                self.state = State::Json("\"".to_owned(), false, true);
            }
            State::Key(key) => {
                key.push(c);
                if key == QUOTE {
                    self.state = State::Quoted(Marks::new(&[QUOTE]), Some(String::new()));
                } else if c == ':' {
                    let key = key[..key.len() - 1].trim().to_owned();
                    self.key(&key, sink);
                    self.state = State::Value;
                }
            }
            State::Value if space => {}
            State::Value => {
                if !self.value(c, sink) {
                    self.give_up(sink);
                    self.take(c, sink);
                }
            }
            State::Quoted(marks, key) => match (marks.take(c), key) {
                (Seen::Text(text), Some(key)) => key.push_str(&text),
                (Seen::Mark { text, .. }, Some(key)) => {
                    key.push_str(&text);
                    let key = std::mem::take(key);
                    self.key(&key, sink);
                    self.state = State::Colon;
                }
                (Seen::Text(text), None) => sink.arguments(&escaped(&text)),
                (Seen::Mark { text, .. }, None) => {
                    sink.arguments(&format!("{}\"", escaped(&text)));
                    self.state = State::After;
                }
            },
            State::Opening(mark) => {
                mark.push(c);
                if mark == QUOTE {
                    sink.arguments("\"");
                    self.state = State::Quoted(Marks::new(&[QUOTE]), None);
                } else if !QUOTE.starts_with(&*mark) {
                    mark.pop();
                    self.state = State::Scalar(std::mem::take(mark));
                    self.take(c, sink);
                }
            }
            State::Json(text, backslash, is_key) => {
                text.push(c);
                let ends = c == '"' && !*backslash;
                *backslash = c == '\\' && !*backslash;
                if ends {
                    let (text, is_key) = (std::mem::take(text), *is_key);
                    let string = serde_json::from_str(&text).unwrap_or(text);
                    if is_key {
                        self.key(&string, sink);
                        self.state = State::Colon;
                    } else {
                        sink.arguments(&json!(string).to_string());
                        self.state = State::After;
                    }
                }
            }
            State::Colon if space => {}
            State::Colon if c == ':' => self.state = State::Value,
            State::Scalar(scalar) if !matches!(c, ',' | '}' | ']') => scalar.push(c),
            State::Scalar(scalar) => {
                let scalar = std::mem::take(scalar);
                sink.arguments(&python::value(&scalar));
                self.state = State::After;
                self.take(c, sink);
            }
            State::After if space => {}
            State::Close(marks) => match marks.take(c) {
                Seen::Text(_) => {}
                Seen::Mark { .. } => self.state = text(),
            },
            State::Colon | State::After => {
                if matches!(self.state, State::Colon) || !self.after(c, sink) {
                    self.give_up(sink);
                    self.take(c, sink);
                }
            }
        }
    }

    fn finish(&mut self, sink: &mut Sink) {
        match &mut self.state {
            State::Text(marks) => {
                let rest = marks.finish();
                sink.contents(&rest);
            }
            State::Head(_) => self.give_up(sink),
            // Cut off: what there is of the arguments is emitted as it is.
            State::Scalar(scalar) => {
                let scalar = std::mem::take(scalar);
                sink.arguments(scalar.trim());
            }
            State::Quoted(marks, None) => {
                let rest = marks.finish();
                sink.arguments(&escaped(&rest));
            }
            _ => {}
        }
    }

    fn is_in_markup(&self) -> bool {
        matches!(self.state, State::Head(_))
    }
}

/// Arguments as grammars allow them: strings between marks, but as in JSON within lists and objects.
pub(super) fn written(arguments: &Value) -> String {
    let fields = arguments.as_object().into_iter().flatten();
    let fields: Vec<_> = fields
        .map(|(key, value)| match value {
            Value::String(text) => format!("{key}:{QUOTE}{text}{QUOTE}"),
            other => format!("{key}:{other}"),
        })
        .collect();
    format!("{{{}}}", fields.join(","))
}
