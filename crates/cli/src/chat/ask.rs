//! Sends a question to a server over the OpenAI API, and reads the answer as it streams.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use futures::stream::BoxStream;
use futures::{Stream, StreamExt};
use reqwest::{Client, StatusCode};
use serde_json::Value;

use crate::client::{LAST_EVENT, Lines, connection, event_data, refusal};
use crate::error::Error;

/// A server that is ready.
#[derive(Clone, Debug)]
pub(super) struct Server {
    http: Client,
    base: String,
    /// The name of its model.
    pub(super) model: String,
    /// The same for people.
    pub(super) title: String,
    /// Where it is, for people.
    pub(super) place: String,
}

impl Server {
    pub(super) fn new(http: Client, base: &str, model: &str) -> Self {
        Self {
            http,
            base: base.to_owned(),
            model: model.to_owned(),
            title: model.to_owned(),
            place: format!("at {base}"),
        }
    }

    /// Asks for a chat completion.
    ///
    /// # Errors
    /// Where the server does not answer, or refuses.
    pub(super) async fn chat(&self, body: &Value) -> Result<Asked, Error> {
        let begin = Instant::now();
        let url = format!("{}/v1/chat/completions", self.base);
        let sent = self.http.post(url).json(body).send().await;
        let response = sent.map_err(|error| Error::Chat(connection(&error)))?;
        match response.status() {
            StatusCode::OK => {
                let bytes = response.bytes_stream();
                Ok(Asked::new(bytes.map(|bytes| bytes.map(Into::into)), begin))
            }
            status => {
                let text = response.text().await.unwrap_or_default();
                Err(Error::Chat(refusal(status, &text)))
            }
        }
    }
}

/// A part of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Piece {
    Reasoning(String),
    Content(String),
}

/// An answer on its way. Dropping it cancels the request.
pub(super) struct Asked {
    bytes: BoxStream<'static, reqwest::Result<Vec<u8>>>,
    lines: Lines,
    pieces: VecDeque<Piece>,
    done: bool,
    begin: Instant,
    first: Option<Instant>,
    last: Instant,
    tokens: Option<u64>,
    finish_reason: Option<String>,
}

impl Asked {
    fn new(bytes: impl Stream<Item = reqwest::Result<Vec<u8>>> + Send + 'static, begin: Instant) -> Self {
        Self {
            bytes: bytes.boxed(),
            lines: Lines::default(),
            pieces: VecDeque::new(),
            done: false,
            begin,
            first: None,
            last: begin,
            tokens: None,
            finish_reason: None,
        }
    }

    /// The next part; what came at once comes as one.
    ///
    /// # Errors
    /// Where the stream breaks off or holds an error.
    pub(super) async fn next(&mut self) -> Result<Option<Piece>, Error> {
        loop {
            if let Some(piece) = self.pieces.pop_front() {
                return Ok(Some(piece));
            }
            if self.done {
                return Ok(None);
            }
            match self.bytes.next().await {
                Some(bytes) => {
                    let bytes = bytes.map_err(|error| Error::Chat(connection(&error)))?;
                    self.lines.push(&bytes);
                    self.last = Instant::now();
                }
                None => return Err(Error::Chat("the answer broke off: the server ended".to_owned())),
            }
            while let Some(line) = self.lines.next() {
                match event_data(&line) {
                    None | Some("") => {}
                    Some(LAST_EVENT) => self.done = true,
                    Some(data) => self.take(data)?,
                }
            }
        }
    }

    fn take(&mut self, data: &str) -> Result<(), Error> {
        let chunk: Value = serde_json::from_str(data)
            .map_err(|error| Error::Chat(format!("the server sent a chunk that is not JSON: {error}")))?;
        if let Some(error) = chunk.get("error") {
            let message = error["message"].as_str();
            return Err(Error::Chat(
                message.map_or_else(|| error.to_string(), str::to_owned),
            ));
        }
        if let Some(tokens) = chunk["usage"]["completion_tokens"].as_u64() {
            self.tokens = Some(tokens);
        }
        let choice = &chunk["choices"][0];
        if let Some(reason) = choice["finish_reason"].as_str() {
            self.finish_reason = Some(reason.to_owned());
        }
        let delta = &choice["delta"];
        let reasoning = delta["reasoning"]
            .as_str()
            .or(delta["reasoning_content"].as_str());
        self.add(reasoning, Piece::Reasoning);
        self.add(delta["content"].as_str(), Piece::Content);
        Ok(())
    }

    fn add(&mut self, text: Option<&str>, piece: fn(String) -> Piece) {
        let Some(text) = text.filter(|text| !text.is_empty()) else {
            return;
        };
        self.first.get_or_insert(self.last);
        let new = piece(text.to_owned());
        match (self.pieces.back_mut(), new) {
            (Some(Piece::Content(last)), Piece::Content(new))
            | (Some(Piece::Reasoning(last)), Piece::Reasoning(new)) => last.push_str(&new),
            (_, new) => self.pieces.push_back(new),
        }
    }

    /// Why the answer has no proper end, if it has none.
    pub(super) fn cut_off(&self) -> Option<&'static str> {
        let is = |reason| self.finish_reason.as_deref() == Some(reason);
        is("length").then_some("the answer is cut off: --max-tokens or the end of the context")
    }

    /// Number, speed and delay of tokens.
    pub(super) fn summary(&self) -> String {
        let first = self.first.unwrap_or(self.last);
        let text = summary(self.tokens, first - self.begin, self.last - first);
        match self.cut_off() {
            Some(why) => format!("{text}; {why}"),
            None => text,
        }
    }
}

/// `tokens` of which the first came after `delay` and the others within `rest`.
fn summary(tokens: Option<u64>, delay: Duration, rest: Duration) -> String {
    let delay = format!("first after {:.2} s", delay.as_secs_f64());
    match tokens {
        None => delay,
        Some(1) => format!("1 token, {delay}"),
        // All of them at once: no speed.
        Some(tokens) if rest < Duration::from_millis(1) => format!("{tokens} tokens, {delay}"),
        Some(tokens) => {
            let rate = tokens.saturating_sub(1) as f64 / rest.as_secs_f64();
            format!("{tokens} tokens, {rate:.1} tokens/s, {delay}")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(parts: Vec<&'static str>) -> Asked {
        let bytes = parts.into_iter().map(|part| Ok(part.as_bytes().to_vec()));
        Asked::new(futures::stream::iter(bytes), Instant::now())
    }

    async fn all(mut asked: Asked) -> Result<(Vec<Piece>, Asked), String> {
        let mut pieces = Vec::new();
        while let Some(piece) = asked.next().await.map_err(|error| error.to_string())? {
            pieces.push(piece);
        }
        Ok((pieces, asked))
    }

    #[tokio::test]
    async fn parts_of_an_answer() {
        let parts = vec![
            "data: {\"choices\":[{\"delta\":{\"role\":\"assistant\"}}]}\n\ndata: {\"choices\":[{\"delta\":{\"reasoning\":\"Hm\",\
             \"reasoning_content\":\"Hm\"}}]}\n",
            "\ndata: {\"choices\":[{\"delta\":{\"content\":\"A\"}}]}\n\ndata: {\"choices\":[{\"delta\":{\"content\":\"B\"}}]}\n\n",
            "data: {\"choices\":[{\"delta\":{\"content\":\"C\"},\"finish_reason\":\"length\"}]}\n\n",
            "data: {\"choices\":[],\"usage\":{\"completion_tokens\":4}}\n\ndata: [DONE]\n\n",
        ];
        let (pieces, asked) = all(asked(parts)).await.unwrap();
        let content = |text: &str| Piece::Content(text.to_owned());
        assert_eq!(
            pieces,
            [Piece::Reasoning("Hm".into()), content("AB"), content("C")]
        );
        assert!(asked.cut_off().is_some());
        assert!(asked.summary().starts_with("4 tokens"), "{}", asked.summary());
    }

    #[tokio::test]
    async fn a_stream_that_fails_is_an_error() {
        let broken = all(asked(vec!["data: {\"choices\":[]}\n\n"])).await;
        assert!(broken.err().unwrap().contains("broke off"));
        let failed = all(asked(vec![
            "data: {\"error\":{\"message\":\"out of memory\"}}\n\n",
        ]))
        .await;
        assert_eq!(failed.err().unwrap(), "out of memory");
    }

    #[test]
    fn speed_is_that_of_the_tokens_after_the_first() {
        let ms = Duration::from_millis;
        assert_eq!(
            summary(Some(11), ms(200), ms(500)),
            "11 tokens, 20.0 tokens/s, first after 0.20 s"
        );
        assert_eq!(summary(Some(1), ms(30), ms(0)), "1 token, first after 0.03 s");
        assert_eq!(summary(Some(5), ms(30), ms(0)), "5 tokens, first after 0.03 s");
    }
}
