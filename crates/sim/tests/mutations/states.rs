//! Bugs in the bookkeeping of states and their snapshots.

use super::list::{Mutation, bug, edit};

const MANAGER: &str = "kv/manager.rs";
const PREFIX: &str = "kv/prefix.rs";
const SEQUENCE: &str = "scheduler/sequence.rs";
const SLOTS: &str = "kv/slots.rs";
const SNAPSHOTS: &str = "kv/prefix/snapshots.rs";
const STATES: &str = "kv/manager/states.rs";

pub(crate) const STATE_MUTATIONS: [Mutation; 21] = [
    bug(
        "a run of a prompt ends within a chunk where there is no room for the rest",
        &[edit(STATES, "true => «(end / unit * unit).max(start)»,", "end")],
    ),
    bug(
        "a run of a prompt goes on into an answer that is computed again",
        &[edit(STATES, "let end = «end.min(state.prompt)»;", "end")],
    ),
    bug(
        "an answer that is computed again counts as a part of the prompt",
        &[edit(
            SEQUENCE,
            "prompt: «self.request.prompt().len()»,",
            "usize::MAX",
        )],
    ),
    bug(
        "prompts are cut without regard to chunks of the recurrence",
        &[edit(
            STATES,
            "self.config.block_size.tokens().max(«self.state_chunk»)",
            "1",
        )],
    ),
    bug(
        "a state slot is not given back",
        &[edit(
            STATES,
            "«self.put_slot(state.own, Worth::Output);»",
            "let _ = state.own;",
        )],
    ),
    bug(
        "two requests get one state slot",
        &[edit(SLOTS, "«self.hold(slot);»", "{}")],
    ),
    bug(
        "a new cache has the slots that were free in the old one",
        &[edit(
            MANAGER,
            "«self.slots = Slots::new(config.state_slots);»\n    }\n\n    /// Empties",
            "{}",
        )],
    ),
    bug(
        "a run does not say where its state is",
        &[edit(
            SEQUENCE,
            "state: «kv.next_state(&mut self.table, end)»,",
            "None",
        )],
    ),
    bug(
        "prefixes are shared without the states behind them",
        &[edit(
            MANAGER,
            "if whole && «(next.state.is_some() || self.config.groups.state_layers() == 0)» {",
            "true",
        )],
    ),
    bug(
        "a request writes over the snapshot that it begins with",
        &[edit(
            STATES,
            "}));\n                «own»\n            }",
            "hit.unwrap_or(own)",
        )],
    ),
    bug(
        "a snapshot that a request begins with is given to another",
        &[edit(
            STATES,
            "if let Some(slot) = hit {\n            «self.slots.hold(slot);»",
            "let _ = slot;",
        )],
    ),
    bug(
        "a request goes on in a snapshot that others begin with",
        &[edit(STATES, "if «self.slots.references(slot) == 1» =>", "true")],
    ),
    bug(
        "a state is a snapshot before it is computed",
        &[edit(STATES, "«left.tokens == table.computed»", "true")],
    ),
    bug(
        "what is left behind goes back before the run that leaves it is computed",
        &[edit(
            STATES,
            "let stays = «left.tokens >= computed»;",
            "left.tokens > computed",
        )],
    ),
    bug(
        "the state of a run that was not computed is kept",
        &[edit(STATES, "«is_settled» && is_aligned", "true")],
    ),
    bug(
        "a state within a block is kept",
        &[edit(STATES, "is_settled && «is_aligned»", "true")],
    ),
    bug(
        "a snapshot stays in the cache when its slot is taken",
        &[edit(STATES, "«self.give_up(slot);»\n        Ok(slot)", "{}")],
    ),
    bug(
        "a snapshot outlives its block",
        &[edit(PREFIX, "«self.drop_state(slot);»", "let _ = slot;")],
    ),
    bug(
        "a router hears of prefixes that nothing hits",
        &[edit(
            SNAPSHOTS,
            "!self.tells_hits() || «self.nodes[id.index()].is_some_and(|node| node.hits > 0)»",
            "true",
        )],
    ),
    bug(
        "a router hears nothing of states",
        &[edit(
            SNAPSHOTS,
            "«journal.stored(group, node.before, node.name, self.content_of(id.index()));»",
            "let _ = (journal, group, node);",
        )],
    ),
    bug(
        "a router is not told that a prefix is hit no more",
        &[edit(SNAPSHOTS, "«self.withdraw(id);»", "let _ = id;")],
    ),
];
