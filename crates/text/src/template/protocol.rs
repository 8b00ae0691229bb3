//! What a worker and its parent say to each other: MessagePack, which keeps numbers exactly, each message behind its length.

use std::io::{self, Read, Write};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::ChatInput;
use super::text::TemplateText;
use crate::TextError;
use crate::bounds::RenderLimit;

/// One rendering.
#[derive(Serialize)]
pub(super) struct Request<'a> {
    /// The templates, unless they are those of the request before.
    pub(super) text: Option<&'a TemplateText>,
    pub(super) input: ChatInput<'a>,
}

/// [`Request`] as it arrives.
#[derive(Deserialize)]
pub(super) struct Received {
    pub(super) text: Option<TemplateText>,
    pub(super) input: ReceivedInput,
}

#[derive(Deserialize)]
pub(super) struct ReceivedInput {
    messages: Vec<Value>,
    tools: Option<Vec<Value>>,
    documents: Option<Vec<Value>>,
    add_generation_prompt: bool,
    continue_final_message: bool,
    kwargs: Option<Map<String, Value>>,
}

impl ReceivedInput {
    pub(super) fn as_input(&self) -> ChatInput<'_> {
        ChatInput {
            messages: &self.messages,
            tools: self.tools.as_deref(),
            documents: self.documents.as_deref(),
            add_generation_prompt: self.add_generation_prompt,
            continue_final_message: self.continue_final_message,
            kwargs: self.kwargs.as_ref(),
        }
    }
}

/// The answer to a request.
#[derive(Serialize, Deserialize)]
pub(super) struct Reply {
    pub(super) outcome: Outcome,
    /// The worker ends now.
    pub(super) is_last: bool,
}

/// What became of a rendering: its text, or an error of [`TextError`]'s.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Outcome {
    Text(String),
    NotJinja(String),
    Refused(String),
    Failed(String),
    Limit(RenderLimit),
}

impl From<Result<String, TextError>> for Outcome {
    fn from(rendered: Result<String, TextError>) -> Self {
        match rendered {
            Ok(text) => Self::Text(text),
            Err(TextError::Template(problem)) => Self::NotJinja(problem),
            Err(TextError::Refused(message)) => Self::Refused(message),
            Err(TextError::Limit(limit)) => Self::Limit(limit),
            Err(TextError::Render(problem)) => Self::Failed(problem),
            Err(error) => Self::Failed(error.to_string()),
        }
    }
}

impl From<Outcome> for Result<String, TextError> {
    fn from(outcome: Outcome) -> Self {
        Err(match outcome {
            Outcome::Text(text) => return Ok(text),
            Outcome::NotJinja(problem) => TextError::Template(problem),
            Outcome::Refused(message) => TextError::Refused(message),
            Outcome::Failed(problem) => TextError::Render(problem),
            Outcome::Limit(limit) => TextError::Limit(limit),
        })
    }
}

pub(super) fn send(stream: &mut impl Write, message: &impl Serialize) -> io::Result<()> {
    let mut bytes = vec![0; size_of::<u64>()];
    rmp_serde::encode::write(&mut bytes, message).map_err(io::Error::other)?;
    let length = (bytes.len() - size_of::<u64>()) as u64;
    bytes[..size_of::<u64>()].copy_from_slice(&length.to_le_bytes());
    stream.write_all(&bytes)
}

pub(super) fn receive<T: DeserializeOwned>(stream: &mut impl Read) -> io::Result<T> {
    let mut length = [0; size_of::<u64>()];
    stream.read_exact(&mut length)?;
    let length = usize::try_from(u64::from_le_bytes(length)).map_err(io::Error::other)?;
    let mut bytes = vec![0; length];
    stream.read_exact(&mut bytes)?;
    rmp_serde::from_slice(&bytes).map_err(io::Error::other)
}
