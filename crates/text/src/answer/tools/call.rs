use std::sync::Arc;

use super::super::json::{JsonScan, Scanned, escape_control};
use super::super::sink::Sink;
use super::{Function, is_known};

/// Parses one call incrementally: a JSON object with `name` and `arguments` or `parameters`, in any order. Other fields are
/// ignored.
#[derive(Debug)]
pub(super) struct JsonCall {
    state: State,
    /// Everything so far, until it is certain that this is a call.
    raw: String,
    /// The call has been emitted.
    emitted: bool,
    name: Option<String>,
    /// Arguments that came before the name.
    early: Option<String>,
    /// Only these may be called, if the call has no mark.
    known: Option<Arc<[Function]>>,
    /// The call ends with its arguments: there is no object around them.
    is_named: bool,
}

#[derive(Debug)]
enum State {
    Start,
    KeyOrClose,
    Key,
    InKey(Scalar),
    Colon(String),
    BeforeValue(String),
    InValue(String, Scalar),
    CommaOrClose,
}

/// A JSON value being read.
#[derive(Debug)]
struct Scalar {
    scan: JsonScan,
    text: String,
    /// Emitted as it comes; otherwise collected in `text`.
    streams: bool,
}

impl Scalar {
    fn new() -> Self {
        Self {
            scan: JsonScan::new(),
            text: String::new(),
            streams: false,
        }
    }
}

/// Result of one more character.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    /// The call is incomplete.
    More,
    /// The call is complete.
    Done,
    /// This is no call, or its JSON is invalid. The character is not consumed.
    Wrong,
}

impl JsonCall {
    /// A call behind a mark: of any function, so that the client sees wrong names.
    pub(super) fn marked() -> Self {
        Self::new(None)
    }

    /// A call without a mark: only of known functions, as an answer may look like a call. It is emitted once its arguments are
    /// complete, as only then it is certain that they are JSON.
    pub(super) fn bare(functions: &Arc<[Function]>) -> Self {
        Self::new(Some(Arc::clone(functions)))
    }

    fn new(known: Option<Arc<[Function]>>) -> Self {
        Self {
            state: State::Start,
            raw: String::new(),
            emitted: false,
            name: None,
            early: None,
            known,
            is_named: false,
        }
    }

    /// A call whose name was read: its arguments follow.
    pub(super) fn named(name: String) -> Self {
        Self {
            state: State::BeforeValue("arguments".to_owned()),
            name: Some(name),
            is_named: true,
            ..Self::new(None)
        }
    }

    /// Whether the call was emitted, as it is certain to be one.
    pub(super) fn is_emitted(&self) -> bool {
        self.emitted
    }

    /// Appends the text that was consumed but not emitted.
    pub(super) fn hand_over(&mut self, text: &mut String) {
        text.push_str(&std::mem::take(&mut self.raw));
    }

    pub(super) fn take(&mut self, c: char, sink: &mut Sink) -> Outcome {
        let outcome = self.step(c, sink);
        if self.emitted {
            self.raw.clear();
        } else if outcome != Outcome::Wrong {
            self.raw.push(c);
        }
        outcome
    }

    fn step(&mut self, c: char, sink: &mut Sink) -> Outcome {
        let space = c.is_ascii_whitespace();
        match &mut self.state {
            State::InKey(key) => {
                let scanned = key.scan.take(c);
                key.text.push(c);
                match scanned {
                    Scanned::Inside => {}
                    Scanned::Last => match serde_json::from_str(&key.text) {
                        Ok(key) => self.state = State::Colon(key),
                        Err(_) => return Outcome::Wrong,
                    },
                    Scanned::After | Scanned::Wrong => return Outcome::Wrong,
                }
            }
            State::InValue(..) => return self.value(c, sink),
            _ if space => {}
            State::Start if c == '{' => self.state = State::KeyOrClose,
            State::KeyOrClose | State::Key if c == '"' => {
                let mut key = Scalar::new();
                key.scan.take(c);
                key.text.push(c);
                self.state = State::InKey(key);
            }
            State::Colon(key) if c == ':' => self.state = State::BeforeValue(std::mem::take(key)),
            State::BeforeValue(key) => {
                let key = std::mem::take(key);
                return self.begin_value(key, c, sink);
            }
            State::CommaOrClose if c == ',' => self.state = State::Key,
            State::KeyOrClose | State::CommaOrClose if c == '}' => return self.close(sink),
            _ => return Outcome::Wrong,
        }
        Outcome::More
    }

    fn begin_value(&mut self, key: String, c: char, sink: &mut Sink) -> Outcome {
        let mut value = Scalar::new();
        let is_marked = self.known.is_none();
        value.streams = is_marked && is_arguments(&key) && self.name.is_some() && !self.emitted && c == '{';
        if value.streams {
            self.emit(sink);
        }
        self.state = State::InValue(key, value);
        self.value(c, sink)
    }

    fn value(&mut self, c: char, sink: &mut Sink) -> Outcome {
        let State::InValue(key, value) = &mut self.state else {
            return Outcome::Wrong;
        };
        let in_string = value.scan.in_string();
        let scanned = value.scan.take(c);
        if matches!(scanned, Scanned::Inside | Scanned::Last) {
            if in_string {
                // Models write raw line breaks into strings.
                escape_control(c, &mut value.text);
            } else {
                value.text.push(c);
            }
            if value.streams {
                sink.arguments(&std::mem::take(&mut value.text));
            }
        }
        match scanned {
            Scanned::Inside => Outcome::More,
            Scanned::Wrong => Outcome::Wrong,
            Scanned::Last | Scanned::After => {
                let (key, text) = (std::mem::take(key), std::mem::take(&mut value.text));
                let streamed = value.streams;
                self.state = State::CommaOrClose;
                if !streamed && !self.keep(&key, text, sink) {
                    return Outcome::Wrong;
                }
                match scanned {
                    Scanned::After => self.step(c, sink),
                    _ if self.is_named => Outcome::Done,
                    _ => Outcome::More,
                }
            }
        }
    }

    /// Uses a complete value that was not emitted as it came; false if no call can have it.
    fn keep(&mut self, key: &str, text: String, sink: &mut Sink) -> bool {
        if key == "name" && self.name.is_none() {
            let Ok(name) = serde_json::from_str::<String>(&text) else {
                return false;
            };
            let legal = !name.is_empty() && self.known.as_ref().is_none_or(|known| is_known(known, &name));
            self.name = Some(name);
            if legal && let Some(early) = self.early.take() {
                self.emit(sink);
                sink.arguments(&early);
            }
            return legal;
        }
        if is_arguments(key) && !self.emitted {
            let Some(arguments) = arguments(text) else {
                return false;
            };
            if self.name.is_some() {
                self.emit(sink);
                sink.arguments(&arguments);
            } else {
                self.early = Some(arguments);
            }
        }
        true
    }

    /// Emits a call that was cut off within its arguments; false if it has none yet, or was emitted before.
    pub(super) fn cut_off(&mut self, sink: &mut Sink) -> bool {
        let State::InValue(key, value) = &mut self.state else {
            return false;
        };
        let begun = is_arguments(key) && self.name.is_some() && !self.emitted && value.text.starts_with('{');
        if begun {
            let arguments = std::mem::take(&mut value.text);
            self.emit(sink);
            sink.arguments(&arguments);
        }
        begun
    }

    fn close(&mut self, sink: &mut Sink) -> Outcome {
        if self.name.is_none() {
            return Outcome::Wrong;
        }
        if !self.emitted {
            self.emit(sink);
            sink.arguments("{}");
        }
        Outcome::Done
    }

    fn emit(&mut self, sink: &mut Sink) {
        if let Some(name) = self.name.as_deref().filter(|_| !self.emitted) {
            sink.call(name);
            self.emitted = true;
        }
    }
}

fn is_arguments(key: &str) -> bool {
    matches!(key, "arguments" | "parameters")
}

/// Arguments as a JSON object. Some models write it as a string, as the API does, or null for none. `None` if it is no object.
fn arguments(text: String) -> Option<String> {
    let is_object = |text: &String| text.trim_start().starts_with('{');
    match text.trim() {
        "null" => Some("{}".to_owned()),
        quoted if quoted.starts_with('"') => serde_json::from_str(quoted).ok().filter(is_object),
        _ => Some(text).filter(is_object),
    }
}
