//! Converts a request to a conversation and an empty response.

use std::sync::Arc;

use plimsoll_core::TenantId;
use plimsoll_text::grammar::GrammarSpec;
use serde_json::{Map, Value};

use super::input::{self, INPUT};
use super::tools::Functions;
use super::writer::Shown;
use crate::context::Context;
use crate::conversation::{Conversation, Effort, Fit, Prompt};
use crate::error::ApiError;
use crate::respond::fresh_id;
use crate::response_store::Turn;
use crate::state::AppState;
use crate::structured::Requested;
use crate::time::unix_seconds;
use crate::transcript::Transcript;
use crate::wire::common::{Common, MaxTokens};
use crate::wire::responses::{
    Item, ReasoningConfig, ResponseObject, ResponseStatus, ResponsesFields, ResponsesRequest, TextConfig,
    TextFormat, ToolChoice, ToolMode, Truncation,
};

/// A parsed request.
pub(super) struct Asked {
    pub(super) conversation: Conversation,
    /// Without output.
    pub(super) response: ResponseObject,
    pub(super) functions: Functions,
    pub(super) shown: Shown,
    /// New input items.
    pub(super) input: Vec<Item>,
    /// The response it continues.
    pub(super) previous: Option<Arc<Turn>>,
}

/// `include` value for log-probabilities.
const LOGPROBS: &str = "message.output_text.logprobs";
/// `include` value for reasoning that can be sent back.
const SEALED: &str = "reasoning.encrypted_content";
/// Other known `include` values: for built-in tools and images, which this server does not have; no effect.
const NOT_HERE: [&str; 6] = [
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
];

/// Maximum number of metadata pairs, characters of a key and of a value: OpenAI's limits.
const MAX_METADATA: (usize, usize, usize) = (16, 64, 512);

/// The response that the request continues.
pub(super) fn previous(
    state: &AppState,
    owner: TenantId,
    request: &ResponsesRequest,
) -> Result<Option<Arc<Turn>>, ApiError> {
    let Some(id) = &request.own.previous_response_id else {
        return Ok(None);
    };
    let turn = state.responses().get(owner, id);
    turn.map(Some).ok_or_else(|| {
        super::not_stored(
            state,
            format!("previous response `{id}`"),
            Some("previous_response_id"),
        )
    })
}

/// Items of the continued conversation for the prompt. A conversation that can never fit is not rendered: a small request must
/// not cause the work for megabytes of stored text.
fn earlier<'a>(
    state: &AppState,
    previous: Option<&'a Turn>,
    truncation: Truncation,
) -> Result<Vec<&'a Item>, ApiError> {
    let Some(previous) = previous else {
        return Ok(Vec::new());
    };
    let (bytes, most) = (previous.text_bytes(), state.longest_text());
    match truncation {
        _ if bytes <= most => Ok(previous.conversation()),
        Truncation::Auto => Ok(previous.end_of_conversation(most)),
        Truncation::Disabled => {
            let limit = state.engine().limits().max_request_tokens();
            Err(ApiError::ContextLength {
                message: format!(
                    "the conversation of previous_response_id has {bytes} bytes, more than the {limit} tokens of this \
                     server's maximum context length can hold: set truncation = auto, or start a new conversation"
                ),
                param: "previous_response_id",
                prompt: bytes.div_ceil(most.max(1)).saturating_mul(limit),
                limit,
            })
        }
    }
}

/// May take long: for the blocking pool.
pub(super) fn parse(
    state: &AppState,
    context: &Context,
    previous: Option<Arc<Turn>>,
    request: ResponsesRequest,
) -> Result<Asked, ApiError> {
    let ResponsesRequest { common, mut own } = request;
    state.check_model(common.model.as_deref())?;
    common.usage_in(false)?;
    if own.max_output_tokens == Some(0) {
        let message = "max_output_tokens must be at least 1";
        return Err(ApiError::invalid("max_output_tokens", message));
    }
    check_metadata(&own.metadata)?;
    let text = own.text.take().unwrap_or_default();
    check_text(&text)?;
    let shown = shown(&own)?;

    let kwargs = std::mem::take(&mut own.chat_template_kwargs);
    let reasoning = own.reasoning.take().unwrap_or_default();
    check_reasoning(&reasoning)?;
    let parallel = own.parallel_tool_calls.unwrap_or(true);
    let (functions, tools) = Functions::new(&own.tools, own.tool_choice.as_ref(), parallel)?;

    let (store, owner) = (state.responses(), context.tenant());
    let input = match own.input.take() {
        Some(input) => input::items(input, |id| store.item(owner, id))?,
        None if previous.is_some() => Vec::new(),
        None => return Err(ApiError::invalid(INPUT, "missing field `input`")),
    };
    let mut transcript = Transcript::default();
    if let Some(instructions) = &own.instructions {
        transcript.system(instructions);
    }
    let truncation = own.truncation.unwrap_or_default();
    let earlier = earlier(state, previous.as_deref(), truncation)?;
    input::read(&mut transcript, earlier.into_iter().chain(&input))?;

    let response = begin(state, &common, own, text, reasoning);
    let conversation = Conversation {
        prompt: Prompt {
            tools,
            template_kwargs: kwargs,
            effort: response.reasoning.effort.map(|level| Effort {
                level,
                field: "reasoning.effort",
                context: context.clone(),
            }),
            ..Prompt::new(transcript.into_messages(), INPUT)
        },
        max_tokens: response.max_output_tokens.map(MaxTokens::AtMost),
        length_field: "max_output_tokens",
        reasoning_budget: None,
        fit: match response.truncation {
            Truncation::Auto => Fit::DropOldest,
            Truncation::Disabled => Fit::Refuse,
        },
        structure: structure(&response.text),
        include_reasoning: true,
        logprobs: shown.logprobs.then_some(response.top_logprobs),
        common,
    };
    Ok(Asked {
        conversation,
        response,
        functions,
        shown,
        input,
        previous,
    })
}

/// The response, before it has any output.
fn begin(
    state: &AppState,
    common: &Common,
    own: ResponsesFields,
    text: TextConfig,
    reasoning: ReasoningConfig,
) -> ResponseObject {
    let defaults = &state.model().defaults;
    let text = TextConfig {
        format: Some(text.format.unwrap_or(TextFormat::Text {})),
        ..text
    };
    ResponseObject {
        id: fresh_id("resp"),
        object: "response",
        created_at: unix_seconds(),
        status: ResponseStatus::InProgress,
        background: false,
        completed_at: None,
        error: None,
        incomplete_details: None,
        instructions: own.instructions,
        max_output_tokens: own.max_output_tokens,
        max_tool_calls: own.max_tool_calls,
        model: state.model().id.clone(),
        output: Vec::new(),
        parallel_tool_calls: own.parallel_tool_calls.unwrap_or(true),
        previous_response_id: own.previous_response_id,
        prompt_cache_key: own.prompt_cache_key,
        reasoning,
        safety_identifier: own.safety_identifier,
        service_tier: "default",
        store: own.store.unwrap_or(true) && state.responses().is_enabled(),
        temperature: common.temperature.or(defaults.temperature).unwrap_or(1.0),
        text,
        tool_choice: own.tool_choice.unwrap_or(ToolChoice::Mode(ToolMode::Auto)),
        tools: own.tools,
        top_logprobs: own.top_logprobs.unwrap_or(0),
        top_p: common.top_p.or(defaults.top_p).unwrap_or(1.0),
        truncation: own.truncation.unwrap_or_default(),
        usage: None,
        user: own.user,
        metadata: own.metadata,
    }
}

fn shown(own: &ResponsesFields) -> Result<Shown, ApiError> {
    let mut shown = Shown::default();
    for (i, name) in own.include.iter().enumerate() {
        match name.as_str() {
            LOGPROBS => shown.logprobs = true,
            SEALED => shown.sealed_reasoning = true,
            name if NOT_HERE.contains(&name) => {}
            name => {
                let field = format!("include[{i}]");
                return Err(ApiError::invalid(
                    &field,
                    format!("`{field}`: unknown value `{name}`"),
                ));
            }
        }
    }
    if own.top_logprobs.is_some_and(|top| top > 0) && !shown.logprobs {
        let message = format!("top_logprobs needs include = [\"{LOGPROBS}\"]");
        return Err(ApiError::invalid("top_logprobs", message));
    }
    Ok(shown)
}

/// The grammar of the text.
fn structure(text: &TextConfig) -> Option<Requested> {
    let (field, spec) = match text.format.clone()? {
        TextFormat::Text {} => return None,
        TextFormat::JsonObject {} => ("text.format", GrammarSpec::JsonObject),
        TextFormat::JsonSchema { schema, strict, .. } => {
            let strict = strict.unwrap_or(true);
            ("text.format.schema", GrammarSpec::JsonSchema { schema, strict })
        }
    };
    Some(Requested::new(spec.into(), field))
}

fn check_metadata(metadata: &Map<String, Value>) -> Result<(), ApiError> {
    let (pairs, key, value) = MAX_METADATA;
    let legal = |(name, text): (&String, &Value)| {
        name.chars().count() <= key && text.as_str().is_some_and(|text| text.chars().count() <= value)
    };
    if metadata.len() <= pairs && metadata.iter().all(legal) {
        return Ok(());
    }
    let message = format!(
        "metadata may have up to {pairs} string values of up to {value} characters, with keys of up to {key} characters"
    );
    Err(ApiError::invalid("metadata", message))
}

fn check_text(text: &TextConfig) -> Result<(), ApiError> {
    only(
        "text.verbosity",
        text.verbosity.as_deref(),
        "medium",
        "only `medium` is",
    )
}

fn check_reasoning(reasoning: &ReasoningConfig) -> Result<(), ApiError> {
    const SUMMARY: &str = "only `auto` is; the response has the full reasoning";
    for (field, value, word, hint) in [
        ("reasoning.summary", &reasoning.summary, "auto", SUMMARY),
        (
            "reasoning.generate_summary",
            &reasoning.generate_summary,
            "auto",
            SUMMARY,
        ),
        ("reasoning.context", &reasoning.context, "auto", "only `auto` is"),
        (
            "reasoning.mode",
            &reasoning.mode,
            "standard",
            "only `standard` is",
        ),
    ] {
        only(field, value.as_deref(), word, hint)?;
    }
    Ok(())
}

/// Refuses all values but one.
fn only(field: &str, value: Option<&str>, word: &str, hint: &'static str) -> Result<(), ApiError> {
    match value {
        Some(value) if value != word => Err(ApiError::unsupported(format!("{field} = {value}"), hint)),
        _ => Ok(()),
    }
}
