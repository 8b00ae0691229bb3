//! Responses that are kept, for `previous_response_id` and retrieval: in memory, bounded, the oldest leave first.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use plimsoll_core::TenantId;

use crate::state::StoreLimits;
use crate::wire::responses::{Item, ResponseObject};

/// One response with what was new when it was asked for. The turns before it live as long as it does, so that a conversation
/// goes on although its beginning had to make room.
#[derive(Debug)]
pub(crate) struct Turn {
    /// Whose it is: that of the request's API key.
    owner: TenantId,
    previous: Option<Arc<Turn>>,
    input: Vec<Item>,
    response: ResponseObject,
    /// Bytes of `input` and `response`, and the count of the store they belong to.
    bytes: usize,
    count: Arc<AtomicUsize>,
}

impl Turn {
    /// The response.
    pub(crate) fn response(&self) -> &ResponseObject {
        &self.response
    }

    /// What the model was given for this response, oldest first.
    pub(crate) fn given(&self) -> Vec<&Item> {
        let mut turns = vec![self];
        while let Some(previous) = turns.last().and_then(|turn| turn.previous.as_deref()) {
            turns.push(previous);
        }
        let earlier = turns[1..].iter().rev();
        earlier
            .flat_map(|turn| turn.input.iter().chain(&turn.response.output))
            .chain(&self.input)
            .collect()
    }

    /// The conversation up to the end of this response, oldest item first.
    pub(crate) fn conversation(&self) -> Vec<&Item> {
        let mut items = self.given();
        items.extend(&self.response.output);
        items
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.count.fetch_sub(self.bytes, Ordering::Relaxed);
        // One after the other: a long conversation must not end in a deep recursion.
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
    /// Of all turns that live.
    bytes: Arc<AtomicUsize>,
    kept: Mutex<Kept>,
}

#[derive(Debug, Default)]
struct Kept {
    /// By age.
    turns: BTreeMap<u64, Arc<Turn>>,
    /// Age of each response.
    ages: HashMap<String, u64>,
    /// Age of the response to which each owner's item belongs, as input or output: clients choose ids of input, and others may
    /// choose the same.
    items: HashMap<(TenantId, String), u64>,
    next: u64,
}

impl ResponseStore {
    pub(crate) fn new(limits: StoreLimits) -> Self {
        Self {
            limits,
            bytes: Arc::default(),
            kept: Mutex::default(),
        }
    }

    /// Whether anything can be kept at all.
    pub(crate) fn is_enabled(&self) -> bool {
        self.limits.responses > 0
    }

    /// Keeps a response, at the cost of the oldest.
    pub(crate) fn keep(
        &self,
        owner: TenantId,
        previous: Option<Arc<Turn>>,
        input: Vec<Item>,
        response: ResponseObject,
    ) {
        let bytes = size(&input) + size(&response);
        if bytes > self.limits.bytes || !self.is_enabled() {
            tracing::debug!(bytes, id = %response.id, "a response is too large to be kept");
            return;
        }
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
        let turn = Arc::new(Turn {
            owner,
            previous,
            input,
            response,
            bytes,
            count: Arc::clone(&self.bytes),
        });
        let mut kept = self.lock();
        kept.add(turn);
        while kept.turns.len() > self.limits.responses
            || self.bytes.load(Ordering::Relaxed) > self.limits.bytes
        {
            let Some(oldest) = kept.turns.keys().next().copied() else {
                break;
            };
            kept.remove(oldest);
        }
    }

    /// The response of this id, if it is kept and the owner's.
    pub(crate) fn get(&self, owner: TenantId, id: &str) -> Option<Arc<Turn>> {
        let kept = self.lock();
        let turn = kept.turns.get(kept.ages.get(id)?)?;
        (turn.owner == owner).then(|| Arc::clone(turn))
    }

    /// Forgets a response; false where there was none. Responses that continue it still know what was said.
    pub(crate) fn delete(&self, owner: TenantId, id: &str) -> bool {
        let mut kept = self.lock();
        let age = kept.ages.get(id).copied();
        match age.filter(|age| kept.turns.get(age).is_some_and(|turn| turn.owner == owner)) {
            Some(age) => kept.remove(age),
            None => false,
        }
    }

    /// An item of a response that is kept and the owner's.
    pub(crate) fn item(&self, owner: TenantId, id: &str) -> Option<Item> {
        let kept = self.lock();
        let turn = kept.turns.get(kept.items.get(&(owner, id.to_owned()))?)?;
        let mut items = turn.input.iter().chain(&turn.response.output);
        items.find(|item| item.id() == id).cloned()
    }

    /// What a client may want to know when something is not there.
    pub(crate) fn limits(&self) -> StoreLimits {
        self.limits
    }

    fn lock(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Kept {
    fn add(&mut self, turn: Arc<Turn>) {
        let age = self.next;
        self.next += 1;
        for item in turn.input.iter().chain(&turn.response.output) {
            self.items.insert((turn.owner, item.id().to_owned()), age);
        }
        self.ages.insert(turn.response.id.clone(), age);
        self.turns.insert(age, turn);
    }

    fn remove(&mut self, age: u64) -> bool {
        let Some(turn) = self.turns.remove(&age) else {
            return false;
        };
        self.ages.remove(&turn.response.id);
        // An item may have been sent again since, and be a younger response's.
        for item in turn.input.iter().chain(&turn.response.output) {
            if let Entry::Occupied(entry) = self.items.entry((turn.owner, item.id().to_owned()))
                && *entry.get() == age
            {
                entry.remove();
            }
        }
        true
    }
}

/// Bytes of a value as JSON, which is about what it takes in memory.
fn size(value: &impl serde::Serialize) -> usize {
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
    // What was sent over the wire is JSON; counting cannot fail.
    serde_json::to_writer(&mut count, value).map_or(usize::MAX, |()| count.0)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::tests::{message, response};
    use super::*;

    const NOBODY: TenantId = TenantId(0);

    fn store(responses: usize, bytes: usize) -> ResponseStore {
        ResponseStore::new(StoreLimits { responses, bytes })
    }

    fn keep(store: &ResponseStore, id: &str, previous: Option<&str>, text: &str) {
        let previous = previous.map(|id| store.get(NOBODY, id).expect("kept"));
        store.keep(
            NOBODY,
            previous,
            vec![message(&format!("in_{id}"), text)],
            response(id, text),
        );
    }

    fn ids(items: &[&Item]) -> Vec<String> {
        items.iter().map(|item| item.id().to_owned()).collect()
    }

    #[test]
    fn the_oldest_leave_first_and_their_conversations_go_on() {
        let store = store(2, 1 << 20);
        keep(&store, "a", None, "one");
        keep(&store, "b", Some("a"), "two");
        keep(&store, "c", Some("b"), "three");
        assert!(store.get(NOBODY, "a").is_none());
        let last = store.get(NOBODY, "c").unwrap();
        assert_eq!(
            ids(&last.conversation()),
            ["in_a", "out_a", "in_b", "out_b", "in_c", "out_c"]
        );
        assert_eq!(ids(&last.given()), ["in_a", "out_a", "in_b", "out_b", "in_c"]);
        assert!(store.item(NOBODY, "out_a").is_none());
        assert_eq!(store.item(NOBODY, "in_c").unwrap().id(), "in_c");
    }

    #[test]
    fn bytes_are_bounded_also_by_long_conversations() {
        let store = store(1000, 50_000);
        let text = "x".repeat(1000);
        keep(&store, "0", None, &text);
        for i in 1..200 {
            let previous = (i - 1).to_string();
            let goes_on = store.get(NOBODY, &previous).is_some();
            keep(
                &store,
                &i.to_string(),
                goes_on.then_some(previous.as_str()),
                &text,
            );
            assert!(store.bytes.load(Ordering::Relaxed) <= 50_000);
        }
        keep(&store, "huge", None, &"x".repeat(50_000));
        assert!(store.get(NOBODY, "huge").is_none());
    }

    #[test]
    fn nothing_remains_of_what_is_deleted() {
        let store = store(10, 1 << 20);
        keep(&store, "a", None, "one");
        keep(&store, "b", Some("a"), "two");
        assert!(store.delete(NOBODY, "a"));
        assert!(!store.delete(NOBODY, "a"));
        assert_eq!(store.get(NOBODY, "b").unwrap().given().len(), 3);
        assert!(store.delete(NOBODY, "b"));
        assert_eq!(store.bytes.load(Ordering::Relaxed), 0);
        let kept = store.lock();
        assert!(kept.items.is_empty() && kept.ages.is_empty());
    }

    #[test]
    fn a_conversation_of_any_length_ends_without_recursion() {
        let store = store(1, 1 << 30);
        keep(&store, "0", None, "x");
        for i in 1..100_000 {
            keep(&store, &i.to_string(), Some(&(i - 1).to_string()), "x");
        }
        assert!(store.delete(NOBODY, "99999"));
        assert_eq!(store.bytes.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn owners_do_not_see_each_other() {
        let store = store(10, 1 << 20);
        let owner = TenantId(1);
        store.keep(
            owner,
            None,
            vec![message("in", "secret")],
            response("a", "secret"),
        );
        for other in [NOBODY, TenantId(2)] {
            assert!(store.get(other, "a").is_none());
            assert!(store.item(other, "in").is_none());
            assert!(!store.delete(other, "a"));
        }
        assert!(store.get(owner, "a").is_some());
        // An id that both chose is each one's own.
        store.keep(
            TenantId(2),
            None,
            vec![message("in", "other")],
            response("b", "other"),
        );
        let text = |owner| json!(store.item(owner, "in").unwrap())["content"][0]["text"].clone();
        assert_eq!(
            (text(owner), text(TenantId(2))),
            (json!("secret"), json!("other"))
        );
    }

    #[test]
    fn a_store_of_nothing_keeps_nothing() {
        let store = store(0, 1 << 20);
        keep(&store, "a", None, "one");
        assert!(!store.is_enabled() && store.get(NOBODY, "a").is_none());
    }
}
