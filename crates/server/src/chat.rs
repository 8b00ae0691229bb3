//! `/v1/chat/completions`.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use plimsoll_text::Tokenizer;
use serde::Serialize;

use crate::body::Body;
use crate::error::ApiError;
use crate::generate::{Job, Piece, TokenLogprobs, blocking, collect};
use crate::openapi::Errors;
use crate::prompt;
use crate::respond::{Chunks, FINGERPRINT, Identity, stream};
use crate::state::AppState;
use crate::structured;
use crate::wire::chat::{
    ChatAnswer, ChatChoice, ChatChunk, ChatChunkChoice, ChatCompletion, ChatFields, ChatLogprob,
    ChatLogprobs, ChatRequest, ChatTokenLogprob, Delta,
};
use crate::wire::common::{Usage, finish_reason};

const PROMPT: &str = "messages";

/// Chat
///
/// An answer to a conversation, whole or as server-sent events. The data of each event is one chunk, that of the last is
/// `[DONE]`.
#[utoipa::path(
    post, path = "/v1/chat/completions", tag = "Generation",
    request_body(content = ChatRequest, examples(
        ("A question" = (value = json!({ "messages": [{ "role": "user", "content": "What is a load line?" }] }))),
        ("A stream" = (value = json!({
            "messages": [
                { "role": "system", "content": "Answer in one sentence." },
                { "role": "user", "content": "What is a load line?" },
            ],
            "max_completion_tokens": 64, "temperature": 0, "stream": true,
        }))),
    )),
    responses(
        (status = 200, description = "The answer.",
            content((ChatCompletion = "application/json"), (ChatChunk = "text/event-stream"))),
        Errors,
    )
)]
pub(crate) async fn handle(
    State(state): State<AppState>,
    Body(request): Body<ChatRequest>,
) -> Result<Response, ApiError> {
    let ChatRequest {
        common,
        structured,
        prompt,
        own,
    } = request;
    state.check_model(common.model.as_deref())?;
    let include_usage = common.include_usage()?;
    let logprobs = own.logprobs_per_token()?;
    let mut job = Job::new(&state, &common, logprobs, PROMPT)?;
    job.grammar = structured::compile(&state, structured.grammar()?).await?;
    let model = Arc::clone(state.model());
    let tokens = blocking(move || prompt::chat(&model, &prompt, false)).await?;
    job.max_tokens = own
        .max_completion_tokens
        .or(common.max_tokens)
        .or_else(|| state.default_max_tokens(&tokens));
    job.prompts = vec![tokens];

    let identity = Identity::new("chatcmpl", &state);
    let tokenizer = state.model().tokenizer.clone();
    let n = job.n;
    let choices = job.submit(&state)?;
    if common.stream {
        let chunks = ChatChunks {
            identity,
            tokenizer,
            logprobs: logprobs.is_some(),
            include_usage,
            begun: vec![false; n],
        };
        return Ok(stream(&state, choices, chunks, include_usage));
    }
    let pieces = collect(choices).await?;
    let usage = pieces
        .iter()
        .fold(Usage::default(), |sum, piece| sum.plus(&piece.usage));
    let choices = pieces
        .into_iter()
        .map(|piece| choice(piece, logprobs.is_some(), &tokenizer))
        .collect::<Result<_, _>>();
    let completion = ChatCompletion {
        id: &identity.id,
        object: "chat.completion",
        created: identity.created,
        model: &identity.model,
        choices: choices?,
        usage,
        system_fingerprint: FINGERPRINT,
    };
    Ok(Json(completion).into_response())
}

impl ChatFields {
    /// How many of the likeliest tokens to report, if logprobs are asked for.
    fn logprobs_per_token(&self) -> Result<Option<u32>, ApiError> {
        match (self.logprobs, self.top_logprobs) {
            (true, top) => Ok(Some(top.unwrap_or(0))),
            (false, None | Some(0)) => Ok(None),
            (false, Some(_)) => Err(ApiError::invalid(
                "top_logprobs",
                "top_logprobs needs logprobs = true",
            )),
        }
    }
}

fn choice(piece: Piece, logprobs: bool, tokenizer: &Tokenizer) -> Result<ChatChoice, ApiError> {
    let reason = piece
        .finish
        .ok_or_else(|| ApiError::Internal("a choice has no end".into()))?;
    Ok(ChatChoice {
        index: piece.index,
        message: ChatAnswer {
            role: "assistant",
            content: piece.text,
            refusal: None,
        },
        logprobs: logprobs.then(|| self::logprobs(&piece.logprobs, tokenizer)),
        finish_reason: finish_reason(reason),
    })
}

fn logprobs(tokens: &[TokenLogprobs], tokenizer: &Tokenizer) -> ChatLogprobs {
    let one = |token, logprob: f32| ChatLogprob {
        token: tokenizer.token_str(token),
        logprob: logprob.max(LOWEST_LOGPROB),
        bytes: tokenizer.token_bytes(token).to_vec(),
    };
    let content = tokens.iter().map(|t| ChatTokenLogprob {
        token: one(t.token, t.logprobs.sampled),
        top_logprobs: t
            .logprobs
            .top
            .iter()
            .map(|top| one(top.token, top.logprob))
            .collect(),
    });
    ChatLogprobs {
        content: content.collect(),
        refusal: None,
    }
}

/// JSON knows no infinity; this is OpenAI's word for "never".
pub(crate) const LOWEST_LOGPROB: f32 = -9999.0;

struct ChatChunks {
    identity: Identity,
    tokenizer: Tokenizer,
    logprobs: bool,
    include_usage: bool,
    /// Choices whose role has been told.
    begun: Vec<bool>,
}

impl ChatChunks {
    fn chunk(&self, choices: Vec<ChatChunkChoice>, usage: Option<Usage>) -> ChatChunk {
        ChatChunk {
            id: self.identity.id.clone(),
            object: "chat.completion.chunk",
            created: self.identity.created,
            model: self.identity.model.clone(),
            choices,
            usage: self.include_usage.then_some(usage),
            system_fingerprint: FINGERPRINT,
        }
    }

    fn delta(&self, index: usize, delta: Delta) -> ChatChunkChoice {
        ChatChunkChoice {
            index,
            delta,
            logprobs: None,
            finish_reason: None,
        }
    }
}

impl Chunks for ChatChunks {
    fn chunks(&mut self, piece: Piece) -> Vec<impl Serialize + Send> {
        let index = piece.index;
        let mut chunks = Vec::new();
        if !std::mem::replace(&mut self.begun[index], true) {
            let delta = Delta {
                role: Some("assistant"),
                content: Some(String::new()),
            };
            chunks.push(self.chunk(vec![self.delta(index, delta)], None));
        }
        if !piece.text.is_empty() || !piece.logprobs.is_empty() {
            let mut choice = self.delta(
                index,
                Delta {
                    role: None,
                    content: Some(piece.text),
                },
            );
            choice.logprobs = self.logprobs.then(|| logprobs(&piece.logprobs, &self.tokenizer));
            chunks.push(self.chunk(vec![choice], None));
        }
        if let Some(reason) = piece.finish {
            let mut choice = self.delta(index, Delta::default());
            choice.finish_reason = Some(finish_reason(reason));
            chunks.push(self.chunk(vec![choice], None));
        }
        chunks
    }

    fn usage(&self, usage: Usage) -> impl Serialize + Send {
        self.chunk(Vec::new(), Some(usage))
    }
}
