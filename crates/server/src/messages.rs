//! Converts the messages of a chat request to those of chat templates.

use std::collections::HashMap;

use serde_json::{Map, Value, json};

use crate::context::Context;
use crate::conversation::{Effort, Prompt};
use crate::error::ApiError;
use crate::tools;
use crate::transcript::arguments;
use crate::wire::chat::{ChatPrompt, ChatToolChoice, Message, Role, SentToolCall};

impl ChatPrompt {
    /// Checks the prompt and converts it. `choice` and `parallel` say which tools an answer may call, and how many at once.
    pub(crate) fn into_prompt(
        self,
        choice: Option<ChatToolChoice>,
        parallel: bool,
        context: &Context,
    ) -> Result<Prompt, ApiError> {
        let tools = tools::read(self.tools, choice, parallel)?;
        if self.chat_template.is_some() && !context.options().trust_request_chat_template {
            return Err(ApiError::unsupported(
                "chat_template",
                "it runs without --trust-request-chat-template",
            ));
        }
        let mut called = HashMap::new();
        let messages = self
            .messages
            .into_iter()
            .enumerate()
            .map(|(index, message)| Reader { index }.read(message, &mut called))
            .collect::<Result<Vec<_>, _>>()?;
        if self.continue_final_message && self.add_generation_prompt == Some(true) {
            let message = "continue_final_message and add_generation_prompt are mutually exclusive";
            return Err(ApiError::invalid("continue_final_message", message));
        }
        let documents = self.documents.unwrap_or_default();
        Ok(Prompt {
            tools,
            add_generation_prompt: self.add_generation_prompt.unwrap_or(!self.continue_final_message),
            continue_final_message: self.continue_final_message,
            template: self.chat_template,
            template_kwargs: template_kwargs(self.chat_template_kwargs, self.enable_thinking)?,
            image_overrides: self.mm_processor_kwargs.unwrap_or_default().into(),
            documents: documents.into_iter().map(Value::Object).collect(),
            effort: self.reasoning_effort.map(|level| Effort {
                level,
                field: "reasoning_effort",
                context: context.clone(),
            }),
            ..Prompt::new(messages, "messages")
        })
    }
}

/// The variables for the template, with the one that is a field of its own.
fn template_kwargs(
    mut kwargs: Map<String, Value>,
    enable_thinking: Option<bool>,
) -> Result<Map<String, Value>, ApiError> {
    const NAME: &str = "enable_thinking";
    let Some(on) = enable_thinking else {
        return Ok(kwargs);
    };
    match kwargs.insert(NAME.to_owned(), json!(on)) {
        Some(other) if other != json!(on) => {
            let message = "enable_thinking is another name of chat_template_kwargs.enable_thinking, and they differ: send \
                           one of them";
            Err(ApiError::invalid(NAME, message))
        }
        _ => Ok(kwargs),
    }
}

/// One message.
struct Reader {
    index: usize,
}

impl Reader {
    fn field(&self, name: &str) -> String {
        format!("messages[{}].{name}", self.index)
    }

    /// As templates expect it: `content` is text. `called` maps the ids of the calls so far to function names.
    fn read(&self, message: Message, called: &mut HashMap<String, String>) -> Result<Value, ApiError> {
        if message.function_call.is_some() {
            return Err(ApiError::unsupported(
                self.field("function_call"),
                "send tool_calls",
            ));
        }
        if message.audio.is_some() {
            return Err(ApiError::unsupported(self.field("audio"), None));
        }
        let role = match message.role {
            // Templates only know the older name.
            Role::System | Role::Developer => "system",
            Role::User => "user",
            Role::Assistant => "assistant",
            Role::Tool => "tool",
        };
        let is_answer = message.role == Role::Assistant;
        let reasoning = message.reasoning_content.or(message.reasoning);
        let is_result = message.role == Role::Tool;
        let own = [
            (message.tool_calls.is_some(), "tool_calls", is_answer, "assistant"),
            (reasoning.is_some(), "reasoning_content", is_answer, "assistant"),
            (message.tool_call_id.is_some(), "tool_call_id", is_result, "tool"),
        ];
        if let Some((_, name, _, owner)) = own.into_iter().find(|(set, _, may, _)| *set && !may) {
            let text = format!("{name} belongs to {owner} messages, not to a {role} message");
            return Err(ApiError::invalid(self.field(name), text));
        }
        let mut rendered = Map::new();
        rendered.insert("role".into(), json!(role));
        let content = match (message.content, is_answer) {
            (Some(content), _) => content.pieces(&self.field("content"))?,
            (None, true) => message.refusal.unwrap_or_default().into(),
            (None, false) => {
                let text = format!("a {role} message needs content");
                return Err(ApiError::invalid(self.field("content"), text));
            }
        };
        if let Some(image) = content.image().filter(|_| !matches!(role, "user" | "tool")) {
            let text = format!(
                "`{}`: images belong to user and tool messages, not to a {role} message",
                image.field
            );
            return Err(ApiError::invalid(image.field.clone(), text));
        }
        rendered.insert("content".into(), content.into_value());
        let mut name = message.name.as_ref();
        if is_result {
            let missing = "a tool message needs the id of the call it answers";
            let missing = || ApiError::invalid(self.field("tool_call_id"), missing);
            let id = message.tool_call_id.as_ref().ok_or_else(missing)?;
            rendered.insert("tool_call_id".into(), json!(id));
            // Many templates show the function's name.
            name = name.or_else(|| called.get(id));
        }
        if let Some(name) = name {
            rendered.insert("name".into(), json!(name));
        }
        if let Some(reasoning) = reasoning {
            rendered.insert("reasoning_content".into(), json!(reasoning));
        }
        let calls = message.tool_calls.iter().flatten().enumerate();
        let calls = calls
            .map(|(i, call)| self.call(i, call, called))
            .collect::<Result<Vec<_>, _>>()?;
        if !calls.is_empty() {
            rendered.insert("tool_calls".into(), json!(calls));
        }
        Ok(Value::Object(rendered))
    }

    /// A call with parsed arguments.
    fn call(
        &self,
        index: usize,
        call: &SentToolCall,
        called: &mut HashMap<String, String>,
    ) -> Result<Value, ApiError> {
        let field = |name: &str| self.field(&format!("tool_calls[{index}].{name}"));
        let function = match (call.r#type.as_deref(), &call.function) {
            (None | Some("function"), Some(function)) => function,
            (None | Some("function"), None) => {
                return Err(ApiError::invalid(field("function"), "a call needs a function"));
            }
            (Some(kind), _) => {
                return Err(ApiError::unsupported(
                    format!("{} = {kind}", field("type")),
                    "only functions are",
                ));
            }
        };
        let arguments = arguments(function.arguments.as_deref().unwrap_or_default());
        let function_called = json!({ "name": function.name, "arguments": arguments });
        Ok(match &call.id {
            Some(id) => {
                called.insert(id.clone(), function.name.clone());
                json!({ "id": id, "type": "function", "function": function_called })
            }
            None => json!({ "type": "function", "function": function_called }),
        })
    }
}
