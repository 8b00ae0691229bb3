//! GBNF, the EBNF of llama.cpp's grammars, which XGrammar's is too, rewritten as Lark.

use std::collections::HashMap;
use std::fmt::Write;

use super::GrammarError;

/// One word of a grammar.
#[derive(Clone, Debug, PartialEq)]
enum Word {
    Name(String),
    /// `::=`
    Defines,
    /// The text itself, without quotes and escapes.
    Text(String),
    Class {
        negated: bool,
        ranges: Vec<(char, char)>,
    },
    /// Any character.
    Any,
    /// Written the same way in both: `( ) | * + ?` and `{m,n}`.
    Same(String),
}

/// Rewrites `ebnf`, whose first rule is `root`.
pub(super) fn to_lark(ebnf: &str) -> Result<String, GrammarError> {
    let words = Reader::new(ebnf).words()?;
    let mut names = HashMap::new();
    for pair in words.windows(2) {
        let [(Word::Name(name), line), (Word::Defines, _)] = pair else {
            continue;
        };
        let lark = match name.as_str() {
            "root" => "start".to_owned(),
            // Lark tells rules from terminals by case, and knows no hyphens.
            _ => format!("rule{}", names.len()),
        };
        if names.insert(name.clone(), lark).is_some() {
            return Err(wrong(*line, &format!("the rule `{name}` is defined twice")));
        }
    }
    if !names.contains_key("root") {
        return Err(GrammarError::Invalid(
            "the grammar has no rule `root ::= ...`, with which every grammar begins".into(),
        ));
    }
    let mut lark = String::new();
    for (at, (word, line)) in words.iter().enumerate() {
        let defines = matches!(words.get(at + 1), Some((Word::Defines, _)));
        if lark.is_empty() && !defines {
            return Err(wrong(*line, "a rule `name ::= ...` is expected"));
        }
        match word {
            Word::Name(name) if defines => write!(lark, "\n{}:", names[name]),
            Word::Name(name) => match names.get(name) {
                Some(name) => write!(lark, " {name}"),
                None => return Err(wrong(*line, &format!("there is no rule `{name}`"))),
            },
            Word::Defines if at > 0 && matches!(words[at - 1].0, Word::Name(_)) => Ok(()),
            Word::Defines => return Err(wrong(*line, "a name is expected before `::=`")),
            Word::Text(text) => write!(lark, " {}", serde_json::Value::from(text.as_str())),
            Word::Any => write!(lark, r" /(.|\n)/"),
            Word::Class { negated, ranges } => {
                let body = ranges
                    .iter()
                    .map(|&(from, to)| format!(r"\u{{{:x}}}-\u{{{:x}}}", u32::from(from), u32::from(to)));
                let sign = if *negated { "^" } else { "" };
                write!(lark, " /[{sign}{}]/", body.collect::<String>())
            }
            Word::Same(text) => write!(
                lark,
                "{}{text}",
                if text == "(" || text == "|" { " " } else { "" }
            ),
        }
        .expect("text grows");
    }
    Ok(lark)
}

fn wrong(line: usize, what: &str) -> GrammarError {
    GrammarError::Invalid(format!("line {line} of the grammar: {what}"))
}

/// Cuts a grammar into words, each with its line.
struct Reader<'a> {
    rest: std::iter::Peekable<std::str::Chars<'a>>,
    line: usize,
}

impl<'a> Reader<'a> {
    fn new(text: &'a str) -> Self {
        Self {
            rest: text.chars().peekable(),
            line: 1,
        }
    }

    fn words(mut self) -> Result<Vec<(Word, usize)>, GrammarError> {
        let mut words = Vec::new();
        while let Some(first) = self.next() {
            let line = self.line;
            let word = match first {
                ' ' | '\t' | '\r' | '\n' => continue,
                '#' => {
                    while self.rest.peek().is_some_and(|&c| c != '\n') {
                        self.next();
                    }
                    continue;
                }
                '"' => Word::Text(self.text()?),
                '[' => self.class()?,
                '.' => Word::Any,
                '(' | ')' | '|' | '*' | '+' | '?' => Word::Same(first.into()),
                '{' => Word::Same(self.bounds()?),
                ':' if self.next() == Some(':') && self.next() == Some('=') => Word::Defines,
                c if is_name(c) => {
                    let mut name = String::from(c);
                    while let Some(&c) = self.rest.peek().filter(|&&c| is_name(c)) {
                        name.push(c);
                        self.next();
                    }
                    Word::Name(name)
                }
                other => return Err(wrong(line, &format!("{other:?} is not expected"))),
            };
            words.push((word, line));
        }
        Ok(words)
    }

    fn next(&mut self) -> Option<char> {
        let next = self.rest.next()?;
        self.line += usize::from(next == '\n');
        Some(next)
    }

    fn must(&mut self, what: &str) -> Result<char, GrammarError> {
        let line = self.line;
        self.next()
            .ok_or_else(|| wrong(line, &format!("the end of {what} is missing")))
    }

    /// A quoted text, whose first quote was read.
    fn text(&mut self) -> Result<String, GrammarError> {
        let mut text = String::new();
        loop {
            match self.must("a text")? {
                '"' => return Ok(text),
                '\\' => text.push(self.escaped()?),
                c => text.push(c),
            }
        }
    }

    /// A class of characters, whose bracket was read.
    fn class(&mut self) -> Result<Word, GrammarError> {
        let negated = self.rest.next_if_eq(&'^').is_some();
        let mut ranges = Vec::new();
        loop {
            let line = self.line;
            let from = match self.must("a class")? {
                ']' if ranges.is_empty() => return Err(wrong(line, "a class of no characters")),
                ']' => return Ok(Word::Class { negated, ranges }),
                '\\' => self.escaped()?,
                c => c,
            };
            let mut to = from;
            if self.rest.next_if_eq(&'-').is_some() {
                match self.rest.peek() {
                    // A hyphen at the end stands for itself.
                    Some(']') | None => ranges.push(('-', '-')),
                    Some(_) => {
                        to = match self.must("a class")? {
                            '\\' => self.escaped()?,
                            c => c,
                        }
                    }
                }
            }
            if to < from {
                return Err(wrong(line, &format!("the range {from:?} to {to:?} is empty")));
            }
            ranges.push((from, to));
        }
    }

    /// What stands behind a backslash.
    fn escaped(&mut self) -> Result<char, GrammarError> {
        let line = self.line;
        let digits = match self.must("an escape")? {
            'n' => return Ok('\n'),
            'r' => return Ok('\r'),
            't' => return Ok('\t'),
            'x' => 2,
            'u' => 4,
            'U' => 8,
            c if c.is_ascii_alphanumeric() => {
                return Err(wrong(line, &format!("the escape `\\{c}` is unknown")));
            }
            c => return Ok(c),
        };
        let mut code = 0;
        for _ in 0..digits {
            let digit = self.must("an escape")?.to_digit(16);
            let digit = digit.ok_or_else(|| wrong(line, "an escape needs hexadecimal digits"))?;
            code = 16 * code + digit;
        }
        char::from_u32(code).ok_or_else(|| wrong(line, "an escape names no character"))
    }

    /// How often something is repeated, whose brace was read.
    fn bounds(&mut self) -> Result<String, GrammarError> {
        let line = self.line;
        let mut bounds = String::from("{");
        loop {
            match self.must("a repetition")? {
                '}' => {
                    bounds.push('}');
                    return Ok(bounds);
                }
                c if c.is_ascii_digit() || c == ',' => bounds.push(c),
                ' ' => {}
                other => return Err(wrong(line, &format!("{other:?} in a repetition"))),
            }
        }
    }
}

fn is_name(c: char) -> bool {
    c.is_alphanumeric() || c == '-' || c == '_'
}
