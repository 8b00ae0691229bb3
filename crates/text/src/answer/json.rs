//! Follows one JSON value character by character.

/// A value of which some has been read.
#[derive(Clone, Debug)]
pub(super) struct JsonScan {
    /// Containers that are open: true for objects.
    open: Vec<bool>,
    expects: Expects,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Expects {
    Value,
    /// After `[`.
    ValueOrClose,
    /// After `{`.
    KeyOrClose,
    /// After `,` in an object.
    Key,
    Colon,
    CommaOrClose,
    /// Within a string; `key` has a colon after it.
    String {
        key: bool,
        escape: Escape,
    },
    Number,
    /// The rest of `true`, `false` or `null`.
    Literal(&'static str),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Escape {
    No,
    /// After a backslash.
    Any,
    /// Hexadecimal digits that must follow.
    Hex(u8),
}

/// What a character means to the value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Scanned {
    /// It belongs to the value, and more must come.
    Inside,
    /// It is the last one of the value.
    Last,
    /// The value ended before it.
    After,
    /// No value continues so.
    Wrong,
}

impl JsonScan {
    pub(super) fn new() -> Self {
        Self {
            open: Vec::new(),
            expects: Expects::Value,
        }
    }

    /// True within a string, where a character below space must be escaped.
    pub(super) fn in_string(&self) -> bool {
        matches!(self.expects, Expects::String { .. })
    }

    pub(super) fn take(&mut self, c: char) -> Scanned {
        match self.expects {
            Expects::String { key, escape } => return self.string(c, key, escape),
            Expects::Number => match c {
                '0'..='9' | '+' | '-' | '.' | 'e' | 'E' => return Scanned::Inside,
                _ if self.open.is_empty() => return Scanned::After,
                _ => self.expects = Expects::CommaOrClose,
            },
            Expects::Literal(rest) => {
                let Some(rest) = rest.strip_prefix(c) else {
                    return Scanned::Wrong;
                };
                self.expects = Expects::Literal(rest);
                return if rest.is_empty() {
                    self.end()
                } else {
                    Scanned::Inside
                };
            }
            _ => {}
        }
        if matches!(c, ' ' | '\t' | '\n' | '\r') {
            return Scanned::Inside;
        }
        match (self.expects, c) {
            (Expects::Value | Expects::ValueOrClose, _) if self.value(c) => {}
            (Expects::ValueOrClose, ']') | (Expects::KeyOrClose, '}') => return self.close(),
            (Expects::CommaOrClose, ']') if self.open.last() == Some(&false) => return self.close(),
            (Expects::CommaOrClose, '}') if self.open.last() == Some(&true) => return self.close(),
            (Expects::KeyOrClose | Expects::Key, '"') => {
                self.expects = Expects::String {
                    key: true,
                    escape: Escape::No,
                };
            }
            (Expects::Colon, ':') => self.expects = Expects::Value,
            (Expects::CommaOrClose, ',') if self.open.last() == Some(&true) => self.expects = Expects::Key,
            (Expects::CommaOrClose, ',') => self.expects = Expects::Value,
            _ => return Scanned::Wrong,
        }
        Scanned::Inside
    }

    /// Begins a value; false where none begins so.
    fn value(&mut self, c: char) -> bool {
        self.expects = match c {
            '{' => {
                self.open.push(true);
                Expects::KeyOrClose
            }
            '[' => {
                self.open.push(false);
                Expects::ValueOrClose
            }
            '"' => Expects::String {
                key: false,
                escape: Escape::No,
            },
            '0'..='9' | '-' => Expects::Number,
            't' => Expects::Literal("rue"),
            'f' => Expects::Literal("alse"),
            'n' => Expects::Literal("ull"),
            _ => return false,
        };
        true
    }

    fn string(&mut self, c: char, key: bool, escape: Escape) -> Scanned {
        let escape = match (escape, c) {
            (Escape::No, '"') if key => {
                self.expects = Expects::Colon;
                return Scanned::Inside;
            }
            (Escape::No, '"') => return self.end(),
            (Escape::No, '\\') => Escape::Any,
            (Escape::No, _) => Escape::No,
            (Escape::Any, 'u') => Escape::Hex(4),
            (Escape::Any, '"' | '\\' | '/' | 'b' | 'f' | 'n' | 'r' | 't') => Escape::No,
            (Escape::Hex(1), c) if c.is_ascii_hexdigit() => Escape::No,
            (Escape::Hex(left), c) if c.is_ascii_hexdigit() => Escape::Hex(left - 1),
            _ => return Scanned::Wrong,
        };
        self.expects = Expects::String { key, escape };
        Scanned::Inside
    }

    fn close(&mut self) -> Scanned {
        self.open.pop();
        self.end()
    }

    /// A value ended, maybe the one that is followed.
    fn end(&mut self) -> Scanned {
        self.expects = Expects::CommaOrClose;
        if self.open.is_empty() {
            Scanned::Last
        } else {
            Scanned::Inside
        }
    }
}

/// `c` as it may stand in a JSON string, where it has no meaning of its own.
pub(super) fn escape(c: char, out: &mut String) {
    match c {
        '"' => out.push_str("\\\""),
        '\\' => out.push_str("\\\\"),
        c => escape_control(c, out),
    }
}

/// `c` of a string that is JSON already but for characters below space.
pub(super) fn escape_control(c: char, out: &mut String) {
    match c {
        '\n' => out.push_str("\\n"),
        '\r' => out.push_str("\\r"),
        '\t' => out.push_str("\\t"),
        c if c < ' ' => out.push_str(&format!("\\u{:04x}", u32::from(c))),
        c => out.push(c),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::Value;

    use super::*;

    /// Characters of the value at the start of `text`; `None` where there is none.
    fn value_len(text: &str) -> Option<usize> {
        let mut scan = JsonScan::new();
        for (at, c) in text.char_indices() {
            match scan.take(c) {
                Scanned::Inside => {}
                Scanned::Last => return Some(at + c.len_utf8()),
                Scanned::After => return Some(at),
                Scanned::Wrong => return None,
            }
        }
        None
    }

    #[test]
    fn wrong_values_are_seen_at_once() {
        for wrong in [
            "{1}",
            "{\"a\" 1}",
            "[1,]",
            "{\"a\":1,}",
            "[1}",
            "tru!",
            "\"\\x\"",
            "}",
            "{\"a\":1<",
        ] {
            assert_eq!(value_len(wrong), None, "{wrong}");
        }
        assert_eq!(value_len("12, 3"), Some(2));
        assert_eq!(value_len(" true]"), Some(5));
        assert_eq!(value_len("{\"a\": [1, {\"b\": \"}\\u00e9\"}]} rest"), Some(28));
    }

    proptest! {
        #[test]
        fn ends_where_serde_ends(text in "[\\[\\]{}\",:\\\\ant1e-]{0,24}") {
            let mut values = serde_json::Deserializer::from_str(&text).into_iter::<Value>();
            if let Some(Ok(value)) = values.next() {
                let own = value_len(&format!("{text} "));
                // A number may go on here where serde stops: both take all of what is legal.
                if !value.is_number() {
                    prop_assert_eq!(own, Some(values.byte_offset()));
                }
            }
        }
    }
}
