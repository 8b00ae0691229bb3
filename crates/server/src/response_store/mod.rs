//! Stored responses, for `previous_response_id` and retrieval: in memory, bounded, visible only to their owner.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;
use plimsoll_core::TenantId;
use serde_json::{Map, Value};

use crate::options::StoreLimits;
use crate::wire::responses::{
    Item, Output, Part, ResponseObject, Role, TextFormat, TokenLogprob, ToolChoice,
};

/// One response with its new input items. It keeps the turns before it alive, so that a conversation can continue after its
/// beginning was evicted.
#[derive(Debug)]
pub(crate) struct Turn {
    previous: Option<Arc<Turn>>,
    input: Vec<Item>,
    response: ResponseObject,
    /// Bytes of text of the input and output.
    text: usize,
    /// Including all turns before.
    all_text: usize,
    /// Memory of `input` and `response` in bytes, and its counters: the owner's and the store's.
    bytes: usize,
    counts: [Arc<AtomicUsize>; 2],
}

impl Turn {
    /// The response.
    pub(crate) fn response(&self) -> &ResponseObject {
        &self.response
    }

    /// This turn and those before it, newest first.
    fn turns(&self) -> Vec<&Self> {
        let mut turns = vec![self];
        while let Some(previous) = turns.last().and_then(|turn| turn.previous.as_deref()) {
            turns.push(previous);
        }
        turns
    }

    fn items(&self) -> impl Iterator<Item = &Item> {
        self.input.iter().chain(&self.response.output)
    }

    /// All input items of this response, including earlier turns, oldest first.
    pub(crate) fn given(&self) -> Vec<&Item> {
        let turns = self.turns();
        let earlier = turns[1..].iter().rev();
        earlier.flat_map(|turn| turn.items()).chain(&self.input).collect()
    }

    /// The conversation up to the end of this response, oldest item first.
    pub(crate) fn conversation(&self) -> Vec<&Item> {
        let mut items = self.given();
        items.extend(&self.response.output);
        items
    }

    /// Bytes of text of the conversation, with an overhead per item.
    pub(crate) fn text_bytes(&self) -> usize {
        self.all_text
    }

    /// The end of [`Self::conversation`] with at most `most` bytes of text: its initial system messages, if they fit, and as
    /// many of the last turns as fit, starting with a user message so that no tool result loses its call.
    pub(crate) fn end_of_conversation(&self, most: usize) -> Vec<&Item> {
        let turns = self.turns();
        let mut left = most;
        let oldest = turns.last().map_or(&[][..], |turn| turn.input.as_slice());
        let instructs = |item: &&Item| matches!(item, Item::Message(message) if matches!(message.role, Role::System | Role::Developer));
        let mut items: Vec<&Item> = oldest.iter().take_while(instructs).collect();
        match left.checked_sub(text_of(items.iter().copied())) {
            Some(rest) => left = rest,
            None => items.clear(),
        }
        let fitting = turns.iter().take_while(|turn| {
            let rest = left.checked_sub(turn.text);
            left = rest.unwrap_or(left);
            rest.is_some()
        });
        let fitting = fitting.count();
        let said = |item: &&Item| matches!(item, Item::Message(message) if message.role == Role::User);
        let last = turns[..fitting].iter().rev().flat_map(|turn| turn.items());
        items.extend(last.skip_while(|item| !said(item)));
        items
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        for count in &self.counts {
            count.fetch_sub(self.bytes, Ordering::Relaxed);
        }
        // Iteratively: dropping a long conversation recursively could overflow the stack.
        let mut previous = self.previous.take();
        while let Some(mut turn) = previous.and_then(Arc::into_inner) {
            previous = turn.previous.take();
        }
    }
}

/// The store.
#[derive(Debug)]
pub(crate) struct ResponseStore {
    limits: StoreLimits,
    /// Bytes of all live turns.
    bytes: Arc<AtomicUsize>,
    owners: Mutex<HashMap<TenantId, Owned>>,
}

/// The responses of one owner.
#[derive(Debug, Default)]
struct Owned {
    /// Bytes of the owner's live turns.
    bytes: Arc<AtomicUsize>,
    /// By age.
    turns: BTreeMap<u64, Arc<Turn>>,
    /// Age of each response.
    ages: HashMap<String, u64>,
    /// Age of the response that has the item as input or output.
    items: HashMap<String, u64>,
    next: u64,
}

impl ResponseStore {
    pub(crate) fn new(limits: StoreLimits) -> Self {
        Self {
            limits,
            bytes: Arc::default(),
            owners: Mutex::default(),
        }
    }

    /// Whether anything can be stored.
    pub(crate) fn is_enabled(&self) -> bool {
        self.limits.responses > 0
    }

    /// Stores a response. If needed, evicts the oldest ones of the owner that holds the most.
    pub(crate) fn keep(
        &self,
        owner: TenantId,
        previous: Option<Arc<Turn>>,
        input: Vec<Item>,
        response: ResponseObject,
    ) {
        let bytes = size_of::<Turn>() + items_cost(&input) + json_bytes(&input) + response_cost(&response);
        if bytes > self.limits.bytes || !self.is_enabled() {
            tracing::debug!(bytes, id = %response.id, "a response is too large to be kept");
            return;
        }
        let text = text_of(input.iter().chain(&response.output));
        let mut owners = self.owners.lock();
        let owned = owners.entry(owner).or_default();
        let counts = [Arc::clone(&self.bytes), Arc::clone(&owned.bytes)];
        for count in &counts {
            count.fetch_add(bytes, Ordering::Relaxed);
        }
        owned.add(Arc::new(Turn {
            all_text: text.saturating_add(previous.as_ref().map_or(0, |turn| turn.all_text)),
            previous,
            input,
            response,
            text,
            bytes,
            counts,
        }));
        loop {
            let count: usize = owners.values().map(|owned| owned.turns.len()).sum();
            let too_large = self.bytes.load(Ordering::Relaxed) > self.limits.bytes;
            if count <= self.limits.responses && !too_large {
                break;
            }
            let holding = owners.values_mut().filter(|owned| !owned.turns.is_empty());
            let most = holding.max_by_key(|owned| match too_large {
                true => owned.bytes.load(Ordering::Relaxed),
                false => owned.turns.len(),
            });
            let Some(most) = most else { break };
            most.remove_oldest();
        }
    }

    /// The owner's response with this id.
    pub(crate) fn get(&self, owner: TenantId, id: &str) -> Option<Arc<Turn>> {
        let owners = self.owners.lock();
        let owned = owners.get(&owner)?;
        owned.turns.get(owned.ages.get(id)?).cloned()
    }

    /// Deletes a response; false if there was none. Responses that continue it keep its text.
    pub(crate) fn delete(&self, owner: TenantId, id: &str) -> bool {
        let mut owners = self.owners.lock();
        let Some(owned) = owners.get_mut(&owner) else {
            return false;
        };
        let age = owned.ages.get(id).copied();
        age.is_some_and(|age| owned.remove(age))
    }

    /// An item of one of the owner's responses.
    pub(crate) fn item(&self, owner: TenantId, id: &str) -> Option<Item> {
        let owners = self.owners.lock();
        let owned = owners.get(&owner)?;
        let turn = owned.turns.get(owned.items.get(id)?)?;
        turn.items().find(|item| item.id() == id).cloned()
    }

    /// The limits, for error messages.
    pub(crate) fn limits(&self) -> StoreLimits {
        self.limits
    }
}

impl Owned {
    fn add(&mut self, turn: Arc<Turn>) {
        let age = self.next;
        self.next += 1;
        // Clients choose the ids of input items: they must not replace existing ones.
        for item in turn.items() {
            self.items.entry(item.id().to_owned()).or_insert(age);
        }
        self.ages.insert(turn.response.id.clone(), age);
        self.turns.insert(age, turn);
    }

    fn remove(&mut self, age: u64) -> bool {
        let Some(turn) = self.turns.remove(&age) else {
            return false;
        };
        self.ages.remove(&turn.response.id);
        for item in turn.items() {
            if let Entry::Occupied(entry) = self.items.entry(item.id().to_owned())
                && *entry.get() == age
            {
                entry.remove();
            }
        }
        true
    }

    fn remove_oldest(&mut self) {
        if let Some(&oldest) = self.turns.keys().next() {
            self.remove(oldest);
        }
    }
}

/// Bytes of text of items in the prompt, with an overhead per item for the template's markup.
fn text_of<'a>(items: impl IntoIterator<Item = &'a Item>) -> usize {
    const AROUND: usize = 16;
    let texts = items.into_iter().map(|item| {
        let text: usize = match item {
            Item::Message(message) => message.content.iter().map(|part| part.text().len()).sum(),
            Item::FunctionCall(call) => call.name.len() + call.arguments.len(),
            Item::FunctionCallOutput(output) => output.output.text_len(),
            Item::Reasoning(reasoning) => reasoning.content.iter().map(|part| part.text.len()).sum(),
        };
        text + AROUND
    });
    texts.sum()
}

/// Approximate overhead of an allocation.
const ALLOCATION: usize = 16;
/// Overhead of the index per item, without its id.
const INDEX_ENTRY: usize = 64;

/// Approximate bytes of items without their text.
fn items_cost(items: &[Item]) -> usize {
    let costs = items.iter().map(|item| {
        let parts = match item {
            Item::Message(message) => message.content.iter().map(part_cost).sum(),
            Item::Reasoning(reasoning) => reasoning.content.len() * size_of::<String>(),
            Item::FunctionCallOutput(output) => match &output.output {
                Output::Text(_) => 0,
                Output::Parts(parts) => parts.iter().map(part_cost).sum(),
            },
            Item::FunctionCall(_) => 0,
        };
        size_of::<Item>() + INDEX_ENTRY + item.id().len() + parts
    });
    costs.sum()
}

/// Without its text.
fn part_cost(part: &Part) -> usize {
    const TOKEN: usize = size_of::<TokenLogprob>() + 2 * ALLOCATION;
    let logprobs: usize = match part {
        Part::OutputText { logprobs, .. } => logprobs.iter().map(|token| 1 + token.top_logprobs.len()).sum(),
        Part::InputText { .. } | Part::InputImage { .. } | Part::ReasoningText { .. } => 0,
    };
    size_of::<Part>() + ALLOCATION + TOKEN * logprobs
}

/// Approximate bytes of a response.
fn response_cost(response: &ResponseObject) -> usize {
    let schema = match &response.text.format {
        Some(TextFormat::JsonSchema { schema, .. }) => value_cost(schema),
        Some(TextFormat::Text {} | TextFormat::JsonObject {}) | None => 0,
    };
    let choice = match &response.tool_choice {
        ToolChoice::Object(choice) => map_cost(&choice.0),
        ToolChoice::Mode(_) => 0,
    };
    let tools: usize = response.tools.iter().map(value_cost).sum();
    let values = schema + choice + tools + map_cost(&response.metadata);
    // The remaining fields are text, measured by their JSON.
    values + items_cost(&response.output) + json_bytes(response)
}

/// Bytes of a JSON value in memory: small values take many times their JSON.
fn value_cost(value: &Value) -> usize {
    let inside = match value {
        Value::String(text) => ALLOCATION + text.capacity(),
        Value::Array(values) => {
            let unused = values.capacity() - values.len();
            ALLOCATION + unused * size_of::<Value>() + values.iter().map(value_cost).sum::<usize>()
        }
        Value::Object(map) => map_cost(map),
        Value::Null | Value::Bool(_) | Value::Number(_) => 0,
    };
    size_of::<Value>() + inside
}

fn map_cost(map: &Map<String, Value>) -> usize {
    // Hash, key, and a slot in a half-empty table.
    const ENTRY: usize = size_of::<u64>() + size_of::<String>() + ALLOCATION + 4 * size_of::<usize>();
    let entries = map
        .iter()
        .map(|(name, value)| ENTRY + name.len() + value_cost(value));
    2 * ALLOCATION + entries.sum::<usize>()
}

/// Bytes of a value as JSON.
fn json_bytes(value: &impl serde::Serialize) -> usize {
    struct Count(usize);

    impl io::Write for Count {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0 += bytes.len();
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    let mut count = Count(0);
    // Serializing these types cannot fail.
    serde_json::to_writer(&mut count, value).map_or(usize::MAX, |()| count.0)
}

#[cfg(test)]
pub(crate) mod tests;
