//! Python literals to JSON.

use serde_json::{Value, json};

use super::super::json::escape;

/// Deepest nesting that is read.
const MAX_DEPTH: usize = 64;

/// JSON of a value that a model wrote: as JSON, else as a Python literal, else as an unquoted string.
pub(super) fn value(text: &str) -> String {
    let text = text.trim();
    match serde_json::from_str::<Value>(text) {
        Ok(_) => text.to_owned(),
        Err(_) => to_json(text).unwrap_or_else(|| json!(text).to_string()),
    }
}

/// JSON of a Python literal: str, number, True, False, None, list, tuple or dict. `None` if it is none of these.
fn to_json(text: &str) -> Option<String> {
    let mut reader = Reader {
        rest: text,
        out: String::new(),
    };
    reader.value(0)?;
    reader.space();
    reader.rest.is_empty().then_some(reader.out)
}

struct Reader<'a> {
    rest: &'a str,
    out: String,
}

impl Reader<'_> {
    fn space(&mut self) {
        self.rest = self.rest.trim_start();
    }

    fn eat(&mut self, token: &str) -> bool {
        self.space();
        let rest = self.rest.strip_prefix(token);
        self.rest = rest.unwrap_or(self.rest);
        rest.is_some()
    }

    fn value(&mut self, depth: usize) -> Option<()> {
        self.space();
        if depth > MAX_DEPTH {
            return None;
        }
        match self.rest.chars().next()? {
            '[' => self.list("[", "]", depth),
            '(' => self.list("(", ")", depth),
            '{' => self.dict(depth),
            '"' | '\'' => self.string(),
            '0'..='9' | '-' | '+' | '.' => self.number(),
            _ => {
                let end = self.rest.find(|c: char| !c.is_ascii_alphabetic());
                let (word, rest) = self.rest.split_at(end.unwrap_or(self.rest.len()));
                let word = match word {
                    "True" | "true" => "true",
                    "False" | "false" => "false",
                    "None" | "null" => "null",
                    _ => return None,
                };
                self.rest = rest;
                self.out += word;
                Some(())
            }
        }
    }

    fn list(&mut self, open: &str, close: &str, depth: usize) -> Option<()> {
        self.eat(open);
        self.out.push('[');
        let mut first = true;
        while !self.eat(close) {
            if !first {
                self.out += ", ";
            }
            first = false;
            self.value(depth + 1)?;
            if !self.eat(",") {
                self.eat(close).then_some(())?;
                break;
            }
        }
        self.out.push(']');
        Some(())
    }

    fn dict(&mut self, depth: usize) -> Option<()> {
        self.eat("{");
        self.out.push('{');
        let mut first = true;
        while !self.eat("}") {
            if !first {
                self.out += ", ";
            }
            first = false;
            self.space();
            let from = self.out.len();
            self.value(depth + 1)?;
            // Keys of JSON are strings.
            if !self.out[from..].starts_with('"') {
                let key = self.out.split_off(from);
                self.out += &json!(key).to_string();
            }
            self.eat(":").then_some(())?;
            self.out += ": ";
            self.value(depth + 1)?;
            if !self.eat(",") {
                self.eat("}").then_some(())?;
                break;
            }
        }
        self.out.push('}');
        Some(())
    }

    fn number(&mut self) -> Option<()> {
        let end = self
            .rest
            .find(|c: char| !matches!(c, '0'..='9' | '+' | '-' | '.' | 'e' | 'E' | '_'));
        let (text, rest) = self.rest.split_at(end.unwrap_or(self.rest.len()));
        self.rest = rest;
        let text = text.replace('_', "");
        let text = text.strip_prefix('+').unwrap_or(&text);
        if serde_json::from_str::<serde_json::Number>(text).is_ok() {
            self.out += text;
        } else {
            // `1.` and `.5` are no numbers in JSON.
            let number: f64 = text.parse().ok()?;
            self.out += &serde_json::Number::from_f64(number)?.to_string();
        }
        Some(())
    }

    fn string(&mut self) -> Option<()> {
        let quote = self.rest.chars().next()?;
        let mut chars = self.rest.char_indices().skip(1);
        self.out.push('"');
        while let Some((at, c)) = chars.next() {
            match c {
                c if c == quote => {
                    self.rest = &self.rest[at + 1..];
                    self.out.push('"');
                    return Some(());
                }
                '\\' => {
                    let (_, c) = chars.next()?;
                    match c {
                        'n' => self.out += "\\n",
                        't' => self.out += "\\t",
                        'r' => self.out += "\\r",
                        'b' => self.out += "\\b",
                        'f' => self.out += "\\f",
                        'x' => escape(char::from_u32(hex(&mut chars, 2)?)?, &mut self.out),
                        'u' => escape(utf16(&mut chars)?, &mut self.out),
                        'U' => escape(char::from_u32(hex(&mut chars, 8)?)?, &mut self.out),
                        '\n' => {}
                        '\\' | '\'' | '"' => escape(c, &mut self.out),
                        c => {
                            // Python keeps unknown escapes.
                            escape('\\', &mut self.out);
                            escape(c, &mut self.out);
                        }
                    }
                }
                c => escape(c, &mut self.out),
            }
        }
        None
    }
}

/// Reads a number of this many hexadecimal digits.
fn hex(chars: &mut (impl Iterator<Item = (usize, char)> + Clone), digits: usize) -> Option<u32> {
    let mut digit = || chars.next()?.1.to_digit(16);
    (0..digits).try_fold(0u32, |number, _| Some(number << 4 | digit()?))
}

/// The character of `\u` escapes, which may be a surrogate pair, as in JSON. A single surrogate is U+FFFD.
fn utf16(chars: &mut (impl Iterator<Item = (usize, char)> + Clone)) -> Option<char> {
    let unit = u16::try_from(hex(chars, 4)?).ok()?;
    let mut ahead = chars.clone();
    let more = match (ahead.next(), ahead.next()) {
        (Some((_, '\\')), Some((_, 'u'))) => hex(&mut ahead, 4),
        _ => None,
    };
    let more = more.and_then(|more| u16::try_from(more).ok());
    let mut decoded = char::decode_utf16([Some(unit), more].into_iter().flatten());
    let first = decoded.next()?.unwrap_or(char::REPLACEMENT_CHARACTER);
    // A surrogate pair.
    if more.is_some() && decoded.next().is_none() {
        *chars = ahead;
    }
    Some(first)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn literals_become_json() {
        let cases = [
            ("'it''", None),
            ("\"a\\'b\\n\\x41\\u00e9\\d\"", Some("\"a'b\\nAé\\\\d\"")),
            ("[1, 2.50, -3, True, None,]", Some("[1, 2.50, -3, true, null]")),
            ("{'a': {1: ('b',)}}", Some("{\"a\": {\"1\": [\"b\"]}}")),
            (
                r"['\ud83d\ude00', '\ud83d!', '\ud83d\u00e9', '\ude00']",
                Some("[\"😀\", \"\u{fffd}!\", \"\u{fffd}é\", \"\u{fffd}\"]"),
            ),
            (r"'\u12g4'", None),
            (r"'\/'", Some(r#""\\/""#)),
            ("1_000", Some("1000")),
            (".5", Some("0.5")),
            ("1 2", None),
            ("foo", None),
            ("[1", None),
            ("{'a' 1}", None),
            ("", None),
        ];
        for (python, json) in cases {
            assert_eq!(to_json(python).as_deref(), json, "{python}");
        }
        assert_eq!(to_json(&"[".repeat(10_000)), None);
        // What is JSON means what it means there.
        let cases = [
            (r#" "\ud83d\ude00\/" "#, r#""\ud83d\ude00\/""#),
            (r#"[True, "\ud83d\ude00"]"#, r#"[true, "😀"]"#),
            ("no 'value'", r#""no 'value'""#),
        ];
        for (text, json) in cases {
            assert_eq!(value(text), json, "{text}");
        }
    }
}
