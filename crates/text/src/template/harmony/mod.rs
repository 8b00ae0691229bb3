//! The prompts of OpenAI's Harmony format (gpt-oss), after <https://github.com/openai/harmony/blob/main/docs/format.md>. The
//! templates that come with these models cannot show several calls, text before a call, or functions without a description.

mod typescript;

use chrono::{DateTime, Utc};
use serde_json::{Value, json};

use super::{ChatInput, Clock};
use crate::TextError;
use crate::harmony::{
    ANALYSIS, ASSISTANT, CALL, CHANNEL, COMMENTARY, CONSTRAIN, END, FINAL, MESSAGE, NAMESPACE, START,
};

/// Levels of `reasoning_effort`.
pub(super) const EFFORTS: &[&str] = &["low", "medium", "high"];
const DEFAULT_EFFORT: &str = "medium";

/// Template variables that are read.
pub(super) const VARIABLES: [&str; 3] = ["tools", EFFORT, IDENTITY];
const EFFORT: &str = "reasoning_effort";
const IDENTITY: &str = "model_identity";
/// What the model was trained to be; the client's instructions can say otherwise.
const CHATGPT: &str = "You are ChatGPT, a large language model trained by OpenAI.";
/// A variable of the templates that come with the models: tools that this server does not have.
const BUILTIN: &str = "builtin_tools";

/// The prompt of a chat, as [`super::ChatTemplate::render_as_given`] renders it; `clock` gives the date.
///
/// # Errors
/// [`TextError::Refused`] if a message or a variable cannot be shown.
pub(super) fn render(input: &ChatInput<'_>, clock: Clock) -> Result<String, TextError> {
    let tools = input.tools.unwrap_or_default();
    let is_instruction = |message: &&Value| matches!(role(message), "system" | "developer");
    let first = input.messages.iter().take_while(is_instruction).count();
    let (instructions, messages) = input.messages.split_at(first);
    let mut out = Prompt::default();
    out.message("system", &system(input, !tools.is_empty(), clock)?);
    let instructions: Vec<_> = instructions
        .iter()
        .map(content)
        .filter(|text| !text.is_empty())
        .collect();
    if !instructions.is_empty() || !tools.is_empty() {
        out.message("developer", &developer(&instructions.join("\n\n"), tools));
    }
    // The last message of an answer that goes on is part of the same turn.
    let ends_with_answer = messages
        .last()
        .is_some_and(|last| is_final(last) && !input.add_generation_prompt);
    let past = &messages[..messages.len() - usize::from(ends_with_answer)];
    let thinks_from = past.iter().rposition(is_final).map_or(0, |at| at + 1);
    for (index, message) in messages.iter().enumerate() {
        match role(message) {
            "assistant" => out.answer(message, index >= thinks_from),
            "tool" => out.result(message, &messages[..index])?,
            "user" => out.message(&author("user", message), content(message)),
            "system" | "developer" => out.message("developer", &developer(content(message), &[])),
            other => return Err(refused(format!("there are no messages of the role {other:?}"))),
        }
    }
    if input.add_generation_prompt {
        out.text += START;
        out.text += ASSISTANT;
    }
    Ok(out.text)
}

fn refused(problem: String) -> TextError {
    TextError::Refused(problem)
}

fn role(message: &Value) -> &str {
    message["role"].as_str().unwrap_or_default()
}

fn content(message: &Value) -> &str {
    message["content"].as_str().unwrap_or_default()
}

fn author(role: &str, message: &Value) -> String {
    match message["name"].as_str() {
        Some(name) => format!("{role}:{name}"),
        None => role.to_owned(),
    }
}

fn calls(message: &Value) -> &[Value] {
    message["tool_calls"]
        .as_array()
        .map(Vec::as_slice)
        .unwrap_or_default()
}

/// The reasoning of an answer, by any of its names.
fn reasoning(message: &Value) -> &str {
    let names = ["reasoning_content", "reasoning", "thinking"];
    let mut texts = names.iter().filter_map(|name| message[*name].as_str());
    texts.find(|text| !text.is_empty()).unwrap_or_default()
}

/// The arguments of a call, as JSON text.
fn arguments(function: &Value) -> String {
    match &function["arguments"] {
        Value::String(text) => text.clone(),
        Value::Null => "{}".to_owned(),
        value => value.to_string(),
    }
}

/// Whether a message ends the turn of the assistant.
fn is_final(message: &Value) -> bool {
    role(message) == "assistant" && calls(message).is_empty() && !content(message).is_empty()
}

fn system(input: &ChatInput<'_>, has_tools: bool, clock: Clock) -> Result<String, TextError> {
    let variable = |name: &str| {
        input
            .kwargs
            .and_then(|kwargs| kwargs.get(name))
            .filter(|value| !value.is_null())
    };
    if variable(BUILTIN).is_some_and(|tools| *tools != json!([])) {
        return Err(refused(format!("{BUILTIN}: this server has no tools of its own")));
    }
    let effort = variable(EFFORT).map_or(Some(DEFAULT_EFFORT), Value::as_str);
    let Some(effort) = effort.filter(|effort| EFFORTS.contains(effort)) else {
        return Err(refused(format!("{EFFORT} must be one of {}", EFFORTS.join(", "))));
    };
    let Some(identity) = variable(IDENTITY).map_or(Some(CHATGPT), Value::as_str) else {
        return Err(refused(format!("{IDENTITY} must be a text")));
    };
    let today = DateTime::<Utc>::from(clock()).format("%Y-%m-%d");
    let place = match has_tools {
        true => "\nCalls to these tools must go to the commentary channel: 'functions'.",
        false => "",
    };
    Ok(format!(
        "{identity}\nKnowledge cutoff: 2024-06\nCurrent date: {today}\n\nReasoning: {effort}\n\n\
         # Valid channels: {ANALYSIS}, {COMMENTARY}, {FINAL}. Channel must be included for every message.{place}"
    ))
}

fn developer(instructions: &str, tools: &[Value]) -> String {
    let mut sections = Vec::new();
    if !instructions.is_empty() {
        sections.push(format!("# Instructions\n\n{instructions}"));
    }
    if !tools.is_empty() {
        let namespace = NAMESPACE.trim_end_matches('.');
        let types: String = tools.iter().map(function).collect();
        sections.push(format!(
            "# Tools\n\n## {namespace}\n\nnamespace {namespace} {{\n\n{types}}} // namespace {namespace}"
        ));
    }
    sections.join("\n\n")
}

/// One function as a type of TypeScript.
fn function(tool: &Value) -> String {
    let function = &tool["function"];
    let described = function["description"].as_str().unwrap_or_default().lines();
    let comment: String = described.map(|line| format!("// {line}\n")).collect();
    let name = function["name"].as_str().unwrap_or_default();
    let schema = &function["parameters"];
    let takes_some = schema["properties"]
        .as_object()
        .is_some_and(|properties| !properties.is_empty());
    let argument = match takes_some {
        true => format!("_: {}", typescript::of(schema)),
        false => String::new(),
    };
    format!("{comment}type {name} = ({argument}) => any;\n\n")
}

#[derive(Default)]
struct Prompt {
    text: String,
}

impl Prompt {
    fn message(&mut self, header: &str, text: &str) {
        self.ended(header, text, END);
    }

    fn ended(&mut self, header: &str, text: &str, end: &str) {
        for piece in [START, header, MESSAGE, text, end] {
            self.text += piece;
        }
    }

    /// An answer, with its reasoning if the model still `thinks` of it.
    fn answer(&mut self, message: &Value, thinks: bool) {
        let (reasoning, content, calls) = (reasoning(message), content(message), calls(message));
        let on = |channel: &str| format!("{ASSISTANT}{CHANNEL}{channel}");
        if thinks && !reasoning.is_empty() {
            self.message(&on(ANALYSIS), reasoning);
        }
        if !calls.is_empty() {
            if !content.is_empty() {
                self.message(&on(COMMENTARY), content);
            }
        } else if !content.is_empty() || reasoning.is_empty() {
            self.message(&on(FINAL), content);
        }
        for call in calls {
            let function = &call["function"];
            let name = function["name"].as_str().unwrap_or_default();
            let header = format!("{ASSISTANT} to={NAMESPACE}{name}{CHANNEL}{COMMENTARY} {CONSTRAIN}json");
            self.ended(&header, &arguments(function), CALL);
        }
    }

    /// The result of a call in a message of `before`.
    fn result(&mut self, message: &Value, before: &[Value]) -> Result<(), TextError> {
        let id = &message["tool_call_id"];
        let mut all = before.iter().rev().flat_map(calls);
        let called = || all.find(|call| !id.is_null() && call["id"] == *id)?["function"]["name"].as_str();
        let Some(name) = message["name"].as_str().or_else(called) else {
            return Err(refused(format!(
                "the result of the call {id} does not say which function was called"
            )));
        };
        let header = format!("{NAMESPACE}{name} to={ASSISTANT}{CHANNEL}{COMMENTARY}");
        self.message(&header, content(message));
        Ok(())
    }
}
