//! Separates reasoning from the answer.

use super::mark::{Marks, Seen};

/// How reasoning is marked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReasoningFormat {
    /// `<think>..</think>` (Qwen3, SmolLM3 and many others).
    Think,
    /// The same, but the answer begins within reasoning unless the prompt ends with `</think>` (DeepSeek R1).
    DeepseekR1,
    /// `[THINK]..[/THINK]` (Mistral).
    Mistral,
    /// `<seed:think>..</seed:think>` (Seed OSS).
    SeedOss,
}

impl ReasoningFormat {
    /// Names of `--reasoning-parser`: vLLM's.
    pub const NAMES: &[(&str, Self)] = &[
        ("qwen3", Self::Think),
        ("deepseek_r1", Self::DeepseekR1),
        ("mistral", Self::Mistral),
        ("seed_oss", Self::SeedOss),
    ];

    /// The format of a chat template, if it has one.
    pub fn detect(template: &str) -> Option<Self> {
        let formats = [Self::SeedOss, Self::Mistral, Self::Think];
        formats.into_iter().find(|format| {
            let [_, close] = format.marks();
            template.contains(close)
        })
    }

    /// The marks around reasoning.
    pub fn marks(self) -> &'static [&'static str; 2] {
        match self {
            Self::Think | Self::DeepseekR1 => &["<think>", "</think>"],
            Self::Mistral => &["[THINK]", "[/THINK]"],
            Self::SeedOss => &["<seed:think>", "</seed:think>"],
        }
    }

    /// Whether a model that continues `prompt` is within reasoning.
    pub fn is_open_after(self, prompt: &str) -> bool {
        let [open, close] = self.marks();
        let prompt = prompt.trim_end();
        prompt.ends_with(open) || self == Self::DeepseekR1 && !prompt.ends_with(close)
    }

    /// True if `prompt` ends after reasoning.
    pub fn is_over_after(self, prompt: &str) -> bool {
        let [_, close] = self.marks();
        prompt.trim_end().ends_with(close)
    }
}

/// What a piece of text belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Region {
    Reasoning,
    Answer,
}

/// Finds the end of reasoning. Whitespace around it and before the answer is dropped.
#[derive(Debug)]
pub(super) struct Splitter {
    state: State,
    marks: Marks,
    /// Whitespace that is dropped if nothing follows.
    space: String,
    /// Text from the first mark of a call on. If reasoning is never closed, it is the answer: some models forget `</think>` before
    /// a call.
    call: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Nothing but space so far: reasoning may begin.
    Before,
    /// Reasoning has begun, and only space came since.
    Begun,
    Inside,
    /// Reasoning is over, and only space came since.
    Over,
    Answer,
}

const OPEN: usize = 0;
const CLOSE: usize = 1;

impl Splitter {
    /// `call` is what begins a call, if there is such a mark.
    pub(super) fn new(format: ReasoningFormat, is_open: bool, call: Option<&'static str>) -> Self {
        let marks: Vec<_> = format.marks().iter().copied().chain(call).collect();
        Self {
            state: if is_open { State::Begun } else { State::Before },
            marks: Marks::new(&marks),
            space: String::new(),
            call: None,
        }
    }

    pub(super) fn is_inside(&self) -> bool {
        matches!(self.state, State::Begun | State::Inside)
    }

    /// Appends the text that is certain after `c` to `out`.
    pub(super) fn take(&mut self, c: char, out: &mut String) -> Region {
        match self.state {
            State::Answer => {
                out.push(c);
                return Region::Answer;
            }
            State::Over => {
                if !c.is_whitespace() {
                    self.state = State::Answer;
                    out.push(c);
                }
                return Region::Answer;
            }
            State::Before | State::Begun | State::Inside => {}
        }
        let (text, mark) = match self.marks.take(c) {
            Seen::Text(text) => (text, None),
            Seen::Mark { text, index } => (text, Some((index, self.marks.mark(index)))),
        };
        if self.state == State::Before {
            self.before(&text, mark, out)
        } else {
            self.inside(&text, mark, out)
        }
    }

    fn before(&mut self, text: &str, mark: Option<(usize, &str)>, out: &mut String) -> Region {
        self.space += text;
        let only_space = self.space.chars().all(char::is_whitespace);
        match mark {
            Some((OPEN, _)) if only_space => {
                self.space.clear();
                self.state = State::Begun;
            }
            // The model omitted the opening mark.
            Some((CLOSE, _)) if only_space => {
                self.space.clear();
                self.state = State::Over;
            }
            None if only_space => {}
            _ => {
                self.state = State::Answer;
                out.push_str(&std::mem::take(&mut self.space));
                out.push_str(mark.map_or("", |(_, mark)| mark));
                out.push_str(&self.marks.finish());
            }
        }
        Region::Answer
    }

    fn inside(&mut self, text: &str, mark: Option<(usize, &str)>, out: &mut String) -> Region {
        self.add(text, out);
        match mark {
            Some((CLOSE, _)) => {
                let call = self.call.take().unwrap_or_default();
                self.add(&call, out);
                self.space.clear();
                self.state = State::Over;
            }
            // Some models open what the template has opened.
            Some((OPEN, _)) if self.state == State::Begun && self.call.is_none() => {}
            Some((OPEN, mark)) => self.add(mark, out),
            Some((_, mark)) => self.call.get_or_insert_default().push_str(mark),
            None => {}
        }
        Region::Reasoning
    }

    /// Text of reasoning, which is held back behind the mark of a call.
    fn add(&mut self, text: &str, out: &mut String) {
        match &mut self.call {
            Some(call) => call.push_str(text),
            None => text.chars().for_each(|c| self.think(c, out)),
        }
    }

    fn think(&mut self, c: char, out: &mut String) {
        if c.is_whitespace() {
            if self.state == State::Inside {
                self.space.push(c);
            }
            return;
        }
        self.state = State::Inside;
        out.push_str(&std::mem::take(&mut self.space));
        out.push(c);
    }

    /// Appends the text that was held back to `out`.
    pub(super) fn finish(&mut self, out: &mut String) -> Region {
        let rest = self.marks.finish();
        match self.state {
            State::Begun | State::Inside => {
                self.add(&rest, out);
                match self.call.take() {
                    Some(call) => {
                        *out = call;
                        Region::Answer
                    }
                    None => Region::Reasoning,
                }
            }
            State::Before | State::Over | State::Answer => {
                out.push_str(&std::mem::take(&mut self.space));
                out.push_str(&rest);
                Region::Answer
            }
        }
    }
}
