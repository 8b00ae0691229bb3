use std::sync::Arc;

use serde_json::json;

use super::super::mark::{Marks, Seen};
use super::super::sink::Sink;
use super::parameters::Signature;
use super::{Function, Syntax, is_known, python};

pub(super) const MARKS: [&str; 2] = [OPEN, CLOSE];
const OPEN: &str = "<|python_start|>";
const CLOSE: &str = "<|python_end|>";

/// A list of Python calls: the whole answer, or behind a mark.
#[derive(Debug)]
pub(super) struct Pythonic {
    state: State,
    functions: Arc<[Function]>,
    /// Text that was not emitted: content unless it turns out to be a call.
    held: String,
    tagged: bool,
    /// The list has at least one call.
    several: bool,
    /// The current call was emitted; its arguments are incomplete.
    emitted: bool,
    arguments: usize,
    name: String,
    signature: Signature,
}

#[derive(Debug)]
enum State {
    /// A list may come.
    Ready,
    /// A call is expected.
    Call,
    /// A key, or the end of the arguments.
    Key(String),
    Value {
        key: String,
        value: Literal,
    },
    /// Behind a call.
    Between,
    Text(Marks),
}

/// Finds the end of a Python literal, without checking it.
#[derive(Debug, Default)]
struct Literal {
    text: String,
    depth: usize,
    quote: Option<char>,
    escaped: bool,
}

impl Literal {
    /// False if the literal ended before `c`.
    fn take(&mut self, c: char) -> bool {
        match (self.quote, c) {
            (Some(_), _) if self.escaped => self.escaped = false,
            (Some(_), '\\') => self.escaped = true,
            (Some(quote), c) if c == quote => self.quote = None,
            (Some(_), _) => {}
            (None, '"' | '\'') => self.quote = Some(c),
            (None, '(' | '[' | '{') => self.depth += 1,
            (None, ')' | ',') if self.depth == 0 => return false,
            (None, ')' | ']' | '}') => self.depth = self.depth.saturating_sub(1),
            _ => {}
        }
        self.text.push(c);
        true
    }
}

impl Pythonic {
    pub(super) fn new(functions: Arc<[Function]>) -> Self {
        Self {
            state: State::Ready,
            functions,
            held: String::new(),
            tagged: false,
            several: false,
            emitted: false,
            arguments: 0,
            name: String::new(),
            signature: Signature::default(),
        }
    }

    /// Closes a call that was emitted; held text and all that follows is content.
    fn give_up(&mut self, sink: &mut Sink) {
        let held = std::mem::take(&mut self.held);
        if std::mem::take(&mut self.emitted) {
            sink.arguments("}");
        }
        self.state = State::Text(Marks::new(if self.tagged { &MARKS } else { &[OPEN] }));
        sink.contents(&held);
    }

    fn emit(&mut self, sink: &mut Sink) {
        if !self.emitted {
            self.emitted = true;
            sink.call(&self.name);
            sink.arguments("{");
        }
        self.held.clear();
    }

    fn emit_argument(&mut self, key: &str, text: &str, sink: &mut Sink) {
        let comma = if self.arguments > 0 { ", " } else { "" };
        self.arguments += 1;
        sink.arguments(&format!("{comma}{}: {}", json!(key), python::value(text)));
    }

    fn end_call(&mut self, sink: &mut Sink) {
        self.emit(sink);
        sink.arguments("}");
        self.emitted = false;
        self.state = State::Between;
    }
}

/// Whether `c` can continue a key. Names that the function has may hold any character; other keys only those of names, or, once
/// the call was emitted, anything that does not begin like a value.
fn goes_on(key: &str, c: char, signature: &Signature, emitted: bool) -> bool {
    let is_value = |c| matches!(c, '"' | '\'' | '[' | '(' | '{');
    let begins_value = key.chars().next().map_or(is_value(c), is_value);
    c.is_whitespace()
        || is_name(c)
        || emitted && !matches!(c, ')' | ',') && !begins_value
        || signature.knows_beginning(key, c)
}

fn is_name(c: char) -> bool {
    c.is_alphanumeric() || matches!(c, '_' | '-' | '.')
}

impl Syntax for Pythonic {
    fn take(&mut self, c: char, sink: &mut Sink) {
        if !matches!(self.state, State::Text(_) | State::Value { .. }) {
            self.held.push(c);
        }
        let space = c.is_whitespace();
        match &mut self.state {
            State::Ready if space => {}
            State::Ready if c == '[' => {
                self.name.clear();
                self.state = State::Call;
            }
            State::Call if space && self.name.is_empty() => {}
            State::Call if is_name(c) => self.name.push(c),
            State::Call
                if c == '('
                    && (self.tagged && !self.name.is_empty() || is_known(&self.functions, &self.name)) =>
            {
                self.arguments = 0;
                self.signature = Signature::of(&self.name, &self.functions);
                self.state = State::Key(String::new());
            }
            State::Key(key) if space && key.is_empty() => {}
            State::Key(key) if c == ')' && key.is_empty() => self.end_call(sink),
            State::Key(key) if c == '=' && !key.is_empty() => {
                let key = key.trim_end().to_owned();
                self.emit(sink);
                self.state = State::Value {
                    key,
                    value: Literal::default(),
                };
            }
            State::Key(key) if goes_on(key, c, &self.signature, self.emitted) => key.push(c),
            State::Value { key, value } => {
                if !value.take(c) {
                    let (key, text) = (std::mem::take(key), std::mem::take(&mut value.text));
                    self.emit_argument(&key, &text, sink);
                    match c {
                        ')' => self.end_call(sink),
                        _ => {
                            self.held.push(c);
                            self.state = State::Key(String::new());
                        }
                    }
                }
            }
            State::Between if space => {}
            State::Between if c == ',' => {
                self.several = true;
                self.name.clear();
                self.state = State::Call;
            }
            State::Between if c == ']' => {
                self.held.clear();
                self.give_up(sink);
            }
            State::Text(marks) => match marks.take(c) {
                Seen::Text(text) => sink.contents(&text),
                Seen::Mark { text, index: 0 } => {
                    sink.contents(&text);
                    OPEN.clone_into(&mut self.held);
                    self.tagged = true;
                    self.state = State::Ready;
                }
                Seen::Mark { text, .. } => {
                    sink.contents(&text);
                    self.tagged = false;
                    self.give_up(sink);
                }
            },
            _ => {
                // `c` may begin a mark.
                self.held.pop();
                self.give_up(sink);
                self.take(c, sink);
            }
        }
    }

    fn finish(&mut self, sink: &mut Sink) {
        match &mut self.state {
            State::Text(marks) => {
                let rest = marks.finish();
                sink.contents(&rest);
            }
            State::Value { key, value } => {
                // Cut off: the incomplete argument is emitted as it is.
                let (key, text) = (std::mem::take(key), std::mem::take(&mut value.text));
                let comma = if self.arguments > 0 { ", " } else { "" };
                sink.arguments(&format!("{comma}{}: {}", json!(key), text.trim()));
            }
            State::Key(_) if self.emitted => {}
            // A separator without a call after it.
            State::Call if self.name.is_empty() && self.held.trim_start().starts_with(',') => {}
            State::Between => {}
            State::Ready | State::Call | State::Key(_) => self.give_up(sink),
        }
    }

    fn is_in_markup(&self) -> bool {
        (self.tagged || self.several) && !self.emitted && !matches!(self.state, State::Text(_))
    }
}
