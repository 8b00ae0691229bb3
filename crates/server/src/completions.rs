//! `/v1/completions`.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use plimsoll_core::TokenId;
use plimsoll_text::Tokenizer;
use serde_json::{Map, json};

use crate::body::Body;
use crate::chat::LOWEST_LOGPROB;
use crate::error::ApiError;
use crate::generate::{Job, Piece, TokenLogprobs, blocking, collect, merge};
use crate::openapi::Errors;
use crate::prompt;
use crate::respond::{FINGERPRINT, Identity, Wording, Written, data, done, stream};
use crate::state::AppState;
use crate::structured;
use crate::wire::common::{Usage, finish_reason};
use crate::wire::completion::{
    Completion, CompletionChoice, CompletionFields, CompletionLogprobs, CompletionRequest, Prompt,
};

const PROMPT: &str = "prompt";
/// OpenAI's default of `max_tokens` for completions.
const DEFAULT_MAX_TOKENS: usize = 16;

/// Completions
///
/// Text that goes on from a prompt, whole or as server-sent events. The data of each event is one chunk, that of the last
/// is `[DONE]`.
#[utoipa::path(
    post, path = "/v1/completions", tag = "Generation", operation_id = "createCompletion",
    request_body(content = CompletionRequest, examples(
        ("A text" = (value = json!({ "prompt": "A load line is", "max_tokens": 32 }))),
        ("Two at once" = (value = json!({ "prompt": ["A load line is", "A Plimsoll mark is"], "max_tokens": 32 }))),
    )),
    responses(
        (status = 200, description = "The text.",
            content((Completion = "application/json"), (Completion = "text/event-stream"))),
        Errors,
    )
)]
pub(crate) async fn handle(
    State(state): State<AppState>,
    Body(request): Body<CompletionRequest>,
) -> Result<Response, ApiError> {
    let CompletionRequest {
        common,
        structured,
        own,
    } = request;
    state.check_model(common.model.as_deref())?;
    let include_usage = common.include_usage()?;
    let CompletionFields {
        prompt: prompts,
        echo,
        logprobs,
    } = own;
    if echo && logprobs.is_some() {
        return Err(ApiError::Unsupported {
            field: "echo".into(),
            hint: Some("not together with logprobs, which would be those of the prompt"),
        });
    }
    let mut job = Job::new(&state, &common, logprobs, PROMPT)?;
    job.grammar = structured::compile(&state, structured.grammar()?).await?;
    let prompts = prompts.into_vec();
    if prompts.is_empty() {
        return Err(ApiError::invalid(PROMPT, "prompt must not be empty"));
    }
    let model = Arc::clone(state.model());
    let (prompts, tokens) = blocking(move || {
        let tokens = prompts
            .iter()
            .map(|p| prompt::completion(&model, p))
            .collect::<Result<Vec<_>, _>>()?;
        Ok((prompts, tokens))
    })
    .await?;
    let longest = tokens.iter().map(Vec::len).max().unwrap_or(0);
    let room = state
        .engine()
        .limits()
        .max_request_tokens()
        .saturating_sub(longest);
    job.max_tokens = common.max_tokens.or(Some(DEFAULT_MAX_TOKENS.min(room.max(1))));
    let n = job.n;
    job.prompts = tokens;

    let tokenizer = state.model().tokenizer.clone();
    let echoed = |prompt: &Prompt| match prompt {
        Prompt::Text(text) => text.clone(),
        Prompt::Tokens(tokens) => tokenizer.decode(tokens, true),
    };
    let echo: Vec<String> = if echo {
        prompts.iter().map(echoed).collect()
    } else {
        Vec::new()
    };
    let mut shape = Shape {
        identity: Identity::new("cmpl", &state),
        tokenizer,
        logprobs: logprobs.is_some(),
        include_usage,
        usage: Usage::default(),
        offsets: vec![0; prompts.len() * n],
        // Each choice begins with its prompt, if that was asked for.
        echo: echo.into_iter().flat_map(|text| vec![text; n]).collect(),
    };
    let choices = job.submit(&state)?;
    if common.stream {
        let pieces = merge(choices);
        return Ok(stream(&state, pieces, shape));
    }
    let pieces = collect(choices).await?;
    let usage = pieces
        .iter()
        .fold(Usage::default(), |sum, piece| sum.plus(&piece.usage));
    let choices = pieces.into_iter().map(|piece| shape.choice(piece)).collect();
    shape.include_usage = true;
    Ok(Json(shape.completion(choices, Some(usage))).into_response())
}

struct Shape {
    identity: Identity,
    tokenizer: Tokenizer,
    logprobs: bool,
    include_usage: bool,
    /// Of the choices that ended.
    usage: Usage,
    /// Characters of each choice so far.
    offsets: Vec<usize>,
    /// Text with which each choice still has to begin; empty without `echo`.
    echo: Vec<String>,
}

impl Shape {
    fn completion(&self, choices: Vec<CompletionChoice>, usage: Option<Usage>) -> Completion {
        Completion {
            id: self.identity.id.clone(),
            object: "text_completion",
            created: self.identity.created,
            model: self.identity.model.clone(),
            choices,
            usage: self.include_usage.then_some(usage),
            system_fingerprint: FINGERPRINT,
        }
    }

    fn choice(&mut self, piece: Piece) -> CompletionChoice {
        let Piece {
            index,
            text,
            logprobs,
            finish,
            ..
        } = piece;
        let logprobs = self.logprobs.then(|| self.logprobs(index, &logprobs));
        let mut whole = self.echo.get_mut(index).map(std::mem::take).unwrap_or_default();
        whole += &text;
        CompletionChoice {
            index,
            text: whole,
            logprobs,
            finish_reason: finish.map(finish_reason),
        }
    }

    fn logprobs(&mut self, index: usize, tokens: &[TokenLogprobs]) -> CompletionLogprobs {
        let mut out = CompletionLogprobs::default();
        for TokenLogprobs { token, logprobs } in tokens {
            let text = self.tokenizer.token_str(*token);
            let mut top = Map::new();
            let all = logprobs
                .top
                .iter()
                .map(|top| (top.token, top.logprob))
                .chain([(*token, logprobs.sampled)]);
            for (token, logprob) in all {
                top.entry(self.name(token))
                    .or_insert(json!(logprob.max(LOWEST_LOGPROB)));
            }
            out.text_offset.push(self.offsets[index]);
            out.token_logprobs.push(logprobs.sampled.max(LOWEST_LOGPROB));
            out.top_logprobs.push(top);
            self.offsets[index] += text.chars().count();
            out.tokens.push(self.name(*token));
        }
        out
    }

    /// Tokens are keys here: one that is no text by itself is named by its bytes, as OpenAI does, lest two become one.
    fn name(&self, token: TokenId) -> String {
        let bytes = self.tokenizer.token_bytes(token);
        match std::str::from_utf8(bytes) {
            Ok(text) => text.to_owned(),
            Err(_) => format!(
                "bytes:{}",
                bytes
                    .iter()
                    .map(|byte| format!("\\x{byte:02x}"))
                    .collect::<String>()
            ),
        }
    }
}

impl Wording for Shape {
    type Item = Piece;

    fn word(&mut self, piece: Piece) -> Vec<Written> {
        self.usage = self.usage.plus(&piece.usage);
        let choice = self.choice(piece);
        vec![data(&self.completion(vec![choice], None))]
    }

    fn end(&mut self) -> Vec<Written> {
        let usage = self
            .include_usage
            .then(|| data(&self.completion(Vec::new(), Some(self.usage))));
        usage.into_iter().chain([done()]).collect()
    }
}
