//! What every client of a running server needs.

use std::path::PathBuf;

use clap::Args;
use reqwest::Client;
use reqwest::header::{AUTHORIZATION, HeaderMap, HeaderValue};

use crate::error::Error;
use crate::keys::first_in;

/// How a client gets in.
#[derive(Clone, Debug, Default, Args)]
pub(crate) struct ClientArgs {
    /// File of API keys, as for `serve`; requests send the first one
    #[arg(long, value_name = "FILE")]
    api_key_file: Option<PathBuf>,
}

impl ClientArgs {
    /// An HTTP client that talks to the server itself, whatever proxy the environment names.
    ///
    /// # Errors
    /// Where the file cannot be read or holds no key.
    pub(crate) fn http(&self) -> Result<Client, Error> {
        let mut headers = HeaderMap::new();
        if let Some(path) = &self.api_key_file {
            let key = first_in(path)?;
            let mut value = HeaderValue::from_str(&format!("Bearer {key}"))
                .map_err(|error| Error::Internal(error.to_string()))?;
            value.set_sensitive(true);
            headers.insert(AUTHORIZATION, value);
        }
        let client = Client::builder().no_proxy().default_headers(headers);
        client.build().map_err(|error| Error::Internal(error.to_string()))
    }
}

/// The server's address from a URL with or without `/v1`.
pub(crate) fn base(url: &str) -> &str {
    url.trim_end_matches('/')
        .trim_end_matches("/v1")
        .trim_end_matches('/')
}

/// What a server-sent event's line carries, if it carries anything.
pub(crate) fn event_data(line: &str) -> Option<&str> {
    line.strip_prefix("data:").map(str::trim)
}

/// The data of the last event of a stream.
pub(crate) const LAST_EVENT: &str = "[DONE]";

/// Splits a byte stream into lines.
#[derive(Debug, Default)]
pub(crate) struct Lines {
    buffer: Vec<u8>,
    read: usize,
}

impl Lines {
    /// Takes in what arrived.
    pub(crate) fn push(&mut self, bytes: &[u8]) {
        self.buffer.drain(..std::mem::take(&mut self.read));
        self.buffer.extend_from_slice(bytes);
    }

    /// The next whole line, without its end.
    pub(crate) fn next(&mut self) -> Option<String> {
        let length = self.buffer[self.read..].iter().position(|&b| b == b'\n')?;
        let line = String::from_utf8_lossy(&self.buffer[self.read..self.read + length]).into_owned();
        self.read += length + 1;
        Some(line)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_survive_any_cut() {
        let text = "data: a\n\ndata: caf\u{e9}\n";
        for cut in 0..text.len() {
            let mut lines = Lines::default();
            let mut seen = Vec::new();
            for part in [&text.as_bytes()[..cut], &text.as_bytes()[cut..]] {
                lines.push(part);
                seen.extend(std::iter::from_fn(|| lines.next()));
            }
            assert_eq!(seen, ["data: a", "", "data: caf\u{e9}"], "cut at {cut}");
        }
    }

    #[test]
    fn urls_with_and_without_the_version() {
        for url in ["http://a:1", "http://a:1/", "http://a:1/v1", "http://a:1/v1/"] {
            assert_eq!(base(url), "http://a:1", "{url}");
        }
    }
}
