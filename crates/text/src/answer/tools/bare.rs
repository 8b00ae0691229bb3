use std::sync::Arc;

use super::super::mark::{Marks, Seen};
use super::super::sink::Sink;
use super::call::{JsonCall, Outcome};
use super::{Function, Syntax};

pub(super) const MARKS: [&str; 1] = [TAG];
const TAG: &str = "<|python_tag|>";

/// Objects without tags, or behind one: calls are the whole answer, or its end behind the tag.
#[derive(Debug)]
pub(super) struct Bare {
    state: State,
    functions: Arc<[Function]>,
    has_tag: bool,
    /// Text that is layout of calls if calls follow.
    held: String,
    /// A list of calls is open.
    in_list: bool,
    /// The last call was complete: what follows is one more.
    several: bool,
}

#[derive(Debug)]
enum State {
    /// Calls may come; the tag did.
    Ready {
        tagged: bool,
    },
    Call {
        call: JsonCall,
        tagged: bool,
    },
    /// After a call.
    Between {
        tagged: bool,
    },
    Text(Marks),
}

impl Bare {
    pub(super) fn new(functions: Arc<[Function]>, has_tag: bool) -> Self {
        Self {
            state: State::Ready { tagged: false },
            functions,
            has_tag,
            held: String::new(),
            in_list: false,
            several: false,
        }
    }

    /// What was held and all that follows is text.
    fn give_up(&mut self, sink: &mut Sink) {
        self.in_list = false;
        self.several = false;
        let held = std::mem::take(&mut self.held);
        self.state = State::Text(Marks::new(if self.has_tag { &MARKS } else { &[] }));
        sink.contents(&held);
    }

    fn begin(&mut self, c: char, tagged: bool, sink: &mut Sink) {
        let call = match tagged {
            true => JsonCall::marked(),
            false => JsonCall::bare(&self.functions),
        };
        self.state = State::Call { call, tagged };
        self.take(c, sink);
    }
}

impl Syntax for Bare {
    fn take(&mut self, c: char, sink: &mut Sink) {
        match &mut self.state {
            State::Ready { tagged } => {
                let tagged = *tagged;
                match c {
                    '{' => self.begin(c, tagged, sink),
                    '[' if !self.in_list => {
                        self.in_list = true;
                        self.held.push(c);
                    }
                    c if c.is_whitespace() => self.held.push(c),
                    c => {
                        self.give_up(sink);
                        self.take(c, sink);
                    }
                }
            }
            State::Call { call, tagged } => {
                let tagged = *tagged;
                let outcome = call.take(c, sink);
                if call.is_told() {
                    self.held.clear();
                }
                match outcome {
                    Outcome::More => {}
                    Outcome::Done => {
                        self.several = true;
                        self.state = State::Between { tagged };
                    }
                    Outcome::Wrong if call.is_told() => {
                        self.state = State::Between { tagged };
                        self.take(c, sink);
                    }
                    Outcome::Wrong => {
                        call.hand_over(&mut self.held);
                        self.give_up(sink);
                        self.take(c, sink);
                    }
                }
            }
            State::Between { tagged } => {
                let tagged = *tagged;
                match c {
                    '{' => self.begin(c, tagged, sink),
                    ']' if self.in_list => self.in_list = false,
                    ',' if self.in_list => self.held.push(c),
                    ';' => self.held.push(c),
                    c if c.is_whitespace() => self.held.push(c),
                    c => {
                        self.give_up(sink);
                        self.take(c, sink);
                    }
                }
            }
            State::Text(marks) => match marks.take(c) {
                Seen::Text(text) => sink.contents(&text),
                Seen::Mark { text, .. } => {
                    sink.contents(&text);
                    TAG.clone_into(&mut self.held);
                    self.state = State::Ready { tagged: true };
                }
            },
        }
    }

    fn finish(&mut self, sink: &mut Sink) {
        match &mut self.state {
            State::Text(marks) => sink.contents(&marks.finish()),
            State::Call { call, .. } if call.is_told() => {}
            State::Call { call, .. } => {
                call.hand_over(&mut self.held);
                self.give_up(sink);
            }
            State::Ready { .. } => self.give_up(sink),
            // Separators without a call after them.
            State::Between { .. } => {}
        }
    }

    fn is_in_markup(&self) -> bool {
        match &self.state {
            State::Ready { tagged } => *tagged,
            State::Call { call, tagged } => (*tagged || self.several) && !call.is_told(),
            State::Between { .. } | State::Text(_) => false,
        }
    }
}
