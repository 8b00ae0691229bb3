//! Builds the messages of chat templates from the items of responses and the blocks of messages.

use std::collections::HashMap;

use serde_json::{Map, Value, json};

use crate::wire::content::{ImagePart, Piece, Pieces};

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
    User(Pieces),
    Assistant(Answer),
    Tool {
        call: String,
        name: String,
        content: Pieces,
    },
}

#[derive(Debug, Default)]
struct Answer {
    reasoning: String,
    content: String,
    calls: Vec<Call>,
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
    pub(crate) fn user(&mut self, content: Pieces) {
        self.turns.push(Turn::User(content));
    }

    /// Appends to the last message if it is the user's.
    pub(crate) fn user_goes_on(&mut self, text: String) {
        match self.turns.last_mut() {
            Some(Turn::User(said)) => said.push_text(text),
            _ => self.user(text.into()),
        }
    }

    /// Adds an image to the last message if it is the user's, else to a new one.
    pub(crate) fn user_shows(&mut self, image: ImagePart) {
        if !matches!(self.turns.last(), Some(Turn::User(_))) {
            self.user(Pieces::default());
        }
        if let Some(Turn::User(said)) = self.turns.last_mut() {
            said.0.push(Piece::Image(image));
        }
    }

    /// Reasoning, before content or calls.
    pub(crate) fn reasoning(&mut self, text: &str) {
        self.begun().reasoning.push_str(text);
    }

    /// The last answer, if it has neither content nor calls, else a new one.
    fn begun(&mut self) -> &mut Answer {
        let is_begun = |answer: &Answer| answer.content.is_empty() && answer.calls.is_empty();
        if !matches!(self.turns.last(), Some(Turn::Assistant(answer)) if is_begun(answer)) {
            self.turns.push(Turn::Assistant(Answer::default()));
        }
        self.last_answer()
    }

    /// The last turn, a new one if that is not the assistant's.
    fn last_answer(&mut self) -> &mut Answer {
        if !matches!(self.turns.last(), Some(Turn::Assistant(_))) {
            self.turns.push(Turn::Assistant(Answer::default()));
        }
        match self.turns.last_mut() {
            Some(Turn::Assistant(answer)) => answer,
            _ => unreachable!("it was pushed"),
        }
    }

    /// Content of the assistant; a new turn if the last one has content or calls.
    pub(crate) fn answer(&mut self, text: String) {
        self.begun().content = text;
    }

    /// Appends to the last message if it is the assistant's.
    pub(crate) fn answer_goes_on(&mut self, text: String) {
        match self.turns.last_mut() {
            Some(Turn::Assistant(Answer { content, .. })) if !content.is_empty() => {
                content.push('\n');
                content.push_str(&text);
            }
            _ => self.last_answer().content = text,
        }
    }

    /// A tool call.
    pub(crate) fn call(&mut self, id: String, name: String, arguments: Map<String, Value>) {
        self.calls.insert(id.clone(), name.clone());
        self.last_answer().calls.push(Call { id, name, arguments });
    }

    /// The result of a call; false if there was no such call.
    pub(crate) fn result(&mut self, call: &str, content: Pieces) -> bool {
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
        matches!(self.turns.last(), Some(Turn::Assistant(answer)) if answer.calls.is_empty())
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
            Self::User(content) => json!({ "role": "user", "content": content.into_value() }),
            Self::Tool { call, name, content } => {
                json!({ "role": "tool", "tool_call_id": call, "name": name, "content": content.into_value() })
            }
            Self::Assistant(Answer {
                reasoning,
                content,
                calls,
            }) => {
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
