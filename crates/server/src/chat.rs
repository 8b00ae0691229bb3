//! `/v1/chat/completions`.

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use plimsoll_core::TokenId;
use plimsoll_text::Tokenizer;

use crate::body::Body;
use crate::context::Context;
use crate::conversation::{self, Answer, Conversation, Delta, End, EndReason, Fit, ToolCall, Update};
use crate::error::ApiError;
use crate::generate::TokenLogprobs;
use crate::openapi::Errors;
use crate::respond::{self, EventFormat, FINGERPRINT, Identity, SseEvent, data, done};
use crate::scores;
use crate::state::AppState;
use crate::wire::chat::{
    ChatAnswer, ChatChoice, ChatChunk, ChatChunkChoice, ChatCompletion, ChatDelta, ChatFields,
    ChatFunctionCall, ChatFunctionDelta, ChatLogprob, ChatLogprobs, ChatRequest, ChatTokenLogprob,
    ChatToolCall, ChatToolCallDelta,
};
use crate::wire::common::{MaybeUsage, Usage, UsageIn};

/// Chat
///
/// An answer to a conversation, whole or as server-sent events. The data of each event is one chunk, that of the last is
/// `[DONE]`.
#[utoipa::path(
    post, path = "/v1/chat/completions", tag = "Generation", operation_id = "createChatCompletion",
    request_body(content = ChatRequest, examples(
        ("A question" = (value = json!({
            "messages": [{ "role": "user", "content": "What is a load line?" }], "max_tokens": 200,
        }))),
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
    Extension(context): Extension<Context>,
    Body(request): Body<ChatRequest>,
) -> Result<Response, ApiError> {
    let ChatRequest {
        common,
        structured,
        prompt,
        own,
    } = request;
    state.check_model(common.model.as_deref())?;
    let (stream, usage_in) = (
        common.stream,
        common.usage_in(state.options().force_include_usage)?,
    );
    let prompt_logprobs = common.prompt_logprobs()?.map(|top| top as usize);
    let (token_ids, names_are_ids) = (
        common.reports.return_token_ids,
        common.reports.return_tokens_as_token_ids || state.options().return_tokens_as_token_ids,
    );
    let logprobs = own.logprobs_per_token()?;
    let reasoning_budget = own.reasoning_budget(state.model().answers.reasoning.is_some())?;
    let parallel = own.parallel_tool_calls.unwrap_or(true);
    let prompt = prompt.into_prompt(own.tool_choice, parallel, &context)?;
    let echo = prompt
        .messages
        .last()
        .filter(|last| own.echo && last["role"] == "assistant");
    let echo = echo
        .and_then(|last| last["content"].as_str())
        .unwrap_or_default()
        .to_owned();
    let conversation = Conversation {
        prompt,
        include_reasoning: own.include_reasoning.unwrap_or(true),
        reasoning_budget,
        max_tokens: own.max_completion_tokens.or(common.max_tokens),
        length_field: match own.max_completion_tokens {
            Some(_) => "max_completion_tokens",
            None => "max_tokens",
        },
        fit: Fit::Refuse,
        logprobs,
        structure: structured.grammar()?,
        common,
    };
    let answers = conversation::open(&state, &context, conversation).await?;
    let identity = Identity::new("chatcmpl", &state, &context);
    let names = TokenNames {
        tokenizer: state.model().tokenizer.clone(),
        are_ids: names_are_ids,
    };
    let prompt_token_ids = token_ids.then(|| answers.prompt().to_vec());
    if stream {
        let chunks = ChatChunks {
            identity,
            names,
            logprobs: logprobs.is_some(),
            token_ids,
            prompt_token_ids,
            usage_in,
            usage: Usage::default(),
            roles_to_send: answers.len(),
            echo,
        };
        return Ok(respond::stream(&state, &context, answers.updates(), chunks));
    }
    let answers = answers.whole().await?;
    let ends = answers.iter().map(|(_, end)| &end.usage);
    let usage = ends.fold(Usage::default(), |sum, usage| sum.plus(usage));
    let prompt_logprobs =
        prompt_logprobs.map(|top| scores::prompt_logprobs(&answers[0].0.prompt, top, &names.tokenizer));
    let choices = answers.into_iter().enumerate().map(|(index, (mut answer, end))| {
        let tokens = std::mem::take(&mut answer.tokens);
        answer.content.insert_str(0, &echo);
        ChatChoice {
            token_ids: token_ids.then_some(tokens),
            ..choice(index, answer, end, logprobs.is_some(), &names)
        }
    });
    let completion = ChatCompletion {
        id: &identity.id,
        object: "chat.completion",
        created: identity.created,
        model: &identity.model,
        choices: choices.collect(),
        usage,
        system_fingerprint: FINGERPRINT,
        prompt_logprobs,
        prompt_token_ids,
    };
    Ok(Json(completion).into_response())
}

impl ChatFields {
    /// The limit on tokens of reasoning. `reasons`: the model's reasoning is told from its answer.
    fn reasoning_budget(&self, reasons: bool) -> Result<Option<usize>, ApiError> {
        const FIELD: &str = "thinking_token_budget";
        let Some(budget) = self.thinking_token_budget.filter(|&budget| budget != -1) else {
            return Ok(None);
        };
        let budget = usize::try_from(budget).map_err(|_| {
            ApiError::invalid(FIELD, format!("{FIELD} must be at least 0, or -1, not {budget}"))
        })?;
        match reasons {
            true => Ok(Some(budget)),
            false => {
                let message = format!(
                    "{FIELD} needs a model that reasons; its chat template has no marks of reasoning (see --reasoning-parser)"
                );
                Err(ApiError::invalid(FIELD, message))
            }
        }
    }

    /// How many of the likeliest tokens to report, if logprobs are requested.
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

fn choice(index: usize, mut answer: Answer, end: End, logprobs: bool, names: &TokenNames) -> ChatChoice {
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
        logprobs: logprobs.then(|| self::logprobs(&answer.logprobs, names)),
        finish_reason: finish_reason(end.reason),
        stop_reason: end.stop,
        token_ids: None,
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
        let call = |index, begins: Option<(String, String)>, arguments| {
            let r#type = begins.as_ref().map(|_| FUNCTION);
            let (id, name) = begins.unzip();
            let function = ChatFunctionDelta { name, arguments };
            let call = ChatToolCallDelta {
                index,
                id,
                r#type,
                function,
            };
            Self {
                tool_calls: Some(vec![call]),
                ..Self::default()
            }
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
            Delta::ToolCall { index, id, name } => call(index, Some((id, name)), String::new()),
            Delta::ToolArguments { index, fragment } => call(index, None, fragment),
        }
    }
}

/// The only type of tool.
const FUNCTION: &str = "function";

/// OpenAI's name of the reason.
fn finish_reason(reason: EndReason) -> &'static str {
    match reason {
        EndReason::Stop => "stop",
        EndReason::Length => "length",
        EndReason::ToolCalls => "tool_calls",
    }
}

/// How tokens are named in log-probabilities.
struct TokenNames {
    tokenizer: Tokenizer,
    are_ids: bool,
}

fn logprobs(tokens: &[TokenLogprobs], names: &TokenNames) -> ChatLogprobs {
    let tokenizer = &names.tokenizer;
    let one = |token, logprob| ChatLogprob {
        token: match names.are_ids {
            true => scores::token_id(token),
            false => tokenizer.token_str(token),
        },
        logprob: scores::number(logprob),
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

struct ChatChunks {
    identity: Identity,
    names: TokenNames,
    logprobs: bool,
    token_ids: bool,
    /// Until sent.
    prompt_token_ids: Option<Vec<TokenId>>,
    usage_in: UsageIn,
    /// Of the choices that ended.
    usage: Usage,
    /// Choices whose role was not sent yet. The roles of all choices are sent before the first text, in order: OpenAI's client
    /// expects choice 0 in the first chunk.
    roles_to_send: usize,
    /// Text that each answer begins with.
    echo: String,
}

impl ChatChunks {
    fn chunk(&mut self, choices: Vec<ChatChunkChoice>, usage: MaybeUsage) -> ChatChunk {
        ChatChunk {
            id: self.identity.id.clone(),
            object: "chat.completion.chunk",
            created: self.identity.created,
            model: self.identity.model.clone(),
            choices,
            usage,
            system_fingerprint: FINGERPRINT,
            prompt_token_ids: self.prompt_token_ids.take(),
        }
    }

    fn delta(&self, index: usize, delta: ChatDelta) -> ChatChunkChoice {
        ChatChunkChoice {
            index,
            delta,
            logprobs: None,
            finish_reason: None,
            stop_reason: None,
            token_ids: None,
        }
    }
}

impl EventFormat for ChatChunks {
    type Item = Update;

    fn item(&mut self, update: Update) -> Vec<SseEvent> {
        let index = update.choice;
        let role = |index| {
            let delta = ChatDelta {
                role: Some("assistant"),
                content: Some(String::new()),
                ..ChatDelta::default()
            };
            self.delta(index, delta)
        };
        let mut choices: Vec<_> = (0..self.roles_to_send).map(role).collect();
        if !self.echo.is_empty() {
            let echo = || Delta::Content(self.echo.clone()).into();
            choices.extend((0..self.roles_to_send).map(|index| self.delta(index, echo())));
        }
        self.roles_to_send = 0;
        let first = choices.len();
        choices.extend(
            update
                .deltas
                .into_iter()
                .map(|delta| self.delta(index, delta.into())),
        );
        if let Some(End { reason, stop, usage }) = update.end {
            self.usage = self.usage.plus(&usage);
            let mut choice = self.delta(index, ChatDelta::default());
            choice.finish_reason = Some(finish_reason(reason));
            choice.stop_reason = Some(stop);
            choices.push(choice);
        }
        if let Some(choice) = choices.get_mut(first) {
            choice.logprobs = self.logprobs.then(|| logprobs(&update.logprobs, &self.names));
            choice.token_ids = self.token_ids.then_some(update.tokens);
        }
        let chunk = |(position, choice)| {
            let so_far = match position < first {
                true => update.so_far.of_prompt(),
                false => update.so_far,
            };
            let usage = self.usage_in.chunk(so_far);
            data(&self.chunk(vec![choice], usage))
        };
        choices.into_iter().enumerate().map(chunk).collect()
    }

    fn end(&mut self) -> Vec<SseEvent> {
        let usage = Some(Some(self.usage));
        let usage = self.usage_in.last.then(|| data(&self.chunk(Vec::new(), usage)));
        usage.into_iter().chain([done()]).collect()
    }
}
