//! From what a client sent to the tokens of a prompt.

use plimsoll_core::TokenId;
use plimsoll_text::ChatInput;
use serde_json::{Map, Value, json};

use crate::error::ApiError;
use crate::state::ModelInfo;
use crate::wire::chat::{ChatPrompt, Content, Message, Role};
use crate::wire::completion::Prompt;

/// Renders a conversation and tokenizes it. May take long: for the blocking pool.
pub(crate) fn chat(
    model: &ModelInfo,
    prompt: &ChatPrompt,
    add_special: bool,
) -> Result<Vec<TokenId>, ApiError> {
    let template = model
        .template
        .as_ref()
        .ok_or(plimsoll_text::TextError::NoChatTemplate)?;
    if prompt.messages.is_empty() {
        return Err(ApiError::invalid("messages", "messages must not be empty"));
    }
    let messages = prompt
        .messages
        .iter()
        .enumerate()
        .map(|(i, m)| message(i, m))
        .collect::<Result<Vec<_>, _>>()?;
    let input = ChatInput {
        messages: &messages,
        add_generation_prompt: prompt.add_generation_prompt.unwrap_or(true),
        kwargs: Some(&prompt.chat_template_kwargs),
        ..Default::default()
    };
    let text = template
        .render(&input)
        .map_err(|error| in_field("messages", error.into()))?;
    model
        .tokenizer
        .encode(&text, add_special)
        .map_err(|error| in_field("messages", error.into()))
}

/// Tokens of one prompt of a completion. May take long: for the blocking pool.
pub(crate) fn completion(model: &ModelInfo, prompt: &Prompt) -> Result<Vec<TokenId>, ApiError> {
    match prompt {
        Prompt::Tokens(tokens) => Ok(tokens.clone()),
        Prompt::Text(text) => model
            .tokenizer
            .encode(text, true)
            .map_err(|error| in_field("prompt", error.into())),
    }
}

fn in_field(field: &str, error: ApiError) -> ApiError {
    match error {
        ApiError::Invalid { message, param: None } => ApiError::invalid(field, message),
        error => error,
    }
}

/// A message as templates expect it: `content` is text.
fn message(index: usize, message: &Message) -> Result<Value, ApiError> {
    let field = |name: &str| format!("messages[{index}].{name}");
    let unsupported = [
        (
            "tool_calls",
            message.tool_calls.as_ref().is_some_and(|calls| !calls.is_empty()),
        ),
        ("function_call", message.function_call.is_some()),
        ("audio", message.audio.is_some()),
    ];
    if let Some((name, _)) = unsupported.into_iter().find(|(_, present)| *present) {
        return Err(ApiError::Unsupported {
            field: field(name),
            hint: None,
        });
    }
    let role = match message.role {
        // OpenAI's newer name; models know the older.
        Role::System | Role::Developer => "system",
        Role::User => "user",
        Role::Assistant => "assistant",
        Role::Tool => "tool",
    };
    let content = match &message.content {
        Some(content) => text(content, &field("content"))?,
        None if message.role == Role::Assistant => message.refusal.clone().unwrap_or_default(),
        None => {
            return Err(ApiError::invalid(
                field("content"),
                format!("a {role} message needs content"),
            ));
        }
    };
    let mut rendered = Map::new();
    rendered.insert("role".into(), json!(role));
    rendered.insert("content".into(), json!(content));
    for (name, value) in [("name", &message.name), ("tool_call_id", &message.tool_call_id)] {
        if let Some(value) = value {
            rendered.insert(name.into(), json!(value));
        }
    }
    Ok(Value::Object(rendered))
}

/// Text parts are joined by newlines, as vLLM does for templates that take text.
fn text(content: &Content, field: &str) -> Result<String, ApiError> {
    let parts = match content {
        Content::Text(text) => return Ok(text.clone()),
        Content::Parts(parts) => parts,
    };
    let mut texts = Vec::with_capacity(parts.len());
    for (i, part) in parts.iter().enumerate() {
        if part.r#type != "text" {
            let field = format!("{field}[{i}].type = {}", part.r#type);
            return Err(ApiError::Unsupported {
                field,
                hint: Some("this model takes only text"),
            });
        }
        let text = part.text.as_deref();
        texts.push(
            text.ok_or_else(|| ApiError::invalid(format!("{field}[{i}].text"), "a text part needs text"))?,
        );
    }
    Ok(texts.join("\n"))
}
