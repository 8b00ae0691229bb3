//! What every client of a running server needs.

use std::path::PathBuf;

use clap::Args;
use reqwest::header::{AUTHORIZATION, HeaderMap, HeaderValue};
use reqwest::{Client, ClientBuilder, Response, StatusCode, Url};
use serde_json::Value;

use crate::args::Secret;
use crate::error::Error;
use crate::keys::first_in;

/// How a client gets in.
#[derive(Clone, Debug, Default, Args)]
pub(crate) struct ClientArgs {
    /// API key of the server. Other users of this machine can read command lines: the variable and --api-key-file are safer
    #[arg(long, value_name = "KEY", env = "OPENAI_API_KEY", hide_env_values = true)]
    api_key: Option<Secret>,
    /// File of API keys, as for `serve`; requests send the first one, rather than that of --api-key
    #[arg(long, value_name = "FILE")]
    api_key_file: Option<PathBuf>,
}

impl ClientArgs {
    /// An HTTP client that talks to the server itself, whatever proxy the environment names.
    ///
    /// # Errors
    /// Where the file cannot be read or holds no key, or a key is none.
    fn http(&self) -> Result<Client, Error> {
        built(self.builder()?)
    }

    /// A client for the server at `url`, the value of `flag`, and what stands before the path in its requests. `url` is a URL with or
    /// without `http://` and `/v1`, or `unix:PATH`.
    ///
    /// # Errors
    /// As [`Self::http`]; where `url` is not a URL.
    pub(crate) fn server(&self, flag: &str, url: &str) -> Result<(Client, String), Error> {
        match url.strip_prefix("unix:") {
            Some(path) => {
                let path = path.strip_prefix("//").unwrap_or(path);
                Ok((self.http_at(path.into())?, SOCKET_BASE.to_owned()))
            }
            None => Ok((self.http()?, base(flag, url)?)),
        }
    }

    /// The same as [`Self::http`], over a Unix socket.
    ///
    /// # Errors
    /// As [`Self::http`].
    pub(crate) fn http_at(&self, socket: PathBuf) -> Result<Client, Error> {
        built(self.builder()?.unix_socket(socket))
    }

    fn builder(&self) -> Result<ClientBuilder, Error> {
        let mut headers = HeaderMap::new();
        let key = match (&self.api_key_file, &self.api_key) {
            (Some(path), _) => Some(first_in(path)?),
            (None, Some(key)) => Some(key.reveal().to_owned()),
            (None, None) => None,
        };
        // A variable that is set to nothing is not set.
        if let Some(key) = key.filter(|key| !key.is_empty()) {
            let mut value = HeaderValue::from_str(&format!("Bearer {key}")).map_err(|_| {
                Error::configuration("API key", "it holds characters that no header may hold")
            })?;
            value.set_sensitive(true);
            headers.insert(AUTHORIZATION, value);
        }
        Ok(Client::builder().no_proxy().default_headers(headers))
    }
}

fn built(client: ClientBuilder) -> Result<Client, Error> {
    client.build().map_err(|error| Error::Internal(error.to_string()))
}

/// How requests to a socket name their host.
pub(crate) const SOCKET_BASE: &str = "http://localhost";

/// Checks that `text`, the value of the flag or variable `origin`, is an HTTP URL such as `example`.
///
/// # Errors
/// If it is not.
pub(crate) fn check_http_url(origin: &str, text: &str, example: &str) -> Result<(), Error> {
    no_http_url(text).map_or(Ok(()), |why| Err(wrong_url(origin, text, &why, example)))
}

/// Why `text` is no HTTP URL, if it is none.
fn no_http_url(text: &str) -> Option<String> {
    let begins = || text.starts_with("http://") || text.starts_with("https://");
    match Url::parse(text) {
        Ok(url) if matches!(url.scheme(), "http" | "https") => None,
        Err(error) if begins() => Some(error.to_string()),
        _ => Some("it must begin with http:// or https://".to_owned()),
    }
}

fn wrong_url(origin: &str, text: &str, why: &str, example: &str) -> Error {
    Error::configuration(origin, format!("{text}: {why}; an example is {example}"))
}

/// The server's address from a URL with or without `http://` and `/v1`.
fn base(flag: &str, url: &str) -> Result<String, Error> {
    if url.starts_with('/') {
        let message = format!("{url}: a Unix socket is named by unix:{url}");
        return Err(Error::configuration(flag, message));
    }
    let whole = match url.contains("://") {
        true => url.to_owned(),
        false => format!("http://{url}"),
    };
    if let Some(why) = no_http_url(&whole) {
        return Err(wrong_url(flag, url, &why, "http://127.0.0.1:8000"));
    }
    let base = whole.trim_end_matches('/').trim_end_matches("/v1");
    Ok(base.trim_end_matches('/').to_owned())
}

/// What a server-sent event's line carries, if it carries anything.
pub(crate) fn event_data(line: &str) -> Option<&str> {
    line.strip_prefix("data:").map(str::trim)
}

/// What happened to a request that got no answer, by its innermost cause.
pub(crate) fn connection(error: &reqwest::Error) -> String {
    let mut cause: &dyn std::error::Error = error;
    while let Some(inner) = cause.source() {
        cause = inner;
    }
    format!("no answer: {cause}")
}

/// How much to show of an answer that is not an API error, in characters.
const SHOWN: usize = 300;

/// What an error response says, behind its status.
pub(crate) fn refusal(status: StatusCode, text: &str) -> String {
    let message = serde_json::from_str::<Value>(text)
        .ok()
        .and_then(|body| Some(body["error"]["message"].as_str()?.to_owned()));
    let message = message.unwrap_or_else(|| text.trim().chars().take(SHOWN).collect());
    let message = format!("{}: {message}", status.as_u16());
    match status {
        StatusCode::UNAUTHORIZED => {
            format!("{message}; give it with --api-key, --api-key-file or OPENAI_API_KEY")
        }
        _ => message,
    }
}

/// The JSON of an answer, or an error that says what it was.
pub(crate) async fn json_of(response: Response) -> Result<Value, String> {
    let status = response.status();
    let text = response.text().await.map_err(|error| connection(&error))?;
    match status.is_success() {
        true => serde_json::from_str(&text).map_err(|error| format!("not JSON: {error}")),
        false => Err(refusal(status, &text)),
    }
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
    fn refusals_say_what_the_server_said() {
        let body = r#"{"error": {"message": "no key"}}"#;
        assert!(refusal(StatusCode::UNAUTHORIZED, body).starts_with("401: no key; give it with --api-key"));
        assert_eq!(refusal(StatusCode::BAD_REQUEST, body), "400: no key");
        assert_eq!(refusal(StatusCode::BAD_GATEWAY, "x\n"), "502: x");
    }

    #[test]
    fn a_wrong_url_is_an_error_of_its_origin() {
        for (text, why) in [
            ("foo", "begin with http:// or https://"),
            ("hub.example:8080", "begin with http:// or https://"),
            ("", "begin with http:// or https://"),
            ("https://a:b", "port"),
        ] {
            let error = check_http_url("HF_ENDPOINT", text, "https://huggingface.co").unwrap_err();
            assert_eq!(error.exit_code(), 2);
            let said = error.to_string();
            let whole =
                said.starts_with("HF_ENDPOINT: ") && said.ends_with("an example is https://huggingface.co");
            assert!(whole && said.contains(why), "{said}");
        }
    }

    #[test]
    fn urls_with_and_without_the_version() {
        for url in [
            "http://a:1",
            "http://a:1/",
            "http://a:1/v1",
            "http://a:1/v1/",
            "a:1",
            "a:1/v1",
        ] {
            assert_eq!(base("--url", url).unwrap(), "http://a:1", "{url}");
        }
        assert_eq!(base("--url", "https://a").unwrap(), "https://a");
        for (url, message) in [
            ("ftp://a", "must begin with http://"),
            ("http://a:b", "port"),
            ("http://", "host"),
            ("", "host"),
            ("a:b", "port"),
            ("a b", "domain"),
            ("/run/a.sock", "unix:/run/a.sock"),
        ] {
            let error = base("--url", url).unwrap_err().to_string();
            assert!(
                error.contains(message) && error.contains(&format!("--url: {url}: ")),
                "{url}: {error}"
            );
        }
    }
}
