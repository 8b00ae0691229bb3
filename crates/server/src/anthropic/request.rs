//! Converts a request to a conversation.

use plimsoll_text::grammar::GrammarSpec;
use serde_json::{Value, json};

use super::writer::Shown;
use crate::conversation::{
    Conversation, Fit, Prompt, Tool, ToolChoice, Tools, check_offered, set_effort, switch_reasoning,
};
use crate::error::ApiError;
use crate::sealed;
use crate::state::AppState;
use crate::structured::Requested;
use crate::transcript::Transcript;
use crate::wire::anthropic::{
    Blocks, Content, ContextManagement, Display, ImageBlock, ImageSource, InputBlock, InputMessage,
    MessagesPrompt, MessagesRequest, OutputFormat, Role, Thinking, ToolChoice as Wanted, ToolDefinition,
};
use crate::wire::common::{MaxTokens, OneOrMany};
use crate::wire::content::{ImagePart, Piece, Pieces};
use crate::wire::request::typed;

/// The request field that holds the conversation.
const MESSAGES: &str = "messages";

/// Prefix of a block or line that Claude Code sends for Anthropic's billing. It differs in every request, so it would defeat
/// the prefix cache; it is removed.
const BILLING: &str = "x-anthropic-billing-header:";

/// A parsed request.
pub(super) struct Asked {
    pub(super) conversation: Conversation,
    pub(super) shown: Shown,
    pub(super) max_tokens: usize,
}

pub(super) fn parse(state: &AppState, request: MessagesRequest) -> Result<Asked, ApiError> {
    let MessagesRequest {
        mut common,
        prompt,
        own,
    } = request;
    let config = prompt.output_config.as_ref();
    let format = config.and_then(|config| config.format.as_ref());
    let structure = format.or(prompt.output_format.as_ref()).map(structure);
    let Prompting {
        prompt,
        shown,
        include_reasoning,
        reasoning_budget,
    } = self::prompt(state, prompt)?;
    common.stop = Some(OneOrMany::Many(own.stop_sequences));
    let conversation = Conversation {
        prompt,
        max_tokens: Some(MaxTokens::AtMost(own.max_tokens)),
        length_field: "max_tokens",
        // As in Anthropic's newer models: agents request more than fits.
        fit: Fit::CutAnswer,
        structure,
        include_reasoning,
        reasoning_budget,
        logprobs: None,
        common,
    };
    Ok(Asked {
        conversation,
        shown,
        max_tokens: own.max_tokens,
    })
}

/// The grammar of the text.
fn structure(format: &OutputFormat) -> Requested {
    let OutputFormat::JsonSchema { schema } = format;
    let spec = GrammarSpec::JsonSchema {
        schema: schema.clone(),
        strict: true,
    };
    Requested::new(spec.into(), "output_config.format.schema")
}

/// The prompt, and what is shown of the reasoning.
pub(super) struct Prompting {
    pub(super) prompt: Prompt,
    shown: Shown,
    include_reasoning: bool,
    reasoning_budget: Option<usize>,
}

pub(super) fn prompt(state: &AppState, asked: MessagesPrompt) -> Result<Prompting, ApiError> {
    let template = state.model().template.as_ref();
    check_context_management(asked.context_management.as_ref())?;
    let mut kwargs = asked.chat_template_kwargs;
    let mut shown = Shown::All;
    let mut include_reasoning = true;
    let reasoning_budget = match &asked.thinking {
        Some(Thinking::Enabled { budget_tokens, .. }) => *budget_tokens,
        _ => None,
    };
    let mut switch = |on| template.is_some_and(|template| switch_reasoning(template, on, &mut kwargs));
    match asked.thinking {
        None => {}
        // Without a switch the model reasons anyway; that is hidden.
        Some(Thinking::Disabled {}) => include_reasoning = switch(false),
        Some(Thinking::Enabled { display, .. } | Thinking::Adaptive { display }) => {
            // Without a switch the model reasons as by default.
            switch(true);
            if display == Some(Display::Omitted) {
                shown = Shown::Sealed;
            }
        }
    }
    let effort = asked.output_config.as_ref().and_then(|config| config.effort);
    if let (Some(effort), Some(template)) = (effort, template) {
        // A hint: many templates ignore it, or have fewer levels.
        let effort = json!(effort);
        let most = template
            .efforts()
            .filter(|levels| !levels.iter().any(|level| effort == *level));
        let most = most.and_then(|levels| levels.last());
        set_effort(template, most.map_or(effort, |most| json!(most)), &mut kwargs);
    }

    let transcript = transcript(Prompted {
        system: asked.system,
        messages: asked.messages,
    })?;
    let continued = transcript.ends_with_answer();
    let prompt = Prompt {
        tools: tools(&asked.tools, asked.tool_choice)?,
        template_kwargs: kwargs,
        add_generation_prompt: !continued,
        continue_final_message: continued,
        ..Prompt::new(transcript.into_messages(), MESSAGES)
    };
    Ok(Prompting {
        prompt,
        shown,
        include_reasoning,
        reasoning_budget,
    })
}

/// The text that the model reads.
#[derive(Debug)]
pub(super) struct Prompted {
    pub(super) system: Option<Content>,
    pub(super) messages: Vec<InputMessage>,
}

pub(super) fn transcript(prompted: Prompted) -> Result<Transcript, ApiError> {
    let mut transcript = Transcript::default();
    if let Some(system) = prompted.system {
        let texts = texts(system, "system")?;
        let kept: Vec<_> = texts.iter().filter_map(|text| without_billing(text)).collect();
        if !kept.is_empty() {
            transcript.system(&kept.join("\n"));
        }
    }
    for (i, message) in prompted.messages.into_iter().enumerate() {
        match message.content {
            Content::Text(text) => say(&mut transcript, message.role, text),
            Content::Blocks(Blocks(blocks)) => {
                for (j, block) in blocks.into_iter().enumerate() {
                    let field = format!("{MESSAGES}[{i}].content[{j}]");
                    read(&mut transcript, message.role, block, &field)?;
                }
            }
        }
    }
    Ok(transcript)
}

fn say(transcript: &mut Transcript, role: Role, text: String) {
    match role {
        Role::User => transcript.user_goes_on(text),
        Role::Assistant => transcript.answer_goes_on(text),
        Role::System => transcript.system(&text),
    }
}

/// A system text without the billing line, if anything remains.
fn without_billing(text: &str) -> Option<&str> {
    let rest = match text.strip_prefix(BILLING) {
        Some(rest) => rest.split_once('\n').map_or("", |(_, rest)| rest),
        None => text,
    };
    (!rest.is_empty()).then_some(rest)
}

fn read(transcript: &mut Transcript, role: Role, block: Value, field: &str) -> Result<(), ApiError> {
    match (parsed(block, field)?, role) {
        (InputBlock::Text(block), role) => say(transcript, role, block.text),
        (InputBlock::ToolResult(result), Role::User) => {
            let mut content = match result.content {
                Some(content) => pieces(content, &format!("{field}.content"))?,
                None => Pieces::from(String::new()),
            };
            if result.is_error == Some(true) {
                content.put_before("Error: ");
            }
            if !transcript.result(&result.tool_use_id, content) {
                let message = format!(
                    "`{field}.tool_use_id`: no tool_use block before it has the id `{}`",
                    result.tool_use_id
                );
                return Err(ApiError::invalid(format!("{field}.tool_use_id"), message));
            }
        }
        (InputBlock::Image(block), Role::User) => transcript.user_shows(image(block, field)),
        (InputBlock::ToolUse(call), Role::Assistant) => transcript.call(call.id, call.name, call.input),
        (InputBlock::Thinking(block), Role::Assistant) => {
            let sealed = block.signature.as_deref().and_then(sealed::open);
            let text = match block.thinking.is_empty() {
                true => sealed.unwrap_or_default(),
                false => block.thinking,
            };
            if !text.is_empty() {
                transcript.reasoning(&text);
            }
        }
        (InputBlock::RedactedThinking { .. }, Role::Assistant) => {}
        (_, role) => {
            let message =
                format!("`{field}`: a message of the role `{role}` cannot contain this type of block");
            return Err(ApiError::invalid(field, message));
        }
    }
    Ok(())
}

/// The texts of content that may only be text; `field` is its path.
fn texts(content: Content, field: &str) -> Result<Vec<String>, ApiError> {
    let blocks = match content {
        Content::Text(text) => return Ok(vec![text]),
        Content::Blocks(Blocks(blocks)) => blocks,
    };
    let text = |(i, block)| {
        let field = format!("{field}[{i}]");
        match parsed(block, &field)? {
            InputBlock::Text(block) => Ok(block.text),
            _ => Err(ApiError::invalid(
                &field,
                format!("`{field}` must be a text block"),
            )),
        }
    };
    blocks.into_iter().enumerate().map(text).collect()
}

/// Content that may be text and images; `field` is its path.
fn pieces(content: Content, field: &str) -> Result<Pieces, ApiError> {
    let blocks = match content {
        Content::Text(text) => return Ok(text.into()),
        Content::Blocks(Blocks(blocks)) => blocks,
    };
    let mut pieces = Pieces::default();
    for (i, block) in blocks.into_iter().enumerate() {
        let field = format!("{field}[{i}]");
        match parsed(block, &field)? {
            InputBlock::Text(block) => pieces.push_text(block.text),
            InputBlock::Image(block) => pieces.0.push(Piece::Image(image(block, &field))),
            _ => {
                let message = format!("`{field}` must be a text block or an image");
                return Err(ApiError::invalid(&field, message));
            }
        }
    }
    Ok(pieces)
}

fn image(block: ImageBlock, field: &str) -> ImagePart {
    let url = match block.source {
        ImageSource::Base64 { media_type, data } => format!("data:{media_type};base64,{data}"),
        ImageSource::Url { url } => url,
    };
    ImagePart {
        url,
        field: field.to_owned(),
        kind: "image",
    }
}

fn parsed(block: Value, field: &str) -> Result<InputBlock, ApiError> {
    let kind = block.get("type").and_then(Value::as_str).unwrap_or_default();
    Ok(match kind {
        "text" => InputBlock::Text(typed(block, field)?),
        "image" => InputBlock::Image(typed(block, field)?),
        "tool_use" => InputBlock::ToolUse(typed(block, field)?),
        "tool_result" => InputBlock::ToolResult(typed(block, field)?),
        "thinking" => InputBlock::Thinking(typed(block, field)?),
        "redacted_thinking" => InputBlock::RedactedThinking { _data: None },
        "" => {
            let field = format!("{field}.type");
            return Err(ApiError::invalid(&field, format!("`{field}` must be a string")));
        }
        other => {
            return Err(ApiError::unsupported(
                format!("{field}.type = {other}"),
                "blocks are `text`, `image` and `tool_result` of users, and `text`, `thinking` and `tool_use` of assistants",
            ));
        }
    })
}

fn tools(definitions: &[Value], choice: Option<Wanted>) -> Result<Tools, ApiError> {
    let list = definitions.iter().enumerate();
    let list = list.map(|(i, definition)| tool(definition, &format!("tools[{i}]")));
    let list = list.collect::<Result<Vec<_>, _>>()?;
    let (choice, single) = match choice {
        None => (ToolChoice::Auto, None),
        Some(Wanted::Auto {
            disable_parallel_tool_use: single,
        }) => (ToolChoice::Auto, single),
        Some(Wanted::Any {
            disable_parallel_tool_use: single,
        }) => (ToolChoice::Required, single),
        Some(Wanted::Tool {
            name,
            disable_parallel_tool_use: single,
        }) => (ToolChoice::Named(name), single),
        Some(Wanted::None {}) => (ToolChoice::None, None),
    };
    Tools::new(list, choice, single != Some(true))
}

fn tool(definition: &Value, field: &str) -> Result<Tool, ApiError> {
    match definition.get("type").and_then(Value::as_str) {
        None | Some("custom") => {}
        Some(other) => {
            return Err(ApiError::unsupported(
                format!("{field}.type = {other}"),
                "only client-side tools with an `input_schema` are",
            ));
        }
    }
    let tool: ToolDefinition = typed(definition.clone(), field)?;
    check_offered(field, tool.defer_loading, tool.allowed_callers.as_deref())?;
    let description = described(tool.description, tool.input_examples.unwrap_or_default());
    let strict = tool.strict.unwrap_or(false);
    Tool::new(tool.name, description, Some(tool.input_schema), strict)
        .map_err(|message| ApiError::invalid(field, format!("{field}: {message}")))
}

/// The description followed by the examples.
fn described(description: Option<String>, examples: Vec<Value>) -> Option<String> {
    if examples.is_empty() {
        return description;
    }
    let mut text = description.unwrap_or_default();
    text.push_str("\n\nExamples of input:");
    for example in examples {
        text.push('\n');
        text.push_str(&example.to_string());
    }
    Some(text.trim_start().to_owned())
}

fn check_context_management(management: Option<&ContextManagement>) -> Result<(), ApiError> {
    let edits = management.map(|management| &management.edits);
    for (i, edit) in edits.into_iter().flatten().enumerate() {
        // Chat templates decide which earlier reasoning they include.
        if !edit.r#type.starts_with("clear_thinking_") {
            return Err(ApiError::unsupported(
                format!("context_management.edits[{i}].type = {}", edit.r#type),
                "only edits that clear thinking are",
            ));
        }
    }
    Ok(())
}
