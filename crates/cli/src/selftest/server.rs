//! The server under test, as HTTP shows it.

use std::time::Duration;

use futures::StreamExt;
use reqwest::header::RETRY_AFTER;
use reqwest::{RequestBuilder, Response, StatusCode};
use serde_json::{Value, json};

use super::answer::Answer;
use super::job::{Job, Leave};
use super::limits::Limits;
use super::page::Page;
use super::pictures::ImageLimits;
use crate::client::{LAST_EVENT, Lines, connection, event_data, refusal};
use crate::start::TEXT_GENERATION;

/// How long a question about the server itself may take, however busy it is.
const PATIENCE: Duration = Duration::from_secs(30);

/// One server.
#[derive(Clone, Debug)]
pub(super) struct Server {
    http: reqwest::Client,
    base: String,
}

/// How a request ended.
#[derive(Debug)]
pub(super) enum Outcome {
    /// Answered, as it should be.
    Done(Answer),
    /// The client went away, as it was told to.
    Left,
    /// 429, or 503 for lack of memory for a large request: to be sent again after this time.
    Busy(Duration),
    /// Anything else, in words.
    Wrong(String),
}

impl Server {
    /// `base` stands before the path in requests.
    pub(super) fn new(http: reqwest::Client, base: String) -> Self {
        Self { http, base }
    }

    /// Whether requests are accepted and move; the error says why not.
    pub(super) async fn ready(&self) -> Result<(), String> {
        self.get("/ready").await.map(drop)
    }

    pub(super) async fn page(&self) -> Result<Page, String> {
        Ok(Page::parse(&self.get("/metrics").await?))
    }

    /// What the server proved, and the images that it takes, if it does.
    pub(super) async fn proved(&self) -> Result<(Limits, Option<ImageLimits>), String> {
        let memory = self.get_json("/memory").await?;
        let disabled = memory["profile"]["disabled"].as_array();
        let mut disabled = disabled.into_iter().flatten();
        if disabled.any(|disabled| disabled["path"] == TEXT_GENERATION) {
            return Err(format!(
                "{} serves embeddings, and the selftest drives generation of text",
                self.base
            ));
        }
        let limits = serde_json::from_value(memory["profile"].clone())
            .map_err(|error| format!("{}/memory shows no profile: {error}", self.base))?;
        // Null where there are none.
        let images = serde_json::from_value(memory["images"].clone())
            .map_err(|error| format!("{}/memory shows other images: {error}", self.base))?;
        Ok((limits, images))
    }

    /// The first name of the model.
    pub(super) async fn model(&self) -> Result<String, String> {
        let models = self.get_json("/v1/models").await?;
        let first = models["data"][0]["id"].as_str();
        first
            .map(str::to_owned)
            .ok_or_else(|| format!("{} lists no model", self.base))
    }

    /// The number of tokens there are, found by asking for the text of some.
    pub(super) async fn vocab_size(&self) -> Result<u32, String> {
        let (mut known, mut beyond) = (0, 1 << 24);
        while beyond - known > 1 {
            let middle = known + (beyond - known) / 2;
            let (status, text) = self.post("/detokenize", &json!({"tokens": [middle]})).await?;
            match status {
                StatusCode::OK => known = middle,
                StatusCode::BAD_REQUEST => beyond = middle,
                _ => return Err(format!("{}/detokenize: {}", self.base, refusal(status, &text))),
            }
        }
        Ok(beyond)
    }

    /// Tokens of a chat of one message, where there is a chat template and the message is one that the server takes.
    pub(super) async fn chat_tokens(&self, content: &Value) -> Result<Option<usize>, String> {
        let body = json!({"messages": [{"role": "user", "content": content}]});
        let (status, text) = self.post("/tokenize", &body).await?;
        let count = serde_json::from_str::<Value>(&text)
            .ok()
            .and_then(|value| value["count"].as_u64());
        match (status, count) {
            (StatusCode::OK, Some(count)) => Ok(Some(count as usize)),
            (StatusCode::BAD_REQUEST, _) => Ok(None),
            _ => Err(format!("{}/tokenize: {}", self.base, refusal(status, &text))),
        }
    }

    /// Sends one request and reads its answer, or as much of it as it was told to.
    pub(super) async fn send(&self, job: &Job) -> Outcome {
        match job.leave {
            Some(Leave::Millis(millis)) => {
                let time = Duration::from_millis(millis);
                let result = tokio::time::timeout(time, self.answer(job, usize::MAX)).await;
                result.unwrap_or(Ok(Outcome::Left))
            }
            Some(Leave::Events(events)) => self.answer(job, events).await,
            None => self.answer(job, usize::MAX).await,
        }
        .unwrap_or_else(Outcome::Wrong)
    }

    async fn answer(&self, job: &Job, most_events: usize) -> Result<Outcome, String> {
        let request = self.http.post(self.url(job.path)).json(&job.body);
        let response = request.send().await.map_err(|error| connection(&error))?;
        let status = response.status();
        if status == StatusCode::TOO_MANY_REQUESTS {
            return Ok(Outcome::Busy(retry_after(&response)?));
        }
        if status != StatusCode::OK {
            let after = retry_after(&response);
            let text = response.text().await.unwrap_or_default();
            if status == StatusCode::SERVICE_UNAVAILABLE && is_for_lack_of_memory(&text) {
                return Ok(Outcome::Busy(after?));
            }
            return Err(refusal(status, &text));
        }
        let mut answer = Answer::default();
        if job.streams() {
            if !read_stream(response, most_events, &mut answer).await? {
                return Ok(Outcome::Left);
            }
        } else {
            let whole = response.json::<Value>().await;
            answer.add(&whole.map_err(|error| format!("not JSON: {error}"))?)?;
        }
        answer.check(&job.expected)?;
        Ok(Outcome::Done(answer))
    }

    async fn get(&self, path: &str) -> Result<String, String> {
        match whole(self.http.get(self.url(path))).await? {
            (StatusCode::OK, text) => Ok(text),
            (status, text) => Err(format!("{path}: {}", refusal(status, &text))),
        }
    }

    async fn get_json(&self, path: &str) -> Result<Value, String> {
        let text = self.get(path).await?;
        serde_json::from_str(&text).map_err(|error| format!("{}: not JSON: {error}", self.url(path)))
    }

    async fn post(&self, path: &str, body: &Value) -> Result<(StatusCode, String), String> {
        whole(self.http.post(self.url(path)).json(body)).await
    }

    fn url(&self, path: &str) -> String {
        format!("{}{path}", self.base)
    }
}

/// The status and the text of an answer.
async fn whole(request: RequestBuilder) -> Result<(StatusCode, String), String> {
    let response = request.timeout(PATIENCE).send().await;
    let response = response.map_err(|error| connection(&error))?;
    let status = response.status();
    Ok((status, response.text().await.map_err(|error| connection(&error))?))
}

/// Reads a stream to its end; false where `most_events` came before.
async fn read_stream(response: Response, most_events: usize, answer: &mut Answer) -> Result<bool, String> {
    let mut lines = Lines::default();
    let mut events = 0;
    let mut stream = response.bytes_stream();
    while let Some(bytes) = stream.next().await {
        lines.push(&bytes.map_err(|error| connection(&error))?);
        while let Some(line) = lines.next() {
            match event_data(&line) {
                None => {}
                Some(LAST_EVENT) => return Ok(true),
                Some(_) if events >= most_events => return Ok(false),
                Some(data) => {
                    events += 1;
                    let chunk = serde_json::from_str(data);
                    answer.add(&chunk.map_err(|error| format!("an event that is not JSON: {error}"))?)?;
                }
            }
        }
    }
    Err("a stream without an end".to_owned())
}

/// Whether a 503 says that other requests hold the memory.
fn is_for_lack_of_memory(text: &str) -> bool {
    let error: Value = serde_json::from_str(text).unwrap_or_default();
    error["error"]["code"] == "too_many_large_requests"
}

/// When a server that is busy wants to be asked again.
fn retry_after(response: &Response) -> Result<Duration, String> {
    let header = response.headers().get(RETRY_AFTER);
    let seconds = header.and_then(|value| value.to_str().ok()?.parse().ok());
    seconds
        .map(Duration::from_secs)
        .ok_or_else(|| format!("{} without Retry-After in seconds", response.status().as_u16()))
}
