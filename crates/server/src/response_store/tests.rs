use serde_json::json;

use super::*;
use crate::wire::responses::{
    ItemStatus, MessageItem, ReasoningConfig, ResponseStatus, TextConfig, ToolMode, Truncation,
};

/// A user message.
fn message(id: &str, text: &str) -> Item {
    Item::Message(MessageItem {
        id: id.to_owned(),
        status: ItemStatus::Completed,
        role: Role::User,
        content: vec![Part::InputText {
            text: text.to_owned(),
        }],
    })
}

/// A response that says `text`.
fn response(id: &str, text: &str) -> ResponseObject {
    ResponseObject {
        output: vec![message(&format!("out_{id}"), text)],
        ..empty(id)
    }
}

pub(crate) fn empty(id: &str) -> ResponseObject {
    ResponseObject {
        id: id.to_owned(),
        object: "response",
        created_at: 0,
        status: ResponseStatus::InProgress,
        background: false,
        completed_at: None,
        error: None,
        incomplete_details: None,
        instructions: None,
        max_output_tokens: None,
        max_tool_calls: None,
        model: "m".into(),
        output: Vec::new(),
        parallel_tool_calls: true,
        previous_response_id: None,
        prompt_cache_key: None,
        reasoning: ReasoningConfig::default(),
        safety_identifier: None,
        service_tier: "default",
        store: true,
        temperature: 1.0,
        text: TextConfig::default(),
        tool_choice: ToolChoice::Mode(ToolMode::Auto),
        tools: Vec::new(),
        top_logprobs: 0,
        top_p: 1.0,
        truncation: Truncation::Disabled,
        usage: None,
        user: None,
        metadata: Map::new(),
    }
}

const NOBODY: TenantId = TenantId(0);

fn store(responses: usize, bytes: usize) -> ResponseStore {
    ResponseStore::new(StoreLimits { responses, bytes })
}

fn keep(store: &ResponseStore, id: &str, previous: Option<&str>, text: &str) {
    let previous = previous.map(|id| store.get(NOBODY, id).expect("kept"));
    let input = vec![message(&format!("in_{id}"), text)];
    store.keep(NOBODY, previous, input, response(id, text));
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
    let store = store(1000, 100_000);
    let text = "x".repeat(1000);
    keep(&store, "0", None, &text);
    for i in 1..200 {
        let previous = (i - 1).to_string();
        let goes_on = store.get(NOBODY, &previous).is_some();
        let previous = goes_on.then_some(previous.as_str());
        keep(&store, &i.to_string(), previous, &text);
        assert!(store.bytes.load(Ordering::Relaxed) <= 100_000);
    }
    keep(&store, "huge", None, &"x".repeat(100_000));
    assert!(store.get(NOBODY, "huge").is_none());
}

#[test]
fn deleted_responses_leave_nothing() {
    let store = store(10, 1 << 20);
    keep(&store, "a", None, "one");
    keep(&store, "b", Some("a"), "two");
    assert!(store.delete(NOBODY, "a"));
    assert!(!store.delete(NOBODY, "a"));
    assert_eq!(store.get(NOBODY, "b").unwrap().given().len(), 3);
    assert!(store.delete(NOBODY, "b"));
    assert_eq!(store.bytes.load(Ordering::Relaxed), 0);
    let owners = store.owners.lock();
    assert!(owners[&NOBODY].items.is_empty() && owners[&NOBODY].ages.is_empty());
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
    let keep = |owner, id: &str, text: &str| {
        store.keep(owner, None, vec![message("in", text)], response(id, text));
    };
    keep(owner, "a", "secret");
    for other in [NOBODY, TenantId(2)] {
        assert!(store.get(other, "a").is_none());
        assert!(store.item(other, "in").is_none());
        assert!(!store.delete(other, "a"));
    }
    assert!(store.get(owner, "a").is_some());
    // Owners do not share ids; for one owner the first item with an id keeps it.
    keep(TenantId(2), "b", "other");
    keep(owner, "c", "later");
    let text = |owner| json!(store.item(owner, "in").unwrap())["content"][0]["text"].clone();
    assert_eq!(
        (text(owner), text(TenantId(2))),
        (json!("secret"), json!("other"))
    );
}

#[test]
fn the_largest_owner_is_evicted_first() {
    let (alice, bob) = (TenantId(1), TenantId(2));
    let keep = |store: &ResponseStore, owner, id: &str, text: &str| {
        let input = vec![message(&format!("in_{id}"), text)];
        store.keep(owner, None, input, response(id, text));
    };
    let by_count = store(10, 1 << 30);
    keep(&by_count, alice, "a", "x");
    (0..60).for_each(|i| keep(&by_count, bob, &i.to_string(), "x"));
    assert!(by_count.get(alice, "a").is_some() && by_count.get(bob, "59").is_some());
    assert!(by_count.get(bob, "50").is_none());
    let by_bytes = store(1000, 1 << 20);
    keep(&by_bytes, alice, "a", &"x".repeat(100_000));
    (0..60).for_each(|i| keep(&by_bytes, bob, &i.to_string(), &"x".repeat(50_000)));
    assert!(by_bytes.get(alice, "a").is_some() && by_bytes.get(bob, "59").is_some());
    assert!(by_bytes.bytes.load(Ordering::Relaxed) <= 1 << 20);
}

#[test]
fn small_json_values_count_their_memory() {
    let store = store(1000, 1 << 20);
    let tools = vec![json!({ "type": "function", "name": "f", "parameters": { "enum": vec![0; 100_000] } })];
    let json = json_bytes(&tools);
    let large = ResponseObject {
        tools,
        ..response("a", "x")
    };
    assert!(json < 1 << 18);
    store.keep(NOBODY, None, Vec::new(), large);
    assert!(store.get(NOBODY, "a").is_none(), "{json} bytes take megabytes");
}

#[test]
fn the_end_of_a_conversation_is_whole_turns() {
    let store = store(10, 1 << 20);
    let mut rules = message("rules", "be brief");
    if let Item::Message(message) = &mut rules {
        message.role = Role::Developer;
    }
    let input = vec![rules, message("in_a", "one")];
    store.keep(NOBODY, None, input, response("a", &"x".repeat(1000)));
    keep(&store, "b", Some("a"), "two");
    keep(&store, "c", Some("b"), "three");
    let last = store.get(NOBODY, "c").unwrap();
    let all = last.text_bytes();
    assert!((1000..1200).contains(&all));
    let kept = |most| ids(&last.end_of_conversation(most));
    assert_eq!(kept(500), ["rules", "in_b", "out_b", "in_c", "out_c"]);
    assert_eq!(kept(80), ["rules", "in_c", "out_c"]);
    assert_eq!(kept(30), ["rules"]);
    assert!(kept(10).is_empty());
}

#[test]
fn a_store_of_nothing_keeps_nothing() {
    let store = store(0, 1 << 20);
    keep(&store, "a", None, "one");
    assert!(!store.is_enabled() && store.get(NOBODY, "a").is_none());
}
