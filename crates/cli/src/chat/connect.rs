//! Finds a server for a chat, or starts one.

use std::io::{IsTerminal, stderr};
use std::path::Path;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
use reqwest::{Client, StatusCode};
use serde::Deserialize;
use serde_json::Value;
use tokio::time::sleep;

use super::ask::Server;
use super::own_server::OwnServer;
use super::{ChatCommandArgs, DEFAULT_URL};
use crate::args::DEFAULT_MODEL;
use crate::client::{SOCKET_BASE, connection, refusal};
use crate::command_line::quoted;
use crate::error::Error;

/// How long a server may take to say what it serves.
const PATIENCE: Duration = Duration::from_secs(10);
/// Between two looks at whether it is ready.
const POLL: Duration = Duration::from_millis(100);

/// The answer to `GET /v1/models`.
enum Found {
    /// The models that the server lists, at least one.
    Models(Vec<String>),
    /// No server answers.
    Nobody(String),
}

/// A server that is ready: the one that runs, or `own`, started for MODEL.
///
/// # Errors
/// Where there is none, it serves another model, or its start fails.
pub(super) async fn connect(args: &ChatCommandArgs, own: &mut Option<OwnServer>) -> Result<Server, Error> {
    if !args.own_server {
        let url = args.url.as_deref().unwrap_or(DEFAULT_URL);
        let (http, base) = args.client.server("--url", url)?;
        // What people call it.
        let place = if base == SOCKET_BASE { url } else { &base };
        let is_nobody = |found| matches!(found, Some(Found::Nobody(_)));
        if !args.serve_flags.is_empty() && !is_nobody(models(&http, &base).await?) {
            let message = format!(
                "a server runs at {place}, and these flags are for one that the chat starts: add --own-server, or leave them out"
            );
            return Err(Error::configuration("flags after --", message));
        }
        match running(&http, &base, place).await? {
            Found::Models(names) => {
                let model = choose(&names, args.model.as_deref(), place)?;
                let mut server = Server::new(http, &base, model);
                server.place = format!("at {place}");
                return Ok(server);
            }
            Found::Nobody(why) => match (&args.model, &args.url) {
                (Some(_), None) => {}
                (_, Some(url)) => {
                    let text = format!(
                        "no server answers at {url} ({why}): is it running? GET /ready says whether it is ready"
                    );
                    return Err(Error::NoServer(text));
                }
                (None, None) => {
                    let text = format!(
                        "no server answers at {DEFAULT_URL}: name a model, and the chat starts its own server, such as\n  \
                         plimsoll chat {DEFAULT_MODEL}"
                    );
                    return Err(Error::NoServer(text));
                }
            },
        }
    }
    let model = args.model.as_deref().unwrap_or(DEFAULT_MODEL);
    let server = own.insert(OwnServer::start(model, &args.serve_flags)?);
    let http = args.client.http_at(server.socket())?;
    let title = title(model);
    let line = StartLine::new(title);
    let ready = async {
        loop {
            match models(&http, SOCKET_BASE).await? {
                Some(Found::Models(mut names)) => return Ok::<_, Error>(names.swap_remove(0)),
                Some(Found::Nobody(_)) => {}
                None => line.show(&http, SOCKET_BASE).await,
            }
            sleep(POLL).await;
        }
    };
    let name = tokio::select! {
        name = ready => name?,
        error = server.ended() => return Err(error),
    };
    let mut server = Server::new(http, SOCKET_BASE, &name);
    server.title = title.to_owned();
    server.place = "on a server of its own".to_owned();
    Ok(server)
}

/// What the server at `base`, which people call `place`, serves, once it has started.
async fn running(http: &Client, base: &str, place: &str) -> Result<Found, Error> {
    let mut line = None;
    loop {
        match models(http, base).await? {
            None => {
                line.get_or_insert_with(|| StartLine::new(place))
                    .show(http, base)
                    .await;
                sleep(POLL).await;
            }
            Some(found) => return Ok(found),
        }
    }
}

/// What the server at `base` serves; `None` if it is starting.
async fn models(http: &Client, base: &str) -> Result<Option<Found>, Error> {
    let response = http
        .get(format!("{base}/v1/models"))
        .timeout(PATIENCE)
        .send()
        .await;
    let response = match response {
        Ok(response) => response,
        Err(error) if error.is_connect() => return Ok(Some(Found::Nobody(connection(&error)))),
        Err(error) => return Err(Error::NoServer(format!("{base}: {}", connection(&error)))),
    };
    let status = response.status();
    let text = response.text().await;
    let text = text.map_err(|error| Error::NoServer(format!("{base}: {}", connection(&error))))?;
    match status {
        StatusCode::OK => {}
        StatusCode::SERVICE_UNAVAILABLE if text.contains("starting") => return Ok(None),
        status => return Err(Error::NoServer(format!("{base}: {}", refusal(status, &text)))),
    }
    let list: Option<Value> = serde_json::from_str(&text).ok();
    let names = list.as_ref().and_then(|list| list["data"].as_array());
    let names = names
        .into_iter()
        .flatten()
        .filter_map(|model| model["id"].as_str());
    let names: Vec<_> = names.map(str::to_owned).collect();
    match names.is_empty() {
        true => Err(Error::NoServer(format!(
            "{base}/v1/models lists no model: is it an OpenAI API?"
        ))),
        false => Ok(Some(Found::Models(names))),
    }
}

/// The name to ask for: `wanted`, or the first.
fn choose<'a>(names: &'a [String], wanted: Option<&str>, base: &str) -> Result<&'a str, Error> {
    let Some(wanted) = wanted else {
        return Ok(&names[0]);
    };
    match names.iter().find(|name| *name == wanted) {
        Some(name) => Ok(name),
        None => Err(Error::configuration(
            "MODEL",
            format!(
                "the server at {base} serves {}, not {wanted}. Any one of these works:\n  # chat with what it serves\n  \
                 plimsoll chat --url {}\n  # start a second server for this chat\n  plimsoll chat {} --own-server",
                names[0],
                quoted(base),
                quoted(wanted),
            ),
        )),
    }
}

/// MODEL for people: of a path, its end.
fn title(model: &str) -> &str {
    let path = Path::new(model);
    let end = path.file_name().and_then(|name| name.to_str());
    end.filter(|_| path.exists()).unwrap_or(model)
}

/// One line about a start, for people.
struct StartLine(ProgressBar);

/// What `/ready` says of a start.
#[derive(Deserialize)]
struct Start {
    phase: String,
    percent: f64,
    estimated_seconds: Option<f64>,
}

impl StartLine {
    fn new(what: &str) -> Self {
        let style = ProgressStyle::with_template("{prefix} [{bar:20}] {percent:>3} % {wide_msg}")
            .expect("the template is constant")
            .progress_chars("=> ");
        let bar = match stderr().is_terminal() {
            true => ProgressBar::new(100),
            false => ProgressBar::hidden(),
        };
        let bar = bar.with_style(style).with_prefix(format!("starting {what}"));
        bar.tick();
        Self(bar)
    }

    /// Shows how far it is; what cannot be learnt changes nothing.
    async fn show(&self, http: &Client, base: &str) {
        let asked = http.get(format!("{base}/ready")).timeout(PATIENCE).send().await;
        let Ok(response) = asked else { return };
        let Ok(start) = response.json::<Start>().await else {
            return;
        };
        self.0.set_position(start.percent as u64);
        self.0.set_message(start.describe());
    }
}

impl Start {
    fn describe(&self) -> String {
        match self.estimated_seconds {
            Some(seconds) => format!("{}, about {seconds:.0} s left", self.phase),
            None => self.phase.clone(),
        }
    }
}

impl Drop for StartLine {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_model_than_the_one_asked_for_is_an_error_with_advice() {
        let names = ["a/b".to_owned(), "alias".to_owned()];
        assert_eq!(choose(&names, None, "http://x").unwrap(), "a/b");
        assert_eq!(choose(&names, Some("alias"), "http://x").unwrap(), "alias");
        let error = choose(&names, Some("c/d"), "http://x").unwrap_err();
        assert_eq!(error.exit_code(), 2);
        let text = error.to_string();
        for part in [
            "serves a/b, not c/d",
            "plimsoll chat --url http://x",
            "plimsoll chat c/d --own-server",
        ] {
            assert!(text.contains(part), "{part} is missing: {text}");
        }
    }

    #[test]
    fn a_start_in_one_line() {
        let start: Start = serde_json::from_str(
            r#"{"status": "starting", "phase": "probe", "percent": 40.5, "estimated_seconds": 7.4}"#,
        )
        .unwrap();
        assert_eq!(start.describe(), "probe, about 7 s left");
    }
}
