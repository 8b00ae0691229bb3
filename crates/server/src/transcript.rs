//! A conversation as responses and messages tell it, item by item, on its way to the messages that chat templates read.

use std::collections::HashMap;

use serde_json::{Map, Value, json};

/// Collects what was said. Items of one assistant's turn become one message.
#[derive(Debug, Default)]
pub(crate) struct Transcript {
    turns: Vec<Turn>,
    /// Names of the functions called, by call.
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

/// A call's arguments as the model wrote them. Anthropic's advice for what is no JSON object: an object that says so.
pub(crate) fn arguments(text: &str) -> Map<String, Value> {
    match text.trim() {
        "" => Map::new(),
        text => serde_json::from_str(text)
            .unwrap_or_else(|_| Map::from_iter([("INVALID_JSON".to_owned(), Value::from(text))])),
    }
}

impl Transcript {
    /// Instructions. Those that begin a conversation are one message: many templates know no second.
    pub(crate) fn system(&mut self, text: &str) {
        match self.turns.as_mut_slice() {
            [Turn::System(first)] => {
                first.push_str("\n\n");
                first.push_str(text);
            }
            _ => self.turns.push(Turn::System(text.to_owned())),
        }
    }

    /// The user speaks.
    pub(crate) fn user(&mut self, text: String) {
        self.turns.push(Turn::User(text));
    }

    /// The user goes on, if it is the user who spoke last.
    pub(crate) fn user_goes_on(&mut self, text: String) {
        match self.turns.last_mut() {
            Some(Turn::User(said)) => {
                said.push('\n');
                said.push_str(&text);
            }
            _ => self.user(text),
        }
    }

    /// The model thinks, before it says or calls anything.
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

    /// The model answers; what it says after something else is a turn of its own.
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

    /// The model goes on, if it is the model who spoke last.
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

    /// The model calls a function.
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

    /// What a call gave; false where there was no such call.
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

    /// Whether the model spoke last: the answer continues what it said.
    pub(crate) fn ends_with_answer(&self) -> bool {
        matches!(self.turns.last(), Some(Turn::Assistant { calls, .. }) if calls.is_empty())
    }

    /// The messages of a chat template.
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
