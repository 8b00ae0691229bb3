//! A limit on reasoning.

use std::sync::Arc;

use plimsoll_core::{Constraint, ConstraintError, Progress, TokenId, mask};

use super::lead::contains_mark;
use crate::Tokenizer;

/// Ends reasoning after a number of tokens: then nothing but its closing mark can be sampled.
#[derive(Clone, Debug)]
pub struct ReasoningBudget {
    tokenizer: Tokenizer,
    open: &'static str,
    close: &'static str,
    /// The closing mark.
    end: Arc<[TokenId]>,
    /// Tokens between the marks.
    budget: usize,
    /// The prompt ends within reasoning.
    is_open: bool,
    /// Reasoning may begin anywhere, and again.
    repeats: bool,
}

impl ReasoningBudget {
    /// `budget` tokens between `marks`. `is_open`: the prompt ends within reasoning. `repeats`: reasoning may begin anywhere, and
    /// again; all of it shares the budget.
    pub(crate) fn new(
        marks: &[&'static str; 2],
        is_open: bool,
        repeats: bool,
        budget: usize,
        tokenizer: &Tokenizer,
    ) -> Self {
        let [open, close] = *marks;
        let end = match tokenizer.special_token(close) {
            Some(token) => vec![token],
            // A mark can always be written in tokens.
            None => tokenizer.encode_literal(close).unwrap_or_default(),
        };
        Self {
            tokenizer: tokenizer.clone(),
            open,
            close,
            end: end.into(),
            budget,
            is_open,
            repeats,
        }
    }

    /// The constraint of a new sequence.
    pub fn constraint(&self) -> Box<dyn Constraint> {
        let state = match (self.is_open, self.repeats) {
            (true, _) => State::of(self.budget, Vec::new()),
            (false, true) => self.over(self.budget),
            (false, false) => State::Before(Vec::new()),
        };
        Box::new(Budgeted {
            budget: self.clone(),
            state,
        })
    }

    /// Outside of reasoning, with `left` tokens for more of it.
    fn over(&self, left: usize) -> State {
        match self.repeats {
            true => State::Between {
                left,
                tail: Vec::new(),
            },
            false => State::Over,
        }
    }
}

#[derive(Clone, Debug)]
struct Budgeted {
    budget: ReasoningBudget,
    state: State,
}

#[derive(Clone, Debug)]
enum State {
    /// The text so far, with which reasoning may begin.
    Before(Vec<u8>),
    Inside {
        /// Tokens that may still come.
        left: usize,
        /// The last bytes, in which the closing mark may begin.
        tail: Vec<u8>,
    },
    /// The budget is used up within a character, at which a grammar takes no mark.
    Completing {
        /// Bytes that the character still lacks at most.
        bytes: usize,
        /// The last bytes, in which the closing mark may begin.
        tail: Vec<u8>,
    },
    /// Reasoning may begin again.
    Between {
        left: usize,
        /// The last bytes, in which the opening mark may begin.
        tail: Vec<u8>,
    },
    /// The budget is used up, and this many tokens of the closing mark are written.
    Ending(usize),
    Over,
}

impl State {
    fn of(left: usize, tail: Vec<u8>) -> Self {
        match (left, lacking(&tail)) {
            (0, 0) => Self::Ending(0),
            (0, bytes) => Self::Completing { bytes, tail },
            (left, _) => Self::Inside { left, tail },
        }
    }
}

/// How many bytes the character lacks within which `text` ends; 0 if it ends with a whole one, or is not UTF-8.
fn lacking(text: &[u8]) -> usize {
    let begin = text.iter().rev().take(3).position(|byte| byte & 0xC0 != 0x80);
    let Some(character) = begin.map(|back| &text[text.len() - 1 - back..]) else {
        return 0;
    };
    let is_begun = std::str::from_utf8(character).is_err_and(|error| error.error_len().is_none());
    match is_begun {
        true => character[0].leading_ones() as usize - character.len(),
        false => 0,
    }
}

impl Constraint for Budgeted {
    fn restrict(&mut self, mask: &mut [u32]) -> Result<(), ConstraintError> {
        let State::Ending(written) = self.state else {
            return Ok(());
        };
        let Some(&token) = self.budget.end.get(written) else {
            return Ok(());
        };
        let allowed = mask::allows(mask, token);
        mask.fill(0);
        if allowed {
            mask::allow(mask, token);
        }
        Ok(())
    }

    fn accept(&mut self, token: TokenId) -> Result<Progress, ConstraintError> {
        let budget = &self.budget;
        let bytes = budget.tokenizer.token_bytes(token);
        self.state = match std::mem::replace(&mut self.state, State::Over) {
            State::Before(mut text) => {
                text.extend_from_slice(bytes);
                let begun = text.trim_ascii_start();
                if begun.starts_with(budget.open.as_bytes()) {
                    State::of(budget.budget, Vec::new())
                } else if budget.open.as_bytes().starts_with(begun) {
                    State::Before(text)
                } else {
                    State::Over
                }
            }
            State::Inside { left, mut tail } => {
                tail.extend_from_slice(bytes);
                match contains_mark(&mut tail, budget.close) {
                    true => budget.over(left),
                    false => State::of(left - 1, tail),
                }
            }
            State::Completing {
                bytes: most,
                mut tail,
            } => {
                tail.extend_from_slice(bytes);
                match (contains_mark(&mut tail, budget.close), most - 1) {
                    (true, _) => budget.over(0),
                    // Without a grammar a model may go on with anything.
                    (false, 0) => State::Ending(0),
                    (false, most) => match lacking(&tail).min(most) {
                        0 => State::Ending(0),
                        bytes => State::Completing { bytes, tail },
                    },
                }
            }
            State::Between { left, mut tail } => {
                tail.extend_from_slice(bytes);
                match contains_mark(&mut tail, budget.open) {
                    true => State::of(left, Vec::new()),
                    false => State::Between { left, tail },
                }
            }
            State::Ending(written) if written + 1 < budget.end.len() => State::Ending(written + 1),
            State::Ending(_) => budget.over(0),
            State::Over => State::Over,
        };
        Ok(Progress::Open)
    }

    fn boxed_clone(&self) -> Box<dyn Constraint> {
        Box::new(self.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(budget: usize, is_open: bool, repeats: bool, text: &str) -> String {
        String::from_utf8(written_bytes(budget, is_open, repeats, text.as_bytes())).unwrap()
    }

    /// What comes of `text`, byte by byte, where the model has its way as long as it may.
    fn written_bytes(budget: usize, is_open: bool, repeats: bool, text: &[u8]) -> Vec<u8> {
        let tokenizer = Tokenizer::bytes();
        let budget = ReasoningBudget::new(&["<t>", "</t>"], is_open, repeats, budget, &tokenizer);
        let mut constraint = budget.constraint();
        let mut wanted = text.iter().copied();
        let mut out = Vec::new();
        loop {
            let mut mask = vec![u32::MAX; mask::words(tokenizer.vocab_size())];
            constraint.restrict(&mut mask).unwrap();
            let forced = mask.iter().map(|word| word.count_ones()).sum::<u32>() == 1;
            let token = match forced {
                true => (0u8..=255).find(|&byte| mask::allows(&mask, byte.into())),
                false => wanted.next(),
            };
            let Some(token) = token else { break };
            out.push(token);
            assert_eq!(constraint.accept(token.into()).unwrap(), Progress::Open);
        }
        out
    }

    #[test]
    fn reasoning_ends_when_its_budget_is_used_up() {
        for (budget, is_open, text, expected) in [
            (3, true, "abcdef", "abc</t>def"),
            (3, false, " <t>abcdef", " <t>abc</t>def"),
            (0, true, "ab", "</t>ab"),
            (0, false, "<t>ab", "<t></t>ab"),
            // It ends by itself, or there is none.
            (9, true, "ab</t>cdefghijkl", "ab</t>cdefghijkl"),
            (2, false, "abcdef<t>", "abcdef<t>"),
            (4, false, "<t", "<t"),
            // Not within a character, each byte of which is a token here.
            (2, true, "aübc", "aü</t>bc"),
            (1, true, "😀bc", "😀</t>bc"),
            (4, true, "😀bc", "😀</t>bc"),
        ] {
            assert_eq!(written(budget, is_open, false, text), expected);
        }
    }

    #[test]
    fn what_is_no_character_ends_too() {
        for (text, expected) in [
            (&b"\xF0\xF0\xF0\xF0\xF0"[..], &b"\xF0\xF0\xF0\xF0</t>\xF0"[..]),
            (b"\xF0abc", b"\xF0a</t>bc"),
            (b"\x80abc", b"\x80</t>abc"),
            (b"\xFFabc", b"\xFF</t>abc"),
            (b"\xE2</t>abc", b"\xE2<</t>/t>abc"),
        ] {
            assert_eq!(written_bytes(1, true, false, text), expected);
        }
    }

    #[test]
    fn reasoning_that_begins_again_shares_the_budget() {
        for (budget, is_open, text, expected) in [
            (3, true, "abcdef", "abc</t>def"),
            (3, false, "so <t>abcdef", "so <t>abc</t>def"),
            // The tokens of the closing mark but the last count too.
            (5, false, "<t>a</t>xyz<t>bcd", "<t>a</t>xyz<t>b</t>cd"),
            (2, true, "abc<t>def<t>", "ab</t>c<t></t>def<t></t>"),
            (0, false, "x<t>y", "x<t></t>y"),
        ] {
            assert_eq!(written(budget, is_open, true, text), expected);
        }
    }
}
