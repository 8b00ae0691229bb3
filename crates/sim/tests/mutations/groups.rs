//! Bugs in the bookkeeping of several groups of layers.

use super::list::{Mutation, bug, edit};

const JOURNAL: &str = "kv/prefix/journal.rs";
const LAYOUT: &str = "core/cache_layout.rs";
const MANAGER: &str = "kv/manager.rs";
const POOL: &str = "kv/pool.rs";
const PREFIX: &str = "kv/prefix.rs";
const TABLE: &str = "kv/table.rs";

pub(crate) const GROUP_MUTATIONS: [Mutation; 22] = [
    bug(
        "a window ends a token early",
        &[edit(
            LAYOUT,
            "Self::Window(window) => «(position + 1).saturating_sub(window)»,",
            "(position + 2).saturating_sub(window)",
        )],
    ),
    bug(
        "a request holds no more of a window than a token sees",
        &[edit(LAYOUT, "window.saturating_add(«chunk.max(1)»)", "1")],
    ),
    bug(
        "blocks are returned that the next token sees",
        &[edit(
            MANAGER,
            "let first = group.first_block(self.config.block_size, «table.computed»);",
            "table.computed + 8",
        )],
    ),
    bug(
        "blocks behind a window are not returned",
        &[edit(MANAGER, "if «first > held.first» {", "false")],
    ),
    bug(
        "a table does not know where it begins",
        &[edit(MANAGER, "«held.first = first;»", "{}")],
    ),
    bug(
        "a hit takes the blocks of the first group for those of all",
        &[edit(MANAGER, "filter_map(|blocks| «blocks[index]»)", "blocks[0]")],
    ),
    bug(
        "a hit needs nothing of a window",
        &[edit(MANAGER, "whole &= «*row >= end - first»;", "true")],
    ),
    bug(
        "a hit needs no more of a window than its last block",
        &[edit(
            MANAGER,
            "whole &= «*row >= end - first»;",
            "*row >= (end - first).min(1)",
        )],
    ),
    bug(
        "a gap in a window is not seen",
        &[edit(
            MANAGER,
            "*row = if block.is_some() { *row + 1 } else { «0» };",
            "*row",
        )],
    ),
    bug(
        "room is made in the first group alone",
        &[edit(
            MANAGER,
            "let needed = «missing.sum()»;",
            "missing.take(1).sum::<usize>()",
        )],
    ),
    bug(
        "the pages of a block do not know each other",
        &[edit(
            MANAGER,
            "«self.pool.join(&table.pages[start..]);»",
            "let _ = start;",
        )],
    ),
    bug(
        "what is left of a block that was taken apart is lost",
        &[edit(POOL, "«self.heads.push_front(rest);»", "let _ = rest;")],
    ),
    bug(
        "a block that is wanted again counts as one page",
        &[edit(POOL, "self.available -= «self.pages(head).count()»;", "1")],
    ),
    bug(
        "a returned block counts as one page",
        &[edit(POOL, "self.available += «self.pages(head).count()»;", "1")],
    ),
    bug(
        "a node keeps a block that was evicted",
        &[edit(
            PREFIX,
            "let Some(block) = «node.blocks[group].take()»",
            "node.blocks[group]",
        )],
    ),
    bug(
        "blocks outlive their node",
        &[edit(
            PREFIX,
            "«self.node_of[block.index()] = None;»",
            "let _ = block;",
        )],
    ),
    bug(
        "nodes outlive their blocks",
        &[edit(PREFIX, "«self.prune(id);»", "let _ = id;")],
    ),
    bug(
        "a router hears of the first group alone",
        &[edit(
            PREFIX,
            "«journal.stored((group, content), node.before, node.name, held);»",
            "if group == 0 { journal.stored((group, content), node.before, node.name, held); }",
        )],
    ),
    bug(
        "a router takes blocks of one group for those of another",
        &[edit(JOURNAL, "if «*of == group» {", "{ let _ = of; true }")],
    ),
    bug(
        "a router takes evictions from one group for those from another",
        &[edit(JOURNAL, "if «*of == group» =>", "{ let _ = of; true }")],
    ),
    bug(
        "a shared block does not count as used",
        &[edit(MANAGER, "«*used += 1;»", "let _ = used;")],
    ),
    bug(
        "a table has one page for each block",
        &[edit(
            TABLE,
            "let pages = (blocks - table.first) * «group.pages_per_block»;",
            "{ let _ = group; 1 }",
        )],
    ),
];
