use std::sync::Arc;

use super::super::mark::{Marks, Seen};
use super::super::sink::Sink;
use super::call::{JsonCall, Outcome};
use super::{Function, Syntax};

pub(super) const MARKS: [&str; 2] = [OPEN, CLOSE];
const OPEN: &str = "<tool_call>";
const CLOSE: &str = "</tool_call>";

/// Objects between tags.
#[derive(Debug)]
pub(super) struct Hermes {
    state: State,
}

#[derive(Debug)]
enum State {
    Text(Marks),
    Call(JsonCall),
    /// The call is complete; what may be space and the closing tag.
    Closing(Closing),
}

impl Hermes {
    pub(super) fn new(_: Arc<[Function]>) -> Self {
        Self { state: text() }
    }
}

fn text() -> State {
    State::Text(Marks::new(&[OPEN]))
}

impl Syntax for Hermes {
    fn take(&mut self, c: char, sink: &mut Sink) {
        match &mut self.state {
            State::Text(marks) => match marks.take(c) {
                Seen::Text(text) => sink.contents(&text),
                Seen::Mark { text, .. } => {
                    sink.contents(&text);
                    self.state = State::Call(JsonCall::marked());
                }
            },
            State::Call(call) => match call.take(c, sink) {
                Outcome::More => {}
                Outcome::Done => self.state = State::Closing(Closing::new(CLOSE)),
                Outcome::Wrong if call.is_told() => {
                    // Told, and broken off.
                    self.state = State::Closing(Closing::new(CLOSE));
                    self.take(c, sink);
                }
                Outcome::Wrong => {
                    let mut content = OPEN.to_owned();
                    call.hand_over(&mut content);
                    sink.contents(&content);
                    self.state = text();
                    self.take(c, sink);
                }
            },
            State::Closing(closing) => match closing.take(c) {
                Closed::More => {}
                Closed::Yes => self.state = text(),
                Closed::No(held) => {
                    self.state = text();
                    held.chars().for_each(|c| self.take(c, sink));
                }
            },
        }
    }

    fn finish(&mut self, sink: &mut Sink) {
        match &mut self.state {
            State::Text(marks) => sink.contents(&marks.finish()),
            State::Call(call) if call.is_told() => {}
            State::Call(call) => {
                let mut content = OPEN.to_owned();
                call.hand_over(&mut content);
                sink.contents(&content);
            }
            State::Closing(_) => {}
        }
    }

    fn is_in_markup(&self) -> bool {
        matches!(&self.state, State::Call(call) if !call.is_told())
    }
}

/// A mark that is expected after space, but may be missing.
#[derive(Debug)]
pub(super) struct Closing {
    mark: &'static str,
    space: String,
    matched: usize,
}

pub(super) enum Closed {
    More,
    Yes,
    /// It is missing; this is text.
    No(String),
}

impl Closing {
    pub(super) fn new(mark: &'static str) -> Self {
        Self {
            mark,
            space: String::new(),
            matched: 0,
        }
    }

    pub(super) fn take(&mut self, c: char) -> Closed {
        if self.matched == 0 && c.is_whitespace() {
            self.space.push(c);
            return Closed::More;
        }
        if self.mark[self.matched..].starts_with(c) {
            self.matched += c.len_utf8();
            return match self.matched == self.mark.len() {
                true => Closed::Yes,
                false => Closed::More,
            };
        }
        Closed::No(format!("{}{}{c}", self.space, &self.mark[..self.matched]))
    }

    /// What was held back.
    pub(super) fn finish(&mut self) -> String {
        format!("{}{}", self.space, &self.mark[..self.matched])
    }
}
