//! Converts input items to stored items, and those to the conversation for the model.

use serde_json::Value;

use super::tools::flat_name;
use crate::error::ApiError;
use crate::respond::fresh_id;
use crate::sealed;
use crate::transcript::{Transcript, arguments};
use crate::wire::content::{ImagePart, Piece, Pieces};
use crate::wire::request::typed;
use crate::wire::responses::{
    FunctionCall, FunctionCallOutput, Input, InputFunctionCall, InputFunctionCallOutput, InputItem,
    InputItems, InputMessage, InputReasoning, Item, ItemReference, ItemStatus, MessageItem, Output, Part,
    Reasoning, ReasoningText, Role,
};

/// The request field.
pub(crate) const INPUT: &str = "input";

/// The items of an input; `find` looks up item references.
pub(crate) fn items(input: Input, find: impl Fn(&str) -> Option<Item>) -> Result<Vec<Item>, ApiError> {
    let values = match input {
        Input::Text(text) => {
            let part = Part::InputText { text };
            return Ok(vec![said(None, Role::User, vec![part])]);
        }
        Input::Items(InputItems(values)) => values,
    };
    let items = values.into_iter().enumerate();
    items
        .map(|(i, value)| item(value, &format!("{INPUT}[{i}]"), &find))
        .collect()
}

fn item(value: Value, field: &str, find: impl Fn(&str) -> Option<Item>) -> Result<Item, ApiError> {
    Ok(match parsed(value, field)? {
        InputItem::Message(message) => {
            let pieces = message.content.pieces(&format!("{field}.content"))?;
            if let Some(image) = pieces.image().filter(|_| message.role != Role::User) {
                let message = format!("`{}`: images belong to messages of the role `user`", image.field);
                return Err(ApiError::invalid(image.field.clone(), message));
            }
            let parts = pieces.0.into_iter().map(|piece| part(message.role, piece));
            said(message.id, message.role, parts.collect())
        }
        InputItem::FunctionCall(call) => Item::FunctionCall(FunctionCall {
            id: call.id.unwrap_or_else(|| fresh_id("fc")),
            call_id: call.call_id,
            name: call.name,
            namespace: call.namespace,
            arguments: call.arguments,
            status: ItemStatus::Completed,
        }),
        InputItem::FunctionCallOutput(output) => Item::FunctionCallOutput(FunctionCallOutput {
            id: output.id.unwrap_or_else(|| fresh_id("fco")),
            call_id: output.call_id,
            output: result(output.output.pieces(&format!("{field}.output"))?),
            status: ItemStatus::Completed,
        }),
        InputItem::Reasoning(reasoning) => {
            let sealed = reasoning.encrypted_content.as_deref().and_then(sealed::open);
            let sealed = sealed.map(|text| vec![ReasoningText { text }]);
            Item::Reasoning(Reasoning {
                id: reasoning.id.unwrap_or_else(|| fresh_id("rs")),
                summary: Vec::new(),
                content: reasoning.content.or(sealed).unwrap_or_default(),
                encrypted_content: reasoning.encrypted_content,
                status: ItemStatus::Completed,
            })
        }
        InputItem::ItemReference(ItemReference { id, .. }) => find(&id).ok_or_else(|| {
            let message =
                format!("{field}.id: no item `{id}` belongs to a stored response; send the item itself");
            ApiError::NotStored {
                message,
                param: Some(INPUT),
            }
        })?,
    })
}

fn parsed(value: Value, field: &str) -> Result<InputItem, ApiError> {
    let Value::Object(object) = &value else {
        return Err(ApiError::invalid(field, format!("`{field}` must be an object")));
    };
    let kind = match object.get("type").filter(|kind| !kind.is_null()) {
        Some(Value::String(kind)) => kind.as_str(),
        Some(_) => {
            let field = format!("{field}.type");
            return Err(ApiError::invalid(&field, format!("`{field}` must be a string")));
        }
        // Both may omit `type`.
        None if object.contains_key("role") => "message",
        None => "item_reference",
    };
    Ok(match kind {
        "message" => InputItem::Message(typed::<InputMessage>(value, field)?),
        "function_call" => InputItem::FunctionCall(typed::<InputFunctionCall>(value, field)?),
        "function_call_output" => {
            InputItem::FunctionCallOutput(typed::<InputFunctionCallOutput>(value, field)?)
        }
        "reasoning" => InputItem::Reasoning(typed::<InputReasoning>(value, field)?),
        "item_reference" => InputItem::ItemReference(typed(value, field)?),
        other => {
            return Err(ApiError::unsupported(
                format!("{field}.type = {other}"),
                "items are `message`, `function_call`, `function_call_output`, `reasoning` and `item_reference`",
            ));
        }
    })
}

fn said(id: Option<String>, role: Role, content: Vec<Part>) -> Item {
    Item::Message(MessageItem {
        id: id.unwrap_or_else(|| fresh_id("msg")),
        status: ItemStatus::Completed,
        role,
        content,
    })
}

/// What a tool returned.
fn result(pieces: Pieces) -> Output {
    match pieces.image() {
        Some(_) => Output::Parts(
            pieces
                .0
                .into_iter()
                .map(|piece| part(Role::User, piece))
                .collect(),
        ),
        None => {
            let texts = pieces.0.into_iter().filter_map(|piece| match piece {
                Piece::Text(text) => Some(text),
                Piece::Image(_) => None,
            });
            Output::Text(texts.collect::<Vec<_>>().join("\n"))
        }
    }
}

/// Parts as the chat template gets them.
fn pieces(parts: &[Part]) -> Pieces {
    let piece = |part: &Part| match part {
        Part::InputImage { image_url, field } => Piece::Image(ImagePart {
            url: image_url.clone(),
            field: field.clone(),
            kind: "input_image",
        }),
        part => Piece::Text(part.text().to_owned()),
    };
    Pieces(parts.iter().map(piece).collect())
}

fn part(role: Role, piece: Piece) -> Part {
    let text = match piece {
        Piece::Text(text) => text,
        Piece::Image(ImagePart { url, field, .. }) => {
            return Part::InputImage {
                image_url: url,
                field,
            };
        }
    };
    match role {
        Role::Assistant => Part::OutputText {
            text,
            annotations: Vec::new(),
            logprobs: Vec::new(),
        },
        _ => Part::InputText { text },
    }
}

/// Adds items to the transcript, oldest first.
pub(crate) fn read<'a>(
    transcript: &mut Transcript,
    items: impl IntoIterator<Item = &'a Item>,
) -> Result<(), ApiError> {
    for item in items {
        match item {
            Item::Message(message) => {
                let text = message.content.iter().map(Part::text).collect::<Vec<_>>();
                let text = text.join("\n");
                match message.role {
                    Role::System | Role::Developer => transcript.system(&text),
                    Role::User => transcript.user(pieces(&message.content)),
                    Role::Assistant => transcript.answer(text),
                }
            }
            Item::FunctionCall(call) => {
                let name = flat_name(call.namespace.as_deref(), &call.name);
                transcript.call(call.call_id.clone(), name, arguments(&call.arguments));
            }
            Item::FunctionCallOutput(output) => {
                let content = match &output.output {
                    Output::Text(text) => text.clone().into(),
                    Output::Parts(parts) => pieces(parts),
                };
                if !transcript.result(&output.call_id, content) {
                    let message = format!(
                        "a function_call_output has the call_id `{}`, but no function_call before it has",
                        output.call_id
                    );
                    return Err(ApiError::invalid(INPUT, message));
                }
            }
            // Another server's encrypted content cannot be read and is ignored.
            Item::Reasoning(reasoning) => {
                for part in &reasoning.content {
                    transcript.reasoning(&part.text);
                }
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn messages(input: Value) -> Result<Value, String> {
        let input: Input = serde_json::from_value(input).unwrap();
        let items = items(input, |_| None).map_err(|error| error.to_string())?;
        let mut transcript = Transcript::default();
        transcript.system("Be brief.");
        read(&mut transcript, &items).map_err(|error| error.to_string())?;
        Ok(json!(transcript.into_messages()))
    }

    #[test]
    fn one_turn_of_the_assistant_is_one_message() {
        let sealed = sealed::seal("Let me look.");
        let input = json!([
            { "role": "developer", "content": "Use metric units." },
            { "type": "message", "role": "user", "content": [
                { "type": "input_text", "text": "Weather" }, { "type": "input_text", "text": "in Paris?" },
            ]},
            { "type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": sealed },
            { "type": "message", "role": "assistant", "id": "msg_1", "status": "completed", "content": [
                { "type": "output_text", "text": "Looking.", "annotations": [], "logprobs": [] },
            ]},
            { "type": "function_call", "call_id": "call_1", "name": "weather", "arguments": "{\"city\":\"Paris\"}" },
            { "type": "function_call", "call_id": "call_2", "namespace": "crm", "name": "find", "arguments": "{" },
            { "type": "function_call_output", "call_id": "call_1", "output": "20 °C" },
            { "type": "function_call_output", "call_id": "call_2", "output": [{ "type": "input_text", "text": "-" }] },
        ]);
        let call = |id: &str, name: &str, arguments: Value| json!({ "id": id, "type": "function", "function": { "name": name, "arguments": arguments } });
        let expected = json!([
            { "role": "system", "content": "Be brief.\n\nUse metric units." },
            { "role": "user", "content": "Weather\nin Paris?" },
            { "role": "assistant", "content": "Looking.", "reasoning_content": "Let me look.", "tool_calls": [
                call("call_1", "weather", json!({ "city": "Paris" })), call("call_2", "crm__find", json!({ "INVALID_JSON": "{" })),
            ]},
            { "role": "tool", "tool_call_id": "call_1", "name": "weather", "content": "20 °C" },
            { "role": "tool", "tool_call_id": "call_2", "name": "crm__find", "content": "-" },
        ]);
        assert_eq!(messages(input).unwrap(), expected);
    }

    #[test]
    fn encrypted_reasoning_of_other_servers_is_ignored() {
        let input = json!([
            { "type": "reasoning", "summary": [], "encrypted_content": "gAAAAABo" },
            { "role": "user", "content": "Hi" },
        ]);
        let expected = json!({ "role": "user", "content": "Hi" });
        assert_eq!(messages(input).unwrap()[1], expected);
    }

    #[test]
    fn errors_name_the_item() {
        let image = json!([{ "type": "input_image", "image_url": "x", "detail": "close" }]);
        let video = json!([{ "type": "input_video", "video_url": "x" }]);
        let call = json!({ "type": "function_call_output", "call_id": "call_x", "output": "" });
        let cases = json!([
            [{ "type": "computer_call" }, "`input[0].type = computer_call` is not supported"],
            [{ "role": "user" }, "`input[0].content`: missing"],
            [{ "role": "tool", "content": "x" }, "`input[0].role`: unknown variant `tool`"],
            [{ "role": "user", "content": 1 }, "`input[0].content`: invalid type: integer `1`, expected a string or a list of parts"],
            [{ "role": "user", "content": "x", "colour": 1 }, "`input[0].colour`: unknown field"],
            [{ "role": "user", "content": image }, "`input[0].content[0].detail`: unknown variant `close`"],
            [{ "role": "user", "content": video }, "`input[0].content[0].type = input_video` is not supported"],
            [{ "role": "assistant", "content": [{ "type": "input_image", "image_url": "x" }] },
             "`input[0].content[0]`: images belong to messages of the role `user`"],
            [{ "role": "user", "content": [{ "type": "input_text" }] }, "`input[0].content[0].text` is missing"],
            [{ "type": "item_reference", "id": "msg_x" }, "input[0].id: no item `msg_x`"],
            [call, "a function_call_output has the call_id `call_x`"],
            [1, "`input[0]` must be an object"],
            [{ "type": 1 }, "`input[0].type` must be a string"],
        ]);
        for case in cases.as_array().unwrap() {
            let error = messages(json!([case[0]])).unwrap_err();
            assert!(error.starts_with(case[1].as_str().unwrap()), "{error}");
        }
    }
}
