//! Conversations: what the chat, responses and messages endpoints share.
//!
//! An endpoint turns its request into a [`Conversation`], gets [`Answers`] from [`open`], and formats either the streamed
//! [`Update`]s or the whole [`Answer`]s.

mod answer;
mod fit;
mod grammar;
mod plain;
mod prompt;
mod reader;
mod tools;
mod update;

use std::sync::Arc;

use plimsoll_text::{AnswerFormat, Position, ToolFormat};

use crate::blocking::blocking;
use crate::context::Context;
use crate::error::ApiError;
use crate::generate::submit;
use crate::images::Depth;
use crate::job::{AnswerLength, Choices, Job, Parameters};
use crate::model::AnswerStyle;
use crate::state::AppState;
use crate::structured::{self, Requested};
use crate::wire::common::{Common, MaxTokens};

pub(crate) use answer::{Answer, Answers, ToolCall};
pub(crate) use fit::Fit;
use prompt::Rendered;
pub(crate) use prompt::{Effort, Prompt, set_effort, switch_reasoning};
use reader::Style;
pub(crate) use tools::{Tool, ToolChoice, Tools, check_offered};
pub(crate) use update::{Delta, End, EndReason, Update};

/// A conversation to answer, independent of the endpoint.
#[derive(Debug)]
pub(crate) struct Conversation {
    pub(crate) prompt: Prompt,
    /// Sampling, seed, `n`, stop strings; its `max_tokens` is ignored.
    pub(crate) common: Common,
    /// Maximum tokens of each answer including reasoning; the model's default if absent.
    pub(crate) max_tokens: Option<MaxTokens>,
    /// The API field that says so, for errors.
    pub(crate) length_field: &'static str,
    /// What to do if the conversation and `max_tokens` do not fit.
    pub(crate) fit: Fit,
    /// How many of the likeliest tokens to report for each token, if logprobs are requested.
    pub(crate) logprobs: Option<u32>,
    /// The grammar of the answer, if one is requested.
    pub(crate) structure: Option<Requested>,
    /// Report reasoning.
    pub(crate) include_reasoning: bool,
    /// Maximum tokens of reasoning, if the model reasons.
    pub(crate) reasoning_budget: Option<usize>,
}

/// Checks, renders, tokenizes and submits; then the answers are on their way.
pub(crate) async fn open(
    state: &AppState,
    context: &Context,
    conversation: Conversation,
) -> Result<Answers, ApiError> {
    let Conversation {
        mut prompt,
        common,
        max_tokens,
        length_field,
        fit,
        logprobs,
        structure,
        include_reasoning,
        reasoning_budget,
    } = conversation;
    let choices = Choices {
        n: common.n()?,
        logprobs,
        prompt_logprobs: common.prompt_logprobs()?,
        prompt_field: prompt.field,
    };
    let mut parameters = Parameters::new(state, context, &common, choices)?;
    parameters.check_count(state, 1)?;
    let model = Arc::clone(state.model());
    let tools = tool_format(&model.answers, &prompt.tools)?;
    let mut format = AnswerFormat {
        reasoning: model.answers.reasoning,
        position: Position::default(),
        tools,
        functions: prompt.tools.functions().into(),
        max_calls: prompt.tools.max_calls(),
    };
    let memory = prompt.load_images(state, Depth::Pixels).await?;
    if prompt.has_images() && parameters.truncates_prompts() {
        let message = "truncate_prompt_tokens cannot be used with images, which would be cut";
        return Err(ApiError::invalid("truncate_prompt_tokens", message));
    }
    let is_bounded = !parameters.truncates_prompts();
    let reserved = max_tokens.and_then(MaxTokens::limit).unwrap_or(1);
    let (rendered, prompt) = render(state, prompt, fit, reserved, is_bounded).await?;
    parameters.show(rendered.images, memory);
    format.position = format.reasoning.map_or_else(Position::default, |reasoning| {
        reasoning.position_after(&rendered.text)
    });
    if let (Some(tokens), Some(reasoning)) = (reasoning_budget, format.reasoning)
        && let Some(budget) = reasoning.budget(format.position, tokens, &model.tokenizer)
    {
        parameters.limit_reasoning(budget);
    }
    let wanted = grammar::of_answer(
        &model.tokenizer,
        &prompt.tools,
        tools,
        format.reasoning,
        format.position,
        structure,
    )?;
    let grammar = structured::compile(state, wanted).await?;
    let length = AnswerLength {
        asked: max_tokens,
        field: length_field,
        default: model.defaults.max_new_tokens,
        shrinks: fit == Fit::CutAnswer,
        reserved,
    };
    let marks = Arc::clone(state.answer_marks());
    let job = Job::new(
        state,
        context,
        parameters,
        vec![rendered.tokens],
        length,
        grammar,
        marks,
    )?;
    let tokens = job.prompts().next().unwrap_or_default().to_vec();
    let style = Style {
        format,
        include_reasoning,
        must_call: prompt.tools.must_call(),
    };
    Ok(Answers::new(tokens, submit(state, context, job)?, &style))
}

/// Number of prompt tokens, with `max_tokens` reserved for the answer.
pub(crate) async fn count(
    state: &AppState,
    mut prompt: Prompt,
    fit: Fit,
    max_tokens: Option<MaxTokens>,
) -> Result<usize, ApiError> {
    prompt.load_images(state, Depth::Sizes).await?;
    let reserved = max_tokens.and_then(MaxTokens::limit).unwrap_or(1);
    let (rendered, _) = render(state, prompt, fit, reserved, false).await?;
    Ok(rendered.tokens.len())
}

/// Text and tokens of a prompt, and the prompt with the messages that were kept; `reserved` are the tokens of the answer. `is_bounded`: a prompt that is too long may
/// be refused before all of it is tokenized.
async fn render(
    state: &AppState,
    mut prompt: Prompt,
    fit: Fit,
    reserved: usize,
    is_bounded: bool,
) -> Result<(Rendered, Prompt), ApiError> {
    let model = Arc::clone(state.model());
    let most = state.engine().limits().max_request_tokens();
    blocking(move || {
        let rendered = match fit {
            Fit::DropOldest => {
                let wanted = most.saturating_sub(reserved);
                prompt.rendered_within(&model, wanted, most)
            }
            Fit::Refuse | Fit::CutAnswer => prompt.rendered(&model, is_bounded.then_some(most)),
        };
        Ok((rendered?, prompt))
    })
    .await
}

/// The format of tool calls, if calls are allowed.
fn tool_format(style: &AnswerStyle, tools: &Tools) -> Result<Option<ToolFormat>, ApiError> {
    if !tools.may_call() {
        return Ok(None);
    }
    let refused = |hint| Err(ApiError::unsupported("tool_choice = auto", hint));
    match style.tools {
        _ if tools.must_call() => Ok(Some(style.tools.unwrap_or(ToolFormat::Json))),
        _ if !style.auto_tool_choice => {
            refused("the server runs with --no-enable-auto-tool-choice; required and named are")
        }
        Some(format) => Ok(Some(format)),
        None => refused(
            "the format of this model's tool calls is unknown; start the server with --tool-call-parser. required and named are",
        ),
    }
}
