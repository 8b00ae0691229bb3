use std::sync::Arc;

use serde_json::json;

use super::super::json::escape;
use super::super::mark::{Closed, Closing, Marks, Seen};
use super::super::sink::Sink;
use super::parameters::Signature;
use super::{Function, Syntax, python};

pub(super) const MARKS: [&str; 6] = [OPEN, CLOSE, FUNCTION, END_FUNCTION, PARAMETER, END_PARAMETER];
const OPEN: &str = "<tool_call>";
const CLOSE: &str = "</tool_call>";
const FUNCTION: &str = "<function=";
const END_FUNCTION: &str = "</function>";
const PARAMETER: &str = "<parameter=";
const END_PARAMETER: &str = "</parameter>";
/// What ends a value: its closing tag or, where the model forgot that, the next parameter or the end of the function on a line of
/// its own.
pub(super) const ENDS_OF_VALUE: [&str; 3] = [END_PARAMETER, "\n<parameter=", "\n</function>"];

/// Functions and parameters as tags. Values have no types: the schema says which of them are strings.
#[derive(Debug)]
pub(super) struct QwenCoder {
    state: State,
    functions: Arc<[Function]>,
    /// Text that was not emitted: content unless it turns out to be a call.
    held: String,
    /// Signature of the function being called.
    signature: Signature,
    parameters: usize,
}

#[derive(Debug)]
enum State {
    Text(Marks),
    /// Behind `<tool_call>`: a function is expected.
    Open(Closing),
    Name,
    /// Between parameters.
    Between(Marks),
    Key(String),
    Value(Parameter),
    /// Behind a function.
    Closing(Closing),
}

/// The value of a parameter being read.
#[derive(Debug)]
struct Parameter {
    marks: Marks,
    /// A string, emitted as it comes. Other values are JSON, or strings if they are not valid JSON.
    is_string: bool,
    /// Text not emitted: the whole value if it is no string, else a line break that may precede the closing tag.
    text: String,
    begun: bool,
}

impl QwenCoder {
    pub(super) fn new(functions: Arc<[Function]>) -> Self {
        Self {
            state: text(),
            functions,
            held: String::new(),
            signature: Signature::default(),
            parameters: 0,
        }
    }

    fn give_up(&mut self, c: char, sink: &mut Sink) {
        sink.contents(&std::mem::take(&mut self.held));
        self.state = text();
        self.take(c, sink);
    }

    fn end_function(&mut self, sink: &mut Sink) {
        sink.arguments("}");
        self.state = State::Closing(Closing::new(CLOSE));
    }

    fn begin_parameter(&mut self, key: &str, sink: &mut Sink) {
        let comma = if self.parameters > 0 { ", " } else { "" };
        self.parameters += 1;
        sink.arguments(&format!("{comma}{}: ", json!(key)));
        let is_string = self.signature.is_text(key);
        if is_string {
            sink.arguments("\"");
        }
        self.state = State::Value(Parameter {
            marks: Marks::new(&ENDS_OF_VALUE),
            is_string,
            text: String::new(),
            begun: false,
        });
    }
}

fn text() -> State {
    State::Text(Marks::new(&[OPEN, FUNCTION]))
}

impl Parameter {
    fn push(&mut self, text: &str, sink: &mut Sink) {
        if !self.is_string {
            self.text += text;
            return;
        }
        let mut out = String::new();
        for c in text.chars() {
            let first = !std::mem::replace(&mut self.begun, true);
            if first && c == '\n' {
                continue;
            }
            for c in std::mem::take(&mut self.text).chars() {
                escape(c, &mut out);
            }
            match c {
                '\n' => self.text.push(c),
                c => escape(c, &mut out),
            }
        }
        sink.arguments(&out);
    }

    fn end(&mut self, sink: &mut Sink) {
        if self.is_string {
            sink.arguments("\"");
            return;
        }
        sink.arguments(&python::value(&self.text));
    }
}

impl Syntax for QwenCoder {
    fn take(&mut self, c: char, sink: &mut Sink) {
        match &mut self.state {
            State::Text(marks) => match marks.take(c) {
                Seen::Text(text) => sink.contents(&text),
                Seen::Mark { text, index } => {
                    sink.contents(&text);
                    self.held = [OPEN, FUNCTION][index].to_owned();
                    self.state = match index {
                        0 => State::Open(Closing::new(FUNCTION)),
                        _ => State::Name,
                    };
                }
            },
            State::Open(function) => match function.take(c) {
                Closed::More => {}
                Closed::Yes => {
                    self.held += &function.finish();
                    self.state = State::Name;
                }
                Closed::No(rest) => {
                    sink.contents(&std::mem::take(&mut self.held));
                    self.state = text();
                    rest.chars().for_each(|c| self.take(c, sink));
                }
            },
            State::Name if c == '>' => {
                let from = self.held.rfind('=').map_or(0, |at| at + 1);
                let name = self.held[from..].trim().to_owned();
                if name.is_empty() {
                    return self.give_up(c, sink);
                }
                self.held.clear();
                self.parameters = 0;
                self.signature = Signature::of(&name, &self.functions);
                sink.call(&name);
                sink.arguments("{");
                self.state = State::Between(Marks::new(&[PARAMETER, END_FUNCTION, CLOSE]));
            }
            State::Name if matches!(c, '<' | '\n' | '=') => self.give_up(c, sink),
            State::Name => self.held.push(c),
            State::Between(marks) => match marks.take(c) {
                Seen::Text(text) if text.chars().all(char::is_whitespace) => {}
                Seen::Text(text) => {
                    let rest = text + &marks.finish();
                    self.end_function(sink);
                    rest.chars().for_each(|c| self.take(c, sink));
                }
                Seen::Mark { index: 0, .. } => self.state = State::Key(String::new()),
                Seen::Mark { index, .. } => {
                    self.end_function(sink);
                    if index == 2 {
                        self.state = text();
                    }
                }
            },
            State::Key(key) if c == '>' => {
                let key = std::mem::take(key);
                self.begin_parameter(key.trim(), sink);
            }
            State::Key(key) => key.push(c),
            State::Value(value) => match value.marks.take(c) {
                Seen::Text(text) => value.push(&text, sink),
                Seen::Mark { text, index } => {
                    value.push(&text, sink);
                    value.end(sink);
                    match index {
                        0 => self.state = State::Between(Marks::new(&[PARAMETER, END_FUNCTION, CLOSE])),
                        1 => self.state = State::Key(String::new()),
                        _ => self.end_function(sink),
                    }
                }
            },
            State::Closing(closing) => match closing.take(c) {
                Closed::More => {}
                Closed::Yes => self.state = text(),
                Closed::No(rest) => {
                    self.state = text();
                    rest.chars().for_each(|c| self.take(c, sink));
                }
            },
        }
    }

    fn finish(&mut self, sink: &mut Sink) {
        match &mut self.state {
            State::Text(marks) => sink.contents(&marks.finish()),
            State::Open(function) => {
                self.held += &function.finish();
                sink.contents(&self.held);
            }
            State::Name => sink.contents(&self.held),
            State::Value(value) => {
                // Cut off: the incomplete value is emitted as it is.
                let rest = value.marks.finish();
                value.push(&rest, sink);
                if !value.is_string {
                    sink.arguments(&value.text);
                }
            }
            State::Between(_) | State::Key(_) | State::Closing(_) => {}
        }
    }

    fn is_in_markup(&self) -> bool {
        matches!(self.state, State::Open(_) | State::Name)
    }
}
