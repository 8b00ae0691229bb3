//! Builds the messages of chat templates from the items of responses and the blocks of messages.

use std::collections::HashMap;

use serde_json::{Map, Value, json};

/// Collects the turns. Items of one assistant turn become one message.
#[derive(Debug, Default)]
pub(crate) struct Transcript {
    turns: Vec<Turn>,
    /// Function names by call id.
    calls: HashMap<String, String>,
}

#[derive(Debug)]
enum Turn {
    System(String),
    User(String),
    Assistant {
        reasoning: String,
        content: String,
        calls: Vec<Call>,
    },
    Tool {
        call: String,
        name: String,
        content: String,
    },
}

#[derive(Debug)]
struct Call {
    id: String,
    name: String,
    arguments: Map<String, Value>,
}

/// A call's arguments. What is not a JSON object is wrapped in one, as Anthropic advises.
pub(crate) fn arguments(text: &str) -> Map<String, Value> {
    match text.trim() {
        "" => Map::new(),
        text => serde_json::from_str(text)
            .unwrap_or_else(|_| Map::from_iter([("INVALID_JSON".to_owned(), Value::from(text))])),
    }
}

impl Transcript {
    /// A system message. Those at the beginning are merged: many templates take only one.
    pub(crate) fn system(&mut self, text: &str) {
        match self.turns.as_mut_slice() {
            [Turn::System(first)] => {
                first.push_str("\n\n");
                first.push_str(text);
            }
            _ => self.turns.push(Turn::System(text.to_owned())),
        }
    }

    /// A user message.
    pub(crate) fn user(&mut self, text: String) {
        self.turns.push(Turn::User(text));
    }

    /// Appends to the last message if it is the user's.
    pub(crate) fn user_goes_on(&mut self, text: String) {
        match self.turns.last_mut() {
            Some(Turn::User(said)) => {
                said.push('\n');
                said.push_str(&text);
            }
            _ => self.user(text),
        }
    }

    /// Reasoning, before content or calls.
    pub(crate) fn reasoning(&mut self, text: &str) {
        match self.turns.last_mut() {
            Some(Turn::Assistant {
                reasoning,
                content,
                calls,
            }) if content.is_empty() && calls.is_empty() => reasoning.push_str(text),
            _ => self.turns.push(Turn::Assistant {
                reasoning: text.to_owned(),
                content: String::new(),
                calls: Vec::new(),
            }),
        }
    }

    /// Content of the assistant; a new turn if the last one has content or calls.
    pub(crate) fn answer(&mut self, text: String) {
        match self.turns.last_mut() {
            Some(Turn::Assistant { content, calls, .. }) if content.is_empty() && calls.is_empty() => {
                *content = text;
            }
            _ => self.turns.push(Turn::Assistant {
                reasoning: String::new(),
                content: text,
                calls: Vec::new(),
            }),
        }
    }

    /// Appends to the last message if it is the assistant's.
    pub(crate) fn answer_goes_on(&mut self, text: String) {
        match self.turns.last_mut() {
            Some(Turn::Assistant { content, .. }) if !content.is_empty() => {
                content.push('\n');
                content.push_str(&text);
            }
            Some(Turn::Assistant { content, .. }) => *content = text,
            _ => self.answer(text),
        }
    }

    /// A tool call.
    pub(crate) fn call(&mut self, id: String, name: String, arguments: Map<String, Value>) {
        self.calls.insert(id.clone(), name.clone());
        let call = Call { id, name, arguments };
        match self.turns.last_mut() {
            Some(Turn::Assistant { calls, .. }) => calls.push(call),
            _ => self.turns.push(Turn::Assistant {
                reasoning: String::new(),
                content: String::new(),
                calls: vec![call],
            }),
        }
    }

    /// The result of a call; false if there was no such call.
    pub(crate) fn result(&mut self, call: &str, content: String) -> bool {
        let Some(name) = self.calls.get(call).cloned() else {
            return false;
        };
        self.turns.push(Turn::Tool {
            call: call.to_owned(),
            name,
            content,
        });
        true
    }

    /// Whether the last message is the assistant's: the answer continues it.
    pub(crate) fn ends_with_answer(&self) -> bool {
        matches!(self.turns.last(), Some(Turn::Assistant { calls, .. }) if calls.is_empty())
    }

    /// The messages for the chat template.
    pub(crate) fn into_messages(self) -> Vec<Value> {
        self.turns.into_iter().map(Turn::into_message).collect()
    }
}

impl Turn {
    fn into_message(self) -> Value {
        match self {
            Self::System(text) => json!({ "role": "system", "content": text }),
            Self::User(text) => json!({ "role": "user", "content": text }),
            Self::Tool { call, name, content } => {
                json!({ "role": "tool", "tool_call_id": call, "name": name, "content": content })
            }
            Self::Assistant {
                reasoning,
                content,
                calls,
            } => {
                let mut message = Map::new();
                message.insert("role".into(), json!("assistant"));
                message.insert("content".into(), json!(content));
                if !reasoning.is_empty() {
                    message.insert("reasoning_content".into(), json!(reasoning));
                }
                if !calls.is_empty() {
                    let calls: Vec<Value> = calls.into_iter().map(Call::into_value).collect();
                    message.insert("tool_calls".into(), json!(calls));
                }
                Value::Object(message)
            }
        }
    }
}

impl Call {
    fn into_value(self) -> Value {
        json!({
            "id": self.id,
            "type": "function",
            "function": { "name": self.name, "arguments": self.arguments },
        })
    }
}
