//! `/v1/chat/completions`.

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use plimsoll_text::Tokenizer;

use crate::body::Body;
use crate::conversation::{self, Answer, Conversation, Delta, End, EndReason, Fit, Prompt, ToolCall, Update};
use crate::error::ApiError;
use crate::generate::TokenLogprobs;
use crate::openapi::Errors;
use crate::respond::{self, FINGERPRINT, Identity, Wording, Written, data, done};
use crate::state::AppState;
use crate::tools;
use crate::wire::chat::{
    ChatAnswer, ChatChoice, ChatChunk, ChatChunkChoice, ChatCompletion, ChatDelta, ChatFields,
    ChatFunctionCall, ChatFunctionDelta, ChatLogprob, ChatLogprobs, ChatRequest, ChatTokenLogprob,
    ChatToolCall, ChatToolCallDelta,
};
use crate::wire::common::Usage;

/// Chat
///
/// An answer to a conversation, whole or as server-sent events. The data of each event is one chunk, that of the last is
/// `[DONE]`.
#[utoipa::path(
    post, path = "/v1/chat/completions", tag = "Generation", operation_id = "createChatCompletion",
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
        mut prompt,
        own,
    } = request;
    state.check_model(common.model.as_deref())?;
    let (stream, include_usage) = (common.stream, common.include_usage()?);
    let logprobs = own.logprobs_per_token()?;
    own.check_legacy()?;
    let parallel = own.parallel_tool_calls.unwrap_or(true);
    let tools = tools::read(prompt.tools.take(), own.tool_choice, parallel)?;
    let conversation = Conversation {
        prompt: Prompt {
            tools,
            ..prompt.into_prompt()?
        },
        include_reasoning: own.include_reasoning.unwrap_or(true),
        max_tokens: own.max_completion_tokens.or(common.max_tokens),
        fit: Fit::Refuse,
        logprobs,
        structure: structured.grammar()?,
        common,
    };
    let answers = conversation::open(&state, conversation).await?;
    let identity = Identity::new("chatcmpl", &state);
    let tokenizer = state.model().tokenizer.clone();
    if stream {
        let chunks = ChatChunks {
            identity,
            tokenizer,
            logprobs: logprobs.is_some(),
            include_usage,
            usage: Usage::default(),
            begun: vec![false; answers.len()],
        };
        return Ok(respond::stream(&state, answers.updates(), chunks));
    }
    let answers = answers.whole().await?;
    let usage = answers
        .iter()
        .fold(Usage::default(), |sum, answer| sum.plus(&answer.end.usage));
    let choices = answers
        .into_iter()
        .enumerate()
        .map(|(index, answer)| choice(index, answer, logprobs.is_some(), &tokenizer))
        .collect();
    let completion = ChatCompletion {
        id: &identity.id,
        object: "chat.completion",
        created: identity.created,
        model: &identity.model,
        choices,
        usage,
        system_fingerprint: FINGERPRINT,
    };
    Ok(Json(completion).into_response())
}

impl ChatFields {
    /// OpenAI's way before `tools`.
    fn check_legacy(&self) -> Result<(), ApiError> {
        let unsupported = |field: &str, hint| {
            Err(ApiError::Unsupported {
                field: field.to_owned(),
                hint: Some(hint),
            })
        };
        if self
            .functions
            .as_ref()
            .is_some_and(|functions| !functions.is_empty())
        {
            return unsupported("functions", "send tools");
        }
        match &self.function_call {
            Some(choice) if choice != "none" && choice != "auto" => {
                unsupported("function_call", "send tool_choice")
            }
            _ => Ok(()),
        }
    }

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

fn choice(index: usize, mut answer: Answer, logprobs: bool, tokenizer: &Tokenizer) -> ChatChoice {
    let content = answer.take_content();
    let reasoning = (!answer.reasoning.is_empty()).then_some(answer.reasoning);
    ChatChoice {
        index,
        message: ChatAnswer {
            role: "assistant",
            content,
            refusal: None,
            reasoning_content: reasoning.clone(),
            reasoning,
            tool_calls: answer.tool_calls.into_iter().map(ChatToolCall::from).collect(),
        },
        logprobs: logprobs.then(|| self::logprobs(&answer.logprobs, tokenizer)),
        finish_reason: finish_reason(answer.end.reason),
    }
}

impl From<ToolCall> for ChatToolCall {
    fn from(call: ToolCall) -> Self {
        Self {
            id: call.id,
            r#type: FUNCTION,
            function: ChatFunctionCall {
                name: call.name,
                arguments: call.arguments,
            },
        }
    }
}

impl From<Delta> for ChatDelta {
    fn from(delta: Delta) -> Self {
        let call = |call| Self {
            tool_calls: Some(vec![call]),
            ..Self::default()
        };
        match delta {
            Delta::Content(text) => Self {
                content: Some(text),
                ..Self::default()
            },
            Delta::Reasoning(text) => Self {
                reasoning_content: Some(text.clone()),
                reasoning: Some(text),
                ..Self::default()
            },
            Delta::ToolCall { index, id, name } => call(ChatToolCallDelta {
                index,
                id: Some(id),
                r#type: Some(FUNCTION),
                function: ChatFunctionDelta {
                    name: Some(name),
                    arguments: String::new(),
                },
            }),
            Delta::ToolArguments { index, fragment } => call(ChatToolCallDelta {
                index,
                id: None,
                r#type: None,
                function: ChatFunctionDelta {
                    name: None,
                    arguments: fragment,
                },
            }),
        }
    }
}

/// The one kind of tool.
const FUNCTION: &str = "function";

/// OpenAI's word for why a choice ended.
fn finish_reason(reason: EndReason) -> &'static str {
    match reason {
        EndReason::Stop => "stop",
        EndReason::Length => "length",
        EndReason::ToolCalls => "tool_calls",
    }
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
    /// Of the choices that ended.
    usage: Usage,
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

    fn delta(&self, index: usize, delta: ChatDelta) -> ChatChunkChoice {
        ChatChunkChoice {
            index,
            delta,
            logprobs: None,
            finish_reason: None,
        }
    }
}

impl Wording for ChatChunks {
    type Item = Update;

    fn word(&mut self, update: Update) -> Vec<Written> {
        let index = update.choice;
        let mut choices = Vec::new();
        if !std::mem::replace(&mut self.begun[index], true) {
            let delta = ChatDelta {
                role: Some("assistant"),
                content: Some(String::new()),
                ..ChatDelta::default()
            };
            choices.push(self.delta(index, delta));
        }
        let first = choices.len();
        choices.extend(
            update
                .deltas
                .into_iter()
                .map(|delta| self.delta(index, delta.into())),
        );
        if let Some(End { reason, usage, .. }) = update.end {
            self.usage = self.usage.plus(&usage);
            let mut choice = self.delta(index, ChatDelta::default());
            choice.finish_reason = Some(finish_reason(reason));
            choices.push(choice);
        }
        if let Some(choice) = choices.get_mut(first).filter(|_| self.logprobs) {
            choice.logprobs = Some(logprobs(&update.logprobs, &self.tokenizer));
        }
        let chunk = |choice| data(&self.chunk(vec![choice], None));
        choices.into_iter().map(chunk).collect()
    }

    fn end(&mut self) -> Vec<Written> {
        let usage = self
            .include_usage
            .then(|| data(&self.chunk(Vec::new(), Some(self.usage))));
        usage.into_iter().chain([done()]).collect()
    }
}
