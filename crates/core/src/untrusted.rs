//! Files that come with models: anybody may have made them.

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::Path;

/// Most bytes of a file of settings, such as config.json.
pub const MAX_SETTINGS_BYTES: u64 = 8 << 20;

/// Opens a regular file. Others, such as a FIFO, would be waited for.
///
/// # Errors
/// That of the operating system, or that it is something else.
pub fn open_file(path: &Path) -> io::Result<File> {
    let kind = fs::metadata(path)?.file_type();
    match kind.is_file() {
        true => File::open(path),
        false if kind.is_dir() => Err(io::ErrorKind::IsADirectory.into()),
        false => Err(io::Error::other("it is neither a file nor a directory")),
    }
}

/// The bytes of a file that has no more than `most`.
///
/// # Errors
/// As [`open_file`], or that it is longer.
pub fn read_file(path: &Path, most: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    open_file(path)?.take(most + 1).read_to_end(&mut bytes)?;
    match bytes.len() as u64 > most {
        true => Err(io::Error::other(format!(
            "it is longer than the {} MiB that such a file may have",
            most >> 20
        ))),
        false => Ok(bytes),
    }
}

/// [`read_file`] as text.
///
/// # Errors
/// As [`read_file`], or that it is no UTF-8.
pub fn read_text(path: &Path, most: u64) -> io::Result<String> {
    let text = String::from_utf8(read_file(path, most)?);
    text.map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error.utf8_error()))
}

/// What reading a file gave; `None` where there is no such file.
///
/// # Errors
/// Any other than [`io::ErrorKind::NotFound`].
pub fn if_there<T>(read: io::Result<T>) -> io::Result<Option<T>> {
    match read {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        read => read.map(Some),
    }
}

/// Most characters of a file's contents in an error.
const MAX_SHOWN: usize = 400;

/// A message that quotes a file: without control characters, and cut where it is too long for people.
pub fn quotable(message: &str) -> String {
    let mut characters = message.chars();
    let shown = characters.by_ref().take(MAX_SHOWN);
    let mut shown: String = shown
        .map(|c| match c.is_control() && c != '\n' {
            true => '\u{fffd}',
            false => c,
        })
        .collect();
    if characters.next().is_some() {
        shown.push('…');
    }
    shown
}

/// Types as JSON has them, in a message of serde, which names those of Rust.
pub fn with_plain_types(message: &str) -> String {
    const WHOLE: [(&str, i128, i128); 8] = [
        ("usize", 0, usize::MAX as i128),
        ("u64", 0, u64::MAX as i128),
        ("u32", 0, u32::MAX as i128),
        ("u16", 0, u16::MAX as i128),
        ("u8", 0, u8::MAX as i128),
        ("isize", isize::MIN as i128, isize::MAX as i128),
        ("i64", i64::MIN as i128, i64::MAX as i128),
        ("i32", i32::MIN as i128, i32::MAX as i128),
    ];
    const PLAIN: [(&str, &[&str]); 4] = [
        ("a number", &["f64", "f32", "a JSON number"]),
        ("true or false", &["a boolean"]),
        ("a list", &["a sequence"]),
        ("an object", &["a map"]),
    ];
    // Their values are of any length, so serde does not show them.
    let message = message
        .replacen("invalid type: sequence,", "invalid type: list,", 1)
        .replacen("invalid type: map,", "invalid type: object,", 1);
    // What is expected ends the message, but for a line of a file.
    let Some((found, expected)) = message.split_once("expected ") else {
        return message;
    };
    let named = |name: &str| {
        let rest = expected.strip_prefix(name)?;
        (rest.is_empty() || rest.starts_with(' ')).then_some(rest)
    };
    let whole = WHOLE.iter().find_map(|&(name, least, most)| {
        let rest = named(name)?;
        let value = found
            .split('`')
            .nth(1)
            .and_then(|value| value.parse::<f64>().ok());
        // What is out of range may well be a whole number.
        let bound = match value {
            Some(value) if value > most as f64 => format!(" of at most {most}"),
            Some(value) if value < least as f64 => format!(" of at least {least}"),
            _ => String::new(),
        };
        Some(format!("{found}expected a whole number{bound}{rest}"))
    });
    let plain = PLAIN.iter().find_map(|(plain, names)| {
        let rest = names.iter().find_map(|name| named(name))?;
        Some(format!("{found}expected {plain}{rest}"))
    });
    // Objects have the name of the type into which they are read.
    let object = || {
        let (_, rest) = expected
            .split_once("struct ")
            .or_else(|| expected.split_once("tagged enum "))?;
        let end = rest.find(' ').unwrap_or(rest.len());
        Some(format!("{found}expected an object{}", &rest[end..]))
    };
    whole.or(plain).or_else(object).unwrap_or(message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_are_short() {
        assert_eq!(
            quotable("`a\u{0}\u{1b}[31m`: é\n"),
            "`a\u{fffd}\u{fffd}[31m`: é\n"
        );
        assert_eq!(quotable(&"é".repeat(400)), "é".repeat(400));
        assert_eq!(quotable(&"é".repeat(9999)), "é".repeat(400) + "…");
    }

    #[test]
    fn types_are_those_of_json() {
        for (message, plain) in [
            (
                "invalid type: string \"x\", expected usize",
                "invalid type: string \"x\", expected a whole number",
            ),
            (
                "invalid value: integer `5000000000`, expected u32 at line 1 column 2",
                "invalid value: integer `5000000000`, expected a whole number of at most 4294967295 at line 1 column 2",
            ),
            (
                "invalid value: integer `-1`, expected usize",
                "invalid value: integer `-1`, expected a whole number of at least 0",
            ),
            (
                "invalid type: floating point `1e20`, expected u64",
                "invalid type: floating point `1e20`, expected a whole number of at most 18446744073709551615",
            ),
            (
                "invalid type: floating point `1.5`, expected u64",
                "invalid type: floating point `1.5`, expected a whole number",
            ),
            (
                "expected f64 at line 1 column 2",
                "expected a number at line 1 column 2",
            ),
            ("integer `5`, expected a sequence", "integer `5`, expected a list"),
            (
                "invalid type: sequence, expected a map",
                "invalid type: list, expected an object",
            ),
            (
                "integer `5`, expected struct Options",
                "integer `5`, expected an object",
            ),
            (
                "integer `5`, expected internally tagged enum Format at line 1 column 2",
                "integer `5`, expected an object at line 1 column 2",
            ),
            ("expected i64x", "expected i64x"),
            ("missing field `a`", "missing field `a`"),
        ] {
            assert_eq!(with_plain_types(message), plain);
        }
    }

    #[test]
    fn only_short_regular_files_are_read() {
        let this = Path::new(env!("CARGO_MANIFEST_DIR")).join("Cargo.toml");
        let text = read_text(&this, 1 << 20).unwrap();
        assert!(text.contains("plimsoll-core"));
        assert_eq!(read_text(&this, text.len() as u64).unwrap(), text);
        let error = read_text(&this, text.len() as u64 - 1).unwrap_err();
        assert!(error.to_string().contains("longer"), "{error}");
        let kind = |path: &str| read_text(Path::new(path), 1).unwrap_err().kind();
        assert_eq!(kind("/"), io::ErrorKind::IsADirectory);
        assert_eq!(kind("/nonexistent"), io::ErrorKind::NotFound);
        assert_eq!(if_there(read_text(Path::new("/nonexistent"), 1)).unwrap(), None);
        assert_eq!(if_there(read_text(&this, 1 << 20)).unwrap(), Some(text));
        let error = if_there(read_text(Path::new("/"), 1)).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::IsADirectory);
        let error = read_text(Path::new("/dev/zero"), 1).unwrap_err();
        assert!(error.to_string().contains("neither a file"), "{error}");
    }
}
