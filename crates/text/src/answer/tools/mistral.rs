use std::sync::Arc;

use super::super::json::{JsonScan, Scanned, escape_control};
use super::super::mark::{Marks, Seen};
use super::super::sink::Sink;
use super::call::{JsonCall, Outcome};
use super::{Function, Syntax};

pub(super) const MARKS: [&str; 3] = [OPEN, ARGS, CALL_ID];
const OPEN: &str = "[TOOL_CALLS]";
const ARGS: &str = "[ARGS]";
const CALL_ID: &str = "[CALL_ID]";

/// A list of objects, or name and arguments, behind a mark.
#[derive(Debug)]
pub(super) struct Mistral {
    state: State,
    /// Text since the mark that is content unless a call comes of it.
    held: String,
}

#[derive(Debug)]
enum State {
    Text(Marks),
    /// Behind the mark.
    Open,
    /// An object of a list, or alone.
    Object {
        call: JsonCall,
        in_list: bool,
    },
    Between,
    Name(String),
    /// Behind a name, up to the arguments: a mark, or an id that the model made up between marks.
    Marks {
        name: String,
        marks: Marks,
        in_id: bool,
    },
    Start(String),
    Arguments(JsonScan),
}

impl Mistral {
    pub(super) fn new(_: Arc<[Function]>) -> Self {
        Self {
            state: text(),
            held: String::new(),
        }
    }

    /// What was held is text, and what follows is read as such.
    fn give_up(&mut self, c: char, sink: &mut Sink) {
        sink.contents(&std::mem::take(&mut self.held));
        self.state = text();
        self.take(c, sink);
    }

    fn tell(&mut self, name: &str, c: char, sink: &mut Sink) {
        self.held.clear();
        sink.call(name);
        self.state = State::Arguments(JsonScan::new());
        self.take(c, sink);
    }

    fn object(&mut self, c: char, sink: &mut Sink) {
        let State::Object { call, in_list } = &mut self.state else {
            return;
        };
        let in_list = *in_list;
        let outcome = call.take(c, sink);
        let told = call.is_told();
        if told {
            self.held.clear();
        }
        match outcome {
            Outcome::More => {}
            Outcome::Done if in_list => self.state = State::Between,
            Outcome::Done => self.state = text(),
            Outcome::Wrong => {
                call.hand_over(&mut self.held);
                self.give_up(c, sink);
            }
        }
    }
}

fn text() -> State {
    State::Text(Marks::new(&[OPEN]))
}

fn is_name(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.')
}

impl Syntax for Mistral {
    fn take(&mut self, c: char, sink: &mut Sink) {
        let space = c.is_whitespace();
        match &mut self.state {
            State::Text(marks) => match marks.take(c) {
                Seen::Text(text) => sink.contents(&text),
                Seen::Mark { text, .. } => {
                    sink.contents(&text);
                    OPEN.clone_into(&mut self.held);
                    self.state = State::Open;
                }
            },
            State::Open if space => self.held.push(c),
            State::Open if c == '[' => {
                self.held.push(c);
                let call = JsonCall::marked();
                self.state = State::Object { call, in_list: true };
            }
            State::Open if c == '{' => {
                let call = JsonCall::marked();
                self.state = State::Object { call, in_list: false };
                self.object(c, sink);
            }
            State::Open if is_name(c) => {
                self.held.push(c);
                self.state = State::Name(c.to_string());
            }
            State::Object { .. } => self.object(c, sink),
            State::Between if space => {}
            State::Between if c == ',' => {
                let call = JsonCall::marked();
                self.state = State::Object { call, in_list: true };
            }
            State::Between if c == ']' => self.state = text(),
            State::Name(name) if is_name(c) => {
                name.push(c);
                self.held.push(c);
            }
            State::Name(name) if c == '{' => {
                let name = std::mem::take(name);
                self.tell(&name, c, sink);
            }
            State::Name(name) if c == '[' => {
                self.state = State::Marks {
                    name: std::mem::take(name),
                    marks: Marks::new(&[ARGS, CALL_ID]),
                    in_id: false,
                };
                self.take(c, sink);
            }
            State::Marks { name, marks, in_id } => {
                self.held.push(c);
                match marks.take(c) {
                    Seen::Mark { index: 0, .. } => self.state = State::Start(std::mem::take(name)),
                    Seen::Mark { .. } => *in_id = true,
                    Seen::Text(text) if text.is_empty() || *in_id && text.chars().all(is_name) => {}
                    Seen::Text(_) => {
                        self.held.pop();
                        self.give_up(c, sink);
                    }
                }
            }
            State::Start(_) if space => self.held.push(c),
            State::Start(name) if c == '{' => {
                let name = std::mem::take(name);
                self.tell(&name, c, sink);
            }
            State::Arguments(scan) => {
                let in_string = scan.in_string();
                let scanned = scan.take(c);
                if matches!(scanned, Scanned::Inside | Scanned::Last) {
                    let mut text = String::new();
                    match in_string {
                        true => escape_control(c, &mut text),
                        false => text.push(c),
                    }
                    sink.arguments(&text);
                }
                match scanned {
                    Scanned::Inside => {}
                    Scanned::Last => self.state = text(),
                    Scanned::After | Scanned::Wrong => self.give_up(c, sink),
                }
            }
            State::Open | State::Between | State::Name(_) | State::Start(_) => self.give_up(c, sink),
        }
    }

    fn finish(&mut self, sink: &mut Sink) {
        match &mut self.state {
            State::Text(marks) => self.held.push_str(&marks.finish()),
            State::Object { call, .. } if !call.is_told() => call.hand_over(&mut self.held),
            _ => {}
        }
        sink.contents(&std::mem::take(&mut self.held));
    }

    fn is_in_markup(&self) -> bool {
        match &self.state {
            State::Text(_) => false,
            State::Object { call, .. } => !call.is_told(),
            _ => !self.held.is_empty(),
        }
    }
}
