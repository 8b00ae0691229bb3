//! The lines of a batch's input.

use std::io;
use std::path::Path;

use serde::Deserialize;
use serde_json::{Map, Value};
use tokio::fs::File;
use tokio::io::{AsyncBufReadExt, BufReader};

use crate::options::ServerOptions;
use crate::wire::known::UnknownFields;
use crate::wire::request::field_names;

/// A request, as a line says it.
#[derive(Debug, Deserialize)]
pub(super) struct Line {
    pub(super) custom_id: String,
    pub(super) method: String,
    pub(super) url: String,
    pub(super) body: Map<String, Value>,
}

/// Reads lines one by one, without those that are blank.
#[derive(Debug)]
pub(super) struct Lines {
    reader: BufReader<File>,
    /// Longest line, in bytes; of longer ones the rest is dropped.
    most: usize,
    number: usize,
}

impl Lines {
    pub(super) async fn open(path: &Path, most: usize) -> io::Result<Self> {
        Ok(Self {
            reader: BufReader::new(File::open(path).await?),
            most,
            number: 0,
        })
    }

    /// The next line and its number, from 1; `None` at the end of the file.
    pub(super) async fn next(&mut self) -> io::Result<Option<(usize, Vec<u8>)>> {
        loop {
            let mut line = Vec::new();
            let mut any = false;
            loop {
                let piece = self.reader.fill_buf().await?;
                if piece.is_empty() {
                    break;
                }
                any = true;
                let end = piece.iter().position(|&byte| byte == b'\n');
                let text = &piece[..end.unwrap_or(piece.len())];
                // One byte more than allowed shows that it is too long.
                let room = (self.most + 1).saturating_sub(line.len());
                line.extend_from_slice(&text[..text.len().min(room)]);
                let used = text.len() + usize::from(end.is_some());
                self.reader.consume(used);
                if end.is_some() {
                    break;
                }
            }
            if !any {
                return Ok(None);
            }
            self.number += 1;
            if !line.trim_ascii().is_empty() {
                return Ok(Some((self.number, line)));
            }
        }
    }
}

/// What a line asks for; an error that says what is wrong with it, and its `custom_id` as far as that is known.
pub(super) fn parse(
    line: &[u8],
    endpoint: &str,
    options: &ServerOptions,
) -> Result<Line, (Option<String>, String)> {
    let most = options.max_body_bytes;
    if line.len() > most {
        return Err((None, format!("the line is longer than {most} bytes")));
    }
    let value: Value = serde_json::from_slice(line)
        .map_err(|error| (None, format!("the line is not valid JSON: {error}")))?;
    let custom_id = value.get("custom_id").and_then(Value::as_str).map(str::to_owned);
    let wrong = |message: String| (custom_id.clone(), message);
    let is_known = |name: &&String| field_names::<Line>().contains(&name.as_str());
    let strange = value
        .as_object()
        .and_then(|fields| fields.keys().find(|name| !is_known(name)));
    if let (Some(name), UnknownFields::Error) = (strange, options.unknown_fields) {
        return Err(wrong(format!("unknown field `{name}` of the line")));
    }
    let line: Line =
        serde_json::from_value(value).map_err(|error| wrong(format!("the line is no request: {error}")))?;
    if line.method != "POST" {
        return Err(wrong(format!("method must be POST, not {}", line.method)));
    }
    if line.url != endpoint {
        return Err(wrong(format!(
            "url must be the batch's endpoint, {endpoint}, not {}",
            line.url
        )));
    }
    if line.body.get("stream").and_then(Value::as_bool).unwrap_or(false) {
        return Err(wrong("stream is not available in a batch".to_owned()));
    }
    Ok(line)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn lines_are_bounded_and_blank_ones_skipped() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), b"one\n\n  \r\nlonger than that\nlast").unwrap();
        let mut lines = Lines::open(file.path(), 5).await.unwrap();
        let mut found = Vec::new();
        while let Some((number, line)) = lines.next().await.unwrap() {
            found.push((number, String::from_utf8(line).unwrap()));
        }
        let expected = [(1, "one"), (4, "longer"), (5, "last")];
        assert_eq!(found, expected.map(|(number, line)| (number, line.to_owned())));
    }

    #[test]
    fn bad_lines_say_what_is_wrong() {
        let options = |unknown_fields| ServerOptions {
            max_body_bytes: 200,
            unknown_fields,
            ..ServerOptions::default()
        };
        let (strict, lenient) = (options(UnknownFields::Error), options(UnknownFields::Warn));
        let of = |line: &str| parse(line.as_bytes(), "/v1/completions", &strict);
        let good =
            r#"{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}"#;
        assert_eq!(of(good).unwrap().custom_id, "a");
        let more = good.replace("\"method\"", "\"b\": 1, \"method\"");
        assert!(parse(more.as_bytes(), "/v1/completions", &lenient).is_ok());
        for (line, id, part) in [
            ("{", None, "not valid JSON"),
            (r#"{"custom_id": "a"}"#, Some("a"), "method"),
            (&good.replace("POST", "GET"), Some("a"), "POST"),
            (&good.replace("/v1/c", "/v1/chat/c"), Some("a"), "endpoint"),
            (
                &good.replace("{\"prompt\"", "{\"stream\": true, \"prompt\""),
                Some("a"),
                "stream",
            ),
            (&format!("{good}{}", " ".repeat(200)), None, "longer"),
            (&more, Some("a"), "unknown field `b`"),
        ] {
            let (found, message) = of(line).unwrap_err();
            assert_eq!(found.as_deref(), id, "{line}");
            assert!(message.contains(part), "{message}");
        }
    }
}
