//! Separates reasoning from the answer.

use plimsoll_core::TokenId;

use super::mark::{Marks, Seen};
use super::position::Position;
use super::tools::harmony_lead;
use crate::grammar::{Lead, ReasoningBudget};
use crate::{Tokenizer, harmony};

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
    /// `<|channel>thought`, a line break, .., `<channel|>` (Gemma 4).
    Gemma4,
    /// `<|channel|>analysis<|message|>..<|end|>`, as often as the model likes (gpt-oss).
    Harmony,
}

impl ReasoningFormat {
    /// Names of `--reasoning-parser`: vLLM's.
    pub const NAMES: &[(&str, Self)] = &[
        ("qwen3", Self::Think),
        ("deepseek_r1", Self::DeepseekR1),
        ("mistral", Self::Mistral),
        ("seed_oss", Self::SeedOss),
        ("gemma4", Self::Gemma4),
        ("openai_gptoss", Self::Harmony),
    ];

    /// The format of a chat template, if it has one.
    pub fn detect(template: &str) -> Option<Self> {
        if harmony::is_in(template) {
            return Some(Self::Harmony);
        }
        let formats = [Self::Gemma4, Self::SeedOss, Self::Mistral, Self::Think];
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
            Self::Gemma4 => &["<|channel>", "<channel|>"],
            Self::Harmony => &harmony::REASONING,
        }
    }

    /// What follows the opening mark and is no reasoning.
    fn label(self) -> &'static str {
        match self {
            Self::Gemma4 => "thought\n",
            _ => "",
        }
    }

    /// Marks that chat templates look for in the content of earlier answers.
    pub fn in_content(self) -> &'static [&'static str] {
        match self {
            Self::Harmony => &[],
            _ => self.marks(),
        }
    }

    /// Where in an answer a model begins that continues `prompt`.
    pub fn position_after(self, prompt: &str) -> Position {
        if self == Self::Harmony {
            return after_messages(prompt);
        }
        let [open, close] = self.marks();
        let prompt = prompt.trim_end();
        let unlabelled = prompt.strip_suffix(self.label().trim_end()).unwrap_or(prompt);
        if prompt.ends_with(close) {
            Position::Answer
        } else if unlabelled.ends_with(open) || self == Self::DeepseekR1 {
            Position::Reasoning
        } else {
            Position::Before
        }
    }

    /// What comes before the text of an answer behind a prompt that ends at `position`; `token` gives the special token that is
    /// written like a mark.
    pub fn lead(self, position: Position, token: &dyn Fn(&str) -> Option<TokenId>) -> Option<Lead> {
        let marks = || self.marks().map(str::to_owned);
        match (position, self) {
            (Position::Answer, _) => None,
            (_, Self::Harmony) => Some(Lead::Grammar(harmony_lead(position, token))),
            (Position::Reasoning, _) => Some(Lead::UpTo(self.marks()[1].to_owned())),
            (Position::Before, _) => Some(Lead::Between(marks())),
        }
    }

    /// Ends reasoning after a number of `tokens` behind a prompt that ends at `position`; `None` if there is none to come.
    pub fn budget(self, position: Position, tokens: usize, tokenizer: &Tokenizer) -> Option<ReasoningBudget> {
        let repeats = self == Self::Harmony;
        let is_open = position == Position::Reasoning;
        let comes = repeats || position != Position::Answer;
        comes.then(|| ReasoningBudget::new(self.marks(), is_open, repeats, tokens, tokenizer))
    }
}

/// Where in an answer `prompt` ends, in the Harmony format.
fn after_messages(prompt: &str) -> Position {
    let last = prompt
        .rsplit_once(harmony::START)
        .map_or(prompt, |(_, last)| last);
    match last.split_once(harmony::MESSAGE) {
        Some((header, text)) if !text.contains(harmony::END) => match header.contains(harmony::ANALYSIS) {
            true => Position::Reasoning,
            false => Position::Answer,
        },
        _ => Position::Before,
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
    /// What is still to come of the label behind the opening mark, and what came of it.
    label: (&'static str, String),
    /// The whole label.
    whole_label: &'static str,
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
            label: ("", String::new()),
            whole_label: format.label(),
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
                self.label = (self.whole_label, String::new());
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
        if !self.label.0.is_empty() {
            if let Some(rest) = self.label.0.strip_prefix(c) {
                self.label.0 = rest;
                self.label.1.push(c);
                return;
            }
            let (_, came) = std::mem::take(&mut self.label);
            came.chars().for_each(|c| self.think(c, out));
        }
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
