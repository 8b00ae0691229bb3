//! Calls as JSON objects, or as a name with a JSON object of arguments: behind a mark, or as the whole answer.

use std::sync::Arc;

use super::super::mark::{Closed, Closing, Marks, Seen};
use super::super::sink::Sink;
use super::call::{JsonCall, Outcome};
use super::{Function, Syntax};

/// What stands around the objects of one format.
#[derive(Debug)]
pub(super) struct Layout {
    /// Behind any of these come calls, alone or as a list.
    open: &'static [&'static str],
    /// May follow the calls of one mark.
    close: Option<&'static str>,
    /// Between a name and its arguments, and before an id that may stand between the two; none where no call is written so.
    args: &'static [&'static str],
    /// Calls may be the whole answer, without a mark, and may follow each other directly.
    may_be_bare: bool,
    /// Calls without a mark may come after text.
    after_text: bool,
    /// All of the marks above.
    pub(super) marks: &'static [&'static str],
}

const MARKED: Layout = Layout {
    open: &[],
    close: None,
    args: &[],
    may_be_bare: false,
    after_text: false,
    marks: &[],
};

pub(super) static HERMES: Layout = Layout {
    open: &["<tool_call>"],
    close: Some("</tool_call>"),
    marks: &["<tool_call>", "</tool_call>"],
    ..MARKED
};

pub(super) static PHI4_MINI: Layout = Layout {
    open: &["<|tool_call|>", "functools"],
    close: Some("<|/tool_call|>"),
    marks: &["<|tool_call|>", "functools", "<|/tool_call|>"],
    ..MARKED
};

pub(super) static MISTRAL: Layout = Layout {
    open: &["[TOOL_CALLS]"],
    args: &["[ARGS]", "[CALL_ID]"],
    marks: &["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"],
    ..MARKED
};

pub(super) static LLAMA: Layout = Layout {
    open: &["<|python_tag|>"],
    may_be_bare: true,
    after_text: true,
    marks: &["<|python_tag|>"],
    ..MARKED
};

pub(super) static JSON: Layout = Layout {
    may_be_bare: true,
    ..MARKED
};

/// Reads the calls of one [`Layout`].
#[derive(Debug)]
pub(super) struct JsonCalls {
    layout: &'static Layout,
    state: State,
    functions: Arc<[Function]>,
    /// Text since the last call or mark: content unless a call follows.
    held: String,
    /// The calls stand behind a mark.
    marked: bool,
    /// A list of calls is open.
    in_list: bool,
    /// A call without a mark was complete: what follows may be another one.
    several: bool,
}

#[derive(Debug)]
enum State {
    Text(Marks),
    /// A call may come.
    Ready,
    Name(String),
    /// Behind a name, up to its arguments: a mark, or an id that the model made up between marks.
    BeforeArguments {
        name: String,
        marks: Marks,
        in_id: bool,
    },
    Call(JsonCall),
    /// After a call that may have others behind it.
    Between,
    /// After the calls of one mark.
    Closing(Closing),
}

impl JsonCalls {
    pub(super) fn new(layout: &'static Layout, functions: Arc<[Function]>) -> Self {
        let state = match layout.may_be_bare {
            true => State::Ready,
            false => State::Text(Marks::new(layout.open)),
        };
        Self {
            layout,
            state,
            functions,
            held: String::new(),
            marked: false,
            in_list: false,
            several: false,
        }
    }

    fn text(&mut self) {
        self.state = State::Text(Marks::new(self.layout.open));
        (self.marked, self.in_list, self.several) = (false, false, false);
    }

    /// What was held is text; `c` is the first character after it.
    fn give_up(&mut self, c: char, sink: &mut Sink) {
        sink.contents(&std::mem::take(&mut self.held));
        self.text();
        self.take(c, sink);
    }

    fn begin(&mut self, call: JsonCall, c: char, sink: &mut Sink) {
        self.state = State::Call(call);
        self.call(c, sink);
    }

    fn call(&mut self, c: char, sink: &mut Sink) {
        let State::Call(call) = &mut self.state else {
            return;
        };
        let outcome = call.take(c, sink);
        if call.is_emitted() {
            self.held.clear();
        }
        match outcome {
            Outcome::More => {}
            Outcome::Done => self.end_call(),
            // It stays a call, although it breaks off here.
            Outcome::Wrong if call.is_emitted() => {
                self.end_call();
                self.take(c, sink);
            }
            Outcome::Wrong => {
                call.hand_over(&mut self.held);
                self.give_up(c, sink);
            }
        }
    }

    fn end_call(&mut self) {
        self.several |= self.layout.may_be_bare;
        if self.in_list || self.layout.may_be_bare {
            self.state = State::Between;
        } else if let Some(close) = self.layout.close {
            self.state = State::Closing(Closing::new(close));
        } else {
            self.text();
        }
    }
}

fn is_name(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.')
}

impl Syntax for JsonCalls {
    fn take(&mut self, c: char, sink: &mut Sink) {
        let args = self.layout.args;
        match &mut self.state {
            State::Text(marks) if self.layout.after_text && c == '{' => {
                sink.contents(&marks.finish());
                self.begin(JsonCall::bare(&self.functions), c, sink);
            }
            State::Text(marks) => match marks.take(c) {
                Seen::Text(text) => sink.contents(&text),
                Seen::Mark { text, index } => {
                    sink.contents(&text);
                    self.layout.open[index].clone_into(&mut self.held);
                    self.marked = true;
                    self.state = State::Ready;
                }
            },
            State::Ready | State::Between if c.is_whitespace() => self.held.push(c),
            State::Ready | State::Between if c == '{' => {
                let call = match self.marked {
                    true => JsonCall::marked(),
                    false => JsonCall::bare(&self.functions),
                };
                self.begin(call, c, sink);
            }
            State::Ready if c == '[' && !self.in_list => {
                self.held.push(c);
                self.in_list = true;
            }
            State::Ready if !args.is_empty() && is_name(c) && !self.in_list => {
                self.held.push(c);
                self.state = State::Name(c.to_string());
            }
            State::Name(name) if is_name(c) => {
                name.push(c);
                self.held.push(c);
            }
            State::Name(name) if c == '{' => {
                let name = std::mem::take(name);
                self.begin(JsonCall::named(name), c, sink);
            }
            State::Name(name) if c == '[' => {
                self.state = State::BeforeArguments {
                    name: std::mem::take(name),
                    marks: Marks::new(args),
                    in_id: false,
                };
                self.take(c, sink);
            }
            State::BeforeArguments { name, marks, in_id } => {
                self.held.push(c);
                match marks.take(c) {
                    Seen::Mark { index: 0, .. } => {
                        self.state = State::Call(JsonCall::named(std::mem::take(name)));
                    }
                    Seen::Mark { .. } => *in_id = true,
                    Seen::Text(text) if text.is_empty() || *in_id && text.chars().all(is_name) => {}
                    Seen::Text(_) => {
                        self.held.pop();
                        self.give_up(c, sink);
                    }
                }
            }
            State::Call(_) => self.call(c, sink),
            State::Between if self.in_list && c == ',' => self.held.push(c),
            State::Between if self.in_list && c == ']' => {
                self.in_list = false;
                self.end_call();
            }
            State::Between if self.layout.may_be_bare && c == ';' => self.held.push(c),
            State::Closing(closing) => match closing.take(c) {
                Closed::More => {}
                Closed::Yes => self.text(),
                Closed::No(rest) => {
                    self.text();
                    rest.chars().for_each(|c| self.take(c, sink));
                }
            },
            State::Ready | State::Name(_) | State::Between => self.give_up(c, sink),
        }
    }

    fn finish(&mut self, sink: &mut Sink) {
        match &mut self.state {
            State::Text(marks) => self.held = marks.finish(),
            // Separators without a call after them.
            State::Between | State::Closing(_) => return,
            State::Call(call) if call.is_emitted() => return,
            State::Call(call) => call.hand_over(&mut self.held),
            State::Ready | State::Name(_) | State::BeforeArguments { .. } => {}
        }
        sink.contents(&std::mem::take(&mut self.held));
    }

    fn cut_off(&mut self, sink: &mut Sink) {
        if let State::Call(call) = &mut self.state
            && call.cut_off(sink)
        {
            return;
        }
        match self.is_in_markup() {
            true => sink.drop_space(),
            false => self.finish(sink),
        }
    }

    fn is_in_markup(&self) -> bool {
        match &self.state {
            State::Text(_) | State::Between | State::Closing(_) => false,
            State::Call(call) => (self.marked || self.several) && !call.is_emitted(),
            State::Ready | State::Name(_) | State::BeforeArguments { .. } => self.marked,
        }
    }
}
