//! `plimsoll config`: every setting, what it comes to, and where that comes from.

use std::fmt::Write;
use std::io::{self, Write as _};

use serde_json::{Map, json};

use crate::args::ConfigArgs;
use crate::error::Error;
use crate::keys;
use crate::layers::{Origin, Setting, Value};
use crate::terminal;

/// Longest value that the table shows whole, in characters.
const WIDEST: usize = 60;

/// Columns that the last column of the table has on a terminal; where there are fewer, it gets lines of its own.
const ORIGIN: usize = 24;

/// Prints `settings` on stdout.
///
/// # Errors
/// If a key is invalid, or stdout cannot be written.
pub fn print(args: &ConfigArgs, settings: &[Setting]) -> Result<(), Error> {
    keys::of_flags(&args.serve.server.access)?;
    let text = match args {
        ConfigArgs { json: true, .. } => as_json(settings),
        ConfigArgs { toml: true, .. } => as_toml(settings),
        _ => as_table(settings, terminal::stdout_columns()),
    };
    match io::stdout().write_all(text.as_bytes()) {
        // Who read enough closes the pipe.
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(error.into()),
        _ => Ok(()),
    }
}

/// For people, in as many columns as there are; `None` where nothing limits them.
pub fn as_table(settings: &[Setting], columns: Option<usize>) -> String {
    let rows: Vec<[String; 3]> = settings
        .iter()
        .map(|setting| [setting.name.clone(), shown(&setting.value), whence(setting)])
        .collect();
    let width = |column: usize| {
        let widths = rows.iter().map(|row| row[column].chars().count());
        widths.max().unwrap_or(0)
    };
    let widths = (width(0), width(1));
    let mut text = String::new();
    let mut group = "";
    for (setting, row) in settings.iter().zip(&rows) {
        if setting.group != group {
            let between = if group.is_empty() { "" } else { "\n" };
            group = &setting.group;
            let _ = writeln!(text, "{between}{group}:");
        }
        for line in lines(row, widths, columns) {
            let _ = writeln!(text, "{line}");
        }
    }
    text
}

/// A row of the table whose first two columns have these widths.
fn lines([name, value, origin]: &[String; 3], widths: (usize, usize), columns: Option<usize>) -> Vec<String> {
    let (name_width, value_width) = widths;
    let head = format!("  {name:name_width$}  {value:value_width$}");
    let before = head.chars().count();
    let Some(columns) = columns else {
        return vec![format!("{head}  {origin}")];
    };
    if before + 2 + ORIGIN <= columns {
        let heads = std::iter::once(head.as_str()).chain(std::iter::repeat(""));
        let parts = terminal::wrapped(origin, columns - before - 2);
        return heads
            .zip(parts)
            .map(|(head, part)| format!("{head:before$}  {part}"))
            .collect();
    }
    let whole = format!("  {name}  {value}  {origin}");
    if whole.chars().count() <= columns {
        return vec![whole];
    }
    let parts = terminal::wrapped(&format!("    {origin}"), columns);
    std::iter::once(format!("  {name}  {value}"))
        .chain(parts)
        .collect()
}

/// Where a setting comes from, and what is done where nobody set it.
fn whence(setting: &Setting) -> String {
    match (&setting.value, &setting.otherwise) {
        (Value::Unset, Some(otherwise)) => format!("{} ({otherwise})", setting.origin),
        _ => setting.origin.to_string(),
    }
}

/// A value on one line of the table.
fn shown(value: &Value) -> String {
    let text = match value {
        Value::Unset => "-".to_owned(),
        Value::Secret => "set".to_owned(),
        Value::Switch(on) => on.to_string(),
        Value::Whole(number) => number.to_string(),
        Value::Number(number) => number.to_string(),
        Value::Size(_, text) | Value::Time(_, text) | Value::Text(text) => text.clone(),
        Value::List(texts) => texts.join(", "),
    };
    // No line breaks and no control sequences of templates.
    let text: String = text.chars().flat_map(plain).collect();
    match text.char_indices().nth(WIDEST) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}

fn plain(c: char) -> Vec<char> {
    match c.is_control() {
        true => c.escape_default().collect(),
        false => vec![c],
    }
}

/// For programs: sizes in bytes, times in seconds, `null` where nothing is set.
pub fn as_json(settings: &[Setting]) -> String {
    let entry = |setting: &Setting| {
        let value = match &setting.value {
            Value::Unset | Value::Secret => json!(null),
            Value::Switch(on) => json!(on),
            Value::Whole(number) => json!(number),
            Value::Number(number) => json!(number),
            Value::Size(bytes, _) => json!(bytes.0),
            Value::Time(time, _) => json!(time.as_secs_f64()),
            Value::Text(text) => json!(text),
            Value::List(texts) => json!(texts),
        };
        let mut entry = Map::from_iter([("value".to_owned(), value)]);
        if setting.value == Value::Secret {
            entry.insert("secret".to_owned(), json!("set"));
        }
        if let (Value::Unset, Some(otherwise)) = (&setting.value, &setting.otherwise) {
            entry.insert("otherwise".to_owned(), json!(otherwise));
        }
        let from = match &setting.origin {
            Origin::Default => json!({"layer": "default"}),
            Origin::File { path, line } => json!({"layer": "file", "file": path, "line": line}),
            Origin::Environment(variable) => json!({"layer": "environment", "variable": variable}),
            Origin::Flag => json!({"layer": "flag"}),
        };
        entry.insert("from".to_owned(), from);
        (setting.name.clone(), entry.into())
    };
    let settings: Map<_, _> = settings.iter().map(entry).collect();
    let all = json!({"version": crate::version::long(), "settings": settings});
    format!("{all:#}\n")
}

/// A file for `--config` that resolves to the same, but for secrets.
pub fn as_toml(settings: &[Setting]) -> String {
    let mut text = String::from("# Written by `plimsoll config --toml`.\n");
    let mut group = "";
    for setting in settings {
        // A file cannot name another one; what that one says is here.
        if setting.name == "config" {
            continue;
        }
        if setting.group != group {
            group = &setting.group;
            let _ = write!(text, "\n# {group}\n");
        }
        let Setting { name, otherwise, .. } = setting;
        let value = match &setting.value {
            Value::Unset => {
                let otherwise = otherwise.as_deref().unwrap_or("not set");
                let _ = writeln!(text, "# {name}: {otherwise}");
                continue;
            }
            Value::Secret => {
                let origin = setting.origin.to_string().escape_debug().to_string();
                let _ = writeln!(text, "# {name}: set ({origin}), not shown");
                continue;
            }
            Value::Switch(on) => (*on).into(),
            // Beyond what TOML counts to, flags take text.
            Value::Whole(number) => {
                i64::try_from(*number).map_or_else(|_| number.to_string().into(), Into::into)
            }
            Value::Number(number) => (*number).into(),
            Value::Size(_, text) | Value::Time(_, text) | Value::Text(text) => text.clone().into(),
            Value::List(texts) => texts.clone().into(),
        };
        let value: toml::Value = value;
        let _ = writeln!(text, "{name} = {value}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_fit_the_terminal() {
        let setting = |name: &str, value: Value, otherwise: Option<&str>| Setting {
            name: name.to_owned(),
            group: "Limits".to_owned(),
            value,
            otherwise: otherwise.map(str::to_owned),
            origin: Origin::Default,
        };
        let settings = [
            setting("max-queue", Value::Whole(256), None),
            setting(
                "threads",
                Value::Unset,
                Some("as many as there are CPUs for this process"),
            ),
        ];
        for (columns, expected) in [
            (
                None,
                "Limits:\n  max-queue  256  default\n  \
                 threads    -    default (as many as there are CPUs for this process)\n",
            ),
            (
                Some(45),
                "Limits:\n  max-queue  256  default\n  threads    -    default (as many as there\n                  \
                 are CPUs for this process)\n",
            ),
            (
                Some(36),
                "Limits:\n  max-queue  256  default\n  threads  -\n    default (as many as there are\n    \
                 CPUs for this process)\n",
            ),
        ] {
            assert_eq!(as_table(&settings, columns), expected, "{columns:?}");
        }
    }
}
