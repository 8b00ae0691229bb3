//! Answers in the Harmony format: reasoning, content and calls are messages on channels. Headers are read as loosely as models
//! write them.

use std::sync::Arc;

use super::mark::{Marks, Seen};
use super::position::Position;
use super::sink::Sink;
use super::tools::{Function, Syntax, is_known};
use crate::harmony::{ANALYSIS, ASSISTANT, CHANNEL, CONSTRAIN, MARKS, MESSAGE, NAMESPACE, RECIPIENT, START};

/// Between two messages of the same kind.
const BETWEEN: &str = "\n\n";

/// Reads the messages of an answer.
#[derive(Debug)]
pub(super) struct Harmony {
    marks: Marks,
    state: State,
    /// Whether reasoning is reported apart from content.
    has_reasoning: bool,
    /// Functions that may be called; `None` where nothing may be.
    functions: Option<Arc<[Function]>>,
    /// Some message of this kind has text: the next one begins with [`BETWEEN`].
    reasoned: bool,
    answered: bool,
}

#[derive(Debug)]
enum State {
    Header(Header),
    /// In a message's text; `begun` once it has some.
    Text {
        kind: Kind,
        begun: bool,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Reasoning,
    Content,
    Arguments,
}

/// A header as far as it was read.
#[derive(Debug, Default)]
struct Header {
    /// [`START`] came before it. Otherwise it may turn out to be text, of a model that omits headers.
    is_marked: bool,
    section: Section,
    /// The author, and perhaps the recipient.
    role: String,
    /// The channel, and perhaps the recipient.
    channel: String,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Section {
    #[default]
    Role,
    Channel,
    /// The type of the text, which makes no difference.
    Type,
}

impl Header {
    fn add(&mut self, text: &str) {
        match self.section {
            Section::Role => self.role += text,
            Section::Channel => self.channel += text,
            Section::Type => {}
        }
    }

    /// Whether what was read so far cannot be the beginning of a header.
    fn is_text(&self) -> bool {
        if self.is_marked || self.section != Section::Role {
            return false;
        }
        let names_recipient = |text: &str| RECIPIENT.starts_with(text) || text.starts_with(RECIPIENT);
        let role = self.role.trim_start();
        match role.strip_prefix(ASSISTANT) {
            Some(rest) => !names_recipient(rest.trim_start()),
            None => !ASSISTANT.starts_with(role) && !names_recipient(role),
        }
    }

    /// Takes what was read as a header if it turns out to be text. `mark` is what follows it; `None` at the end of the answer.
    fn take_text(&mut self, mark: Option<&str>) -> Option<String> {
        let goes_on = matches!(mark, Some(CHANNEL | CONSTRAIN | MESSAGE)) && self.role.contains(RECIPIENT);
        let is_header = self.is_marked || self.section != Section::Role || self.role.trim() == ASSISTANT;
        (!goes_on && !is_header).then(|| std::mem::take(&mut self.role))
    }

    fn recipient(&self) -> Option<&str> {
        let words = self
            .channel
            .split_whitespace()
            .chain(self.role.split_whitespace());
        words.filter_map(|word| word.strip_prefix(RECIPIENT)).next()
    }

    fn is_analysis(&self) -> bool {
        self.channel.split_whitespace().next() == Some(ANALYSIS)
    }
}

impl Harmony {
    /// Reads an answer behind a prompt that ends at `position`. Without `has_reasoning`, reasoning is content; without
    /// `functions`, so are calls.
    pub(super) fn new(position: Position, has_reasoning: bool, functions: Option<Arc<[Function]>>) -> Self {
        let text = |kind| State::Text { kind, begun: false };
        let mut harmony = Self {
            marks: Marks::new(&MARKS),
            state: State::Header(Header::default()),
            has_reasoning,
            functions,
            reasoned: false,
            answered: false,
        };
        match position {
            Position::Before => {}
            Position::Reasoning => harmony.state = text(harmony.reasoning()),
            Position::Answer => harmony.state = text(Kind::Content),
        }
        harmony
    }

    fn reasoning(&self) -> Kind {
        match self.has_reasoning {
            true => Kind::Reasoning,
            false => Kind::Content,
        }
    }

    /// The function that a message for `recipient` calls.
    fn called<'a>(&self, recipient: &'a str) -> Option<&'a str> {
        let functions = self.functions.as_deref()?;
        let name = recipient.strip_prefix(NAMESPACE);
        name.filter(|name| !name.is_empty())
            .or_else(|| Some(recipient).filter(|name| is_known(functions, name)))
    }

    /// The text of the header's message begins.
    fn begin(&mut self, header: &Header, sink: &mut Sink) {
        let kind = match header.recipient().and_then(|recipient| self.called(recipient)) {
            Some(name) => {
                sink.call(name);
                Kind::Arguments
            }
            None if header.is_analysis() => self.reasoning(),
            None => Kind::Content,
        };
        self.state = State::Text { kind, begun: false };
    }

    /// More text, which is no mark.
    fn text(&mut self, text: &str, sink: &mut Sink) {
        if text.is_empty() {
            return;
        }
        match &mut self.state {
            State::Header(header) => {
                header.add(text);
                if header.is_text() {
                    let text = std::mem::take(&mut header.role);
                    self.state = State::Text {
                        kind: Kind::Content,
                        begun: false,
                    };
                    self.text(&text, sink);
                }
            }
            State::Text { kind, begun } => {
                let is_first = !std::mem::replace(begun, true);
                let between = |before: &mut bool| match std::mem::replace(before, true) && is_first {
                    true => BETWEEN,
                    false => "",
                };
                match kind {
                    Kind::Arguments => sink.arguments(text),
                    Kind::Reasoning => {
                        sink.reasoning(between(&mut self.reasoned));
                        sink.reasoning(text);
                    }
                    Kind::Content => {
                        sink.contents(between(&mut self.answered));
                        sink.contents(text);
                    }
                }
            }
        }
    }

    fn mark(&mut self, mark: &str, sink: &mut Sink) {
        // Some models omit the end of a message.
        if matches!(self.state, State::Text { .. }) {
            match mark {
                MESSAGE | CONSTRAIN => return,
                _ => self.close(sink),
            }
        }
        let State::Header(header) = &mut self.state else {
            return;
        };
        if let Some(text) = header
            .take_text(Some(mark))
            .filter(|text| !text.trim().is_empty())
        {
            sink.contents(&text);
        }
        match mark {
            MESSAGE => {
                let header = std::mem::take(header);
                self.begin(&header, sink);
            }
            CHANNEL => {
                header.section = Section::Channel;
                // The last channel counts, whoever the recipient was.
                header.role.push(' ');
                header.role += &std::mem::take(&mut header.channel);
            }
            CONSTRAIN => header.section = Section::Type,
            _ => {
                *header = Header {
                    is_marked: mark == START,
                    ..Header::default()
                }
            }
        }
    }

    /// The message ends.
    fn close(&mut self, sink: &mut Sink) {
        if let State::Text {
            kind: Kind::Arguments,
            begun: false,
        } = self.state
        {
            sink.arguments("{}");
        }
        self.state = State::Header(Header::default());
    }
}

impl Syntax for Harmony {
    fn take(&mut self, c: char, sink: &mut Sink) {
        match self.marks.take(c) {
            Seen::Text(text) => self.text(&text, sink),
            Seen::Mark { text, index } => {
                self.text(&text, sink);
                self.mark(MARKS[index], sink);
            }
        }
    }

    fn finish(&mut self, sink: &mut Sink) {
        self.cut_off(sink);
        self.close(sink);
    }

    fn cut_off(&mut self, sink: &mut Sink) {
        let rest = self.marks.finish();
        match &mut self.state {
            State::Text { .. } => self.text(&rest, sink),
            // The beginning of a mark.
            State::Header(_) if rest.len() > 1 => {}
            State::Header(header) => {
                header.add(&rest);
                let is_all = !self.reasoned && !self.answered;
                if let Some(text) = header
                    .take_text(None)
                    .filter(|text| is_all || !text.trim().is_empty())
                {
                    sink.contents(&text);
                }
            }
        }
    }

    fn is_in_markup(&self) -> bool {
        matches!(self.state, State::Header(_))
    }

    fn in_reasoning(&self) -> bool {
        matches!(
            self.state,
            State::Text {
                kind: Kind::Reasoning,
                ..
            }
        )
    }
}
