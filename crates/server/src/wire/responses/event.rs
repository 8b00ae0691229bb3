use serde::Serialize;
use utoipa::ToSchema;

use super::{Item, Part, ResponseObject, TokenLogprob};

/// An event of a streamed response.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = responses::Event)]
pub(crate) struct Event<'a> {
    /// The event's name, such as `response.output_text.delta`.
    pub(crate) r#type: &'static str,
    /// Number of the event in the stream, from 0.
    pub(crate) sequence_number: u64,
    #[serde(flatten)]
    pub(crate) payload: Payload<'a>,
}

/// The content of an event.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = responses::Payload)]
#[serde(untagged)]
pub(crate) enum Payload<'a> {
    /// `response.created`, `.in_progress`, `.completed`, `.incomplete`, `.failed`.
    Response { response: &'a ResponseObject },
    /// `response.output_item.added` and `.done`.
    Item { output_index: usize, item: &'a Item },
    /// `response.content_part.added` and `.done`.
    Part {
        item_id: &'a str,
        output_index: usize,
        content_index: usize,
        part: &'a Part,
    },
    /// `response.output_text.delta`.
    TextDelta {
        item_id: &'a str,
        output_index: usize,
        content_index: usize,
        delta: &'a str,
        logprobs: &'a [TokenLogprob],
    },
    /// `response.output_text.done`.
    TextDone {
        item_id: &'a str,
        output_index: usize,
        content_index: usize,
        text: &'a str,
        logprobs: &'a [TokenLogprob],
    },
    /// `response.reasoning_text.delta`.
    ReasoningDelta {
        item_id: &'a str,
        output_index: usize,
        content_index: usize,
        delta: &'a str,
    },
    /// `response.reasoning_text.done`.
    ReasoningDone {
        item_id: &'a str,
        output_index: usize,
        content_index: usize,
        text: &'a str,
    },
    /// `response.function_call_arguments.delta`.
    ArgumentsDelta {
        item_id: &'a str,
        output_index: usize,
        delta: &'a str,
    },
    /// `response.function_call_arguments.done`.
    ArgumentsDone {
        item_id: &'a str,
        output_index: usize,
        name: &'a str,
        arguments: &'a str,
    },
}
