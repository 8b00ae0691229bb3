//! JSON in and out of templates, as Python's `json` module does it.

use std::fmt::Write as _;

use minijinja::value::{Kwargs, Value as JinjaValue, ValueKind};
use minijinja::{Error, ErrorKind};
use serde_json::Value;

/// The template value that `json.loads` would give.
pub(super) fn to_jinja(value: &Value) -> JinjaValue {
    match value {
        Value::Null => JinjaValue::from(()),
        Value::Bool(flag) => (*flag).into(),
        Value::Number(number) => match (number.as_i64(), number.as_u64()) {
            (Some(int), _) => int.into(),
            (None, Some(int)) => int.into(),
            (None, None) => number.as_f64().into(),
        },
        Value::String(text) => text.as_str().into(),
        Value::Array(items) => JinjaValue::from_iter(items.iter().map(to_jinja)),
        Value::Object(fields) => {
            JinjaValue::from_pairs(fields.iter().map(|(key, value)| (key.as_str(), to_jinja(value))))
        }
    }
}

/// Python's `json.dumps` with `ensure_ascii=False`.
pub(super) fn dumps(value: &Value) -> String {
    tojson(&to_jinja(value), Kwargs::from_iter::<[(&str, JinjaValue); 0]>([]))
        .map_or_else(|_| value.to_string(), |text| text.to_string())
}

/// The `tojson` filter of transformers: `json.dumps(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False)`,
/// without Jinja's escapes for HTML.
pub(super) fn tojson(value: &JinjaValue, options: Kwargs) -> Result<JinjaValue, Error> {
    let ensure_ascii = options.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false);
    let sort_keys = options.get::<Option<bool>>("sort_keys")?.unwrap_or(false);
    let indent = match options
        .get::<Option<JinjaValue>>("indent")?
        .filter(|indent| !indent.is_none())
    {
        None => None,
        Some(indent) => Some(match indent.as_str() {
            Some(text) => text.to_owned(),
            None => " ".repeat(usize::try_from(indent)?),
        }),
    };
    let separators = match options.get::<Option<Vec<String>>>("separators")? {
        Some(pair) => match <[String; 2]>::try_from(pair) {
            Ok(pair) => pair,
            Err(_) => {
                return Err(Error::new(
                    ErrorKind::InvalidOperation,
                    "separators must be a pair",
                ));
            }
        },
        None if indent.is_some() => [",".to_owned(), ": ".to_owned()],
        None => [", ".to_owned(), ": ".to_owned()],
    };
    options.assert_all_used()?;
    let mut writer = Writer {
        out: String::new(),
        ensure_ascii,
        sort_keys,
        indent,
        separators,
    };
    writer.value(value, 0)?;
    Ok(JinjaValue::from_safe_string(writer.out))
}

struct Writer {
    out: String,
    ensure_ascii: bool,
    sort_keys: bool,
    indent: Option<String>,
    separators: [String; 2],
}

impl Writer {
    fn value(&mut self, value: &JinjaValue, depth: usize) -> Result<(), Error> {
        match value.kind() {
            ValueKind::None => self.out.push_str("null"),
            ValueKind::Bool => self.out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => self.number(value)?,
            ValueKind::String => self.string(value.as_str().unwrap_or_default()),
            ValueKind::Seq | ValueKind::Iterable => {
                let items: Vec<_> = value.try_iter()?.collect();
                self.container(['[', ']'], depth, items.len(), |writer, i| {
                    writer.value(&items[i], depth + 1)
                })?;
            }
            ValueKind::Map => {
                let mut keys: Vec<_> = value.try_iter()?.collect();
                if self.sort_keys {
                    keys.sort();
                }
                self.container(['{', '}'], depth, keys.len(), |writer, i| {
                    match keys[i].kind() {
                        ValueKind::Bool | ValueKind::None | ValueKind::Number => {
                            writer.out.push('"');
                            writer.value(&keys[i], depth)?;
                            writer.out.push('"');
                        }
                        _ => writer.string(&keys[i].to_string()),
                    }
                    writer.out.push_str(&writer.separators[1]);
                    writer.value(&value.get_item(&keys[i])?, depth + 1)
                })?;
            }
            kind => {
                let message = format!("a value of type {kind} is not JSON serializable");
                return Err(Error::new(ErrorKind::InvalidOperation, message));
            }
        }
        Ok(())
    }

    fn container(
        &mut self,
        [open, close]: [char; 2],
        depth: usize,
        len: usize,
        mut item: impl FnMut(&mut Self, usize) -> Result<(), Error>,
    ) -> Result<(), Error> {
        self.out.push(open);
        for i in 0..len {
            if i > 0 {
                self.out.push_str(&self.separators[0]);
            }
            self.new_line(depth + 1);
            item(self, i)?;
        }
        if len > 0 {
            self.new_line(depth);
        }
        self.out.push(close);
        Ok(())
    }

    fn new_line(&mut self, depth: usize) {
        if let Some(indent) = &self.indent {
            self.out.push('\n');
            self.out.push_str(&indent.repeat(depth));
        }
    }

    fn number(&mut self, value: &JinjaValue) -> Result<(), Error> {
        if value.is_integer() {
            self.out.push_str(&value.to_string());
        } else {
            self.out.push_str(&python_float(f64::try_from(value.clone())?));
        }
        Ok(())
    }

    fn string(&mut self, text: &str) {
        self.out.push('"');
        for c in text.chars() {
            match c {
                '"' => self.out.push_str("\\\""),
                '\\' => self.out.push_str("\\\\"),
                '\n' => self.out.push_str("\\n"),
                '\r' => self.out.push_str("\\r"),
                '\t' => self.out.push_str("\\t"),
                '\u{8}' => self.out.push_str("\\b"),
                '\u{c}' => self.out.push_str("\\f"),
                c if c < ' ' || (self.ensure_ascii && c > '~') => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        write!(self.out, "\\u{unit:04x}").expect("writing to a string cannot fail");
                    }
                }
                c => self.out.push(c),
            }
        }
        self.out.push('"');
    }
}

/// Python's `repr(float)`, as `json.dumps` writes it.
fn python_float(value: f64) -> String {
    if value.is_nan() {
        return "NaN".to_owned();
    }
    if value.is_infinite() {
        return if value > 0.0 { "Infinity" } else { "-Infinity" }.to_owned();
    }
    let scientific = format!("{value:e}");
    let (digits, exponent) = scientific.split_once('e').expect("{:e} writes an exponent");
    let exponent: i32 = exponent.parse().expect("{:e} writes a number as exponent");
    if (-4..16).contains(&exponent) {
        return format!("{value:?}");
    }
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("{digits}e{sign}{:02}", exponent.abs())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_are_pythons() {
        let cases = [
            (1.0, "1.0"),
            (0.1, "0.1"),
            (-0.0, "-0.0"),
            (1e15, "1000000000000000.0"),
            (1e16, "1e+16"),
            (1.5e300, "1.5e+300"),
            (0.0001, "0.0001"),
            (0.00001, "1e-05"),
            (-2.5e-7, "-2.5e-07"),
            (1e100, "1e+100"),
        ];
        for (value, text) in cases {
            assert_eq!(python_float(value), text);
        }
    }
}
